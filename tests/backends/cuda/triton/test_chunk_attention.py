"""A prompt's attention against its twin, and its bits against every way to cut the prompt."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.backends.cuda.chip import chunk_block, chunk_rows
from ostinato.backends.cuda.triton.chunk_attention import bind_append_chunk, bind_chunk_attention
from ostinato.backends.machine import SHARED_BYTES, TUNED, Capability, Chip
from ostinato.backends.torch.ops.attend import Heads, PagedKV
from ostinato.backends.torch.ops.chunk_attention import (
    TILE_ROWS,
    Chunk,
    append_chunk_torch,
    chunk_attention_torch,
    chunk_tables,
)
from ostinato.models.rope import Pairing
from tests.backends.cuda.triton.test_attend import (
    STORES,
    Case,
    bits,
    compile_launch,
    copied,
    parts,
    poisoned,
    same_store,
)

# Of the largest output, by the type of q and by the store: what is rounded to them.
ROUNDED = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
TOLERANCE = {"f32": 3e-6, "bf16": 5e-3, "f16": 5e-4, "q8_0": 5e-3}


def heads_of(
    n_heads: int,
    width: int,
    *,
    normed: bool = False,
    n_rotary: int | None = None,
    pairing: Pairing = "halves",
    softcap: float | None = None,
    window: int | None = None,
) -> Heads:
    g = torch.Generator().manual_seed(9)
    n_rotary = width if n_rotary is None else n_rotary
    return Heads(
        n_heads,
        1,
        width,
        scale=width**-0.5,
        softcap=softcap,
        window=window,
        frequencies=1 / 10_000 ** (torch.arange(0, n_rotary, 2).float()[None] / n_rotary),
        pairing=pairing,
        q_norm=torch.rand(width, generator=g) + 0.5 if normed else None,
        k_norm=torch.rand(width, generator=g) + 0.5 if normed else None,
    )


def store_of(store: str, width: int, n_pages: int, page_tokens: int = 64) -> tuple[PagedKV, Tensor]:
    """A store without any write yet, NaN everywhere, and a sequence's pages in it."""
    pages = torch.randperm(n_pages + 3, generator=torch.Generator().manual_seed(1))[:n_pages].int()
    kv = poisoned(
        (n_pages + 3) * page_tokens, Case((0,), n_kv_heads=1, width=width, store=store, page_tokens=page_tokens)
    )
    return kv, pages


def chunk_of(start: int, n: int, pages: Tensor, rows: int) -> Chunk:
    return chunk_of_parts([start], [n], pages.unsqueeze(0), rows)


def chunk_of_parts(starts: list[int], counts: list[int], pages: Tensor, rows: int) -> Chunk:
    """Parts of so many rows from these positions on; rows beyond the live ones belong to no part."""
    placed = chunk_tables(starts, counts)

    def padded(numbers: NDArray[np.int32]) -> Tensor:
        out = torch.full((rows, *numbers.shape[1:]), -1_000_000, dtype=torch.int32)
        out[: len(numbers)] = torch.from_numpy(numbers)
        return out

    live, n_tiles = (torch.tensor([n], dtype=torch.int32) for n in (sum(counts), len(placed.tiles)))
    return Chunk(live, n_tiles, padded(placed.tiles), padded(placed.positions), padded(placed.parts), pages)


def prefilled(
    qkv: Tensor, cuts: list[int], rows: int, kv: PagedKV, pages: Tensor, heads: Heads, chip: Chip = TUNED
) -> tuple[Tensor, PagedKV]:
    """Run a whole prompt in chunks of these lengths, each padded to `rows`, by the kernels."""
    kv = copied(kv)
    q = torch.full((rows, heads.n_heads, heads.head_width), math.nan, dtype=qkv.dtype)
    seen = torch.full((rows, heads.n_heads * heads.head_width), math.nan, dtype=qkv.dtype)
    padded = torch.full((rows, qkv.shape[1]), math.nan, dtype=qkv.dtype)
    out, start = [], 0
    for n in cuts:
        chunk = chunk_of(start, n, pages, rows)
        padded.fill_(math.nan)
        padded[:n] = qkv[start : start + n]
        bind_append_chunk(padded, q.fill_(math.nan), kv, chunk, heads)()
        bind_chunk_attention(q, seen.fill_(math.nan), kv, chunk, heads, chip)()
        assert torch.isnan(q[n:]).all()
        assert torch.isnan(seen[n:]).all()
        out.append(seen[:n].clone())
        start += n
    return torch.cat(out), kv


