"""granitehybrid: a mamba2 block in most layers, attention in the others, a gated MLP in all of them, with or without
experts beside it; granite's factors.

Attention has no positions unless a file says so. bamba is the same with rotary positions and without factors; in GGUF
it goes by this name.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ostinato.models import rope as ropes
from ostinato.models.blocks import MLP, AnyLayer, ModelBlocks
from ostinato.models.builder import Builder
from ostinato.models.experts import experts_from_gguf
from ostinato.models.falcon_h1 import mamba2_from_config
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.granite import MOE_NAMES, multiplied_by_config, multiplied_by_gguf, with_experts
from ostinato.models.mamba import CONFIG_TRANSFORMS, GGUF_TRANSFORMS, mamba2_block_from_gguf, mixer2_names
from ostinato.models.shape import (
    ExpertShape,
    Shape,
    common_from_config,
    common_from_gguf,
    layer_types,
    only_silu,
    with_biases,
)

RECURRENT = ("mamba", "linear_attention")  # an older name and a newer one


def shape_from_gguf(f: Description) -> Shape:
    shape = multiplied_by_gguf(with_biases(common_from_gguf(f, "neighbours"), f), f)
    if not f.flag("rope.scaling.finetuned", True):  # what their files say it with
        shape = shape.with_attention(rope=None)
    if f.integer("expert_count", 0, least=0):
        known = {"ff_width": shape.widest_ff, "renormalise": True}
        shape = with_experts(shape, experts_from_gguf(f, shape.n_layers, **known))
    recurs = {i for i, one in enumerate(shape.layers) if one.attention is None}
    return shape.with_recurrent_in(recurs, replace(mamba2_block_from_gguf(f), gated_norm=True))


def shape_from_config(c: Description) -> Shape:
    only_silu(c, "mamba blocks")
    mamba2 = mamba2_from_config(c, c.integer("hidden_size"))
    mamba2 = replace(mamba2, out_bias=mamba2.in_bias, gated_norm=True, norm_first=False)
    if c.checkpoint.architecture == "BambaForCausalLM":
        shape = common_from_config(c)
        width = shape.widest(lambda one: one.head_width)
        shape = shape.with_attention(rope=ropes.from_config(c, width, rotary_share=0.5))
        attends = set(c.layer_numbers("attn_layer_indices", shape.n_layers))
        return shape.with_recurrent_in(set(range(shape.n_layers)) - attends, mamba2)
    shape = multiplied_by_config(common_from_config(c), c)
    shared = c.integer("shared_intermediate_size", 1024, least=0)
    if n_experts := c.integer("num_local_experts", 8, least=0):
        n_used = c.integer("num_experts_per_tok", 2)
        experts = ExpertShape(n_experts, n_used, shape.widest_ff, renormalise=True, shared_width=shared)
        shape = with_experts(shape, experts)
    shape = shape.with_layers(ff_width=shared)
    if c.raw("position_embedding_type") != "rope":
        shape = shape.with_attention(rope=None)
    kinds = layer_types(c, shape.n_layers, (*RECURRENT, "attention", "full_attention"))
    return shape.with_recurrent_in({i for i, kind in enumerate(kinds) if kind in RECURRENT}, mamba2)


def mlp(b: Builder, i: int) -> MLP:
    fused = "ffn_gate_up_shexp"
    if b.shape.experts is None and b.names.has(f"blk.{i}.{fused}.weight"):
        return b.gated_mlp(i, fused=fused, suffix="_shexp")  # a folder of granite has the shared block alone
    return b.mlp(i)


def model(b: Builder, layers: Sequence[AnyLayer]) -> ModelBlocks:
    """Folders without a shared block have its tensors, without a row."""
    made, ends = b.model(layers), ("ffn_gate_up_shexp.weight", "ffn_down_shexp.weight")
    names = [f"blk.{i}.{end}" for i in range(b.shape.n_layers) for end in ends]
    empty = not any(b.names.rows(name) for name in names[::2] if b.names.has(name))
    without = b.shape.experts is not None and not b.shape.experts.shared_width
    return replace(made, spare=made.spare | {*names}) if without and empty else made


GRANITE_HYBRID = Family(
    "granitehybrid",
    partial(Builder.layer, mlp=mlp),
    hf=("GraniteMoeHybridForCausalLM", "BambaForCausalLM"),
    kind_defaults={"BambaForCausalLM": {"rms_norm_eps": 1e-5}},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={
        **COMMON_NAMES,
        **mixer2_names("model.layers.*.mamba"),
        **MOE_NAMES,
        # bamba's
        "model.final_layernorm": "output_norm",
        "model.layers.*.pre_ff_layernorm": "blk.*.ffn_norm",
        "model.layers.*.feed_forward.gate_proj": "blk.*.ffn_gate",
        "model.layers.*.feed_forward.up_proj": "blk.*.ffn_up",
        "model.layers.*.feed_forward.down_proj": "blk.*.ffn_down",
    },
    gguf_transforms=GGUF_TRANSFORMS,
    config_transforms=CONFIG_TRANSFORMS,
    model=model,
)
