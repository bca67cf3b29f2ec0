"""Latent attention's kernels against their twins and a float64 reference: steps and prompts, every store.

What a row must not read is poisoned with NaN, and a row's bits are compared across batches, slots, page tables,
numbers of programs and cuts of a prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ostinato.backends.cuda.chip import LEAST_TILE, heads_together, latent_cut
from ostinato.backends.cuda.triton.attend import MAX_SPLITS, SPLIT
from ostinato.backends.cuda.triton.attend_latent import bind_attend_latent, bind_attend_latent_chunk, latent_workspace
from ostinato.backends.cuda.triton.latent import bind_heads_product, bind_latent_rows
from ostinato.backends.machine import SHARED_BYTES, TUNED, Chip
from ostinato.backends.torch.ops.attend import StepRows
from ostinato.backends.torch.ops.chunk_attention import TILE_ROWS, Chunk
from ostinato.backends.torch.ops.latent import (
    LatentHeads,
    LatentKV,
    attend_latent_chunk_torch,
    attend_latent_torch,
    heads_product_torch,
    latent_rows_torch,
)
from ostinato.errors import BadOption, BadPointer, InternalError
from ostinato.lab.random_weights import random_blocks
from ostinato.models.rope import Pairing
from tests.backends.cuda.packing import pack
from tests.backends.cuda.triton.test_attend import STORES, TOLERANCE, bits, compile_launch
from tests.backends.cuda.triton.test_chunk_attention import ROUNDED, chunk_of, chunk_of_parts

CPU = torch.device("cpu")
SMALL = Chip((8, 9), 128, SHARED_BYTES[8, 9])


def latent_of(
    n_heads: int = 6, rank: int = 48, rotated: int = 16, plain: int = 20, pairing: Pairing = "neighbours"
) -> LatentHeads:
    """Widths that are no powers of two; those of Q8_0 are whole blocks."""
    frequencies = 10_000 ** -(torch.arange(0, rotated, 2).float() / rotated)
    norm = torch.rand(rank, generator=torch.Generator().manual_seed(9)) + 0.5
    scale = 1.3 * (plain + rotated) ** -0.5
    return LatentHeads(n_heads, rank, rotated, plain, scale, frequencies[None], norm, 1e-6, 1.1, pairing)


def for_store(store: str) -> LatentHeads:
    return latent_of(rank=96, rotated=32) if store == "q8_0" else latent_of()


def poisoned(cells: int, store: str, latent: LatentHeads, page_tokens: int = 64) -> LatentKV:
    if store != "q8_0":
        return LatentKV(torch.full((cells, latent.key_width), math.nan, dtype=STORES[store]), page_tokens)
    scales = torch.full((cells, latent.key_width // 32), math.nan, dtype=torch.float16)
    return LatentKV(torch.full((cells, latent.key_width), 99, dtype=torch.int8), page_tokens, scales)


def copied(kv: LatentKV) -> LatentKV:
    return LatentKV(kv.keys.clone(), kv.page_tokens, None if kv.scales is None else kv.scales.clone())


def parts(kv: LatentKV) -> list[Tensor]:
    return [kv.keys] if kv.scales is None else [kv.keys, kv.scales]


def same_store(a: LatentKV, b: LatentKV) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(parts(a), parts(b), strict=True))


@dataclass(frozen=True, slots=True)
class Step:
    heads: Tensor
    row: Tensor
    kv: LatentKV  # without the rows' own positions
    rows: StepRows
    latent: LatentHeads


def step_at(
    positions: tuple[int, ...],
    store: str = "f32",
    *,
    latent: LatentHeads | None = None,
    page_tokens: int = 64,
    n_slots: int | None = None,
    seed: int = 0,
) -> Step:
    """One sequence for each position, in slots and pages at random; each sequence depends on its position alone."""
    g, latent = torch.Generator().manual_seed(seed), latent or for_store(store)
    n = len(positions)
    n_slots = n_slots or n + 2
    max_pages = max(positions) // page_tokens + 2
    pages = torch.randperm(n_slots * max_pages, generator=g).view(n_slots, max_pages).int()
    slots = torch.randperm(n_slots, generator=g)[:n].sort().values
    position, row_slot = (torch.full((n_slots,), 12_345_678, dtype=torch.int32) for _ in range(2))
    position[slots], row_slot[:n] = torch.tensor(positions, dtype=torch.int32), slots.int()
    rows = StepRows(torch.tensor([n], dtype=torch.int32), row_slot, position, pages)
    kv = poisoned(n_slots * max_pages * page_tokens, store, latent, page_tokens)
    heads = torch.full((n_slots, latent.n_heads * latent.query_width), math.nan)
    row = torch.full((n_slots, latent.key_width), math.nan)
    for number, (slot, p) in enumerate(zip(slots, positions, strict=True)):
        own = torch.Generator().manual_seed(p)
        past = torch.randn(p, latent.key_width, generator=own)
        if p:
            kv.append(kv.cells(pages[slot], torch.arange(p)), past)
        heads[number] = torch.randn(heads.shape[1], generator=own)
        row[number] = torch.randn(latent.key_width, generator=own)
    return Step(heads, row, kv, rows, latent)


def run(step: Step, programs: int = 3, chip: Chip = TUNED) -> tuple[Tensor, Tensor, LatentKV]:
    """The rotated part of queries, what they have seen, and the store, as the kernels leave them; what would be
    absorbed is random, by row."""
    query, kv = queries(step), copied(step.kv)
    bind_latent_rows(step.heads, step.row, query, kv, step.rows, step.latent)()
    seen = torch.full((len(query), step.latent.n_heads * step.latent.rank), math.nan)
    workspace = latent_workspace(len(query), [step.latent], CPU)
    workspace.sums.fill_(math.nan)
    workspace.norms.fill_(math.nan)
    bind_attend_latent(query, seen, kv, step.rows, step.latent, workspace, programs, chip)()
    return query, seen, kv


def queries(step: Step) -> Tensor:
    """With absorbed parts that follow from the row's own numbers, and nothing in the place of rotated ones."""
    latent, n = step.latent, int(step.rows.n_rows)
    query = torch.full((len(step.heads), latent.n_heads, latent.key_width), math.nan)
    query[:n, :, latent.rotated :] = step.row[:n, None, : latent.rank].roll(1, -1) * torch.linspace(
        -1, 1, latent.n_heads
    ).view(1, -1, 1)
    return query.flatten(1)


