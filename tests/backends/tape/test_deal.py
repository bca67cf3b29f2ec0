"""The map of the tape: every chunk of every tile is read once, by the right block, in the order of its run."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ostinato.backends.tape as tape_package
from ostinato.backends.tape.deal import (
    PER_PLAYER,
    RUN_ALIGNMENT,
    Deal,
    Grid,
    Kind,
    Layer,
    Matrix,
    balance,
    bytes_by_block,
    chunk_bytes,
    chunks_of,
    deal,
    in_order,
    largest_chunk,
    own_tiles,
    padded_columns,
    part_bytes,
    tile_bytes,
    walk,
)
from ostinato.errors import InternalError

KINDS = st.sampled_from(Kind)
GRIDS = st.builds(Grid, st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))
MATRICES = st.builds(
    lambda kind, half_rows, columns, paired: Matrix(kind, 2 * half_rows, columns, paired),
    KINDS,
    st.integers(1, 120),
    st.integers(1, 900),
    st.booleans(),
)
DEALS = st.builds(deal, st.lists(MATRICES, min_size=1, max_size=7), GRIDS)

# hidden, ff, query columns, key columns, layers, vocabulary
SHAPES = {
    "llama-1b": (2048, 8192, 2048, 512, 16, 128256),
    "llama-8b": (4096, 14336, 4096, 1024, 32, 128256),
    "smollm2-135m": (576, 1536, 576, 192, 30, 49152),
}


def model(name: str, *, quantised: bool) -> tuple[Matrix, ...]:
    """The matrices of a known shape, all HALF or as a Q4_K_M file keeps them: v, down and head of some layers in six
    bits, all others in four."""
    hidden, ff, query, key, n_layers, vocab = SHAPES[name]
    layers = []
    for i in range(n_layers):
        is_finer = i < n_layers // 8 or i >= 7 * n_layers // 8 or (i - n_layers // 8) % 3 == 2
        plain = Kind.FOUR if quantised else Kind.HALF
        finer = Kind.SIX if quantised and is_finer else plain
        layers.append(
            Layer(
                q=Matrix(plain, query, hidden),
                k=Matrix(plain, key, hidden),
                v=Matrix(finer, key, hidden),
                out=Matrix(plain, hidden, query),
                gate_up=Matrix(plain, 2 * ff, hidden, paired=True),
                down=Matrix(finer, hidden, ff),
            )
        )
    return in_order(layers, Matrix(Kind.SIX if quantised else Kind.HALF, vocab, hidden))


@given(DEALS)
@settings(max_examples=60, deadline=None)
def test_every_chunk_of_every_tile_is_read_once(dealt: Deal) -> None:
    read = Counter(
        (piece.segment, piece.tile, piece.chunk) for b in range(dealt.grid.n_blocks) for piece in walk(dealt, b)
    )
    everything = {
        (number, tile, chunk)
        for number, segment in enumerate(dealt.segments)
        for tile in range(segment.n_tiles)
        for chunk in range(len(chunks_of(segment.kind, segment.columns, dealt.grid.n_players)))
    }
    assert read == Counter(everything)


@given(DEALS)
@settings(max_examples=60, deadline=None)
def test_a_block_reads_its_run_from_end_to_end(dealt: Deal) -> None:
    for block in range(dealt.grid.n_blocks):
        at = dealt.begins[block]
        assert at % RUN_ALIGNMENT == 0
        seen = set()
        for piece in walk(dealt, block):
            assert piece.at == at
            assert piece.at % 16 == piece.n_bytes % 16 == 0
            if piece.segment not in seen:
                assert dealt.places[piece.segment][block] == at
                seen.add(piece.segment)
            at += piece.n_bytes
        assert at - dealt.begins[block] == bytes_by_block(dealt)[block]
        assert 0 <= dealt.begins[block + 1] - at < RUN_ALIGNMENT
    assert len(dealt.begins) == dealt.grid.n_blocks + 1
    assert dealt.n_bytes == dealt.begins[-1]


@given(DEALS)
@settings(max_examples=60, deadline=None)
def test_tiles_are_dealt_in_turn_through_the_whole_model(dealt: Deal) -> None:
    count = 0
    for segment, matrix in zip(dealt.segments, dealt.matrices, strict=True):
        assert segment.n_tiles == (matrix.rows + 15) // 16
        assert segment.first == count % dealt.grid.n_blocks
        for tile in range(segment.n_tiles):
            owner = count % dealt.grid.n_blocks
            assert [b for b in range(dealt.grid.n_blocks) if tile in own_tiles(segment, b, dealt.grid)] == [owner]
            count += 1


@given(DEALS)
@settings(max_examples=60, deadline=None)
def test_tiles_are_read_a_few_at_once_and_chunk_by_chunk(dealt: Deal) -> None:
    """The order of a run said the other way round: by sorting."""
    for block in range(dealt.grid.n_blocks):
        pieces = list(walk(dealt, block))
        nth = {(p.segment, p.tile): 0 for p in pieces}
        for segment, tile in nth:
            nth[segment, tile] = sum(1 for other in nth if other[0] == segment and other[1] < tile)
        expected = sorted(
            pieces, key=lambda p: (p.segment, nth[p.segment, p.tile] // dealt.grid.tiles_at_once, p.chunk, p.tile)
        )
        assert pieces == expected


@given(KINDS, st.integers(1, 3000), st.integers(1, 16))
def test_chunks_have_all_columns_of_all_players_once(kind: Kind, columns: int, n_players: int) -> None:
    padded = padded_columns(kind, columns, n_players)
    assert columns <= padded < columns + 32 * n_players
    chunks = chunks_of(kind, padded, n_players)
    column_tiles = [c.first + player * c.n + i for c in chunks for player in range(n_players) for i in range(c.n)]
    assert column_tiles == list(range(padded // 16))
    assert all(chunk.n == PER_PLAYER[kind] for chunk in chunks[:-1])
    assert kind == Kind.HALF or all(chunk.n % 2 == 0 for chunk in chunks)
    assert sum(chunk.n_bytes for chunk in chunks) == tile_bytes(kind, padded, n_players)


@given(KINDS, st.integers(1, 8), st.integers(1, 16))
def test_parts_of_a_chunk_are_aligned_for_wide_reads(kind: Kind, pairs: int, n_players: int) -> None:
    parts = part_bytes(kind, 2 * pairs, n_players)
    assert all(part % 32 == 0 for part in parts)
    assert sum(parts) == chunk_bytes(kind, 2 * pairs, n_players)


@pytest.mark.parametrize(
    ("kind", "bits"), [(Kind.HALF, 16), (Kind.FOUR, 5), (Kind.FIVE, 6), (Kind.SIX, 7), (Kind.EIGHT, 8.5)]
)
def test_a_kind_takes_so_many_bits_a_weight(kind: Kind, bits: float) -> None:
    assert 8 * tile_bytes(kind, 4096, 8) == bits * 16 * 4096


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), GRIDS)
def test_matrices_of_one_width_are_dealt_to_within_one_tile(n_tiles: list[int], grid: Grid) -> None:
    read = bytes_by_block(deal([Matrix(Kind.FOUR, 16 * n, 256) for n in n_tiles], grid))
    assert max(read) - min(read) <= tile_bytes(
        Kind.FOUR, padded_columns(Kind.FOUR, 256, grid.n_players), grid.n_players
    )


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", ["llama-1b", "llama-8b"])
def test_known_models_are_balanced_to_one_percent(name: str, quantised: bool) -> None:
    dealt = deal(model(name, quantised=quantised), Grid(132))
    assert balance(dealt) < 1.01
    assert largest_chunk(dealt.segments, 8) == (20480 if quantised else 16384)


def test_a_tape_of_halves_is_as_large_as_the_model() -> None:
    matrices = model("llama-1b", quantised=False)
    assert deal(matrices, Grid(132)).n_bytes == sum(2 * matrix.rows * matrix.columns for matrix in matrices)


def test_an_odd_width_costs_its_padding_and_no_more() -> None:
    dealt = deal(model("smollm2-135m", quantised=True), Grid(132))
    assert {segment.columns for segment in dealt.segments} == {768, 1536}
    assert balance(dealt) < 1.03


def test_segments_are_rows_of_four_integers_for_the_kernel() -> None:
    dealt = deal([Matrix(Kind.SIX, 40, 100), Matrix(Kind.HALF, 16, 100)], Grid(2, 1))
    assert np.array(dealt.segments, np.int32).tolist() == [[3, 3, 0, 128], [0, 1, 1, 112]]


def test_kinds_have_the_numbers_of_the_header() -> None:
    header = (Path(str(tape_package.__file__)).parent / "parts.h").read_text()
    there = {name: int(number) for name, number in re.findall(r"#define KIND_(\w+) (\d+)", header)}
    assert there == {kind.name: kind.value for kind in Kind}


def test_what_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(InternalError, match="at least 1"):
        Grid(0)
    with pytest.raises(InternalError, match="no matrix"):
        Matrix(Kind.HALF, 3, 16, paired=True)
    with pytest.raises(InternalError, match="no whole column tiles"):
        chunks_of(Kind.HALF, 100, 1)
