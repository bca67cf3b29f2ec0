"""What recurrent blocks do to rows before and after their scan: convolution, gate, norm; twins in `torch/ops/runs.py`.

A row of a step is a run of its own, and a part of a chunk is one; both go through the same code. Inputs that are
columns of a wider buffer come with its stride. Sums are float32, taps are added in order, and a row's bits depend on
its own sequence alone. A few kilobytes a row: bound by latency in a step, by reading its input in a chunk.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.launch import EITHER, Launches, TritonLaunch, checked, grouped
from ostinato.backends.cuda.triton.matmul import sigmoid
from ostinato.backends.cuda.triton.unpack import narrowed
from ostinato.backends.torch.ops.runs import ChunkRuns, Runs, StepRuns
from ostinato.models.blocks import Norm

CHANNELS: Final = 128  # of a program
NO_NORM, AFTER, BEFORE = (tl.constexpr(i) for i in range(3))


def run_arguments(runs: Runs, device: torch.device) -> dict[str, Any]:
    """What a kernel over runs takes, by the names of its parameters."""

    def words(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> Tensor:
        return checked(name, tensor, dtype=torch.int32, shape=shape, device=device)

    n_rows = words("n_rows", runs.n_rows, (1,))
    if isinstance(runs, StepRuns):
        most = runs.most
        given = {"row_slot": words("row_slot", runs.row_slot, (most,))}
        given |= {"position": words("position", runs.position, (most,))}
        return {"rows": grouped({"n_rows": n_rows, "n_runs": n_rows, **given}), "STEP": True}
    given = {
        "n_runs": words("n_runs", runs.n_runs, (1,)),
        "runs": words("runs", runs.runs, (None, 4)),
        "run_of": words("run_of", runs.run_of, (None,)),
    }
    return {"rows": grouped({"n_rows": n_rows, **given}), "STEP": False}


def columns_of(name: str, x: Tensor, width: int, device: torch.device) -> Tensor:
    """Float32 columns of a wider buffer."""
    return checked(name, x, dtype=torch.float32, shape=(None, width), device=device, columns=True)


@triton.jit
def run_at(run, rows, STEP: tl.constexpr):
    """A run's first row, number of rows, slot, and whether it begins its sequence."""
    if STEP:
        slot = tl.load(rows.row_slot + run)
        return run, 1, slot.to(tl.int64), tl.load(rows.position + slot) == 0
    else:
        at = rows.runs + run * 4
        return tl.load(at), tl.load(at + 1), tl.load(at + 2).to(tl.int64), tl.load(at + 3) != 0


def bind_conv_runs(
    x: Tensor, out: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, runs: Runs
) -> TritonLaunch | Launches:
    """As `conv_runs_torch`. In a chunk a second launch keeps the last inputs, since rows of the first read the old
    ones; in a step each program reads and writes only its own."""
    device, (channels, kernel) = out.device, weight.shape
    n = out.shape[0]
    columns_of("x", x, channels, device)
    given = run_arguments(runs, device) | {
        **{"x": x, "X_STRIDE": x.stride(0), "CHANNELS": channels, "KERNEL": kernel, "BLOCK": CHANNELS},
        "out": checked("out", out, dtype=torch.float32, shape=(n, channels), device=device),
        "state": checked("state", state, dtype=torch.float32, shape=(None, channels, kernel - 1), device=device),
        "weight": checked("weight", weight, dtype=torch.float32, shape=(channels, kernel), device=device),
        "bias": None,
    }
    if bias is not None:
        given["bias"] = checked("bias", bias, dtype=torch.float32, shape=(channels,), device=device)
    pieces = triton.cdiv(channels, CHANNELS)
    convolve = TritonLaunch.of(conv_kernel, (n, pieces), given, num_warps=4)
    if isinstance(runs, ChunkRuns):
        return Launches((convolve, TritonLaunch.of(keep_inputs_kernel, (runs.most, pieces), given, num_warps=4)))
    return convolve


