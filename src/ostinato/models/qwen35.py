"""qwen35, qwen35moe and qwen3next: three layers with a gated delta net, then one with attention, whose output has a
gate; in each a gated MLP, or experts beside a shared block with a gate.

Rotary positions turn a quarter of a head, in sections for time, height and width of a picture; in a text the three are
one position. Safetensors keep norms as their distance from 1, but for the delta net's own.
Value heads that share a key head stand side by side; in GGUF files of qwen35 they stand a number of key heads apart.
qwen3next keeps what goes into a delta net by key heads, all parts of one before those of the next.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ostinato.errors import BadFile
from ostinato.models import rope as ropes
from ostinato.models.builder import Builder
from ostinato.models.experts import EXPERT_NAMES, count_from_config, dense_layers, experts_from_gguf, shared_names
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description, Fields
from ostinato.models.shape import (
    DeltaShape,
    ExpertShape,
    Shape,
    common_from_config,
    common_from_gguf,
    layer_types,
    only_silu,
    sectioned,
)
from ostinato.models.tensors import CHANNELS, MINUS_EXP, PLUS_ONE, ROW, Transform

ATTENDS_EVERY = 4
ROTARY_SHARE = 0.25


def shape_from_gguf(f: Description, *, tiled: bool = True) -> Shape:
    shape = common_from_gguf(f).with_attention(gated=True)
    every = f.integer("full_attention_interval", ATTENDS_EVERY)
    return shape.with_recurrent_in(recurrent_layers(shape.n_layers, every), delta_from_gguf(f, tiled=tiled))


def moe_from_gguf(f: Description, *, tiled: bool = True) -> Shape:
    # Their converter states no width of a feed-forward block that no layer has.
    f = replace(f, values={f"{f.prefix}feed_forward_length": 0, **f.values})
    shape = shape_from_gguf(f, tiled=tiled)
    return replace(shape, experts=experts_from_gguf(f, shape.n_layers, renormalise=True, shared_gate=True))


def delta_from_gguf(f: Description, *, tiled: bool) -> DeltaShape:
    inner, n_heads = f.integer("ssm.inner_size"), f.integer("ssm.time_step_rank")
    delta = DeltaShape(
        n_heads=n_heads,
        n_key_heads=f.integer("ssm.group_count"),
        key_width=f.integer("ssm.state_size"),
        value_width=max(1, inner // n_heads),
        kernel=f.integer("ssm.conv_kernel", least=2),
        tiled=tiled,
    )
    if delta.inner != inner:
        raise BadFile(f"{f.path}: {inner} channels in {n_heads} value heads do not come out even")
    return divided(delta, f)


def shape_from_config(c: Description) -> Shape:
    only_silu(c, "gated delta nets")  # their convolution has the activation function of the feed-forward block
    shape = common_from_config(c)
    head_width = c.integer("head_dim", 256)
    rope = ropes.from_config(c, head_width, rotary_share=ROTARY_SHARE)
    shape = shape.with_attention(
        head_width=head_width, value_width=head_width, query_scale=head_width**-0.5, rope=rope, gated=True
    )
    if c.has("layer_types"):
        kinds = layer_types(c, shape.n_layers, ("linear_attention", "full_attention"))
        recurs = {i for i, kind in enumerate(kinds) if kind == "linear_attention"}
    else:
        recurs = recurrent_layers(shape.n_layers, c.integer("full_attention_interval", ATTENDS_EVERY))
    return shape.with_recurrent_in(recurs, delta_from_config(c))


def moe_from_config(c: Description) -> Shape:
    shape = shape_from_config(replace(c, values={"intermediate_size": 1, **c.values}))  # of no layer, so not stated
    experts = ExpertShape(
        count_from_config(c, 256),
        c.integer("num_experts_per_tok", 8),
        c.integer("moe_intermediate_size", 512),
        renormalise=c.flag("norm_topk_prob", True),
        dense_layers=dense_layers(c, shape.n_layers),
        shared_width=c.integer("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    return replace(shape, experts=experts)


def delta_from_config(c: Description) -> DeltaShape:
    delta = DeltaShape(
        n_heads=c.integer("linear_num_value_heads", 32),
        n_key_heads=c.integer("linear_num_key_heads", 16),
        key_width=c.integer("linear_key_head_dim", 128),
        value_width=c.integer("linear_value_head_dim", 128),
        kernel=c.integer("linear_conv_kernel_dim", 4, least=2),
    )
    return divided(delta, c)


def recurrent_layers(n_layers: int, attends_every: int) -> set[int]:
    return {i for i in range(n_layers) if (i + 1) % attends_every}


def divided(delta: DeltaShape, f: Fields) -> DeltaShape:
    """The shape, where its key heads can be shared evenly."""
    if delta.n_heads % delta.n_key_heads:
        raise BadFile(f"{f.path}: {delta.n_heads} value heads cannot share {delta.n_key_heads} key heads evenly")
    return delta


def by_key_heads(shape: Shape) -> dict[str, Transform]:
    """Of tensors whose rows stand by key heads: all parts of one before those of the next."""
    delta = next((one for one in shape.recurrent.values() if isinstance(one, DeltaShape)), None)
    if delta is None:
        return {}
    keys, values, heads = delta.key_width, delta.inner // delta.n_key_heads, delta.n_heads // delta.n_key_heads
    both = {"ssm_in.weight": (keys, keys, values, values), "ssm_ba.weight": (heads, heads)}
    return {name: _apart(delta.n_key_heads, parts) for name, parts in both.items()}


def _apart(n_groups: int, parts: tuple[int, ...]) -> Transform:
    """Rows that stand by groups, as each part of all groups before the next part."""

    def values(stored: NDArray[np.float32]) -> NDArray[np.float32]:
        # The order is made here, where the tensor is known to have that many rows.
        rows = np.arange(len(stored)).reshape(n_groups, -1)
        apart: NDArray[np.intp] = np.concatenate([p.ravel() for p in np.split(rows, np.cumsum(parts)[:-1], axis=1)])
        ordered: NDArray[np.float32] = stored[apart]
        return ordered

    return Transform(values=values)


def delta_names(at: str) -> dict[str, str]:
    """The tensors of a gated delta net, under the stem that a family gives it."""
    return {
        f"{at}.in_proj_qkv": "blk.*.attn_qkv",
        f"{at}.in_proj_z": "blk.*.attn_gate",
        f"{at}.in_proj_b": "blk.*.ssm_beta",
        f"{at}.in_proj_a": "blk.*.ssm_alpha",
        f"{at}.conv1d": "blk.*.ssm_conv1d",
        f"{at}.A_log": "blk.*.ssm_a",
        f"{at}.dt_bias": "blk.*.ssm_dt.bias",
        f"{at}.norm": "blk.*.ssm_norm",
        f"{at}.out_proj": "blk.*.ssm_out",
    }


NORMS = ("output_norm", "attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm")
NAMES = {**COMMON_NAMES, **delta_names("model.layers.*.linear_attn")}
MOE_NAMES = {
    **NAMES,
    **EXPERT_NAMES,
    **shared_names("shared_expert"),
    "model.layers.*.mlp.shared_expert_gate": "blk.*.ffn_gate_inp_shexp",
    # As they were published: all experts in one tensor.
    "model.layers.*.mlp.experts.gate_up_proj": "blk.*.ffn_gate_up_exps.weight",
    "model.layers.*.mlp.experts.down_proj": "blk.*.ffn_down_exps.weight",
}
LAYER = partial(Builder.layer, qk_norm=True)
GGUF_NAMES = {"blk.*.post_attention_norm": "blk.*.ffn_norm"}
GGUF_TRANSFORMS: Mapping[str, Transform] = {"ffn_gate_inp_shexp.weight": ROW}
CONFIG_TRANSFORMS = {
    "ssm_a": MINUS_EXP,
    "ssm_conv1d.weight": CHANNELS,
    **{f"{name}.weight": PLUS_ONE for name in NORMS},
}

QWEN35 = Family(
    "qwen35",
    LAYER,
    hf=("Qwen3_5ForCausalLM",),
    text_types=("qwen3_5_text",),
    shape_from_gguf=sectioned(shape_from_gguf),
    shape_from_config=sectioned(shape_from_config),
    names=NAMES,
    gguf_names=GGUF_NAMES,
    config_transforms=CONFIG_TRANSFORMS,
)

QWEN35_MOE = Family(
    "qwen35moe",
    LAYER,
    hf=("Qwen3_5MoeForCausalLM",),
    text_types=("qwen3_5_moe_text",),
    config_defaults={"num_key_value_heads": 2},
    shape_from_gguf=sectioned(moe_from_gguf),
    shape_from_config=sectioned(moe_from_config),
    names=MOE_NAMES,
    gguf_names=GGUF_NAMES,
    gguf_transforms=GGUF_TRANSFORMS,
    config_transforms=CONFIG_TRANSFORMS,
)

QWEN3_NEXT = Family(
    "qwen3next",
    LAYER,
    hf=("Qwen3NextForCausalLM",),
    config_defaults={"intermediate_size": 5632, "num_experts": 512, "num_key_value_heads": 2},
    shape_from_gguf=partial(moe_from_gguf, tiled=False),
    shape_from_config=moe_from_config,
    names={
        **MOE_NAMES,
        "model.layers.*.linear_attn.in_proj_qkvz": "blk.*.ssm_in",
        "model.layers.*.linear_attn.in_proj_ba": "blk.*.ssm_ba",
    },
    gguf_names=GGUF_NAMES,
    gguf_transforms=GGUF_TRANSFORMS,
    config_transforms=CONFIG_TRANSFORMS,
    shape_transforms=by_key_heads,
    gguf_shape_transforms=by_key_heads,
)
