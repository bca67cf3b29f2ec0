"""Who reads what of the weights, and where it lies: the tape's map, in plain integers.

A *tile* is 16 rows of a matrix. Tiles are counted through the whole model and dealt to the blocks in turn, so every
block reads about the same number of bytes. What one block reads in a step is one run of memory, the blocks' runs one
after the other: for each matrix, for each few of the block's tiles, for each *chunk* of columns, for each of those
tiles, the chunk. A chunk has, for every player, some neighbouring column tiles (16 columns each): all quants first,
then further bits, then scales; `pack.py` says what their bytes mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from types import MappingProxyType
from typing import Final, NamedTuple

from ostinato.errors import InternalError

TILE_ROWS: Final = 16
TILE_COLUMNS: Final = 16
RUN_ALIGNMENT: Final = 128  # bytes: where a block's run may begin


class Kind(IntEnum):
    """How a matrix's weights are kept; the numbers are those of parts.h."""

    HALF = 0
    FOUR = 1
    FIVE = 2
    SIX = 3
    EIGHT = 4


# Column tiles that a player has of a chunk, so that a chunk is some 10 to 20 KB.
PER_PLAYER: Final[Mapping[Kind, int]] = MappingProxyType(
    {Kind.HALF: 4, Kind.FOUR: 16, Kind.FIVE: 8, Kind.SIX: 8, Kind.EIGHT: 8}
)


@dataclass(frozen=True, slots=True)
class Grid:
    """How the work is divided: blocks, a block's players, and how many tiles of a block are multiplied at once."""

    n_blocks: int
    n_players: int = 8
    tiles_at_once: int = 4

    def __post_init__(self) -> None:
        if min(self.n_blocks, self.n_players, self.tiles_at_once) < 1:
            raise InternalError(f"{self} divides the work among nobody; every number must be at least 1")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of the model. `paired`: two of rows / 2 each, one above the other (gate over up), whose rows stand
    eight and eight in a tile, so that whoever has a gate has its up."""

    kind: Kind
    rows: int
    columns: int
    paired: bool = False

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1 or (self.paired and self.rows % 2):
            raise InternalError(f"{self} is no matrix that tiles could be cut from")


@dataclass(frozen=True, slots=True)
class Layer:
    """The matrices of a layer, in the order of the tape."""

    q: Matrix
    k: Matrix
    v: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix


class Segment(NamedTuple):
    """A matrix on the tape, as parts.h has it: tile 0 is block `first`'s; columns are those with padding."""

    kind: Kind
    n_tiles: int
    first: int
    columns: int


class Chunk(NamedTuple):
    """Some columns of a tile: player w has the `n` column tiles from `first` + w * n on."""

    first: int
    n: int
    n_bytes: int


class Piece(NamedTuple):
    """What a block reads next: a chunk of a tile of a segment, and where on the tape it lies."""

    segment: int
    tile: int
    chunk: int
    at: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Deal:
    """The whole map of one model on one grid. `begins` [n_blocks + 1] says where each block's run begins, and at last
    where the tape ends; `places` [segment][block] where the block's tiles of a segment do."""

    grid: Grid
    matrices: tuple[Matrix, ...]
    segments: tuple[Segment, ...]
    begins: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]

    @property
    def n_bytes(self) -> int:
        return self.begins[-1]


def in_order(layers: Iterable[Layer], head: Matrix) -> tuple[Matrix, ...]:
    """The matrices of a model in the order of the tape."""
    each = ((layer.q, layer.k, layer.v, layer.out, layer.gate_up, layer.down) for layer in layers)
    return (*(matrix for matrices in each for matrix in matrices), head)


def deal(matrices: Sequence[Matrix], grid: Grid) -> Deal:
    """The map of these matrices, in this order."""
    segments = segments_of(matrices, grid)
    sizes = [tile_bytes(segment.kind, segment.columns, grid.n_players) for segment in segments]
    begins = [0]
    places: list[list[int]] = [[] for _ in segments]
    for block in range(grid.n_blocks):
        at = begins[-1]
        for segment, size, here in zip(segments, sizes, places, strict=True):
            here.append(at)
            at += len(own_tiles(segment, block, grid)) * size
        begins.append(at + -at % RUN_ALIGNMENT)
    return Deal(grid, tuple(matrices), segments, tuple(begins), tuple(map(tuple, places)))


