"""Which block reads which weights, and where they lie: the tape's map, in plain integers.

A *tile* is 16 rows of a matrix. Tiles are counted through the whole model and assigned to the blocks in turn, so every
block reads about the same number of bytes. What one block reads in a step is one run of memory, the blocks' runs one
after the other: for each matrix, for each few of the block's tiles, for each *chunk* of columns, for each of those
tiles, the chunk. A chunk has, for every compute warp, some neighbouring column tiles (16 columns each): all quants
first, then further bits, then scales; `pack.py` says what their bytes mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from types import MappingProxyType
from typing import Final, NamedTuple

from ostinato.errors import InternalError

TILE_ROWS: Final = 16
TILE_COLUMNS: Final = 16
RUN_ALIGNMENT: Final = 128  # bytes: where a block's run may begin


class WeightType(IntEnum):
    """How a matrix's weights are kept; the numbers are those of parts.h."""

    HALF = 0
    FOUR = 1
    FIVE = 2
    SIX = 3
    EIGHT = 4


WEIGHT_TYPES: Final[Mapping[str, WeightType]] = MappingProxyType(
    {
        "Q4_0": WeightType.FOUR,
        "Q4_1": WeightType.FOUR,
        "Q4_K": WeightType.FOUR,
        "Q5_0": WeightType.FIVE,
        "Q5_1": WeightType.FIVE,
        "Q5_K": WeightType.FIVE,
        "Q6_K": WeightType.SIX,
        "Q8_0": WeightType.EIGHT,
    }
)
# Column tiles that a compute warp has of a chunk, so that a chunk is some 10 to 20 KB.
PER_COMPUTE_WARP: Final[Mapping[WeightType, int]] = MappingProxyType(
    {WeightType.HALF: 4, WeightType.FOUR: 16, WeightType.FIVE: 8, WeightType.SIX: 8, WeightType.EIGHT: 8}
)


def why_mixed(types: Iterable[str]) -> str:
    """Why gate and up of different types cannot be one matrix."""
    return (
        f"a matrix of {' and '.join(types)} cannot be laid out on the tape: gate and up share their tiles, and a tile "
        "has one kind of weights; use another loop mode, or a file that keeps them in one type"
    )


@dataclass(frozen=True, slots=True)
class TapeGrid:
    """How the work is divided: blocks, a block's compute warps, and how many tiles of a block are multiplied at
    once."""

    n_blocks: int
    n_compute_warps: int = 8
    tiles_at_once: int = 4

    def __post_init__(self) -> None:
        if min(self.n_blocks, self.n_compute_warps, self.tiles_at_once) < 1:
            raise InternalError(f"{self} leaves no warp to do the work; every number must be at least 1")


@dataclass(frozen=True, slots=True)
class TapeMatrix:
    """A matrix of the model. `paired`: two of rows / 2 each, one above the other (gate over up), whose rows stand
    eight and eight in a tile, so that the block that has a gate has its up."""

    weight_type: WeightType
    rows: int
    columns: int
    paired: bool = False

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1 or (self.paired and self.rows % 2):
            raise InternalError(f"{self} is no matrix that tiles could be cut from")


class Segment(NamedTuple):
    """A matrix on the tape, as parts.h has it: tile 0 is block `first`'s; columns are those with padding."""

    weight_type: WeightType
    n_tiles: int
    first: int
    columns: int


class TileSection(NamedTuple):
    """Consecutive chunks of one size in a tile, in each of which a compute warp has `n` column tiles; their first byte
    and their first column."""

    n_chunks: int
    n: int
    chunk_bytes: int
    at: int
    column: int


@dataclass(frozen=True, slots=True)
class Partition:
    """The whole map of one model on one grid. `begins` [n_blocks + 1] says where each block's run begins, and at last
    where the tape ends; `places` [segment][block] where the block's tiles of a segment do."""

    grid: TapeGrid
    matrices: tuple[TapeMatrix, ...]
    segments: tuple[Segment, ...]
    begins: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]

    @property
    def n_bytes(self) -> int:
        return self.begins[-1]


def make_partition(matrices: Sequence[TapeMatrix], grid: TapeGrid) -> Partition:
    """The map of these matrices, in this order."""
    segments = segments_of(matrices, grid)
    sizes = [tile_bytes(segment.weight_type, segment.columns, grid.n_compute_warps) for segment in segments]
    begins = [0]
    places: list[list[int]] = [[] for _ in segments]
    for block in range(grid.n_blocks):
        at = begins[-1]
        for segment, size, here in zip(segments, sizes, places, strict=True):
            here.append(at)
            at += len(own_tiles(segment, block, grid)) * size
        begins.append(at + -at % RUN_ALIGNMENT)
    return Partition(grid, tuple(matrices), segments, tuple(begins), tuple(map(tuple, places)))


