"""Latent attention over pages: softmax(scale * q k^T) v of all heads over one key, of which v is the last part.

    workspace = latent_workspace(n_slots, [latent, ...], device)             # once per plan, of all its layers
    step = bind_attend_latent(query, seen, kv, rows, latent, workspace)      # a step's rows
    chunk = bind_attend_latent_chunk(query, seen, kv, chunk, latent)         # a prompt's

Shapes and types are the twin's (`torch/ops/latent.py`): query [rows, heads * (rotated + rank)], absorbed, and seen
[rows, heads * rank]; keys [cells, rotated + rank] in float32, bfloat16, float16 or int8 with scales, each row's own
position among them. Products are in the type of the store, bfloat16 for int8; sums, maxima and the merge are float32.
A block of keys is read once, for the scores and for the sums. Written in place: `seen` of live rows, the workspace.
Bound in a step by reading keys, in a chunk by the products.

The work is cut as `attend.py` and `chunk_attention.py` cut theirs, with a group of heads in the place of a KV head: a
step's splits follow from the row's own position, a chunk's blocks begin at position 0. So a row's bits depend on its
position and contents alone. How many heads stand in a group changes none of them. A head is as wide as a compressed
row, so what its splits leave is merged, in order, by a second kernel with a program for each head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.chip import LEAST_TILE, heads_together, latent_cut, padded
from ostinato.backends.cuda.launch import FLOATS, Launches, TritonLaunch, checked, grouped
from ostinato.backends.cuda.triton.attend import (
    LOG2_E,
    MAX_SPLITS,
    SPLIT,
    Cut,
    cells_at,
    cut,
    narrowed,
    page_at,
    placed,
    product,
)
from ostinato.backends.cuda.triton.latent import store_arguments
from ostinato.backends.machine import PROGRAMS_PER_MULTIPROCESSOR, TUNED, Chip
from ostinato.backends.torch.ops.attend import StepRows
from ostinato.backends.torch.ops.chunk_attention import TILE_ROWS, Chunk
from ostinato.backends.torch.ops.latent import LatentHeads, LatentKV

_MERGED: Final = 8  # splits that a merge takes at once
_PROGRAMS: Final = 2  # for each tile that the rows of one sequence have


@dataclass(frozen=True, slots=True)
class LatentWorkspace:
    """What the splits of a step leave for their merge. One serves every layer, one after the other."""

    sums: Tensor  # float32, for a layer [n_slots, groups, MAX_SPLITS, heads of a group, rank], weighted values
    norms: Tensor  # float32 [n_slots, groups, MAX_SPLITS, 2, heads of a group]: the largest score, the sum of weights


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """What the kernels of a layer are compiled for."""

    d: int  # of the compressed row, a power of two
    width: int
    rotary_d: int  # of the rotated part, a power of two
    rotary: int
    heads: int
    groups: int
    page: int
    q8: bool

    @property
    def key(self) -> int:
        return self.rotary + self.width


def latent_workspace(n_slots: int, latents: Sequence[LatentHeads], device: torch.device) -> LatentWorkspace:
    """A workspace for layers of these sizes."""
    n_heads, widest = max(one.n_heads for one in latents), max(one.n_heads * one.rank for one in latents)
    return LatentWorkspace(
        torch.zeros(n_slots * MAX_SPLITS * widest, dtype=torch.float32, device=device),
        torch.zeros(n_slots * MAX_SPLITS * 2 * n_heads, dtype=torch.float32, device=device),
    )


def _sizes(kv: LatentKV, latent: LatentHeads) -> LatentSizes:
    return LatentSizes(
        d=padded(latent.rank),
        width=latent.rank,
        rotary_d=padded(latent.rotated),
        rotary=latent.rotated,
        heads=latent.n_heads,
        groups=latent.n_heads // heads_together(latent.n_heads),
        page=kv.page_tokens,
        q8=kv.scales is not None,
    )


def bind_attend_latent(
    query: Tensor,
    seen: Tensor,
    kv: LatentKV,
    rows: StepRows,
    latent: LatentHeads,
    workspace: LatentWorkspace,
    programs: int | None = None,
    chip: Chip = TUNED,
) -> Launches:
    """Check everything once and return the launches of a step; `programs` changes their speed and no bit."""
    device, n_slots, n, group = query.device, rows.n_slots, latent.n_heads, heads_together(latent.n_heads)
    if programs is None:
        programs = chip.attention_programs if device.type == "cuda" else PROGRAMS_PER_MULTIPROCESSOR
    sizes = _sizes(kv, latent)
    tile = latent_cut(chip, sizes.rotary_d + sizes.d, kv.keys.element_size(), LEAST_TILE)
    of_rows = {"n_rows": (1,), "row_slot": (n_slots,), "position": (n_slots,), "pages": (n_slots, None)}
    given: dict[str, Any] = {
        "query": checked("query", query, dtype=torch.float32, shape=(n_slots, n * latent.key_width), device=device),
        "seen": checked("seen", seen, dtype=torch.float32, shape=(n_slots, n * latent.rank), device=device),
        "kv": store_arguments(kv, latent, query),
        "rows": placed(rows, of_rows, device),
        "space": grouped(
            {
                name: checked(name, getattr(workspace, name)[:size], dtype=torch.float32, shape=(size,), device=device)
                for name, size in (
                    ("sums", n_slots * MAX_SPLITS * n * latent.rank),
                    ("norms", n_slots * MAX_SPLITS * 2 * n),
                )
            }
        ),
        "scale": latent.scale,
        "S": sizes,
        "C": Cut(
            slots=triton.next_power_of_2(n_slots),
            group=group,
            few=triton.next_power_of_2(group),
            many=padded(group),
            block=tile.block,
            least=SPLIT,
            most=MAX_SPLITS,
            merge=_MERGED,
            window=0,
            capped=False,
            sinks=False,
        ),
    }
    attend = TritonLaunch.of(attend_latent_kernel, (programs,), given, num_warps=4, num_stages=tile.stages)
    return Launches((attend, TritonLaunch.of(merge_latent_kernel, (n_slots, n), given, num_warps=4)))


def bind_attend_latent_chunk(
    query: Tensor, seen: Tensor, kv: LatentKV, chunk: Chunk, latent: LatentHeads, chip: Chip = TUNED
) -> TritonLaunch:
    """Check everything once and return the launch of a prompt's chunk."""
    m, device, n, sizes = query.shape[0], query.device, latent.n_heads, _sizes(kv, latent)
    tile = latent_cut(chip, sizes.rotary_d + sizes.d, kv.keys.element_size(), TILE_ROWS)
    of_rows = {"n": (1,), "n_tiles": (1,), "tiles": (1, 4), "pages": (1, None)}
    given = {
        "query": checked("query", query, dtype=FLOATS, shape=(m, n * latent.key_width), device=device),
        "seen": checked("seen", seen, dtype=query.dtype, shape=(m, n * latent.rank), device=device),
        "kv": store_arguments(kv, latent, query),
        "chunk": placed(chunk, of_rows, device),
        **{"scale": latent.scale, "S": sizes, "ROWS": tile.rows, "BLOCK": tile.block},
        "PIECES": TILE_ROWS // tile.rows,
    }
    grid = (_PROGRAMS * triton.cdiv(m, tile.rows), n)
    return TritonLaunch.of(attend_latent_chunk_kernel, grid, given, num_warps=8, num_stages=tile.stages)