def segments_of(matrices: Sequence[Matrix], grid: Grid) -> tuple[Segment, ...]:
    """The matrices as the kernel sees them: a tile is dealt to the block after the one that has the tile before it."""
    n_tiles = [-(-matrix.rows // TILE_ROWS) for matrix in matrices]
    before = accumulate(n_tiles, initial=0)
    return tuple(
        Segment(matrix.kind, n, first % grid.n_blocks, padded_columns(matrix.kind, matrix.columns, grid.n_players))
        for matrix, n, first in zip(matrices, n_tiles, before, strict=False)
    )


def padded_columns(kind: Kind, columns: int, n_players: int) -> int:
    """Columns with the padding that gives every player whole groups: of 16 columns, or of the 32 of a scale.

    >>> padded_columns(Kind.HALF, 576, 8), padded_columns(Kind.FOUR, 576, 8)
    (640, 768)
    """
    unit = (TILE_COLUMNS if kind == Kind.HALF else 2 * TILE_COLUMNS) * n_players
    return columns + -columns % unit


def own_tiles(segment: Segment, block: int, grid: Grid) -> range:
    """The tiles of a segment that a block has.

    >>> own_tiles(Segment(Kind.HALF, 6, 2, 128), 1, Grid(n_blocks=3))
    range(2, 6, 3)
    """
    return range((block - segment.first) % grid.n_blocks, segment.n_tiles, grid.n_blocks)


def chunks_of(kind: Kind, columns: int, n_players: int) -> tuple[Chunk, ...]:
    """The chunks of a tile of so many columns (with padding); only the last may be smaller.

    >>> [chunk.n for chunk in chunks_of(Kind.HALF, 1280, 8)]
    [4, 4, 2]
    """
    each, rest = divmod(columns, TILE_COLUMNS * n_players)
    if rest:
        raise InternalError(f"{columns} columns are no whole column tiles for {n_players} players each")
    per = PER_PLAYER[kind]
    sizes = [min(per, each - first) for first in range(0, each, per)]
    return tuple(Chunk(i * per * n_players, n, chunk_bytes(kind, n, n_players)) for i, n in enumerate(sizes))


def part_bytes(kind: Kind, n: int, n_players: int) -> tuple[int, int, int]:
    """Bytes of the quants, further bits and scales of a chunk that has n column tiles for each player."""
    groups = n // 2
    each = {
        Kind.HALF: (512 * n, 0, 0),
        Kind.FOUR: (256 * groups, 0, 64 * groups),
        Kind.FIVE: (256 * groups, 128 * -(-groups // 2), 64 * groups),
        Kind.SIX: (256 * groups, 128 * groups, 32 * n),
        Kind.EIGHT: (512 * groups, 0, 32 * groups),
    }[kind]
    quants, high, scales = (n_players * part for part in each)
    return quants, high, scales


def chunk_bytes(kind: Kind, n: int, n_players: int) -> int:
    """Bytes of a chunk that has n column tiles for each player.

    >>> chunk_bytes(Kind.HALF, 4, 8), chunk_bytes(Kind.FOUR, 16, 8)
    (16384, 20480)
    """
    return sum(part_bytes(kind, n, n_players))


def tile_bytes(kind: Kind, columns: int, n_players: int) -> int:
    """Bytes of all chunks of a tile; columns are those with padding."""
    return sum(chunk.n_bytes for chunk in chunks_of(kind, columns, n_players))


def matrix_bytes(kind: Kind, rows: int, columns: int, n_players: int = 8) -> int:
    """Bytes that a matrix takes on the tape, with its padding.

    >>> matrix_bytes(Kind.HALF, 2048, 2048)
    8388608
    """
    return -(-rows // TILE_ROWS) * tile_bytes(kind, padded_columns(kind, columns, n_players), n_players)


def largest_chunk(segments: Iterable[Segment], n_players: int) -> int:
    """Bytes that a stage of the ring must hold."""
    return max(chunk.n_bytes for segment in segments for chunk in chunks_of(segment.kind, segment.columns, n_players))


def walk(dealt: Deal, block: int) -> Iterator[Piece]:
    """What a block reads in one step, piece by piece: the order of its run, of its reader and of its players."""
    at, grid = dealt.begins[block], dealt.grid
    for number, segment in enumerate(dealt.segments):
        tiles = own_tiles(segment, block, grid)
        chunks = chunks_of(segment.kind, segment.columns, grid.n_players)
        for start in range(0, len(tiles), grid.tiles_at_once):
            for index, chunk in enumerate(chunks):
                for tile in tiles[start : start + grid.tiles_at_once]:
                    yield Piece(number, tile, index, at, chunk.n_bytes)
                    at += chunk.n_bytes


def bytes_by_block(dealt: Deal) -> tuple[int, ...]:
    """How much each block reads in a step."""
    read = [0] * dealt.grid.n_blocks
    for segment in dealt.segments:
        each = tile_bytes(segment.kind, segment.columns, dealt.grid.n_players)
        for block in range(len(read)):
            read[block] += len(own_tiles(segment, block, dealt.grid)) * each
    return tuple(read)


def balance(dealt: Deal) -> float:
    """The largest of the blocks' bytes over their mean: a step lasts at least so much longer than an even deal's."""
    read = bytes_by_block(dealt)
    return max(read) * len(read) / sum(read)