@pytest.mark.parametrize("store", STORES)
def test_a_step_equals_the_twin_and_touches_nothing_else(store: str) -> None:
    step = step_at((0, 5, 63, 64, 200), store, page_tokens=16)
    n, latent = 5, step.latent
    query, seen, kv = run(step)
    twin_query, twin_kv, expected = queries(step), copied(step.kv), torch.full_like(seen, math.nan)
    latent_rows_torch(step.heads, step.row, twin_query, twin_kv, step.rows, latent)
    attend_latent_torch(twin_query, expected, twin_kv, step.rows, latent)
    torch.testing.assert_close(query, twin_query, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.isfinite(seen[:n]).all()
    assert (seen[:n] - expected[:n]).abs().max() <= TOLERANCE[store] * expected[:n].abs().max()
    assert torch.isnan(seen[n:]).all(), "a dead row was written"
    slots = step.rows.row_slot[:n].long()
    own = kv.cells(step.rows.pages[slots], step.rows.position[slots])
    got, want = kv.read(own), twin_kv.read(own)
    assert (got - want).abs().max() <= (1e-6 if store == "f32" else 2e-2) * want.abs().max()
    for part in (*parts(kv), *parts(twin_kv)):
        part[own] = 0
    assert same_store(kv, twin_kv), "a cell of another sequence was written"


@pytest.mark.parametrize("pairing", ["neighbours", "halves"])
def test_a_step_equals_float64(pairing: Pairing) -> None:
    """From the definition: rotate, norm, softmax over all positions, the row's own included."""
    step = step_at((70,), latent=latent_of(pairing=pairing))
    latent, p = step.latent, 70
    query, seen, kv = run(step)
    slot = int(step.rows.row_slot[0])
    keys = kv.keys[kv.cells(step.rows.pages[slot], torch.arange(p + 1))].double().numpy()
    row = step.row[0].double().numpy()
    compressed, turning = row[: latent.rank], row[latent.rank :]
    angles = p * latent.frequencies[0].double().numpy()
    rotation = latent.amplitude * np.exp(1j * angles)

    def rotate(x: np.ndarray) -> np.ndarray:
        half = len(x) // 2
        pairs = x[::2] + 1j * x[1::2] if pairing == "neighbours" else x[:half] + 1j * x[half:]
        turned = pairs * rotation
        both = (turned.real, turned.imag)
        return np.stack(both, -1).ravel() if pairing == "neighbours" else np.concatenate(both)

    normed = compressed / np.sqrt((compressed**2).mean() + latent.norm_eps) * latent.norm.double().numpy()
    np.testing.assert_allclose(keys[p], np.concatenate((rotate(turning), normed)), atol=2e-6)
    for head in range(latent.n_heads):
        before = step.heads[0].view(latent.n_heads, -1)[head, latent.plain :].double().numpy()
        q = query[0].view(latent.n_heads, -1)[head].double().numpy()
        np.testing.assert_allclose(q[: latent.rotated], rotate(before), atol=2e-6)
        scores = keys @ q * latent.scale
        weights = np.exp(scores - scores.max())
        expected = weights @ keys[:, latent.rotated :] / weights.sum()
        np.testing.assert_allclose(seen[0].view(latent.n_heads, -1)[head], expected, atol=3e-6)


def test_rows_of_two_rope_sets_are_rotated_each_by_its_own() -> None:
    """By slot in a step, by row in a chunk."""
    one = latent_of()
    both = replace(one, frequencies=torch.cat((one.frequencies, one.frequencies / 5)))
    step = step_at((7, 90), latent=both)
    rope_set = torch.full((4,), 66_666_666, dtype=torch.int32)
    rope_set[step.rows.row_slot[:2].long()] = torch.tensor([1, 0], dtype=torch.int32)
    in_step = replace(step.rows, rope_set=rope_set)
    in_chunk = replace(
        chunk_of_parts([7, 90], [1, 1], step.rows.pages[step.rows.row_slot[:2].long()], 4),
        rope_set=torch.tensor([1, 0, 5_555_555, 5_555_555], dtype=torch.int32),
    )
    for rows in (in_step, in_chunk):
        query, twin, kv, twin_kv = queries(step), queries(step), copied(step.kv), copied(step.kv)
        bind_latent_rows(step.heads, step.row, query, kv, rows, both)()
        latent_rows_torch(step.heads, step.row, twin, twin_kv, rows, both)
        torch.testing.assert_close(query, twin, rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(kv.keys, twin_kv.keys, rtol=1e-5, atol=1e-5, equal_nan=True)
    latent_rows_torch(step.heads, step.row, twin, twin_kv, step.rows, one)
    assert not torch.equal(query[:1, :16], twin[:1, :16])


@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.parametrize("store", ["f32", "bf16"])
def test_a_rows_bits_depend_on_nothing_but_its_own_sequence(store: str) -> None:
    positions = (3, 130, 64, 0)
    _, together, _ = run(step_at(positions, store, n_slots=9), programs=2)
    for number, p in enumerate(positions):
        for pages, programs, seed in ((64, 1, 5), (16, 4, 6)):
            _, alone, _ = run(step_at((p,), store, page_tokens=pages, seed=seed), programs=programs)
            assert torch.equal(bits(alone[0]), bits(together[number]))


@pytest.mark.usefixtures("sums_in_order")
def test_more_positions_than_splits_are_merged_as_the_twin_sums_them() -> None:
    """Splits that are longer than one block, and groups of heads that share no program."""
    latent = latent_of(n_heads=20, rank=16, rotated=16, plain=8)
    assert heads_together(20) == 10
    step = step_at((SPLIT * MAX_SPLITS + 7, 2), latent=latent)
    _, seen, kv = run(step, programs=5)
    expected = torch.full_like(seen, math.nan)
    query, twin_kv = queries(step), copied(step.kv)
    latent_rows_torch(step.heads, step.row, query, twin_kv, step.rows, latent)
    attend_latent_torch(query, expected, twin_kv, step.rows, latent)
    assert (seen[:2] - expected[:2]).abs().max() <= 3e-6 * expected[:2].abs().max()
    assert not same_store(kv, step.kv)


def test_a_step_without_rows_writes_nothing() -> None:
    step = step_at((5,))
    empty = replace(step, rows=replace(step.rows, n_rows=torch.zeros(1, dtype=torch.int32)))
    query, seen, kv = run(empty)
    assert torch.isnan(query).all()
    assert torch.isnan(seen).all()
    assert same_store(kv, step.kv)


# Products of heads


def weight_of(type: str, rows: int, cols: int) -> Any:
    dense = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if type in dense:
        return (torch.randn(rows, cols, generator=torch.Generator().manual_seed(1)) * cols**-0.5).to(dense[type])
    return pack(type, torch.from_numpy(random_blocks(type, rows, cols, np.random.default_rng(2))), rows, cols)


@pytest.mark.parametrize("step", [True, False])
@pytest.mark.parametrize(
    ("type", "cols"),
    [("F32", 20), ("BF16", 80), ("F16", 20), ("Q8_0", 32), ("Q4_0", 64), ("Q5_1", 96), ("Q4_K", 256), ("Q6_K", 256)],
)
def test_a_product_of_each_head_equals_the_twin(type: str, cols: int, step: bool) -> None:
    """Out of columns of wider rows into such columns; rows and outputs are no whole tiles."""
    n_heads, n, x_step, out_step, n_live = 3, 40, cols + 16, 56, 18
    weight = weight_of(type, n_heads * n, cols)
    dtype = torch.float32 if step or type == "F32" else torch.bfloat16
    x = torch.full((20, n_heads * x_step), math.nan, dtype=dtype)
    x[:n_live] = torch.randn(n_live, x.shape[1], generator=torch.Generator().manual_seed(3)).to(dtype)
    out, twin = torch.full((2, 20, n_heads * out_step), math.nan, dtype=dtype)
    how: dict[str, Any] = {"n_heads": n_heads, "x_step": x_step, "out_step": out_step}
    n_rows = torch.tensor([n_live], dtype=torch.int32)
    bind_heads_product(x, weight, out[:, 16:], n_rows, step=step, **how)()
    heads_product_torch(x, weight, twin[:, 16:], n_rows, **how)
    assert torch.equal(out.isnan(), twin.isnan())
    error = (out.float() - twin.float()).nan_to_num().abs().max()
    assert error <= ROUNDED[dtype] * twin.float().nan_to_num().abs().max()


@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.parametrize("type", ["BF16", "Q8_0"])
def test_a_products_rows_have_the_bits_they_have_alone(type: str) -> None:
    weight = weight_of(type, 3 * 40, 64)
    x = torch.randn(21, 3 * 64, generator=torch.Generator().manual_seed(3))
    how: dict[str, Any] = {"n_heads": 3, "x_step": 64, "out_step": 40}
    for step in (True, False):
        all_rows, one = torch.empty(21, 120), torch.empty(1, 120)
        bind_heads_product(x, weight, all_rows, torch.tensor([21], dtype=torch.int32), step=step, **how)()
        for row in (0, 15, 20):
            n_rows = torch.ones(1, dtype=torch.int32)
            bind_heads_product(x[row : row + 1].clone(), weight, one, n_rows, step=step, **how)()
            assert torch.equal(bits(one[0]), bits(all_rows[row]))


def test_buffers_that_are_too_narrow_are_refused_before_a_launch() -> None:
    one = torch.ones(1, dtype=torch.int32)
    how: dict[str, Any] = {"n_heads": 3, "x_step": 64, "out_step": 40, "step": True}
    x, out, weight = torch.zeros(4, 192), torch.zeros(4, 120), torch.zeros(120, 64)
    for given in ((x[:, :191], weight, out), (x, weight, out[:, 1:]), (x, torch.zeros(121, 64), out)):
        with pytest.raises(InternalError):
            bind_heads_product(*given, one, **how)
    step = step_at((5,))
    with pytest.raises(BadPointer):
        bind_latent_rows(step.heads, step.row, step.row, step.kv, step.rows, step.latent)
    bytes_of = poisoned(64, "q8_0", step.latent)
    with pytest.raises(InternalError, match="no whole blocks"):
        bind_latent_rows(step.heads, step.row, queries(step), bytes_of, step.rows, step.latent)
    with pytest.raises(BadOption, match="int8 keys need scales"):
        LatentKV(torch.zeros(4, 64, dtype=torch.int8), 64)


# Prompts


def prefilled(
    heads: Tensor, row: Tensor, cuts: list[int], rows: int, kv: LatentKV, pages: Tensor, latent: LatentHeads,
    chip: Chip = TUNED,
) -> tuple[Tensor, LatentKV]:  # fmt: skip
    """A whole prompt in chunks of these lengths, each padded to `rows`, by the kernels. Absorbed parts are zero."""
    kv, out, start = copied(kv), [], 0
    for n in cuts:
        chunk = chunk_of(start, n, pages, rows)
        own_heads, own_row = (torch.full((rows, x.shape[1]), math.nan, dtype=x.dtype) for x in (heads, row))
        own_heads[:n], own_row[:n] = heads[start : start + n], row[start : start + n]
        query = torch.zeros(rows, latent.n_heads * latent.key_width, dtype=heads.dtype)
        seen = torch.full((rows, latent.n_heads * latent.rank), math.nan, dtype=heads.dtype)
        bind_latent_rows(own_heads, own_row, query, kv, chunk, latent)()
        bind_attend_latent_chunk(query, seen, kv, chunk, latent, chip)()
        assert torch.isnan(seen[n:]).all()
        out.append(seen[:n].clone())
        start += n
    return torch.cat(out), kv


def prompt_of(n: int, latent: LatentHeads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(4)
    widths = latent.n_heads * latent.query_width, latent.key_width
    return tuple(torch.randn(n, width, generator=g).to(dtype) for width in widths)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("store", "dtype"),
    [("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.bfloat16), ("q8_0", torch.bfloat16)],
)
def test_every_row_of_a_chunk_equals_the_twin(store: str, dtype: torch.dtype) -> None:
    latent = replace(for_store(store), n_heads=2)
    pages = torch.randperm(4, generator=torch.Generator().manual_seed(1)).int()
    for start, n in ((0, 3), (61, 70)):
        kv = poisoned(4 * 64, store, latent)
        g = torch.Generator().manual_seed(start)
        if start:
            kv.append(kv.cells(pages, torch.arange(start)), torch.randn(start, latent.key_width, generator=g))
        heads, row = (torch.cat((x, torch.full((128 - n, x.shape[1]), math.nan))) for x in prompt_of(n, latent, dtype))
        heads, row = heads.to(dtype), row.to(dtype)
        query = torch.randn(128, 2 * latent.key_width, generator=g).to(dtype)
        twin_query, twin_kv, chunk = query.clone(), copied(kv), chunk_of(start, n, pages, 128)
        seen, twin = torch.full((2, 128, 2 * latent.rank), math.nan, dtype=dtype)
        bind_latent_rows(heads, row, query, kv, chunk, latent)()
        latent_rows_torch(heads, row, twin_query, twin_kv, chunk, latent)
        assert (query - twin_query).abs().max() <= ROUNDED[dtype] * twin_query.abs().max()
        bind_attend_latent_chunk(query, seen, kv, chunk, latent)()
        attend_latent_chunk_torch(query, twin, kv, chunk, latent)
        assert torch.isnan(seen[n:]).all()
        error = (seen[:n].float() - twin[:n].float()).abs().max()
        assert error <= (2 * TOLERANCE[store] + ROUNDED[dtype]) * twin[:n].float().abs().max()


@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.parametrize(("store", "dtype"), [("f32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_rows_bits_do_not_depend_on_how_the_prompt_is_cut(store: str, dtype: torch.dtype) -> None:
    """Nor on how many rows a chip has room for at once."""
    latent = replace(for_store(store), n_heads=2)
    kv, pages = poisoned(3 * 64, store, latent), torch.tensor([2, 0, 1], dtype=torch.int32)
    heads, row = prompt_of(110, latent, dtype)
    expected, expected_kv = prefilled(heads, row, [110], 128, kv, pages, latent)
    assert torch.isfinite(expected).all()
    smaller = replace(SMALL, shared_bytes=12_000)
    cut, wide = latent_cut(smaller, 80, kv.keys.element_size(), TILE_ROWS), latent_cut(TUNED, 80, 2, TILE_ROWS)
    assert (cut.rows, wide.rows) == (LEAST_TILE, TILE_ROWS)
    for cuts, rows, chip in (([64, 46], 64, TUNED), ([1, 62, 47], 128, smaller)):
        seen, filled = prefilled(heads, row, cuts, rows, kv, pages, latent, chip)
        assert torch.equal(bits(seen), bits(expected))
        assert same_store(filled, expected_kv)


@pytest.mark.usefixtures("sums_in_order")
def test_rows_beside_other_sequences_have_the_bits_they_have_alone() -> None:
    """Parts with a past and without one, shorter and longer than a tile, and more tiles than programs."""
    latent, starts, counts = latent_of(n_heads=1), [5, 0, 61, 0, 3, 2, 7], [3, 70, 6, 1, 2, 1, 1]
    kv = poisoned(len(starts) * 3 * 64, "f32", latent)
    pages = torch.randperm(3 * len(starts), generator=torch.Generator().manual_seed(2)).int().view(-1, 3)
    g = torch.Generator().manual_seed(7)
    for start, own in zip(starts, pages, strict=True):
        kv.append(kv.cells(own, torch.arange(start)), torch.randn(start, latent.key_width, generator=g))
    heads, row = prompt_of(sum(counts), latent, torch.float32)

    def attended(chunk: Chunk, kv: LatentKV, rows: slice) -> Tensor:
        n = rows.stop - rows.start
        query, seen = torch.zeros(n, latent.key_width), torch.empty(n, latent.rank)
        bind_latent_rows(heads[rows].clone(), row[rows].clone(), query, kv, chunk, latent)()
        bind_attend_latent_chunk(query, seen, kv, chunk, latent)()
        return seen

    alone_kv, alone, at = copied(kv), [], 0
    for start, n, own in zip(starts, counts, pages, strict=True):
        alone.append(attended(chunk_of(start, n, own, n), alone_kv, slice(at, at + n)))
        at += n
    chunk = chunk_of_parts(starts, counts, pages, at)
    assert int(chunk.n_tiles) > 2 * -(-at // TILE_ROWS)
    assert torch.equal(bits(attended(chunk, kv, slice(0, at))), bits(torch.cat(alone)))
    assert same_store(kv, alone_kv)


def test_a_chip_with_little_memory_takes_fewer_rows_and_the_same_positions() -> None:
    for item_bytes in (1, 2, 4):
        small, tuned = (latent_cut(chip, 576, item_bytes, TILE_ROWS) for chip in (SMALL, TUNED))
        assert small.block == tuned.block
        assert small.rows <= tuned.rows
        assert latent_cut(SMALL, 576, item_bytes, LEAST_TILE).block == tuned.block


def compile_all() -> None:
    latent, m = latent_of(n_heads=20, rank=512, rotated=64, plain=192), 64
    count, slots, pages = (torch.zeros(*size, dtype=torch.int32) for size in ((1,), (4,), (4, 8)))
    rows = StepRows(count, slots, slots, pages)
    chunk = chunk_of(0, 1, torch.arange(4, dtype=torch.int32), m)
    for store, amd in (("bf16", True), ("q8_0", False), ("f32", False)):
        dtype = torch.float32 if store == "f32" else torch.bfloat16
        kv = poisoned(4 * 64, store, latent)
        wide = [torch.zeros(m, width, dtype=dtype) for width in (20 * 256, 576, 20 * 576, 20 * 512)]
        many, key, absorbed, out = wide
        heads, row, query, seen = (x[:4].float() for x in wide)
        workspace = latent_workspace(4, [latent], CPU)
        compile_launch(bind_latent_rows(heads, row, query, kv, rows, latent), amd=amd)
        for launch in bind_attend_latent(query, seen, kv, rows, latent, workspace).parts:
            compile_launch(launch, amd=amd)
        compile_launch(bind_latent_rows(many, key, absorbed, kv, chunk, latent), amd=amd)
        compile_launch(bind_attend_latent_chunk(absorbed, out, kv, chunk, latent), amd=amd)
    one = torch.ones(1, dtype=torch.int32)
    how: dict[str, Any] = {"n_heads": 20, "x_step": 256, "out_step": 576}
    for type, amd in (("BF16", True), ("F16", False), ("F32", False), ("Q8_0", False), ("Q5_0", False)):
        weight = weight_of(type, 20 * 512, 192)
        compile_launch(bind_heads_product(heads, weight, query[:, 64:], one, step=True, **how), amd=amd)
        compile_launch(bind_heads_product(many, weight, absorbed[:, 64:], one, step=False, **how), amd=amd)
