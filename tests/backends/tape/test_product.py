"""Products over the tape: the kernel's own source in the emulator, against torch, for every kind of weights.

A small kernel plays steps of one layer and a head: normed rows for q, k, v, gate and up, and the head, pairs of other
blocks for the output and down. Its loader runs ahead of its compute warps as the real one does.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato import build
from ostinato.backends.tape.pack import GROUP_COLUMNS, Numbers, tiles_from
from ostinato.backends.tape.partition import (
    Partition,
    TapeGrid,
    TapeMatrix,
    WeightType,
    largest_chunk,
    make_partition,
)
from ostinato.errors import HardwareCannot
from ostinato.loop.layout import Layout
from tests.backends.tape.emulator import Program, compiled, constants, headers_of
from tests.backends.tape.unpacked import values_of
from tests.backends.tape.walk import chunks_of, walk

MAX_ROWS: Final = 8
ROW_PADDING: Final = 8
SEGMENTS: Final = ("q", "k", "v", "out", "gate_up", "down", "head")
TAG: Final = 7
LAYOUT: Final = Layout(n_slots=MAX_ROWS, max_pages=4, vocab=96)

pytestmark = pytest.mark.slow  # each shape is compiled

SOURCE: Final = r"""
#include "parts.h"
#include "ring.h"
#include "handoff.h"
#include "product.h"

struct Step {
    int n_rows, first_row;  // of those that are given
};
struct Given {
    const char* tape;
    const u64* tape_at;
    const Segment* segments;
    State* state;
    const u32* normed;  // [2 * MAX_ROWS] rows as they lie in activations
    const u64 *attended, *inside;
    const Step* steps;
    float* out;  // [steps][N_SEGMENTS][MAX_ROWS][OUT_COLUMNS]
    int n_steps, stop_before, abort_at;
};

DEVICE void lay_normed(ComputeThread& p, const Given& given, const Step& step) {
    constexpr int words = (NORMED_COLUMNS + ROW_PADDING) / 2;
    const u32* const from = given.normed + step.first_row * words;
    for (int i = p.thread; i < step.n_rows * words; i += N_COMPUTE_THREADS) ((u32*)p.activations)[i] = from[i];
    sync_compute_warps();
}

DEVICE void run_segment(ComputeThread& p, const Given& given, const Tape& tape,
    const Step& step, int number, float* out) {
    const Segment& segment = tape.segments[number];
    Source source = {nullptr, 0};
    if (number == SEGMENT_OUT) source = {given.attended + step.first_row * (QUERY_COLUMNS / 2), QUERY_COLUMNS / 2};
    if (number == SEGMENT_DOWN) source = {given.inside + step.first_row * (FF / 2), FF / 2};
    multiply_here(p, tape, segment, source, step.n_rows, [&](int first, int n_tiles, Sums sums) {
        const auto done = [&](int, int tile, int r, int row, float value) {
            out[row * OUT_COLUMNS + tile * 16 + r] = value;
        };
        const auto unit_done = [&](int unit, int row, float g0, float u0, float g1, float u1) {
            float* const to = out + row * OUT_COLUMNS + unit;
            to[0] = g0;
            to[1] = g1;
            to[segment.n_tiles * 8] = u0;
            to[segment.n_tiles * 8 + 1] = u1;
        };
        if (number == SEGMENT_GATE_UP) hand_on_units(p, segment, step.n_rows, first, n_tiles, sums, unit_done);
        else hand_on(p, segment, step.n_rows, first, n_tiles, sums, done);
    });
}

