"""The products of a prompt's chunk: y = (x W^T + b) * scale; the twin is `backends/torch/ops/gemm.py`.

x bfloat16 or float32 [rows, in]; weight float32, float16, bfloat16 [out, in], `Packed` or `Stack`; out bfloat16 or
float32 [rows, out], written in place; sums in float32. bfloat16 and packed weights meet x rounded to bfloat16, packed
ones as bfloat16 tiles made in the kernel; float16 weights meet x in tf32, which holds them exactly, float32 weights in
three tf32 products. Bound by the tensor cores from some hundred rows on.

A row's bits depend on the row alone: the tile is one for all numbers of rows, the columns are summed in one order, and
an output is never shared between programs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.chip import stages_that_fit
from ostinato.backends.cuda.launch import EITHER, Launches, TritonLaunch, checked
from ostinato.backends.cuda.packed import Packed, for_a_gpu
from ostinato.backends.cuda.triton.matmul import scale_arguments, weight_arguments
from ostinato.backends.cuda.triton.unpack import (
    DENSE,
    INTERPRETED,
    MXFP4,
    Q6_K,
    Q8_0,
    byte_of,
    bytes_at,
    five_or_six,
    float4,
    halves_of,
    k_words,
    narrowed,
    operand,
    places_of_rows,
    power_of_two,
    signed_byte_of,
    two_powers,
    words_at,
)
from ostinato.backends.machine import TUNED, Chip
from ostinato.backends.torch.weight import Weight
from ostinato.backends.weights import Stack, shape_of


@dataclass(frozen=True, slots=True)
class GemmTile:
    """A program makes block_m rows of block_n outputs, block_k columns at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# The tile decides the bits, so it comes from the weight's type and never from the number of rows.
GEMM_TILES: Final = {
    "bf16": GemmTile(128, 128, 64, num_warps=8, num_stages=4),
    "f16": GemmTile(128, 128, 32, num_warps=8, num_stages=3),
    "f32": GemmTile(64, 64, 32, num_warps=4, num_stages=3),
    "packed": GemmTile(128, 128, 64, num_warps=8, num_stages=3),
}


