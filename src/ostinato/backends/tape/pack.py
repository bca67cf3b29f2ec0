"""The layout of weights on the tape: in the register order of the tensor cores, chunk by chunk, block by block.

A lane of a compute warp is (g, q) = (lane / 4, lane % 4). Of a column tile (16 rows, 16 columns) it holds four
registers r of two values h: rows g + 8 (r % 2), columns 2 q + h + 8 (r / 2). A *group* is two column tiles t, 32
columns. In a chunk with n column tiles for each compute warp (n / 2 groups; n is even for all types but HALF):

    HALF   quants  [warp][n][lane][16 B]        registers 0 to 3, each two float16 or bfloat16, low value first
    FOUR   quants  [warp][n/2][lane][8 B]       a word for each column tile: value h of register r at bit 4 r + 16 h
                   [warp][n/4][lane][16 B]      in whole chunks: the words of four column tiles together
           scales  [warp][n/2][16 rows][4 B]    float16 scale, float16 minimum
                   [warp][4][8][n/8][8 B]       in whole chunks: two rows of every fourth group together
    FIVE   quants, scales as FOUR               four of five bits: of even registers the lower, of odd the upper
           high    [warp][(n+3)/4][lane][4 B]   the fifth: 4 j + 2 t + 1 - r % 2 + 8 (r / 2) + 16 h, groups 2 i + j
                   [warp][lane][n/4][4 B]       in whole chunks
    SIX    quants  as FOUR                      four of six bits, in the same way
           high    [warp][n/2][lane][4 B]       the other two, at 4 t + 2 (1 - r % 2) + 8 (r / 2) + 16 h
                   [warp][lane][n/2][4 B]       in whole chunks
           scales  [warp][n][16 rows][2 B]      float16, of each 16 columns
                   [warp][4][8][n/4][4 B]       in whole chunks: two rows of every fourth group together
    EIGHT  quants  [warp][n/2][lane][16 B]      word 2 t + r % 2, byte r / 2 + 2 h: a signed byte
           scales  [warp][n/2][16 rows][2 B]

The rows of scales are in the order 0, 8, 1, 9, ... 15: those of a lane together. Byte r / 2 + 2 h of a word is value h
of register r. So one mask selects four values of rows 0 to 7 in the lower bits of a word's bytes, another four values
of rows 8 to 15 in the upper bits, and one shift of `high` aligns the missing bits with either.
All is little-endian. Padding (rows and columns beyond a matrix, the neighbour of an odd group) is zero.

A weight is scale * q - minimum (FOUR, FIVE), scale * (q - 32) (SIX), scale * q (EIGHT), or itself (HALF).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from ostinato.backends.cuda.packed import OFFSETS, Packed, for_a_gpu, quants_of, raw_rows, scales_of
from ostinato.backends.tape.partition import (
    PER_COMPUTE_WARP,
    TILE_COLUMNS,
    TILE_ROWS,
    WEIGHT_TYPES,
    Partition,
    Segment,
    TapeGrid,
    TapeMatrix,
    TileSection,
    WeightType,
    sections_of,
    tile_bytes,
    why_mixed,
)
from ostinato.backends.torch.allocate import Allocate, zeros
from ostinato.backends.torch.weight import Weight
from ostinato.backends.weights import Stack, shape_of
from ostinato.errors import InternalError, Unsupported

# Columns that share a scale.
GROUP_COLUMNS: Final[Mapping[WeightType, int]] = MappingProxyType(
    {WeightType.FOUR: 32, WeightType.FIVE: 32, WeightType.SIX: 16, WeightType.EIGHT: 32}
)
_FURTHER_BITS: Final[Mapping[WeightType, int]] = MappingProxyType(
    {WeightType.FOUR: 0, WeightType.FIVE: 1, WeightType.SIX: 2}
)
_PIECE_WEIGHTS: Final = 1 << 24  # laid out at a time: temporaries are a few bytes for each


@dataclass(frozen=True, slots=True)
class TapeSource:
    """Where a matrix of the tape comes from: one weight, or several, one above the other."""

    matrix: TapeMatrix
    parts: tuple[Tensor | Packed, ...]

    def to(self, device: torch.device) -> TapeSource:
        """The same on another device; itself where it is there."""
        if self.parts[0].device == device:
            return self
        return replace(self, parts=tuple(part.to(device) for part in self.parts))


@dataclass(frozen=True, slots=True)
class Numbers:
    """Some rows as the tape stores them: quants [rows, columns] (HALF: the weights; EIGHT: int8; else uint8), and
    float16 scales and minima [rows, groups] where the weight type has them."""

    weight_type: WeightType
    quants: Tensor
    scales: Tensor | None = None
    minima: Tensor | None = None


# --- from weights to numbers ---


def source_of(weight: Weight, *, paired: bool = False) -> TapeSource:
    """A weight as one matrix of the tape; `paired`: it is gate over up.

    Raises Unsupported where gate and up are of different types: a matrix of the tape has one. (q, k and v, which may
    differ, are three matrices.)
    """
    parts = tuple(map(for_a_gpu, weight.parts if isinstance(weight, Stack) else (weight,)))
    weight_types = {weight_type_of(part) for part in parts}
    if len(weight_types) > 1:
        raise Unsupported(why_mixed(map(type_of, parts)))
    return TapeSource(TapeMatrix(weight_types.pop(), *shape_of(weight), paired), parts)


def why_not_packed(weight: Weight, half: torch.dtype, *, paired: bool = False) -> str | None:
    """Why a weight cannot be a matrix of the tape, in a sentence; None where it can.

    Float weights must become `half` without loss: weights of another dtype are compared, a piece at a time.
    """
    try:
        source = source_of(weight, paired=paired)
    except Unsupported as error:
        return str(error)
    for part in source.parts:
        if not isinstance(part, Tensor) or part.dtype == half:
            continue
        step = max(_PIECE_WEIGHTS // part.shape[1], 1)
        if not all(torch.equal(some.to(half).to(part.dtype), some) for some in torch.split(part, step)):
            wanted = str(half).removeprefix("torch.")
            return f"the tape keeps these {type_of(part)} weights as {wanted}, which cannot hold their values"
    return None


def weight_type_of(part: Tensor | Packed) -> WeightType:
    """How the tape keeps the weights of a part. Raises Unsupported for a type that it cannot keep."""
    if isinstance(part, Packed):
        return WEIGHT_TYPES[part.type]
    if part.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise Unsupported(f"{type_of(part)} weights have no place on the tape; float32, float16 and bfloat16 have")
    return WeightType.HALF


def type_of(part: Tensor | Packed) -> str:
    """How a part names its type."""
    return str(part.dtype).removeprefix("torch.") if isinstance(part, Tensor) else part.type


def numbers_of(part: Tensor | Packed, ids: Tensor, half: torch.dtype) -> Numbers:
    """Rows `ids`, int [n], of a part as the tape stores them; `half` is the type of HALF weights."""
    if isinstance(part, Tensor):
        weights = part.index_select(0, ids)
        if half == torch.float16 and part.dtype != half:
            _check_fits(weights, "weights")
        return Numbers(WeightType.HALF, weights.to(half))
    raw, weight_type = raw_rows(part, ids), WEIGHT_TYPES[part.type]
    quants, (scales, minima) = quants_of(raw, part.type), scales_of(raw, part.type)
    if minima is None and weight_type in (WeightType.FOUR, WeightType.FIVE):
        minima = scales * OFFSETS[part.type]
    return Numbers(weight_type, quants, _to_half(scales), None if minima is None else _to_half(minima))


def _to_half(wide: Tensor) -> Tensor:
    _check_fits(wide, "scales")
    return wide.half()


def _check_fits(wide: Tensor, what: str) -> None:
    largest = float(wide.abs().amax()) if wide.numel() else 0.0
    if not largest < 65520.0:  # rounded to infinity, or NaN
        raise Unsupported(
            f"a matrix has {what} as large as {largest:g}, and the tape keeps them in float16, which ends at 65504; "
            "use another loop mode"
        )


# --- the layout of a tile ---


def tiles_from(numbers: Numbers, n_compute_warps: int) -> Tensor:
    """Numbers of whole tiles, with all padding, as the tape has them: uint8 [tiles, tile_bytes]."""
    weight_type, columns = numbers.weight_type, numbers.quants.shape[1]
    n_tiles = len(numbers.quants) // TILE_ROWS
    size = tile_bytes(weight_type, columns, n_compute_warps)
    out = torch.empty((n_tiles, size), dtype=torch.uint8, device=numbers.quants.device)
    for section in sections_of(weight_type, columns, n_compute_warps):
        chunks, at = _chunks_of_tiles(out, section), 0
        for part in _parts(numbers, section, n_compute_warps):
            flat = part.reshape(n_tiles, section.n_chunks, -1)
            chunks[:, :, at : at + flat.shape[2]] = flat
            at += flat.shape[2]
    return out


def _chunks_of_tiles(tiles: Tensor, section: TileSection) -> Tensor:
    """The chunks of a section, [tiles, chunks, chunk_bytes], a view of tiles [tiles, tile_bytes]."""
    some = tiles[:, section.at : section.at + section.n_chunks * section.chunk_bytes]
    return torch.unflatten(some, 1, (section.n_chunks, section.chunk_bytes))


# Dimensions of a section's quants: (tile, row / 8, g, chunk, compute warp, column tile, column / 8, q, h); the rows' 8
# and the columns' 8 make the register r.


def _parts(numbers: Numbers, section: TileSection, n_compute_warps: int) -> Iterator[Tensor]:
    """Quants, further bits and scales of a section, each uint8 [tiles, chunks, ...]."""
    weight_type, n = numbers.weight_type, section.n
    width = section.n_chunks * n_compute_warps * n * TILE_COLUMNS
    some = numbers.quants[:, section.column : section.column + width]
    q = some.reshape(-1, 2, 8, section.n_chunks, n_compute_warps, n, 2, 4, 2)
    if weight_type == WeightType.HALF:
        yield q.permute(0, 3, 4, 5, 2, 7, 6, 1, 8).contiguous().view(torch.uint8)
        return
    if weight_type == WeightType.EIGHT:
        yield _by(2, q, 5).permute(0, 3, 4, 5, 2, 8, 6, 1, 9, 7).contiguous().view(torch.uint8)
    else:
        (even, odd), more = q.unbind(1), _FURTHER_BITS[weight_type]
        quants = even & 15 | odd >> more << 4
        yield _by(_tiles_a_lane(weight_type, n), quants, 4).permute(0, 2, 3, 4, 1, 7, 5, 8, 6)
        if more:
            high = _joined(odd & (1 << more) - 1 | even >> 4 << more, 2 * more)
            words = _joined(high, 4) if weight_type == WeightType.FIVE else high
            yield (
                words.permute(0, 2, 3, 1, 6, 4, 7, 5)
                if _is_whole(weight_type, n)
                else words.permute(0, 2, 3, 4, 1, 6, 7, 5)
            )
    group, together = GROUP_COLUMNS[weight_type], _groups_a_slot(weight_type, n)
    sizes = (section.n_chunks, n_compute_warps, together, n * TILE_COLUMNS // group // together)
    fields = [
        field[:, section.column // group : (section.column + width) // group]
        .reshape(-1, 2, 8, *sizes)
        .permute(0, 3, 4, 6, 2, 5, 1)
        for field in (numbers.scales, numbers.minima)
        if field is not None
    ]
    yield torch.stack(fields, -1).view(torch.uint8)


def _is_whole(weight_type: WeightType, n: int) -> bool:
    """Whether a chunk of n column tiles for each compute warp is whole: a lane's words are then contiguous."""
    return n == PER_COMPUTE_WARP[weight_type]


