"""The inverse of `backends/tape/pack.py`: from the tape's bytes back to weights, and the twin of `unpack.py`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ostinato.backends.cuda.packed import OFFSETS
from ostinato.backends.tape import pack
from ostinato.backends.tape.pack import GROUP_COLUMNS, Numbers
from ostinato.backends.tape.partition import (
    TILE_ROWS,
    Partition,
    TileSection,
    WeightType,
    part_bytes,
    sections_of,
    tile_bytes,
)
from ostinato.backends.tape.tape_weight import TapeWeight
from ostinato.backends.torch.model import Model
from ostinato.models.blocks import leaves_of

SIX_OFFSET = OFFSETS["Q6_K"]


def values_of(numbers: Numbers) -> Tensor:
    """The weights of these numbers, float32 [rows, columns], the difference rounded once."""
    if numbers.scales is None:
        return numbers.quants.float()
    q = numbers.quants.float()
    q = q - SIX_OFFSET if numbers.weight_type == WeightType.SIX else q
    values = torch.unflatten(q, 1, (-1, GROUP_COLUMNS[numbers.weight_type])) * numbers.scales.float()[..., None]
    return (values if numbers.minima is None else values - numbers.minima.float()[..., None]).flatten(1)


def numbers_from(
    tiles: Tensor, weight_type: WeightType, columns: int, n_compute_warps: int, half: torch.dtype
) -> Numbers:
    """The inverse of `tiles_from`: tiles are uint8 [tiles, tile_bytes], columns those with padding."""
    found = []
    for section in sections_of(weight_type, columns, n_compute_warps):
        parts = torch.split(
            pack._chunks_of_tiles(tiles, section), list(part_bytes(weight_type, section.n, n_compute_warps)), 2
        )
        found.append(_numbers(weight_type, section, n_compute_warps, half, *parts))
    quants, scales, minima = ([some for some in field if some is not None] for field in zip(*found, strict=True))
    assert quants, "a tile has chunks"
    return Numbers(
        weight_type,
        torch.cat(quants, 1),
        torch.cat(scales, 1) if scales else None,
        torch.cat(minima, 1) if minima else None,
    )


def _numbers(
    weight_type: WeightType,
    section: TileSection,
    n_compute_warps: int,
    half: torch.dtype,
    quants: Tensor,
    high: Tensor,
    scales: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The inverse of `_parts`, for one section: quants, scales and minima [rows, ...]."""
    n_tiles, n = len(quants), section.n
    rows, before, lanes = n_tiles * TILE_ROWS, (n_tiles, section.n_chunks, n_compute_warps), (8, 4)
    if weight_type == WeightType.HALF:
        words = quants.contiguous().view(half).view(*before, n, *lanes, 2, 2, 2)
        return words.permute(0, 7, 4, 1, 2, 3, 6, 5, 8).reshape(rows, -1), None, None
    if weight_type == WeightType.EIGHT:
        words = quants.contiguous().view(torch.int8).view(*before, n // 2, *lanes, 2, 2, 2, 2)
        q = words.permute(0, 7, 4, 1, 2, 3, 6, 9, 5, 8)
    else:
        words = quants.reshape(*before, -1, *lanes, pack._tiles_a_lane(weight_type, n), 2, 2).permute(
            0, 4, 1, 2, 3, 6, 8, 5, 7
        )
        even, odd, more = words & 15, words >> 4, pack._FURTHER_BITS[weight_type]
        if more:
            if pack._is_whole(weight_type, n):
                bits = high.reshape(*before, *lanes, -1, 2, 2).permute(0, 3, 1, 2, 5, 7, 4, 6)
            else:
                bits = high.reshape(*before, -1, *lanes, 2, 2).permute(0, 4, 1, 2, 3, 7, 5, 6)
            bits = _parted(_parted(bits, 4) if weight_type == WeightType.FIVE else bits, 2 * more)[:, :, :, :, :n]
            bits = torch.unflatten(bits, 4, words.shape[4:6])
            mask = (1 << more) - 1
            even, odd = even | (bits >> more & mask) << 4, odd << more | bits & mask
        q = torch.stack((even, odd), 1)
    halves = (
        scales.contiguous()
        .view(torch.float16)
        .view(*before, -1, 8, pack._groups_a_slot(weight_type, n), 2, pack._n_fields(weight_type))
    )
    each = halves.permute(7, 0, 6, 4, 1, 2, 5, 3).reshape(pack._n_fields(weight_type), rows, -1)
    return q.reshape(rows, -1), each[0], each[1] if len(each) == 2 else None


def _parted(values: Tensor, shift: int) -> Tensor:
    """The inverse of `_joined`; the higher bits of each value are undefined."""
    return torch.stack((values, values >> shift), 5).flatten(4, 5)


def matrix_from(
    tape: Tensor,
    partition: Partition,
    index: int,
    half: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Matrix `index` of the partition, dequantised from a tape and rounded to dtype: [rows, columns] in the model's own
    order."""
    matrix, segment = partition.matrices[index], partition.segments[index]
    n_compute_warps = partition.grid.n_compute_warps
    out = torch.empty((matrix.rows, matrix.columns), dtype=dtype, device=tape.device)
    for start, stop in pack._slabs(segment, partition.grid):
        size = tile_bytes(segment.weight_type, segment.columns, n_compute_warps)
        slab = torch.empty((stop - start, size), dtype=torch.uint8, device=tape.device)
        for on_tape, of_slab in pack._shares(tape, slab, partition, index, start):
            of_slab.copy_(on_tape)
        for first, last in pack._pieces(segment, start, stop):
            tiles = slab[first - start : last - start]
            values = values_of(numbers_from(tiles, segment.weight_type, segment.columns, n_compute_warps, half))
            ids = pack._rows_of_tiles(matrix, first, last)
            real = (ids >= 0).nonzero()[:, 0]
            out[ids[real].to(out.device)] = values[real.to(out.device), : matrix.columns].to(dtype)
    return out


def unpack_torch(weight: TapeWeight, out: Tensor, first: int = 0) -> None:
    """Rows `first` and following of a weight on the tape into out, [rows, cols] of its dtype: to the bit what was put
    there, or what packed numbers stand for, rounded once more."""
    tape = weight.tape
    parts = [matrix_from(tape.bytes, tape.partition, number, tape.half, weight.dtype) for number in weight.matrices]
    out.copy_(torch.cat(parts)[first : first + len(out)])


def by_twin(model: Model) -> Model:
    """The model itself, whose weights on the tape are unpacked by the twin from now on."""
    for weight in leaves_of(model):
        if isinstance(weight, TapeWeight):
            weight.tape.bind_unpack = partial(partial, unpack_torch)
    return model
