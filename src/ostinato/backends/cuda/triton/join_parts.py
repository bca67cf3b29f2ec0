"""The parts of a second embedding beside a product of the first; the twin is `torch/ops/join_parts.py`.

given and own float32 [rows, n_parts * width], weight float32 [width], parts float32 [n_parts, rows or more, width],
written for the first n_rows rows. A program takes one part of a row, so a row's bits depend on the row alone. Bound by
latency.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.launch import TritonLaunch, checked


def bind_join_parts(
    given: Tensor, own: Tensor, parts: Tensor, weight: Tensor, eps: float, n_rows: Tensor
) -> TritonLaunch:
    """Check everything once and return the launch."""
    (rows, columns), device, (width,) = given.shape, given.device, weight.shape
    n_parts = columns // width
    arguments = {
        "given": checked("given", given, dtype=torch.float32, shape=(rows, n_parts * width), device=device),
        "own": checked("own", own, dtype=torch.float32, shape=(rows, n_parts * width), device=device),
        "parts": checked("parts", parts, dtype=torch.float32, shape=(n_parts, None, width), device=device),
        "weight": checked("weight", weight, dtype=torch.float32, shape=(width,), device=device),
        "n_rows": checked("n_rows", n_rows, dtype=torch.int32, shape=(1,), device=device),
        **{"eps": eps, "COLUMNS": columns, "WIDTH": width, "BLOCK": triton.next_power_of_2(width)},
        "PART_STRIDE": parts.stride(0),
    }
    return TritonLaunch.of(join_parts_kernel, (rows, n_parts), arguments, num_warps=1)


@triton.jit
def join_parts_kernel(
    given, own, parts, weight, n_rows, eps, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PART_STRIDE: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    if row < tl.load(n_rows):
        i = tl.arange(0, BLOCK)
        there = i < WIDTH
        at = row * COLUMNS + part * WIDTH + i
        x = tl.load(given + at, mask=there, other=0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * tl.load(weight + i, mask=there, other=0.0)
        x = (x + tl.load(own + at, mask=there, other=0.0)) * 0.7071067811865476
        tl.store(parts + part * PART_STRIDE + row * WIDTH + i, x, mask=there)
