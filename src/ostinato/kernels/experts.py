"""Routed experts: each row goes through the few experts its router scores highest, weighted by those scores."""

import torch
from torch import Tensor

from ostinato.kernels.activation import Activation, gated_torch
from ostinato.kernels.linear import linear_torch
from ostinato.kernels.packed import Packed, Stack, Weight
from ostinato.kernels.weight import rows_of


def route_torch(scores: Tensor, n_used: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Router scores [rows, experts] to (weights, expert ids), each [rows, n_used]; weights are float32.

    Softmax over all experts, then the n_used largest, made to sum to 1 again where the model says so.
    """
    weights, chosen = scores.float().softmax(-1).topk(n_used, -1)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), chosen


def experts_torch(
    x: Tensor, gate_up: Weight, down: Tensor | Packed, weights: Tensor, chosen: Tensor, activation: Activation
) -> Tensor:
    """x [rows, hidden] through its chosen experts; gate_up [experts, 2 * ff, hidden], down [experts, hidden, ff].

    Packed matrices stand on top of each other, a `Stack` is (gate, up) of all experts. Experts are added in order of
    their id, so that a row's sum does not depend on its neighbours.
    """
    out = torch.zeros_like(x)
    hidden, ff = x.shape[1], down.cols if isinstance(down, Packed) else down.shape[-1]
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        inside = gated_torch(linear_torch(x[rows], expert_of(gate_up, expert, 2 * ff, x.dtype), None), activation)
        back = linear_torch(inside, expert_of(down, expert, hidden, x.dtype), None)
        out.index_add_(0, rows, back * weights[rows, place, None].to(x.dtype))
    return out


def expert_of(weight: Weight, expert: int, n_rows: int, dtype: torch.dtype) -> Tensor:
    """One expert's matrix [n_rows, cols] out of all of them; of a `Stack`, its share of every part."""
    if isinstance(weight, Stack):
        share = n_rows // len(weight.parts)
        return torch.cat([expert_of(part, expert, share, dtype) for part in weight.parts])
    if isinstance(weight, Packed):
        return rows_of(weight, torch.arange(expert * n_rows, (expert + 1) * n_rows, device=weight.device), dtype)
    return (weight[expert] if weight.dim() == 3 else weight[expert * n_rows : (expert + 1) * n_rows]).to(dtype)
