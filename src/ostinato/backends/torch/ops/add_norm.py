"""The norm after a block, and the sum it goes into: x += y / rms(y) * weight; with `fresh`, x = y / rms(y) * weight.
With `scale` float32 [1], x is multiplied by it in the end.

y and x are float32 [n_slots, hidden]; x and its partial sums `stats` are written for live rows, and the mean of y^2
comes from the partial sums that y's writer left. The fast kernel is `triton/add_norm.py`, bound by its latency.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.backends.torch.ops.attend import StepRows
from ostinato.backends.torch.ops.matmul import PreparedInput, leave_torch


def add_norm_torch(
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
) -> None:
    """y_stats and stats float32 [n_slots, n_stats, 2]: sum and sum of squares of each 16 columns; weight [hidden]."""
    for row in range(int(rows.n_rows)):
        root = torch.rsqrt(y_stats[row, :, 1].sum() / x.shape[1] + eps)
        normed = y[row] * root * weight.float()
        value = normed if fresh else x[row] + normed
        x[row] = value if scale is None else value * scale
        leave_torch(x[row : row + 1], slice(row, row + 1), stats, prepared)
