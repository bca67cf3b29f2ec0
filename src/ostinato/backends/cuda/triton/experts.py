"""Routed experts of a decode step; twins in `backends/torch/ops/matmul.py`.

The experts' matrices stand on top of each other, dense or packed: for each expert its gate, then its up; gate and up of
two types are a `Stack` of both, each of all experts. x, out and n_rows are as in `matmul.py`. A row stands alone in its
programs and its experts are added in order of their ids, so its bits depend on the row alone. Bound by reading the
chosen experts once for each row.

A step has few rows, and each reads a few matrices: one program for each tile of a row's outputs would leave most of the
card idle. Given a workspace, each expert and each part of its columns is a program of its own, and the last of those
that share outputs adds their sums up, in order. Rows of a prompt are many, and need none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.launch import EITHER, Launches, TritonLaunch, checked
from ostinato.backends.cuda.packed import Packed, for_a_gpu
from ostinato.backends.cuda.triton.matmul import (
    ACT,
    ACTIVATIONS,
    EPILOGUES,
    GATED,
    LAYER,
    MULTIPLY,
    NO_NORM,
    activate,
    beside_gate,
    cut_arguments,
    load_stats,
    norm_arguments,
    options_of,
    out_arguments,
    product,
    put,
    sigmoid,
    weight_arguments,
)
from ostinato.backends.cuda.triton.tiles import Given, Tile, fitted, step_columns, tile_for
from ostinato.backends.machine import TUNED, Chip
from ostinato.backends.torch.ops.matmul import Epilogue, InputNorm, PreparedInput
from ostinato.backends.torch.weight import Weight
from ostinato.backends.weights import Stack, shape_of
from ostinato.errors import InternalError
from ostinato.models.shape import Activation, ExpertGroups, ExpertShape

ROWS: Final = 8  # of a tile, in which one row stands alone
LEAST_BLOCK_N, MAX_BLOCK_N = 16, 64  # outputs of a program
MAX_PARTS: Final = 4  # of an expert's columns, in programs of their own
FEW_ITERATIONS: Final = 3  # of a program, where there are parts enough
# What of a step's cut is not as `tile_for` and the parts above have it, by type and epilogue; measured
# (`bench/kernels.py`, sections experts-TYPE).
SPREAD_CUTS: Final[Mapping[tuple[str, str], Mapping[str, Any]]] = MappingProxyType(
    {
        ("MXFP4", "gated"): {"split_k": 2},
        ("MXFP4", "store"): {"block_n": 32, "num_stages": 2},
        ("Q6_K", "store"): {"block_k": 64},
        ("Q8_0", "store"): {"split_k": 2},
    }
)


@dataclass(frozen=True, slots=True)
class ExpertWorkspace:
    """Where the programs that share a row's outputs leave their sums, and how many of them have."""

    parts: Tensor
    arrivals: Tensor


