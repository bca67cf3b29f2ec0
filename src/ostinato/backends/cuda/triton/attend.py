"""One decode step's attention of a layer: QK norm, rotary, append, softmax(scale * q k^T) v over each row's own pages.

    workspace = attend_workspace(n_slots, heads, device)                # once per plan; layers of one size share it
    launch = bind_attend(qkv, seen, kv, rows, heads, workspace)         # once per layer; `launch()` runs it

Shapes and types are the twin's (`torch/ops/attend.py`): qkv float32 [n_slots, (heads + 2 kv_heads) * width] and seen
float32 [n_slots, heads * width] by row; K and V [cells, kv_heads, width] in float32, bfloat16, float16 or int8 with
scales; pages of any size, best a multiple of 64. Products are in the type of the store, bfloat16 for int8; sums, maxima
and the merge are float32. Written in place: `attended` of live rows, a cell of K and V for each of them, the workspace.
Bound by reading K and V, at short contexts by the latency of a few loads that follow from each other.

How the work is cut. What a row sees is cut into at most MAX_SPLITS splits of equal length, a multiple of SPLIT
positions that follows from the row's own position (and the window) and from nothing else. A split of one KV head is an
item; all items of the step are partitioned among a fixed number of programs, so that dead slots cost nothing and long
rows share the chip evenly. The program that finishes a (row, KV head) last merges its splits, in blocks of fixed size,
in order. So a row's bits depend on its own position and contents alone, not on the number of programs, rows or slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda import gpu
from ostinato.backends.cuda.launch import FLOATS, TritonLaunch, checked
from ostinato.backends.machine import PROGRAMS_PER_MULTIPROCESSOR
from ostinato.backends.torch.ops.attend import Heads, PagedKV, StepRows
from ostinato.backends.torch.ops.q8_0 import BLOCK as Q8_BLOCK

SPLIT: Final = 64  # positions; the least that is worth an item
MAX_SPLITS: Final = 64  # of one row; longer rows have longer splits
_MERGED: Final = 8192  # elements of partial sums that a merge holds at once
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Workspace:
    """What the splits of a step leave for their merge. One serves every layer of one step, one after the other."""

    sums: Tensor  # float32 [n_slots, kv_heads, MAX_SPLITS, group, width], weighted values
    norms: Tensor  # float32 [n_slots, kv_heads, MAX_SPLITS, 2, group]: the largest score, and the sum of weights
    arrivals: Tensor  # int32 [n_slots, kv_heads], zero between launches


def attend_workspace(n_slots: int, heads: Heads, device: torch.device) -> Workspace:
    """A workspace for layers of these sizes, zeroed; the kernel leaves `arrivals` zero itself."""
    lead = (n_slots, heads.n_kv_heads)
    return Workspace(
        torch.zeros((*lead, MAX_SPLITS, heads.group, heads.head_width), dtype=torch.float32, device=device),
        torch.zeros((*lead, MAX_SPLITS, 2, heads.group), dtype=torch.float32, device=device),
        torch.zeros(lead, dtype=torch.int32, device=device),
    )


def bind_attend(
    qkv: Tensor,
    attended: Tensor,
    kv: PagedKV,
    rows: StepRows,
    heads: Heads,
    workspace: Workspace,
    programs: int | None = None,
    stages: int | None = None,
) -> TritonLaunch:
    """Check everything once and return the launch. `programs` and `stages` change its speed and no bit."""
    device, n_slots, few = qkv.device, rows.n_slots, triton.next_power_of_2(heads.group)
    lead, n_attended = (n_slots, heads.n_kv_heads, MAX_SPLITS), heads.n_heads * heads.head_width
    sums = (*lead, heads.group, heads.head_width)
    if programs is None:
        programs = gpu.chip_of(device).attention_programs if device.type == "cuda" else PROGRAMS_PER_MULTIPROCESSOR
    given = layer_arguments(kv, heads, qkv)
    given |= {
        "qkv": checked("qkv", qkv, dtype=torch.float32, shape=(n_slots, heads.n_columns), device=device),
        "attended": checked("attended", attended, dtype=torch.float32, shape=(n_slots, n_attended), device=device),
        "n_rows": checked("n_rows", rows.n_rows, dtype=torch.int32, shape=(1,), device=device),
        "row_slot": checked("row_slot", rows.row_slot, dtype=torch.int32, shape=(n_slots,), device=device),
        "position": checked("position", rows.position, dtype=torch.int32, shape=(n_slots,), device=device),
        "pages": checked("pages", rows.pages, dtype=torch.int32, shape=(n_slots, None), device=device, columns=True),
        "table_stride": rows.pages.stride(0),
        "sums": checked("sums", workspace.sums, dtype=torch.float32, shape=sums, device=device),
        "norms": checked("norms", workspace.norms, dtype=torch.float32, shape=(*lead, 2, heads.group), device=device),
        "arrivals": checked("arrivals", workspace.arrivals, dtype=torch.int32, shape=lead[:2], device=device),
        "GROUP": heads.group,
        "FEW": few,
        "MANY": max(16, few),  # the least that a tensor core multiplies
        "BLOCK": 64 if given["D"] <= 128 else 32,
        "SLOTS": triton.next_power_of_2(n_slots),
        "LEAST": SPLIT,
        "MOST": MAX_SPLITS,
        "MERGE": max(1, min(16, _MERGED // (few * given["D"]))),
    }
    return TritonLaunch.of(attend_kernel, (programs,), given, num_warps=4, num_stages=stages or stages_for(heads, kv))


def stages_for(heads: Heads, kv: PagedKV) -> int:
    """How many blocks of K and V are under way at once: as many as leave room for two programs on a processor."""
    if torch.version.hip:
        return 1  # too little shared memory for more
    return 3 if heads.head_width * kv.keys.element_size() <= 128 else 2


def layer_arguments(kv: PagedKV, heads: Heads, stand_in: Tensor) -> dict[str, Any]:
    """What kernels take of a layer's store and heads, by the names of their parameters; what they cannot read is
    refused. `stand_in` takes the place of what is not read: a pointer is wanted all the same."""
    device, width, lead = stand_in.device, heads.head_width, (kv.keys.shape[0], heads.n_kv_heads)
    for name, store, scales in (("keys", kv.keys, kv.key_scales), ("values", kv.values, kv.value_scales)):
        checked(name, store, dtype=kv.keys.dtype, shape=(*lead, width), device=device)
        if scales is not None:
            shape = (*lead, width // Q8_BLOCK)
            checked(f"scales of {name}", scales, dtype=torch.float16, shape=shape, device=device)
    for name, weight in (("q_norm", heads.q_norm), ("k_norm", heads.k_norm)):
        if weight is not None:
            checked(name, weight, dtype=FLOATS, shape=(width,), device=device)
    if heads.frequencies is not None:
        checked("frequencies", heads.frequencies, dtype=torch.float32, shape=heads.frequencies.shape, device=device)
    optional = {"key_scales": kv.key_scales, "value_scales": kv.value_scales, "frequencies": heads.frequencies}
    optional |= {"q_weight": heads.q_norm, "k_weight": heads.k_norm}
    return {
        **{name: stand_in if tensor is None else tensor for name, tensor in optional.items()},
        **{"keys": kv.keys, "values": kv.values, "scale": heads.scale, "softcap": heads.softcap or 1.0},
        **{"eps": heads.norm_eps, "amplitude": heads.amplitude},
        "HEADS": heads.n_heads,
        "KV_HEADS": heads.n_kv_heads,
        "WIDTH": width,
        "D": max(16, triton.next_power_of_2(width)),
        "N_ROTARY": 0 if heads.frequencies is None else 2 * heads.frequencies.shape[0],
        "NEIGHBOURS": heads.pairing == "neighbours",
        "NORMED": heads.q_norm is not None,
        "WINDOW": heads.window or 0,
        "CAPPED": heads.softcap is not None,
        "PAGE": kv.page_tokens,
        "Q8": kv.keys.dtype == torch.int8,
    }


@triton.jit
def attend_kernel(
    qkv,
    attended,
    keys,
    values,
    key_scales,
    value_scales,
    n_rows,
    row_slot,
    position,
    pages,
    q_weight,
    k_weight,
    frequencies,
    sums,
    norms,
    arrivals,
    scale,
    softcap,
    eps,
    amplitude,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    N_ROTARY: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    NORMED: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOTS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    MERGE: tl.constexpr,
    Q8: tl.constexpr,
):
    # Items are numbered row by row: `ends` says where each row's items end, and dead rows have none.
    row_ids = tl.arange(0, SLOTS)
    alive = row_ids < tl.load(n_rows)
    slots = tl.load(row_slot + row_ids, mask=alive, other=0)
    _, _, counts = cut(tl.load(position + slots, mask=alive, other=0), WINDOW, LEAST, MOST)
    ends = tl.cumsum(tl.where(alive, counts * KV_HEADS, 0), 0)
    n_items = tl.max(ends)
    for item in range(tl.program_id(0), n_items, tl.num_programs(0)):
        row = tl.sum((ends <= item).to(tl.int32))
        within = item - tl.max(tl.where(ends <= item, ends, 0))
        # Neighbouring programs take the heads of the same cells, which lie side by side in memory.
        split, head = within // KV_HEADS, within % KV_HEADS
        slot = tl.load(row_slot + row)
        p = tl.load(position + slot)
        first, length, n_splits = cut(p, WINDOW, LEAST, MOST)
        begin = first // LEAST * LEAST + split * length
        end = tl.minimum(begin + length, p)  # the row's own position comes from registers
        begin = tl.maximum(begin, first // BLOCK * BLOCK)
        its_pages = pages + slot.to(tl.int64) * table_stride
        # Where the first block lies is asked before the queries are computed, and of each block one block ahead.
        page = page_at(its_pages, begin, end, PAGE, BLOCK)

        d = tl.arange(0, D)
        line = qkv + row * ((HEADS + 2 * KV_HEADS) * WIDTH)
        cos, sin = rope_cos_sin(p, frequencies, amplitude, D, N_ROTARY, NEIGHBOURS)
        members = tl.arange(0, MANY)
        q_mask = (members < GROUP)[:, None] & (d < WIDTH)[None, :]
        q_at = line + ((head * GROUP + members) * WIDTH)[:, None]
        q = rotated(q_at, q_mask, q_weight, cos, sin, eps, WIDTH, D, N_ROTARY, NEIGHBOURS, NORMED)
        q = narrowed(q * scale, tl.bfloat16 if Q8 else keys.dtype.element_ty)

        if split == n_splits - 1:
            # This split ends with the row's own position: append it, and begin with it.
            one = tl.zeros([1, 1], tl.int32)
            k_mask = (d < WIDTH)[None, :]
            k_at = line + (HEADS + head) * WIDTH + one
            own_k = rotated(k_at, k_mask, k_weight, cos, sin, eps, WIDTH, D, N_ROTARY, NEIGHBOURS, NORMED)
            own_v = tl.load(line + (HEADS + KV_HEADS + head) * WIDTH + d[None, :] + one, mask=k_mask, other=0.0)
            own_page = tl.load(its_pages + p // PAGE)
            cell = (own_page.to(tl.int64) * PAGE + p % PAGE) * KV_HEADS + head + one.to(tl.int64)
            own_k = store_cells(keys, key_scales, cell, own_k, k_mask, 1, WIDTH, D, Q8)
            own_v = store_cells(values, value_scales, cell, own_v, k_mask, 1, WIDTH, D, Q8)
            top = scored(tl.sum(q.to(tl.float32) * own_k, 1), softcap, CAPPED)
            total = tl.full([MANY], 1.0, tl.float32)
            acc = tl.trans(own_v) + tl.zeros([D, MANY], tl.float32)
        else:
            top = tl.full([MANY], float("-inf"), tl.float32)
            total = tl.zeros([MANY], tl.float32)
            acc = tl.zeros([D, MANY], tl.float32)

        for at in range(begin, end, BLOCK):
            where = at + tl.arange(0, BLOCK)
            there = (where >= first) & (where < end)
            lines = cells_at(page, at, PAGE, BLOCK) * KV_HEADS + head
            k = load_cells(keys, key_scales, lines, there, WIDTH, D, BLOCK, Q8)
            v = load_cells(values, value_scales, lines, there, WIDTH, D, BLOCK, Q8)
            page = page_at(its_pages, at + BLOCK, end, PAGE, BLOCK)
            scores = scored(product(k, tl.trans(q)), softcap, CAPPED)
            scores = tl.where(there[:, None], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 0))
            weights = tl.exp2(scores - higher[None, :])
            faded = tl.exp2(top - higher)
            total = total * faded + tl.sum(weights, 0)
            acc = acc * faded[None, :] + product(tl.trans(v), narrowed(weights, v.dtype))
            top = higher

        acc = tl.trans(acc)
        pair = row * KV_HEADS + head
        out = attended + row * (HEADS * WIDTH) + head * (GROUP * WIDTH)
        if n_splits == 1:
            # Adding zero makes a negative zero a positive one, as the merge does.
            tl.store(out + members[:, None] * WIDTH + d[None, :], acc / total[:, None] + 0.0, mask=q_mask)
        else:
            part = pair.to(tl.int64) * MOST + split
            tl.store(sums + part * (GROUP * WIDTH) + members[:, None] * WIDTH + d[None, :], acc, mask=q_mask)
            tl.store(norms + part * (2 * GROUP) + members, top, mask=members < GROUP)
            tl.store(norms + part * (2 * GROUP) + GROUP + members, total, mask=members < GROUP)
            # Every thread's stores come before the one atomic that announces them.
            tl.debug_barrier()
            if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == n_splits - 1:
                merge(sums, norms, out, pair, n_splits, WIDTH, D, GROUP, FEW, MOST, MERGE)
                tl.store(arrivals + pair, 0)


@triton.jit
def cut(p, WINDOW: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """The first position that a row at p sees, the length of its splits, and their number."""
    first = tl.maximum(p - (WINDOW - 1), 0) if WINDOW else p * 0
    n_seen = p + 1 - first // LEAST * LEAST
    length = (n_seen + (LEAST * MOST - 1)) // (LEAST * MOST) * LEAST
    return first, length, (n_seen + length - 1) // length


@triton.jit
def merge(
    sums,
    norms,
    out,
    pair,
    n_splits,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    MOST: tl.constexpr,
    MERGE: tl.constexpr,
):
    """The splits of a (row, KV head), MERGE at a time in order; absent ones add exact zeros."""
    members = tl.arange(0, FEW)
    d = tl.arange(0, D)
    mask = (members < GROUP)[:, None] & (d < WIDTH)[None, :]
    top = tl.full([FEW], float("-inf"), tl.float32)
    total = tl.zeros([FEW], tl.float32)
    acc = tl.zeros([FEW, D], tl.float32)
    for at in range(0, n_splits, MERGE):
        split = at + tl.arange(0, MERGE)
        there = (split < n_splits)[:, None] & (members < GROUP)[None, :]
        part = pair.to(tl.int64) * MOST + split
        at_norm = norms + (part * (2 * GROUP))[:, None] + members[None, :]
        # Written by other programs: read from where all of them meet, not from a cache of our own.
        tops = tl.load(at_norm, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(at_norm + GROUP, mask=there, other=0.0, cache_modifier=".cg")
        at_sum = sums + (part * (GROUP * WIDTH))[:, None, None] + (members * WIDTH)[None, :, None] + d[None, None, :]
        accs = tl.load(at_sum, mask=there[:, :, None] & mask[None, :, :], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(tops, 0))
        # Heads that only fill up the tile have seen nothing at all; any finite number keeps them from being NaN.
        higher = tl.where(members < GROUP, higher, 0.0)
        weights = tl.exp2(tops - higher[None, :])
        faded = tl.exp2(top - higher)
        total = total * faded + tl.sum(totals * weights, 0)
        acc = acc * faded[:, None] + tl.sum(accs * weights[:, :, None], 0)
        top = higher
    total = tl.where(members < GROUP, total, 1.0)
    tl.store(out + members[:, None] * WIDTH + d[None, :], acc / total[:, None] + 0.0, mask=mask)


@triton.jit
def scored(scores, softcap, CAPPED: tl.constexpr):
    """Scores, capped, as exponents of two."""
    if CAPPED:
        # tanh by the exponential that exists everywhere; the sign is put back, so nothing overflows.
        shrunk = tl.exp2(tl.abs(scores) * (-2.0 * _LOG2_E) / softcap)
        capped = softcap * (1.0 - shrunk) / (1.0 + shrunk)
        scores = tl.where(scores < 0, -capped, capped)
    return scores * _LOG2_E


@triton.jit
def product(a, b):
    """a b with float32 sums; float32 is multiplied as it is."""
    if _INTERPRETED:
        # The interpreter takes bfloat16 for integers; widened, the products are the same numbers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def page_at(its_pages, begin, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The page that the block of positions from begin on lies in, or that of each position; nothing past the end."""
    # begin is a multiple of BLOCK, so a block lies in one page unless pages are smaller.
    if PAGE % BLOCK == 0:
        page = tl.load(its_pages + begin // PAGE, mask=begin < end, other=0)
    else:
        where = begin + tl.arange(0, BLOCK)
        page = tl.load(its_pages + where // PAGE, mask=where < end, other=0)
    return page


@triton.jit
def cells_at(page, begin, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The cells of the positions from begin on, int64 [BLOCK]."""
    if PAGE % BLOCK == 0:
        cells = page.to(tl.int64) * PAGE + begin % PAGE + tl.arange(0, BLOCK)
    else:
        cells = page.to(tl.int64) * PAGE + (begin + tl.arange(0, BLOCK)) % PAGE
    return cells


@triton.jit
def load_cells(
    store,
    scales,
    lines,
    there,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    Q8: tl.constexpr,
):
    """K or V of lines [BLOCK] (cell * kv_heads + head) as it is multiplied, [BLOCK, D]; zero where not `there`."""
    if Q8:
        # In three dimensions, so that a scale meets its 32 values in the same thread.
        blocks = tl.arange(0, D // 32)
        mask = there[:, None] & (blocks < WIDTH // 32)[None, :] if WIDTH < D else there[:, None]
        offsets = (lines * WIDTH)[:, None, None] + (blocks * 32)[None, :, None] + tl.arange(0, 32)[None, None, :]
        tile = tl.load(store + offsets, mask=mask[:, :, None], other=0)
        scale = tl.load(scales + (lines * (WIDTH // 32))[:, None] + blocks[None, :], mask=mask, other=0.0)
        wide = tile.to(tl.float32) * scale.to(tl.float32)[:, :, None]
        tile = tl.reshape(narrowed(wide, tl.bfloat16), [BLOCK, D])
    else:
        d = tl.arange(0, D)
        mask = there[:, None] & (d < WIDTH)[None, :] if WIDTH < D else there[:, None]
        tile = tl.load(store + (lines * WIDTH)[:, None] + d[None, :], mask=mask, other=0.0)
    return tile


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """x as dtype, rounded to nearest even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        # The interpreter cuts a float32 off; what is left of this one needs no rounding.
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def store_cells(
    store,
    scales,
    lines,
    x,
    mask,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    Q8: tl.constexpr,
):
    """Write x [ROWS, D] to lines [ROWS, 1] (cell * kv_heads + head); return it as it will be read, in float32."""
    d = tl.arange(0, D)
    if Q8:
        blocks = tl.reshape(x, [ROWS, D // 32, 32])
        # Divisions are rounded correctly, and quotients to even, as the twin's: the bytes are the same.
        scale = tl.div_rn(tl.max(tl.abs(blocks), 2), 127.0).to(tl.float16)
        divisor = tl.where(scale > 0, scale.to(tl.float32), 1.0)
        quotients = tl.div_rn(blocks, divisor[:, :, None] + tl.zeros([ROWS, D // 32, 32], tl.float32))
        rounded = (quotients + 12582912.0) - 12582912.0
        rounded = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
        b = tl.arange(0, D // 32)
        tl.store(store + lines * WIDTH + d[None, :], tl.reshape(rounded, [ROWS, D]).to(tl.int8), mask=mask)
        b_mask = (b < WIDTH // 32)[None, :] & (tl.max(mask.to(tl.int32), 1) > 0)[:, None]
        tl.store(scales + lines * (WIDTH // 32) + b[None, :], scale, mask=b_mask)
        read = narrowed(rounded * scale.to(tl.float32)[:, :, None], tl.bfloat16)
        read = tl.reshape(read, [ROWS, D])
    else:
        read = narrowed(x, store.dtype.element_ty)
        tl.store(store + lines * WIDTH + d[None, :], read, mask=mask)
    return read.to(tl.float32)


@triton.jit
def rotated(
    at,
    mask,
    weight,
    cos,
    sin,
    eps,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    N_ROTARY: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Heads of WIDTH elements at `at` [n, 1], after norm and RoPE, float32 [n, D]; cos and sin [1, D] or [n, D]."""
    d = tl.arange(0, D)[None, :]
    x = tl.load(at + d, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        power = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        x = x * power * tl.load(weight + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    if N_ROTARY:
        if NEIGHBOURS:
            partner = d ^ 1
            early = d % 2 == 0
        else:
            partner = tl.where(d < N_ROTARY // 2, d + N_ROTARY // 2, d - N_ROTARY // 2)
            early = d < N_ROTARY // 2
        # Loaded again rather than shuffled: the line is in the cache, and which lane holds what stays open.
        other = tl.load(at + partner, mask=mask & (d < N_ROTARY), other=0.0).to(tl.float32)
        if NORMED:
            other = other * power * tl.load(weight + partner, mask=d < N_ROTARY, other=0.0).to(tl.float32)
        x = tl.where(d < N_ROTARY, x * cos + tl.where(early, -other, other) * sin, x)
    return x


@triton.jit
def rope_cos_sin(p, frequencies, amplitude, D: tl.constexpr, N_ROTARY: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """RoPE's cos and sin, times the amplitude, for each element of a head at position p (or [n, 1] of them)."""
    d = tl.arange(0, D)[None, :]
    if N_ROTARY:
        pair = d // 2 if NEIGHBOURS else d % (N_ROTARY // 2)
        frequency = tl.load(frequencies + pair, mask=d < N_ROTARY, other=0.0)
        cos, sin = cos_sin(p.to(tl.float32) * frequency, amplitude)
    else:
        cos = tl.zeros([1, D], tl.float32)
        sin = cos
    return cos, sin


@triton.jit
def cos_sin(angle, amplitude):
    """Exact to 1e-7 at any angle that a context can reach, which a device's own fast cosine is not."""
    # Reduced by the nearest multiple of pi / 2 in float64: at an angle of 100,000 float32 has two decimals left.
    wide = angle.to(tl.float64)
    quarter = tl.floor(wide * tl.full([], 0.6366197723675814, tl.float64) + 0.5)
    x = (wide - quarter * tl.full([], 1.5707963267948966, tl.float64)).to(tl.float32)
    z = x * x
    s = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 + z * -1.9515295891e-4))
    c = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    which = quarter.to(tl.int32) & 3
    swapped = (which & 1) == 1
    cos = tl.where(swapped, s, c)
    sin = tl.where(swapped, c, s)
    cos = tl.where((which == 1) | (which == 2), -cos, cos)
    sin = tl.where(which >= 2, -sin, sin)
    return cos * amplitude, sin * amplitude
