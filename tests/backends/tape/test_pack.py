"""Weights on the tape: every bit where the kernel looks for it, every weight the file's own to within its bound."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.backends.cuda.packed import Packed
from ostinato.backends.tape import pack as pack_module
from ostinato.backends.tape.pack import (
    GROUP_COLUMNS,
    Numbers,
    TapeSource,
    numbers_of,
    put_matrix,
    source_of,
    tape_of,
    tiles_from,
    type_of,
    weight_type_of,
    why_not_packed,
)
from ostinato.backends.tape.partition import (
    PER_COMPUTE_WARP,
    WEIGHT_TYPES,
    Partition,
    TapeGrid,
    TapeMatrix,
    WeightType,
    make_partition,
    padded_columns,
)
from ostinato.backends.torch.weight import Weight
from ostinato.backends.weights import Stack
from ostinato.errors import InternalError, Unsupported
from ostinato.files.quants import BLOCKS, dequantize
from tests.backends.cuda.packing import pack
from tests.backends.tape.unpacked import SIX_OFFSET, matrix_from, numbers_from, values_of
from tests.backends.tape.walk import chunks_of, walk

CPU = torch.device("cpu")
ROUNDED = ("Q4_K", "Q5_K", "Q6_K")  # types whose scales are products, which float16 may not hold
TYPES = tuple(WEIGHT_TYPES)
HALVES = (torch.bfloat16, torch.float16)
FLOATS = ("float32", "float16", "bfloat16")
SEEDS = st.integers(0, 2**32 - 1)


# --- the slow and obvious way: one weight at a time, as the kernel's contract says ---


@dataclass(frozen=True)
class At:
    """Where weight (row, column) of a tile is: its chunk, byte offsets and bits there, and whether its row is one of
    the last eight."""

    chunk: int
    quants: int
    bit: int
    high: int
    high_bit: int
    scale: int
    is_upper: bool


def address(weight_type: WeightType, columns: int, n_compute_warps: int, row: int, column: int) -> At:
    per = {WeightType.HALF: 4, WeightType.FOUR: 16, WeightType.FIVE: 8, WeightType.SIX: 8, WeightType.EIGHT: 8}[
        weight_type
    ]
    column_tile = column // 16
    chunk = column_tile // (per * n_compute_warps)
    base = chunk * per * n_compute_warps
    n = min(per, columns // 16 // n_compute_warps - chunk * per)
    compute_warp, i = divmod(column_tile - base, n)
    g, lower = row % 8, row // 8  # a lower row is 8 further down
    later, q, h = column % 16 // 8, column % 8 // 2, column % 2
    register, lane, group, t = lower + 2 * later, 4 * g + q, i // 2, i % 2
    if weight_type == WeightType.HALF:
        return At(chunk, ((compute_warp * n + i) * 32 + lane) * 16 + 4 * register + 2 * h, 0, 0, 0, 0, lower == 1)
    lanes_before = (compute_warp * (n // 2) + group) * 32 + lane
    rows_before = (compute_warp * (n // 2) + group) * 16 + 2 * g + lower
    if n == per:  # every fourth group stands together
        rows_before = (((compute_warp * 4 + group % 4) * 8 + g) * (n // 8) + group // 4) * 2 + lower
    if weight_type == WeightType.EIGHT:
        quants = lanes_before * 16 + 4 * (2 * t + lower) + later + 2 * h
        return At(chunk, quants, 0, 0, 0, n_compute_warps * n // 2 * 512 + rows_before * 2, lower == 1)
    bit = 4 * register + 16 * h
    end = n_compute_warps * (n // 2) * 256
    by_four = compute_warp * n * 128 + i // 4 * 512 + lane * 16 + i % 4 * 4  # a lane has four column tiles together
    quants = by_four if n == per else lanes_before * 8 + 4 * t
    if weight_type == WeightType.FOUR:
        return At(chunk, quants, bit, 0, 0, end + rows_before * 4, lower == 1)
    if weight_type == WeightType.FIVE:
        words = (n // 2 + 1) // 2
        together = ((compute_warp * 32 + lane) * words + group // 2) * 4
        high = end + (together if n == per else ((compute_warp * words + group // 2) * 32 + lane) * 4)
        high_bit = 4 * (group % 2) + 2 * t + (1 - register % 2) + 8 * (register // 2) + 16 * h
        return At(chunk, quants, bit, high, high_bit, end + n_compute_warps * words * 128 + rows_before * 4, lower == 1)
    high = end + (((compute_warp * 32 + lane) * (n // 2) + group) * 4 if n == per else lanes_before * 4)
    high_bit = 4 * t + 2 * (1 - register % 2) + 8 * (register // 2) + 16 * h
    rows_before = (compute_warp * n + i) * 16 + 2 * g + lower
    if n == per:
        rows_before = (((compute_warp * 4 + i % 4) * 8 + g) * (n // 4) + i // 4) * 2 + lower
    scale = end + n_compute_warps * (n // 2) * 128 + rows_before * 2
    return At(chunk, quants, bit, high, high_bit, scale, lower == 1)


def word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def half_at(data: bytes, at: int) -> float:
    return float(np.frombuffer(data[at : at + 2], np.float16)[0])


def weight_at(data: bytes, weight_type: WeightType, at: At, half: torch.dtype) -> float:
    """The weight there, out of the bytes of its chunk."""
    if weight_type == WeightType.HALF:
        bits = int.from_bytes(data[at.quants : at.quants + 2], "little")
        if half == torch.float16:
            return half_at(data, at.quants)
        return float(np.array([bits << 16], np.uint32).view(np.float32)[0])
    scale = half_at(data, at.scale)
    if weight_type == WeightType.EIGHT:
        return scale * int(np.frombuffer(data[at.quants : at.quants + 1], np.int8)[0])
    q = word(data, at.quants) >> at.bit & 15
    if weight_type == WeightType.SIX:
        two = word(data, at.high) >> at.high_bit & 3
        return scale * ((q << 2 | two if at.is_upper else two << 4 | q) - 32)
    if weight_type == WeightType.FIVE:
        one = word(data, at.high) >> at.high_bit & 1
        q = q << 1 | one if at.is_upper else one << 4 | q
    return scale * q - half_at(data, at.scale + 2)


# --- what is packed ---


def blocks(type: str, n_rows: int, columns: int, seed: int) -> Tensor:
    """Rows as a file has them, with any quants and with scales of a size that weights have."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (n_rows, columns // BLOCKS[type].elements, BLOCKS[type].n_bytes), dtype=np.uint8)
    for at in (208,) if type == "Q6_K" else (0, 2) if type in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,):
        scale = (random.standard_normal(raw.shape[:2]) * 0.01).astype(np.float16)
        raw[:, :, at : at + 2] = scale.view(np.uint8).reshape(*raw.shape[:2], 2)
    return torch.from_numpy(raw.reshape(n_rows, -1))


