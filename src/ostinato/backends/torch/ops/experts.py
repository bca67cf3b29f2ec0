"""Routed experts: each row goes through the few experts its router scores highest, weighted by those scores."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.backends.torch.ops.activation import activate_torch, gated_torch
from ostinato.backends.torch.ops.linear import linear_torch
from ostinato.backends.torch.weight import DeviceMatrix, Weight, rows_of
from ostinato.backends.weights import Stack
from ostinato.models.shape import Activation, ExpertShape


def route_torch(
    scores: Tensor, experts: ExpertShape, bias: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Router scores [rows, n_scores] to (shares, expert ids), each [rows, n_used]; shares are float32.

    `bias` [n_experts] takes part in the choice alone, `scales` [n_experts] in the shares alone. Of equals the lower id
    is chosen, the likeliest comes first.
    """
    probabilities = probabilities_torch(scores, experts)
    chosen = _largest(_of_best_groups(choice_torch(scores, probabilities, experts, bias), experts), experts.n_used)
    return shares_torch(probabilities, chosen, experts, scales), chosen


def probabilities_torch(scores: Tensor, experts: ExpertShape) -> Tensor:
    """Of every expert, float32 [rows, n_experts]."""
    wide = scores[:, : experts.n_experts].float()
    return wide.softmax(-1) if experts.scoring == "softmax" else wide.sigmoid()


def choice_torch(scores: Tensor, probabilities: Tensor, experts: ExpertShape, bias: Tensor | None) -> Tensor:
    """What experts are compared by, float32 [rows, n_experts]."""
    if experts.by_score:
        return scores[:, : experts.n_experts].float()
    return probabilities if bias is None else probabilities + bias.float()


def _of_best_groups(choice: Tensor, experts: ExpertShape) -> Tensor:
    """-inf outside of a row's best groups."""
    groups = experts.groups
    if groups is None:
        return choice
    by_group = choice.view(len(choice), groups.n_groups, experts.n_experts // groups.n_groups)
    strength = by_group.topk(groups.n_best, -1).values.sum(-1)
    best = torch.zeros_like(strength, dtype=torch.bool).scatter(-1, _largest(strength, groups.n_used), True)
    return by_group.masked_fill(~best[..., None], -torch.inf).flatten(-2)


def shares_torch(probabilities: Tensor, chosen: Tensor, experts: ExpertShape, scales: Tensor | None = None) -> Tensor:
    """How much a row takes of each of its experts, float32 [rows, n_used]."""
    shares = probabilities.gather(-1, chosen)
    if experts.renormalise:
        shares = shares / (shares.sum(-1, keepdim=True) + experts.sum_epsilon).clamp(min=experts.least_sum)
    shares = shares * experts.share_scale
    return shares if scales is None else shares * scales[chosen]


def _largest(x: Tensor, n: int) -> Tensor:
    """Where the n largest of each row are, the largest first, of equals the first."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :n]


def experts_torch(
    x: Tensor,
    gate_up: Weight | tuple[Weight, ...],
    down: Weight | tuple[Weight, ...],
    shares: Tensor,
    chosen: Tensor,
    activation: Activation,
    *,
    gated: bool = True,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """x [rows, width] through its chosen experts; gate_up [experts, 2 * ff, width] (or [experts, ff, width] where they
    are not `gated`), down [experts, width, ff], each as one weight or as one for each expert; biases have a row each.

    Packed matrices stand on top of each other, a `Stack` is (gate, up) of all experts. Experts are added in order of
    their id, so that a row's sum does not depend on its neighbours.
    """
    out = torch.zeros_like(x)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        inside = _through(x[rows], gate_up, gate_up_bias, expert, (1 + gated) * _width(down))
        inside = gated_torch(inside, activation) if gated else activate_torch(inside, activation)
        back = _through(inside, down, down_bias, expert, x.shape[1])
        out.index_add_(0, rows, back * shares[rows, place, None].to(x.dtype))
    return out


def _through(x: Tensor, weight: Weight | tuple[Weight, ...], bias: Tensor | None, expert: int, n_rows: int) -> Tensor:
    one = weight[expert] if isinstance(weight, tuple) else expert_of(weight, expert, n_rows, x.dtype)
    return linear_torch(x, one, None if bias is None else bias[expert].to(x.dtype))


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
