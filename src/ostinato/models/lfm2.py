"""lfm2 and lfm2moe: a gated short convolution in most layers, attention with QK norm in the others; a gated MLP in all
of them, or experts chosen by sigmoids after the first layers."""

from dataclasses import replace
from functools import partial

from ostinato.models import rope as ropes
from ostinato.models.builder import Builder
from ostinato.models.experts import count_from_config, experts_from_gguf
from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.shape import (
    ExpertShape,
    Shape,
    ShortConvShape,
    common_from_config,
    common_from_gguf,
    layer_types,
)
from ostinato.models.tensors import CHANNELS

BASE = 1_000_000.0
SUM_EPSILON = 1e-6  # of the sum of shares


def shape_from_gguf(f: Description) -> Shape:
    shape = common_from_gguf(f)  # layers without key heads do not attend
    bias = any(name.endswith("shortconv.in_proj.bias") for name in f.tensors)
    conv = ShortConvShape(width=shape.hidden, kernel=f.integer("shortconv.l_cache", least=2), bias=bias)
    return shape.with_recurrent_in({i for i, layer in enumerate(shape.layers) if layer.attention is None}, conv)


def moe_from_gguf(f: Description) -> Shape:
    shape = shape_from_gguf(f)
    biased = any(name.endswith(".exp_probs_b.bias") for name in f.tensors)
    known = {"renormalise": True, "choice_bias": biased, "sum_epsilon": SUM_EPSILON}
    return replace(shape, experts=experts_from_gguf(f, shape.n_layers, **known))


def shape_from_config(c: Description) -> Shape:
    return hybrid_from_config(c).with_layers(ff_width=ff_width_from_config(c))


def moe_from_config(c: Description) -> Shape:
    shape = hybrid_from_config(c)
    experts = ExpertShape(
        count_from_config(c, 32),
        c.integer("num_experts_per_tok", 4),
        c.integer("moe_intermediate_size", 1792),
        renormalise=c.flag("norm_topk_prob", True),
        dense_layers=frozenset(range(min(shape.n_layers, c.integer("num_dense_layers", 2, least=0)))),
        scoring="sigmoid",
        choice_bias=c.flag("use_expert_bias", True),
        sum_epsilon=SUM_EPSILON,
        share_scale=c.positive("routed_scaling_factor", 1.0),
    )
    return replace(shape, experts=experts)


def hybrid_from_config(c: Description) -> Shape:
    shape = common_from_config(c, ff_key=_ff_key(c))
    conv = ShortConvShape(
        width=shape.hidden, kernel=c.integer("conv_L_cache", 3, least=2), bias=c.flag("conv_bias", False)
    )
    shape = shape.with_attention(rope=ropes.from_config(c, shape.widest(lambda one: one.head_width), default_base=BASE))
    return replace(
        shape.with_recurrent_in(convolved_layers(c, shape.n_layers), conv),
        activation="silu",  # of all models; no file need state it
        norm_eps=c.positive("norm_eps", 1e-5),
        tied_head=c.flag("tie_word_embeddings", c.flag("tie_embedding", True)),
    )


def convolved_layers(c: Description, n_layers: int) -> set[int]:
    """From layer_types, or in the first files from the list of all others."""
    if c.has("layer_types"):
        kinds = layer_types(c, n_layers, ("conv", "full_attention"))
        return {i for i, kind in enumerate(kinds) if kind == "conv"}
    return set(range(n_layers)) - set(c.layer_numbers("full_attn_idxs", n_layers))


def _ff_key(c: Description) -> str:
    return "block_ff_dim" if c.has("block_ff_dim") else "intermediate_size"  # the first files have no other


def ff_width_from_config(c: Description) -> int:
    """The stated width is that of a block without a gate, unless it is said to be exact."""
    width = c.integer(_ff_key(c))
    if not c.flag("block_auto_adjust_ff_dim", True):
        return width
    multiple = c.integer("block_multiple_of", 256)
    return -(-int(c.positive("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3)) // multiple) * multiple


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.embedding_norm": "output_norm",
    "lm_head": "output",
    "model.layers.*.operator_norm": "blk.*.attn_norm",
    "model.layers.*.self_attn.q_proj": "blk.*.attn_q",
    "model.layers.*.self_attn.k_proj": "blk.*.attn_k",
    "model.layers.*.self_attn.v_proj": "blk.*.attn_v",
    "model.layers.*.self_attn.out_proj": "blk.*.attn_output",
    "model.layers.*.self_attn.q_layernorm": "blk.*.attn_q_norm",
    "model.layers.*.self_attn.k_layernorm": "blk.*.attn_k_norm",
    "model.layers.*.conv.in_proj": "blk.*.shortconv.in_proj",
    "model.layers.*.conv.conv": "blk.*.shortconv.conv",
    "model.layers.*.conv.out_proj": "blk.*.shortconv.out_proj",
    "model.layers.*.ffn_norm": "blk.*.ffn_norm",
    "model.layers.*.feed_forward.w1": "blk.*.ffn_gate",
    "model.layers.*.feed_forward.w3": "blk.*.ffn_up",
    "model.layers.*.feed_forward.w2": "blk.*.ffn_down",
}
EXPERT_NAMES = {
    "model.layers.*.feed_forward.gate": "blk.*.ffn_gate_inp",
    "model.layers.*.feed_forward.expert_bias": "blk.*.exp_probs_b.bias",
    "model.layers.*.feed_forward.experts.*.w1": "blk.*.ffn_gate.*",
    "model.layers.*.feed_forward.experts.*.w3": "blk.*.ffn_up.*",
    "model.layers.*.feed_forward.experts.*.w2": "blk.*.ffn_down.*",
}
LAYER = partial(Builder.layer, qk_norm=True)
GGUF_NAMES = {"token_embd_norm": "output_norm"}  # their name for the norm after the last layer
CONFIG_TRANSFORMS = {"shortconv.conv.weight": CHANNELS}

LFM2 = Family(
    "lfm2",
    LAYER,
    hf=("Lfm2ForCausalLM",),
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names=NAMES,
    gguf_names=GGUF_NAMES,
    config_transforms=CONFIG_TRANSFORMS,
)

LFM2_MOE = Family(
    "lfm2moe",
    LAYER,
    hf=("Lfm2MoeForCausalLM",),
    shape_from_gguf=moe_from_gguf,
    shape_from_config=moe_from_config,
    names={**NAMES, **EXPERT_NAMES},
    gguf_names=GGUF_NAMES,
    config_transforms=CONFIG_TRANSFORMS,
)
