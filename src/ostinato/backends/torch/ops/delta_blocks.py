"""The gated delta rule in blocks of rows: matrix products in place of one row after the other.

In a block that starts from the state S, with g, b, q, k, v as in `delta_rule.py`, let G[i] = exp(g[1] + ... + g[i]) and
D[i, j] = exp(g[j+1] + ... + g[i]), the decay from row j to row i. Unrolled, the rule reads

    S[i] = G[i] S + sum over j <= i of D[i, j] u[j] k[j]^T,   where   u[i] = b[i] (v[i] - exp(g[i]) S[i-1] k[i])

is what row i adds under its key. The second, with the first put in for S[i-1], is a triangular system for all u of the
block, a row of U each:

    (I + A) U = b (V - G K S^T),   A[i, j] = b[i] D[i, j] k[i].k[j] for j < i, else 0

I + A is lower triangular with ones on its diagonal, so forward substitution solves it without a division. Then

    Y = G Q S^T + P U,   P[i, j] = D[i, j] q[i].k[j] for j <= i, else 0
    S at the end = G[last] S + U^T (D[last] K)

No number grows: g is never positive, so that G and D are at most 1, and b at most 1 keeps each row's change of S, a
multiplication by I - b k k^T, from lengthening anything. D is summed from the g of its own rows: the difference of two
sums from the beginning of the block would lose the small ones behind a large one.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ostinato.backends.torch.ops.delta_rule import DeltaRows, scan_rows
from ostinato.models.blocks import DeltaDecay

BLOCK: Final = 64  # rows


def delta_blocks_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    *,
    decay: DeltaDecay,
    tiled: bool,
    state: Tensor,
    n_planes: int,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor]:
    """As `delta_rule_torch`, whose arguments and results it has, but for the rounding. Blocks count from the first row.
    The last n_planes - 1 rows, each of whose states is asked for, are taken one after the other."""
    rows = DeltaRows.of(q, k, v, alpha, beta, decay, tiled=tiled)
    t, out = v.shape[1], []
    n_blocked = t - min(t, n_planes) + 1
    if n_blocked == 1:  # a step
        n_blocked = 0
    for start in range(0, n_blocked, block):
        y, state = one_block(rows.part(start, min(start + block, n_blocked)), state)
        out.append(y)
    planes = state.unsqueeze(1)
    if n_blocked < t:
        y, single = scan_rows(rows.part(n_blocked, t), state, n_planes)
        planes = torch.cat([single, planes], 1)[:, : min(t, n_planes)]
        out.append(y)
    return torch.cat(out, 1).to(v.dtype), planes


def one_block(rows: DeltaRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """Y [seqs, t, heads, value_width] of a block of t rows, and the state at its end."""
    q, k, v, g, b = (each.transpose(1, 2) for each in rows)  # heads before rows
    b = b.unsqueeze(-1)
    decay = decays(g)
    from_start = g.cumsum(-1).exp().unsqueeze(-1)
    a = (b * decay * (k @ k.mT)).tril(-1)
    u = torch.linalg.solve_triangular(a, b * (v - from_start * (k @ state.mT)), upper=False, unitriangular=True)
    y = from_start * (q @ state.mT) + (decay * (q @ k.mT)) @ u
    end = from_start[:, :, -1:] * state + u.mT @ (decay[:, :, -1].unsqueeze(-1) * k)
    return y.transpose(1, 2), end


def decays(g: Tensor) -> Tensor:
    """D of g [..., t], [..., t, t], 0 above the diagonal."""
    t = g.shape[-1]
    steps = g.unsqueeze(-1).expand(*g.shape, t).tril(-1)  # in column j the g of the rows behind j
    return steps.cumsum(-2).exp().tril()
