"""laguna: QK norm, a softplus gate on the output of attention for each head, and experts chosen by sigmoids beside a
shared block. Layers that see everything and layers that see a window differ in heads and rotary positions.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ostinato.errors import BadFile, Unsupported
from ostinato.models import rope as ropes
from ostinato.models.builder import Builder
from ostinato.models.experts import EXPERT_NAMES, count_from_config, experts_from_gguf, shared_names
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.rope import Rope
from ostinato.models.shape import (
    ExpertShape,
    Shape,
    by_window,
    common_from_config,
    common_from_gguf,
    layer_types,
    sliding_from_gguf,
    with_factors,
)

FULL_EVERY = 4  # the first of so many layers sees everything, where a file has no list


def shape_from_gguf(f: Description) -> Shape:
    shape = common_from_gguf(f)
    known = {"choice_bias": True} if f.has("expert_gating_func") else {"choice_bias": True, "scoring": "sigmoid"}
    shape = replace(shape, experts=experts_from_gguf(f, shape.n_layers, **known))
    window = f.integer("attention.sliding_window", 0, least=0)
    if window:
        width = shape.widest(lambda one: one.head_width)
        whole = with_factors(ropes.from_gguf(f, width, "halves"), f)
        base = f.positive("rope.freq_base_swa", whole.base)
        local = Rope(base, f.integer("rope.dimension_count_swa", width), "halves")
        sliding = sliding_from_gguf(f, shape.n_layers, FULL_EVERY, first=True)
        shape = by_window(shape, sliding, window, local=local, whole=whole)
    gate = f.tensors.get("blk.0.attn_gate.weight")
    if gate is None or 0 not in shape.attention:
        raise BadFile(f"{f.path}: the tensor blk.0.attn_gate.weight is missing; it is incomplete")
    return gated(shape, one_gate=gate.shape[0] == shape.attention[0].n_heads)


def shape_from_config(c: Description) -> Shape:
    if c.number("moe_router_logit_softcapping", 0.0) or c.flag("moe_apply_router_weight_on_input", False):
        raise Unsupported(f"{c.path}: a cap on router scores and weights on experts' inputs are not supported")
    shape = common_from_config(c)
    n, width = shape.n_layers, c.integer("head_dim")
    sliding = [kind == "sliding_attention" for kind in layer_types(c, n)] if c.has("layer_types") else [False] * n
    whole, local = (ropes.from_config(c, width, kind=kind) for kind in ("full_attention", "sliding_attention"))
    shape = by_window(shape, sliding, c.integer("sliding_window", 512), local=local, whole=whole)
    if c.has("num_attention_heads_per_layer"):
        shape = shape.with_attention(n_heads=c.per_layer("num_attention_heads_per_layer", n))
    kinds: Sequence[str] = ["dense", *["sparse"] * (n - 1)]
    if c.has("mlp_layer_types"):
        kinds = layer_types(c, n, ("dense", "sparse"), key="mlp_layer_types")
    experts = ExpertShape(
        count_from_config(c),
        c.integer("num_experts_per_tok"),
        c.integer("moe_intermediate_size"),
        renormalise=True,
        dense_layers=frozenset(i for i, kind in enumerate(kinds) if kind == "dense"),
        scoring="sigmoid",
        choice_bias=True,
        share_scale=c.positive("moe_routed_scaling_factor", 1.0),
        shared_width=c.integer("shared_expert_intermediate_size", 0, least=0),
    )
    return gated(replace(shape, experts=experts), one_gate=c.raw("gating") in (None, True, "per-head"))


def gated(shape: Shape, *, one_gate: bool) -> Shape:
    return shape.with_attention(gated=True, gates_apart=True, one_gate=one_gate, gate_activation="softplus")


# What a config.json may leave out.
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}

LAGUNA = Family(
    "laguna",
    partial(Builder.layer, qk_norm=True),
    hf=("LagunaForCausalLM",),
    config_defaults={"shared_expert_intermediate_size": 512, "rope_parameters": ROPES},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={
        **COMMON_NAMES,
        **EXPERT_NAMES,
        **shared_names("shared_experts"),
        **shared_names("shared_expert"),
        "model.layers.*.self_attn.g_proj": "blk.*.attn_gate",
        "model.layers.*.mlp.gate.e_score_correction_bias": "blk.*.exp_probs_b.bias",
        "model.layers.*.mlp.experts.e_score_correction_bias": "blk.*.exp_probs_b.bias",
    },
)
