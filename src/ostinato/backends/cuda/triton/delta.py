"""The gated delta rule and the gated short convolution over runs of rows; twins in `torch/ops/runs.py`.

As in `scans.py`, a program has a piece of a sequence's state in registers and takes the run's rows one after the other,
a step's single row and a chunk's hundreds by the same code: bits do not depend on where a prompt was cut. All float32.
A step is bound by reading and writing the states; a chunk by the latency of one row after the other, which is why the
next row is read ahead.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.launch import EITHER, Launches, TritonLaunch, checked
from ostinato.backends.cuda.triton.matmul import sigmoid
from ostinato.backends.cuda.triton.runs import columns_of, run_arguments, run_at, store_rows
from ostinato.backends.cuda.triton.scans import softplus
from ostinato.backends.torch.ops.delta_rule import EPS
from ostinato.backends.torch.ops.runs import ChunkRuns, Runs
from ostinato.models.blocks import DeltaDecay
from ostinato.models.shape import DeltaShape

# Rows of a head's matrix of states, that a program of one warp has. With four warps sums wait at 15 barriers a row, and
# all programs together have 1.4 times the instructions (counted in the PTX for sm_90, at keys and values of 128).
VALUE_ROWS: Final = 8
CHANNELS: Final = 128  # of a short convolution, that a program has


def bind_delta_runs(
    x: Tensor, beta_alpha: Tensor, out: Tensor, state: Tensor, decay: DeltaDecay, shape: DeltaShape, runs: Runs
) -> TritonLaunch:
    """As `delta_runs_torch`; a program for each run, value head and some rows of its matrix."""
    device, n, heads = x.device, x.shape[0], shape.n_heads
    columns_of("beta_alpha", beta_alpha, 2 * heads, device)
    for name, values in (("a", decay.a), ("dt_bias", decay.dt_bias)):
        checked(name, values, dtype=torch.float32, shape=(heads,), device=device)
    sizes = (None, heads, shape.value_width, shape.key_width)
    given = run_arguments(runs, device) | {
        "x": checked("x", x, dtype=torch.float32, shape=(n, sum(shape.conv_parts)), device=device),
        "out": checked("out", out, dtype=torch.float32, shape=(n, shape.inner), device=device),
        "state": checked("state", state, dtype=torch.float32, shape=sizes, device=device),
        **{"beta_alpha": beta_alpha, "STRIDE": beta_alpha.stride(0), "a": decay.a, "dt_bias": decay.dt_bias},
        **{"eps": EPS, "query_scale": shape.key_width**-0.5, "TILED": shape.tiled},
        **{"HEADS": heads, "KEY_HEADS": shape.n_key_heads, "VALUE": shape.value_width, "KEY": shape.key_width},
        **{"BLOCK": VALUE_ROWS, "WIDE": triton.next_power_of_2(shape.key_width)},
    }
    grid = (runs.most, heads, triton.cdiv(shape.value_width, VALUE_ROWS))
    return TritonLaunch.of(delta_kernel, grid, given, num_warps=1)


@triton.jit
def delta_kernel(
    x, beta_alpha, out, state, a, dt_bias, eps, query_scale, rows, STRIDE: tl.constexpr, HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE: tl.constexpr, KEY: tl.constexpr, TILED: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    INNER: tl.constexpr = HEADS * VALUE
    KEYS: tl.constexpr = KEY_HEADS * KEY
    run, head = tl.program_id(0), tl.program_id(1)
    if run < tl.load(rows.n_runs):
        first, n, slot, fresh = run_at(run, rows, STEP)
        own, at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
        mine, there = own < VALUE, at < KEY
        kept = state + ((slot * HEADS + head) * VALUE + own[:, None]) * KEY + at[None, :]
        s = tl.load(kept, mask=mine[:, None] & there[None, :] & (not fresh), other=0.0)
        rate, bias = tl.load(a + head), tl.load(dt_bias + head)
        shared = head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)
        line = x + first.to(tl.int64) * (2 * KEYS + INNER)
        of_q, of_v = shared * KEY + at, 2 * KEYS + head * VALUE + own
        steps = beta_alpha + first.to(tl.int64) * STRIDE + head
        q, k = tl.load(line + of_q, mask=there, other=0.0), tl.load(line + KEYS + of_q, mask=there, other=0.0)
        v, beta, alpha = tl.load(line + of_v, mask=mine, other=0.0), tl.load(steps), tl.load(steps + HEADS)
        for i in range(n):
            line += 2 * KEYS + INNER
            steps += STRIDE
            more = i + 1 < n
            next_q = tl.load(line + of_q, mask=there & more, other=0.0)
            next_k = tl.load(line + KEYS + of_q, mask=there & more, other=0.0)
            next_v = tl.load(line + of_v, mask=mine & more, other=0.0)
            next_beta, next_alpha = tl.load(steps, mask=more, other=0.0), tl.load(steps + HEADS, mask=more, other=0.0)
            # Every sum is taken of what the row begins with, so that none waits for another: S q after the change is
            # S q before it plus the change times k q.
            sums_k, sums_q, both = tl.sum(s * k[None, :], 1), tl.sum(s * q[None, :], 1), tl.sum(k * q, 0)
            unit_k = tl.rsqrt(tl.sum(k * k, 0) + eps)
            unit_q = tl.rsqrt(tl.sum(q * q, 0) + eps) * query_scale
            fade = tl.exp(softplus(alpha + bias) * rate)
            change = (v - fade * unit_k * sums_k) * sigmoid(beta) * unit_k
            y = (fade * sums_q + change * both) * unit_q
            s = s * fade + change[:, None] * k[None, :]
            tl.store(out + (first.to(tl.int64) + i) * INNER + head * VALUE + own, y, mask=mine)
            q, k, v, beta, alpha = next_q, next_k, next_v, next_beta, next_alpha
        tl.store(kept, s, mask=mine[:, None] & there[None, :])


def bind_short_conv_runs(
    x: Tensor, out: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, runs: Runs
) -> TritonLaunch | Launches:
    """As `short_conv_runs_torch`. In a chunk a second launch keeps the last inputs, since rows of the first read the
    old ones; in a step each program reads and writes only its own."""
    device, n, (width, kernel) = x.device, x.shape[0], weight.shape
    given = run_arguments(runs, device) | {
        "x": checked("x", x, dtype=torch.float32, shape=(n, 3 * width), device=device),
        "out": checked("out", out, dtype=EITHER, shape=(n, width), device=device),
        "state": checked("state", state, dtype=torch.float32, shape=(None, width, kernel - 1), device=device),
        "weight": checked("weight", weight, dtype=torch.float32, shape=(width, kernel), device=device),
        **{"bias": None, "WIDTH": width, "KERNEL": kernel, "BLOCK": CHANNELS},
    }
    if bias is not None:
        given["bias"] = checked("bias", bias, dtype=torch.float32, shape=(width,), device=device)
    pieces = triton.cdiv(width, CHANNELS)
    convolve = TritonLaunch.of(short_conv_kernel, (n, pieces), given, num_warps=4)
    if isinstance(runs, ChunkRuns):
        return Launches((convolve, TritonLaunch.of(keep_gated_kernel, (runs.most, pieces), given, num_warps=4)))
    return convolve


@triton.jit
def gated_input(x, row, channel, there, WIDTH: tl.constexpr):
    """What a short convolution takes in of a row: by its first gate."""
    line = x + row.to(tl.int64) * (3 * WIDTH) + channel
    return tl.load(line, mask=there, other=0.0) * tl.load(line + 2 * WIDTH, mask=there, other=0.0)


@triton.jit
def short_conv_kernel(
    x, out, state, weight, bias, rows, WIDTH: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row < tl.load(rows.n_rows):
        run = row
        if not STEP:
            run = tl.load(rows.run_of + row)
        first, _, slot, fresh = run_at(run, rows, STEP)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = channel < WIDTH
        kept = state + (slot * WIDTH + channel) * (KERNEL - 1)
        sums = tl.zeros((BLOCK,), tl.float32)
        if bias is not None:
            sums += tl.load(bias + channel, mask=there, other=0.0)
        newest = gated_input(x, row, channel, there, WIDTH)
        for tap in tl.static_range(KERNEL - 1):
            at = row - (KERNEL - 1) + tap  # before `first` it is in the state
            old = tl.load(kept + (at - first + KERNEL - 1), mask=there & (at < first) & (not fresh), other=0.0)
            value = tl.where(at < first, old, gated_input(x, at, channel, there & (at >= first), WIDTH))
            sums += value * tl.load(weight + channel * KERNEL + tap, mask=there, other=0.0)
            if STEP and tap > 0:  # read before it is overwritten: each thread has its own channels
                tl.store(kept + (tap - 1), value, mask=there)
        sums += newest * tl.load(weight + channel * KERNEL + (KERNEL - 1), mask=there, other=0.0)
        if STEP:
            tl.store(kept + (KERNEL - 2), newest, mask=there)
        after = tl.load(x + row.to(tl.int64) * (3 * WIDTH) + WIDTH + channel, mask=there, other=0.0)
        store_rows(out + row.to(tl.int64) * WIDTH + channel, sums * after, there)


@triton.jit
def keep_gated_kernel(
    x, state, rows, WIDTH: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """The last inputs of each run, by their gate, become its slot's state."""
    run = tl.program_id(0)
    if run < tl.load(rows.n_runs):
        first, n, slot, fresh = run_at(run, rows, STEP)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = channel < WIDTH
        kept = state + (slot * WIDTH + channel) * (KERNEL - 1)
        for tap in tl.static_range(KERNEL - 1):
            at = n - (KERNEL - 1) + tap  # of the run's rows; below 0 it is in the state, further on than `tap`
            old = tl.load(kept + (at + KERNEL - 1), mask=there & (at < 0) & (not fresh), other=0.0)
            new = gated_input(x, first + at, channel, there & (at >= 0), WIDTH)
            tl.store(kept + tap, tl.where(at < 0, old, new), mask=there)