def packed(type: str, raw: Tensor) -> Packed:
    return pack(type, raw, len(raw), raw.shape[1] // BLOCKS[type].n_bytes * BLOCKS[type].elements)


def weight(type: str, n_rows: int, columns: int, seed: int) -> Tensor | Packed:
    if type in FLOATS:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn((n_rows, columns), generator=generator).to(getattr(torch, type))
    return packed(type, blocks(type, n_rows, columns, seed))


def file_values(type: str, raw: Tensor) -> Tensor:
    return torch.from_numpy(dequantize(raw.numpy(), type))


def kept_values(source: TapeSource, half: torch.dtype) -> Tensor:
    """What the weights of a source become on the tape, row by row, without any tape."""
    each = [values_of(numbers_of(part, torch.arange(part.shape[0]), half)) for part in source.parts]
    return torch.cat(each)


def random_numbers(weight_type: WeightType, n_tiles: int, columns: int, half: torch.dtype, seed: int) -> Numbers:
    """Numbers of any bits that a kind can have, in whole tiles."""
    generator = torch.Generator().manual_seed(seed)
    rows = 16 * n_tiles
    if weight_type == WeightType.HALF:
        return Numbers(weight_type, torch.randn((rows, columns), generator=generator).to(half))
    low, high, dtype = (
        (-128, 128, torch.int8) if weight_type == WeightType.EIGHT else (0, 8 << weight_type, torch.uint8)
    )
    quants = torch.randint(low, high, (rows, columns), generator=generator).to(dtype)
    scales, minima = torch.randn((2, rows, columns // GROUP_COLUMNS[weight_type]), generator=generator).half()
    return Numbers(weight_type, quants, scales, minima if weight_type in (WeightType.FOUR, WeightType.FIVE) else None)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[WeightType, int, int]:
    """A kind, a number of compute warps, and columns with padding that make up to three chunks."""
    weight_type = draw(st.sampled_from(WeightType))
    n_compute_warps = draw(st.integers(1, 4))
    columns = draw(st.integers(1, 700))
    return weight_type, n_compute_warps, padded_columns(weight_type, columns, n_compute_warps)


# --- where the bits are ---


@given(sizes(), st.sampled_from(HALVES), SEEDS)
@settings(max_examples=40, deadline=None)
def test_each_weight_is_where_the_kernel_looks_for_it(
    size: tuple[WeightType, int, int], half: torch.dtype, seed: int
) -> None:
    weight_type, n_compute_warps, columns = size
    numbers = random_numbers(weight_type, 2, columns, half, seed)
    tiles, values = tiles_from(numbers, n_compute_warps), values_of(numbers)
    ends = np.cumsum([0, *(chunk.n_bytes for chunk in chunks_of(weight_type, columns, n_compute_warps))])
    random = np.random.default_rng(seed)
    for _ in range(300):
        tile, row, column = random.integers(2), int(random.integers(16)), int(random.integers(columns))
        at = address(weight_type, columns, n_compute_warps, row, column)
        data = tiles[tile, ends[at.chunk] : ends[at.chunk + 1]].numpy().tobytes()
        assert np.float32(weight_at(data, weight_type, at, half)) == values[tile * 16 + row, column]


@pytest.mark.parametrize("weight_type", WeightType)
def test_no_two_weights_share_a_bit_and_no_bit_is_left_over(weight_type: WeightType) -> None:
    n_compute_warps, columns = 2, padded_columns(weight_type, 700, 2)
    quants, high, scales = set(), set(), set()
    for row in range(16):
        for column in range(columns):
            at = address(weight_type, columns, n_compute_warps, row, column)
            quants.add((at.chunk, at.quants, at.bit))
            high.add((at.chunk, at.high, at.high_bit))
            scales.add((at.chunk, at.scale))
    assert len(quants) == 16 * columns
    if weight_type in (WeightType.FIVE, WeightType.SIX):
        assert len(high) == 16 * columns
    if weight_type != WeightType.HALF:
        assert len(scales) == 16 * columns // GROUP_COLUMNS[weight_type]


@given(sizes(), st.integers(1, 3), st.sampled_from(HALVES), SEEDS)
@settings(max_examples=60, deadline=None)
def test_tiles_give_their_numbers_back(
    size: tuple[WeightType, int, int], n_tiles: int, half: torch.dtype, seed: int
) -> None:
    weight_type, n_compute_warps, columns = size
    numbers = random_numbers(weight_type, n_tiles, columns, half, seed)
    again = numbers_from(tiles_from(numbers, n_compute_warps), weight_type, columns, n_compute_warps, half)
    for mine, theirs in (
        (again.quants, numbers.quants),
        (again.scales, numbers.scales),
        (again.minima, numbers.minima),
    ):
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or torch.equal(mine, theirs)


@pytest.mark.parametrize(("weight_type", "more"), [(WeightType.FOUR, 0), (WeightType.FIVE, 1), (WeightType.SIX, 2)])
@pytest.mark.parametrize("is_whole", [False, True])
def test_masks_and_one_shift_give_four_values_of_two_rows(weight_type: WeightType, more: int, is_whole: bool) -> None:
    """What the kernel does with words: a value of rows 0 to 7 below in its byte, of rows 8 to 15 at the top of its."""
    n = PER_COMPUTE_WARP[weight_type] if is_whole else 6
    numbers = random_numbers(weight_type, 1, 16 * n, torch.bfloat16, seed=3)
    data = tiles_from(numbers, 1)[0].numpy().tobytes()
    for lane, tile in np.ndindex(32, n):
        at = tile // 4 * 512 + lane * 16 + tile % 4 * 4 if is_whole else tile // 2 * 256 + lane * 8 + tile % 2 * 4
        lower, upper = word(data, at) & 0x0F0F0F0F, word(data, at) & 0xF0F0F0F0
        if more:
            number, words = tile // (4 // more), n * more // 4
            high = word(data, n * 128 + (4 * (lane * words + number) if is_whole else number * 128 + lane * 4))
            shift = 4 * (tile // 2 % 2) + 2 * (tile % 2) - 3 if weight_type == WeightType.FIVE else 4 * (tile % 2) - 2
            high = high >> shift if shift > 0 else high << -shift
            lower |= high & (0x10101010 if weight_type == WeightType.FIVE else 0x30303030)
            upper |= high & (0x08080808 if weight_type == WeightType.FIVE else 0x0C0C0C0C)
        first = 16 * tile + 2 * (lane % 4)
        places = [first, first + 8, first + 1, first + 9]
        assert list(lower.to_bytes(4, "little")) == numbers.quants[lane // 4, places].tolist()
        top = [int(q) << 4 - more for q in numbers.quants[lane // 4 + 8, places]]
        assert list(upper.to_bytes(4, "little")) == top


# --- what a weight becomes ---


def bounds_of(numbers: Numbers, type: str) -> Tensor:
    """How far a weight on the tape may be from the file's own value, float32 [rows, columns]; `type` as `type_of` says.

    Nothing where the file's scales are float16 themselves (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0) or the weights stay as they
    are. Of K types scale and minimum are rounded to 11 bits each, or to steps of 2^-24 where they are small: a
    2048th of what the two contribute. Float weights are rounded once, to 8 bits (bfloat16) or 11.
    """
    if numbers.scales is None:
        wide = numbers.quants.float().abs()
        if type == str(numbers.quants.dtype).removeprefix("torch."):
            return torch.zeros_like(wide)
        is_short = numbers.quants.dtype == torch.bfloat16
        return (wide * 2**-8).clamp_min(2**-134) if is_short else half_step(numbers.quants)
    q = numbers.quants.float()
    if type not in ROUNDED:
        return torch.zeros_like(q)
    size = (q - SIX_OFFSET if numbers.weight_type == WeightType.SIX else q).abs()
    most = torch.unflatten(size, 1, (-1, GROUP_COLUMNS[numbers.weight_type])) * half_step(numbers.scales)[..., None]
    if numbers.minima is None:
        return most.flatten(1)
    # The difference is rounded to float32 twice, in the file's value and in ours: a 2^24th of either part, at most.
    return ((most + half_step(numbers.minima)[..., None]) * (1 + 2**-11)).flatten(1)


def half_step(halves: Tensor) -> Tensor:
    """The most that was lost when these float16 were rounded, float32."""
    return (halves.float().abs() * 2**-11).clamp_min(2**-25)


@pytest.mark.parametrize("type", TYPES)
@given(SEEDS)
@settings(max_examples=8, deadline=None)
def test_a_weight_is_the_files_own_to_within_its_bound(type: str, seed: int) -> None:
    raw = blocks(type, 5, 512, seed)
    numbers = numbers_of(packed(type, raw), torch.arange(5), torch.bfloat16)
    distance = (values_of(numbers).double() - file_values(type, raw).double()).abs()
    bounds = bounds_of(numbers, type)
    assert (distance <= bounds).all()
    if type in ROUNDED:  # and the bound says something
        assert 0.05 * bounds.max() < distance.max()  # 0.13 is the least of 2,500 seeds
        assert bounds.max() < 2**-10 * 64 * values_of(numbers).abs().max()
    else:
        assert not bounds.any()


@pytest.mark.parametrize("type", ROUNDED)
def test_small_scales_are_rounded_to_steps_that_the_bound_knows(type: str) -> None:
    raw = blocks(type, 4, 256, seed=1)
    for at in (208,) if type == "Q6_K" else (0, 2):
        raw[:, at : at + 2] = torch.tensor([3, 0], dtype=torch.uint8)  # float16 3 * 2^-24
    numbers = numbers_of(packed(type, raw), torch.arange(4), torch.bfloat16)
    assert ((values_of(numbers) - file_values(type, raw)).abs() <= bounds_of(numbers, type)).all()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("type", FLOATS)
def test_a_float_weight_is_rounded_once(type: str, half: torch.dtype) -> None:
    weights = weight(type, 16, 100, seed=2)
    assert isinstance(weights, Tensor)
    weights[0, :4] = torch.tensor([0.0, 1e-6, -3e-8, 1.0])
    numbers = numbers_of(weights, torch.arange(16), half)
    assert torch.equal(values_of(numbers), weights.to(half).float())
    bounds = bounds_of(numbers, type_of(weights))
    assert ((values_of(numbers) - weights.float()).abs() <= bounds).all()
    assert bounds.any() == (weights.dtype != half)


# --- the whole tape ---


@st.composite
def models(draw: st.DrawFn) -> tuple[list[TapeSource], Partition, torch.dtype]:
    """Some matrices of all kinds mixed, partition to a grid."""
    grid = TapeGrid(draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    sources = []
    for seed in range(draw(st.integers(1, 5))):
        type = draw(st.sampled_from((*TYPES, *FLOATS)))
        unit = 1 if type in FLOATS else BLOCKS[type].elements
        columns = draw(st.integers(1, max(600 // unit, 1))) * unit
        n_rows = 2 * draw(st.integers(1, 130))
        sources.append(source_of(weight(type, n_rows, columns, seed), paired=draw(st.booleans())))
    return sources, make_partition([source.matrix for source in sources], grid), draw(st.sampled_from(HALVES))


@given(models())
@settings(max_examples=30, deadline=None)
def test_matrices_come_back_from_the_tape(model: tuple[list[TapeSource], Partition, torch.dtype]) -> None:
    sources, partition, half = model
    tape = tape_of(sources, partition, CPU, half)
    assert tape.dtype == torch.uint8
    assert len(tape) == partition.n_bytes
    for index, source in enumerate(sources):
        assert torch.equal(matrix_from(tape, partition, index, half), kept_values(source, half))


def slow_row(matrix: TapeMatrix, tile: int, r: int) -> int | None:
    """Which row of the matrix stands in row r of a tile."""
    if not matrix.paired:
        return 16 * tile + r if 16 * tile + r < matrix.rows else None
    unit = 8 * tile + r % 8
    return None if unit >= matrix.rows // 2 else unit if r < 8 else unit + matrix.rows // 2


@given(models(), SEEDS)
@settings(max_examples=20, deadline=None)
def test_what_a_block_reads_is_what_its_tiles_hold(
    model: tuple[list[TapeSource], Partition, torch.dtype], seed: int
) -> None:
    """The walk, the address of a weight and the order of rows together, against the weights themselves."""
    sources, partition, half = model
    tape, values = tape_of(sources, partition, CPU, half), [kept_values(source, half) for source in sources]
    n_compute_warps = partition.grid.n_compute_warps
    pieces = [piece for block in range(partition.grid.n_blocks) for piece in walk(partition, block)]
    random = np.random.default_rng(seed)
    for i in random.permutation(len(pieces))[:25]:
        piece = pieces[i]
        segment, matrix = partition.segments[piece.segment], partition.matrices[piece.segment]
        data = tape[piece.at : piece.at + piece.n_bytes].numpy().tobytes()
        chunk = chunks_of(segment.weight_type, segment.columns, n_compute_warps)[piece.chunk]
        for _ in range(12):
            r = int(random.integers(16))
            column = 16 * chunk.first + int(random.integers(16 * chunk.n * n_compute_warps))
            at = address(segment.weight_type, segment.columns, n_compute_warps, r, column)
            row = slow_row(matrix, piece.tile, r)
            is_padding = row is None or column >= matrix.columns
            expected = 0.0 if is_padding else values[piece.segment][row, column].item()
            assert at.chunk == piece.chunk
            assert np.float32(weight_at(data, segment.weight_type, at, half)) == expected


def smollm(types: tuple[str, ...]) -> list[TapeSource]:
    """One layer of 576 columns, 9 heads and 3, with a vocabulary that is no whole number of tiles."""
    q, k, v, out, gate_up, down, head = types
    return [
        source_of(weight(q, 9 * 64, 576, 1)),
        source_of(weight(k, 3 * 64, 576, 2)),
        source_of(weight(v, 3 * 64, 576, 3)),
        source_of(weight(out, 576, 9 * 64, 4)),
        source_of(weight(gate_up, 2 * 1536, 576, 5), paired=True),
        source_of(weight(down, 576, 1536, 6)),
        source_of(weight(head, 1003, 576, 7)),
    ]


@pytest.mark.parametrize(
    "types",
    [("bfloat16",) * 7, ("Q4_0", "Q5_0", "Q8_0", "Q4_1", "Q5_1", "Q6_K", "Q8_0")],
    ids=["halves", "quantised"],
)
def test_odd_models_come_back_from_the_tape(types: tuple[str, ...]) -> None:
    sources = smollm(types)
    partition = make_partition([source.matrix for source in sources], TapeGrid(132))
    tape = tape_of(iter(sources), partition, CPU)
    for index, source in enumerate(sources):
        assert torch.equal(matrix_from(tape, partition, index), kept_values(source, torch.bfloat16))


def test_what_is_laid_out_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [source_of(weight("Q4_K", 200, 512, 1), paired=True), source_of(weight("float32", 100, 70, 2))]
    partition = make_partition([source.matrix for source in sources], TapeGrid(3, 2))
    at_once = tape_of(sources, partition, CPU)
    monkeypatch.setattr(pack_module, "_PIECE_WEIGHTS", 1)
    assert torch.equal(tape_of(sources, partition, CPU), at_once)


def test_between_runs_there_are_zeros() -> None:
    sources = [source_of(weight("Q8_0", 16 * 5, 32, 1))]
    partition = make_partition([source.matrix for source in sources], TapeGrid(3, 1))
    tape = tape_of(sources, partition, CPU)
    inside = torch.zeros(len(tape), dtype=torch.bool)
    for block in range(3):
        for piece in walk(partition, block):
            inside[piece.at : piece.at + piece.n_bytes] = True
    assert not inside.all()
    assert not tape[~inside].any()


# --- the weights of a model as it has them ---


def parts_as_loaded(types: Iterable[str], n_rows: Iterable[int], columns: int) -> tuple[list[Tensor], Weight]:
    """Matrices as a file has them, and as a model has them: stacked, neighbours of one type in one."""
    raws = [blocks(type, n, columns, seed) for seed, (type, n) in enumerate(zip(types, n_rows, strict=True))]
    parts = tuple(packed(type, raw) for type, raw in zip(types, raws, strict=True))
    return raws, parts[0] if len(parts) == 1 else Stack(parts)


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K"), ("Q4_0", "Q4_1"), ("Q5_K", "Q5_0")])
def test_gate_and_up_of_one_kind_share_tiles(types: tuple[str, str]) -> None:
    raws, whole = parts_as_loaded(types, (24, 24), 256)
    source = source_of(whole, paired=True)
    partition = make_partition([source.matrix], TapeGrid(2, 1))
    tape = tape_of([source], partition, CPU)
    each = [kept_values(source_of(packed(t, raw)), torch.bfloat16) for t, raw in zip(types, raws, strict=True)]
    assert torch.equal(matrix_from(tape, partition, 0), torch.cat(each))
    tile = next(piece for piece in walk(partition, 1) if piece.tile == 1)
    data = tape[tile.at : tile.at + tile.n_bytes].numpy().tobytes()
    weight_type = source.matrix.weight_type
    assert (
        np.float32(weight_at(data, weight_type, address(weight_type, 256, 1, 2, 5), torch.bfloat16)) == each[0][10, 5]
    )
    assert (
        np.float32(weight_at(data, weight_type, address(weight_type, 256, 1, 10, 5), torch.bfloat16)) == each[1][10, 5]
    )


def test_gate_and_up_of_two_kinds_are_refused_by_name() -> None:
    gate, up = (pack(type, blocks(type, 16, 256, 1), 16, 256) for type in ("Q4_K", "Q6_K"))
    with pytest.raises(Unsupported, match=r"Q4_K and Q6_K .* gate and up share their tiles"):
        source_of(Stack((gate, up)), paired=True)


def test_floats_of_different_widths_are_one_kind() -> None:
    source = source_of(Stack((torch.ones(8, 16), torch.ones(8, 16, dtype=torch.float16))), paired=True)
    assert source.matrix == TapeMatrix(WeightType.HALF, 16, 16, paired=True)


# --- what is refused ---


def test_scales_beyond_float16_are_refused() -> None:
    raw = blocks("Q4_0", 2, 32, 1)
    raw[1, :2] = torch.tensor([0, 120], dtype=torch.uint8)  # 32768: eight times that is no float16
    with pytest.raises(Unsupported, match="262144, and the tape keeps them in float16"):
        numbers_of(packed("Q4_0", raw), torch.arange(2), torch.bfloat16)
    raw[1, :2] = torch.tensor([0, 126], dtype=torch.uint8)  # no number
    with pytest.raises(Unsupported, match="nan"):
        numbers_of(packed("Q4_0", raw), torch.arange(2), torch.bfloat16)


def test_weights_beyond_float16_are_refused_where_they_become_it() -> None:
    weights = torch.tensor([[1e5]], dtype=torch.bfloat16)
    assert numbers_of(weights, torch.tensor([0]), torch.bfloat16).quants.item() == weights.item()
    with pytest.raises(Unsupported, match="ends at 65504"):
        numbers_of(weights, torch.tensor([0]), torch.float16)


def test_types_without_a_kind_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="int64 weights"):
        weight_type_of(torch.ones((1, 1), dtype=torch.int64))


@pytest.mark.parametrize("half", HALVES)
def test_floats_that_would_lose_bits_are_refused(half: torch.dtype) -> None:
    other = torch.float16 if half == torch.bfloat16 else torch.bfloat16
    fine = torch.tensor([[0.5, -3.0], [96.0, 0.0]])
    for dtype in (torch.float32, half, other):
        assert why_not_packed(fine.to(dtype), half) is None
    one = torch.tensor([[1.0 + 2**-9]]) if half == torch.bfloat16 else torch.tensor([[1e6]])
    assert why_not_packed(one.to(half), half) is None
    reason = why_not_packed(one.to(other), half)
    assert reason is not None
    assert f"as {type_of(one.to(half))}, which cannot hold" in reason


def test_a_reason_says_what_a_matrix_would_have_been_refused_for() -> None:
    gate, up = (pack(type, blocks(type, 16, 256, 1), 16, 256) for type in ("Q4_K", "Q6_K"))
    assert why_not_packed(gate, torch.bfloat16) is None
    assert "share their tiles" in (why_not_packed(Stack((gate, up)), torch.bfloat16, paired=True) or "")


def test_a_matrix_that_is_not_the_deals_is_refused() -> None:
    source = source_of(torch.ones(32, 16))
    partition = make_partition([TapeMatrix(WeightType.HALF, 16, 16)], TapeGrid(1, 1))
    with pytest.raises(InternalError, match="was given"):
        put_matrix(torch.zeros(partition.n_bytes, dtype=torch.uint8), partition, 0, source)
    with pytest.raises(InternalError, match="1 matrices was given 0"):
        tape_of([], partition, CPU)


def test_a_source_that_lies_elsewhere_is_brought_to_the_tape() -> None:
    for weight in (torch.zeros(32, 256), packed("Q4_K", blocks("Q4_K", 32, 256, 0))):
        source = source_of(weight)
        assert source.to(CPU) is source
        moved = source.to(torch.device("meta"))
        assert (moved.parts[0].device.type, moved.matrix) == ("meta", source.matrix)
        assert [part.shape for part in moved.parts] == [(32, 256)]
