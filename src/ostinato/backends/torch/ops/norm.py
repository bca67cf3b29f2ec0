"""The norm of a prompt's rows into a buffer: RMS, or layer norm where there is a bias. The kernel: `triton/norm.py`."""

from __future__ import annotations

from torch import Tensor

from ostinato.backends.torch.ops.layer_norm import layer_norm_torch
from ostinato.backends.torch.ops.rms_norm import rms_norm_torch


def norm_rows_torch(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float, n_rows: Tensor | None = None
) -> None:
    """x float32 or bfloat16 [rows, width], which may be columns of a wider matrix, to y of the same shape, in y.dtype;
    y may be x. With `n_rows` int32 [1], the first so many rows."""
    live = slice(None if n_rows is None else int(n_rows))
    x, y = x[live].float(), y[live]
    y.copy_(rms_norm_torch(x, weight, eps) if bias is None else layer_norm_torch(x, weight, bias, eps))
