"""The products of a decode step: y = epilogue(norm(x) W^T) for rows 0 to n_rows - 1; twins in `torch/ops`.

x float32 or bfloat16 [n_slots, in]; weight float32, float16, bfloat16 [out, in], `Packed` or `Stack`; out float32 or
bfloat16 [n_slots, out] ([n_slots, out / 2] for "gated"); n_rows int32 [1] on the device; sums in float32. Written in
place: out, stats and prepared.out, rows below n_rows only. Bound by reading the weight once for each 16 rows.

A row's bits depend on its own input alone: tiles come from `tiles.py` by weight type and shape, never by the number of
rows, and partial sums over parts of `in` are added in a fixed order by whichever program comes last.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.chip import SAVES_REGISTERS, registers_alone
from ostinato.backends.cuda.launch import EITHER, FLOATS, Launches, TritonLaunch, checked
from ostinato.backends.cuda.packed import PLANES, Packed, entries_of, for_a_gpu
from ostinato.backends.cuda.triton.tiles import ROWS, Given, Tile, fitted, iteration_bytes, step_columns, tile_for
from ostinato.backends.cuda.triton.unpack import (
    DENSE,
    INTERPRETED,
    Q6_K,
    Q8_0,
    WEIGHT_TYPES,
    by_row,
    k_sum,
    k_unit,
    k_words,
    narrowed,
    operand,
    places_of_rows,
    q6_unit,
    scaled_unit,
)
from ostinato.backends.machine import TUNED, Chip
from ostinato.backends.torch.ops.matmul import Epilogue, InputNorm, PreparedInput, n_stats
from ostinato.backends.torch.weight import Weight
from ostinato.backends.weights import Stack, shape_of
from ostinato.errors import InternalError
from ostinato.models.shape import Activation

STORE, ADD, GATED, ACT, MULTIPLY, ACT_MULTIPLY = (tl.constexpr(i) for i in range(6))
EPILOGUES: Final = {name: i for i, name in enumerate(("store", "add", "gated", "act", "multiply", "act_multiply"))}
# ROOT: x was multiplied by the norm's weight before. ROOT and RMS divide by the root after the product, LAYER before.
NO_NORM, ROOT, RMS, LAYER = (tl.constexpr(i) for i in range(4))
SILU, GELU, GELU_TANH, RELU2, CLAMPED_SWIGLU = (tl.constexpr(i) for i in range(5))
ACTIVATIONS: Final = {name: i for i, name in enumerate(("silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu"))}


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))  # at most 1: nothing overflows
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == SILU:
        return x * sigmoid(x)
    elif ACTIVATION == GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == CLAMPED_SWIGLU:
        bounded = tl.minimum(x, 7.0)
        return bounded * sigmoid(1.702 * bounded)
    elif ACTIVATION == RELU2:
        positive = tl.maximum(x, 0.0)
        return positive * positive
    else:
        # 0.5 x (1 + tanh(u)) is x sigmoid(2 u).
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def beside_gate(up, ACTIVATION: tl.constexpr):
    """What an activated gate is multiplied by."""
    if ACTIVATION == CLAMPED_SWIGLU:
        return tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
    else:
        return up


@triton.jit
def soft_cap(x, cap):
    e = tl.exp(-2.0 * tl.abs(x) / cap)
    bent = cap * (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -bent, bent)


@triton.jit
def load_stats(
    stats_ptr, rows, row_ok, WHICH: tl.constexpr, N_STATS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The partial sums (WHICH 0) or sums of squares (1) of each row: [WIDE, rows], zero where there are none."""
    block = tl.arange(0, WIDE)
    ok = (block < N_STATS)[:, None] & row_ok[None, :]
    return tl.load(stats_ptr + (rows[None, :] * N_STATS + block[:, None]) * 2 + WHICH, mask=ok, other=0.0)


