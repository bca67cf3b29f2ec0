"""A chunk's attention: append k and v, then softmax(scale * q k^T) v of each row over its own sequence so far.

    append = bind_append_chunk(qkv, q, kv, chunk, heads)           # QK norm, rotary, append: qkv to q and the store
    attend = bind_chunk_attention(q, seen, kv, chunk, heads)       # q over the store

Shapes are the twin's (`torch/ops/`): qkv [M, (heads + 2 kv_heads) * width], q [M, heads, width] and
seen [M, heads * width] in float32, bfloat16 or float16. Grids follow from M alone; where rows are and whose is read on
the device, and rows from n on are neither read nor written. Products are in the type of the store, bfloat16 for int8;
sums are float32. Bound by the products where the past is long.

A tile is up to 64 rows of one sequence. A program takes one, or a piece of it where a chip has no room for the queries
of so many rows, and another one behind it where many short sequences make more tiles than there are programs. Key
blocks, of 64 where they fit the chip, begin at position 0 whatever the chunk, and a block that a row may not see
changes no bit of it: its weights are exact zeros and its scale is one. So a row's bits depend on its position and
contents, not on where the prompt was cut, on M or on the other rows.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.chip import chunk_block, chunk_bytes, chunk_rows, padded, reads_shared, registers_alone
from ostinato.backends.cuda.launch import FLOATS, TritonLaunch, checked
from ostinato.backends.cuda.triton.attend import (
    LOG2_E,
    cells_at,
    layer_arguments,
    load_cells,
    narrowed,
    page_at,
    placed,
    product,
    rope_cos_sin,
    rope_sets,
    rotated,
    scored,
    stages_for,
    store_cells,
    tempered,
    value_of,
)
from ostinato.backends.machine import TUNED, Chip
from ostinato.backends.torch.ops.attend import Heads, PagedKV
from ostinato.backends.torch.ops.chunk_attention import TILE_ROWS, Chunk
from ostinato.backends.torch.ops.q8_0 import BLOCK as Q8_BLOCK

_APPENDED: Final = 16  # rows that a program appends
_PROGRAMS: Final = 2  # for each tile that the rows of one sequence have


def bind_append_chunk(qkv: Tensor, q: Tensor, kv: PagedKV, chunk: Chunk, heads: Heads) -> TritonLaunch:
    """Check everything once and return the launch that applies QK norm and RoPE, and appends."""
    m, device = qkv.shape[0], qkv.device
    given = {
        "qkv": checked("qkv", qkv, dtype=FLOATS, shape=(m, heads.n_columns), device=device),
        "q": checked("q", q, dtype=FLOATS, shape=(m, heads.n_heads, heads.head_width), device=device),
        "chunk": _placed(chunk, m, device, heads),
        **layer_arguments(kv, heads, qkv),
        "ROWS": _APPENDED,
    }
    grid = (triton.cdiv(m, _APPENDED), heads.n_heads + 2 * heads.n_new_heads)
    return TritonLaunch.of(append_chunk_kernel, grid, given, num_warps=4)


def bind_chunk_attention(
    q: Tensor, attended: Tensor, kv: PagedKV, chunk: Chunk, heads: Heads, chip: Chip = TUNED
) -> TritonLaunch:
    """Check everything once and return the launch that attends."""
    m, device, width = q.shape[0], q.device, heads.head_width
    exact, wide = kv.keys.dtype == torch.float32, padded(width)
    item_bytes = 4 if exact else 2  # of products: blocks of eight bits are multiplied as bfloat16
    block, rows = chunk_block(chip, wide, item_bytes), chunk_rows(chip, wide, item_bytes)
    given = {
        "q": checked("q", q, dtype=FLOATS, shape=(m, heads.n_heads, width), device=device),
        "attended": checked("attended", attended, dtype=q.dtype, shape=(m, heads.n_heads * width), device=device),
        "chunk": _placed(chunk, m, device, heads),
        **layer_arguments(kv, heads, q),
        **{"ROWS": rows, "BLOCK": block, "WINDOW": heads.window or 0, "CAPPED": heads.softcap is not None},
        **{"SINKS": heads.sinks is not None, "PIECES": TILE_ROWS // rows},
    }
    grid = (_PROGRAMS * triton.cdiv(m, rows), heads.n_heads)
    warps = 8 if exact or width > 128 else 4
    # Float32 blocks of wide heads fill the shared memory by themselves.
    stages = 1 if exact and width > 64 else stages_for(heads, kv)
    row_bytes = wide * kv.keys.element_size() + (0 if kv.key_scales is None else 2 * wide // Q8_BLOCK)
    while stages > 1:
        needed = chunk_bytes(wide, item_bytes, block, stages, row_bytes, rows=rows, shared=reads_shared(chip))
        if needed <= chip.shared_bytes:
            break
        stages -= 1
    options: dict[str, object] = {"num_warps": warps, "num_stages": stages}
    if exact:
        options |= registers_alone(chip, chunk_bytes(wide, item_bytes, block, stages, rows=rows), warps)
    return TritonLaunch.of(chunk_attention_kernel, grid, given, **options)


def _placed(chunk: Chunk, m: int, device: torch.device, heads: Heads) -> Any:
    rows = {"n": (1,), "n_tiles": (1,), "tiles": (1, 4), "positions": (m,), "parts": (m,)}
    return placed(chunk, {**rows, "pages": (1, None), **rope_sets(heads, m)}, device)


@triton.jit
def append_chunk_kernel(qkv, q, kv, chunk, turn, S: tl.constexpr, ROWS: tl.constexpr):
    n_live = tl.load(chunk.n)
    if tl.program_id(0) * ROWS < n_live:
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
        head = tl.program_id(1)
        d = tl.arange(0, S.d)[None, :]
        live = row < n_live
        mask = live & (d < S.width)
        p = tl.load(chunk.positions + row, mask=live, other=0)
        frequencies = turn.frequencies
        if S.n_rope_sets > 1:
            frequencies += tl.load(chunk.rope_set + row, mask=live, other=0) * (S.n_rotary // 2)
        at = qkv + row * S.columns
        at += tl.where(head < S.heads, head * S.query_step, S.keys_at + (head - S.heads) * S.width)
        if head < S.heads:
            cos, sin = rope_cos_sin(p, frequencies, turn.amplitude, S)
            x = tempered(rotated(at, mask, turn.q_weight, cos, sin, turn.eps, S), p, turn.temperature, S)
            to = q + (row * S.heads + head) * S.width + d
            tl.store(to, narrowed(x, q.dtype.element_ty), mask=mask)
        else:
            its_pages = chunk.pages + tl.load(chunk.parts + row, mask=live, other=0) * chunk.table_stride
            page = tl.load(its_pages + p // S.page, mask=live, other=0).to(tl.int64)
            cell = page * S.page + p % S.page
            if head < S.heads + S.kv_heads:
                cos, sin = rope_cos_sin(p, frequencies, turn.amplitude, S)
                x = rotated(at, mask, turn.k_weight, cos, sin, turn.eps, S)
                store_cells(kv.key, kv.key_scales, cell * S.kv_heads + head - S.heads, x, mask, ROWS, S)
            else:
                x = value_of(at + d, mask, turn.eps, S)
                line = cell * S.kv_heads + head - (S.heads + S.kv_heads)
                store_cells(kv.value, kv.value_scales, line, x, mask, ROWS, S)


@triton.jit
def chunk_attention_kernel(
    q, attended, kv, chunk, scale, softcap, sinks, S: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = S.d
    head = tl.program_id(1)
    kv_head = head // (S.heads // S.kv_heads)
    d = tl.arange(0, D)
    for piece in range(tl.program_id(0), tl.load(chunk.n_tiles) * PIECES, tl.num_programs(0)):
        tile, before = piece // PIECES, piece % PIECES * ROWS
        row = tl.load(chunk.tiles + 4 * tile) + before + tl.arange(0, ROWS)
        n_live, begins = tl.load(chunk.tiles + 4 * tile + 1), tl.load(chunk.tiles + 4 * tile + 2) + before
        if PIECES > 1:
            n_live = tl.minimum(tl.maximum(n_live - before, 0), ROWS)
        its_pages = chunk.pages + tl.load(chunk.tiles + 4 * tile + 3) * chunk.table_stride
        live = tl.arange(0, ROWS) < n_live
        mask = live[:, None] & (d < S.width)[None, :]
        at = (row * (S.heads * S.width) + head * S.width)[:, None] + d[None, :]
        queries = narrowed(tl.load(q + at, mask=mask, other=0.0), tl.bfloat16 if S.q8 else kv.key.dtype.element_ty)
        p = begins + tl.arange(0, ROWS)
        end = begins + n_live
        if PIECES > 1:  # of an empty piece nothing is read
            end = tl.where(n_live > 0, end, 0)
        first = tl.maximum(begins - (WINDOW - 1), 0) if WINDOW else 0

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        if SINKS:  # the first score of each row, which stands for no value
            top = tl.zeros([ROWS], tl.float32) + tl.load(sinks + head) * LOG2_E
            total += 1.0
        earliest = first // BLOCK * BLOCK
        page = page_at(its_pages, earliest, end, S, BLOCK)
        for block in range(earliest, end, BLOCK):
            where = block + tl.arange(0, BLOCK)
            there = (where >= first) & (where < end)
            lines = cells_at(page, block, S, BLOCK) * S.kv_heads + kv_head
            k = load_cells(kv.key, kv.key_scales, lines, there, BLOCK, S)
            v = load_cells(kv.value, kv.value_scales, lines, there, BLOCK, S)
            page = page_at(its_pages, block + BLOCK, end, S, BLOCK)
            where = where[None, :]
            allowed = where <= p[:, None]
            if WINDOW:
                allowed = allowed & (where > p[:, None] - WINDOW)
            scores = scored(product(queries, tl.trans(k)) * scale, softcap, CAPPED)
            scores = tl.where(allowed, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            # A row that has seen nothing yet stays as it is: no infinity is subtracted from itself.
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - level[:, None])
            faded = tl.exp2(top - level)
            total = total * faded + tl.sum(weights, 1)
            acc = acc * faded[:, None] + product(narrowed(weights, v.dtype), v)
            top = higher
        total = tl.where(live, total, 1.0)
        # Adding zero makes a negative zero a positive one, as a block of zeros would.
        tl.store(attended + at, narrowed(acc / total[:, None] + 0.0, attended.dtype.element_ty), mask=mask)
