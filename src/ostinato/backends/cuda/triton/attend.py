"""One decode step's attention of a layer: QK norm, rotary, append, softmax(scale * q k^T) v over each row's own pages.

    workspace = attend_workspace(n_slots, [heads, ...], device)         # once per plan, of all its layers
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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.chip import padded, queries_bytes, stages_that_fit, step_block
from ostinato.backends.cuda.launch import FLOATS, TritonLaunch, checked, grouped
from ostinato.backends.machine import PROGRAMS_PER_MULTIPROCESSOR, TUNED, Chip
from ostinato.backends.torch.ops.attend import Heads, PagedKV, StepRows
from ostinato.backends.torch.ops.q8_0 import BLOCK as Q8_BLOCK

SPLIT: Final = 64  # positions; the least that is worth an item
MAX_SPLITS: Final = 64  # of one row; longer rows have longer splits
_MERGED: Final = 8192  # elements of partial sums that a merge holds at once
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Workspace:
    """What the splits of a step leave for their merge. One serves every layer of one step, one after the other, and is
    as large as the largest of them needs."""

    sums: Tensor  # float32, for a layer [n_slots, kv_heads, MAX_SPLITS, group, width], weighted values
    norms: Tensor  # float32 [n_slots, kv_heads, MAX_SPLITS, 2, group]: the largest score, and the sum of weights
    arrivals: Tensor  # int32 [n_slots, kv_heads], zero between launches


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What the kernels of a layer are compiled for."""

    heads: int
    kv_heads: int
    width: int
    query_step: int  # from one query to the next: twice as wide where a gate stands behind it
    keys_at: int  # the column of the first key
    columns: int  # of a row of q, k and v
    reads_kv: bool  # keys and values are there already
    value_norm: bool
    d: int  # as wide or wider, a power of two
    n_rotary: int
    n_rope_sets: int  # with more than one, a row says which it has
    neighbours: bool
    normed: int  # 0: not, 1: before the rotation, 2: after it
    temperature_span: int  # 0: queries have no temperature
    page: int
    q8: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """How a step's attention is cut, and what else its kernel alone is compiled for."""

    slots: int  # as many or more, a power of two
    group: int  # query heads of a KV head; `few` as many or more, a power of two
    few: int
    many: int  # the same, and the least that a tensor core multiplies
    block: int  # positions at once
    least: int
    most: int
    merge: int  # splits at once
    window: int
    capped: bool
    sinks: bool


