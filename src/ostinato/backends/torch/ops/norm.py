"""The norm of a prompt's rows into a buffer: RMS, or layer norm where there is a bias. The kernel: `triton/norm.py`."""

from torch import Tensor

from ostinato.backends.torch.ops.layer_norm import layer_norm_torch
from ostinato.backends.torch.ops.rms_norm import rms_norm_torch


def norm_rows_torch(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    """x float32 [rows, width] to y of the same shape, in y.dtype; y may be x."""
    y.copy_(rms_norm_torch(x, weight, eps) if bias is None else layer_norm_torch(x, weight, bias, eps))