def experts_workspace(n_slots: int, n_used: int, inner: int, outer: int, device: torch.device) -> ExpertWorkspace:
    """A workspace for gate and up of `inner` outputs each and sums of `outer`: zeroed, as kernels leave `arrivals`."""
    inner, outer = (-(-width // MAX_BLOCK_N) * MAX_BLOCK_N for width in (inner, outer))
    n = n_slots * n_used
    return ExpertWorkspace(
        torch.zeros(n * MAX_PARTS * max(2 * inner, outer), dtype=torch.float32, device=device),
        torch.zeros(n * (max(inner, outer) // LEAST_BLOCK_N), dtype=torch.int32, device=device),
    )


@triton.jit
def first_largest(x, i, N: tl.constexpr):
    """Which of x [n], numbered i, are the N largest, the first among equals; what must not be chosen is -inf."""
    chosen = i < 0
    for _ in tl.static_range(N):
        best = i == tl.argmax(x, 0, tie_break_left=True)
        chosen = chosen | best
        x = tl.where(best, float("-inf"), x)
    return chosen


@triton.jit
def number_or(x, least):
    """x, or `least` where it is no number or lower than that."""
    return tl.maximum(tl.where(x == x, x, least), least)


@triton.jit
def best_groups(choice, GROUPS: tl.constexpr, GROUPS_WIDE: tl.constexpr, SIZE_WIDE: tl.constexpr,
    GROUPS_USED: tl.constexpr, N_BEST: tl.constexpr,
):  # fmt: skip
    """The choice [GROUPS_WIDE * SIZE_WIDE], -inf outside of the groups whose N_BEST highest together are highest."""
    by_group = tl.reshape(choice, (GROUPS_WIDE, SIZE_WIDE))
    left = by_group
    strength = tl.zeros((GROUPS_WIDE,), tl.float32)
    place = tl.arange(0, SIZE_WIDE)[None, :]
    for _ in tl.static_range(N_BEST):
        strength += tl.max(left, 1)
        left = tl.where(place == tl.argmax(left, 1, tie_break_left=True)[:, None], float("-inf"), left)
    group = tl.arange(0, GROUPS_WIDE)
    best = first_largest(tl.where(group < GROUPS, strength, float("-inf")), group, GROUPS_USED)
    return tl.reshape(tl.where(best[:, None], by_group, float("-inf")), (GROUPS_WIDE * SIZE_WIDE,))


@triton.jit
def route_kernel(
    score_ptr, bias_ptr, scales_ptr, expert_ptr, share_ptr, shared_ptr, n_rows_ptr, scale,
    N_SCORES: tl.constexpr, N_EXPERTS: tl.constexpr, N_USED: tl.constexpr, SIGMOID: tl.constexpr,
    BY_SCORE: tl.constexpr, RENORMALISE: tl.constexpr, GROUPS: tl.constexpr, GROUPS_WIDE: tl.constexpr,
    SIZE_WIDE: tl.constexpr, GROUPS_USED: tl.constexpr, N_BEST: tl.constexpr, EPSILON: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """One program a row: its N_USED experts, in order of id, and how much it takes of each. Lane i has expert `e`:
    groups begin at multiples of SIZE_WIDE."""
    row = tl.program_id(0)
    if row >= tl.load(n_rows_ptr):
        return
    SIZE: tl.constexpr = N_EXPERTS // GROUPS
    i = tl.arange(0, GROUPS_WIDE * SIZE_WIDE)
    e = i // SIZE_WIDE * SIZE + i % SIZE_WIDE
    there = (i // SIZE_WIDE < GROUPS) & (i % SIZE_WIDE < SIZE)
    scores = tl.load(score_ptr + row * N_SCORES + e, mask=there, other=0.0)
    # Whatever the scores are, exactly N_USED ids come out, each an expert that there is.
    scores = tl.minimum(number_or(scores, -1e38), 1e38)
    if SIGMOID:
        share = sigmoid(scores)
    else:
        peak = tl.max(tl.where(there, scores, -1e38), 0)
        exponents = tl.where(there, tl.exp(tl.clamp(scores - peak, -200.0, 0.0)), 0.0)
        share = exponents / tl.sum(exponents, 0)
    choice = scores if BY_SCORE else share
    if bias_ptr is not None:
        choice = number_or(share + tl.load(bias_ptr + e, mask=there, other=0.0), -1e38)
    choice = tl.where(there, choice, float("-inf"))
    if GROUPS > 1:
        choice = best_groups(choice, GROUPS, GROUPS_WIDE, SIZE_WIDE, GROUPS_USED, N_BEST)
    chosen = first_largest(choice, i, N_USED)
    if RENORMALISE:
        share = share / tl.maximum(tl.sum(tl.where(chosen, share, 0.0), 0) + EPSILON, LEAST)
    share = share * scale
    if scales_ptr is not None:
        share = share * tl.load(scales_ptr + e, mask=there, other=0.0)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(expert_ptr + row * N_USED + place, e, mask=chosen)
    tl.store(share_ptr + row * N_USED + place, share, mask=chosen)
    if shared_ptr is not None:
        tl.store(shared_ptr + row, sigmoid(tl.load(score_ptr + row * N_SCORES + N_EXPERTS)))


@triton.jit
def add_bias(acc, bias_ptr, expert, n, first, N: tl.constexpr, STRIDE: tl.constexpr):
    """acc [BLOCK_N, ROWS] plus outputs `first` + n of an expert's bias."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * STRIDE + first + n, mask=n < N, other=0.0)[:, None]
    return acc


@triton.jit
def leave_sums(acc, parts_ptr, at, n, ROWS: tl.constexpr):
    """Of acc [BLOCK_N, ROWS] the sums of the row that stands alone, to the workspace."""
    first = (tl.arange(0, ROWS) == 0)[None, :]
    tl.store(parts_ptr + at + n, tl.sum(tl.where(first, acc, 0.0), 1))


@triton.jit
def is_last(arrivals_ptr, group, PARTS: tl.constexpr):
    """Whether all other programs of the group have left their sums; then the count begins anew."""
    # All of this program's stores come before its arrival, and the last to arrive sees everyone's.
    tl.debug_barrier()
    last = tl.atomic_add(arrivals_ptr + group, 1, sem="acq_rel") == PARTS - 1
    if last:
        tl.atomic_xchg(arrivals_ptr + group, 0, sem="relaxed")
    return last


@triton.jit
def sums_of(parts_ptr, at, n, STRIDE: tl.constexpr, SPLIT_K: tl.constexpr):
    """The sums that SPLIT_K programs left, in order: [BLOCK_N, 1]."""
    total = tl.load(parts_ptr + at + n, cache_modifier=".cg")
    for i in tl.static_range(1, SPLIT_K):
        total += tl.load(parts_ptr + at + i * STRIDE + n, cache_modifier=".cg")
    return total[:, None]


@triton.jit
def experts_gate_up_kernel(
    x_ptr, w_ptr, high_ptr, w_scale_ptr, block_ptr, pairs_ptr, out_ptr, expert_ptr, n_rows_ptr, parts_ptr,
    arrivals_ptr, stats_in_ptr, norm_weight_ptr, norm_bias_ptr, eps, bias_ptr, BIAS_FIRST: tl.constexpr,
    BIAS_STRIDE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, N_USED: tl.constexpr, K_STATS: tl.constexpr,
    STATS_WIDE: tl.constexpr,
    NORM: tl.constexpr, EPILOGUE: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr, W: tl.constexpr,
    RUN: tl.constexpr, ASM: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SLICES: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N values of one row's j-th expert. Grid: rows times N_USED, output tiles, parts of the
    columns. A row stands alone in its tile, whatever its neighbours chose. GATED: gate and up at once; ACT and
    MULTIPLY: one after the other."""
    place, n_tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = place // N_USED
    if row >= tl.load(n_rows_ptr):
        return
    expert = tl.load(expert_ptr + place)
    rows = row + tl.arange(0, ROWS)
    alone = rows == row
    root = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    if NORM != NO_NORM:
        squares = tl.sum(load_stats(stats_in_ptr, rows, alone, 1, K_STATS, STATS_WIDE), 0) / K
        if NORM == LAYER:
            mean = tl.sum(load_stats(stats_in_ptr, rows, alone, 0, K_STATS, STATS_WIDE), 0) / K
            squares -= mean * mean
        root = tl.rsqrt(squares + eps)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    TWO: tl.constexpr = EPILOGUE == GATED
    gate = expert * (2 * N if TWO else N) + tl.minimum(n, N - 1)
    up = gate + N if TWO else gate
    acc, second = product(
        x_ptr, norm_weight_ptr, norm_bias_ptr, row, row + 1, mean, root, w_ptr, high_ptr, w_scale_ptr, block_ptr,
        pairs_ptr, gate, up, part, K, NORM, TWO, BLOCK_N, BLOCK_K, SLICES, SPLIT_K, ROWS, TYPE, W, RUN, STAGES, ASM,
        False, NARROW, PRECISION, False,
    )  # fmt: skip
    if SPLIT_K > 1:
        LANES: tl.constexpr = 2 if TWO else 1
        STRIDE: tl.constexpr = LANES * BLOCK_N
        group = place * tl.num_programs(1) + n_tile
        here, own = group * (SPLIT_K * STRIDE), tl.arange(0, BLOCK_N)
        leave_sums(acc, parts_ptr, here + part * STRIDE, own, ROWS)
        if TWO:
            leave_sums(second, parts_ptr, here + part * STRIDE + BLOCK_N, own, ROWS)
        if not is_last(arrivals_ptr, group, SPLIT_K):
            return
        acc = sums_of(parts_ptr, here, own, STRIDE, SPLIT_K) + tl.zeros((BLOCK_N, ROWS), tl.float32)
        if TWO:
            second = sums_of(parts_ptr, here + BLOCK_N, own, STRIDE, SPLIT_K) + tl.zeros((BLOCK_N, ROWS), tl.float32)
    if NORM > NO_NORM and NORM < LAYER:
        acc *= root[None, :]
        second *= root[None, :]
    v = add_bias(acc, bias_ptr, expert, n, BIAS_FIRST, N, BIAS_STRIDE)
    if TWO:
        v = activate(v, ACTIVATION) * beside_gate(add_bias(second, bias_ptr, expert, n, N, N, BIAS_STRIDE), ACTIVATION)
    elif EPILOGUE == ACT:
        v = activate(v, ACTIVATION)
    elif EPILOGUE == MULTIPLY:
        v = beside_gate(v, ACTIVATION)
    put(
        v, out_ptr, None, None, None, place + tl.arange(0, ROWS), alone, n, 0, N, N, 1, BLOCK_N, ROWS, EPILOGUE,
    )  # fmt: skip


@triton.jit
def experts_down_kernel(
    x_ptr, w_ptr, high_ptr, w_scale_ptr, block_ptr, pairs_ptr, out_ptr, expert_ptr, share_ptr, n_rows_ptr, parts_ptr,
    arrivals_ptr, stats_ptr, prepared_ptr, prepared_weight_ptr, bias_ptr,
    N: tl.constexpr, K: tl.constexpr, N_USED: tl.constexpr, N_STATS: tl.constexpr, EPILOGUE: tl.constexpr,
    TYPE: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr, ASM: tl.constexpr, NARROW: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    SPLIT_K: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one row, over its experts in order. Grid: rows, output tiles; if SPREAD, rows times N_USED,
    output tiles, parts of an expert's columns."""
    n_tile, part = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) // N_USED if SPREAD else tl.program_id(0)
    if row >= tl.load(n_rows_ptr):
        return
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(n, N - 1)
    nothing = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    if SPREAD:
        place, own = tl.program_id(0), tl.arange(0, BLOCK_N)
        n_expert = tl.load(expert_ptr + place) * N + inside
        acc, _second = product(
            x_ptr, None, None, place, place + 1, nothing, nothing, w_ptr, high_ptr, w_scale_ptr, block_ptr, pairs_ptr,
            n_expert, n_expert, part, K, NO_NORM, False, BLOCK_N, BLOCK_K, SLICES, SPLIT_K, ROWS, TYPE, W, RUN, STAGES,
            ASM, False, NARROW, PRECISION, False,
        )  # fmt: skip
        EXPERT: tl.constexpr = SPLIT_K * BLOCK_N
        group = row * tl.num_programs(1) + n_tile
        here = group * (N_USED * EXPERT)
        leave_sums(acc, parts_ptr, here + place % N_USED * EXPERT + part * BLOCK_N, own, ROWS)
        if not is_last(arrivals_ptr, group, N_USED * SPLIT_K):
            return
        for j in tl.static_range(N_USED):
            of_expert = sums_of(parts_ptr, here + j * EXPERT, own, BLOCK_N, SPLIT_K)
            expert = tl.load(expert_ptr + row * N_USED + j)
            total += add_bias(of_expert, bias_ptr, expert, n, 0, N, N) * tl.load(share_ptr + row * N_USED + j)
    else:
        for j in range(N_USED):
            place = row * N_USED + j
            expert = tl.load(expert_ptr + place)
            n_expert = expert * N + inside
            acc, _second = product(
                x_ptr, None, None, place, place + 1, nothing, nothing, w_ptr, high_ptr, w_scale_ptr, block_ptr,
                pairs_ptr, n_expert, n_expert, 0, K, NO_NORM, False, BLOCK_N, BLOCK_K, SLICES, 1, ROWS, TYPE, W, RUN,
                STAGES, ASM, False, NARROW, PRECISION, False,
            )  # fmt: skip
            total += add_bias(acc, bias_ptr, expert, n, 0, N, N) * tl.load(share_ptr + place)
    rows = row + tl.arange(0, ROWS)
    put(
        total, out_ptr, stats_ptr, prepared_ptr, prepared_weight_ptr, rows, rows == row, n, n_tile * BLOCK_N, N, N,
        N_STATS, BLOCK_N, ROWS, EPILOGUE,
    )  # fmt: skip


def bind_route(
    scores: Tensor,
    experts: Tensor,
    shares: Tensor,
    n_rows: Tensor,
    *,
    shape: ExpertShape,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    shared: Tensor | None = None,
) -> TritonLaunch:
    """Which experts each row goes to, as one call without arguments; what it computes is `route_rows_torch`."""
    device, n_slots, n, n_used = scores.device, len(scores), shape.n_experts, shape.n_used
    checked("scores", scores, dtype=torch.float32, shape=(1, shape.n_scores), device=device)
    groups = shape.groups or ExpertGroups(1, 1, 1)
    if n % groups.n_groups or not 1 <= n_used <= n // groups.n_groups * groups.n_used:
        raise InternalError(f"{n_used} of {n} experts in {groups.n_groups} groups cannot be chosen")
    for name, each in (("bias", bias), ("scales", scales)):
        if each is not None:
            checked(name, each, dtype=torch.float32, shape=(n,), device=device)
    if shared is not None:
        checked("shared", shared, dtype=torch.float32, shape=(n_slots,), device=device)
    wide = {"GROUPS_WIDE": groups.n_groups, "SIZE_WIDE": n // groups.n_groups}
    chosen = _chosen(experts, shares, n_rows, n_slots, n_used, device)
    given = {name: value for name, value in chosen.items() if name != "ROWS"} | {
        **{
            "score_ptr": scores,
            "bias_ptr": bias,
            "scales_ptr": scales,
            "shared_ptr": shared,
            "scale": float(shape.share_scale),
        },
        **{"N_SCORES": shape.n_scores, "N_EXPERTS": n, "SIGMOID": shape.scoring == "sigmoid"},
        "BY_SCORE": shape.by_score,
        **{"RENORMALISE": shape.renormalise, "GROUPS": groups.n_groups},
        **{"EPSILON": shape.sum_epsilon, "LEAST": shape.least_sum},
        **{name: triton.next_power_of_2(size) for name, size in wide.items()},
        **{"GROUPS_USED": groups.n_used, "N_BEST": groups.n_best},
    }
    return TritonLaunch.of(route_kernel, (n_slots,), given, **options_of(Tile(0, 0)))


def bind_experts_gate_up(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    experts: Tensor,
    n_rows: Tensor,
    *,
    norm: InputNorm | None = None,
    bias: Tensor | None = None,
    gated: bool = True,
    activation: Activation,
    workspace: ExpertWorkspace | None = None,
    tile: Tile | None = None,
    chip: Chip = TUNED,
) -> TritonLaunch | Launches:
    """Gate, up and activation of each row's experts, as one call; what it computes is `experts_gate_up_torch`.

    A `Stack` (gate, up) is two launches, the second multiplied into what the first wrote.
    """
    device, n_slots, (_, n_used, n) = x.device, len(x), out.shape
    checked("out", out, dtype=EITHER, shape=(n_slots, n_used, n), device=device)
    stride = (1 + gated) * n
    if bias is not None:
        checked("bias", bias, dtype=torch.float32, shape=(1, stride), device=device)
    shared = _chosen(experts, None, n_rows, n_slots, n_used, device) | {
        **{"ACTIVATION": ACTIVATIONS[activation], "bias_ptr": bias, "BIAS_STRIDE": stride},
    }

    def bound(part: Tensor | Packed, epilogue: Literal["gated", "act", "multiply"], first: int = 0) -> TritonLaunch:
        n_outputs, k = shape_of(part)
        if n_outputs % (2 * n if epilogue == "gated" else n):
            raise InternalError(f"{n_outputs} rows of experts are not whole {epilogue} matrices of {n} outputs")
        taken = Given.of(ROWS, x, norm)
        cut = tile
        if cut is None:
            cut = fitted(expert_tile(part, epilogue, spread=workspace is not None), part, epilogue, taken, chip)
        given = shared | {
            "x_ptr": checked("x", x, dtype=EITHER, shape=(1, k), device=device),
            **norm_arguments(norm, n_slots, k, device),
            **weight_arguments(part, device),
            **cut_arguments(part, cut, device, chip),
            **{"out_ptr": out, "N": n, "K": k, "EPILOGUE": EPILOGUES[epilogue], "BIAS_FIRST": first},
        }
        grid = (n_slots * n_used, triton.cdiv(n, cut.block_n), cut.split_k)
        lanes = 2 if epilogue == "gated" else 1
        given |= _left(
            workspace if cut.split_k > 1 else None, cut, grid[0] * grid[1], grid[0] * grid[1] * lanes, device
        )
        return TritonLaunch.of(experts_gate_up_kernel, grid, given, **options_of(cut))

    if not isinstance(weight, Stack):
        return bound(for_a_gpu(weight), "gated" if gated else "act")
    if len(weight.parts) != 2 or not gated:
        raise InternalError(f"a stack of experts is (gate, up), not {len(weight.parts)} parts")
    gate, up = map(for_a_gpu, weight.parts)
    return Launches((bound(gate, "act"), bound(up, "multiply", n)))


def bind_experts_down(
    x: Tensor,
    weight: Tensor | Packed,
    out: Tensor,
    experts: Tensor,
    shares: Tensor,
    n_rows: Tensor,
    *,
    epilogue: Literal["store", "add"] = "add",
    bias: Tensor | None = None,
    stats: Tensor | None = None,
    prepared: PreparedInput | None = None,
    workspace: ExpertWorkspace | None = None,
    tile: Tile | None = None,
    chip: Chip = TUNED,
) -> TritonLaunch:
    """The weighted sum over each row's experts, as one call; what it computes is `experts_down_torch`."""
    device, (n_slots, n_used, k), n = x.device, x.shape, out.shape[1]
    n_outputs, columns = shape_of(weight)
    if n_outputs % n:
        raise InternalError(f"{n_outputs} rows of experts are not whole matrices of {n}")
    spread = workspace is not None
    cut = tile
    if cut is None:
        cut = fitted(expert_tile(weight, "store", spread=spread), weight, "store", Given.of(ROWS, x), chip)
    if bias is not None:
        checked("bias", bias, dtype=torch.float32, shape=(1, n), device=device)
    n_tiles = triton.cdiv(n, cut.block_n)
    given = _chosen(experts, shares, n_rows, n_slots, n_used, device) | {
        "x_ptr": checked("x", x, dtype=EITHER, shape=(1, n_used, columns), device=device),
        **weight_arguments(weight, device),
        **cut_arguments(weight, cut, device, chip),
        **out_arguments(out, stats, prepared, n_slots, n, device),
        **{"N": n, "K": k, "EPILOGUE": EPILOGUES[epilogue], "bias_ptr": bias, "SPREAD": spread},
        **_left(workspace, cut, n_slots * n_tiles, n_slots * n_used * n_tiles, device),
    }
    grid = (n_slots * n_used, n_tiles, cut.split_k) if spread else (n_slots, n_tiles)
    return TritonLaunch.of(experts_down_kernel, grid, given, **options_of(cut))


def _left(
    workspace: ExpertWorkspace | None, cut: Tile, n_groups: int, n_tiles: int, device: torch.device
) -> dict[str, Any]:
    """Where so many groups of programs leave the sums of so many tiles, each in `split_k` parts."""
    given: dict[str, Any] = {"parts_ptr": None, "arrivals_ptr": None, "SPLIT_K": cut.split_k}
    if workspace is None and cut.split_k > 1:
        raise InternalError(f"a product of experts in {cut.split_k} parts needs a workspace")
    if workspace is not None:
        sizes = {"parts": n_tiles * cut.split_k * cut.block_n, "arrivals": n_groups}
        for name, size in sizes.items():
            dtype = torch.float32 if name == "parts" else torch.int32
            own = getattr(workspace, name)[:size]
            given[f"{name}_ptr"] = checked(name, own, dtype=dtype, shape=(size,), device=device)
    return given


def _chosen(
    experts: Tensor, shares: Tensor | None, n_rows: Tensor, n_slots: int, n_used: int, device: torch.device
) -> dict[str, Any]:
    """Which experts each row goes to and how much of each it takes; a row stands alone in a tile of eight."""
    checked("experts", experts, dtype=torch.int32, shape=(n_slots, n_used), device=device)
    if shares is not None:
        checked("shares", shares, dtype=torch.float32, shape=(n_slots, n_used), device=device)
    checked("n_rows", n_rows, dtype=torch.int32, shape=(1,), device=device)
    return {"expert_ptr": experts, "n_rows_ptr": n_rows, "share_ptr": shares, "N_USED": n_used, "ROWS": ROWS}


def expert_tile(weight: Tensor | Packed, epilogue: Epilogue, *, spread: bool) -> Tile:
    """How the product of a row with one expert is cut. Spread, its columns are in parts of few iterations."""
    cut = replace(tile_for(weight, epilogue), split_k=1)
    if not spread:
        return cut
    own = SPREAD_CUTS.get((weight.type, epilogue), {}) if isinstance(weight, Packed) else {}
    cut = replace(cut, **{name: value for name, value in own.items() if name != "split_k"})
    n_iterations = -(-shape_of(weight)[1] // step_columns(weight, cut))
    return replace(cut, split_k=min(own.get("split_k", MAX_PARTS), -(-n_iterations // FEW_ITERATIONS)))
