"""gpt-oss: attention sinks, a window in every other layer, biases everywhere, and experts with clamped SwiGLU.

Folders keep the experts' gate and up in one tensor, row by row in turn, and a matrix as [in, out] unless it is MXFP4.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ostinato.errors import Unsupported
from ostinato.models import rope as ropes
from ostinato.models.experts import experts_from_gguf
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.shape import (
    ExpertShape,
    Shape,
    common_from_config,
    common_from_gguf,
    sliding_from_config,
    sliding_from_gguf,
)
from ostinato.models.tensors import AS_IT_IS, SWAPPED, Transform

GLOBAL_EVERY = 2
LIMIT, ALPHA = 7.0, 1.702  # of clamped SwiGLU


def shape_from_gguf(f: Description) -> Shape:
    shape = common_from_gguf(f)
    sliding = sliding_from_gguf(f, shape.n_layers, GLOBAL_EVERY)
    experts = experts_from_gguf(f, shape.n_layers, renormalise=True)
    return with_sinks(shape, sliding, f.integer("attention.sliding_window"), experts)


def shape_from_config(c: Description) -> Shape:
    if (c.number("swiglu_limit", LIMIT), c.number("swiglu_alpha", ALPHA)) != (LIMIT, ALPHA):
        raise Unsupported(f"{c.path}: clamped SwiGLU with other numbers than {LIMIT} and {ALPHA} is not supported")
    if not c.flag("attention_bias", True):
        raise Unsupported(f"{c.path}: attention_bias is false; gpt-oss without biases is not supported")
    shape = common_from_config(c)
    rope = ropes.from_config(c, c.integer("head_dim"), default_base=150_000.0)
    width, sliding = c.integer("intermediate_size"), sliding_from_config(c, shape.n_layers, GLOBAL_EVERY)
    n_experts, n_used = c.integer("num_local_experts"), c.integer("num_experts_per_tok", 4)
    experts = ExpertShape(n_experts, n_used, width, renormalise=True)
    return with_sinks(shape.with_attention(rope=rope), sliding, c.integer("sliding_window"), experts)


def with_sinks(shape: Shape, sliding: Sequence[bool], window: int, experts: ExpertShape) -> Shape:
    """The shape with all that this family has besides its sizes."""
    windows = tuple(window if one else None for one in sliding)
    shape = shape.with_attention(window=windows, sinks=True)
    return replace(shape, attention_bias=True, activation="clamped_swiglu", experts=replace(experts, bias=True))


def _gate_then_up(n: int) -> NDArray[np.intp]:
    """Of rows that are gate's and up's in turn, which are gate's and then which are up's."""
    return np.concatenate((np.arange(0, n, 2), np.arange(1, n, 2)))


def _in_turn(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Gate and up [n, 2 * ff, ...] in turn become gate, then up."""
    return np.concatenate((rows[:, ::2], rows[:, 1::2]), 1)


# What a config.json may leave out.
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}

GPT_OSS = Family(
    "gpt-oss",
    hf=("GptOssForCausalLM",),
    config_defaults={"rms_norm_eps": 1e-5, "rope_parameters": ROPE},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={
        **COMMON_NAMES,
        "model.layers.*.self_attn.sinks": "blk.*.attn_sinks.weight",
        "model.layers.*.mlp.router": "blk.*.ffn_gate_inp",
        "model.layers.*.mlp.experts.gate_up_proj": "blk.*.ffn_gate_up_exps.weight",
        "model.layers.*.mlp.experts.gate_up_proj_bias": "blk.*.ffn_gate_up_exps.bias",
        "model.layers.*.mlp.experts.down_proj": "blk.*.ffn_down_exps.weight",
        "model.layers.*.mlp.experts.down_proj_bias": "blk.*.ffn_down_exps.bias",
    },
    gguf_names={"blk.*.post_attention_norm": "blk.*.ffn_norm"},
    config_transforms={
        "ffn_gate_up_exps.weight": Transform(
            SWAPPED.shape,
            lambda stored: _in_turn(stored.swapaxes(1, 2)),
            quantised=Transform(rows=_gate_then_up),
        ),
        "ffn_gate_up_exps.bias": Transform(values=_in_turn),
        "ffn_down_exps.weight": replace(SWAPPED, quantised=AS_IT_IS),
    },
)
