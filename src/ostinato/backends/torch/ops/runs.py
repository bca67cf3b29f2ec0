"""Recurrent blocks over the rows of a step or of a chunk: each sequence's rows one after the other, from its state on.

The twins of `runs.py`, `scans.py` and `delta.py` in `cuda/triton/`. Rows of all sequences lie in one buffer; a *run* is
the consecutive rows of one sequence: a single row of a step, a part of a chunk. States are float32 [slots, ...] and are
written in place, for the slots of the runs only; a run that begins its sequence takes zeros in place of its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.backends.torch.ops.causal_conv import causal_conv_torch
from ostinato.backends.torch.ops.delta_rule import delta_rule_torch
from ostinato.backends.torch.ops.gated_norm import gated_norm_torch
from ostinato.backends.torch.ops.rms_norm import rms_norm_torch
from ostinato.backends.torch.ops.selective_scan import selective_scan_torch
from ostinato.backends.torch.ops.ssd_scan import ssd_scan_torch
from ostinato.models.blocks import Decay, DeltaDecay, Norm
from ostinato.models.shape import DeltaShape, Mamba2Shape, MambaShape


class RowRun(NamedTuple):
    """The rows of one sequence; `fresh`: they are its first ones."""

    first: int
    n: int
    slot: int
    fresh: bool

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.n)

    def start(self, state: Tensor) -> Tensor:
        """The state before its rows, [1, ...]."""
        kept = state[self.slot : self.slot + 1]
        return torch.zeros_like(kept) if self.fresh else kept


@dataclass(frozen=True, slots=True)
class StepRuns:
    """The runs of a step, a row each: views of the slot table, int32."""

    n_rows: Tensor  # [1]
    row_slot: Tensor  # [n_slots]
    position: Tensor  # [n_slots], by slot

    @property
    def most(self) -> int:
        return len(self.row_slot)

    def __iter__(self) -> Iterator[RowRun]:
        for row, slot in enumerate(self.row_slot[: int(self.n_rows)].tolist()):
            yield RowRun(row, 1, slot, int(self.position[slot]) == 0)


@dataclass(frozen=True, slots=True)
class ChunkRuns:
    """The runs of a chunk, int32 on the device, so that one captured graph serves every chunk of a size."""

    n_rows: Tensor  # [1], live rows
    n_runs: Tensor  # [1]
    runs: Tensor  # [most, 4]: the first row, how many, the slot, whether they begin the sequence
    run_of: Tensor  # [rows]

    @property
    def most(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[RowRun]:
        for first, n, slot, fresh in self.runs[: int(self.n_runs)].tolist():
            yield RowRun(first, n, slot, bool(fresh))


Runs = StepRuns | ChunkRuns


def conv_runs_torch(x: Tensor, out: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, runs: Runs) -> None:
    """silu of the causal convolution of x [rows, channels], columns of a wider buffer, into out of the same shape.

    state [slots, channels, kernel - 1]; weight [channels, kernel], bias [channels].
    """
    for run in runs:
        y, planes = causal_conv_torch(x[run.rows][None].float(), run.start(state), weight, bias, 1)
        out[run.rows] = F.silu(y[0]).to(out.dtype)
        state[run.slot] = planes[0, 0]


def ssd_runs_torch(
    x: Tensor, dt: Tensor, out: Tensor, state: Tensor, decay: Decay, shape: Mamba2Shape, runs: Runs
) -> None:
    """mamba2's scan of x [rows, conv_width], what is scanned, b and c side by side, by steps dt [rows, heads], columns
    of a wider buffer, into out [rows, inner]; state [slots, heads, head_width, state]."""
    for run in runs:
        u, b, c = torch.split(x[run.rows].float(), [shape.inner, *[shape.n_groups * shape.state] * 2], -1)
        u = u.reshape(run.n, shape.n_heads, -1)
        b, c = (part.reshape(run.n, shape.n_groups, -1) for part in (b, c))
        given = u[None], dt[run.rows][None].float(), b[None], c[None]
        start, limit = run.start(state), shape.dt_limit
        y, planes = ssd_scan_torch(*given, decay=decay, dt_limit=limit, state=start, n_planes=1)
        out[run.rows] = y[0].flatten(1).to(out.dtype)
        state[run.slot] = planes[0, 0]


def delta_runs_torch(
    x: Tensor, beta_alpha: Tensor, out: Tensor, state: Tensor, decay: DeltaDecay, shape: DeltaShape, runs: Runs
) -> None:
    """The gated delta rule over x [rows, sum of conv_parts], query, key and value side by side, by beta and alpha side
    by side in columns of a wider buffer [rows, 2 * heads], into out [rows, inner]; state [slots, heads, value_width,
    key_width]."""
    widths = (shape.key_width, shape.key_width, shape.value_width)
    for run in runs:
        parts = zip(torch.split(x[run.rows].float(), list(shape.conv_parts), -1), widths, strict=True)
        q, k, v = (part.reshape(1, run.n, -1, width) for part, width in parts)
        beta, alpha = beta_alpha[run.rows][None].float().chunk(2, -1)
        start = run.start(state)
        y, planes = delta_rule_torch(q, k, v, alpha, beta, decay=decay, tiled=shape.tiled, state=start, n_planes=1)
        out[run.rows] = y[0].flatten(1).to(out.dtype)
        state[run.slot] = planes[0, 0]


def short_conv_runs_torch(
    x: Tensor, out: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, runs: Runs
) -> None:
    """A gated short convolution of x [rows, 3 * width], the gate before it, the gate after it and what is convolved
    side by side, into out [rows, width]; state [slots, width, kernel - 1] has inputs by their gate."""
    for run in runs:
        before, after, u = x[run.rows][None].float().chunk(3, -1)
        y, planes = causal_conv_torch(before * u, run.start(state), weight, bias, 1)
        out[run.rows] = (after * y)[0].to(out.dtype)
        state[run.slot] = planes[0, 0]


def gate_runs_torch(
    x: Tensor, gate: Tensor, out: Tensor, weight: Tensor | None, eps: float, norm_first: bool, runs: Runs
) -> None:
    """x [rows, inner] by silu of gate, columns of a wider buffer, into out: normed by groups with weight
    [groups, inner / groups], or [1, width of a group] for all of them, before the gate or after it, where there is a
    weight."""
    n = int(runs.n_rows)
    if weight is None:
        out[:n] = (x[:n].float() * F.silu(gate[:n].float())).to(out.dtype)
    else:
        weight = weight.expand(x.shape[1] // weight.shape[1], -1)
        out[:n] = gated_norm_torch(x[:n].float(), gate[:n].float(), weight, eps, norm_first).to(out.dtype)


def selected_runs_torch(x: Tensor, dt: Tensor, bc: Tensor, norms: tuple[Norm, ...] | None, runs: Runs) -> None:
    """mamba's step, b and c side by side in x [rows, dt_rank + 2 * state], each normed where there are norms: the first
    into dt [rows, dt_rank], as a product takes it, the others into bc [rows, 2 * state]."""
    n, rank = int(runs.n_rows), dt.shape[1]
    width = bc.shape[1] // 2
    parts = torch.split(x[:n].float(), [rank, width, width], -1)
    if norms is not None:
        parts = tuple(rms_norm_torch(part, norm.weight, norm.eps) for part, norm in zip(parts, norms, strict=True))
    dt[:n] = parts[0].to(dt.dtype)
    bc[:n] = torch.cat(parts[1:], -1)


def selective_runs_torch(
    x: Tensor,
    dt: Tensor,
    bc: Tensor,
    gate: Tensor,
    out: Tensor,
    state: Tensor,
    decay: Decay,
    shape: MambaShape,
    runs: Runs,
) -> None:
    """mamba's scan of x [rows, inner] by steps dt [rows, inner], b and c side by side in bc [rows, 2 * state], times
    silu of gate, columns of a wider buffer, into out [rows, inner]; state [slots, inner, state]."""
    for run in runs:
        b, c = bc[run.rows][None].float().chunk(2, -1)
        given, start = (x[run.rows][None].float(), dt[run.rows][None].float(), b, c), run.start(state)
        y, planes = selective_scan_torch(*given, decay=decay, state=start, n_planes=1)
        out[run.rows] = (y[0] * F.silu(gate[run.rows].float())).to(out.dtype)
        state[run.slot] = planes[0, 0]