@triton.jit
def conv_kernel(
    x, out, state, weight, bias, rows, X_STRIDE: tl.constexpr, CHANNELS: tl.constexpr, KERNEL: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row < tl.load(rows.n_rows):
        run = row
        if not STEP:
            run = tl.load(rows.run_of + row)
        first, _, slot, fresh = run_at(run, rows, STEP)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = channel < CHANNELS
        kept = state + (slot * CHANNELS + channel) * (KERNEL - 1)
        sums = tl.zeros((BLOCK,), tl.float32)
        if bias is not None:
            sums += tl.load(bias + channel, mask=there, other=0.0)
        newest = tl.load(x + row.to(tl.int64) * X_STRIDE + channel, mask=there, other=0.0)
        for tap in tl.static_range(KERNEL - 1):
            at = row - (KERNEL - 1) + tap  # before `first` it is in the state
            old = tl.load(kept + (at - first + KERNEL - 1), mask=there & (at < first) & (not fresh), other=0.0)
            new = tl.load(x + at.to(tl.int64) * X_STRIDE + channel, mask=there & (at >= first), other=0.0)
            value = tl.where(at < first, old, new)
            sums += value * tl.load(weight + channel * KERNEL + tap, mask=there, other=0.0)
            if STEP and tap > 0:  # read before it is overwritten: each thread has its own channels
                tl.store(kept + (tap - 1), value, mask=there)
        sums += newest * tl.load(weight + channel * KERNEL + (KERNEL - 1), mask=there, other=0.0)
        if STEP:
            tl.store(kept + (KERNEL - 2), newest, mask=there)
        tl.store(out + row.to(tl.int64) * CHANNELS + channel, sums * sigmoid(sums), mask=there)


@triton.jit
def keep_inputs_kernel(
    x, state, rows, X_STRIDE: tl.constexpr, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """The last inputs of each run become its slot's state."""
    run = tl.program_id(0)
    if run < tl.load(rows.n_runs):
        first, n, slot, fresh = run_at(run, rows, STEP)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = channel < CHANNELS
        kept = state + (slot * CHANNELS + channel) * (KERNEL - 1)
        for tap in tl.static_range(KERNEL - 1):
            at = n - (KERNEL - 1) + tap  # of the run's rows; below 0 it is in the state, further on than `tap`
            old = tl.load(kept + (at + KERNEL - 1), mask=there & (at < 0) & (not fresh), other=0.0)
            row = (first + at).to(tl.int64)
            new = tl.load(x + row * X_STRIDE + channel, mask=there & (at >= 0), other=0.0)
            tl.store(kept + tap, tl.where(at < 0, old, new), mask=there)


def bind_gate_runs(
    x: Tensor, gate: Tensor, out: Tensor, weight: Tensor | None, eps: float, norm_first: bool, runs: Runs
) -> TritonLaunch:
    """As `gate_runs_torch`; a program for each row and group."""
    (n, inner), device = x.shape, x.device
    groups, each = 1, True
    if weight is not None:
        groups, each = inner // weight.shape[1], len(weight) > 1
        checked("weight", weight, dtype=torch.float32, shape=(groups if each else 1, inner // groups), device=device)
    columns_of("gate", gate, inner, device)
    given = run_arguments(runs, device) | {
        "x": checked("x", x, dtype=torch.float32, shape=(n, inner), device=device),
        "out": checked("out", out, dtype=EITHER, shape=(n, inner), device=device),
        **{"gate": gate, "weight": weight, "eps": eps, "GATE_STRIDE": gate.stride(0), "INNER": inner},
        **{"WIDTH": inner // groups, "BLOCK": triton.next_power_of_2(inner // groups)},
        "OWN_WEIGHT": each,
        "NORM": (NO_NORM if weight is None else BEFORE if norm_first else AFTER).value,
    }
    return TritonLaunch.of(gate_kernel, (n, groups), given, num_warps=8 if given["BLOCK"] >= 4096 else 4)


@triton.jit
def gate_kernel(
    x, gate, out, weight, rows, eps, GATE_STRIDE: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, OWN_WEIGHT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(rows.n_rows):
        within = tl.arange(0, BLOCK)
        there = within < WIDTH
        column = tl.program_id(1) * WIDTH + within
        opened = tl.load(gate + row * GATE_STRIDE + column, mask=there, other=0.0)
        opened = opened * sigmoid(opened)
        value = tl.load(x + row * INNER + column, mask=there, other=0.0)
        if NORM != BEFORE:
            value *= opened
        if NORM != NO_NORM:
            root = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
            value *= root * tl.load(weight + (column if OWN_WEIGHT else within), mask=there, other=0.0)
        if NORM == BEFORE:
            value *= opened
        store_rows(out + row * INNER + column, value, there)


@triton.jit
def store_rows(at, value, there):
    """In the type of the rows, rounded to the nearest."""
    if at.dtype.element_ty == tl.bfloat16:
        tl.store(at, narrowed(value), mask=there)
    else:
        tl.store(at, value, mask=there)


def bind_selected_runs(x: Tensor, dt: Tensor, bc: Tensor, norms: tuple[Norm, ...] | None, runs: Runs) -> TritonLaunch:
    """As `selected_runs_torch`; a program for each row and part."""
    (n, rank), width, device = dt.shape, bc.shape[1] // 2, x.device
    weights: list[Tensor | None] = [None] * 3 if norms is None else [norm.weight for norm in norms]
    for weight, size in zip(weights, (rank, width, width), strict=True):
        if weight is not None:
            checked("norm", weight, dtype=torch.float32, shape=(size,), device=device)
    given = run_arguments(runs, device) | {
        "x": checked("x", x, dtype=torch.float32, shape=(n, rank + 2 * width), device=device),
        "dt": checked("dt", dt, dtype=EITHER, shape=(n, rank), device=device),
        "bc": checked("bc", bc, dtype=torch.float32, shape=(n, 2 * width), device=device),
        "norms": grouped(dict(zip(("dt", "b", "c"), weights, strict=True))),
        "eps": 0.0 if norms is None else norms[0].eps,
        **{"RANK": rank, "WIDTH": width, "BLOCK": triton.next_power_of_2(max(rank, width))},
    }
    return TritonLaunch.of(selected_kernel, (n,), given, num_warps=4)


@triton.jit
def selected_kernel(x, dt, bc, norms, rows, eps, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(rows.n_rows):
        at = tl.arange(0, BLOCK)
        given = x + row * (RANK + 2 * WIDTH) + at
        store_rows(dt + row * RANK + at, part_of(given, norms.dt, at, eps, RANK), at < RANK)
        to = bc + row * 2 * WIDTH + at
        tl.store(to, part_of(given + RANK, norms.b, at, eps, WIDTH), mask=at < WIDTH)
        tl.store(to + WIDTH, part_of(given + RANK + WIDTH, norms.c, at, eps, WIDTH), mask=at < WIDTH)


@triton.jit
def part_of(given, norm, at, eps, WIDTH: tl.constexpr):
    value = tl.load(given, mask=at < WIDTH, other=0.0)
    if norm is not None:
        root = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
        value *= root * tl.load(norm + at, mask=at < WIDTH, other=0.0)
    return value
