"""The norm after a block, and the sum it goes into: x += y / rms(y) * weight.

x, y float32 [n_slots, hidden], y_stats and stats float32 [n_slots, n_stats, 2], weight [hidden]. x, stats and
`prepared.out` are written in place for live rows. Sums are float32: the partial ones of y in one fixed tree, those of x
over 16 columns each. A few kilobytes a row: bound by latency.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.launch import FLOATS, TritonLaunch, checked
from ostinato.backends.cuda.triton.embed import grid_of, write_x, written_arguments
from ostinato.backends.torch.ops.attend import StepRows
from ostinato.backends.torch.ops.matmul import PreparedInput, n_stats


def bind_add_norm(
    x: Tensor,
    y: Tensor,
    y_stats: Tensor,
    weight: Tensor,
    eps: float,
    stats: Tensor,
    rows: StepRows,
    *,
    prepared: PreparedInput | None = None,
    fresh: bool = False,
    scale: Tensor | None = None,
) -> TritonLaunch:
    """Check everything once and return the launch."""
    device, n_slots, hidden = x.device, rows.n_slots, x.shape[1]
    if scale is not None:
        checked("scale", scale, dtype=torch.float32, shape=(1,), device=device)
    given = written_arguments(x, stats, rows, prepared) | {
        "y": checked("y", y, dtype=torch.float32, shape=(n_slots, hidden), device=device),
        "y_stats": checked("y_stats", y_stats, dtype=torch.float32, shape=(n_slots, n_stats(hidden), 2), device=device),
        "weight": checked("weight", weight, dtype=FLOATS, shape=(hidden,), device=device),
        **{"eps": eps, "scale": scale, "STATS": triton.next_power_of_2(n_stats(hidden)), "FRESH": fresh},
    }
    return TritonLaunch.of(add_norm_kernel, grid_of(n_slots, hidden), given, num_warps=4)


@triton.jit
def add_norm_kernel(
    y, y_stats, weight, out, n_rows, eps, scale, HIDDEN: tl.constexpr, BLOCKS: tl.constexpr, STATS: tl.constexpr,
    FRESH: tl.constexpr,
):  # fmt: skip
    N_STATS: tl.constexpr = (HIDDEN + 15) // 16
    row = tl.program_id(0)
    if row < tl.load(n_rows):
        part = tl.arange(0, STATS)
        squares = tl.load(y_stats + (row * N_STATS + part) * 2 + 1, mask=part < N_STATS, other=0.0)
        root = tl.rsqrt(tl.sum(squares) / HIDDEN + eps)
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        column = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        there = column < HIDDEN
        at = row * HIDDEN + column
        normed = tl.load(y + at, mask=there, other=0.0) * root
        normed = normed * tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
        value = normed if FRESH else tl.load(out.x + at, mask=there, other=0.0) + normed
        if scale is not None:
            value = value * tl.load(scale)
        write_x(value, row, block, column, there, out, HIDDEN)