@triton.jit
def float_of(small, ZERO: tl.constexpr):
    """Integers below 2^23, less ZERO, as float32: put into the mantissa of 2^23, faster than a conversion."""
    return (small.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def side_by_side(low, top):
    """[n, w] and [n, w] to [n, 2 w], the first before the second."""
    both = tl.permute(tl.join(low, top), (0, 2, 1))
    return tl.reshape(both, (low.shape[0], 2 * low.shape[1]))


@triton.jit
def unit_values(
    quants, high, scales, blocks, u, K: tl.constexpr, TYPE: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    """Unit u of rows that begin at these places, dequantised: float32 [n, columns of a unit], as the twin has them."""
    if TYPE == Q8_0:
        values = float_of(bytes_at(quants, u, W, RUN) ^ 128, 128)
        if K % 64 == 0:
            first, second = halves_of(words_at(scales + u // 2 * RUN))
            return values * tl.where(u % 2 == 0, first, second)[:, None]
        else:
            return values * tl.load(scales + u * RUN).to(tl.float32)[:, None]
    else:
        BITS: tl.constexpr = TYPE % 10
        HAS_MINIMUM: tl.constexpr = TYPE >= 14 and TYPE != Q6_K and TYPE != MXFP4
        q = bytes_at(quants, u, W, RUN)
        low, top = (q & 15).to(tl.int32), (q >> 4).to(tl.int32)
        if BITS == 5 and W == 16:
            word = words_at(high + u * RUN)
            low, top = five_or_six(low, top, word, word >> 8, W, BITS)
        elif BITS > 4:
            first_bits, second_bits = words_at(high + 2 * u * RUN), words_at(high + (2 * u + 1) * RUN)
            low, top = five_or_six(low, top, first_bits, second_bits, W, BITS)
        if TYPE == MXFP4:
            if W == 32:
                s0, s1 = two_powers(scales + u * RUN)
            else:
                s0 = power_of_two(tl.load(scales + u * RUN))
                s1 = s0
        elif TYPE == Q6_K:
            word = words_at(scales + u // 2 * RUN) >> (u % 2 * 16)
            d = tl.load(blocks + u // 8 * RUN).to(tl.float32)
            s0, s1 = d * signed_byte_of(word, 0), d * signed_byte_of(word, 1)
        elif TYPE // 10 == 2:
            halves, scale0, scale1, minimum0, minimum1 = k_words(scales, u // 4, RUN)
            d, m = halves_of(halves)
            word = tl.where(u % 4 < 2, scale0, scale1) >> (u % 2 * 16)
            minimum = tl.where(u % 4 < 2, minimum0, minimum1) >> (u % 2 * 16)
            s0, s1 = d * byte_of(word, 0), d * byte_of(word, 1)
            m0, m1 = -m * byte_of(minimum, 0), -m * byte_of(minimum, 1)
        elif TYPE // 10 == 1:
            if W == 32:
                s0, m0 = halves_of(words_at(scales + 2 * u * RUN))
                s1, m1 = halves_of(words_at(scales + (2 * u + 1) * RUN))
            else:
                s0, m0 = halves_of(words_at(scales + u * RUN))
                s1, m1 = s0, m0
        else:
            if W == 32:
                s0, s1 = halves_of(words_at(scales + u * RUN))
            else:
                s0 = tl.load(scales + u * RUN).to(tl.float32)
                s1 = s0
        if TYPE == MXFP4:
            low, top = float4(low) * s0[:, None], float4(top) * s1[:, None]
        elif HAS_MINIMUM:
            low = float_of(low, 0) * s0[:, None] + m0[:, None]
            top = float_of(top, 0) * s1[:, None] + m1[:, None]
        else:
            low, top = float_of(low, 1 << (BITS - 1)) * s0[:, None], float_of(top, 1 << (BITS - 1)) * s1[:, None]
        return side_by_side(low, top)


@triton.jit(do_not_specialize=["m_rows"])
def gemm_kernel(
    x_ptr, w_ptr, high_ptr, w_scale_ptr, block_ptr, out_ptr, bias_ptr, scale_ptr, scale, m_rows,
    N: tl.constexpr, K: tl.constexpr, OUT_STRIDE: tl.constexpr, TYPE: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of BLOCK_N outputs. Grid: row tiles, output tiles; so those that read the same weights
    run together."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and outputs past the end read the last one's, and are never stored.
    x_at = x_ptr + tl.minimum(rows, m_rows - 1)[:, None].to(tl.int64) * K
    inside = tl.minimum(n, N - 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if TYPE == DENSE:
        w_at = w_ptr + inside[:, None].to(tl.int64) * K
        for start in tl.range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)[None, :]
            if K % BLOCK_K == 0:
                x, w = tl.load(x_at + k), tl.load(w_at + k)
            else:
                x, w = tl.load(x_at + k, mask=k < K, other=0.0), tl.load(w_at + k, mask=k < K, other=0.0)
            acc = tl.dot(operand(x, NARROW), tl.trans(operand(w, NARROW)), acc, input_precision=PRECISION)
    else:
        UNIT: tl.constexpr = W if TYPE == Q8_0 else 2 * W
        quants, high, scales, blocks = places_of_rows(
            w_ptr, high_ptr, w_scale_ptr, block_ptr, inside, K, TYPE, W, RUN
        )  # fmt: skip
        for u in tl.range(0, K // UNIT):
            x = tl.load(x_at + (u * UNIT + tl.arange(0, UNIT))[None, :])
            w = unit_values(quants, high, scales, blocks, u, K, TYPE, W, RUN)
            acc = tl.dot(operand(x, True), tl.trans(narrowed(w)), acc)
    ok = n < N
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=ok, other=0.0).to(tl.float32)[None, :]
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + n, mask=ok, other=0.0).to(tl.float32)[None, :]
    if scale is not None:
        acc *= scale
    to = out_ptr + rows[:, None].to(tl.int64) * OUT_STRIDE + n[None, :]
    mask = (rows < m_rows)[:, None] & ok[None, :]
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(to, narrowed(acc), mask=mask)
    else:
        tl.store(to, acc, mask=mask)


def fitted(cut: GemmTile, weight: Tensor | Packed, x: Tensor, chip: Chip) -> GemmTile:
    """The same tile with as many stages as a block's shared memory has room for, those of the table at most."""
    n_bytes = cut.block_k * (cut.block_m * x.element_size() + cut.block_n * weight.dtype.itemsize)
    return replace(cut, num_stages=stages_that_fit(chip, cut.num_stages, n_bytes))


def bind_gemm(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | float | None = None,
    tile: GemmTile | None = None,
    chip: Chip = TUNED,
) -> TritonLaunch | Launches:
    """The product as one call without arguments; arguments stay where they are. A `Stack` is a launch for each part."""
    parts, device, m_rows = weight.parts if isinstance(weight, Stack) else (weight,), x.device, len(x)
    launches, start = [], 0
    for part in map(for_a_gpu, parts):
        n, k = shape_of(part)
        own, kind, precision = slice(start, start + n), "packed", "ieee"
        start, mine = own.stop, out if len(parts) == 1 else out[:, own]
        if isinstance(part, Tensor):
            kind = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[part.dtype]
            plain = INTERPRETED.value or not chip.has_ptx
            precision = {
                "bf16": "ieee",
                "f16": "tf32" if chip.has_ptx else "ieee",
                "f32": "ieee" if plain else "tf32x3",
            }[kind]
        cut = fitted(GEMM_TILES[kind], part, x, chip) if tile is None else tile
        own_bias, own_scale = None if bias is None else bias[own], scale[own] if isinstance(scale, Tensor) else scale
        given = {
            "x_ptr": checked("x", x, dtype=EITHER, shape=(1, k), device=device),
            "out_ptr": checked("out", mine, dtype=EITHER, shape=(m_rows, n), device=device, columns=True),
            **scale_arguments(own_bias, own_scale, n, device),
            **weight_arguments(part, device),
            **{"m_rows": m_rows, "N": n, "K": k, "OUT_STRIDE": mine.stride(0), "PRECISION": precision},
            **{"BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k},
        }
        grid = (triton.cdiv(m_rows, cut.block_m), triton.cdiv(n, cut.block_n))
        options = {"num_warps": cut.num_warps, "num_stages": cut.num_stages}
        launches.append(TritonLaunch.of(gemm_kernel, grid, given, **options))
    return launches[0] if len(launches) == 1 else Launches(tuple(launches))