def _tiles_a_lane(weight_type: WeightType, n: int) -> int:
    """Column tiles whose words are contiguous."""
    return 4 if _is_whole(weight_type, n) else 2


def _groups_a_slot(weight_type: WeightType, n: int) -> int:
    """Groups whose scales are contiguous: every fourth."""
    return n * TILE_COLUMNS // GROUP_COLUMNS[weight_type] // 4 if _is_whole(weight_type, n) else 1


def _n_fields(weight_type: WeightType) -> int:
    """How many float16 a group has."""
    return 2 if weight_type in (WeightType.FOUR, WeightType.FIVE) else 1


def _by(n: int, values: Tensor, dim: int) -> Tensor:
    """A dimension as two, the second of size n."""
    return torch.unflatten(values, dim, (-1, n))


def _joined(values: Tensor, shift: int) -> Tensor:
    """Pairs of dimension 4 (column tiles, or groups) in one byte, the second shifted left by `shift` bits."""
    low, high = _by(2, pad(values, (0, 0) * 3 + (0, values.shape[4] % 2)), 4).unbind(5)
    return low | high << shift


# --- the tape ---


def tape_of(
    sources: Iterable[TapeSource],
    partition: Partition,
    device: torch.device,
    half: torch.dtype = torch.bfloat16,
    allocate: Allocate = zeros,
) -> Tensor:
    """The whole tape, uint8, with the runs of all blocks. Sources come in the order of the partition and may be made
    one by one, so that each matrix can be freed once it is packed."""
    tape = allocate((partition.n_bytes,), torch.uint8, device)
    n_done = 0
    for source in sources:
        put_matrix(tape, partition, n_done, source, half)
        n_done += 1
    if n_done != len(partition.matrices):
        raise InternalError(f"a tape of {len(partition.matrices)} matrices was given {n_done}")
    return tape


