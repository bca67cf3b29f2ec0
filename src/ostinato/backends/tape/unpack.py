"""Weights of the tape in the model's own order, for the products of a prompt; `backends/tape/pack.py` says where every
bit lies.

    bind_unpack(weight, out, first=0) -> Launches

weight `TapeWeight`; out [rows, cols] of its dtype, written in place: rows `first` and following, whole tiles of them
before it. HALF weights are moved as they are; of the other kinds scale * q is exact in float32, the minimum is taken
off with one rounding, and what is left is rounded to out. Bound by memory: the tape is read once and out written once.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.launch import Launches, TritonLaunch, checked
from ostinato.backends.cuda.triton.unpack import narrowed
from ostinato.backends.tape.partition import PER_COMPUTE_WARP, TILE_ROWS, WeightType, chunk_bytes, tile_bytes
from ostinato.backends.tape.tape_weight import TapeWeight
from ostinato.errors import InternalError

HALF, FOUR, FIVE, SIX, EIGHT = (tl.constexpr(int(weight_type)) for weight_type in WeightType)
BLOCK_COLUMNS: Final = 256  # of a program, where a chunk has as many


@triton.jit
def part_bytes(n, TYPE: tl.constexpr, WARPS: tl.constexpr):
    """Quants, further bits and scales of a chunk with n column tiles for each compute warp, as
    `partition.part_bytes` has it."""
    if TYPE == HALF:
        return 512 * n * WARPS, 0, 0
    elif TYPE == EIGHT:
        return 256 * n * WARPS, 0, 16 * n * WARPS
    elif TYPE == FIVE:
        return 128 * n * WARPS, 128 * ((n + 3) // 4) * WARPS, 32 * n * WARPS
    else:
        return 128 * n * WARPS, 64 * n * WARPS * (TYPE == SIX), 32 * n * WARPS


@triton.jit
def in_a_row(pointer, at, n, EACH: tl.constexpr, TILES: tl.constexpr):
    """What TILES column tiles have from `at` on, EACH for every one, [TILES * EACH]; zeros for those from n on."""
    place = tl.arange(0, TILES * EACH)
    # Chunks and their parts begin at multiples of 32 bytes; said so, the compiler reads 16 bytes at once.
    return tl.load(pointer + at // 16 * 16 + place, mask=place < n * EACH, other=0)


@triton.jit
def nibbles(packed, TOGETHER: tl.constexpr, TILES: tl.constexpr):
    """Bytes of column tiles, TOGETHER of them word by word in a lane, as [8, columns]: rows 0 to 7 in the low bits."""
    by_lane = tl.reshape(packed, (TILES // TOGETHER, 8, 4, TOGETHER, 2, 2))  # of g, q, tile, h, later
    return tl.reshape(tl.permute(by_lane, (1, 0, 3, 5, 2, 4)), (8, TILES * 16))


@triton.jit
def further_bits(
    byte_ptr, begin, first, n, TYPE: tl.constexpr, WARPS: tl.constexpr, PER: tl.constexpr, TILES: tl.constexpr
):
    """The bytes with the further bits of columns, int32 [8, columns], shifted so that those of rows 8 to 15 are lowest
    and those of rows 0 to 7 come next."""
    TOGETHER: tl.constexpr = 4 if TYPE == FIVE else 2  # column tiles in a word
    column = tl.arange(0, TILES * 16)
    i = tl.minimum(first + column // 16, n * WARPS - 1)
    compute_warp, word, words = i // n, i % n // TOGETHER, (n + TOGETHER - 1) // TOGETHER
    # Word after word of a lane in a whole chunk, lane after lane of a word in the rest.
    next_lane, next_word = tl.where(n == PER, words, 1), tl.where(n == PER, 1, 32)
    lane = tl.arange(0, 8)[:, None] * 4 + (column % 8 // 2)[None, :]
    at = (compute_warp * words * 32 + word * next_word)[None, :] + lane * next_lane
    byte = tl.load(byte_ptr + begin + at * 4 + (column % 16 // 8 + column % 2 * 2)[None, :]).to(tl.int32)
    return byte >> (i % n % TOGETHER * (8 // TOGETHER))[None, :]


@triton.jit
def quants_of(
    byte_ptr, begin, first, n, quant_bytes, TYPE: tl.constexpr, WARPS: tl.constexpr, PER: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """The integers of some column tiles of a chunk, from its tile `first` on: float32 [16, columns]."""
    rest = n * WARPS - first
    if TYPE == EIGHT:
        packed = in_a_row(byte_ptr, begin + first * 256, rest, 256, TILES).to(tl.int8, bitcast=True).to(tl.float32)
        by_lane = tl.reshape(packed, (TILES // 2, 8, 4, 2, 2, 2, 2))  # of g, q, tile, lower, h, later
        return tl.reshape(tl.permute(by_lane, (4, 1, 0, 3, 6, 2, 5)), (16, TILES * 16))
    else:
        packed = in_a_row(byte_ptr, begin + first * 128, rest, 128, TILES)
        if n == PER:  # noqa: SIM108 - a branch of the kernel
            both = nibbles(packed, 4, TILES)
        else:
            both = nibbles(packed, 2, TILES)
        upper, lower = (both & 15).to(tl.int32), (both >> 4).to(tl.int32)
        if TYPE != FOUR:
            BITS: tl.constexpr = 1 if TYPE == FIVE else 2
            MASK: tl.constexpr = (1 << BITS) - 1
            more = further_bits(byte_ptr, begin + quant_bytes, first, n, TYPE, WARPS, PER, TILES)
            upper, lower = upper | (more >> BITS & MASK) << 4, lower << BITS | more & MASK
        if TYPE == SIX:
            upper, lower = upper - 32, lower - 32
        one_above_other = tl.permute(tl.join(upper, lower), (2, 0, 1))
        return tl.reshape(one_above_other, (16, TILES * 16)).to(tl.float32)


@triton.jit
def by_row(fields, TOGETHER: tl.constexpr, GROUPS: tl.constexpr, FIELDS: tl.constexpr):
    """Scales, and minima where there are some, as [16, GROUPS, FIELDS]; TOGETHER groups, every fourth, side by side."""
    by_lane = tl.reshape(fields, (GROUPS // TOGETHER // 4, 4, 8, TOGETHER, 2, FIELDS))  # of slot, g, group, lower
    return tl.reshape(tl.permute(by_lane, (4, 2, 0, 3, 1, 5)), (16, GROUPS, FIELDS))


@triton.jit(do_not_specialize=["first_tile", "n_tiles", "first_block", "stop"])
def unpack_kernel(
    byte_ptr, half_ptr, place_ptr, out_ptr, first_tile, n_tiles, first_block, stop,
    K: tl.constexpr, PAIRED: tl.constexpr, TYPE: tl.constexpr, N_BLOCKS: tl.constexpr, WARPS: tl.constexpr,
    AT_ONCE: tl.constexpr, PER: tl.constexpr, EACH: tl.constexpr, TILE_BYTES: tl.constexpr, CHUNK_BYTES: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """One program: TILES column tiles of a chunk. Grid: tiles, and as many as have the columns of one."""
    tile, column_tile = first_tile + tl.program_id(0), tl.program_id(1) * TILES
    chunk, first = column_tile // (WARPS * PER), column_tile % (WARPS * PER)
    n = tl.minimum(PER, EACH - chunk * PER)
    quant_bytes, high_bytes, scale_bytes = part_bytes(n, TYPE, WARPS)
    # A chunk lies behind the tiles that its block multiplies before, and behind the chunks before of those it
    # multiplies with this one.
    turn, own = tile // N_BLOCKS, (n_tiles - tile % N_BLOCKS + N_BLOCKS - 1) // N_BLOCKS
    together = tl.minimum(AT_ONCE, own - turn // AT_ONCE * AT_ONCE)
    begin = tl.load(place_ptr + (first_block + tile) % N_BLOCKS) + (turn // AT_ONCE).to(tl.int64) * AT_ONCE * TILE_BYTES
    begin += chunk * CHUNK_BYTES * together + turn % AT_ONCE * (quant_bytes + high_bytes + scale_bytes)

    row, column = tl.arange(0, 16), column_tile * 16 + tl.arange(0, TILES * 16)
    if PAIRED:
        to_row, end = tile * 8 + row % 8, stop // 2
        ok = to_row < end
        to_row += row // 8 * end
    else:
        to_row = tile * 16 + row
        ok = to_row < stop
    to = out_ptr + (to_row - first_tile * 16)[:, None].to(tl.int64) * K + column[None, :]
    mask = ok[:, None] & (column < K)[None, :]
    if TYPE == HALF:
        halves = in_a_row(half_ptr, begin // 2 + first * 256, n * WARPS - first, 256, TILES)
        by_lane = tl.reshape(halves, (TILES, 8, 4, 2, 2, 2))  # of g, q, later, lower, h
        tl.store(to, tl.reshape(tl.permute(by_lane, (4, 1, 0, 3, 2, 5)), (16, TILES * 16)), mask=mask)
    else:
        values = quants_of(byte_ptr, begin, first, n, quant_bytes, TYPE, WARPS, PER, TILES)
        GROUPS: tl.constexpr = TILES if TYPE == SIX else TILES // 2
        FIELDS: tl.constexpr = 2 if TYPE == FOUR or TYPE == FIVE else 1  # noqa: SIM109 - `in` is not known here
        scales_at = (begin + quant_bytes + high_bytes) // 2 + first * (16 * FIELDS * GROUPS // TILES)
        fields = in_a_row(half_ptr, scales_at, n * WARPS - first, 16 * FIELDS * GROUPS // TILES, TILES)
        if n == PER:
            each = by_row(fields.to(tl.float32), PER * GROUPS // TILES // 4, GROUPS, FIELDS)
        else:
            each = by_row(fields.to(tl.float32), 1, GROUPS, FIELDS)
        values = tl.reshape(values, (16, GROUPS, TILES * 16 // GROUPS))
        if FIELDS == 2:
            scales, minima = tl.split(each)
            values = values * scales[:, :, None] - minima[:, :, None]
        else:
            values = values * tl.reshape(each, (16, GROUPS))[:, :, None]
        values = tl.reshape(values, (16, TILES * 16))
        if out_ptr.dtype.element_ty == tl.bfloat16:
            tl.store(to, narrowed(values), mask=mask)
        else:
            tl.store(to, values.to(out_ptr.dtype.element_ty), mask=mask)


def bind_unpack(weight: TapeWeight, out: Tensor, first: int = 0) -> Launches:
    """The weight as plain numbers by one call without arguments: a launch for each of its matrices. Where not all of it
    is wanted, `first` is the first row of a tile, and the weight one matrix that is not paired."""
    matrices = [weight.tape.partition.matrices[number] for number in weight.matrices]
    rows, columns = weight.shape
    checked("out", out, dtype=weight.dtype, shape=(1, columns), device=weight.device)
    whole = first == 0 and len(out) == rows
    if not whole and (len(matrices) > 1 or matrices[0].paired or first % TILE_ROWS or first + len(out) > rows):
        raise InternalError(f"rows {first} to {first + len(out)} are no tiles of {matrices}")
    launches, start = [], 0
    for number, matrix in zip(weight.matrices, matrices, strict=True):
        n_rows = matrix.rows if whole else len(out)
        launches.append(_bound(weight, number, out[start : start + n_rows], first))
        start += n_rows
    return Launches(tuple(launches))


def _bound(weight: TapeWeight, number: int, out: Tensor, first: int) -> TritonLaunch:
    tape = weight.tape
    matrix, segment, grid = tape.partition.matrices[number], tape.partition.segments[number], tape.partition.grid
    weight_type, compute_warps, per = segment.weight_type, grid.n_compute_warps, PER_COMPUTE_WARP[segment.weight_type]
    is_half = weight_type == WeightType.HALF
    # Powers of two: no program has columns of two chunks, or a part of what a compute warp has of a whole one.
    block = min(BLOCK_COLUMNS, 16 * compute_warps * per)
    return TritonLaunch(
        unpack_kernel,
        (triton.cdiv(len(out), TILE_ROWS), triton.cdiv(matrix.columns, block)),
        (
            tape.bytes,
            tape.bytes.view(torch.int16 if is_half else torch.float16),
            tape.places[number],
            out.view(torch.int16) if is_half else out,
            first // TILE_ROWS,
            segment.n_tiles,
            segment.first,
            first + len(out),
        ),
        {
            "K": matrix.columns,
            "PAIRED": matrix.paired,
            "TYPE": int(weight_type),
            "N_BLOCKS": grid.n_blocks,
            "WARPS": compute_warps,
            "AT_ONCE": grid.tiles_at_once,
            "PER": per,
            "EACH": segment.columns // (16 * compute_warps),
            "TILE_BYTES": tile_bytes(weight_type, segment.columns, compute_warps),
            "CHUNK_BYTES": chunk_bytes(weight_type, per, compute_warps),
            "TILES": block // 16,
            "num_warps": 4,
            "num_stages": 1,
        },
    )
