"""Routed experts: each row goes through the few experts its router scores highest, weighted by those scores."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.backends.torch.ops.activation import gated_torch
from ostinato.backends.torch.ops.linear import linear_torch
from ostinato.backends.torch.weight import DeviceMatrix, Weight, rows_of
from ostinato.backends.weights import Stack
from ostinato.models.shape import Activation


def route_torch(scores: Tensor, n_used: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Router scores [rows, experts] to (weights, expert ids), each [rows, n_used]; weights are float32.

    Softmax over all experts, then the n_used largest, made to sum to 1 again where the model says so.
    """
    weights, chosen = scores.float().softmax(-1).topk(n_used, -1)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), chosen


def experts_torch(
    x: Tensor,
    gate_up: Weight | tuple[Weight, ...],
    down: Weight | tuple[Weight, ...],
    weights: Tensor,
    chosen: Tensor,
    activation: Activation,
) -> Tensor:
    """x [rows, hidden] through its chosen experts; gate_up [experts, 2 * ff, hidden], down [experts, hidden, ff], each
    as one weight or as one for each expert.

    Packed matrices stand on top of each other, a `Stack` is (gate, up) of all experts. Experts are added in order of
    their id, so that a row's sum does not depend on its neighbours.
    """
    out = torch.zeros_like(x)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        inside = gated_torch(_through(x[rows], gate_up, expert, 2 * _width(down)), activation)
        back = _through(inside, down, expert, x.shape[1])
        out.index_add_(0, rows, back * weights[rows, place, None].to(x.dtype))
    return out


def _through(x: Tensor, weight: Weight | tuple[Weight, ...], expert: int, n_rows: int) -> Tensor:
    one = weight[expert] if isinstance(weight, tuple) else expert_of(weight, expert, n_rows, x.dtype)
    return linear_torch(x, one, None)


def _width(down: Weight | tuple[Weight, ...]) -> int:
    """How wide an expert is inside: the columns of what leads back."""
    one = down[0] if isinstance(down, tuple) else down
    return int(one.shape[-1])


def expert_of(weight: Weight, expert: int, n_rows: int, dtype: torch.dtype) -> Tensor:
    """One expert's matrix [n_rows, cols] out of all of them; of a `Stack`, its share of every part."""
    if isinstance(weight, Stack):
        share = n_rows // len(weight.parts)
        return torch.cat([expert_of(part, expert, share, dtype) for part in weight.parts])
    if isinstance(weight, Tensor):
        return (weight[expert] if weight.dim() == 3 else weight[expert * n_rows : (expert + 1) * n_rows]).to(dtype)
    assert isinstance(weight, DeviceMatrix), "experts that multiply themselves are one matrix each"
    return rows_of(weight, torch.arange(expert * n_rows, (expert + 1) * n_rows, device=weight.device), dtype)
