"""The norm at the end of a mamba2 block: a gate by silu and an RMS norm of each group of channels, in either order."""

import torch.nn.functional as F
from torch import Tensor

from ostinato.backends.torch.ops.rms_norm import rms_norm_torch


def gated_norm_torch(x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_first: bool) -> Tensor:
    """x, gate [..., width] by weight [groups, width / groups]: norm(x * silu(gate)), or norm(x) * silu(gate).

    x.dtype out, float32 inside.
    """
    wide, opened = x.float(), F.silu(gate.float())
    wide = wide if norm_first else wide * opened
    wide = rms_norm_torch(wide.view(*x.shape[:-1], *weight.shape), weight, eps).flatten(-2)
    return (wide * opened if norm_first else wide).to(x.dtype)
