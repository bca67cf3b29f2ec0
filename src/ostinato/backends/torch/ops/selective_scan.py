"""The selective scan of mamba: s[i] = exp(dt[i] a) s[i-1] + dt[i] x[i] b[i];  y[i] = c[i] . s[i] + d x[i].

Every channel has a state of its own, `width` numbers long; dt, b and c depend on the input. `ssd_scan.py` is the
recurrence of mamba2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.models.blocks import Decay


def selective_scan_torch(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *, decay: Decay, state: Tensor, n_planes: int
) -> tuple[Tensor, Tensor]:
    """x, dt [seqs, t, channels], b, c [seqs, t, width], a [channels, width], d, dt_bias [channels].

    The step is softplus(dt + dt_bias). Gives y, shaped and typed as x, and the states after the last
    min(t, n_planes) rows, float32 [seqs, planes, channels, width], the newest first; `state` [seqs, channels, width]
    is where it starts. All float32 inside, in two tensors of [seqs, t, channels, width].
    """
    wide = x.float()
    step = F.softplus(dt.float() + decay.dt_bias)
    fade = torch.exp(step.unsqueeze(-1) * decay.a)
    states = (step * wide).unsqueeze(-1) * b.float().unsqueeze(2)
    for i in range(x.shape[1]):
        states[:, i].addcmul_(fade[:, i], state if i == 0 else states[:, i - 1])
    planes = states[:, -n_planes:].flip(1)  # a copy: states becomes the products below
    y = states.mul_(c.float().unsqueeze(2)).sum(-1) + wide * decay.d
    return y.to(x.dtype), planes
