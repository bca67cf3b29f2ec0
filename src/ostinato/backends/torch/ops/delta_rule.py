"""The gated delta rule: S' = exp(g[i]) S[i-1];  S[i] = S' + b[i] (v[i] - S' k[i]) k[i]^T;  y[i] = S[i] q[i].

Every value head has a matrix of states, [value_width, key_width]. g[i] = a softplus(alpha[i] + dt_bias) is never
positive, b[i] = sigmoid(beta[i]) is the share of v[i] that replaces what the state has under k[i]. q and k have length
1, q is divided by the root of its width besides. A plain scan over time: whatever is done in blocks must agree with it.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.models.blocks import DeltaDecay

EPS: Final = 1e-6  # beside a squared length: no model states another


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
    t, group = v.shape[1], v.shape[2] // k.shape[2]
    q, k = unit(q.float()), unit(k.float())
    q = q * q.shape[-1] ** -0.5
    q, k = (each.repeat(1, 1, group, 1) if tiled else each.repeat_interleave(group, 2) for each in (q, k))
    wide, share = v.float(), torch.sigmoid(beta.float())
    fade = torch.exp(F.softplus(alpha.float() + decay.dt_bias) * decay.a)[..., None, None]
    state = state.clone()
    rows, planes = [], []
    for i in range(t):
        state.mul_(fade[:, i])
        known = (state @ k[:, i].unsqueeze(-1)).squeeze(-1)  # what the state has under this key
        change = (wide[:, i] - known) * share[:, i].unsqueeze(-1)
        state.addcmul_(change.unsqueeze(-1), k[:, i].unsqueeze(-2))
        rows.append(state @ q[:, i].unsqueeze(-1))
        if i >= t - n_planes:
            planes.append(state.clone())
    return torch.stack(rows, 1).squeeze(-1).to(v.dtype), torch.stack(planes[::-1], 1)


def unit(x: Tensor) -> Tensor:
    """Each row of x [..., width] with length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
