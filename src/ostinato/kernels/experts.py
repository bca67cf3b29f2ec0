"""Routed experts: each row goes through the few experts its router scores highest, weighted by those scores."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.kernels.activation import Activation, gated_torch
from ostinato.kernels.linear import linear_torch
from ostinato.kernels.packed import Weight


def route_torch(scores: Tensor, n_used: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Router scores [rows, experts] to (weights, expert ids), each [rows, n_used]; weights are float32.

    Softmax over all experts, then the n_used largest, made to sum to 1 again where the model says so.
    """
    weights, chosen = scores.float().softmax(-1).topk(n_used, -1)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), chosen


def experts_torch(
    x: Tensor,
    gate_up: Tensor | Sequence[Weight],
    down: Tensor | Sequence[Weight],
    weights: Tensor,
    chosen: Tensor,
    activation: Activation,
) -> Tensor:
    """x [rows, hidden] through its chosen experts; gate_up [experts, 2 * ff, hidden], down [experts, hidden, ff], each
    as one tensor or as a weight for each expert.

    Experts are added in order of their id, so that a row's sum does not depend on its neighbours.
    """
    out = torch.zeros_like(x)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        inside = gated_torch(linear_torch(x[rows], gate_up[expert], None), activation)
        scaled = linear_torch(inside, down[expert], None) * weights[rows, place, None].to(x.dtype)
        out.index_add_(0, rows, scaled)
    return out
