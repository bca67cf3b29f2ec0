"""RMS norm: y = x / sqrt(mean(x^2) + eps) * weight."""

import torch
from torch import Tensor


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of x [..., width] to unit RMS, then by weight [width]; x.dtype out, float32 inside."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
