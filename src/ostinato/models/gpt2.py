"""gpt2: layer norms with bias, learned positions, a plain feed-forward block with GELU, everything with a bias.

Safetensors keep its matrices as [in, out], GGUF as [out, in].
"""

from collections.abc import Callable
from dataclasses import replace

from ostinato.files.checkpoint import Checkpoint
from ostinato.models.blocks import AnyLayer, Layer, ModelBlocks
from ostinato.models.builder import Builder
from ostinato.models.family import Family
from ostinato.models.fields import Fields
from ostinato.models.shape import (
    Shape,
    activation_from_config,
    checked,
    common_from_gguf,
    everywhere,
    limited,
)
from ostinato.models.tensors import TRANSPOSED


def shape_from_gguf(checkpoint: Checkpoint) -> Shape:
    shape = common_from_gguf(checkpoint, "gpt2", "halves")
    return replace(
        shape,
        ropes=everywhere(None, shape.n_layers),
        activation="gelu_tanh",
        attention_bias=True,
        mlp_bias=True,
    )


def shape_from_config(checkpoint: Checkpoint) -> Shape:
    c = Fields(checkpoint.metadata, checkpoint.path)
    hidden, n_heads, n_layers = c.integer("n_embd"), c.integer("n_head"), limited(c.integer("n_layer"), c)
    head_width = max(1, hidden // n_heads)
    shape = Shape(
        family="gpt2",
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
    return checked(shape, checkpoint)


def layer(b: Builder, i: int) -> Layer:
    return Layer(
        attention_norm=b.norm(f"blk.{i}.attn_norm", bias=True),
        attention=b.attention(i, fused=True),
        mlp_norm=b.norm(f"blk.{i}.ffn_norm", bias=True),
        mlp=b.plain_mlp(i),
    )


def build(b: Builder, layer: Callable[[Builder, int], AnyLayer]) -> ModelBlocks:
    positions = b.tensor("position_embd.weight", b.shape.context, b.shape.hidden)
    layers = [layer(b, i) for i in range(b.shape.n_layers)]
    return b.model(layers, b.norm("output_norm", bias=True), positions=positions)


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
    build=build,
)