def segments_of(matrices: Sequence[TapeMatrix], grid: TapeGrid) -> tuple[Segment, ...]:
    """The matrices as the kernel sees them: a tile is assigned to the block after the one that has the tile before
    it."""
    n_tiles = [-(-matrix.rows // TILE_ROWS) for matrix in matrices]
    before = accumulate(n_tiles, initial=0)
    return tuple(
        Segment(
            matrix.weight_type,
            n,
            first % grid.n_blocks,
            padded_columns(matrix.weight_type, matrix.columns, grid.n_compute_warps),
        )
        for matrix, n, first in zip(matrices, n_tiles, before, strict=False)
    )


def padded_columns(weight_type: WeightType, columns: int, n_compute_warps: int) -> int:
    """Columns with the padding that gives every compute warp whole groups: of 16 columns, or of the 32 of a scale.

    >>> padded_columns(WeightType.HALF, 576, 8), padded_columns(WeightType.FOUR, 576, 8)
    (640, 768)
    """
    unit = (TILE_COLUMNS if weight_type == WeightType.HALF else 2 * TILE_COLUMNS) * n_compute_warps
    return columns + -columns % unit


def own_tiles(segment: Segment, block: int, grid: TapeGrid) -> range:
    """The tiles of a segment that a block has.

    >>> own_tiles(Segment(WeightType.HALF, 6, 2, 128), 1, TapeGrid(n_blocks=3))
    range(2, 6, 3)
    """
    return range((block - segment.first) % grid.n_blocks, segment.n_tiles, grid.n_blocks)


def sections_of(weight_type: WeightType, columns: int, n_compute_warps: int) -> list[TileSection]:
    """The whole chunks of a tile of so many columns (with padding), then the rest.

    >>> [(section.n_chunks, section.n) for section in sections_of(WeightType.HALF, 1280, 8)]
    [(2, 4), (1, 2)]
    """
    each, rest = divmod(columns, TILE_COLUMNS * n_compute_warps)
    if rest:
        raise InternalError(f"{columns} columns are no whole column tiles for {n_compute_warps} compute warps each")
    n_whole, n_left = divmod(each, PER_COMPUTE_WARP[weight_type])
    whole = chunk_bytes(weight_type, PER_COMPUTE_WARP[weight_type], n_compute_warps)
    left = chunk_bytes(weight_type, n_left, n_compute_warps)
    behind = (n_whole * whole, (each - n_left) * TILE_COLUMNS * n_compute_warps)
    both = TileSection(n_whole, PER_COMPUTE_WARP[weight_type], whole, 0, 0), TileSection(1, n_left, left, *behind)
    return [section for section in both if section.n_chunks * section.n]


def part_bytes(weight_type: WeightType, n: int, n_compute_warps: int) -> tuple[int, int, int]:
    """Bytes of the quants, further bits and scales of a chunk that has n column tiles for each compute warp."""
    groups = n // 2
    each = {
        WeightType.HALF: (512 * n, 0, 0),
        WeightType.FOUR: (256 * groups, 0, 64 * groups),
        WeightType.FIVE: (256 * groups, 128 * -(-groups // 2), 64 * groups),
        WeightType.SIX: (256 * groups, 128 * groups, 32 * n),
        WeightType.EIGHT: (512 * groups, 0, 32 * groups),
    }[weight_type]
    quants, high, scales = (n_compute_warps * part for part in each)
    return quants, high, scales


def chunk_bytes(weight_type: WeightType, n: int, n_compute_warps: int) -> int:
    """Bytes of a chunk that has n column tiles for each compute warp.

    >>> chunk_bytes(WeightType.HALF, 4, 8), chunk_bytes(WeightType.FOUR, 16, 8)
    (16384, 20480)
    """
    return sum(part_bytes(weight_type, n, n_compute_warps))


def tile_bytes(weight_type: WeightType, columns: int, n_compute_warps: int) -> int:
    """Bytes of all chunks of a tile; columns are those with padding."""
    return sum(section.n_chunks * section.chunk_bytes for section in sections_of(weight_type, columns, n_compute_warps))


def matrix_bytes(weight_type: WeightType, rows: int, columns: int, n_compute_warps: int = 8) -> int:
    """Bytes that a matrix takes on the tape, with its padding.

    >>> matrix_bytes(WeightType.HALF, 2048, 2048)
    8388608
    """
    return -(-rows // TILE_ROWS) * tile_bytes(
        weight_type, padded_columns(weight_type, columns, n_compute_warps), n_compute_warps
    )


def largest_chunk(segments: Iterable[Segment], n_compute_warps: int) -> int:
    """Bytes that a stage of the ring must hold."""
    return max(
        section.chunk_bytes
        for segment in segments
        for section in sections_of(segment.weight_type, segment.columns, n_compute_warps)
    )