@triton.jit
def input_tile(
    x_ptr, norm_weight_ptr, norm_bias_ptr, rows, row_ok, mean, root, k, K: tl.constexpr, NORM: tl.constexpr,
    MASK_K: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Columns k of x for the product, [k, rows], normed as far as it goes before it, in the product's type."""
    ok = row_ok[None, :]
    if MASK_K:
        ok = ok & tl.expand_dims(k < K, -1)
    x = tl.load(x_ptr + (tl.expand_dims(k, -1) + rows.to(tl.int64) * K), mask=ok, other=0.0)
    if NORM >= RMS:
        weight = tl.expand_dims(tl.load(norm_weight_ptr + k, mask=k < K, other=0.0), -1).to(tl.float32)
        x = x.to(tl.float32)
        if NORM == LAYER:
            shift = tl.expand_dims(tl.load(norm_bias_ptr + k, mask=k < K, other=0.0), -1).to(tl.float32)
            x = tl.where(ok, (x - mean) * root * weight + shift, 0.0)
        else:
            x = x * weight
    return operand(x, NARROW)


@triton.jit
def slice_of(SLICES: tl.constexpr):
    """The number of a slice of columns, [slices, 1], or 0 where there is one: then tiles have no dimension for it."""
    if SLICES == 1:
        return 0
    else:
        return tl.arange(0, SLICES)[:, None]


@triton.jit
def zero_sums(SLICES: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    if SLICES == 1:
        return tl.zeros((BLOCK_N, ROWS), tl.float32)
    else:
        return tl.zeros((SLICES, BLOCK_N, ROWS), tl.float32)


@triton.jit
def load_columns(at, k, K: tl.constexpr, MASK_K: tl.constexpr):
    """A tile of weights, zero where columns k are past the end: a load without a mask where none can be."""
    if MASK_K:
        return tl.load(at, mask=k < K, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def add_dense(
    x_ptr, norm_weight_ptr, norm_bias_ptr, rows, row_ok, mean, root, w_ptr, n, n_second, first_step, last_step,
    K: tl.constexpr, NORM: tl.constexpr, TWO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr, ROWS: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The product of rows n (and n_second) of a dense weight with x, over some blocks of BLOCK_K columns: [n, ROWS]."""
    acc = zero_sums(SLICES, BLOCK_N, ROWS)
    second = zero_sums(SLICES, BLOCK_N, ROWS)
    MASK_K: tl.constexpr = K % BLOCK_K != 0
    first_at = w_ptr + tl.expand_dims(n, -1).to(tl.int64) * K
    second_at = w_ptr + tl.expand_dims(n_second, -1).to(tl.int64) * K
    in_turn = slice_of(SLICES) * (BLOCK_K // SLICES) + tl.arange(0, BLOCK_K // SLICES)
    for step in tl.range(first_step, last_step):
        k = step * BLOCK_K + in_turn
        across = tl.expand_dims(k, -2)
        # Weights first: they wait for nothing, and x for the number of rows.
        w = load_columns(first_at + across, across, K, MASK_K)
        if TWO:
            w2 = load_columns(second_at + across, across, K, MASK_K)
        x = input_tile(x_ptr, norm_weight_ptr, norm_bias_ptr, rows, row_ok, mean, root, k, K, NORM, MASK_K, NARROW)
        acc = tl.dot(operand(w, NARROW), x, acc, input_precision=PRECISION)
        if TWO:
            second = tl.dot(operand(w2, NARROW), x, second, input_precision=PRECISION)
    return acc, second


@triton.jit
def add_packed(
    x_ptr, norm_weight_ptr, norm_bias_ptr, rows, row_ok, mean, root, q_ptr, high_ptr, scale_ptr, block_ptr, pairs_ptr,
    n, n_second, first_step, last_step, K: tl.constexpr, NORM: tl.constexpr, TWO: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, TYPE: tl.constexpr, W: tl.constexpr,
    RUN: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As `add_dense`, of packed rows. An iteration's slice has whole units; of Q4_K and Q5_K a block of 256 columns."""
    acc = zero_sums(SLICES, BLOCK_N, ROWS)
    second = zero_sums(SLICES, BLOCK_N, ROWS)
    ALONE: tl.constexpr = TYPE == Q8_0 and K % 64 != 0  # with an odd block: 32 columns to a unit, not two times 32
    COLUMNS: tl.constexpr = W if ALONE else 2 * W
    UNITS: tl.constexpr = BLOCK_K // SLICES // COLUMNS
    K_TYPE: tl.constexpr = TYPE // 10 == 2 and TYPE != Q6_K
    q, high, scales, blocks = places_of_rows(q_ptr, high_ptr, scale_ptr, block_ptr, n, K, TYPE, W, RUN)
    q2, high2, scales2, blocks2 = places_of_rows(q_ptr, high_ptr, scale_ptr, block_ptr, n_second, K, TYPE, W, RUN)
    for step in tl.range(first_step, last_step, num_stages=STAGES):
        # Types with few columns to a scale are assigned to the slices unit by unit, the others by the UNITS.
        part = step * SLICES + slice_of(SLICES)
        block, minima = zero_sums(SLICES, BLOCK_N, ROWS), zero_sums(SLICES, BLOCK_N, ROWS)
        block2, minima2 = zero_sums(SLICES, BLOCK_N, ROWS), zero_sums(SLICES, BLOCK_N, ROWS)
        pairs = 0
        if pairs_ptr is not None:
            pairs = tl.load(pairs_ptr + tl.arange(0, W))
        if K_TYPE:
            d, s0, s1, m0, m1 = k_words(scales, part, RUN)
            if TWO:
                d2, s02, s12, m02, m12 = k_words(scales2, part, RUN)
        for i in tl.static_range(UNITS):
            u = part * UNITS + i
            k = u * COLUMNS + tl.arange(0, W)
            x0 = input_tile(x_ptr, norm_weight_ptr, norm_bias_ptr, rows, row_ok, mean, root, k, K, NORM, False, True)
            x1 = x0
            if not ALONE:
                k += W
                x1 = input_tile(
                    x_ptr, norm_weight_ptr, norm_bias_ptr, rows, row_ok, mean, root, k, K, NORM, False, True
                )  # fmt: skip
            if TYPE == Q6_K:
                block = q6_unit(block, q, high, scales, pairs, u, x0, x1, 2 * i % 4, W, RUN, ASM)
                if TWO:
                    block2 = q6_unit(block2, q2, high2, scales2, pairs, u, x0, x1, 2 * i % 4, W, RUN, ASM)
            elif K_TYPE:
                s, m = (s0, m0) if i < 2 else (s1, m1)
                block, minima = k_unit(block, minima, q, high, pairs, u, x0, x1, s, m, 2 * i % 4, TYPE, W, RUN, ASM)
                if TWO:
                    s, m = (s02, m02) if i < 2 else (s12, m12)
                    block2, minima2 = k_unit(
                        block2, minima2, q2, high2, pairs, u, x0, x1, s, m, 2 * i % 4, TYPE, W, RUN, ASM
                    )  # fmt: skip
            else:
                acc = scaled_unit(acc, q, high, scales, pairs, u, x0, x1, K, TYPE, W, RUN, ASM)
                if TWO:
                    second = scaled_unit(second, q2, high2, scales2, pairs, u, x0, x1, K, TYPE, W, RUN, ASM)
        if TYPE == Q6_K:
            at = part * (BLOCK_K // SLICES) // 256 * RUN
            acc += by_row(block, tl.load(blocks + at).to(tl.float32))
            if TWO:
                second += by_row(block2, tl.load(blocks2 + at).to(tl.float32))
        elif K_TYPE:
            acc = k_sum(acc, block, minima, d)
            if TWO:
                second = k_sum(second, block2, minima2, d2)
    return acc, second


@triton.jit
def over_slices(acc, SLICES: tl.constexpr):
    if SLICES == 1:
        return acc
    else:
        return tl.sum(acc, 0)


@triton.jit
def finished(v, n, first, bias_ptr, scale_ptr, scale, share_ptr, rows, row_ok, softcap, N: tl.constexpr):
    """Bias, scales and soft cap of v [BLOCK_N, ROWS], whose outputs are first + n."""
    ok = n < N
    if bias_ptr is not None:
        v += tl.load(bias_ptr + first + n, mask=ok, other=0.0).to(tl.float32)[:, None]
    if scale_ptr is not None:
        v *= tl.load(scale_ptr + first + n, mask=ok, other=0.0).to(tl.float32)[:, None]
    if scale is not None:
        v *= scale
    if share_ptr is not None:
        v *= tl.load(share_ptr + rows, mask=row_ok, other=0.0)[None, :]
    if softcap is not None:
        v = soft_cap(v, softcap)
    return v


@triton.jit
def put(
    v, out_ptr, stats_ptr, prepared_ptr, prepared_weight_ptr, rows, row_ok, n, first_n, N: tl.constexpr,
    OUT_STRIDE: tl.constexpr, N_STATS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """v [BLOCK_N, ROWS] to out[rows, n], added to or multiplied with what is there, and its partial sums to stats."""
    ok = (n < N)[:, None] & row_ok[None, :]
    at = rows[None, :].to(tl.int64) * OUT_STRIDE + n[:, None]
    if JOIN == ADD:
        v = tl.load(out_ptr + at, mask=ok, other=0.0).to(tl.float32) + v
    elif JOIN >= MULTIPLY:
        v = tl.load(out_ptr + at, mask=ok, other=0.0).to(tl.float32) * v
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(out_ptr + at, narrowed(v), mask=ok)
    else:
        tl.store(out_ptr + at, v, mask=ok)
    if prepared_ptr is not None:
        gain = tl.load(prepared_weight_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(prepared_ptr + at, narrowed(v * gain[:, None]), mask=ok)
    if stats_ptr is not None:
        blocks = tl.reshape(tl.where(ok, v, 0.0), (BLOCK_N // 16, 16, ROWS))
        block = first_n // 16 + tl.arange(0, BLOCK_N // 16)
        to = stats_ptr + (rows[None, :] * N_STATS + block[:, None]) * 2
        there = (block < N_STATS)[:, None] & row_ok[None, :]
        tl.store(to, tl.sum(blocks, 1), mask=there)
        tl.store(to + 1, tl.sum(blocks * blocks, 1), mask=there)


@triton.jit
def widened(x):
    """[n, 8] to [n, 16], zeros behind."""
    both = tl.permute(tl.join(x, tl.zeros_like(x)), (0, 2, 1))
    return tl.reshape(both, (x.shape[0], 16))


@triton.jit
def product(
    x_ptr, norm_weight_ptr, norm_bias_ptr, first_row, n_rows, mean, root, w_ptr, high_ptr, w_scale_ptr, block_ptr,
    pairs_ptr, n, n_second, part, K: tl.constexpr, NORM: tl.constexpr, TWO: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SLICES: tl.constexpr, SPLIT_K: tl.constexpr, ROWS: tl.constexpr, TYPE: tl.constexpr,
    W: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, FEW: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Rows n (and n_second, for TWO) of any weight times rows of x, over the part-th of SPLIT_K: [BLOCK_N, ROWS]."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PART: tl.constexpr = (STEPS + SPLIT_K - 1) // SPLIT_K
    first_step, last_step = 0, STEPS
    if SPLIT_K > 1:
        first_step = part * PART
        last_step = tl.minimum(STEPS, first_step + PART)
    rows = first_row + tl.arange(0, ROWS)
    if TYPE == DENSE:
        acc, second = add_dense(
            x_ptr, norm_weight_ptr, norm_bias_ptr, rows, rows < n_rows, mean, root, w_ptr, n, n_second, first_step,
            last_step, K, NORM, TWO, BLOCK_N, BLOCK_K, SLICES, ROWS, NARROW, PRECISION,
        )  # fmt: skip
        return over_slices(acc, SLICES), over_slices(second, SLICES)
    else:
        if FEW and n_rows - first_row <= 8:
            # The work on each weight grows with the rows: half of them take half. The columns of a dot are independent
            # of each other and summed alike, so the bits are the same.
            few = first_row + tl.arange(0, 8)
            acc8, second8 = add_packed(
                x_ptr, norm_weight_ptr, norm_bias_ptr, few, few < n_rows, mean, root, w_ptr, high_ptr, w_scale_ptr,
                block_ptr, pairs_ptr, n, n_second, first_step, last_step, K, NORM, TWO, BLOCK_N, BLOCK_K, SLICES, 8,
                TYPE, W, RUN, STAGES, ASM,
            )  # fmt: skip
            acc, second = widened(over_slices(acc8, SLICES)), widened(over_slices(second8, SLICES))
        elif TWO and APART:
            # The same sums in the same order, and the registers of one product at a time.
            acc16, _none = add_packed(
                x_ptr, norm_weight_ptr, norm_bias_ptr, rows, rows < n_rows, mean, root, w_ptr, high_ptr, w_scale_ptr,
                block_ptr, pairs_ptr, n, n, first_step, last_step, K, NORM, False, BLOCK_N, BLOCK_K, SLICES, ROWS,
                TYPE, W, RUN, STAGES, ASM,
            )  # fmt: skip
            second16, _none = add_packed(
                x_ptr, norm_weight_ptr, norm_bias_ptr, rows, rows < n_rows, mean, root, w_ptr, high_ptr, w_scale_ptr,
                block_ptr, pairs_ptr, n_second, n_second, first_step, last_step, K, NORM, False, BLOCK_N, BLOCK_K,
                SLICES, ROWS, TYPE, W, RUN, STAGES, ASM,
            )  # fmt: skip
            acc, second = over_slices(acc16, SLICES), over_slices(second16, SLICES)
        else:
            acc16, second16 = add_packed(
                x_ptr, norm_weight_ptr, norm_bias_ptr, rows, rows < n_rows, mean, root, w_ptr, high_ptr, w_scale_ptr,
                block_ptr, pairs_ptr, n, n_second, first_step, last_step, K, NORM, TWO, BLOCK_N, BLOCK_K, SLICES, ROWS,
                TYPE, W, RUN, STAGES, ASM,
            )  # fmt: skip
            acc, second = over_slices(acc16, SLICES), over_slices(second16, SLICES)
        return acc, second


@triton.jit
def with_other_parts(
    acc, second, partial_ptr, counter_ptr, group, part, TWO: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Leave this program's part of the sums, and say how many came before; the last one takes all parts in order."""
    SIZE: tl.constexpr = BLOCK_N * ROWS
    LANES: tl.constexpr = 2 if TWO else 1
    parts_at = partial_ptr + group.to(tl.int64) * (SPLIT_K * LANES * SIZE)
    parts_at += tl.arange(0, BLOCK_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    mine = parts_at + part * (LANES * SIZE)
    tl.store(mine, acc)
    if TWO:
        tl.store(mine + SIZE, second)
    # All of this program's stores come before its arrival, and the last to arrive sees everyone's.
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + group, 1, sem="acq_rel")
    if arrived == SPLIT_K - 1:
        tl.atomic_xchg(counter_ptr + group, 0, sem="relaxed")
        acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
        second = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for i in tl.static_range(SPLIT_K):
            acc += tl.load(parts_at + i * (LANES * SIZE), cache_modifier=".cg")
            if TWO:
                second += tl.load(parts_at + (i * LANES + 1) * SIZE, cache_modifier=".cg")
    return arrived, acc, second


@triton.jit
def matmul_kernel(
    x_ptr, w_ptr, high_ptr, w_scale_ptr, block_ptr, pairs_ptr, out_ptr, n_rows_ptr,
    stats_in_ptr, norm_weight_ptr, norm_bias_ptr, eps,
    bias_ptr, scale_ptr, scale, share_ptr, softcap, stats_ptr, prepared_ptr, prepared_weight_ptr, partial_ptr,
    counter_ptr,
    N: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr, OUT_STRIDE: tl.constexpr, N_STATS: tl.constexpr,
    K_STATS: tl.constexpr, STATS_WIDE: tl.constexpr, NORM: tl.constexpr, EPILOGUE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TYPE: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr, ASM: tl.constexpr, FEW: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of ROWS rows over a SPLIT_K-th of the columns. Grid: row tiles, output tiles, parts.

    N is the number of outputs, FIRST the weight's row of the first; a gated weight has the N rows after those as well.
    """
    row_tile, n_tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Outputs past the end read the last one's weights and are never stored.
    inside = FIRST + tl.minimum(n, N - 1)
    TWO: tl.constexpr = EPILOGUE == GATED
    n_rows = tl.load(n_rows_ptr)
    if row_tile > 0:  # noqa: SIM102 -- not one condition: the first tile asks for weights before it knows n_rows
        if row_tile * ROWS >= n_rows:
            return
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    row_ok = rows < n_rows
    root = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    if NORM == LAYER:
        mean = tl.sum(load_stats(stats_in_ptr, rows, row_ok, 0, K_STATS, STATS_WIDE), 0) / K
        squares = tl.sum(load_stats(stats_in_ptr, rows, row_ok, 1, K_STATS, STATS_WIDE), 0) / K
        root = tl.rsqrt(squares - mean * mean + eps)
    elif NORM != NO_NORM and EARLY:
        loaded = load_stats(stats_in_ptr, rows, row_ok, 1, K_STATS, STATS_WIDE)
    acc, second = product(
        x_ptr, norm_weight_ptr, norm_bias_ptr, row_tile * ROWS, n_rows, mean, root, w_ptr, high_ptr, w_scale_ptr,
        block_ptr, pairs_ptr, inside, inside + N, part, K, NORM, TWO, BLOCK_N, BLOCK_K, SLICES, SPLIT_K, ROWS, TYPE, W,
        RUN, STAGES, ASM, FEW, NARROW, PRECISION, APART,
    )  # fmt: skip
    if SPLIT_K > 1:
        group = row_tile * tl.num_programs(1) + n_tile
        arrived, acc, second = with_other_parts(
            acc, second, partial_ptr, counter_ptr, group, part, TWO, BLOCK_N, SPLIT_K, ROWS
        )  # fmt: skip
        if arrived < SPLIT_K - 1:
            return
    if NORM > NO_NORM and NORM < LAYER:
        if not EARLY:
            loaded = load_stats(stats_in_ptr, rows, row_ok, 1, K_STATS, STATS_WIDE)
        root = tl.rsqrt(tl.sum(loaded, 0) / K + eps)
        acc *= root[None, :]
        second *= root[None, :]
    v = finished(acc, n, 0, bias_ptr, scale_ptr, scale, share_ptr, rows, row_ok, softcap, N)
    if TWO:
        up = finished(second, n, N, bias_ptr, scale_ptr, scale, share_ptr, rows, row_ok, softcap, N)
        v = activate(v, ACTIVATION) * beside_gate(up, ACTIVATION)
    elif (EPILOGUE == ACT) | (EPILOGUE == ACT_MULTIPLY):
        v = activate(v, ACTIVATION)
    elif EPILOGUE == MULTIPLY:
        v = beside_gate(v, ACTIVATION)
    put(
        v, out_ptr, stats_ptr, prepared_ptr, prepared_weight_ptr, rows, row_ok, n, n_tile * BLOCK_N, N, OUT_STRIDE,
        N_STATS, BLOCK_N, ROWS, EPILOGUE,
    )  # fmt: skip


def bind_matmul(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    n_rows: Tensor,
    *,
    epilogue: Epilogue = "store",
    norm: InputNorm | None = None,
    bias: Tensor | None = None,
    scale: Tensor | float | None = None,
    share: Tensor | None = None,
    softcap: float | None = None,
    activation: Activation | None = None,
    stats: Tensor | None = None,
    prepared: PreparedInput | None = None,
    tile: Tile | None = None,
    chip: Chip = TUNED,
) -> TritonLaunch | Launches:
    """The product as one call without arguments; what it computes is `matmul_torch`. Every argument stays where it is.

    A `Stack` is one launch for each part; "gated" over a stack (gate, up), or of Q6_K, is two, the second multiplied
    into what the first wrote. Not given a tile, the one of the weight's type and shape is taken, as it fits the chip.
    """
    device, n_slots, k = x.device, len(x), shape_of(weight)[1]
    checked("n_rows", n_rows, dtype=torch.int32, shape=(1,), device=device)
    if share is not None:
        checked("share", share, dtype=torch.float32, shape=(n_slots,), device=device)
    if epilogue in ("gated", "act", "act_multiply") and activation is None:
        raise InternalError(f"the epilogue {epilogue!r} needs an activation")
    if isinstance(weight, Stack) and (stats is not None or prepared is not None):
        raise InternalError("a stack of weights leaves no stats: give its rows one type")
    pieces = _pieces(weight, epilogue, split=tile is None)
    whole = epilogue == "gated" or len(pieces) == 1
    launches: list[TritonLaunch] = []
    start = 0
    for part, first, n_outputs, how in pieces:
        own, last = slice(start, start + n_outputs), len(launches) == len(pieces) - 1
        start, packed = own.stop, isinstance(part, Packed)
        mine, n = out if whole else out[:, own], n_outputs // 2 if how == "gated" else n_outputs
        own_bias, own_scale = None if bias is None else bias[own], scale[own] if isinstance(scale, Tensor) else scale
        inputs = Given.of(ROWS, x, norm)
        cut = fitted(tile_for(part, how), part, how, inputs, chip) if tile is None else tile
        grid = (triton.cdiv(n_slots, ROWS), triton.cdiv(n, cut.block_n), cut.split_k)
        given = {
            "x_ptr": checked("x", x, dtype=EITHER, shape=(1, k), device=device),
            **norm_arguments(norm, n_slots, k, device),
            **weight_arguments(part, device),
            **cut_arguments(part, cut, device, chip),
            **scale_arguments(own_bias, own_scale, n_outputs, device),
            **out_arguments(mine, stats if last else None, prepared if last else None, n_slots, n, device),
            **{"n_rows_ptr": n_rows, "softcap": softcap, "share_ptr": share, "partial_ptr": None, "counter_ptr": None},
            **{"N": n, "K": k, "FIRST": first, "OUT_STRIDE": mine.stride(0), "ROWS": ROWS},
            **{"EPILOGUE": EPILOGUES[how], "ACTIVATION": ACTIVATIONS[activation or "silu"]},
            **{"SPLIT_K": cut.split_k, "APART": cut.apart},
            # Eight rows are half a tile of NVIDIA's tensor cores, and less than other matrix cores take.
            "FEW": cut.few and packed and norm_kind(norm) != 3 and chip.has_ptx,
            # Sums of squares asked for before the product and added up after it; unless they would fill the registers.
            "EARLY": triton.next_power_of_2(n_stats(k)) * ROWS <= (16 if packed else 32) * 32 * cut.num_warps,
        }
        if cut.split_k > 1:
            size = (grid[0] * grid[1], cut.split_k, 2 if how == "gated" else 1, cut.block_n, ROWS)
            given["partial_ptr"] = torch.empty(size, dtype=torch.float32, device=device)
            given["counter_ptr"] = torch.zeros(grid[0] * grid[1], dtype=torch.int32, device=device)
        options = options_of(cut)
        if chip.capability == SAVES_REGISTERS:
            in_flight = (cut.num_stages - 1) * iteration_bytes(part, cut, how, inputs)
            options = registers_alone(chip, in_flight, cut.num_warps, blocks=2) | options
        launches.append(TritonLaunch.of(matmul_kernel, grid, given, **options))
    return launches[0] if len(launches) == 1 else Launches(tuple(launches))


def _pieces(weight: Weight, epilogue: Epilogue, *, split: bool) -> list[tuple[Tensor | Packed, int, int, Epilogue]]:
    """What each launch multiplies: rows of a weight, from which on and how many; and its own epilogue. `split`: gate
    and up of one weight may be two."""
    stacked = weight.parts if isinstance(weight, Stack) else (weight,)
    parts = [(for_a_gpu(part), 0, shape_of(part)[0]) for part in stacked]
    heights = [n for _, _, n in parts]
    if epilogue == "gated" and isinstance(weight, Stack) and (len(parts) != 2 or heights[0] != heights[1]):
        raise InternalError(f"a gated stack is (gate, up) of equal height, not {heights}")
    if epilogue == "gated" and isinstance(weight, Packed) and weight.type == "Q6_K" and split:
        # Two products of Q6_K at once leave too few outputs to a warp (see `TILES`): one after the other is faster.
        parts = [(weight, first, heights[0] // 2) for first in (0, heights[0] // 2)]
    hows: list[Epilogue] = ["act", "multiply"] if epilogue == "gated" and len(parts) > 1 else [epilogue] * len(parts)
    return [(*part, how) for part, how in zip(parts, hows, strict=True)]


# What kernels of products take, by the names of their parameters


def out_arguments(
    out: Tensor, stats: Tensor | None, prepared: PreparedInput | None, n_slots: int, n: int, device: torch.device
) -> dict[str, Any]:
    """Where n outputs of each row go, and what is left beside them."""
    checked("out", out, dtype=EITHER, shape=(n_slots, n), device=device, columns=True)
    given = {"out_ptr": out, "stats_ptr": stats, "prepared_ptr": None, "prepared_weight_ptr": None}
    if stats is not None:
        checked("stats", stats, dtype=torch.float32, shape=(n_slots, n_stats(n), 2), device=device)
    if prepared is not None:
        checked("prepared.out", prepared.out, dtype=torch.bfloat16, shape=(n_slots, n), device=device)
        checked("prepared.weight", prepared.weight, dtype=FLOATS, shape=(n,), device=device)
        given |= {"prepared_ptr": prepared.out, "prepared_weight_ptr": prepared.weight}
    return given | {"N_STATS": n_stats(n)}


def scale_arguments(bias: Tensor | None, scale: Tensor | float | None, n: int, device: torch.device) -> dict[str, Any]:
    """What n outputs are added to, and what they are multiplied by: each its own, or all by one number."""
    each = scale if isinstance(scale, Tensor) else None
    for name, tensor in (("scale", each), ("bias", bias)):
        if tensor is not None:
            checked(name, tensor, dtype=FLOATS, shape=(n,), device=device)
    one = float(scale) if isinstance(scale, float | int) else None
    return {"bias_ptr": bias, "scale_ptr": each, "scale": one}


def norm_kind(norm: InputNorm | None) -> int:
    if norm is None:
        return 0
    return 3 if norm.bias is not None else 1 if norm.weight is None else 2


def norm_arguments(norm: InputNorm | None, n_slots: int, k: int, device: torch.device) -> dict[str, Any]:
    """The norm of k inputs."""
    names = ("stats_in_ptr", "norm_weight_ptr", "norm_bias_ptr", "eps")
    found = (None,) * 4 if norm is None else (norm.stats, norm.weight, norm.bias, norm.eps)
    if norm is not None:
        checked("norm.stats", norm.stats, dtype=torch.float32, shape=(n_slots, n_stats(k), 2), device=device)
        for name, tensor in (("norm.weight", norm.weight), ("norm.bias", norm.bias)):
            if tensor is not None:
                checked(name, tensor, dtype=FLOATS, shape=(k,), device=device)
    sizes = {"NORM": norm_kind(norm), "K_STATS": n_stats(k), "STATS_WIDE": triton.next_power_of_2(n_stats(k))}
    return dict(zip(names, found, strict=True)) | sizes


def weight_arguments(weight: Tensor | Packed, device: torch.device) -> dict[str, Any]:
    """A weight's planes, of which a dense one has the first alone, and how they are read."""
    names = ("w_ptr", "high_ptr", "w_scale_ptr", "block_ptr")
    given: dict[str, Any] = dict.fromkeys(names)
    if isinstance(weight, Tensor):
        given["w_ptr"] = checked("weight", weight, dtype=FLOATS, shape=(1, None), device=device)
        return given | {"TYPE": 0, "W": 0, "RUN": 1, "NARROW": weight.dtype == torch.bfloat16}
    for pointer, name in zip(names, PLANES, strict=True):
        plane = weight.plane(name)
        if plane is not None:
            width, n_bytes = entries_of(weight)[name]
            checked(f"weight.{name}", plane, dtype=torch.uint8, shape=(n_bytes,), device=device)
            given[pointer] = plane.view({1: torch.uint8, 2: torch.float16, 4: torch.int32}[width])
    return given | {"TYPE": WEIGHT_TYPES[weight.type], "W": weight.unit_bytes, "RUN": weight.run, "NARROW": True}


def cut_arguments(weight: Tensor | Packed, cut: Tile, device: torch.device, chip: Chip) -> dict[str, Any]:
    """How the product of a step with a weight is cut, and how its parts are multiplied."""
    pairs, precision, asm = None, "ieee", False
    if isinstance(weight, Packed):
        asm = chip.has_ptx and not INTERPRETED.value
        if weight.plane("high") is not None:  # what `nibble_dots` needs for weights of more than four bits
            pairs = torch.arange(32, dtype=torch.int32, device=device) // 4 * 2
    elif weight.dtype == torch.float16 and chip.has_ptx:
        precision = "tf32"
    sizes = {"BLOCK_N": cut.block_n, "BLOCK_K": step_columns(weight, cut), "SLICES": cut.slices}
    return sizes | {"STAGES": cut.num_stages, "pairs_ptr": pairs, "PRECISION": precision, "ASM": asm}


def options_of(cut: Tile) -> dict[str, object]:
    options: dict[str, object] = {"num_warps": cut.num_warps, "num_stages": cut.num_stages}
    return options if cut.max_registers is None else options | {"maxnreg": cut.max_registers}