@pytest.mark.parametrize("reads_kv", [False, True])
def test_normed_values_are_appended_and_those_of_another_layer_stay(reads_kv: bool) -> None:
    heads = replace(heads_of(3, 96, normed=True), value_norm=True, reads_kv=reads_kv)
    kv, pages = store_of("f32", 96, 5, page_tokens=16)
    chunk = chunk_of(13, 22, pages, 48)
    qkv = torch.full((48, heads.n_columns), math.nan)
    qkv[:22] = torch.randn(22, heads.n_columns, generator=torch.Generator().manual_seed(2))
    q, twin_q = torch.full((2, 48, 3, 96), math.nan)
    before, twin_kv = copied(kv), copied(kv)
    bind_append_chunk(qkv, q, kv, chunk, heads)()
    append_chunk_torch(qkv, twin_q, twin_kv, chunk, heads)
    torch.testing.assert_close(q, twin_q, equal_nan=True)
    torch.testing.assert_close(kv.values, twin_kv.values, equal_nan=True)
    assert same_store(kv, before) == reads_kv


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_appending_equals_the_twin_and_writes_no_other_cell(store: str, dtype: torch.dtype) -> None:
    heads = heads_of(3, 96, normed=True, n_rotary=64, pairing="neighbours")
    kv, pages = store_of(store, 96, 5, page_tokens=16)
    chunk = chunk_of(13, 22, pages, 48)
    qkv = torch.full((48, heads.n_columns), math.nan, dtype=dtype)
    qkv[:22] = torch.randn(22, heads.n_columns, generator=torch.Generator().manual_seed(2)).to(dtype)
    q, twin_q = torch.full((2, 48, 3, 96), math.nan, dtype=dtype)
    twin_kv = copied(kv)
    bind_append_chunk(qkv, q, kv, chunk, heads)()
    append_chunk_torch(qkv, twin_q, twin_kv, chunk, heads)
    assert torch.isnan(q[22:]).all()
    assert (q[:22] - twin_q[:22]).abs().max() <= ROUNDED[dtype] * twin_q[:22].abs().max()
    own = kv.cells(pages, torch.arange(13, 35))
    for got, want in zip(kv.read(own), twin_kv.read(own), strict=True):
        assert (got - want).abs().max() <= (1e-6 if store == "f32" else 2e-2) * want.abs().max()
    for part in (*parts(kv), *parts(twin_kv)):
        part[own] = 0
    assert same_store(kv, twin_kv)


def test_parts_of_two_rope_sets_are_rotated_each_by_its_own() -> None:
    heads = heads_of(2, 32)
    assert heads.frequencies is not None
    both = torch.cat((heads.frequencies, heads.frequencies / 5))
    rope_set = torch.tensor([0] * 20 + [1] * 25 + [-1_000_000] * 3, dtype=torch.int32)
    qkv = torch.randn(48, heads.n_columns, generator=torch.Generator().manual_seed(2))
    kv, pages = store_of("f32", 32, 5, page_tokens=16)
    chunk = replace(chunk_of_parts([13, 0], [20, 25], torch.stack((pages, pages.roll(3))), 48), rope_set=rope_set)

    def appended(heads: Heads, append: Any) -> Tensor:
        q = torch.zeros(48, 2, 32)
        append(qkv, q, copied(kv), chunk, heads)
        return q[:45]

    found = appended(replace(heads, frequencies=both), lambda *given: bind_append_chunk(*given)())
    twin = appended(replace(heads, frequencies=both), append_chunk_torch)
    assert (found - twin).abs().max() < 3e-6 * twin.abs().max()
    alone = [
        appended(replace(heads, frequencies=each[None]), lambda *given: bind_append_chunk(*given)()) for each in both
    ]
    assert torch.equal(found, torch.cat((alone[0][:20], alone[1][20:])))
    assert not torch.equal(found, alone[0])


@pytest.mark.parametrize(
    ("store", "dtype", "group", "width"),
    [
        ("f32", torch.float32, 2, 16),
        ("bf16", torch.bfloat16, 4, 64),
        ("f16", torch.float16, 1, 96),
        ("q8_0", torch.bfloat16, 2, 32),
        ("bf16", torch.float32, 1, 256),
    ],
)
def test_every_row_of_a_chunk_equals_the_twin(store: str, dtype: torch.dtype, group: int, width: int) -> None:
    heads = heads_of(group, width)
    for start, n in ((0, 3), (61, 70)):
        kv, pages = store_of(store, width, 4)
        g = torch.Generator().manual_seed(start)
        kv.append(kv.cells(pages, torch.arange(start + n)), *torch.randn(2, start + n, 1, width, generator=g))
        q = torch.full((128, group, width), math.nan, dtype=dtype)
        q[:n] = torch.randn(n, group, width, generator=g).to(dtype)
        seen, twin = torch.full((2, 128, group * width), math.nan, dtype=dtype)
        bind_chunk_attention(q, seen, kv, chunk_of(start, n, pages, 128), heads)()
        chunk_attention_torch(q, twin, kv, chunk_of(start, n, pages, 128), heads)
        assert torch.isnan(seen[n:]).all()
        error = (seen[:n].float() - twin[:n].float()).abs().max()
        assert error <= (TOLERANCE[store] + ROUNDED[dtype]) * twin[:n].float().abs().max()


