"""What both formats state alike of routed experts, read into an `ExpertShape`, and the names of their tensors."""

from collections.abc import Mapping
from typing import Any, Final, Literal

from ostinato.errors import BadFile, Unsupported
from ostinato.models.fields import Description, Fields
from ostinato.models.shape import ExpertGroups, ExpertShape

_SCORING: Final[Mapping[int, Literal["softmax", "sigmoid"]]] = {1: "softmax", 2: "sigmoid", 3: "softmax"}

DEEPSEEK_EPSILON: Final = 1e-20  # of the sum of shares, where a family took over the router of DeepSeek V3

# The stems of experts' names in most safetensors folders, and ours.
EXPERT_NAMES: Final[Mapping[str, str]] = {
    "model.layers.*.mlp.gate": "blk.*.ffn_gate_inp",
    "model.layers.*.mlp.experts.*.gate_proj": "blk.*.ffn_gate.*",
    "model.layers.*.mlp.experts.*.up_proj": "blk.*.ffn_up.*",
    "model.layers.*.mlp.experts.*.down_proj": "blk.*.ffn_down.*",
}


def shared_names(stem: str) -> dict[str, str]:
    """The names of a shared block that a folder calls `stem` (`shared_expert`, `shared_experts`)."""
    return {f"model.layers.*.mlp.{stem}.{part}_proj": f"blk.*.ffn_{part}_shexp" for part in ("gate", "up", "down")}


def experts_from_gguf(f: Description, n_layers: int, **known: Any) -> ExpertShape:
    """What GGUF files state under `<architecture>.`; `known`: what a family's files leave out."""
    n_shared, width = f.integer("expert_shared_count", 0, least=0), f.integer("expert_feed_forward_length", 0, least=0)
    stated: dict[str, Any] = {
        "ff_width": width or f.integer("feed_forward_length"),
        "renormalise": f.flag("expert_weights_norm", False),
        "dense_layers": frozenset(range(min(n_layers, f.integer("leading_dense_block_count", 0, least=0)))),
        "share_scale": f.number("expert_weights_scale", 0.0) or 1.0,
        "groups": expert_groups(f, "expert_group_count", "expert_group_used_count", n_best=2),
        "shared_width": f.integer("expert_shared_feed_forward_length", n_shared * width, least=0),
    }
    if f.has("expert_gating_func"):
        stated["scoring"] = _scoring(f)
        if f.integer("expert_gating_func") == 3:  # softmax of the chosen scores
            stated["renormalise"] = True
    return ExpertShape(f.integer("expert_count"), f.integer("expert_used_count"), **{**stated, **known})


def _scoring(f: Description) -> Literal["softmax", "sigmoid"]:
    number = f.integer("expert_gating_func")
    if number not in _SCORING:
        raise Unsupported(f"{f.path}: {f.prefix}expert_gating_func is {number}, which is not supported; known: 1, 2, 3")
    return _SCORING[number]


def expert_groups(f: Fields, count: str, used: str, *, n_best: int) -> ExpertGroups | None:
    """Groups of experts by the names that a format has for their numbers; None for a single one, or all used."""
    n_groups = f.integer(count, 1, least=0) or 1
    n_used = f.integer(used, n_groups, least=0)
    if n_used > n_groups:
        raise BadFile(f"{f.path}: a row uses {n_used} groups of experts, and there are only {n_groups}")
    return None if n_groups in (1, n_used) else ExpertGroups(n_groups, n_used, n_best)


def dense_layers(c: Fields, n_layers: int) -> frozenset[int]:
    """Layers without experts by `decoder_sparse_step` and `mlp_only_layers` of config.json."""
    every, plain = c.integer("decoder_sparse_step", 1), c.raw("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(isinstance(i, int) for i in plain):
        raise BadFile(f"{c.path}: mlp_only_layers is {plain!r}; it must be a list of layer numbers")
    return frozenset(i for i in range(n_layers) if i in plain or (i + 1) % every)


def count_from_config(c: Fields, default: int | None = None) -> int:
    """How many experts: published files write num_experts or n_routed_experts, newer tools num_local_experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return c.integer(next((name for name in names if c.has(name)), names[0]), default)


def deepseek_from_config(c: Fields, n_layers: int) -> ExpertShape:
    """The router of DeepSeek V3, which others took over: sigmoids, a bias of the choice, groups, shared experts."""
    width = c.integer("moe_intermediate_size")
    return ExpertShape(
        count_from_config(c),
        c.integer("num_experts_per_tok"),
        width,
        renormalise=c.flag("norm_topk_prob", True),
        dense_layers=frozenset(range(min(n_layers, c.integer("first_k_dense_replace", 0, least=0)))),
        scoring="sigmoid",
        choice_bias=True,
        sum_epsilon=DEEPSEEK_EPSILON,
        groups=expert_groups(c, "n_group", "topk_group", n_best=2),
        share_scale=c.positive("routed_scaling_factor", 1.0),
        shared_width=width * c.integer("n_shared_experts", 0, least=0),
    )
