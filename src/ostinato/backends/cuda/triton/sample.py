"""The sampler of a decode step on the GPU, in three launches: shape, gather, choose. Twin: `sample_step.py`.

token = sample(filter(shape(logits))), log-probability = logit - log sum exp(logits), by the slot table's settings.
logits float32 [rows, vocab], read only, 16-byte aligned; tokens int32, log-probabilities float32. Raw logits are summed
in float32 within a block and float64 across blocks; sums that place a sample are float64. Written in place: `chosen`,
`chosen_logprob`, `top_ids`, `top_logprobs` of rows below n_rows, and the workspace. Bound by the latency of three small
launches, and by reading the logits (penalised slots: and their counts) once, sampled rows about three times.

`shape` (a program per block of ids) applies penalties, bias and bans and leaves each block's largest and sums, and
the largest of each *sub*, a short run of ids. `gather`, for filtered rows, finds a floor from the subs' largest: at
least as many ids reach it as there are subs that do, so the ids from the floor up begin the ranking and are, for common
settings, few. It packs these candidates as (value, id) keys. `choose` (a program per row) sorts them and repeats the
twin's sums on them. Where it cannot show that the candidates hold all that the filters keep, it searches the whole row
instead, narrowing a threshold pass by pass: slow (hundreds of microseconds for a large vocabulary), and right for any
setting. A row without filters needs no ranking: a block is sampled, then an id in it, through the ids in their order.

Greedy tokens equal the twin's for equal logits. So do filtered samples from candidates, except where two float64 sums
of different order fall on two sides of a limit (about one in 1e12); the search uses weights from a float32 exp and
differs about once in 1e6. Unfiltered samples have the twin's distribution but, going by id, not its tokens. The same
logits, settings, seed and position give the same token in any row, slot and batch: no sum crosses rows, and every sum
has a fixed order. Candidates are packed in the order in which blocks finish; the sort makes the order fixed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.launch import TritonLaunch, checked, grouped
from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.ops.sample_step import SlotFields
from ostinato.errors import BadPointer
from ostinato.loop.layout import SampledRows


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shapes of the three kernels, all powers of two but `wanted` and `row_lanes`; results are bound to them."""

    block: int  # ids per program of shape and gather
    sub: int  # ids per sub
    wanted: int  # subs that reach the floor where no top-k says how many
    capacity: int = 1024  # candidates that can be sorted
    small: int = 256  # the same, in the quick sort for few
    chunk: int = 4096  # ids per iteration of a search through the row
    row_lanes: int = 8  # programs that share the rows of one block

    def n_blocks(self, vocab: int) -> int:
        return -(-vocab // self.block)

    def n_subs(self, vocab: int) -> int:
        return self.n_blocks(vocab) * (self.block // self.sub)


def tiles_for(vocab: int) -> Tiles:
    """About a thousand subs: enough for their largest to tell where the ranking's first few hundred end."""
    sub = min(max(triton.next_power_of_2(triton.cdiv(vocab, 1024)), 16), 1024)
    if vocab <= 1024:
        return Tiles(block=1024, sub=sub, wanted=vocab)  # more subs than there are: all ids are candidates
    return Tiles(block=1024, sub=sub, wanted=min(256, triton.cdiv(vocab, sub) * 5 // 8))


def sample_workspace(n_slots: int, vocab: int, device: torch.device, tiles: Tiles | None = None) -> dict[str, Tensor]:
    """The buffers that `bind_sample` needs besides the table, by name. Nothing is kept in them."""
    tiles = tiles or tiles_for(vocab)
    blocks, subs = (n_slots, tiles.n_blocks(vocab)), (n_slots, tiles.n_subs(vocab))
    sizes = {
        "scaled": ((n_slots, vocab), torch.float32),
        "best": (blocks, torch.float32),
        "best_id": (blocks, torch.int32),
        "scaled_sum": (blocks, torch.float64),
        "scaled_subs": (subs, torch.float32),
        "raw_largest": (blocks, torch.float32),
        "raw_sum": (blocks, torch.float32),
        "raw_subs": (subs, torch.float32),
        "candidates": ((n_slots, 2, tiles.capacity), torch.int64),
        "found": ((n_slots, 2), torch.int32),
        "floor": ((n_slots, 2), torch.int32),
    }
    return {name: zeros(size, dtype, device) for name, (size, dtype) in sizes.items()}


@dataclass(frozen=True, slots=True)
class SamplerSizes:
    """What the three kernels are compiled for."""

    vocab: int
    n_tokens: int
    n_stops: int  # of a slot, at most, as the next two
    n_biases: int
    n_top: int
    words: int  # of a bit for each id
    n_blocks: int
    n_subs: int
    block_lanes: int  # as many or more, a power of two; as the next
    sub_lanes: int
    tiles: Tiles


_FIELDS: Final = {
    torch.float32: ("temperature", "top_p", "min_p", "repetition", "presence", "frequency"),
    torch.int32: ("top_k", "n_logprobs", "min_tokens", "n_stop", "n_bias", "penalised", "constrained"),
    torch.int64: ("seed",),
}


def bind_sample(
    logits: Tensor,
    table: SlotFields,
    workspace: Mapping[str, Tensor],
    rows: SampledRows,
    *,
    n_tokens: int,
    first: bool = False,
    tiles: Tiles | None = None,
) -> list[tuple[str, TritonLaunch]]:
    """Check everything once and return the launches in order, each with its name.

    Arguments as `sample_step_torch` has them, with n_rows int32 [1] on the device and the buffers that
    `sample_workspace` names for logits' rows. With `first`, `table` may be the admissions, in pinned host memory.
    """
    (n, vocab), device, tiles = logits.shape, logits.device, tiles or tiles_for(logits.shape[1])
    t = _checked_table(table, vocab, device, first)
    _check_rows(logits, rows, len(t["temperature"]), first)
    w = {
        name: checked(name, workspace[name], dtype=like.dtype, shape=like.shape, device=device)
        for name, like in sample_workspace(n, vocab, torch.device("meta"), tiles).items()
    }
    n_blocks, n_subs, row_lanes = tiles.n_blocks(vocab), tiles.n_subs(vocab), min(n, tiles.row_lanes)
    n_stops, n_biases, n_top, words = (
        tensor.shape[1] for tensor in (t["stop_ids"], t["bias_ids"], rows.top_ids, t["mask_bits"])
    )
    block_lanes, sub_lanes = (triton.next_power_of_2(n) for n in (n_blocks, n_subs))
    sizes = SamplerSizes(
        vocab, n_tokens, n_stops, n_biases, n_top, words, n_blocks, n_subs, block_lanes, sub_lanes, tiles
    )
    given = {"logits": logits, "rows": rows, "t": grouped(t), "w": grouped(w)}
    given |= {"S": sizes, "FIRST": first, "ROW_LANES": row_lanes}
    kernels = {
        "shape": (shape_kernel, (n_blocks, row_lanes), 4),
        "gather": (gather_kernel, (n_blocks, row_lanes), 4),
        "choose": (choose_kernel, (n,), 8),
    }
    # Fused multiply-adds would round penalties unlike the twin, and a tie could fall the other way.
    return [
        (name, TritonLaunch.of(kernel, grid, given, num_warps=num_warps, enable_fp_fusion=False))
        for name, (kernel, grid, num_warps) in kernels.items()
    ]


def _checked_table(table: SlotFields, vocab: int, device: torch.device, first: bool) -> dict[str, Tensor]:
    """The settings of all slots that the kernels read, each known to be what they take it for."""
    n_slots, words = table["temperature"].shape[0], triton.cdiv(vocab, 32)

    def field(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        tensor = table[name]
        place = tensor.device if first and tensor.is_pinned() else device
        return checked(name, tensor, dtype=dtype, shape=(n_slots, *shape), device=place)

    t = {name: field(name, dtype) for dtype, names in _FIELDS.items() for name in names}
    t["stop_ids"] = field("stop_ids", torch.int32, table["stop_ids"].shape[1])
    t["bias_ids"] = field("bias_ids", torch.int32, table["bias_ids"].shape[1])
    t["bias_values"] = field("bias_values", torch.float32, table["bias_ids"].shape[1])
    t["prompt_bits"] = field("prompt_bits", torch.int32, words)
    t["mask_bits"] = field("mask_bits", torch.int32, words)
    # Nothing reads these two at a first token; the kernel wants some pointer all the same.
    t["made"] = t["min_tokens"] if first else field("made", torch.int32)
    t["counts"] = t["prompt_bits"] if first else field("counts", torch.int32, vocab)
    return t


def _check_rows(logits: Tensor, given: SampledRows, n_slots: int, first: bool) -> None:
    """What comes in and goes out by row, checked the same way."""
    (rows, vocab), device = logits.shape, logits.device
    checked("logits", logits, dtype=torch.float32, shape=(rows, vocab), device=device)
    if logits.data_ptr() % 16:
        # Triton would load it otherwise and so add in another order: bits would depend on where a buffer lies.
        raise BadPointer(f"logits begin at {logits.data_ptr():#x}; sampling needs them aligned to 16 bytes")
    sizes = {
        "n_rows": (1,), "row_slot": (1,), "position": (n_slots,), "chosen": (rows,), "chosen_logprob": (rows,),
        "top_ids": (rows, given.top_ids.shape[1]), "top_logprobs": (rows, given.top_ids.shape[1]),
    }  # fmt: skip
    for name, size in sizes.items():
        tensor = getattr(given, name)
        place = tensor.device if name == "position" and first and tensor.is_pinned() else device
        dtype = torch.float32 if name.endswith(("logprob", "logprobs")) else torch.int32
        checked(name, tensor, dtype=dtype, shape=size, device=place)


_NO_KEY = tl.constexpr(-(2**63))  # below any packed candidate
_NO_ID = tl.constexpr(2**31 - 1)
_BANNED = tl.constexpr(-2139095041)  # the key of -inf; the lowest of a number is the next one up


@triton.jit
def _key(value):
    """float32 as int32 in the same order. Its own inverse, on bits."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unkey(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _packed(key, ids):
    """Key and id as one int64: the larger value is larger, the lower id of equals is, no two are alike."""
    return (key.to(tl.int64) << 32) | (ids ^ _NO_ID).to(tl.int64)


@triton.jit
def _asked_k(top_k, S: tl.constexpr):
    """top-k, or 0 where it keeps all."""
    k = tl.load(top_k)
    return tl.where(k < S.vocab, k, 0)


@triton.jit
def _unfiltered(k, p, least):
    return (k == 0) & (p >= 1) & (least == 0)


@triton.jit
def uniform(seed, position):
    """`philox.uniform_torch` of one seed and position, int64, as float64: the same 24 bits."""
    c0 = position & 0xFFFFFFFF
    c1 = (position >> 32) & 0xFFFFFFFF
    c2 = position * 0
    c3 = position * 0
    k0 = seed & 0xFFFFFFFF
    k1 = (seed >> 32) & 0xFFFFFFFF
    for _ in tl.static_range(10):
        # The product wraps in int64; its upper word is right all the same once the sign is masked off.
        one = c0 * 0xD2511F53
        two = c2 * 0xCD9E8D57
        c0 = ((two >> 32) & 0xFFFFFFFF) ^ c1 ^ k0
        c1 = two & 0xFFFFFFFF
        c2 = ((one >> 32) & 0xFFFFFFFF) ^ c3 ^ k1
        c3 = one & 0xFFFFFFFF
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return (c0 >> 8).to(tl.float64) * (1.0 / 16777216.0)


@triton.jit
def shape_kernel(logits, rows, t, w, S: tl.constexpr, FIRST: tl.constexpr, ROW_LANES: tl.constexpr):
    """One block of ids of each row: what is left of its logits, and the largest and sums that the others need."""
    SUB: tl.constexpr = S.tiles.sub
    BLOCK: tl.constexpr = S.tiles.block
    block = tl.program_id(0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < S.vocab
    sub = tl.arange(0, BLOCK // SUB)
    for lane in range(tl.program_id(1), tl.load(rows.n_rows), ROW_LANES):
        row = tl.full((), 0, tl.int64) + lane
        slot = tl.load(rows.row_slot + row).to(tl.int64)
        raw = tl.load(logits + row * S.vocab + ids, mask=inside, other=float("-inf"))
        # All loaded before any is asked, so that their waits are one.
        safe_temperature = tl.load(t.temperature + slot)
        k = _asked_k(t.top_k + slot, S)
        n_top = tl.load(t.n_logprobs + slot)
        is_penalised = tl.load(t.penalised + slot)
        n_biases = tl.load(t.n_bias + slot)
        n_stops = tl.load(t.n_stop + slot)
        n_least = tl.load(t.min_tokens + slot)
        is_constrained = tl.load(t.constrained + slot)
        n_made = 0
        if not FIRST:
            n_made = tl.load(t.made + slot)

        largest = tl.max(raw, 0)
        tl.store(w.raw_largest + row * S.n_blocks + block, largest)
        largest = tl.where(largest == float("-inf"), 0.0, largest)  # -inf less -inf would be NaN
        tl.store(w.raw_sum + row * S.n_blocks + block, tl.sum(tl.exp(raw - largest), 0))
        if block == 0:
            tl.store(w.found + row * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int32))
        if n_top > 0:
            tops = tl.max(tl.reshape(raw, (BLOCK // SUB, SUB)), 1)
            tl.store(w.raw_subs + row * S.n_subs + block * (BLOCK // SUB) + sub, tops)

        shaped = raw
        if is_penalised != 0:
            word = tl.load(t.prompt_bits + slot * S.words + (ids >> 5), mask=inside, other=0)
            seen = ((word >> (ids & 31)) & 1) != 0
            times = tl.zeros((BLOCK,), tl.int32)
            if not FIRST:
                times = tl.load(t.counts + slot * S.vocab + ids, mask=inside, other=0)
            factor = tl.where(seen | (times > 0), tl.load(t.repetition + slot), 1.0)
            shaped = tl.where(shaped > 0, tl.div_rn(shaped, factor), shaped * factor)
            shaped -= tl.where(times > 0, tl.load(t.presence + slot), 0.0)
            shaped -= tl.load(t.frequency + slot) * times.to(tl.float32)
        if n_biases > 0:
            # Most slots have none. The others go through all their pairs in every block: a scattering pass would
            # need a launch of its own, and entries for one id would have to find each other.
            bias = tl.zeros((BLOCK,), tl.float32)
            for i in range(0, n_biases):
                here = ids == tl.load(t.bias_ids + slot * S.n_biases + i)
                bias += tl.where(here, tl.load(t.bias_values + slot * S.n_biases + i), 0.0)
            shaped += bias
        if n_made < n_least:
            for i in range(0, n_stops):
                shaped = tl.where(ids == tl.load(t.stop_ids + slot * S.n_stops + i), float("-inf"), shaped)
        if is_constrained != 0:
            word = tl.load(t.mask_bits + slot * S.words + (ids >> 5), mask=inside, other=0)
            shaped = tl.where(((word >> (ids & 31)) & 1) != 0, shaped, float("-inf"))
        shaped = tl.where(ids < S.n_tokens, shaped, float("-inf"))

        top = tl.max(shaped, 0)
        if safe_temperature > 0:
            warm = tl.div_rn(shaped, tl.maximum(safe_temperature, 1e-6))
            warm = tl.where(warm == 0, 0.0, warm)  # no -0: its key would be below that of 0
            tl.store(w.scaled + row * S.vocab + ids, warm, mask=inside)
            tops = tl.max(tl.reshape(warm, (BLOCK // SUB, SUB)), 1)
            tl.store(w.scaled_subs + row * S.n_subs + block * (BLOCK // SUB) + sub, tops)
            top = tl.max(warm, 0)
            if k == 0:
                wide = tl.where(top == float("-inf"), 0.0, top).to(tl.float64)
                tl.store(w.scaled_sum + row * S.n_blocks + block, tl.sum(tl.exp(warm.to(tl.float64) - wide), 0))
        else:
            tl.store(w.best_id + row * S.n_blocks + block, tl.min(tl.where(shaped == top, ids, _NO_ID), 0))
        tl.store(w.best + row * S.n_blocks + block, top)


@triton.jit
def _collect(
    values, subs, wanted, p, least, candidates, found, floor, block, ids, LOWEST: tl.constexpr, S: tl.constexpr
):
    """Pack this block's ids from the row's floor up. Keys below LOWEST are never candidates.

    `p` and `least` are top-p and min-p. Whether the candidates suffice is for `_pick` to say.
    """
    lane = tl.arange(0, S.sub_lanes)
    tops = _key(tl.load(subs + lane, mask=lane < S.n_subs, other=float("-inf")))
    value = tl.load(values + ids, mask=ids < S.vocab, other=float("-inf"))
    tops = tl.where(lane < S.n_subs, tops, -(2**31))
    low = tl.full((), LOWEST, tl.int32)
    if tl.sum((tops >= low).to(tl.int32), 0) >= wanted:
        # As many as `wanted` subs reach `low`, and not so many reach `high`; every block finds the same.
        high = tl.max(tops, 0) + 1
        for _ in range(24):
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            enough = tl.sum((tops >= middle).to(tl.int32), 0) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    if least > 0:
        # min-p alone says where the kept ids end; a little lower, as this sum is rounded.
        bound = tl.maximum(_key(_unkey(tl.max(tops, 0)) + tl.log(least) - 0.01), LOWEST)
        low = tl.where(p < 1, tl.maximum(low, bound), bound)
    if block == 0:
        tl.store(floor, low)
    key = _key(tl.where(value == 0, 0.0, value))  # no -0: its key would be below that of 0
    hit = (key >= low) & (ids < S.vocab)
    n_hits = tl.sum(hit.to(tl.int32), 0)
    if n_hits > 0:
        place = tl.atomic_add(found, n_hits, sem="relaxed") + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(candidates + place, _packed(key, ids), mask=hit & (place < S.tiles.capacity))


@triton.jit
def gather_kernel(logits, rows, t, w, S: tl.constexpr, ROW_LANES: tl.constexpr):
    """The candidates of each row: list 0 of scaled logits for sampling, list 1 of raw ones for the most likely."""
    block = tl.program_id(0)
    ids = block * S.tiles.block + tl.arange(0, S.tiles.block)
    for lane in range(tl.program_id(1), tl.load(rows.n_rows), ROW_LANES):
        row = tl.full((), 0, tl.int64) + lane
        slot = tl.load(rows.row_slot + row).to(tl.int64)
        k = _asked_k(t.top_k + slot, S)
        p = tl.load(t.top_p + slot)
        least = tl.load(t.min_p + slot)
        if (tl.load(t.temperature + slot) > 0) & (_unfiltered(k, p, least) == 0):
            values, subs = w.scaled + row * S.vocab, w.scaled_subs + row * S.n_subs
            wanted = tl.where(k > 0, k, S.tiles.wanted)
            own_p, own_least = tl.where(k > 0, 0.0, p), tl.where(k > 0, 0.0, least)
            listed = w.candidates + row * 2 * S.tiles.capacity
            found, floor = w.found + row * 2, w.floor + row * 2
            _collect(values, subs, wanted, own_p, own_least, listed, found, floor, block, ids, _BANNED + 1, S)
        n_top = tl.load(t.n_logprobs + slot)
        if n_top > 0:
            values, subs = logits + row * S.vocab, w.raw_subs + row * S.n_subs
            listed = w.candidates + (row * 2 + 1) * S.tiles.capacity
            found, floor = w.found + row * 2 + 1, w.floor + row * 2 + 1
            _collect(values, subs, n_top, 1.0, 0.0, listed, found, floor, block, ids, _BANNED, S)


@triton.jit
def _sorted(candidates, n, SIZE: tl.constexpr):
    """The first n candidates, at most SIZE, as (key, id) in ranking order."""
    lane = tl.arange(0, SIZE)
    packed = tl.sort(tl.load(candidates + lane, mask=lane < n, other=_NO_KEY), descending=True)
    return (packed >> 32).to(tl.int32), (packed & 0xFFFFFFFF).to(tl.int32) ^ _NO_ID


@triton.jit
def _pick(candidates, n, floor, k, p, least, row_total, number, SIZE: tl.constexpr):
    """The twin's sampling over n sorted candidates: the token, and whether the candidates were enough to decide it.

    They are all ids from the key `floor` up, so they begin the ranking; and the kept ids are the ranking's first few.
    So all kept ids are known if the candidates are all ids that are not banned, or reach top-k, or if one of them is
    not kept, or the floor itself is too low for min-p.
    """
    p = p.to(tl.float64)
    least = least.to(tl.float64)
    lane = tl.arange(0, SIZE)
    key, ids = _sorted(candidates, n, SIZE)
    ranked = tl.where(lane < n, _unkey(key), float("-inf")).to(tl.float64)
    largest = tl.max(ranked, 0)
    weight = tl.where(lane < tl.where(k > 0, tl.minimum(k, n), n), tl.exp(ranked - largest), 0.0)
    share = weight / tl.where(k > 0, tl.sum(weight, 0), row_total)
    before = tl.cumsum(share, 0) - share
    kept = (before < p) & (share >= least * tl.max(share, 0)) & (share > 0)
    kept = kept | (lane == 0)
    n_kept = tl.sum(kept.to(tl.int32), 0)
    running = tl.cumsum(tl.where(kept, share, 0.0), 0)
    target = number * tl.max(running, 0)
    place = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), n_kept - 1)
    too_low = tl.exp(_unkey(floor).to(tl.float64) - largest) < least
    known = (floor == _BANNED + 1) | tl.where(k > 0, k <= n, (n_kept < n) | too_low)
    return tl.sum(tl.where(lane == place, ids, 0), 0), known.to(tl.int32)


@triton.jit
def _sample_unfiltered(scaled, tops, top, sums, number, S: tl.constexpr):
    """Sample from the whole row, in the order of ids: first the block, then the id in it."""
    block = tl.arange(0, S.block_lanes)
    share = sums * tl.exp(tops.to(tl.float64) - top)
    running = tl.cumsum(share, 0)
    target = number * tl.max(running, 0)
    # If rounding leads past the end, the last block with a nonzero probability.
    place = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), tl.max(tl.where(share > 0, block, 0), 0))
    target -= tl.sum(tl.where(block < place, share, 0.0), 0)

    lane = tl.arange(0, S.tiles.block)
    ids = place * S.tiles.block + lane
    value = tl.load(scaled + ids, mask=ids < S.vocab, other=float("-inf"))
    share = tl.exp(value.to(tl.float64) - top)
    passed = (tl.cumsum(share, 0) <= target).to(tl.int32)
    return place * S.tiles.block + tl.minimum(tl.sum(passed, 0), tl.max(tl.where(share > 0, lane, 0), 0))


@triton.jit
def _weighed(scaled, start, largest, least, COUNTING: tl.constexpr, S: tl.constexpr):
    """Keys of one chunk and their weights: 1 when counting, else exp(value - largest), 0 where that is below least."""
    ids = start + tl.arange(0, S.tiles.chunk)
    value = tl.load(scaled + ids, mask=ids < S.vocab, other=float("-inf"))
    weight = tl.exp(value - largest)
    weight = tl.where(weight >= least, weight, 0.0)
    if COUNTING:
        weight = tl.full((S.tiles.chunk,), 1.0, tl.float32)
    return _key(value), weight.to(tl.float64)


@triton.jit
def _search(scaled, largest, low, high, goal, least, COUNTING: tl.constexpr, S: tl.constexpr):
    """The largest key between low and high of which the weight of all keys from it up exceeds goal; low if none.

    Both are int64 and not looked at themselves. Three marks at once: a pass over the row settles two bits of the key.
    """
    CHUNK: tl.constexpr = S.tiles.chunk
    while high - low > 1:
        stride = (high - low + 3) // 4
        first = tl.zeros((CHUNK,), tl.float64)
        second = tl.zeros((CHUNK,), tl.float64)
        third = tl.zeros((CHUNK,), tl.float64)
        for start in range(0, S.vocab, CHUNK):
            key, weight = _weighed(scaled, start, largest, least, COUNTING, S)
            first += tl.where(key >= (low + stride).to(tl.int32), weight, 0.0)
            second += tl.where(key >= (low + 2 * stride).to(tl.int32), weight, 0.0)
            third += tl.where(key >= (low + 3 * stride).to(tl.int32), weight, 0.0)
        over = (tl.sum(first, 0) > goal).to(tl.int64) + (tl.sum(second, 0) > goal).to(tl.int64)
        low += stride * (over + (tl.sum(third, 0) > goal).to(tl.int64))
        high = tl.minimum(high, low + stride)
    return low


@triton.jit
def _above(scaled, largest, mark, least, S: tl.constexpr):
    """Weight and number of the keys above mark, and the number of those at it."""
    CHUNK: tl.constexpr = S.tiles.chunk
    weights = tl.zeros((CHUNK,), tl.float64)
    more = tl.zeros((CHUNK,), tl.int32)
    equal = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, S.vocab, CHUNK):
        key, weight = _weighed(scaled, start, largest, least, False, S)
        weights += tl.where(key > mark, weight, 0.0)
        more += (key > mark).to(tl.int32)
        equal += (key == mark).to(tl.int32)
    return tl.sum(weights, 0), tl.sum(more, 0), tl.sum(equal, 0)


@triton.jit
def _weight_at(mark, largest, least):
    weight = tl.exp(_unkey(mark.to(tl.int32)) - largest)
    return tl.where(weight >= least, weight, 0.0).to(tl.float64)


@triton.jit
def _sample_by_search(scaled, largest, k, p, least, number, S: tl.constexpr):
    """The twin's sampling by threshold searches over the whole row.

    What is kept is all keys above `edge`, and of the ids at it the lowest `at_edge`.
    """
    CHUNK: tl.constexpr = S.tiles.chunk
    bottom = tl.full((), _BANNED, tl.int64)
    ceiling = _key(largest).to(tl.int64) + 1
    edge = bottom
    at_edge = tl.full((), 0, tl.int32)
    if k > 0:
        edge = _search(scaled, largest, bottom, ceiling, k - 0.5, 0.0, True, S)
    mass, more, equal = _above(scaled, largest, edge, 0.0, S)
    if edge > bottom:
        at_edge = k - more
    if p < 1:
        goal = p.to(tl.float64) * (mass + at_edge.to(tl.float64) * _weight_at(edge, largest, 0.0))
        mark = _search(scaled, largest, tl.maximum(edge - 1, bottom), ceiling, goal, 0.0, False, S)
        if (mark >= edge) & (mark > bottom):
            mass, more, equal = _above(scaled, largest, mark, 0.0, S)
            # The id after j equals is kept while what came before it is short of the goal.
            reach = tl.ceil((goal - mass) / _weight_at(mark, largest, 0.0)).to(tl.int32)
            at_edge = tl.where(mark == edge, tl.minimum(at_edge, reach), reach)
            edge = mark
    if edge == ceiling - 1:
        at_edge = tl.maximum(at_edge, 1)  # the first of all is always kept
    mass, more, equal = _above(scaled, largest, edge, least, S)
    target = number * (mass + at_edge.to(tl.float64) * _weight_at(edge, largest, least))
    mark = _search(scaled, largest, tl.maximum(edge - 1, bottom), ceiling, target, least, False, S)
    mark = tl.maximum(mark, edge)
    mass, more, equal = _above(scaled, largest, mark, least, S)
    which = ((target - mass) / _weight_at(mark, largest, 0.0)).to(tl.int32)
    which = tl.minimum(which, tl.where(mark == edge, at_edge, equal) - 1)
    which = tl.maximum(which, 0)

    token = tl.full((), 0, tl.int32)
    passed = tl.full((), 0, tl.int32)
    for start in range(0, S.vocab, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        here = _key(tl.load(scaled + ids, mask=ids < S.vocab, other=float("-inf"))) == mark
        here = here & (ids < S.vocab)
        n_here = tl.sum(here.to(tl.int32), 0)
        if (passed <= which) & (which < passed + n_here):
            order = passed + tl.cumsum(here.to(tl.int32), 0) - 1
            token = tl.sum(tl.where(here & (order == which), ids, 0), 0)
        passed += n_here
    return token


@triton.jit
def choose_kernel(logits, rows, t, w, S: tl.constexpr):
    """One row: its token, that token's log-probability, and the most likely where they are asked for."""
    CHUNK: tl.constexpr = S.tiles.chunk
    CAPACITY: tl.constexpr = S.tiles.capacity
    SMALL: tl.constexpr = S.tiles.small
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(rows.n_rows):
        return
    slot = tl.load(rows.row_slot + row).to(tl.int64)
    # All loaded before any is asked, so that their waits are one; what `shape` and `gather` left out is not used.
    safe_temperature = tl.load(t.temperature + slot)
    k = _asked_k(t.top_k + slot, S)
    p = tl.load(t.top_p + slot)
    least = tl.load(t.min_p + slot)
    slot_seed = tl.load(t.seed + slot)
    place = tl.load(rows.position + slot).to(tl.int64) + rows.offset
    n_top = tl.minimum(tl.minimum(tl.load(t.n_logprobs + slot), S.n_top), S.vocab)
    n = tl.load(w.found + row * 2)
    n_likely = tl.load(w.found + row * 2 + 1)
    low = tl.load(w.floor + row * 2)
    block = tl.arange(0, S.block_lanes)
    there = block < S.n_blocks
    at = row * S.n_blocks + block
    tops = tl.load(w.best + at, mask=there, other=float("-inf"))
    firsts = tl.load(w.best_id + at, mask=there, other=_NO_ID)
    sums = tl.load(w.scaled_sum + at, mask=there, other=0.0)
    peaks = tl.load(w.raw_largest + at, mask=there, other=float("-inf"))
    raw_sums = tl.load(w.raw_sum + at, mask=there, other=0.0).to(tl.float64)

    top = tl.max(tops, 0)
    token = tl.full((), 0, tl.int32)
    if safe_temperature > 0:
        if top > float("-inf"):  # all banned: 0, as in the twin
            wide = top.to(tl.float64)
            number = uniform(slot_seed, place)
            if _unfiltered(k, p, least):
                token = _sample_unfiltered(w.scaled + row * S.vocab, tops, wide, sums, number, S)
            else:
                total = tl.sum(sums * tl.exp(tops.to(tl.float64) - wide), 0)
                listed = w.candidates + row * 2 * CAPACITY
                known = tl.full((), 0, tl.int32)
                if n <= SMALL:
                    token, known = _pick(listed, n, low, k, p, least, total, number, SMALL)
                elif n <= CAPACITY:
                    token, known = _pick(listed, n, low, k, p, least, total, number, CAPACITY)
                if known == 0:
                    token = _sample_by_search(w.scaled + row * S.vocab, top, k, p, least, number, S)
    else:
        token = tl.min(tl.where(tops == top, firsts, _NO_ID), 0)
    token = tl.minimum(tl.maximum(token, 0), S.n_tokens - 1)  # even if a logit is NaN, the id must be valid

    peak = tl.max(peaks, 0)
    spread = tl.log(tl.sum(raw_sums * tl.exp((peaks - peak).to(tl.float64)), 0)).to(tl.float32)
    tl.store(rows.chosen + row, token)
    tl.store(rows.chosen_logprob + row, tl.load(logits + row * S.vocab + token) - peak - spread)

    if n_top > 0:
        if (n_likely <= SMALL) & (n_likely >= n_top):
            lane = tl.arange(0, SMALL)
            key, ids = _sorted(w.candidates + (row * 2 + 1) * CAPACITY, n_likely, SMALL)
            tl.store(rows.top_ids + row * S.n_top + lane, ids, mask=lane < n_top)
            tl.store(rows.top_logprobs + row * S.n_top + lane, _unkey(key) - peak - spread, mask=lane < n_top)
        else:
            # So many equals that no list holds them: one pass over the row for each.
            last = tl.full((), 2**63 - 1, tl.int64)
            for i in range(0, n_top):
                most = tl.full((CHUNK,), _NO_KEY, tl.int64)
                for start in range(0, S.vocab, CHUNK):
                    ids = start + tl.arange(0, CHUNK)
                    value = tl.load(logits + row * S.vocab + ids, mask=ids < S.vocab, other=float("-inf"))
                    packed = _packed(_key(tl.where(value == 0, 0.0, value)), ids)
                    most = tl.maximum(most, tl.where((packed < last) & (ids < S.vocab), packed, _NO_KEY))
                last = tl.max(most, 0)
                tl.store(rows.top_ids + row * S.n_top + i, (last & 0xFFFFFFFF).to(tl.int32) ^ _NO_ID)
                value = _unkey((last >> 32).to(tl.int32))
                tl.store(rows.top_logprobs + row * S.n_top + i, value - peak - spread)