@pytest.mark.parametrize("sink", [None, 1.5, 40.0])
@pytest.mark.parametrize("window", [None, 1, 50, 64, 65])
def test_windows_caps_and_sinks_equal_float64(window: int | None, sink: float | None) -> None:
    sinks = None if sink is None else torch.tensor([sink])
    heads = replace(heads_of(1, 16, softcap=3.0, window=window), sinks=sinks)
    kv, pages = store_of("f32", 16, 3)
    g = torch.Generator().manual_seed(4)
    k, v, q = torch.randn(3, 150, 1, 16, generator=g)
    first = 0 if window is None else 90 - window + 1  # what no row sees stays NaN
    kv.append(kv.cells(pages, torch.arange(first, 150)), k[first:], v[first:])
    seen = torch.empty(64, 16)
    bind_chunk_attention(q[90:].contiguous(), seen, kv, chunk_of(90, 60, pages, 60), heads)()
    scores = torch.tanh(q[90:, 0].double() @ k[:, 0].double().T * heads.scale / 3) * 3
    there, at = torch.arange(150), torch.arange(90, 150).unsqueeze(-1)
    allowed = (there <= at) & (there > at - (window or 1000))
    scores = scores.masked_fill(~allowed, -math.inf)
    if sink is not None:
        scores = torch.cat((scores, torch.full((60, 1), sink).double()), -1)
    expected = scores.softmax(-1)[:, :150] @ v[:, 0].double()
    assert (seen[:60] - expected).abs().max() < 2e-6


