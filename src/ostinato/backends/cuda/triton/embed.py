"""What a step takes in: x[row] = table[token of its slot] * scale (+ positions[position of its slot]).

table [vocab, hidden] float32, float16, bfloat16 or packed (`packed.py`); x float32 [n_slots, hidden], stats
float32 [n_slots, n_stats, 2] and `prepared.out` are written for live rows, dead ones are left alone. Sums are float32,
each over 16 columns. The product with the scale is rounded to the table's type; packed values are float32. Bound by the
latency of three loads that follow from each other, so packed blocks are taken apart byte by byte and nothing is lost.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.launch import FLOATS, TritonLaunch, checked
from ostinato.backends.cuda.packed import PLANES, Packed
from ostinato.backends.cuda.triton.attend import narrowed
from ostinato.backends.torch.ops.attend import StepRows
from ostinato.backends.torch.ops.matmul import PreparedInput, n_stats
from ostinato.errors import BadPointer

BLOCKS = 32  # of 16 columns, that one program writes


def bind_embed(
    table: Tensor | Packed,
    x: Tensor,
    stats: Tensor,
    rows: StepRows,
    tokens: Tensor,
    *,
    scale: float | None = None,
    positions: Tensor | None = None,
    prepared: PreparedInput | None = None,
) -> TritonLaunch:
    """Check everything once and return the launch."""
    device, n_slots, hidden = x.device, rows.n_slots, x.shape[1]
    # Rounded to the table's type first, as the models of this kind were trained.
    rounded = torch.float32 if isinstance(table, Packed) else table.dtype
    given = written_arguments(x, stats, rows, prepared) | {
        "tokens": checked("tokens", tokens, dtype=torch.int32, shape=(n_slots,), device=device),
        "scale": 1.0 if scale is None else float(torch.tensor(scale, dtype=rounded)),
        "positions": x,
        **(_packed(table, x) if isinstance(table, Packed) else _dense(table, x)),
        **{"SCALED": scale is not None, "PLACED": positions is not None},
    }
    if positions is not None:
        given["positions"] = checked("positions", positions, dtype=FLOATS, shape=(None, hidden), device=device)
    return TritonLaunch.of(embed_kernel, grid_of(n_slots, hidden), given, num_warps=4)


def _dense(table: Tensor, x: Tensor) -> dict[str, Any]:
    checked("table", table, dtype=FLOATS, shape=(None, x.shape[1]), device=x.device)
    planes = dict.fromkeys(("table", "high", "scales", "block_scales"), table)
    return planes | {"TYPE": "dense", "UNIT": 1, "RUN": 1, "HALF_BYTES": 1}


def _packed(table: Packed, x: Tensor) -> dict[str, Any]:
    """Quants, high bits, scales and block scales, with something in place of what the type lacks; and their order."""
    if table.cols != x.shape[1]:
        raise BadPointer(f"table (packed [{table.rows}, {table.cols}]) must have the {x.shape[1]} columns of x")
    given: dict[str, Any] = {}
    for pointer, name in zip(("table", "high", "scales", "block_scales"), PLANES, strict=True):
        plane = table.plane(name)
        given[pointer] = table.planes[0] if plane is None else plane
        checked(f"table's {name}", given[pointer], dtype=torch.uint8, shape=(None,), device=x.device)
    # Scales of single blocks stand in words of two, unless the blocks of a row are odd in number.
    odd = table.type in ("Q4_0", "Q5_0", "Q8_0") and table.cols // 32 % 2
    return given | {"TYPE": table.type, "UNIT": table.unit_bytes, "RUN": table.run, "HALF_BYTES": 2 if odd else 4}


def grid_of(n_slots: int, hidden: int) -> tuple[int, int]:
    """Programs of a writer of x."""
    return n_slots, triton.cdiv(n_stats(hidden), BLOCKS)


def written_arguments(x: Tensor, stats: Tensor, rows: StepRows, prepared: PreparedInput | None) -> dict[str, Any]:
    """What a writer of x takes, by the names of its parameters; what it cannot write is refused."""
    device, n_slots, hidden = x.device, rows.n_slots, x.shape[1]
    if prepared is not None:
        checked("prepared.out", prepared.out, dtype=torch.bfloat16, shape=(n_slots, hidden), device=device)
        checked("prepared.weight", prepared.weight, dtype=FLOATS, shape=(hidden,), device=device)
    ready, weight = (x, x) if prepared is None else (prepared.out, prepared.weight)
    return {
        "x": checked("x", x, dtype=torch.float32, shape=(n_slots, hidden), device=device),
        "stats": checked("stats", stats, dtype=torch.float32, shape=(n_slots, n_stats(hidden), 2), device=device),
        "n_rows": checked("n_rows", rows.n_rows, dtype=torch.int32, shape=(1,), device=device),
        "row_slot": checked("row_slot", rows.row_slot, dtype=torch.int32, shape=(n_slots,), device=device),
        "position": checked("position", rows.position, dtype=torch.int32, shape=(n_slots,), device=device),
        **{"prepared": ready, "next_weight": weight, "PREPARED": prepared is not None},
        **{"HIDDEN": hidden, "BLOCKS": BLOCKS},
    }


@triton.jit
def embed_kernel(
    table,
    high,
    scales,
    block_scales,
    positions,
    x,
    stats,
    prepared,
    next_weight,
    n_rows,
    row_slot,
    position,
    tokens,
    scale,
    TYPE: tl.constexpr,
    UNIT: tl.constexpr,
    RUN: tl.constexpr,
    HALF_BYTES: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCALED: tl.constexpr,
    PLACED: tl.constexpr,
    PREPARED: tl.constexpr,
):
    row = tl.program_id(0)
    if row < tl.load(n_rows):
        slot = tl.load(row_slot + row)
        token = tl.load(tokens + slot).to(tl.int64)
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        column = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        there = column < HIDDEN
        if TYPE == "dense":
            taken = tl.load(table + token * HIDDEN + column, mask=there, other=0.0)
        else:
            taken = unpacked(
                table, high, scales, block_scales, token, column, there, TYPE, UNIT, RUN, HALF_BYTES, HIDDEN
            )
        if SCALED:
            taken = narrowed(taken.to(tl.float32) * scale, taken.dtype)
        taken = taken.to(tl.float32)
        if PLACED:
            place = tl.load(position + slot).to(tl.int64)
            taken += tl.load(positions + place * HIDDEN + column, mask=there, other=0.0).to(tl.float32)
        write_x(taken, row, block, column, there, x, stats, prepared, next_weight, HIDDEN, PREPARED)


@triton.jit
def unpacked(
    quants,
    high,
    scales,
    block_scales,
    row,
    column,
    there,
    TYPE: tl.constexpr,
    UNIT: tl.constexpr,
    RUN: tl.constexpr,
    HALF_BYTES: tl.constexpr,
    COLS: tl.constexpr,
):
    """Columns of one row of a packed matrix, float32; zero where not `there`."""
    column = tl.where(there, column, 0)
    if TYPE == "Q8_0":
        number = byte_at(quants, row, column, COLS, UNIT, RUN).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        within = column % (2 * UNIT)
        pair = byte_at(quants, row, column // (2 * UNIT) * UNIT + within % UNIT, COLS // 2, UNIT, RUN).to(tl.int32)
        number = tl.where(within < UNIT, pair & 15, pair >> 4)
        if TYPE == "Q5_0" or TYPE == "Q5_1" or TYPE == "Q5_K":
            # In a word of 32 columns the even ones come first, as `packed.py` tells.
            bit = column % 32 // 2 + column % 2 * 16
            fifth = byte_at(high, row, column // 32 * 4 + bit // 8, COLS // 8, 4, RUN).to(tl.int32) >> (bit % 8)
            number = number | (fifth & 1) << 4
        if TYPE == "Q6_K":
            bit = column % 16 // 2 * 2 + column % 2 * 16
            upper = byte_at(high, row, column // 16 * 4 + bit // 8, COLS // 4, 4, RUN).to(tl.int32) >> (bit % 8)
            number = (number | (upper & 3) << 4) - 32
        if TYPE == "Q4_0":
            number = number - 8
        if TYPE == "Q5_0":
            number = number - 16
        number = number.to(tl.float32)
    if TYPE == "Q6_K":
        own = byte_at(scales, row, column // 16, COLS // 16, 4, RUN).to(tl.int8, bitcast=True).to(tl.float32)
        value = number * (half_at(block_scales, row, column // 256 * 2, COLS // 128, 2, RUN) * own)
    elif TYPE == "Q4_K" or TYPE == "Q5_K":
        # Sixteen bytes a block: two float16, eight scales, four minima; minima 4 to 7 lie above six bits of those.
        block, group = column // 256 * 16, column % 256 // 32
        own = byte_at(scales, row, block + 4 + group, COLS // 16, 4, RUN).to(tl.int32)
        last = byte_at(scales, row, block + 12 + group % 4, COLS // 16, 4, RUN).to(tl.int32)
        first = byte_at(scales, row, block + 4 + group % 4, COLS // 16, 4, RUN).to(tl.int32)
        second = byte_at(scales, row, block + 8 + group % 4, COLS // 16, 4, RUN).to(tl.int32)
        late = (first >> 6) | (second >> 6) << 2 | (last >> 6) << 4
        least = tl.where(group < 4, last & 63, late).to(tl.float32) * half_at(
            scales, row, block + 2, COLS // 16, 4, RUN
        )
        value = number * (half_at(scales, row, block, COLS // 16, 4, RUN) * (own & 63).to(tl.float32)) - least
    elif TYPE == "Q4_1" or TYPE == "Q5_1":
        block = column // 32 * 4
        value = number * half_at(scales, row, block, COLS // 8, 4, RUN)
        value = value + half_at(scales, row, block + 2, COLS // 8, 4, RUN)
    else:
        value = number * half_at(scales, row, column // 32 * 2, COLS // 16, HALF_BYTES, RUN)
    return tl.where(there, value, 0.0)


@triton.jit
def byte_at(plane, row, at, ROW_BYTES: tl.constexpr, WORD: tl.constexpr, RUN: tl.constexpr):
    """Byte `at` of a row's ROW_BYTES in a plane where RUN rows are interleaved, WORD bytes each."""
    return tl.load(plane + ((row // RUN * (ROW_BYTES // WORD) + at // WORD) * RUN + row % RUN) * WORD + at % WORD)


@triton.jit
def half_at(plane, row, at, ROW_BYTES: tl.constexpr, WORD: tl.constexpr, RUN: tl.constexpr):
    """The float16 in bytes `at` and `at` + 1, as float32."""
    low = byte_at(plane, row, at, ROW_BYTES, WORD, RUN).to(tl.uint16)
    both = low | byte_at(plane, row, at + 1, ROW_BYTES, WORD, RUN).to(tl.uint16) << 8
    return both.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def write_x(
    value,
    row,
    block,
    column,
    there,
    x,
    stats,
    prepared,
    weight,
    HIDDEN: tl.constexpr,
    PREPARED: tl.constexpr,
):
    """Write blocks of 16 columns of a row of the residual stream, and what comes with them; zero outside `there`."""
    N_STATS: tl.constexpr = (HIDDEN + 15) // 16
    tl.store(x + row * HIDDEN + column, value, mask=there)
    sums = stats + (row * N_STATS + block) * 2
    tl.store(sums, tl.sum(value, 1), mask=block < N_STATS)
    tl.store(sums + 1, tl.sum(value * value, 1), mask=block < N_STATS)
    if PREPARED:
        scaled = value * tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
        tl.store(prepared + row * HIDDEN + column, narrowed(scaled, tl.bfloat16), mask=there)
