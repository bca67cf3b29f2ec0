"""What a step takes in: x[row] = table[token of its slot] * scale (+ positions[position of its slot]).

table [vocab, hidden] float32, float16, bfloat16 or packed (`packed.py`); x float32 [n_slots, hidden], stats
float32 [n_slots, n_stats, 2] and `prepared.out` are written for live rows, dead ones are left alone. Sums are float32,
each over 16 columns. The product with the scale is rounded to the table's type; packed values are float32. Bound by the
latency of three loads that follow from each other, so packed blocks are taken apart byte by byte and nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.launch import FLOATS, TritonLaunch, checked, grouped
from ostinato.backends.cuda.packed import PLANES, Packed
from ostinato.backends.cuda.triton.attend import narrowed
from ostinato.backends.cuda.triton.unpack import float4, power_of_two
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
    if positions is not None:
        checked("positions", positions, dtype=FLOATS, shape=(None, hidden), device=device)
    # Rounded to the table's type first, as the models of this kind were trained.
    rounded = torch.float32 if isinstance(table, Packed) else table.dtype
    planes, layout = _packed(table, x) if isinstance(table, Packed) else _dense(table, x)
    given = written_arguments(x, stats, rows, prepared) | {
        "row_slot": checked("row_slot", rows.row_slot, dtype=torch.int32, shape=(n_slots,), device=device),
        "position": checked("position", rows.position, dtype=torch.int32, shape=(n_slots,), device=device),
        "tokens": checked("tokens", tokens, dtype=torch.int32, shape=(n_slots,), device=device),
        "scale": None if scale is None else float(torch.tensor(scale, dtype=rounded)),
        **{"positions": positions, "table": grouped(planes), "T": layout},
    }
    return TritonLaunch.of(embed_kernel, grid_of(n_slots, hidden), given, num_warps=4)


@dataclass(frozen=True, slots=True)
class TableLayout:
    """How a table's values are read: "dense", or a packed type in the order of its planes."""

    weight_type: str
    unit: int = 1
    run: int = 1
    half_bytes: int = 1  # of a word of float16 scales, or twice those of a word of exponents


def _dense(table: Tensor, x: Tensor) -> tuple[dict[str, Any], TableLayout]:
    checked("table", table, dtype=FLOATS, shape=(None, x.shape[1]), device=x.device)
    return dict.fromkeys(PLANES) | {"quants": table}, TableLayout("dense")


def _packed(table: Packed, x: Tensor) -> tuple[dict[str, Any], TableLayout]:
    """Its planes, None where the type lacks one."""
    if table.cols != x.shape[1]:
        raise BadPointer(f"table (packed [{table.rows}, {table.cols}]) must have the {x.shape[1]} columns of x")
    planes = {name: table.plane(name) for name in PLANES}
    for name, plane in planes.items():
        if plane is not None:
            checked(f"table's {name}", plane, dtype=torch.uint8, shape=(None,), device=x.device)
    # Scales of single blocks stand in words of two, unless the blocks of a row are odd in number.
    odd = table.type in ("Q4_0", "Q5_0", "Q8_0", "MXFP4") and table.cols // 32 % 2
    return planes, TableLayout(table.type, table.unit_bytes, table.run, 2 if odd else 4)


def grid_of(n_slots: int, hidden: int) -> tuple[int, int]:
    """Programs of a writer of x."""
    return n_slots, triton.cdiv(n_stats(hidden), BLOCKS)


def written_arguments(x: Tensor, stats: Tensor, rows: StepRows, prepared: PreparedInput | None) -> dict[str, Any]:
    """What a writer of x takes, by the names of its parameters; what it cannot write is refused."""
    device, n_slots, hidden = x.device, rows.n_slots, x.shape[1]
    if prepared is not None:
        checked("prepared.out", prepared.out, dtype=torch.bfloat16, shape=(n_slots, hidden), device=device)
        checked("prepared.weight", prepared.weight, dtype=FLOATS, shape=(hidden,), device=device)
    out = {
        "x": checked("x", x, dtype=torch.float32, shape=(n_slots, hidden), device=device),
        "stats": checked("stats", stats, dtype=torch.float32, shape=(n_slots, n_stats(hidden), 2), device=device),
        "prepared": None if prepared is None else prepared.out,
        "next_weight": None if prepared is None else prepared.weight,
    }
    n_rows = checked("n_rows", rows.n_rows, dtype=torch.int32, shape=(1,), device=device)
    return {"out": grouped(out), "n_rows": n_rows, "HIDDEN": hidden, "BLOCKS": BLOCKS}


