"""The norm after a block against its twin; dead rows stay as they are, and a row's bits are its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.backends.cuda.triton.add_norm import bind_add_norm
from ostinato.backends.torch.ops.add_norm import add_norm_torch
from ostinato.backends.torch.ops.attend import StepRows
from ostinato.backends.torch.ops.matmul import PreparedInput, n_stats, stats_torch
from tests.backends.cuda.triton.test_attend import bits, compile_launch


def rows_of(n_rows: int, n_slots: int) -> StepRows:
    """Rows in the slots of the same number."""
    slots = torch.arange(n_slots, dtype=torch.int32)
    return StepRows(
        torch.tensor([n_rows], dtype=torch.int32), slots, slots.clone(), torch.zeros(n_slots, 1, dtype=torch.int32)
    )


def made(n_slots: int, hidden: int, *, seed: int = 0) -> tuple[Tensor, ...]:
    """x, y, the sums of y, a weight, and room for the sums of x."""
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, n_slots, hidden, generator=g)
    weight = torch.randn(hidden, generator=g)
    return x, y, stats_torch(y), weight, torch.full((n_slots, n_stats(hidden), 2), math.nan)


@pytest.mark.parametrize("hidden", [16, 40, 512, 1100])
def test_it_equals_the_twin_and_leaves_dead_rows_alone(hidden: int) -> None:
    x, y, y_stats, weight, stats = made(5, hidden)
    y[3:] = math.nan
    rows = rows_of(3, 5)
    twin_x, twin_stats = x.clone(), stats.clone()
    ready, twin_ready = torch.full((2, 5, hidden), math.nan, dtype=torch.bfloat16)
    next_weight = torch.rand(hidden)
    add_norm_torch(twin_x, y, y_stats, weight, 1e-6, twin_stats, rows, prepared=PreparedInput(twin_ready, next_weight))
    bind_add_norm(x, y, y_stats, weight, 1e-6, stats, rows, prepared=PreparedInput(ready, next_weight))()
    assert torch.allclose(x[:3], twin_x[:3], rtol=1e-6, atol=1e-6)
    assert torch.equal(x[3:], twin_x[3:])
    assert torch.allclose(stats[:3], twin_stats[:3], rtol=1e-5, atol=1e-5)
    assert torch.isnan(stats[3:]).all()
    assert torch.allclose(ready[:3].float(), twin_ready[:3].float(), rtol=1e-2)
    assert torch.isnan(ready[3:]).all()


@pytest.mark.parametrize("fresh", [False, True])
def test_what_is_written_is_multiplied_in_the_end(fresh: bool) -> None:
    x, y, y_stats, weight, stats = made(3, 40)
    twin_x, twin_stats = x.clone(), stats.clone()
    how: dict[str, Any] = {"fresh": fresh, "scale": torch.tensor([0.7])}
    add_norm_torch(twin_x, y, y_stats, weight, 1e-6, twin_stats, rows_of(3, 3), **how)
    bind_add_norm(x, y, y_stats, weight, 1e-6, stats, rows_of(3, 3), **how)()
    torch.testing.assert_close(x, twin_x)
    torch.testing.assert_close(stats, twin_stats)


def test_a_rows_bits_do_not_depend_on_its_number_or_the_others() -> None:
    x, y, y_stats, weight, stats = made(4, 600)
    one = [t[2:3].clone() for t in (x, y, y_stats, stats)]
    bind_add_norm(x, y, y_stats, weight, 1e-6, stats, rows_of(4, 4))()
    bind_add_norm(one[0], one[1], one[2], weight, 1e-6, one[3], rows_of(1, 1))()
    assert torch.equal(bits(x[2]), bits(one[0][0]))
    assert torch.equal(bits(stats[2]), bits(one[3][0]))


def compile_all() -> None:
    x, y, y_stats, weight, stats = made(8, 2304)
    for fresh in (False, True):
        compile_launch(bind_add_norm(x, y, y_stats, weight, 1e-6, stats, rows_of(1, 8), fresh=fresh))
    compile_launch(bind_add_norm(x, y, y_stats, weight, 1e-6, stats, rows_of(1, 8), scale=torch.ones(1)))
