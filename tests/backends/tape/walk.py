"""The order in which blocks read the tape, told piece by piece: what the ring and the compute warps are compared
with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ostinato.backends.tape.partition import TILE_COLUMNS, Partition, WeightType, own_tiles, sections_of


class Chunk(NamedTuple):
    """Some columns of a tile: compute warp w has the `n` column tiles from `first` + w * n on."""

    first: int
    n: int
    n_bytes: int


def chunks_of(weight_type: WeightType, columns: int, n_compute_warps: int) -> list[Chunk]:
    """The chunks of a tile of so many columns (with padding); only the last may be smaller."""
    return [
        Chunk(section.column // TILE_COLUMNS + i * section.n * n_compute_warps, section.n, section.chunk_bytes)
        for section in sections_of(weight_type, columns, n_compute_warps)
        for i in range(section.n_chunks)
    ]


class Piece(NamedTuple):
    """What a block reads next: a chunk of a tile of a segment, and where on the tape it lies."""

    segment: int
    tile: int
    chunk: int
    at: int
    n_bytes: int


def walk(partition: Partition, block: int) -> Iterator[Piece]:
    """What a block reads in one step, piece by piece: the order of its run, of its loader and of its compute warps."""
    at, grid = partition.begins[block], partition.grid
    for number, segment in enumerate(partition.segments):
        tiles = own_tiles(segment, block, grid)
        chunks = chunks_of(segment.weight_type, segment.columns, grid.n_compute_warps)
        for start in range(0, len(tiles), grid.tiles_at_once):
            for index, chunk in enumerate(chunks):
                for tile in tiles[start : start + grid.tiles_at_once]:
                    yield Piece(number, tile, index, at, chunk.n_bytes)
                    at += chunk.n_bytes