def put_matrix(
    tape: Tensor, partition: Partition, index: int, source: TapeSource, half: torch.dtype = torch.bfloat16
) -> None:
    """Write matrix `index` of the partition to where the blocks read it; the rest of the tape is unchanged. A source on
    another device is copied to the tape's device for the duration of the call."""
    matrix, segment = partition.matrices[index], partition.segments[index]
    n_compute_warps = partition.grid.n_compute_warps
    if source.matrix != matrix:
        raise InternalError(f"matrix {index} of the tape is {matrix}, and was given {source.matrix}")
    source = source.to(tape.device)
    for start, stop in _slabs(segment, partition.grid):
        size = tile_bytes(segment.weight_type, segment.columns, n_compute_warps)
        slab = torch.empty((stop - start, size), dtype=torch.uint8, device=tape.device)
        for first, last in _pieces(segment, start, stop):
            numbers = _padded(source, _rows_of_tiles(matrix, first, last), segment.columns, half)
            slab[first - start : last - start] = tiles_from(numbers, n_compute_warps)
        for on_tape, of_slab in _shares(tape, slab, partition, index, start):
            on_tape.copy_(of_slab)


def _slabs(segment: Segment, grid: TapeGrid) -> Iterator[tuple[int, int]]:
    """The tiles of a segment in runs that hold, for every block, those it multiplies at once."""
    each = grid.n_blocks * grid.tiles_at_once
    return ((start, min(start + each, segment.n_tiles)) for start in range(0, segment.n_tiles, each))


