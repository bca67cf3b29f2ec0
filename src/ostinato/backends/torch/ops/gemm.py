"""The products of a prompt's chunk: y = x W^T + b, scaled: the definition. The kernel: `triton/gemm.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.backends.torch.weight import Weight, dense_of, dtype_of


def gemm_torch(
    x: Tensor, weight: Weight, out: Tensor, *, bias: Tensor | None = None, scale: Tensor | float | None = None
) -> None:
    """x [rows, in] in bfloat16 or float32, out [rows, out] in either, written; any weight. Rows without a norm come in
    float32, and meet weights of bfloat16 rounded."""
    if x.dtype == torch.float32 and dtype_of(weight) == torch.bfloat16:
        x = x.bfloat16().float()
    y = F.linear(x, dense_of(weight, x.dtype)).float()
    y = y if bias is None else y + bias.float()
    out.copy_(y if scale is None else y * scale)
