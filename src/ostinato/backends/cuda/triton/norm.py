"""A prompt's norms: y = x / rms(x) * weight, or (x - mean) / deviation * weight + bias, a program per row.

x and y bfloat16 or float32 [rows, width], or such columns of a wider matrix, y written; weight and bias float32
[width]. Sums are float32 over the whole row at once, so a row's bits do not depend on the others. Of a
step it norms all heads of a row as one; its other norms are made of the `stats` that every writer of x leaves. Bound by
reading x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.launch import EITHER, TritonLaunch, checked
from ostinato.backends.cuda.triton.attend import narrowed


def bind_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float, n_rows: Tensor | None = None
) -> TritonLaunch:
    """Check everything once and return the launch over all rows of x, or over the first `n_rows`."""
    (rows, width), device = x.shape, x.device
    block = triton.next_power_of_2(width)
    checked("weight", weight, dtype=torch.float32, shape=(width,), device=device)
    if bias is not None:
        checked("bias", bias, dtype=torch.float32, shape=(width,), device=device)
    given = {
        "x": checked("x", x, dtype=EITHER, shape=(rows, width), device=device, columns=True),
        "y": checked("y", y, dtype=EITHER, shape=(rows, width), device=device, columns=True),
        **{"weight": weight, "bias": weight if bias is None else bias, "eps": eps, "n_rows": n_rows},
        **{"WIDTH": width, "BLOCK": block, "LAYER": bias is not None},
        **{"X_STRIDE": x.stride(0), "Y_STRIDE": y.stride(0)},
    }
    return TritonLaunch.of(norm_kernel, (rows,), given, num_warps=8 if block >= 4096 else 4)


@triton.jit
def norm_kernel(
    x, y, weight, bias, eps, n_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LAYER: tl.constexpr,
    X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if n_rows is not None:  # noqa: SIM102 -- the one is known to the compiler, the other to the device
        if row >= tl.load(n_rows):
            return
    at = tl.arange(0, BLOCK)
    there = at < WIDTH
    wide = tl.load(x + row * X_STRIDE + at, there, 0.0).to(tl.float32)
    if LAYER:
        wide = tl.where(there, wide - tl.sum(wide, 0) / WIDTH, 0.0)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps) * tl.load(weight + at, there, 0.0)
    if LAYER:
        scaled += tl.load(bias + at, there, 0.0)
    tl.store(y + row * Y_STRIDE + at, narrowed(scaled, y.dtype.element_ty), there)
