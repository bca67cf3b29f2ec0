"""gpt2: layer norms with bias, learned positions, a plain feed-forward block with GELU, everything with a bias.

Safetensors keep its matrices as [in, out], GGUF as [out, in].
"""

from dataclasses import replace
from functools import partial

from ostinato.errors import Unsupported
from ostinato.models.builder import Builder
from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.shape import Shape, activation_from_config, alike, common_from_gguf, limited
from ostinato.models.tensors import TRANSPOSED


def shape_from_gguf(f: Description) -> Shape:
    shape = common_from_gguf(f).with_attention(rope=None)
    return replace(shape, activation="gelu_tanh", attention_bias=True, mlp_bias=True)


def shape_from_config(c: Description) -> Shape:
    if c.flag("scale_attn_by_inverse_layer_idx", False) or not c.flag("scale_attn_weights", True):
        raise Unsupported(f"{c.path}: scores scaled by the number of the layer, or not at all, are not supported")
    hidden, n_heads = c.integer("n_embd"), c.integer("n_head")
    return alike(
        c.family,
        rope=None,
        n_layers=limited(c.integer("n_layer"), c),
        hidden=hidden,
        n_heads=n_heads,
        ff_width=c.integer("n_inner", 4 * hidden),
        vocab=c.integer("vocab_size"),
        context=c.integer("n_positions", 1024),
        norm_eps=c.positive("layer_norm_epsilon", 1e-5),
        activation=activation_from_config(c, c.word("activation_function", "gelu_new")),
        attention_bias=True,
        mlp_bias=True,
        tied_head=c.flag("tie_word_embeddings", True),
    )


STEMS = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "h.*.ln_1": "blk.*.attn_norm",
    "h.*.attn.c_attn": "blk.*.attn_qkv",
    "h.*.attn.c_proj": "blk.*.attn_output",
    "h.*.ln_2": "blk.*.ffn_norm",
    "h.*.mlp.c_fc": "blk.*.ffn_up",
    "h.*.mlp.c_proj": "blk.*.ffn_down",
}

GPT2 = Family(
    "gpt2",
    partial(Builder.layer, fused=True, mlp=Builder.plain_mlp, norm_bias=True),
    hf=("GPT2LMHeadModel",),
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    # The first published files have no `transformer.` before their names.
    names={**STEMS, **{f"transformer.{stem}": ours for stem, ours in STEMS.items()}, "lm_head": "output"},
    config_transforms={f"{name}.weight": TRANSPOSED for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")},
    model=partial(Builder.model, norm_bias=True, learned_positions=True),
)