def attend_workspace(n_slots: int, heads: Sequence[Heads], device: torch.device) -> Workspace:
    """A workspace for layers of these sizes, zeroed; the kernel leaves `arrivals` zero itself."""
    n_heads, n_kv_heads = max(one.n_heads for one in heads), max(one.n_kv_heads for one in heads)
    widest = max(one.n_heads * one.head_width for one in heads)
    return Workspace(
        torch.zeros(n_slots * MAX_SPLITS * widest, dtype=torch.float32, device=device),
        torch.zeros(n_slots * MAX_SPLITS * 2 * n_heads, dtype=torch.float32, device=device),
        torch.zeros(n_slots * n_kv_heads, dtype=torch.int32, device=device),
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
    chip: Chip = TUNED,
) -> TritonLaunch:
    """Check everything once and return the launch. `programs`, `stages` and the chip change its speed and no bit."""
    device, n_slots, few = qkv.device, rows.n_slots, triton.next_power_of_2(heads.group)
    n_attended, paged = heads.n_heads * heads.head_width, (n_slots, None)
    if programs is None:
        programs = chip.attention_programs if device.type == "cuda" else PROGRAMS_PER_MULTIPROCESSOR
    given = layer_arguments(kv, heads, qkv)
    wide = given["S"].d
    item_bytes = kv.keys.element_size()
    many, block = padded(heads.group), step_block(chip, wide, item_bytes, heads.group)
    of_rows = {"n_rows": (1,), "row_slot": (n_slots,), "position": (n_slots,), "pages": paged}
    given |= {
        "qkv": checked("qkv", qkv, dtype=torch.float32, shape=(n_slots, heads.n_columns), device=device),
        "attended": checked("attended", attended, dtype=torch.float32, shape=(n_slots, n_attended), device=device),
        "rows": placed(rows, of_rows | rope_sets(heads, n_slots), device),
        "space": grouped(
            {
                name: checked(name, getattr(workspace, name)[:size], dtype=dtype, shape=(size,), device=device)
                for name, dtype, size in (
                    ("sums", torch.float32, n_slots * MAX_SPLITS * n_attended),
                    ("norms", torch.float32, n_slots * MAX_SPLITS * 2 * heads.n_heads),
                    ("arrivals", torch.int32, n_slots * heads.n_kv_heads),
                )
            }
        ),
        "C": Cut(
            slots=triton.next_power_of_2(n_slots),
            group=heads.group,
            few=few,
            many=many,
            block=block,
            least=SPLIT,
            most=MAX_SPLITS,
            merge=max(1, min(16, _MERGED // (few * wide))),
            window=heads.window or 0,
            capped=heads.softcap is not None,
            sinks=heads.sinks is not None,
        ),
    }
    if stages is None:
        beside = queries_bytes(wide, item_bytes, block, heads.group)
        stages = stages_that_fit(chip, stages_for(heads, kv), 2 * block * wide * item_bytes, beside)
    return TritonLaunch.of(attend_kernel, (programs,), given, num_warps=4, num_stages=stages)


def placed(rows: Any, shapes: Mapping[str, tuple[int | None, ...]], device: torch.device) -> Any:
    """Where rows are and whose, int32 of these shapes; the page tables may be some columns of a wider matrix."""
    given = {
        name: checked(name, getattr(rows, name), dtype=torch.int32, shape=shape, device=device, columns=name == "pages")
        for name, shape in shapes.items()
    }
    return grouped({**given, "table_stride": rows.pages.stride(0)})


def rope_sets(heads: Heads, n: int) -> dict[str, tuple[int]]:
    """What rows say of their rope sets, for `placed`: nothing where there is one."""
    return {} if heads.frequencies is None or len(heads.frequencies) == 1 else {"rope_set": (n,)}


def stages_for(heads: Heads, kv: PagedKV) -> int:
    """How many blocks of K and V are under way at once: as many as leave room for two programs on a processor."""
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
    if heads.sinks is not None:
        checked("sinks", heads.sinks, dtype=torch.float32, shape=(heads.n_heads,), device=device)
    if heads.frequencies is not None:
        checked("frequencies", heads.frequencies, dtype=torch.float32, shape=(1, None), device=device)

    def there(tensor: Tensor | None) -> Tensor:
        return stand_in if tensor is None else tensor

    quantised = {"key_scales": there(kv.key_scales), "value_scales": there(kv.value_scales)}
    norms = {"q_weight": there(heads.q_norm), "k_weight": there(heads.k_norm), "eps": heads.norm_eps}
    rope = {"frequencies": there(heads.frequencies), "amplitude": heads.amplitude}
    rope["temperature"] = 0.0 if heads.temperature is None else heads.temperature[0]
    return {
        "kv": grouped({"key": kv.keys, "value": kv.values, **quantised}),
        "turn": grouped(norms | rope),
        **{"scale": heads.scale, "softcap": heads.softcap or 1.0, "sinks": there(heads.sinks)},
        "S": LayerSizes(
            heads=heads.n_heads,
            kv_heads=heads.n_kv_heads,
            width=width,
            query_step=heads.query_step,
            keys_at=heads.keys_at,
            columns=heads.n_columns,
            reads_kv=heads.reads_kv,
            value_norm=heads.value_norm,
            d=padded(width),
            n_rotary=0 if heads.frequencies is None else 2 * heads.frequencies.shape[1],
            n_rope_sets=1 if heads.frequencies is None else heads.frequencies.shape[0],
            neighbours=heads.pairing == "neighbours",
            temperature_span=0 if heads.temperature is None else heads.temperature[1],
            normed=0 if heads.q_norm is None else 2 if heads.norm_last else 1,
            page=kv.page_tokens,
            q8=kv.keys.dtype == torch.int8,
        ),
    }


@triton.jit
def attend_kernel(qkv, attended, kv, rows, turn, space, scale, softcap, sinks, S: tl.constexpr, C: tl.constexpr):
    D: tl.constexpr = S.d
    BLOCK: tl.constexpr = C.block
    MANY: tl.constexpr = C.many
    # Items are numbered row by row: `ends` says where each row's items end, and dead rows have none.
    row_ids = tl.arange(0, C.slots)
    alive = row_ids < tl.load(rows.n_rows)
    slots = tl.load(rows.row_slot + row_ids, mask=alive, other=0)
    _, _, counts = cut(tl.load(rows.position + slots, mask=alive, other=0), C)
    ends = tl.cumsum(tl.where(alive, counts * S.kv_heads, 0), 0)
    n_items = tl.max(ends)
    for item in range(tl.program_id(0), n_items, tl.num_programs(0)):
        row = tl.sum((ends <= item).to(tl.int32))
        within = item - tl.max(tl.where(ends <= item, ends, 0))
        # Neighbouring programs take the heads of the same cells, which lie side by side in memory.
        split, head = within // S.kv_heads, within % S.kv_heads
        slot = tl.load(rows.row_slot + row)
        p = tl.load(rows.position + slot)
        first, length, n_splits = cut(p, C)
        begin = first // C.least * C.least + split * length
        end = tl.minimum(begin + length, p)  # the row's own position comes from registers
        begin = tl.maximum(begin, first // BLOCK * BLOCK)
        its_pages = rows.pages + slot.to(tl.int64) * rows.table_stride
        # Where the first block lies is asked before the queries are computed, and of each block one block ahead.
        page = page_at(its_pages, begin, end, S, BLOCK)

        d = tl.arange(0, D)
        line = qkv + row * S.columns
        frequencies = turn.frequencies
        if S.n_rope_sets > 1:
            frequencies += tl.load(rows.rope_set + slot) * (S.n_rotary // 2)
        cos, sin = rope_cos_sin(p, frequencies, turn.amplitude, S)
        members = tl.arange(0, MANY)
        q_mask = (members < C.group)[:, None] & (d < S.width)[None, :]
        q_at = line + ((head * C.group + members) * S.query_step)[:, None]
        q = tempered(rotated(q_at, q_mask, turn.q_weight, cos, sin, turn.eps, S), p, turn.temperature, S)
        q = narrowed(q * scale, tl.bfloat16 if S.q8 else kv.key.dtype.element_ty)

        if split == n_splits - 1:
            # This split ends with the row's own position: append it, and begin with it.
            own_page = tl.load(its_pages + p // S.page)
            cell = (own_page.to(tl.int64) * S.page + p % S.page) * S.kv_heads + head
            if S.reads_kv:
                lines = tl.zeros([1], tl.int64) + cell
                own_k = load_cells(kv.key, kv.key_scales, lines, lines >= 0, 1, S).to(tl.float32)
                own_v = load_cells(kv.value, kv.value_scales, lines, lines >= 0, 1, S).to(tl.float32)
            else:
                one = tl.zeros([1, 1], tl.int32)
                k_mask = (d < S.width)[None, :]
                k_at = line + S.keys_at + head * S.width + one
                own_k = rotated(k_at, k_mask, turn.k_weight, cos, sin, turn.eps, S)
                own_v = value_of(k_at + S.kv_heads * S.width + d[None, :], k_mask, turn.eps, S)
                own_k = store_cells(kv.key, kv.key_scales, cell + one, own_k, k_mask, 1, S)
                own_v = store_cells(kv.value, kv.value_scales, cell + one, own_v, k_mask, 1, S)
            top = scored(tl.sum(q.to(tl.float32) * own_k, 1), softcap, C.capped)
            total = tl.full([MANY], 1.0, tl.float32)
            acc = tl.trans(own_v) + tl.zeros([D, MANY], tl.float32)
            if C.sinks:
                # One more score, which stands for no value. This split alone has it.
                sink = tl.load(sinks + head * C.group + members, mask=members < C.group, other=0.0) * LOG2_E
                higher = tl.maximum(top, sink)
                faded = tl.exp2(top - higher)
                total = faded + tl.exp2(sink - higher)
                acc = acc * faded[None, :]
                top = higher
        else:
            top = tl.full([MANY], float("-inf"), tl.float32)
            total = tl.zeros([MANY], tl.float32)
            acc = tl.zeros([D, MANY], tl.float32)

        for at in range(begin, end, BLOCK):
            where = at + tl.arange(0, BLOCK)
            there = (where >= first) & (where < end)
            lines = cells_at(page, at, S, BLOCK) * S.kv_heads + head
            k = load_cells(kv.key, kv.key_scales, lines, there, BLOCK, S)
            v = load_cells(kv.value, kv.value_scales, lines, there, BLOCK, S)
            page = page_at(its_pages, at + BLOCK, end, S, BLOCK)
            scores = scored(product(k, tl.trans(q)), softcap, C.capped)
            scores = tl.where(there[:, None], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 0))
            weights = tl.exp2(scores - higher[None, :])
            faded = tl.exp2(top - higher)
            total = total * faded + tl.sum(weights, 0)
            acc = acc * faded[None, :] + product(tl.trans(v), narrowed(weights, v.dtype))
            top = higher

        acc = tl.trans(acc)
        pair = row * S.kv_heads + head
        out = attended + row * (S.heads * S.width) + head * (C.group * S.width)
        if n_splits == 1:
            # Adding zero makes a negative zero a positive one, as the merge does.
            tl.store(out + members[:, None] * S.width + d[None, :], acc / total[:, None] + 0.0, mask=q_mask)
        else:
            part = pair.to(tl.int64) * C.most + split
            at_sum = space.sums + part * (C.group * S.width) + members[:, None] * S.width
            tl.store(at_sum + d[None, :], acc, mask=q_mask)
            tl.store(space.norms + part * (2 * C.group) + members, top, mask=members < C.group)
            tl.store(space.norms + part * (2 * C.group) + C.group + members, total, mask=members < C.group)
            # Every thread's stores come before the one atomic that announces them.
            tl.debug_barrier()
            if tl.atomic_add(space.arrivals + pair, 1, sem="acq_rel") == n_splits - 1:
                merge(space, out, pair, n_splits, S, C)
                tl.store(space.arrivals + pair, 0)


@triton.jit
def cut(p, C: tl.constexpr):
    """The first position that a row at p sees, the length of its splits, and their number."""
    first = tl.maximum(p - (C.window - 1), 0) if C.window else p * 0
    n_seen = p + 1 - first // C.least * C.least
    length = (n_seen + (C.least * C.most - 1)) // (C.least * C.most) * C.least
    return first, length, (n_seen + length - 1) // length


@triton.jit
def merge(space, out, pair, n_splits, S: tl.constexpr, C: tl.constexpr):
    """The splits of a (row, KV head), C.merge at a time in order; absent ones add exact zeros."""
    FEW: tl.constexpr = C.few
    D: tl.constexpr = S.d
    members = tl.arange(0, FEW)
    d = tl.arange(0, D)
    mask = (members < C.group)[:, None] & (d < S.width)[None, :]
    top = tl.full([FEW], float("-inf"), tl.float32)
    total = tl.zeros([FEW], tl.float32)
    acc = tl.zeros([FEW, D], tl.float32)
    for at in range(0, n_splits, C.merge):
        split = at + tl.arange(0, C.merge)
        there = (split < n_splits)[:, None] & (members < C.group)[None, :]
        part = pair.to(tl.int64) * C.most + split
        at_norm = space.norms + (part * (2 * C.group))[:, None] + members[None, :]
        # Written by other programs: read from where all of them meet, not from a cache of our own.
        tops = tl.load(at_norm, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(at_norm + C.group, mask=there, other=0.0, cache_modifier=".cg")
        at_sum = space.sums + (part * (C.group * S.width))[:, None, None] + (members * S.width)[None, :, None]
        at_sum += d[None, None, :]
        accs = tl.load(at_sum, mask=there[:, :, None] & mask[None, :, :], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(tops, 0))
        # Heads that only fill up the tile have seen nothing at all; any finite number keeps them from being NaN.
        higher = tl.where(members < C.group, higher, 0.0)
        weights = tl.exp2(tops - higher[None, :])
        faded = tl.exp2(top - higher)
        total = total * faded + tl.sum(totals * weights, 0)
        acc = acc * faded[:, None] + tl.sum(accs * weights[:, :, None], 0)
        top = higher
    total = tl.where(members < C.group, total, 1.0)
    tl.store(out + members[:, None] * S.width + d[None, :], acc / total[:, None] + 0.0, mask=mask)


@triton.jit
def scored(scores, softcap, CAPPED: tl.constexpr):
    """Scores, capped, as exponents of two."""
    if CAPPED:
        # tanh by the exponential that exists everywhere; the sign is put back, so nothing overflows.
        shrunk = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E) / softcap)
        capped = softcap * (1.0 - shrunk) / (1.0 + shrunk)
        scores = tl.where(scores < 0, -capped, capped)
    return scores * LOG2_E


@triton.jit
def product(a, b):
    """a b with float32 sums; float32 is multiplied as it is."""
    if _INTERPRETED:
        # The interpreter takes bfloat16 for integers; widened, the products are the same numbers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def page_at(its_pages, begin, end, S: tl.constexpr, BLOCK: tl.constexpr):
    """The page that the block of positions from begin on lies in, or that of each position; nothing past the end."""
    # begin is a multiple of BLOCK, so a block lies in one page unless pages are smaller.
    if S.page % BLOCK == 0:
        page = tl.load(its_pages + begin // S.page, mask=begin < end, other=0)
    else:
        where = begin + tl.arange(0, BLOCK)
        page = tl.load(its_pages + where // S.page, mask=where < end, other=0)
    return page


@triton.jit
def cells_at(page, begin, S: tl.constexpr, BLOCK: tl.constexpr):
    """The cells of the positions from begin on, int64 [BLOCK]."""
    if S.page % BLOCK == 0:
        cells = page.to(tl.int64) * S.page + begin % S.page + tl.arange(0, BLOCK)
    else:
        cells = page.to(tl.int64) * S.page + (begin + tl.arange(0, BLOCK)) % S.page
    return cells


@triton.jit
def load_cells(store, scales, lines, there, BLOCK: tl.constexpr, S: tl.constexpr):
    """K or V of lines [BLOCK] (cell * kv_heads + head) as it is multiplied, [BLOCK, D]; zero where not `there`."""
    if S.q8:
        # In three dimensions, so that a scale meets its 32 values in the same thread.
        blocks = tl.arange(0, S.d // 32)
        mask = there[:, None] & (blocks < S.width // 32)[None, :] if S.width < S.d else there[:, None]
        offsets = (lines * S.width)[:, None, None] + (blocks * 32)[None, :, None] + tl.arange(0, 32)[None, None, :]
        tile = tl.load(store + offsets, mask=mask[:, :, None], other=0)
        scale = tl.load(scales + (lines * (S.width // 32))[:, None] + blocks[None, :], mask=mask, other=0.0)
        wide = tile.to(tl.float32) * scale.to(tl.float32)[:, :, None]
        tile = tl.reshape(narrowed(wide, tl.bfloat16), [BLOCK, S.d])
    else:
        d = tl.arange(0, S.d)
        mask = there[:, None] & (d < S.width)[None, :] if S.width < S.d else there[:, None]
        tile = tl.load(store + (lines * S.width)[:, None] + d[None, :], mask=mask, other=0.0)
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
def store_cells(store, scales, lines, x, mask, ROWS: tl.constexpr, S: tl.constexpr):
    """Write x [ROWS, D] to lines [ROWS, 1] (cell * kv_heads + head); return it as it will be read, in float32."""
    D: tl.constexpr = S.d
    d = tl.arange(0, D)
    if S.q8:
        blocks = tl.reshape(x, [ROWS, D // 32, 32])
        # Divisions are rounded correctly, and quotients to even, as the twin's: the bytes are the same.
        scale = tl.div_rn(tl.max(tl.abs(blocks), 2), 127.0).to(tl.float16)
        divisor = tl.where(scale > 0, scale.to(tl.float32), 1.0)
        quotients = tl.div_rn(blocks, divisor[:, :, None] + tl.zeros([ROWS, D // 32, 32], tl.float32))
        rounded = (quotients + 12582912.0) - 12582912.0
        rounded = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
        b = tl.arange(0, D // 32)
        tl.store(store + lines * S.width + d[None, :], tl.reshape(rounded, [ROWS, D]).to(tl.int8), mask=mask)
        b_mask = (b < S.width // 32)[None, :] & (tl.max(mask.to(tl.int32), 1) > 0)[:, None]
        tl.store(scales + lines * (S.width // 32) + b[None, :], scale, mask=b_mask)
        read = narrowed(rounded * scale.to(tl.float32)[:, :, None], tl.bfloat16)
        read = tl.reshape(read, [ROWS, D])
    else:
        read = narrowed(x, store.dtype.element_ty)
        tl.store(store + lines * S.width + d[None, :], read, mask=mask)
    return read.to(tl.float32)


@triton.jit
def rotated(at, mask, weight, cos, sin, eps, S: tl.constexpr):
    """Heads of S.width elements at `at` [n, 1], after norm and RoPE, float32 [n, D]; cos and sin [1, D] or [n, D]."""
    d = tl.arange(0, S.d)[None, :]
    x = tl.load(at + d, mask=mask, other=0.0).to(tl.float32)
    if S.normed == 1:
        power = tl.rsqrt(tl.sum(x * x, 1) / S.width + eps)[:, None]
        x = x * power * tl.load(weight + d, mask=d < S.width, other=0.0).to(tl.float32)
    if S.n_rotary:
        if S.neighbours:
            partner = d ^ 1
            early = d % 2 == 0
        else:
            partner = tl.where(d < S.n_rotary // 2, d + S.n_rotary // 2, d - S.n_rotary // 2)
            early = d < S.n_rotary // 2
        # Loaded again rather than shuffled: the line is in the cache, and which lane holds what stays open.
        other = tl.load(at + partner, mask=mask & (d < S.n_rotary), other=0.0).to(tl.float32)
        if S.normed == 1:
            other = other * power * tl.load(weight + partner, mask=d < S.n_rotary, other=0.0).to(tl.float32)
        x = tl.where(d < S.n_rotary, x * cos + tl.where(early, -other, other) * sin, x)
    if S.normed == 2:
        x = x * tl.rsqrt(tl.sum(x * x, 1) / S.width + eps)[:, None]
        x = x * tl.load(weight + d, mask=d < S.width, other=0.0).to(tl.float32)
    return x


@triton.jit
def value_of(at, mask, eps, S: tl.constexpr):
    """Heads of values at `at` [n, D], float32, normed where they are."""
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if S.value_norm:
        x = x * tl.rsqrt(tl.sum(x * x, 1) / S.width + eps)[:, None]
    return x


@triton.jit
def tempered(q, p, scale, S: tl.constexpr):
    """Queries at position p (or [n, 1] of both), sharpened by how far they are."""
    if S.temperature_span:
        q = q * (1.0 + scale * tl.log(1.0 + (p // S.temperature_span).to(tl.float32)))
    return q


@triton.jit
def rope_cos_sin(p, frequencies, amplitude, S: tl.constexpr):
    """RoPE's cos and sin, times the amplitude, for each element of a head at position p (or [n, 1] of both)."""
    d = tl.arange(0, S.d)[None, :]
    if S.n_rotary:
        pair = d // 2 if S.neighbours else d % (S.n_rotary // 2)
        frequency = tl.load(frequencies + pair, mask=d < S.n_rotary, other=0.0)
        cos, sin = cos_sin(p.to(tl.float32) * frequency, amplitude)
    else:
        cos = tl.full([1, S.d], 0.0, tl.float32)
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