def _pieces(segment: Segment, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Tiles `start` to `stop` in runs that are laid out at a time."""
    each = max(_PIECE_WEIGHTS // segment.columns // TILE_ROWS, 1)
    return ((first, min(first + each, stop)) for first in range(start, stop, each))


def _shares(
    tape: Tensor, slab: Tensor, partition: Partition, index: int, start: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Where the slab of tiles from `start` on lies on the tape: pairs of views of the same bytes, [chunks, tiles of a
    block, bytes], the first into the tape, the second into the slab [tiles, tile_bytes]."""
    segment, n_blocks = partition.segments[index], partition.grid.n_blocks
    sections = sections_of(segment.weight_type, segment.columns, partition.grid.n_compute_warps)
    for block, place in enumerate(partition.places[index]):
        tiles = slab[(block - segment.first) % n_blocks :: n_blocks]
        at = place + start // n_blocks * slab.shape[1]
        for section in sections if len(tiles) else ():
            each = section.n_chunks * section.chunk_bytes
            on_tape = tape[at : at + len(tiles) * each].view(section.n_chunks, len(tiles), section.chunk_bytes)
            yield on_tape, _chunks_of_tiles(tiles, section).transpose(0, 1)
            at += len(tiles) * each


def _rows_of_tiles(matrix: TapeMatrix, first: int, last: int) -> Tensor:
    """Which rows of a matrix are those of tiles `first` to `last`, int64 [16 tiles]; -1 for none."""
    rows = torch.arange(first * TILE_ROWS, last * TILE_ROWS)
    if not matrix.paired:
        return rows.where(rows < matrix.rows, -1)
    unit = rows // TILE_ROWS * 8 + rows % 8
    return (unit + rows % TILE_ROWS // 8 * (matrix.rows // 2)).where(unit < matrix.rows // 2, -1)


def _padded(source: TapeSource, ids: Tensor, columns: int, half: torch.dtype) -> Numbers:
    """The numbers of some rows of a source (-1 for rows that are none), with zeros where there is padding."""
    device = source.parts[0].device
    out = _zero_numbers(source.matrix.weight_type, len(ids), columns, half, device)
    before = 0
    for part in source.parts:
        n_rows, _ = shape_of(part)
        here = ((ids >= before) & (ids < before + n_rows)).nonzero()[:, 0]
        if len(here):
            numbers = numbers_of(part, (ids[here] - before).to(device), half)
            at = here.to(device)
            fields = ((out.quants, numbers.quants), (out.scales, numbers.scales), (out.minima, numbers.minima))
            for to, values in fields:
                if to is not None and values is not None:
                    to[at, : values.shape[1]] = values
        before += n_rows
    return out


def _zero_numbers(
    weight_type: WeightType, n_rows: int, columns: int, half: torch.dtype, device: torch.device
) -> Numbers:
    dtype = {WeightType.HALF: half, WeightType.EIGHT: torch.int8}.get(weight_type, torch.uint8)
    quants = torch.zeros((n_rows, columns), dtype=dtype, device=device)
    if weight_type == WeightType.HALF:
        return Numbers(weight_type, quants)
    scales, minima = torch.zeros((2, n_rows, columns // GROUP_COLUMNS[weight_type]), dtype=torch.float16, device=device)
    return Numbers(weight_type, quants, scales, minima if _n_fields(weight_type) == 2 else None)
