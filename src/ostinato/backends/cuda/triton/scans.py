"""The scans of mamba and mamba2 over runs of rows; twins in `torch/ops/runs.py`.

A program has a piece of a sequence's state in registers, takes the run's rows one after the other, and writes the piece
back: a step's single row and a chunk's hundreds by the same code, so bits do not depend on where a prompt was cut. All
float32. A step is bound by reading and writing the states, a chunk by the latency of one row after the other.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.launch import EITHER, TritonLaunch, checked
from ostinato.backends.cuda.triton.matmul import sigmoid
from ostinato.backends.cuda.triton.runs import columns_of, run_arguments, run_at, store_rows
from ostinato.backends.torch.ops.runs import Runs
from ostinato.models.blocks import Decay
from ostinato.models.shape import Mamba2Shape, MambaShape

HEAD_ROWS: Final = 16  # rows of a head's matrix of states, that a program has
CHANNELS: Final = 64  # of mamba, that a program has


@triton.jit
def softplus(x):
    """log(1 + e^x), without loss where it is near 0: log(1 + z) = 2 (t + t^3 / 3 + ...) of t = z / (2 + z)."""
    z = tl.exp(-tl.abs(x))
    t = z / (2.0 + z)
    s = t * t
    p = 2.0 / 15 + s * (2.0 / 17)
    p = 2.0 / 11 + s * (2.0 / 13 + s * p)
    p = 2.0 / 7 + s * (2.0 / 9 + s * p)
    p = 2.0 / 3 + s * (2.0 / 5 + s * p)
    return tl.maximum(x, 0.0) + t * (2.0 + s * p)


def bind_ssd_runs(
    x: Tensor, dt: Tensor, out: Tensor, state: Tensor, decay: Decay, shape: Mamba2Shape, runs: Runs
) -> TritonLaunch:
    """As `ssd_runs_torch`; a program for each run, head and some rows of its matrix."""
    device, n, heads, width = x.device, x.shape[0], shape.n_heads, shape.inner // shape.n_heads
    columns_of("dt", dt, heads, device)
    for name, values in (("a", decay.a), ("d", decay.d), ("dt_bias", decay.dt_bias)):
        checked(name, values, dtype=torch.float32, shape=(heads,), device=device)
    given = run_arguments(runs, device) | {
        "x": checked("x", x, dtype=torch.float32, shape=(n, shape.conv_width), device=device),
        "out": checked("out", out, dtype=torch.float32, shape=(n, shape.inner), device=device),
        "state": checked("state", state, dtype=torch.float32, shape=(None, heads, width, shape.state), device=device),
        **{"dt": dt, "DT_STRIDE": dt.stride(0), "a": decay.a, "d": decay.d, "dt_bias": decay.dt_bias},
        **{"least": shape.dt_limit[0], "most": shape.dt_limit[1]},
        **{"HEADS": heads, "WIDTH": width, "STATE": shape.state, "GROUPS": shape.n_groups},
        **{"BLOCK": HEAD_ROWS, "WIDE": triton.next_power_of_2(shape.state)},
    }
    return TritonLaunch.of(ssd_kernel, (runs.most, heads, triton.cdiv(width, HEAD_ROWS)), given, num_warps=4)


@triton.jit
def ssd_kernel(
    x, dt, out, state, a, d, dt_bias, least, most, rows, DT_STRIDE: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, STATE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    INNER: tl.constexpr = HEADS * WIDTH
    X_STRIDE: tl.constexpr = INNER + 2 * GROUPS * STATE
    run, head = tl.program_id(0), tl.program_id(1)
    if run < tl.load(rows.n_runs):
        first, n, slot, fresh = run_at(run, rows, STEP)
        own = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        at = tl.arange(0, WIDE)
        kept = state + ((slot * HEADS + head) * WIDTH + own[:, None]) * STATE + at[None, :]
        there = (own < WIDTH)[:, None] & (at < STATE)[None, :]
        s = tl.load(kept, mask=there & (not fresh), other=0.0)
        fading, skip, bias = tl.load(a + head), tl.load(d + head), tl.load(dt_bias + head)
        of_group = INNER + head // (HEADS // GROUPS) * STATE + at
        for i in range(n):
            row = first.to(tl.int64) + i
            line = x + row * X_STRIDE
            step = softplus(tl.load(dt + row * DT_STRIDE + head) + bias)
            step = tl.minimum(tl.maximum(step, least), most)
            u = tl.load(line + head * WIDTH + own, mask=own < WIDTH, other=0.0)
            b = tl.load(line + of_group, mask=at < STATE, other=0.0)
            c = tl.load(line + of_group + GROUPS * STATE, mask=at < STATE, other=0.0)
            s = s * tl.exp(step * fading) + (step * u)[:, None] * b[None, :]
            y = tl.sum(s * c[None, :], 1) + skip * u
            tl.store(out + row * INNER + head * WIDTH + own, y, mask=own < WIDTH)
        tl.store(kept, s, mask=there)


def bind_selective_runs(
    x: Tensor,
    dt: Tensor,
    bc: Tensor,
    gate: Tensor,
    out: Tensor,
    state: Tensor,
    decay: Decay,
    shape: MambaShape,
    runs: Runs,
) -> TritonLaunch:
    """As `selective_runs_torch`; a program for each run and some channels."""
    device, n, inner = x.device, x.shape[0], shape.inner
    columns_of("gate", gate, inner, device)
    checked("a", decay.a, dtype=torch.float32, shape=(inner, shape.state), device=device)
    for name, values in (("d", decay.d), ("dt_bias", decay.dt_bias)):
        checked(name, values, dtype=torch.float32, shape=(inner,), device=device)
    given = run_arguments(runs, device) | {
        "x": checked("x", x, dtype=torch.float32, shape=(n, inner), device=device),
        "dt": checked("dt", dt, dtype=torch.float32, shape=(n, inner), device=device),
        "bc": checked("bc", bc, dtype=torch.float32, shape=(n, 2 * shape.state), device=device),
        "out": checked("out", out, dtype=EITHER, shape=(n, inner), device=device),
        "state": checked("state", state, dtype=torch.float32, shape=(None, inner, shape.state), device=device),
        **{"gate": gate, "GATE_STRIDE": gate.stride(0), "a": decay.a, "d": decay.d, "dt_bias": decay.dt_bias},
        **{"INNER": inner, "STATE": shape.state, "BLOCK": CHANNELS, "WIDE": triton.next_power_of_2(shape.state)},
    }
    return TritonLaunch.of(selective_kernel, (runs.most, triton.cdiv(inner, CHANNELS)), given, num_warps=4)


@triton.jit
def selective_kernel(
    x, dt, bc, gate, out, state, a, d, dt_bias, rows, GATE_STRIDE: tl.constexpr, INNER: tl.constexpr,
    STATE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0)
    if run < tl.load(rows.n_runs):
        first, n, slot, fresh = run_at(run, rows, STEP)
        own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = tl.arange(0, WIDE)
        mine, width = own < INNER, at < STATE
        there = mine[:, None] & width[None, :]
        kept = state + (slot * INNER + own[:, None]) * STATE + at[None, :]
        s = tl.load(kept, mask=there & (not fresh), other=0.0)
        fading = tl.load(a + own[:, None] * STATE + at[None, :], mask=there, other=0.0)
        skip, bias = tl.load(d + own, mask=mine, other=0.0), tl.load(dt_bias + own, mask=mine, other=0.0)
        for i in range(n):
            row = first.to(tl.int64) + i
            step = softplus(tl.load(dt + row * INNER + own, mask=mine, other=0.0) + bias)
            u = tl.load(x + row * INNER + own, mask=mine, other=0.0)
            b = tl.load(bc + row * 2 * STATE + at, mask=width, other=0.0)
            c = tl.load(bc + row * 2 * STATE + STATE + at, mask=width, other=0.0)
            s = s * tl.exp(step[:, None] * fading) + (step * u)[:, None] * b[None, :]
            y = tl.sum(s * c[None, :], 1) + skip * u
            opened = tl.load(gate + row * GATE_STRIDE + own, mask=mine, other=0.0)
            store_rows(out + row * INNER + own, y * opened * sigmoid(opened), mine)
        tl.store(kept, s, mask=there)
