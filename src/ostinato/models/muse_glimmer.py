"""muse-glimmer: norms before and after each block, those after it with an epsilon of their own, and one behind the
embedding; norms of query and key heads without weights, and a sigmoid gate on attention's output. Three of four layers
see a window; the others see everything, and have no rotary positions.
"""

from dataclasses import replace

from ostinato.errors import BadFile
from ostinato.models.blocks import Attention, Layer
from ostinato.models.builder import Builder
from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.gemma import NAMES
from ostinato.models.shape import (
    Multipliers,
    Shape,
    by_window,
    common_from_config,
    common_from_gguf,
    sliding_from_config,
    sliding_from_gguf,
)
from ostinato.models.tensors import PLUS_ONE

GLOBAL_EVERY, AFTER_EPS = 4, 1e-8  # the second is not stated in GGUF


def shape_from_gguf(f: Description) -> Shape:
    shape = common_from_gguf(f, "neighbours")
    sliding, window = sliding_from_gguf(f, shape.n_layers, GLOBAL_EVERY), f.integer("attention.sliding_window")
    shape = by_window(shape, sliding, window, local=shape.rope_kinds[0], whole=None)
    cap = f.positive("final_logit_softcapping") if f.has("final_logit_softcapping") else None
    return glimmer(shape, f.positive("logit_scale"), cap, AFTER_EPS)


def shape_from_config(c: Description) -> Shape:
    shape = common_from_config(c)
    width = shape.widest(lambda one: one.head_width)
    shape = shape.with_attention(query_scale=width**-0.5 * c.positive("qk_scale_factor", 3.87))
    # Counted from the last layer, where the file does not list them.
    n, listed = shape.n_layers, c.has("layer_types")
    sliding = sliding_from_config(c, n, 1) if listed else [bool((n - 1 - i) % GLOBAL_EVERY) for i in range(n)]
    rope = shape.rope_kinds[0]
    shape = by_window(shape, sliding, c.integer("sliding_window", 2048), local=rope, whole=None)
    if (bases := c.raw("layer_rope_theta")) is not None:
        if not isinstance(bases, list) or len(bases) != n or any(one not in (0, rope.base) for one in bases):
            raise BadFile(f"{c.path}: layer_rope_theta must list {n} times 0, for no positions, or {rope.base:g}")
        shape = shape.with_attention(rope=tuple(rope if one else None for one in bases))
    cap, after_eps = c.positive("final_logit_softcapping", 20.0), c.positive("post_norm_eps", AFTER_EPS)
    return glimmer(shape, c.positive("output_multiplier"), cap, after_eps)


def glimmer(shape: Shape, logit_scale: float, softcap: float | None, after_eps: float) -> Shape:
    return replace(
        shape.with_attention(gated=True, gates_apart=True),
        embedding_norm=True,
        after_norm_eps=after_eps,
        logit_softcap=softcap,
        multipliers=Multipliers(head=logit_scale),
    )


def layer(b: Builder, i: int) -> Layer:
    # GGUF keeps the factor of queries as the weights of their norm.
    weighted = b.names.has(f"blk.{i}.attn_q_norm.weight")
    made = b.layer(i, sandwich=True, qk_norm=weighted)
    if weighted or not isinstance(made.attention, Attention):
        return made
    unit = b.unit_norm(made.attention.shape.head_width)
    return replace(made, attention=replace(made.attention, q_norm=unit, k_norm=unit))


MUSE_GLIMMER = Family(
    "muse-glimmer",
    layer,
    text_types=("muse_glimmer_text",),
    config_defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 2},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={**NAMES, "model.layers.*.self_attn.gate_proj": "blk.*.attn_gate"},
    config_transforms={
        f"{name}.weight": PLUS_ONE for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    },
)
