"""The gated delta rule: S' = exp(g[i]) S[i-1];  S[i] = S' + b[i] (v[i] - S' k[i]) k[i]^T;  y[i] = S[i] q[i].

Every value head has a matrix of states, [value_width, key_width]. g[i] = a softplus(alpha[i] + dt_bias) is never
positive, b[i] = sigmoid(beta[i]) is the share of v[i] that replaces what the state has under k[i]. q and k have length
1, q is divided by the root of its width besides. A plain scan over time: what is done in blocks (`delta_blocks.py`)
must agree with it.
"""

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.models.blocks import DeltaDecay

EPS: Final = 1e-6  # beside a squared length: no model states another


class DeltaRows(NamedTuple):
    """What the rule takes of some rows, by value heads: [seqs, t, heads, width], and [seqs, t, heads] of the last two.
    In float32, or in float64 where v is."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    b: Tensor

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, decay: DeltaDecay, *, tiled: bool
    ) -> "DeltaRows":
        wide, group = torch.promote_types(v.dtype, torch.float32), v.shape[2] // k.shape[2]
        q, k = unit(q.to(wide)), unit(k.to(wide))
        q = q * q.shape[-1] ** -0.5
        q, k = (each.repeat(1, 1, group, 1) if tiled else each.repeat_interleave(group, 2) for each in (q, k))
        g = F.softplus(alpha.to(wide) + decay.dt_bias) * decay.a
        return DeltaRows(q, k, v.to(wide), g, torch.sigmoid(beta.to(wide)))

    def part(self, start: int, stop: int) -> "DeltaRows":
        return DeltaRows(*(each[:, start:stop] for each in self))


def delta_rule_torch(
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
) -> tuple[Tensor, Tensor]:
    """q, k [seqs, t, key_heads, key_width], v [seqs, t, heads, value_width], alpha, beta [seqs, t, heads].

    Value heads that share a key head stand side by side, or with `tiled` key_heads apart. Gives y, shaped and typed as
    v, and the states after the last min(t, n_planes) rows, float32 [seqs, planes, heads, value_width, key_width], the
    newest first; `state` [seqs, heads, value_width, key_width] is where it starts. All float32 inside. Bound by the
    traffic of the state, which every row reads and writes.
    """
    y, planes = scan_rows(DeltaRows.of(q, k, v, alpha, beta, decay, tiled=tiled), state, n_planes)
    return y.to(v.dtype), planes


def scan_rows(rows: DeltaRows, state: Tensor, n_planes: int) -> tuple[Tensor, Tensor]:
    """One row after the other: y and planes, as `delta_rule_torch` gives them."""
    t, fade, state = rows.v.shape[1], torch.exp(rows.g)[..., None, None], state.clone()
    out, planes = [], []
    for i in range(t):
        state.mul_(fade[:, i])
        known = (state @ rows.k[:, i].unsqueeze(-1)).squeeze(-1)  # what the state has under this key
        change = (rows.v[:, i] - known) * rows.b[:, i].unsqueeze(-1)
        state.addcmul_(change.unsqueeze(-1), rows.k[:, i].unsqueeze(-2))
        out.append(state @ rows.q[:, i].unsqueeze(-1))
        if i >= t - n_planes:
            planes.append(state.clone())
    return torch.stack(out, 1).squeeze(-1), torch.stack(planes[::-1], 1)


def unit(x: Tensor) -> Tensor:
    """Each row of x [..., width] with length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