@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.parametrize(
    ("store", "dtype", "window"),
    [
        ("f32", torch.float32, None),
        pytest.param("bf16", torch.bfloat16, 40, marks=pytest.mark.slow),
        pytest.param("q8_0", torch.bfloat16, None, marks=pytest.mark.slow),
    ],
)
def test_a_rows_bits_do_not_depend_on_how_the_prompt_is_cut(store: str, dtype: torch.dtype, window: int | None) -> None:
    heads = heads_of(2, 32, normed=True, window=window)
    kv, pages = store_of(store, 32, 4)
    qkv = torch.randn(150, heads.n_columns, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected, expected_kv = prefilled(qkv, [150], 192, kv, pages, heads)
    assert torch.isfinite(expected).all()
    for cuts, rows in (([64, 64, 22], 64), ([1, 62, 2, 85], 128)):
        seen, filled = prefilled(qkv, cuts, rows, kv, pages, heads)
        assert torch.equal(bits(seen), bits(expected))
        assert same_store(filled, expected_kv)


@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.slow
def test_the_widest_heads_in_smaller_blocks_are_near_the_larger_and_do_not_depend_on_the_cut() -> None:
    """On a chip whose blocks have little shared memory."""
    chip, heads = Chip((8, 9), 128, SHARED_BYTES[8, 9]), heads_of(1, 256)
    kv, pages = store_of("f32", 256, 2)
    qkv = torch.randn(70, heads.n_columns, generator=torch.Generator().manual_seed(5))
    seen, _ = prefilled(qkv, [70], 128, kv, pages, heads, chip)
    apart, _ = prefilled(qkv, [33, 37], 64, kv, pages, heads, chip)
    assert torch.equal(bits(apart), bits(seen))
    larger, _ = prefilled(qkv, [70], 128, kv, pages, heads)
    assert not torch.equal(bits(larger), bits(seen))  # which is why the digest names it
    assert (larger - seen).abs().max() <= TOLERANCE["f32"] * larger.abs().max()
    assert torch.isfinite(seen).all()


@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_a_chip_without_room_for_64_queries_takes_fewer_at_once_to_the_same_bits(capability: Capability) -> None:
    chip, heads = Chip(capability, 128, SHARED_BYTES[capability]), heads_of(1, 512)
    assert chunk_rows(chip, 512, 4) < chunk_rows(TUNED, 512, 4) == TILE_ROWS
    assert chunk_block(chip, 512, 4) == chunk_block(TUNED, 512, 4)
    kv, pages = store_of("f32", 512, 2)
    qkv = torch.randn(70, heads.n_columns, generator=torch.Generator().manual_seed(5))
    expected, _ = prefilled(qkv, [70], 128, kv, pages, heads)
    for cuts in ([70], [33, 37], [1, 69]):
        seen, _ = prefilled(qkv, cuts, 128, kv, pages, heads, chip)
        assert torch.equal(bits(seen), bits(expected))


@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.parametrize(
    ("store", "dtype", "window"),
    [("f32", torch.float32, None), pytest.param("q8_0", torch.bfloat16, 40, marks=pytest.mark.slow)],
)
def test_rows_beside_other_sequences_have_the_bits_they_have_alone(
    store: str, dtype: torch.dtype, window: int | None
) -> None:
    """Parts with a past and without one, shorter and longer than a tile, and more tiles than programs."""
    heads = heads_of(2, 32, normed=True, window=window)
    starts, counts = [5, 0, 61, 0, 130, 3], [3, 70, 6, 1, 2, 4]
    kv, pages = store_of(store, 32, 3 * len(starts))
    pages = pages.view(len(starts), 3)
    g = torch.Generator().manual_seed(7)
    for start, own in ((start, own) for start, own in zip(starts, pages, strict=True) if start):
        kv.append(kv.cells(own, torch.arange(start)), *torch.randn(2, start, 1, 32, generator=g))
    qkv = torch.randn(sum(counts), heads.n_columns, generator=g).to(dtype)
    alone_kv, twin_kv, out, row = copied(kv), copied(kv), [], 0
    for start, n, own in zip(starts, counts, pages, strict=True):
        q, seen = torch.empty(n, 2, 32, dtype=dtype), torch.empty(n, 64, dtype=dtype)
        chunk = chunk_of(start, n, own, n)
        bind_append_chunk(qkv[row : row + n].contiguous(), q, alone_kv, chunk, heads)()
        bind_chunk_attention(q, seen, alone_kv, chunk, heads)()
        out.append(seen)
        row += n
    q, seen, twin = torch.empty(row, 2, 32, dtype=dtype), *torch.empty(2, row, 64, dtype=dtype)
    chunk = chunk_of_parts(starts, counts, pages, row)
    assert int(chunk.n_tiles) > 2 * -(-row // TILE_ROWS)
    bind_append_chunk(qkv, q, kv, chunk, heads)()
    bind_chunk_attention(q, seen, kv, chunk, heads)()
    assert torch.equal(bits(seen), bits(torch.cat(out)))
    assert same_store(kv, alone_kv)
    append_chunk_torch(qkv, q, twin_kv, chunk, heads)
    chunk_attention_torch(q, twin, twin_kv, chunk, heads)
    limit = (TOLERANCE[store] + ROUNDED[dtype]) * float(twin.float().abs().max())
    assert float((seen.float() - twin.float()).abs().max()) <= limit


def test_an_empty_chunk_writes_nothing() -> None:
    heads = heads_of(1, 16)
    kv, pages = store_of("f32", 16, 2)
    before = copied(kv)
    qkv = torch.zeros(64, heads.n_columns)
    q, seen = torch.full((64, 1, 16), math.nan), torch.full((64, 16), math.nan)
    bind_append_chunk(qkv, q, kv, chunk_of(5, 0, pages, 64), heads)()
    bind_chunk_attention(q, seen, kv, chunk_of(5, 0, pages, 64), heads)()
    assert torch.isnan(q).all()
    assert torch.isnan(seen).all()
    assert same_store(kv, before)


def compile_all() -> None:
    for n_heads, width, store, dtype, amd in (
        (4, 64, "bf16", torch.bfloat16, True),
        (2, 128, "q8_0", torch.bfloat16, False),
        (2, 256, "bf16", torch.bfloat16, False),
        (2, 128, "f32", torch.float32, False),
        (8, 512, "bf16", torch.bfloat16, False),
    ):
        sinks = torch.zeros(n_heads) if n_heads == 4 else None
        heads = replace(heads_of(n_heads, width, normed=True), softcap=30.0, window=1024, sinks=sinks)
        if width == 512:
            heads = replace(heads, value_norm=True, softcap=None, window=None)
        if width == 256:
            heads = replace(heads, norm_last=True, temperature=(0.1, 64), gated=True, gates_apart=True)
        kv, pages = store_of(store, width, 4)
        chunk = chunk_of(0, 1, pages, 64)
        if store == "f32":  # and two rope sets
            heads = replace(heads, frequencies=torch.ones(2, width // 2))
            chunk = replace(chunk, rope_set=torch.zeros(64, dtype=torch.int32))
        qkv = torch.zeros(64, heads.n_columns, dtype=dtype)
        q, seen = torch.zeros(64, n_heads, width, dtype=dtype), torch.zeros(64, n_heads * width, dtype=dtype)
        compile_launch(bind_append_chunk(qkv, q, kv, chunk, heads), amd=amd)
        compile_launch(bind_chunk_attention(q, seen, kv, chunk, heads), amd=amd)
