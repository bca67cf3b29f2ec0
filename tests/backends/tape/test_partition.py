"""The map of the tape: every chunk of every tile is read once, by the right block, in the order of its run."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ostinato.backends.tape as tape_package
from ostinato.backends.tape.partition import (
    PER_COMPUTE_WARP,
    RUN_ALIGNMENT,
    Partition,
    TapeGrid,
    TapeMatrix,
    WeightType,
    chunk_bytes,
    largest_chunk,
    make_partition,
    own_tiles,
    padded_columns,
    part_bytes,
    tile_bytes,
)
from ostinato.errors import InternalError
from tests.backends.tape.walk import chunks_of, walk

WEIGHT_TYPES = st.sampled_from(WeightType)
GRIDS = st.builds(TapeGrid, st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))
MATRICES = st.builds(
    lambda weight_type, half_rows, columns, paired: TapeMatrix(weight_type, 2 * half_rows, columns, paired),
    WEIGHT_TYPES,
    st.integers(1, 120),
    st.integers(1, 900),
    st.booleans(),
)
PARTITIONS = st.builds(make_partition, st.lists(MATRICES, min_size=1, max_size=7), GRIDS)

# hidden, ff, query columns, key columns, layers, vocabulary
SHAPES = {
    "llama-1b": (2048, 8192, 2048, 512, 16, 128256),
    "llama-8b": (4096, 14336, 4096, 1024, 32, 128256),
    "smollm2-135m": (576, 1536, 576, 192, 30, 49152),
}


def model(name: str, *, quantised: bool) -> tuple[TapeMatrix, ...]:
    """The matrices of a known shape, all HALF or as a Q4_K_M file keeps them: v, down and head of some layers in six
    bits, all others in four."""
    hidden, ff, query, key, n_layers, vocab = SHAPES[name]
    matrices = []
    for i in range(n_layers):
        is_finer = i < n_layers // 8 or i >= 7 * n_layers // 8 or (i - n_layers // 8) % 3 == 2
        plain = WeightType.FOUR if quantised else WeightType.HALF
        finer = WeightType.SIX if quantised and is_finer else plain
        matrices += [
            TapeMatrix(plain, query, hidden),
            TapeMatrix(plain, key, hidden),
            TapeMatrix(finer, key, hidden),
            TapeMatrix(plain, hidden, query),
            TapeMatrix(plain, 2 * ff, hidden, paired=True),
            TapeMatrix(finer, hidden, ff),
        ]
    return (*matrices, TapeMatrix(WeightType.SIX if quantised else WeightType.HALF, vocab, hidden))


def bytes_by_block(partition: Partition) -> tuple[int, ...]:
    """Bytes that each block reads in a step."""
    read = [0] * partition.grid.n_blocks
    for segment in partition.segments:
        each = tile_bytes(segment.weight_type, segment.columns, partition.grid.n_compute_warps)
        for block in range(len(read)):
            read[block] += len(own_tiles(segment, block, partition.grid)) * each
    return tuple(read)


def balance(partition: Partition) -> float:
    """The largest of the blocks' bytes over their mean: a step lasts at least so much longer than an even deal's."""
    read = bytes_by_block(partition)
    return max(read) * len(read) / sum(read)


@given(PARTITIONS)
@settings(max_examples=60, deadline=None)
def test_every_chunk_of_every_tile_is_read_once(partition: Partition) -> None:
    read = Counter(
        (piece.segment, piece.tile, piece.chunk) for b in range(partition.grid.n_blocks) for piece in walk(partition, b)
    )
    everything = {
        (number, tile, chunk)
        for number, segment in enumerate(partition.segments)
        for tile in range(segment.n_tiles)
        for chunk in range(len(chunks_of(segment.weight_type, segment.columns, partition.grid.n_compute_warps)))
    }
    assert read == Counter(everything)


@given(PARTITIONS)
@settings(max_examples=60, deadline=None)
def test_a_block_reads_its_run_from_end_to_end(partition: Partition) -> None:
    for block in range(partition.grid.n_blocks):
        at = partition.begins[block]
        assert at % RUN_ALIGNMENT == 0
        seen = set()
        for piece in walk(partition, block):
            assert piece.at == at
            assert piece.at % 16 == piece.n_bytes % 16 == 0
            if piece.segment not in seen:
                assert partition.places[piece.segment][block] == at
                seen.add(piece.segment)
            at += piece.n_bytes
        assert at - partition.begins[block] == bytes_by_block(partition)[block]
        assert 0 <= partition.begins[block + 1] - at < RUN_ALIGNMENT
    assert len(partition.begins) == partition.grid.n_blocks + 1
    assert partition.n_bytes == partition.begins[-1]


@given(PARTITIONS)
@settings(max_examples=60, deadline=None)
def test_tiles_are_dealt_in_turn_through_the_whole_model(partition: Partition) -> None:
    count = 0
    for segment, matrix in zip(partition.segments, partition.matrices, strict=True):
        assert segment.n_tiles == (matrix.rows + 15) // 16
        assert segment.first == count % partition.grid.n_blocks
        for tile in range(segment.n_tiles):
            owner = count % partition.grid.n_blocks
            assert [b for b in range(partition.grid.n_blocks) if tile in own_tiles(segment, b, partition.grid)] == [
                owner
            ]
            count += 1


@given(PARTITIONS)
@settings(max_examples=60, deadline=None)
def test_tiles_are_read_a_few_at_once_and_chunk_by_chunk(partition: Partition) -> None:
    """The order of a run said the other way round: by sorting."""
    for block in range(partition.grid.n_blocks):
        pieces = list(walk(partition, block))
        nth = {(p.segment, p.tile): 0 for p in pieces}
        for segment, tile in nth:
            nth[segment, tile] = sum(1 for other in nth if other[0] == segment and other[1] < tile)
        expected = sorted(
            pieces, key=lambda p: (p.segment, nth[p.segment, p.tile] // partition.grid.tiles_at_once, p.chunk, p.tile)
        )
        assert pieces == expected


@given(WEIGHT_TYPES, st.integers(1, 3000), st.integers(1, 16))
def test_chunks_have_all_columns_of_all_compute_warps_once(
    weight_type: WeightType, columns: int, n_compute_warps: int
) -> None:
    padded = padded_columns(weight_type, columns, n_compute_warps)
    assert columns <= padded < columns + 32 * n_compute_warps
    chunks = chunks_of(weight_type, padded, n_compute_warps)
    column_tiles = [
        c.first + compute_warp * c.n + i for c in chunks for compute_warp in range(n_compute_warps) for i in range(c.n)
    ]
    assert column_tiles == list(range(padded // 16))
    assert all(chunk.n == PER_COMPUTE_WARP[weight_type] for chunk in chunks[:-1])
    assert weight_type == WeightType.HALF or all(chunk.n % 2 == 0 for chunk in chunks)
    assert sum(chunk.n_bytes for chunk in chunks) == tile_bytes(weight_type, padded, n_compute_warps)


@given(WEIGHT_TYPES, st.integers(1, 8), st.integers(1, 16))
def test_parts_of_a_chunk_are_aligned_for_wide_reads(weight_type: WeightType, pairs: int, n_compute_warps: int) -> None:
    parts = part_bytes(weight_type, 2 * pairs, n_compute_warps)
    assert all(part % 32 == 0 for part in parts)
    assert sum(parts) == chunk_bytes(weight_type, 2 * pairs, n_compute_warps)


@pytest.mark.parametrize(
    ("weight_type", "bits"),
    [(WeightType.HALF, 16), (WeightType.FOUR, 5), (WeightType.FIVE, 6), (WeightType.SIX, 7), (WeightType.EIGHT, 8.5)],
)
def test_a_kind_takes_so_many_bits_a_weight(weight_type: WeightType, bits: float) -> None:
    assert 8 * tile_bytes(weight_type, 4096, 8) == bits * 16 * 4096


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), GRIDS)
def test_matrices_of_one_width_are_dealt_to_within_one_tile(n_tiles: list[int], grid: TapeGrid) -> None:
    read = bytes_by_block(make_partition([TapeMatrix(WeightType.FOUR, 16 * n, 256) for n in n_tiles], grid))
    assert max(read) - min(read) <= tile_bytes(
        WeightType.FOUR, padded_columns(WeightType.FOUR, 256, grid.n_compute_warps), grid.n_compute_warps
    )


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", ["llama-1b", "llama-8b"])
def test_known_models_are_balanced_to_one_percent(name: str, quantised: bool) -> None:
    partition = make_partition(model(name, quantised=quantised), TapeGrid(132))
    assert balance(partition) < 1.01
    assert largest_chunk(partition.segments, 8) == (20480 if quantised else 16384)


def test_a_tape_of_halves_is_as_large_as_the_model() -> None:
    matrices = model("llama-1b", quantised=False)
    assert make_partition(matrices, TapeGrid(132)).n_bytes == sum(
        2 * matrix.rows * matrix.columns for matrix in matrices
    )


def test_an_odd_width_costs_its_padding_and_no_more() -> None:
    partition = make_partition(model("smollm2-135m", quantised=True), TapeGrid(132))
    assert {segment.columns for segment in partition.segments} == {768, 1536}
    assert balance(partition) < 1.03


def test_segments_are_rows_of_four_integers_for_the_kernel() -> None:
    partition = make_partition(
        [TapeMatrix(WeightType.SIX, 40, 100), TapeMatrix(WeightType.HALF, 16, 100)], TapeGrid(2, 1)
    )
    assert np.array(partition.segments, np.int32).tolist() == [[3, 3, 0, 128], [0, 1, 1, 112]]


def test_kinds_have_the_numbers_of_the_header() -> None:
    header = (Path(str(tape_package.__file__)).parent / "src" / "parts.h").read_text()
    there = {name: int(number) for name, number in re.findall(r"#define WEIGHT_(\w+) (\d+)", header)}
    assert there == {weight_type.name: weight_type.value for weight_type in WeightType}


def test_what_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(InternalError, match="at least 1"):
        TapeGrid(0)
    with pytest.raises(InternalError, match="no matrix"):
        TapeMatrix(WeightType.HALF, 3, 16, paired=True)
    with pytest.raises(InternalError, match="no whole column tiles"):
        chunks_of(WeightType.HALF, 100, 1)
