"""How fast is attention in a step and in a prompt on a GPU, and is it what its twin computes?

    python -m bench.attention [--programs N] [--stages N]

First the checks, with fresh random inputs: a step whose rows stand at contexts from 1 to 32,768, for every type of the
store, against the twin; the same rows alone, in other rows and with other numbers of programs, to the bit; a prompt cut
in two ways, to the bit; embedding and norm. Then times, replayed from a CUDA graph over as many layers as keep the
second-level cache cold: microseconds, and the bytes of K and V that were read per second. Ends non-zero where a check
fails. Needs torch, triton and numpy; a minute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.note import as_json, command, versions
from bench.replay import replayed_us
from ostinato.backends.cuda.triton.add_norm import bind_add_norm
from ostinato.backends.cuda.triton.attend import attend_workspace, bind_attend
from ostinato.backends.cuda.triton.chunk_attention import bind_append_chunk, bind_chunk_attention
from ostinato.backends.cuda.triton.embed import bind_embed
from ostinato.backends.torch.ops.add_norm import add_norm_torch
from ostinato.backends.torch.ops.attend import Heads, PagedKV, StepRows, attend_torch
from ostinato.backends.torch.ops.chunk_attention import Chunk, chunk_attention_torch, chunk_tables
from ostinato.backends.torch.ops.embed import embed_torch
from ostinato.backends.torch.ops.matmul import n_stats, stats_torch

PAGE: Final = 64
N_SLOTS: Final = 32
CHECKED: Final = (1, 2, 63, 64, 65, 127, 128, 129, 500, 4096, 4097, 32_768)
TIMED: Final = (1, 128, 500, 4096, 32_768)
ROWS: Final = (1, 4, 16, 32)
STORES: Final = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "q8_0": torch.int8}
# Of the largest output: what rounding weights and values to the store's type costs.
TOLERANCE: Final = {"f32": 1e-5, "bf16": 8e-3, "f16": 1e-3, "q8_0": 8e-3}
LAUNCHES: Final = 32  # in a graph
COLD_BYTES: Final = 256 << 20  # K and V of the layers in a graph, so that none is still in the cache
POOL_BYTES: Final = 5 << 30


@dataclass(frozen=True, slots=True)
class Size:
    name: str
    n_heads: int
    n_kv_heads: int
    width: int


SIZES: Final = (Size("1B", 32, 8, 64), Size("8B", 32, 8, 128))


def heads_of(size: Size, device: torch.device) -> Heads:
    frequencies = 1 / 500_000 ** (torch.arange(0, size.width, 2, device=device).float()[None] / size.width)
    return Heads(size.n_heads, size.n_kv_heads, size.width, size.width**-0.5, frequencies=frequencies, pairing="halves")


def store_of(size: Size, store: str, cells: int, device: torch.device) -> PagedKV:
    """Random keys and values."""
    shape, dtype = (cells, size.n_kv_heads, size.width), STORES[store]
    if store != "q8_0":
        keys, values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        return PagedKV(keys, values, PAGE)
    keys, values = (torch.randint(-127, 128, shape, device=device, dtype=dtype) for _ in range(2))
    scales = [torch.rand((*shape[:2], size.width // 32), device=device).half() / 64 for _ in range(2)]
    return PagedKV(keys, values, PAGE, scales[0], scales[1])


def copied(kv: PagedKV) -> PagedKV:
    scales = [None if t is None else t.clone() for t in (kv.key_scales, kv.value_scales)]
    return PagedKV(kv.keys.clone(), kv.values.clone(), kv.page_tokens, scales[0], scales[1])


def rows_at(contexts: Sequence[int], device: torch.device) -> StepRows:
    """A row for each context, in slots and pages partition at random."""
    max_pages = -(-max(contexts) // PAGE)
    needed = [-(-c // PAGE) for c in contexts]
    partition = torch.randperm(sum(needed)).int()
    slots = torch.randperm(N_SLOTS)[: len(contexts)].sort().values
    pages = torch.zeros(N_SLOTS, max_pages, dtype=torch.int32)
    position = torch.zeros(N_SLOTS, dtype=torch.int32)
    row_slot = torch.zeros(N_SLOTS, dtype=torch.int32)
    row_slot[: len(contexts)] = slots.int()
    for slot, context, n in zip(slots, contexts, needed, strict=True):
        pages[slot, :n], partition = partition[:n], partition[n:]
        position[slot] = context - 1
    return StepRows(*(t.to(device) for t in (torch.tensor([len(contexts)]).int(), row_slot, position, pages)))


def chunk_of(start: int, n: int, pages: Tensor, rows: int) -> Chunk:
    """Rows of one sequence, in a chunk of so many."""
    placed = chunk_tables([start], [n])

    def padded(numbers: NDArray[np.int32], rows: int = rows) -> Tensor:
        out = torch.zeros(rows, *numbers.shape[1:], dtype=torch.int32)
        out[: len(numbers)] = torch.from_numpy(numbers)
        return out.to(pages.device)

    live, n_tiles = (padded(np.array([count], np.int32), 1) for count in (n, len(placed.tiles)))
    tables = (padded(placed.tiles), padded(placed.positions), padded(placed.parts))
    return Chunk(live, n_tiles, *tables, pages.unsqueeze(0))


# Checks


def check_step(size: Size, store: str, device: torch.device, contexts: Sequence[int] = CHECKED) -> list[str]:
    """What is wrong with a step of these contexts; nothing, one hopes."""
    heads, rows = heads_of(size, device), rows_at(contexts, device)
    kv = store_of(size, store, sum(-(-c // PAGE) for c in contexts) * PAGE, device)
    qkv = torch.randn(N_SLOTS, heads.n_columns, device=device)
    workspace = attend_workspace(N_SLOTS, [heads], device)
    n, faults = len(contexts), []
    twin = torch.full((N_SLOTS, size.n_heads * size.width), torch.nan, device=device)
    attend_torch(qkv, twin, copied(kv), rows, heads)
    outputs = []
    for programs in (None, 7, 1000):
        seen, mine = torch.full_like(twin, torch.nan), copied(kv)
        launch = bind_attend(qkv, seen, mine, rows, heads, workspace, programs)
        launch()
        launch()  # the counters must be ready again
        outputs.append(seen)
        if not torch.isnan(seen[n:]).all():
            faults.append(f"{size.name} {store}: a dead row was written")
    for row, context in enumerate(contexts):
        error = float((outputs[0][row] - twin[row]).abs().max() / twin[row].abs().max())
        if not error < TOLERANCE[store]:
            faults.append(f"{size.name} {store} context {context}: differs from the twin by {error:.1e}")
        if not all(torch.equal(outputs[0][row], other[row]) for other in outputs[1:]):
            faults.append(f"{size.name} {store} context {context}: the number of programs changes bits")
        one = replace(rows, n_rows=torch.ones_like(rows.n_rows), row_slot=rows.row_slot.roll(-row))
        alone = torch.empty_like(twin)
        bind_attend(qkv.roll(-row, 0), alone, copied(kv), one, heads, workspace)()
        if not torch.equal(alone[0], outputs[0][row]):
            faults.append(f"{size.name} {store} context {context}: neighbours change bits")
    return faults


def check_prompt(size: Size, store: str, device: torch.device, n_tokens: int = 700, start: int = 2000) -> list[str]:
    """A prompt after `start` random positions: against the twin, and cut in two ways."""
    heads = heads_of(size, device)
    dtype = torch.float32 if store == "f32" else torch.bfloat16
    n_pages = -(-(start + n_tokens) // PAGE)
    pages = torch.randperm(n_pages).int().to(device)
    kv = store_of(size, store, n_pages * PAGE, device)
    qkv = torch.randn(n_tokens, heads.n_columns, device=device).to(dtype)

    def prefilled(cuts: Sequence[int], bucket: int) -> tuple[Tensor, Tensor, PagedKV]:
        mine, out, turned, at = copied(kv), [], [], 0
        q = torch.empty(bucket, size.n_heads, size.width, device=device, dtype=dtype)
        seen = torch.empty(bucket, size.n_heads * size.width, device=device, dtype=dtype)
        padded = torch.full((bucket, heads.n_columns), torch.nan, device=device, dtype=dtype)
        for n in cuts:
            chunk = chunk_of(start + at, n, pages, bucket)
            padded[:n] = qkv[at : at + n]
            bind_append_chunk(padded, q, mine, chunk, heads)()
            bind_chunk_attention(q, seen, mine, chunk, heads)()
            out.append(seen[:n].clone())
            turned.append(q[:n].clone())
            at += n
        return torch.cat(out), torch.cat(turned), mine

    whole, q, filled = prefilled([n_tokens], -(-n_tokens // 64) * 64)
    other, _, _ = prefilled([n_tokens // 7, 1, n_tokens - n_tokens // 7 - 1], -(-n_tokens // 64) * 64 + 64)
    faults = [] if torch.equal(whole, other) else [f"{size.name} {store} prompt: where it is cut changes bits"]
    twin = torch.empty(16, size.n_heads * size.width, device=device, dtype=dtype)
    chunk_attention_torch(q[-16:], twin, filled, chunk_of(start + n_tokens - 16, 16, pages, 16), heads)
    error = float((whole[-16:].float() - twin.float()).abs().max() / twin.float().abs().max())
    limit = TOLERANCE[store] + (0 if dtype == torch.float32 else 8e-3)
    return faults if error < limit else [*faults, f"{size.name} {store} prompt: differs from the twin by {error:.1e}"]


def check_rest(device: torch.device, hidden: int = 2048, vocab: int = 1000) -> list[str]:
    """Embedding, and the norm after a block."""
    faults = []
    rows = rows_at([5, 6, 7], device)
    tokens = torch.randint(vocab, (N_SLOTS,), dtype=torch.int32, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        table = torch.randn(vocab, hidden, device=device).to(dtype)
        (x, twin_x), (stats, twin_stats) = (
            torch.zeros(2, N_SLOTS, *s, device=device) for s in ((hidden,), (n_stats(hidden), 2))
        )
        bind_embed(table, x, stats, rows, tokens, scale=45.3, positions=table)()
        embed_torch(table, twin_x, twin_stats, rows, tokens, scale=45.3, positions=table)
        if not torch.allclose(x, twin_x, rtol=1e-6, atol=1e-5) or not torch.allclose(
            stats, twin_stats, rtol=1e-4, atol=1e-2
        ):
            faults.append(f"embed {dtype}: differs from the twin")
        y, weight = torch.randn_like(x), torch.randn(hidden, device=device)
        bind_add_norm(x, y, stats_torch(y), weight, 1e-6, stats, rows)()
        add_norm_torch(twin_x, y, stats_torch(y), weight, 1e-6, twin_stats, rows)
        if not torch.allclose(x, twin_x, rtol=1e-5, atol=1e-5):
            faults.append("add_norm: differs from the twin")
    return faults


# Times


def layers_of(pool: PagedKV, cells: int) -> list[PagedKV]:
    """As many layers of so many cells as the pool holds."""

    def part(t: Tensor | None, at: int) -> Tensor | None:
        return None if t is None else t[at : at + cells]

    return [
        PagedKV(
            pool.keys[at : at + cells],
            pool.values[at : at + cells],
            PAGE,
            part(pool.key_scales, at),
            part(pool.value_scales, at),
        )
        for at in range(0, len(pool.keys) - cells + 1, cells)
    ]


def cell_bytes(kv: PagedKV) -> int:
    """Of one position of a layer: a key and a value of every head."""
    return sum(
        t[0].numel() * t.element_size() for t in (kv.keys, kv.values, kv.key_scales, kv.value_scales) if t is not None
    )


def time_steps(size: Size, store: str, device: torch.device, options: argparse.Namespace) -> list[dict[str, object]]:
    heads, workspace = heads_of(size, device), attend_workspace(N_SLOTS, [heads_of(size, device)], device)
    one = cell_bytes(store_of(size, store, 1, device))
    pool = store_of(size, store, POOL_BYTES // one // PAGE * PAGE, device)
    qkv = torch.randn(N_SLOTS, heads.n_columns, device=device)
    seen = torch.empty(N_SLOTS, size.n_heads * size.width, device=device)
    lines: list[dict[str, object]] = []
    for context in TIMED:
        for n_rows in ROWS:
            rows = rows_at([context] * n_rows, device)
            cells = -(-context // PAGE) * PAGE * n_rows
            layers = layers_of(pool, cells)[: max(1, min(LAUNCHES, COLD_BYTES // (cells * one) + 1))]
            n_launches = max(len(layers), LAUNCHES if context < 32_768 else 4)
            launches = [
                bind_attend(
                    qkv, seen, layers[i % len(layers)], rows, heads, workspace, options.programs, options.stages
                )
                for i in range(n_launches)
            ]
            us = replayed_us(launches, rounds=5)
            read = n_rows * context * one
            lines.append(
                {"what": f"{size.name} {store}", "rows": n_rows, "context": context, "us": us, "gb_s": read / us / 1e3}
            )
    return lines


def time_prompts(size: Size, device: torch.device) -> list[dict[str, object]]:
    heads, m = heads_of(size, device), 512
    lines: list[dict[str, object]] = []
    for start in (0, 3584, 32_256):
        n_pages = (start + m) // PAGE
        kv = store_of(size, "bf16", n_pages * PAGE, device)
        pages = torch.randperm(n_pages).int().to(device)
        chunk = chunk_of(start, m, pages, m)
        qkv = torch.randn(m, heads.n_columns, device=device).bfloat16()
        q = torch.empty(m, size.n_heads, size.width, device=device, dtype=torch.bfloat16)
        seen = torch.empty(m, size.n_heads * size.width, device=device, dtype=torch.bfloat16)
        append = replayed_us([bind_append_chunk(qkv, q, kv, chunk, heads)] * 8, rounds=5)
        attend = replayed_us([bind_chunk_attention(q, seen, kv, chunk, heads)] * 8, rounds=5)
        flops = 4 * size.n_heads * size.width * sum(start + i + 1 for i in range(m))
        where = {"rows": m, "context": start + m}
        lines.append({"what": f"{size.name} prompt: append", **where, "us": append, "gb_s": 0.0})
        lines.append(
            {
                "what": f"{size.name} prompt: attend, {flops / attend / 1e6:.0f} TFLOP/s",
                **where,
                "us": attend,
                "gb_s": 0.0,
            }
        )
    return lines


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here; this bench is for machines with one")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--programs", type=int, help="programs of a step's attention; four for each processor unless given"
    )
    parser.add_argument(
        "--stages", type=int, help="blocks of K and V under way at once; by the width of a head unless given"
    )
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda")
    faults = check_rest(device)
    for size in SIZES:
        for store in STORES:
            faults += check_step(size, store, device)
        for store in ("bf16", "q8_0"):
            faults += check_prompt(size, store, device)
        torch.cuda.empty_cache()
    for fault in faults:
        print("WRONG", fault)
    lines = [line for size in SIZES for line in time_steps(size, "bf16", device, options)]
    torch.cuda.empty_cache()
    lines += time_steps(SIZES[1], "q8_0", device, options)
    lines += [line for size in SIZES for line in time_prompts(size, device)]
    facts = {"programs": options.programs, "stages": options.stages, "faults": faults, "lines": lines}
    versions_here, device_name = versions("torch", "triton"), torch.cuda.get_device_name()
    print(as_json("how fast is attention?", command("bench.attention"), versions_here, device_name, **facts))
    print(f"{'':34} {'rows':>5} {'context':>8} {'us':>9} {'GB/s':>7}")
    for line in lines:
        print(f"{line['what']:34} {line['rows']:>5} {line['context']:>8} {line['us']:>9.2f} {line['gb_s']:>7.0f}")
    print("all checks passed" if not faults else f"{len(faults)} checks FAILED, see WRONG above")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
