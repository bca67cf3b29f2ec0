"""A prompt's norms: y = x / rms(x) * weight, or (x - mean) / deviation * weight + bias, a program per row.

x float32 [rows, width], y bfloat16 or float32 of the same shape, written; weight and bias float32 [width]. Sums are
float32 over the whole row at once, so a row's bits do not depend on the others. Steps need no such pass: their norms
are made of the `stats` that every writer of x leaves. Bound by reading x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.launch import TritonLaunch, checked


def bind_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> TritonLaunch:
    """Check everything once and return the launch over all rows of x."""
    (rows, width), device = x.shape, x.device
    block = triton.next_power_of_2(width)
    checked("weight", weight, dtype=torch.float32, shape=(width,), device=device)
    if bias is not None:
        checked("bias", bias, dtype=torch.float32, shape=(width,), device=device)
    given = {
        "x": checked("x", x, dtype=torch.float32, shape=(rows, width), device=device),
        "y": checked("y", y, dtype=y.dtype, shape=(rows, width), device=device),
        **{"weight": weight, "bias": weight if bias is None else bias, "eps": eps},
        **{"WIDTH": width, "BLOCK": block, "LAYER": bias is not None},
    }
    return TritonLaunch.of(norm_kernel, (rows,), given, num_warps=8 if block >= 4096 else 4)


@triton.jit
def norm_kernel(x, y, weight, bias, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LAYER: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < WIDTH
    wide = tl.load(x + row * WIDTH + at, there, 0.0)
    if LAYER:
        wide = tl.where(there, wide - tl.sum(wide, 0) / WIDTH, 0.0)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps) * tl.load(weight + at, there, 0.0)
    if LAYER:
        scaled += tl.load(bias + at, there, 0.0)
    tl.store(y + row * WIDTH + at, scaled.to(y.dtype.element_ty), there)
