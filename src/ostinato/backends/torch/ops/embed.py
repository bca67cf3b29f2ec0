"""What a step takes in: x[row] = table[token of its slot] * scale (+ positions[position of its slot]).

x float32 [n_slots, hidden] and its partial sums `stats` are written for live rows. The product with the scale is
rounded to the table's type, as the models that have one were trained. The fast kernel is `triton/embed.py`, bound by
the latency of three loads that follow from each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.backends.torch.ops.attend import StepRows
from ostinato.backends.torch.ops.matmul import PreparedInput, leave_torch
from ostinato.backends.torch.weight import DeviceMatrix


def embed_torch(
    table: Tensor | DeviceMatrix,
    x: Tensor,
    stats: Tensor,
    rows: StepRows,
    tokens: Tensor,
    *,
    scale: float | None = None,
    positions: Tensor | None = None,
    prepared: PreparedInput | None = None,
) -> None:
    """table [vocab, hidden] dense or packed; tokens int32 [n_slots] by slot; positions [length, hidden] or none.

    A packed table's values are float32, and nothing of them is rounded.
    """
    for row in range(int(rows.n_rows)):
        slot = int(rows.row_slot[row])
        token = tokens[slot : slot + 1].long()
        taken = table[token][0] if isinstance(table, Tensor) else table.rows_at(token)[0]
        if scale is not None:
            taken = taken * torch.tensor(scale, dtype=taken.dtype, device=taken.device)
        x[row] = taken.float()
        if positions is not None:
            x[row] += positions[int(rows.position[slot])].float()
        leave_torch(x[row : row + 1], slice(row, row + 1), stats, prepared)
