"""What a step takes in, against its twin and the model's own embedding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ostinato.backends.cuda.packed import Packed
from ostinato.backends.cuda.packed_types import PACKED_TYPES
from ostinato.backends.cuda.triton.embed import bind_embed
from ostinato.backends.torch.ops.attend import StepRows
from ostinato.backends.torch.ops.embed import embed_torch
from ostinato.backends.torch.ops.matmul import PreparedInput, n_stats
from ostinato.errors import BadPointer
from ostinato.files.quants import BLOCKS
from tests.backends.cuda.packing import pack
from tests.backends.cuda.triton.test_attend import bits, compile_launch

HIDDEN, VOCAB = 600, 50
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def table_of(dtype: torch.dtype, rows: int = VOCAB, hidden: int = HIDDEN, seed: int = 0) -> Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_of(slots: list[int], n_slots: int) -> StepRows:
    """A row for each of these slots; what dead slots and rows hold would be far out of bounds."""
    row_slot = torch.full((n_slots,), 77_777_777, dtype=torch.int32)
    row_slot[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
    position = torch.full((n_slots,), 88_888_888, dtype=torch.int32)
    position[slots] = torch.arange(len(slots), dtype=torch.int32) * 3
    return StepRows(
        torch.tensor([len(slots)], dtype=torch.int32), row_slot, position, torch.zeros(n_slots, 1, dtype=torch.int32)
    )


def tokens_of(ids: list[int], slots: list[int], n_slots: int) -> Tensor:
    tokens = torch.full((n_slots,), 99_999_999, dtype=torch.int32)
    tokens[slots] = torch.tensor(ids, dtype=torch.int32)
    return tokens


def room(n_slots: int, hidden: int = HIDDEN) -> tuple[Tensor, Tensor]:
    return torch.full((n_slots, hidden), math.nan), torch.full((n_slots, n_stats(hidden), 2), math.nan)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", [None, HIDDEN**0.5])
def test_it_equals_the_twin_and_leaves_dead_rows_alone(dtype: torch.dtype, scale: float | None) -> None:
    table, rows, tokens = table_of(dtype), rows_of([1, 3, 4], 6), tokens_of([49, 0, 7], [1, 3, 4], 6)
    (x, stats), (twin_x, twin_stats) = room(6), room(6)
    positions = table_of(dtype, rows=8, seed=1)
    ready, twin_ready = torch.full((2, 6, HIDDEN), math.nan, dtype=torch.bfloat16)
    weight = torch.rand(HIDDEN)
    bind_embed(table, x, stats, rows, tokens, scale=scale, positions=positions, prepared=PreparedInput(ready, weight))()
    embed_torch(
        table,
        twin_x,
        twin_stats,
        rows,
        tokens,
        scale=scale,
        positions=positions,
        prepared=PreparedInput(twin_ready, weight),
    )
    assert torch.equal(x[:3], twin_x[:3])
    assert torch.allclose(stats[:3], twin_stats[:3], rtol=1e-5, atol=1e-4)
    assert torch.equal(ready[:3], twin_ready[:3])
    for written in (x, stats, ready):
        assert torch.isnan(written[3:]).all()


def test_the_scale_is_rounded_as_the_model_rounds_it() -> None:
    table, rows, tokens = table_of(torch.bfloat16), rows_of([0], 1), tokens_of([5], [0], 1)
    x, stats = room(1)
    bind_embed(table, x, stats, rows, tokens, scale=59.7)()
    assert torch.equal(x[0], (table[5] * torch.tensor(59.7, dtype=torch.bfloat16)).float())


def test_a_rows_bits_do_not_depend_on_its_slot_or_number() -> None:
    table = table_of(torch.bfloat16)
    (x, stats), (one_x, one_stats) = room(6), room(1)
    rows = replace(rows_of([1, 2, 5], 6), position=torch.zeros(6, dtype=torch.int32))
    bind_embed(table, x, stats, rows, tokens_of([3, 30, 20], [1, 2, 5], 6))()
    bind_embed(table, one_x, one_stats, rows_of([0], 1), tokens_of([20], [0], 1))()
    assert torch.equal(bits(x[2]), bits(one_x[0]))
    assert torch.equal(bits(stats[2]), bits(one_stats[0]))


def packed_of(type: str, cols: int, n_rows: int = 24) -> Packed:
    """Random bytes with scales that are numbers."""
    block = BLOCKS[type]
    raw = torch.randint(256, (n_rows, cols // block.elements, block.n_bytes), dtype=torch.uint8, generator=seeded(3))
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(type, (0,))
    for at in halves:
        numbers = torch.randn(*raw.shape[:2], 1, generator=seeded(at)).half()
        raw[:, :, at : at + 2] = numbers.view(torch.uint8)
    if type == "MXFP4":
        raw[:, :, 0] = torch.randint(125, 129, raw.shape[:2], generator=seeded(4))
    return pack(type, raw.flatten(1), n_rows, cols)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("type", PACKED_TYPES)
@pytest.mark.parametrize("n_rows", [32, 27])
def test_packed_rows_equal_the_twin(type: str, n_rows: int) -> None:
    hidden = 512 if BLOCKS[type].elements == 256 else 32 * 17 if n_rows == 27 else 640
    table, rows, tokens = packed_of(type, hidden, n_rows), rows_of([0, 2], 4), tokens_of([n_rows - 1, 5], [0, 2], 4)
    (x, stats), (twin_x, twin_stats) = room(4, hidden), room(4, hidden)
    bind_embed(table, x, stats, rows, tokens, scale=3.3)()
    embed_torch(table, twin_x, twin_stats, rows, tokens, scale=3.3)
    assert torch.allclose(x[:2], twin_x[:2], rtol=1e-6, atol=1e-5)
    assert torch.allclose(stats[:2], twin_stats[:2], rtol=1e-4, atol=1e-3)
    assert torch.isnan(x[2:]).all()


def test_a_table_of_another_width_is_refused() -> None:
    x, stats = room(1, 64)
    with pytest.raises(BadPointer, match="columns"):
        bind_embed(packed_of("Q4_0", 32), x, stats, rows_of([0], 1), tokens_of([0], [0], 1))


def compile_all() -> None:
    rows, tokens = rows_of([0], 4), tokens_of([1], [0], 4)
    x, stats = room(4)
    for dtype, scale in ((torch.bfloat16, 2.0), (torch.float32, None)):
        table = table_of(dtype)
        compile_launch(bind_embed(table, x, stats, rows, tokens, scale=scale, positions=table))
    for type in ("Q4_K", "Q6_K"):
        x, stats = room(4, 512)
        compile_launch(bind_embed(packed_of(type, 512), x, stats, rows, tokens), amd=False)
