"""The recurrence of mamba2: S[i] = exp(dt[i] a) S[i-1] + dt[i] x[i] b[i]^T;  y[i] = S[i] c[i] + d x[i].

Every head has a matrix of states, [head_width, width], and one decay; heads in groups share b and c. A plain scan
over time: whatever is done in blocks must agree with it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.models.blocks import Decay


def ssd_scan_torch(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    decay: Decay,
    dt_limit: tuple[float, float],
    state: Tensor,
    n_planes: int,
) -> tuple[Tensor, Tensor]:
    """x [seqs, t, heads, head_width], dt [seqs, t, heads], b, c [seqs, t, groups, width], a, d, dt_bias [heads].

    The step is softplus(dt + dt_bias), kept within dt_limit. Gives y, shaped and typed as x, and the states after the
    last min(t, n_planes) rows, float32 [seqs, planes, heads, head_width, width], the newest first; `state`
    [seqs, heads, head_width, width] is where it starts. All float32 inside. Bound by the traffic of the state, which
    every row reads and writes.
    """
    t, group = x.shape[1], x.shape[2] // b.shape[2]
    wide = x.float()
    step = F.softplus(dt.float() + decay.dt_bias).clamp(*dt_limit)
    fade = torch.exp(step * decay.a)[..., None, None]
    drive = (step.unsqueeze(-1) * wide).unsqueeze(-1)  # [seqs, t, heads, head_width, 1]
    b, c = (v.float().repeat_interleave(group, 2) for v in (b, c))  # [seqs, t, heads, width]
    state = state.clone()
    rows, planes = [], []
    for i in range(t):
        state.mul_(fade[:, i]).addcmul_(drive[:, i], b[:, i].unsqueeze(-2))
        rows.append(state @ c[:, i].unsqueeze(-1))
        if i >= t - n_planes:
            planes.append(state.clone())
    y = torch.stack(rows, 1).squeeze(-1) + wide * decay.d.unsqueeze(-1)
    return y.to(x.dtype), torch.stack(planes[::-1], 1)