@triton.jit
def embed_kernel(
    table, positions, out, n_rows, row_slot, position, tokens, scale, T: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row < tl.load(n_rows):
        slot = tl.load(row_slot + row)
        token = tl.load(tokens + slot).to(tl.int64)
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        column = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        there = column < HIDDEN
        if T.weight_type == "dense":
            taken = tl.load(table.quants + token * HIDDEN + column, mask=there, other=0.0)
        else:
            taken = unpacked(table, token, column, there, T, HIDDEN)
        if scale is not None:
            taken = narrowed(taken.to(tl.float32) * scale, taken.dtype)
        taken = taken.to(tl.float32)
        if positions is not None:
            place = tl.load(position + slot).to(tl.int64)
            taken += tl.load(positions + place * HIDDEN + column, mask=there, other=0.0).to(tl.float32)
        write_x(taken, row, block, column, there, out, HIDDEN)


@triton.jit
def unpacked(table, row, column, there, T: tl.constexpr, COLS: tl.constexpr):
    """Columns of one row of a packed matrix, float32; zero where not `there`."""
    column = tl.where(there, column, 0)
    if T.weight_type == "Q8_0":
        number = byte_at(table.quants, row, column, COLS, T.unit, T.run).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        within = column % (2 * T.unit)
        at = column // (2 * T.unit) * T.unit + within % T.unit
        pair = byte_at(table.quants, row, at, COLS // 2, T.unit, T.run).to(tl.int32)
        number = tl.where(within < T.unit, pair & 15, pair >> 4)
        if T.weight_type == "Q5_0" or T.weight_type == "Q5_1" or T.weight_type == "Q5_K":
            # In a word of 32 columns the even ones come first, as `packed.py` tells.
            bit = column % 32 // 2 + column % 2 * 16
            fifth = byte_at(table.high, row, column // 32 * 4 + bit // 8, COLS // 8, 4, T.run).to(tl.int32) >> (bit % 8)
            number = number | (fifth & 1) << 4
        if T.weight_type == "Q6_K":
            bit = column % 16 // 2 * 2 + column % 2 * 16
            upper = byte_at(table.high, row, column // 16 * 4 + bit // 8, COLS // 4, 4, T.run).to(tl.int32) >> (bit % 8)
            number = (number | (upper & 3) << 4) - 32
        if T.weight_type == "Q4_0":
            number = number - 8
        if T.weight_type == "Q5_0":
            number = number - 16
        number = float4(number) if T.weight_type == "MXFP4" else number.to(tl.float32)
    if T.weight_type == "Q6_K":
        own = byte_at(table.scales, row, column // 16, COLS // 16, 4, T.run).to(tl.int8, bitcast=True).to(tl.float32)
        value = number * (half_at(table.blocks, row, column // 256 * 2, COLS // 128, 2, T.run) * own)
    elif T.weight_type == "Q4_K" or T.weight_type == "Q5_K":
        # Sixteen bytes a block: two float16, eight scales, four minima; minima 4 to 7 lie above six bits of those.
        block, group = column // 256 * 16, column % 256 // 32
        own = byte_at(table.scales, row, block + 4 + group, COLS // 16, 4, T.run).to(tl.int32)
        last = byte_at(table.scales, row, block + 12 + group % 4, COLS // 16, 4, T.run).to(tl.int32)
        first = byte_at(table.scales, row, block + 4 + group % 4, COLS // 16, 4, T.run).to(tl.int32)
        second = byte_at(table.scales, row, block + 8 + group % 4, COLS // 16, 4, T.run).to(tl.int32)
        late = (first >> 6) | (second >> 6) << 2 | (last >> 6) << 4
        least = tl.where(group < 4, last & 63, late).to(tl.float32) * half_at(
            table.scales, row, block + 2, COLS // 16, 4, T.run
        )
        value = number * (half_at(table.scales, row, block, COLS // 16, 4, T.run) * (own & 63).to(tl.float32)) - least
    elif T.weight_type == "Q4_1" or T.weight_type == "Q5_1":
        block = column // 32 * 4
        value = number * half_at(table.scales, row, block, COLS // 8, 4, T.run)
        value = value + half_at(table.scales, row, block + 2, COLS // 8, 4, T.run)
    elif T.weight_type == "MXFP4":
        value = number * power_of_two(byte_at(table.scales, row, column // 32, COLS // 32, T.half_bytes // 2, T.run))
    else:
        value = number * half_at(table.scales, row, column // 32 * 2, COLS // 16, T.half_bytes, T.run)
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
def write_x(value, row, block, column, there, out, HIDDEN: tl.constexpr):
    """Write blocks of 16 columns of a row of the residual stream, and what comes with them; zero outside `there`."""
    N_STATS: tl.constexpr = (HIDDEN + 15) // 16
    tl.store(out.x + row * HIDDEN + column, value, mask=there)
    sums = out.stats + (row * N_STATS + block) * 2
    tl.store(sums, tl.sum(value, 1), mask=block < N_STATS)
    tl.store(sums + 1, tl.sum(value * value, 1), mask=block < N_STATS)
    if out.prepared is not None:
        scaled = value * tl.load(out.next_weight + column, mask=there, other=0.0).to(tl.float32)
        tl.store(out.prepared + row * HIDDEN + column, narrowed(scaled, tl.bfloat16), mask=there)
