"""Compares memory of two runs of a model: bits of buffers and weights, and the experts that kernels chose.

`ostinato verify` (`engine/verify.py`) runs the modes; this is its part in torch, the reference of all of them. Buffers
are tensors of any device, or arrays of the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, Final

import torch
from torch import Tensor

from ostinato.backends.compare import Difference
from ostinato.backends.torch.arrays import as_tensor
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.ops.experts import choice_torch, probabilities_torch, shares_torch
from ostinato.backends.torch.plan import tensors_of
from ostinato.errors import InternalError
from ostinato.files.unpack import Floats
from ostinato.loop.guard import Guard
from ostinato.loop.plan import Buffer
from ostinato.models.blocks import Experts, Layer, LoadedModel
from ostinato.models.shape import ExpertShape

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Buffers


def zero(buffers: Iterable[Buffer], guard: Guard) -> None:
    with torch.inference_mode():
        for buffer in buffers:
            buffer.zero(guard)


def host_row(buffer: Any) -> Floats:
    """The first row of a buffer as float32."""
    row: Floats = as_tensor(buffer)[0].float().cpu().numpy()
    return row


def first_difference(node: str, name: str, expected: Any, found: Any) -> Difference | None:
    """The first element, in memory order, whose bits differ."""
    expected, found = as_tensor(expected), as_tensor(found)
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return Difference(node, name, (), _size(expected), _size(found))
    if expected.data_ptr() == found.data_ptr() and expected.device == found.device:
        return None
    differs = _bits(expected) != _bits(found)
    if not bool(differs.any()):
        return None
    place = tuple(differs.nonzero()[0].tolist())
    one, two = (_value(tensor[place]) for tensor in (expected, found))
    if one == two:
        one, two = (f"{value} (bits {int(_bits(t)[place]):#x})" for value, t in ((one, expected), (two, found)))
    return Difference(node, name, place, one, two, n_elements=int(differs.sum()))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def _value(element: Tensor) -> str:
    value: Any = element.item()
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _size(tensor: Tensor) -> str:
    return Buffer.of("", tensor).text.strip()


# Weights


def compare_weights(model: LoadedModel, fresh: LoadedModel) -> tuple[int, Difference | None]:
    """Compare the bits of every weight with another copy of the model, one tensor at a time, up to the first
    difference; how many were compared."""
    expected = dict(tensors_of(fresh, "model"))
    n = 0
    for n, (name, tensor) in enumerate(tensors_of(model, "model"), start=1):
        difference = first_difference("load", name, expected[name], tensor.to(expected[name].device))
        if difference is not None:
            return n, difference
    return n, None


def checksums(model: LoadedModel) -> dict[str, int]:
    """A sum over the bits of every weight: one flipped bit changes it."""
    return {name: int(_bits(tensor).sum(dtype=torch.int64)) for name, tensor in tensors_of(model, "model")}


# Experts


def chosen_experts(routes: Any, n_rows: int) -> Tensor:
    """The experts that the first rows used, int64 [n_layers, n_rows, n_used], of a buffer [n_layers, rows, n_used]."""
    return as_tensor(routes)[:, :n_rows].long().cpu()


@dataclass(slots=True)
class RouteJudge:
    """Makes the twins use the experts that kernels chose, and checks that the twins' scores allow these routes.

    Two experts may have scores so close that rounding decides between them, and logits computed through different
    experts cannot be compared. So the twins use the kernels' routes, with shares from their own scores. A route is
    allowed if no expert left out scores higher than a chosen one by more than twice the tolerance, in units of the
    row's root mean square: rounding may move each of the two scores by the tolerance. `widest` is the largest such gap.
    """

    routes: Tensor  # int64 [n_layers, positions, n_used]
    tolerance: float
    difference: Difference | None = None
    widest: float = 0.0
    n_ties: int = 0  # positions where the twins would have chosen other experts

    @staticmethod
    def of(routes: Sequence[Tensor], tolerance: float) -> RouteJudge:
        """For routes of rows that follow each other, each [n_layers, rows, n_used]."""
        return RouteJudge(torch.cat(tuple(routes), 1), tolerance)

    @property
    def figures(self) -> dict[str, float]:
        return {"route_ties": self.n_ties, "route_widest": self.widest}

    def routed(self, model: Model) -> Model:
        """The model with these routes; it must compute all positions in one forward."""
        numbers = cycle(
            [i for i, layer in enumerate(model.layers) if isinstance(layer, Layer) and isinstance(layer.mlp, Experts)]
        )  # the order in which the layers call `route`

        def route(
            scores: Tensor, experts: ExpertShape, bias: Tensor | None = None, scales: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            number = next(numbers)
            asked = self.routes[number].to(scores.device)
            chosen = asked.clamp(0, experts.n_experts - 1)  # `_judge` reports ids that are no expert
            probabilities = probabilities_torch(scores, experts)
            judged = choice_torch(scores, probabilities, experts, bias)
            self._judge(number, _of_used_groups(judged, chosen, experts), asked, chosen, experts.n_used)
            return shares_torch(probabilities, chosen, experts, scales), chosen

        return replace(model, ops=replace(model.ops, route=route))

    def _judge(self, number: int, scores: Tensor, asked: Tensor, chosen: Tensor, n_used: int) -> None:
        if len(scores) != len(chosen):
            raise InternalError(f"routes of {len(chosen)} positions, and the twins go through {len(scores)}")
        taken = torch.zeros_like(scores).scatter_(-1, chosen, 1.0) > 0
        least = scores.masked_fill(~taken, torch.inf).amin(-1)
        most = scores.masked_fill(taken, -torch.inf).amax(-1)
        size = scores.masked_fill(scores.isneginf(), 0.0).square().mean(-1).sqrt()
        behind = ((most - least) / size.clamp(min=1e-30)).clamp(min=0.0)
        self.n_ties += int((behind > 0).sum())
        self.widest = max(self.widest, float(behind.max()))
        unheard = (asked != chosen).any(-1) | (taken.sum(-1) != n_used)  # an id that is no expert, or one expert twice
        wrong = ~(behind <= 2 * self.tolerance) | unheard
        if self.difference is None and bool(wrong.any()):
            place = int(wrong.nonzero()[0])
            best = scores[place].topk(n_used).indices.sort().values.tolist()
            found = f"{asked[place].tolist()}, {float(behind[place]):.3g} of the scores' size behind"
            self.difference = Difference(f"layer.{number}.route", "experts", (place,), str(best), found)


def _of_used_groups(scores: Tensor, chosen: Tensor, experts: ExpertShape) -> Tensor:
    """The scores, -inf in groups of which no expert was chosen: a row's choice is judged among the others."""
    if experts.groups is None:
        return scores
    size = experts.n_experts // experts.groups.n_groups
    used = torch.zeros_like(scores[:, ::size], dtype=torch.bool).scatter_(-1, chosen // size, True)
    return scores.masked_fill(~used.repeat_interleave(size, -1), -torch.inf)