KERNEL(run_loop, Given, given, N_COMPUTE_THREADS + 32) {
    Shared* const shared = (Shared*)shared_memory();
    char* const ring = shared_memory() + RING_AT;
    Tape tape = {};
    tape.tape = given.tape;
    tape.tape_at = given.tape_at;
    tape.segments = given.segments;
    tape.state = given.state;
    if (thread() == 0) {
        set_up(*shared);
        gate_init_fence();
    }
    sync_block();
    if (thread() >= N_COMPUTE_THREADS) {
        load_tape(tape, *shared, ring);
        return;
    }
    ComputeThread p;
    p.thread = thread();
    p.warp = p.thread / 32;
    p.lane = p.thread % 32;
    p.stage = p.phase = p.parity = 0;
    p.tag = TAG;
    p.ring = ring;
    p.activations = (u16*)(ring + STAGES * STAGE_BYTES);
    p.shared = shared;
    for (int i = 0; i < given.n_steps; i++) {
        const Step step = given.steps[i];
        if (i == given.abort_at && block() == 0 && p.thread == 0) store_fresh(&given.state->abort, 1);
        for (int number = 0; number < N_SEGMENTS; number++) {
            if (i == given.n_steps - 1 && number == given.stop_before) break;
            const bool is_head = number == N_SEGMENTS - 1;
            if (number == SEGMENT_Q || number == SEGMENT_GATE_UP || is_head) lay_normed(p, given, step);
            float* const out = given.out + (i * N_SEGMENTS + number) * MAX_ROWS * OUT_COLUMNS;
            run_segment(p, given, tape, step, number, out);
        }
    }
    sync_compute_warps();
    if (p.thread == 0) shared->over = 1;
}
"""


# --- a model of seven matrices, and what its products should be ---


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for."""

    hidden: int
    query: int
    ff: int
    n_blocks: int = 3
    n_compute_warps: int = 2
    max_rows: int = MAX_ROWS
    half: torch.dtype = torch.bfloat16
    wide: bool = True
    stages: int = 5
    in_flight: int = 2
    weight_types: tuple[WeightType, ...] = tuple(WeightType)
    lift: bool = False
    bulk: bool = True

    @property
    def grid(self) -> TapeGrid:
        return TapeGrid(self.n_blocks, self.n_compute_warps)

    @property
    def normed(self) -> int:
        return self.padded(self.hidden)

    def padded(self, columns: int) -> int:
        return columns + -columns % (32 * self.n_compute_warps)

    @property
    def activation_bytes(self) -> int:
        return self.max_rows * 2 * (max(self.normed, 256 * self.n_compute_warps) + ROW_PADDING)

    @property
    def stage_bytes(self) -> int:
        return 640 * 16 * self.n_compute_warps // 4

    def matrices(self, weight_types: tuple[WeightType, ...]) -> list[TapeMatrix]:
        hidden = self.hidden
        sizes = [
            (80, hidden),
            (16, hidden),
            (48, hidden),
            (hidden, self.query),
            (224, hidden),
            (112, self.ff),
            (208, hidden),
        ]
        return [
            TapeMatrix(weight_type, rows, columns, name == "gate_up")
            for name, weight_type, (rows, columns) in zip(SEGMENTS, weight_types, sizes, strict=True)
        ]

    def header(self) -> str:
        has = {f"HAS_WEIGHT_{weight_type.name}": int(weight_type in self.weight_types) for weight_type in WeightType}
        return '#include "layout.h"\n' + constants(
            N_COMPUTE_WARPS=self.n_compute_warps,
            N_BLOCKS=self.n_blocks,
            STAGES=self.stages,
            STAGE_BYTES=self.stage_bytes,
            IN_FLIGHT=self.in_flight,
            TILES_AT_ONCE=4,
            MAX_ROWS=self.max_rows,
            ACTIVATION_BYTES=self.activation_bytes,
            N_LAYERS=1,
            HIDDEN=self.hidden,
            FF=self.ff,
            N_HEADS=self.query // 64,
            N_KV_HEADS=1,
            HEAD_WIDTH=64,
            NORM_EPS="1e-5f",
            ACTIVATION_BF16=int(self.half == torch.bfloat16),
            WIDE=int(self.wide),
            LIFT_WEIGHTS=int(self.lift),
            BULK_COPIES=int(self.bulk),
            MOVE_REGISTERS=0,
            EMBEDDING_TYPE="TYPE_BF16",
            OUT_COLUMNS=self.out_columns,
            TAG=TAG,
            **has,
        )

    @property
    def out_columns(self) -> int:
        return max(self.hidden, 224) + 16

    @property
    def shared_bytes(self) -> int:
        sums = self.n_compute_warps * 4 * 16 * 8 * 4
        small = 16 * self.stages + 24 + self.n_compute_warps * self.max_rows * 16 + 12 * self.max_rows
        small += 2 * -(-(self.hidden // 16) // self.n_blocks) * 16 * self.max_rows * 4 + 16 * len(SEGMENTS)
        return (sums + small + 127) // 128 * 128 + self.stages * self.stage_bytes + self.activation_bytes


WIDE: Final = Shape(hidden=576, query=192, ff=1152)
SMALL: Final = Shape(hidden=64, query=64, ff=640, half=torch.float16, stages=3, in_flight=3, n_blocks=2)
NARROW: Final = Shape(hidden=576, query=192, ff=1152, wide=False)
EIGHT_COMPUTE_WARPS: Final = Shape(hidden=576, query=576, ff=2112, n_compute_warps=8, n_blocks=2)
FEW_ROWS: Final = Shape(hidden=128, query=64, ff=1088, max_rows=2, stages=2, in_flight=1)


@cache
def program(shape: Shape) -> Program:
    return compiled(SOURCE, headers={"shape.h": shape.header(), "layout.h": LAYOUT.header(16)})


@dataclass(frozen=True)
class Model:
    """Seven matrices as they lie on the tape, and as they are."""

    shape: Shape
    partition: Partition
    tape: Tensor
    values: tuple[Tensor, ...]  # float64 [rows, padded columns], rows as tiles have them
    sizes: tuple[Tensor, ...]  # how large the parts are that a product of it is made of


@cache
def model(shape: Shape, weight_types: tuple[WeightType, ...], seed: int) -> Model:
    matrices = shape.matrices(weight_types)
    partition = make_partition(matrices, shape.grid)
    assert largest_chunk(partition.segments, shape.n_compute_warps) <= shape.stage_bytes
    random = np.random.default_rng(seed)
    tape = torch.zeros(partition.n_bytes + 128, dtype=torch.uint8)
    tape = tape[-tape.data_ptr() % 128 :][: partition.n_bytes]
    of_each = zip(matrices, partition.segments, strict=True)
    numbers = [random_numbers(matrix, segment.columns, shape.half, random) for matrix, segment in of_each]
    tiles = [tiles_from(some, shape.n_compute_warps) for some in numbers]
    for block in range(shape.n_blocks):
        for piece in walk(partition, block):
            segment = partition.segments[piece.segment]
            sizes = [chunk.n_bytes for chunk in chunks_of(segment.weight_type, segment.columns, shape.n_compute_warps)]
            at = sum(sizes[: piece.chunk])
            tape[piece.at : piece.at + piece.n_bytes] = tiles[piece.segment][piece.tile, at : at + piece.n_bytes]
    values = tuple(values_of(some).double() for some in numbers)
    return Model(shape, partition, tape, values, tuple(map(part_sizes, numbers)))


def random_numbers(matrix: TapeMatrix, columns: int, half: torch.dtype, random: np.random.Generator) -> Numbers:
    """Whole tiles, with zeros where the matrix has no column."""
    rows, weight_type = -(-matrix.rows // 16) * 16, matrix.weight_type
    if weight_type == WeightType.HALF:
        weights = torch.from_numpy(random.standard_normal((rows, columns), np.float32))
        weights[:, matrix.columns :] = 0
        return Numbers(weight_type, weights.to(half))
    low, high = {
        WeightType.FOUR: (0, 16),
        WeightType.FIVE: (0, 32),
        WeightType.SIX: (0, 64),
        WeightType.EIGHT: (-128, 128),
    }[weight_type]
    quants = torch.from_numpy(random.integers(low, high, (rows, columns), np.int16))
    scales, minima = torch.from_numpy(
        random.uniform(0.001, 0.1, (2, rows, columns // GROUP_COLUMNS[weight_type]))
    ).half()
    quants[:, matrix.columns :] = 0
    for field in (scales, minima):
        field[:, matrix.columns // GROUP_COLUMNS[weight_type] :] = 0
    quants = quants.to(torch.int8 if weight_type == WeightType.EIGHT else torch.uint8)
    return Numbers(
        weight_type, quants, scales, minima * 8 if weight_type in (WeightType.FOUR, WeightType.FIVE) else None
    )


def part_sizes(numbers: Numbers) -> Tensor:
    if numbers.scales is None:
        return numbers.quants.double().abs()
    added = {WeightType.SIX: 32, WeightType.EIGHT: 128}.get(numbers.weight_type, 0)
    sizes = torch.unflatten(numbers.quants.double().abs() + added, 1, (-1, GROUP_COLUMNS[numbers.weight_type]))
    sizes = sizes * numbers.scales.double()[..., None]
    return (sizes if numbers.minima is None else sizes + numbers.minima.double()[..., None]).flatten(1)


@dataclass(frozen=True)
class Rows:
    """Rows of activations: as the kernel is given them, and what they stand for, float64 [rows, padded columns]."""

    normed: np.ndarray
    seen: np.ndarray
    inside: np.ndarray
    values: dict[str, Tensor]


def rows_of(shape: Shape, seed: int, n: int = 2 * MAX_ROWS) -> Rows:
    random = np.random.default_rng(seed)
    given, values = {}, {}
    for name, columns in (("normed", shape.hidden), ("seen", shape.query), ("inside", shape.ff)):
        x = torch.from_numpy(random.standard_normal((n, columns), np.float32) * 3).to(shape.half)
        x[:, columns - 1] = 200  # one that stands out
        padded = torch.zeros(n, shape.padded(columns), dtype=shape.half)
        padded[:, :columns] = x
        values[name] = padded.double()
        bits = padded.view(torch.int16).numpy().view(np.uint16)
        if name != "normed":
            pairs = np.ascontiguousarray(bits[:, :columns]).view(np.uint32).astype(np.uint64)
            given[name] = pairs | np.uint64(TAG << 32)
        else:
            given[name] = np.zeros((n, shape.normed + ROW_PADDING), np.uint16)
            given[name][:, : shape.normed] = bits
        if not shape.wide:
            quants, steps = quantised(padded.float().numpy())
            values[name] = torch.from_numpy(quants.astype(np.float64) * np.repeat(steps, 32, 1).astype(np.float64))
            if name == "normed":
                bytes_ = given[name].view(np.uint8)
                bytes_[:, : shape.normed] = quants.view(np.uint8)
                bytes_[:, shape.normed : shape.normed + shape.normed // 8] = steps.view(np.uint8)
    return Rows(given["normed"], given["seen"], given["inside"], values)


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 and, for each 32 columns, what a step is worth, as receive_pairs does it."""
    groups = x.reshape(len(x), -1, 32)
    steps = np.abs(groups).max(2) * np.float32(1 / 127)
    per_step = np.divide(np.float32(1), steps, out=np.zeros_like(steps), where=steps > 0)
    return np.rint(groups * per_step[..., None]).astype(np.int8).reshape(x.shape), steps


# --- playing ---


class Given(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tape", "tape_at", "segments", "state", "normed", "seen", "inside")),
        *((name, ctypes.c_void_p) for name in ("steps", "out")),
        *((name, ctypes.c_int) for name in ("n_steps", "stop_before", "abort_at")),
    )


def play(
    model: Model, rows: Rows, steps: list[tuple[int, int]], seed: int, stop_before: int = -1, abort_at: int = -1
) -> np.ndarray:
    """What steps of (n_rows, first row) come to, float32 [steps, segments, MAX_ROWS, columns]; NaN where nothing."""
    shape = model.shape
    out = np.full((len(steps), len(SEGMENTS), shape.max_rows, shape.out_columns), np.nan, np.float32)
    begins = np.array(model.partition.begins, np.uint64)
    segments = np.array(model.partition.segments, np.int32)
    state, all_steps = np.zeros(4, np.uint32), np.array(steps, np.int32)
    argument = Given(
        model.tape.data_ptr(),
        *(array.ctypes.data for array in (begins, segments, state, rows.normed, rows.seen, rows.inside)),
        *(array.ctypes.data for array in (all_steps, out)),
        *(len(steps), stop_before, abort_at),
    )
    program(shape).run("run_loop", argument, n_blocks=shape.n_blocks, shared_bytes=shape.shared_bytes, seed=seed)
    return out


def in_tiles(index: int, n_rows: int) -> slice | np.ndarray:
    """Where the kernel puts row i of the tiles: gate and up apart."""
    if SEGMENTS[index] != "gate_up":
        return np.arange(n_rows)
    rows = np.arange(n_rows)
    return rows // 16 * 8 + rows % 8 + rows % 16 // 8 * (n_rows // 2)


def check(model: Model, rows: Rows, steps: list[tuple[int, int]], out: np.ndarray, n_segments: int = 7) -> None:
    """Every row of every product is what torch says, to within what float32 sums lose."""
    for i, (n_rows, first) in enumerate(steps):
        for index in range(n_segments if i == len(steps) - 1 else len(SEGMENTS)):
            weight_type = {"out": "seen", "down": "inside"}.get(SEGMENTS[index], "normed")
            weights, sizes = model.values[index], model.sizes[index]
            x = rows.values[weight_type][first : first + n_rows, : weights.shape[1]]
            wanted, bound = x @ weights.T, x.abs() @ sizes.T
            got = torch.from_numpy(out[i, index, :n_rows][:, in_tiles(index, len(weights))]).double()
            error = ((got - wanted).abs() / (bound + 1e-30)).max() if n_rows else torch.tensor(0.0)
            assert error < 2e-6, (
                SEGMENTS[index],
                model.partition.segments[index].weight_type.name,
                n_rows,
                float(error),
            )
        rest = out[i, :, n_rows:]
        assert np.isnan(rest).all()


def mixed(shift: int) -> tuple[WeightType, ...]:
    return tuple(WeightType((i + shift) % len(WeightType)) for i in range(len(SEGMENTS)))


# --- what is true ---

LOADERS: Final = ("bulk copies", "16-byte copies")
EVERY_COUNT: Final = [(n, 0) for n in range(1, MAX_ROWS + 1)]


@pytest.mark.parametrize("shift", range(len(WeightType)))
@pytest.mark.parametrize("shape", [WIDE, SMALL, NARROW], ids=["bfloat16", "float16", "int8"])
def test_products_are_those_of_torch(shape: Shape, shift: int) -> None:
    some, rows = model(shape, mixed(shift), shift), rows_of(shape, shift)
    steps = [(1 + shift, 0), (2, 1), (8, 3)]
    check(some, rows, steps, play(some, rows, steps, seed=shift))


@pytest.mark.parametrize("weight_type", WeightType)
@pytest.mark.parametrize("shape", [WIDE, SMALL, NARROW, FEW_ROWS], ids=["bfloat16", "float16", "int8", "two rows"])
def test_every_kind_multiplies_every_number_of_rows(shape: Shape, weight_type: WeightType) -> None:
    some, rows = model(shape, (weight_type,) * 7, int(weight_type)), rows_of(shape, 3)
    steps = EVERY_COUNT[: shape.max_rows]
    check(some, rows, steps, play(some, rows, steps, seed=1))


@pytest.mark.parametrize("shift", range(len(WeightType)))
def test_eight_compute_warps_share_columns_that_do_not_come_out_even(shift: int) -> None:
    some, rows = model(EIGHT_COMPUTE_WARPS, mixed(shift), shift), rows_of(EIGHT_COMPUTE_WARPS, shift)
    check(some, rows, [(3, 0), (1, 2)], play(some, rows, [(3, 0), (1, 2)], seed=shift))


@pytest.mark.parametrize("shift", range(len(WeightType)))
@pytest.mark.parametrize("shape", [WIDE, SMALL, NARROW], ids=["bfloat16", "float16", "int8"])
def test_a_row_has_the_same_bits_alone_and_among_neighbours(shape: Shape, shift: int) -> None:
    some, rows = model(shape, mixed(shift), shift), rows_of(shape, shift)
    steps = [(8, 0), (1, 5), (2, 4), (3, 3), (5, 5)]
    out = play(some, rows, steps, seed=shift + 1)
    alone = out[1, :, 0].view(np.uint32)
    for i, (_, first) in enumerate(steps):
        assert np.array_equal(out[i, :, 5 - first].view(np.uint32), alone), steps[i]


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("bulk", [True, False], ids=LOADERS)
@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=4),
)
def test_no_schedule_changes_a_bit(bulk: bool, stages: int, seed: int, steps: list[tuple[int, int]]) -> None:
    shape = replace(SMALL, bulk=bulk, stages=stages, in_flight=stages)
    some, rows = model(shape, mixed(2), 2), rows_of(shape, 2)
    out = play(some, rows, steps, seed=seed)
    check(some, rows, steps, out)
    assert np.array_equal(out.view(np.uint32), play(some, rows, steps, seed=seed + 1).view(np.uint32))


@pytest.mark.parametrize(
    "shape", [WIDE, SMALL, NARROW, EIGHT_COMPUTE_WARPS], ids=["bfloat16", "float16", "int8", "eight compute warps"]
)
@pytest.mark.parametrize("weight_type", WeightType)
def test_the_loader_changes_no_bit(shape: Shape, weight_type: WeightType) -> None:
    other = replace(shape, bulk=False, lift=True, stages=2)
    steps = [(1, 0), (3, 2), (8, 0)]
    rows, weight_types = rows_of(shape, 6), (weight_type,) * len(SEGMENTS)
    bulk = play(model(shape, weight_types, 6), rows, steps, seed=1)
    assert np.array_equal(
        play(model(other, weight_types, 6), rows, steps, seed=2).view(np.uint32), bulk.view(np.uint32)
    )


def test_lifted_weights_give_the_same_bits() -> None:
    shape = replace(WIDE, lift=True)
    rows, steps = rows_of(shape, 4), [(1, 0), (4, 0)]
    for shift in range(len(WeightType)):
        plain, lifted = model(WIDE, mixed(shift), shift), model(shape, mixed(shift), shift)
        out = play(lifted, rows, steps, seed=0)
        assert np.array_equal(out.view(np.uint32), play(plain, rows, steps, seed=0).view(np.uint32))


@pytest.mark.parametrize("bulk", [True, False], ids=LOADERS)
@pytest.mark.parametrize("stop_before", [0, 1, 3, 6])
def test_the_loader_ends_wherever_the_compute_warps_do(stop_before: int, bulk: bool) -> None:
    shape = replace(SMALL, bulk=bulk)
    some, rows = model(shape, mixed(1), 1), rows_of(shape, 1)
    for seed in range(5):
        steps = [(1, 0), (0, 0), (2, 0)]
        check(some, rows, steps, play(some, rows, steps, seed, stop_before), n_segments=stop_before)


@pytest.mark.parametrize("bulk", [True, False], ids=LOADERS)
@pytest.mark.parametrize("abort_at", [0, 1])
def test_after_an_abort_no_thread_waits(abort_at: int, bulk: bool) -> None:
    shape = replace(SMALL, bulk=bulk)
    some, rows = model(shape, mixed(0), 0), rows_of(shape, 0)
    for seed in range(5):
        play(some, rows, [(1, 0), (3, 0), (2, 0)], seed, abort_at=abort_at)


@pytest.mark.parametrize("bulk", [True, False], ids=LOADERS)
def test_a_block_without_a_tile_reads_nothing(bulk: bool) -> None:
    shape = Shape(hidden=64, query=64, ff=64, n_blocks=50, max_rows=2, weight_types=(WeightType.HALF,), bulk=bulk)
    some, rows = model(shape, (WeightType.HALF,) * 7, 0), rows_of(shape, 0)
    assert any(not len(list(walk(some.partition, block))) for block in range(shape.n_blocks))
    check(some, rows, [(2, 0), (1, 0)], play(some, rows, [(2, 0), (1, 0)], seed=0))


@pytest.mark.parametrize("wide", [True, False], ids=["wide", "int8"])
@pytest.mark.parametrize(
    "weight_types", [(WeightType.HALF, WeightType.FOUR), (WeightType.FIVE,), (WeightType.SIX, WeightType.EIGHT)]
)
def test_it_compiles_for_the_card(wide: bool, weight_types: tuple[WeightType, ...]) -> None:
    shape = Shape(
        hidden=2048, query=2048, ff=8192, n_compute_warps=8, n_blocks=132, wide=wide, weight_types=weight_types
    )
    headers = headers_of(SOURCE, {"shape.h": shape.header(), "layout.h": LAYOUT.header(16)})
    try:
        assert build.cubin(SOURCE, "product.cu", arch="sm_90", headers=headers)
    except HardwareCannot as error:
        pytest.skip(str(error))
