"""gpt2: layer norms with bias, learned positions, a plain feed-forward block with GELU, everything with a bias.

Safetensors keep its matrices as [in, out], GGUF as [out, in].
"""

from dataclasses import replace
from functools import partial

from ostinato.models.blocks import Layer
from ostinato.models.builder import Builder
from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.shape import Shape, activation_from_config, common_from_gguf, everywhere, limited
from ostinato.models.tensors import TRANSPOSED


def shape_from_gguf(f: Description) -> Shape:
    shape = common_from_gguf(f)
    without_rope = everywhere(None, shape.n_layers)
    return replace(shape, ropes=without_rope, activation="gelu_tanh", attention_bias=True, mlp_bias=True)


def shape_from_config(c: Description) -> Shape:
    hidden, n_heads, n_layers = c.integer("n_embd"), c.integer("n_head"), limited(c.integer("n_layer"), c)
    head_width = max(1, hidden // n_heads)
    return Shape(
        family=c.family,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_width=head_width,
        ff_width=c.integer("n_inner", 4 * hidden),
        vocab=c.integer("vocab_size"),
        context=c.integer("n_positions", 1024),
        norm_eps=c.positive("layer_norm_epsilon", 1e-5),
        ropes=everywhere(None, n_layers),
        windows=everywhere(None, n_layers),
        query_scale=head_width**-0.5,
        activation=activation_from_config(c) if c.has("activation_function") else "gelu_tanh",
        attention_bias=True,
        mlp_bias=True,
        tied_head=c.flag("tie_word_embeddings", True),
    )


def layer(b: Builder, i: int) -> Layer:
    return b.layer(i, b.attention(i, fused=True), b.plain_mlp(i), norm_bias=True)


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
    layer,
    gguf="gpt2",
    hf=("GPT2LMHeadModel",),
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    # The first published files have no `transformer.` before their names.
    names={**STEMS, **{f"transformer.{stem}": ours for stem, ours in STEMS.items()}, "lm_head": "output"},
    config_transforms={f"{name}.weight": TRANSPOSED for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")},
    model=partial(Builder.model, norm_bias=True, learned_positions=True),
)