@triton.jit
def attend_latent_kernel(query, seen, kv, rows, space, scale, S: tl.constexpr, C: tl.constexpr):
    BLOCK: tl.constexpr = C.block
    MANY: tl.constexpr = C.many
    D: tl.constexpr = S.d
    # Items are numbered row by row: `ends` says where each row's items end, and dead rows have none.
    row_ids = tl.arange(0, C.slots)
    alive = row_ids < tl.load(rows.n_rows)
    slots = tl.load(rows.row_slot + row_ids, mask=alive, other=0)
    _, _, counts = cut(tl.load(rows.position + slots, mask=alive, other=0), C)
    ends = tl.cumsum(tl.where(alive, counts * S.groups, 0), 0)
    n_items = tl.max(ends)
    for item in range(tl.program_id(0), n_items, tl.num_programs(0)):
        row = tl.sum((ends <= item).to(tl.int32))
        within = item - tl.max(tl.where(ends <= item, ends, 0))
        # Neighbouring programs take the groups of heads that read the same keys.
        split, group = within // S.groups, within % S.groups
        slot = tl.load(rows.row_slot + row)
        p = tl.load(rows.position + slot)
        _first, length, n_splits = cut(p, C)
        begin = split * length
        end = tl.minimum(begin + length, p + 1)
        its_pages = rows.pages + slot.to(tl.int64) * rows.table_stride
        # Where the first block lies is asked before the queries, and of each block one block ahead.
        page = page_at(its_pages, begin, end, S, BLOCK)

        members = tl.arange(0, MANY)
        there = members < C.group
        at = query + (row.to(tl.int64) * S.heads + group * C.group + members)[:, None] * (S.rotary + S.width)
        q_rotary, q = queries_of(at, there, kv, scale, S)
        top = tl.full([MANY], float("-inf"), tl.float32)
        total = tl.zeros([MANY], tl.float32)
        acc = tl.zeros([MANY, D], tl.float32)
        for first in range(begin, end, BLOCK):
            seen_there = first + tl.arange(0, BLOCK) < end
            cells = cells_at(page, first, S, BLOCK)
            rotary = load_part(kv, cells, seen_there, 0, S.rotary, S.rotary_d, BLOCK, S)
            k = load_part(kv, cells, seen_there, S.rotary, S.width, S.d, BLOCK, S)
            page = page_at(its_pages, first + BLOCK, end, S, BLOCK)
            scores = product(q_rotary, tl.trans(rotary)) + product(q, tl.trans(k))
            scores = tl.where(seen_there[None, :], scores * LOG2_E, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            faded = tl.exp2(top - higher)
            total = total * faded + tl.sum(weights, 1)
            acc = acc * faded[:, None] + product(narrowed(weights, k.dtype), k)
            top = higher

        d = tl.arange(0, D)
        mask = there[:, None] & (d < S.width)[None, :]
        pair = row * S.groups + group
        out = seen + (row.to(tl.int64) * S.heads + group * C.group) * S.width
        if n_splits == 1:
            # There is nothing to merge. Adding zero makes a negative zero a positive one, as the merge does.
            tl.store(out + members[:, None] * S.width + d[None, :], acc / total[:, None] + 0.0, mask=mask)
        else:
            part = pair.to(tl.int64) * C.most + split
            at_sum = space.sums + part * (C.group * S.width) + members[:, None] * S.width
            tl.store(at_sum + d[None, :], acc, mask=mask)
            tl.store(space.norms + part * (2 * C.group) + members, top, mask=there)
            tl.store(space.norms + part * (2 * C.group) + C.group + members, total, mask=there)


@triton.jit
def merge_latent_kernel(seen, rows, space, S: tl.constexpr, C: tl.constexpr):
    """One program: the splits of a row's head, C.merge at a time in order; absent ones add exact zeros."""
    D: tl.constexpr = S.d
    row, head = tl.program_id(0), tl.program_id(1)
    if row < tl.load(rows.n_rows):
        _first, _length, n_splits = cut(tl.load(rows.position + tl.load(rows.row_slot + row)), C)
        if n_splits > 1:
            d = tl.arange(0, D)[None, :]
            member = head % C.group
            before = (row * S.groups + head // C.group).to(tl.int64) * C.most
            top = tl.full([1], float("-inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
            acc = tl.zeros([1, D], tl.float32)
            for at in range(0, n_splits, C.merge):
                split = at + tl.arange(0, C.merge)
                there = split < n_splits
                at_norm = space.norms + (before + split) * (2 * C.group) + member
                tops = tl.load(at_norm, mask=there, other=float("-inf"))
                totals = tl.load(at_norm + C.group, mask=there, other=0.0)
                at_sum = space.sums + ((before + split) * C.group + member)[:, None] * S.width + d
                sums = tl.load(at_sum, mask=there[:, None] & (d < S.width), other=0.0)
                higher = tl.maximum(top, tl.max(tops, 0))
                weights = tl.exp2(tops - higher)
                faded = tl.exp2(top - higher)
                total = total * faded + tl.sum(totals * weights, 0)
                acc = acc * faded[:, None] + tl.sum(sums * weights[:, None], 0)[None, :]
                top = higher
            out = seen + (row.to(tl.int64) * S.heads + head) * S.width + d
            tl.store(out, acc / total[:, None] + 0.0, mask=d < S.width)


@triton.jit
def attend_latent_chunk_kernel(
    query, seen, kv, chunk, scale, S: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One program: up to ROWS rows of one sequence, of one head, and other such tiles behind them."""
    D: tl.constexpr = S.d
    head = tl.program_id(1)
    for piece in range(tl.program_id(0), tl.load(chunk.n_tiles) * PIECES, tl.num_programs(0)):
        tile, before = piece // PIECES, piece % PIECES * ROWS
        row = tl.load(chunk.tiles + 4 * tile) + before + tl.arange(0, ROWS)
        n_live, begins = tl.load(chunk.tiles + 4 * tile + 1), tl.load(chunk.tiles + 4 * tile + 2) + before
        if PIECES > 1:
            n_live = tl.minimum(tl.maximum(n_live - before, 0), ROWS)
        its_pages = chunk.pages + tl.load(chunk.tiles + 4 * tile + 3) * chunk.table_stride
        live = tl.arange(0, ROWS) < n_live
        place = (row.to(tl.int64) * S.heads + head)[:, None]
        q_rotary, q = queries_of(query + place * (S.rotary + S.width), live, kv, 1.0, S)
        p = begins + tl.arange(0, ROWS)
        end = begins + n_live
        if PIECES > 1:  # of an empty piece nothing is read
            end = tl.where(n_live > 0, end, 0)

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        page = page_at(its_pages, 0, end, S, BLOCK)
        for first in range(0, end, BLOCK):
            where = first + tl.arange(0, BLOCK)
            cells = cells_at(page, first, S, BLOCK)
            rotary = load_part(kv, cells, where < end, 0, S.rotary, S.rotary_d, BLOCK, S)
            k = load_part(kv, cells, where < end, S.rotary, S.width, S.d, BLOCK, S)
            page = page_at(its_pages, first + BLOCK, end, S, BLOCK)
            scores = product(q_rotary, tl.trans(rotary)) + product(q, tl.trans(k))
            # Position 0 is in the first block, and every row sees it: no maximum stays at minus infinity.
            scores = tl.where(where[None, :] <= p[:, None], scores * (scale * LOG2_E), float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            faded = tl.exp2(top - higher)
            total = total * faded + tl.sum(weights, 1)
            acc = acc * faded[:, None] + product(narrowed(weights, k.dtype), k)
            top = higher
        d = tl.arange(0, D)[None, :]
        mask = live[:, None] & (d < S.width)
        # Adding zero makes a negative zero a positive one, as a block of zeros would.
        value = acc / tl.where(live, total, 1.0)[:, None] + 0.0
        tl.store(seen + place * S.width + d, narrowed(value, seen.dtype.element_ty), mask=mask)


@triton.jit
def queries_of(at, there, kv, scale, S: tl.constexpr):
    """Queries that begin at `at` [n, 1], times scale, as they are multiplied: rotated part and absorbed part."""
    r, d = tl.arange(0, S.rotary_d)[None, :], tl.arange(0, S.d)[None, :]
    rotary = tl.load(at + r, mask=there[:, None] & (r < S.rotary), other=0.0)
    q = tl.load(at + S.rotary + d, mask=there[:, None] & (d < S.width), other=0.0)
    dtype = tl.bfloat16 if S.q8 else kv.key.dtype.element_ty
    return narrowed(rotary.to(tl.float32) * scale, dtype), narrowed(q.to(tl.float32) * scale, dtype)


@triton.jit
def load_part(
    kv, cells, there, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """Numbers FIRST to FIRST + WIDTH of the keys of cells [BLOCK] as they are multiplied: [BLOCK, D], zero where not
    `there`."""
    KEY: tl.constexpr = S.rotary + S.width
    if S.q8:
        # In three dimensions, so that a scale meets its 32 values in the same thread.
        b = tl.arange(0, D // 32)
        mask = there[:, None] & (b < WIDTH // 32)[None, :] if WIDTH < D else there[:, None]
        offsets = (cells * KEY + FIRST)[:, None, None] + (b * 32)[None, :, None] + tl.arange(0, 32)[None, None, :]
        values = tl.load(kv.key + offsets, mask=mask[:, :, None], other=0).to(tl.float32)
        at_scale = kv.scales + (cells * (KEY // 32) + FIRST // 32)[:, None] + b[None, :]
        scale = tl.load(at_scale, mask=mask, other=0.0).to(tl.float32)
        tile = tl.reshape(narrowed(values * scale[:, :, None], tl.bfloat16), [BLOCK, D])
    else:
        d = tl.arange(0, D)
        mask = there[:, None] & (d < WIDTH)[None, :] if WIDTH < D else there[:, None]
        tile = tl.load(kv.key + (cells * KEY + FIRST)[:, None] + d[None, :], mask=mask, other=0.0)
    return tile
