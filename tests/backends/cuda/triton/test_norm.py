"""The norms of a prompt, interpreted, against their twin."""

from __future__ import annotations

import pytest
import torch

from ostinato.backends.cuda.triton.join_parts import bind_join_parts
from ostinato.backends.cuda.triton.norm import bind_norm
from ostinato.backends.torch.ops.join_parts import join_parts_torch
from ostinato.backends.torch.ops.norm import norm_rows_torch
from ostinato.errors import BadPointer
from tests.backends.cuda.triton.test_attend import compile_launch


@pytest.mark.parametrize("width", [64, 96, 130])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_of_any_width_are_normed_as_the_twin_does(width: int, biased: bool) -> None:
    x = torch.randn(5, width) * 3 + 1
    weight, bias = torch.rand(width) + 0.5, torch.randn(width) if biased else None
    y, expected = torch.full((5, width), float("nan")), torch.zeros(5, width)
    bind_norm(x, y, weight, bias, 1e-5)()
    norm_rows_torch(x, expected, weight, bias, 1e-5)
    torch.testing.assert_close(y, expected)


def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, weight = torch.randn(7, 96), torch.rand(96)
    together, alone = torch.zeros(7, 96), torch.zeros(1, 96)
    bind_norm(x, together, weight, None, 1e-6)()
    bind_norm(x[3:4].clone(), alone, weight, None, 1e-6)()
    assert torch.equal(together[3], alone[0])


def test_a_norm_in_place_is_the_norm() -> None:
    x, weight = torch.randn(3, 64), torch.rand(64)
    expected = torch.zeros(3, 64)
    norm_rows_torch(x, expected, weight, None, 1e-6)
    bind_norm(x, x, weight, None, 1e-6)()
    torch.testing.assert_close(x, expected)


def test_columns_of_live_rows_are_normed_and_nothing_else() -> None:
    x, weight, n_rows = torch.randn(4, 160).bfloat16(), torch.rand(64) + 0.5, torch.tensor([3], dtype=torch.int32)
    made, expected = x.clone(), x.clone()
    bind_norm(made[:, 32:96], made[:, 32:96], weight, None, 1e-5, n_rows)()
    norm_rows_torch(expected[:, 32:96], expected[:, 32:96], weight, None, 1e-5, n_rows)
    torch.testing.assert_close(made, expected)
    outside = torch.ones(4, 160, dtype=torch.bool)
    outside[:3, 32:96] = False
    assert torch.equal(made[outside], x[outside])


def test_parts_of_a_row_are_normed_alone_and_joined_for_live_rows() -> None:
    given, own, weight, n_rows = *torch.randn(2, 4, 60), torch.rand(20) + 0.5, torch.tensor([3], dtype=torch.int32)
    made, expected = torch.full((2, 3, 5, 20), float("nan"))
    bind_join_parts(given, own, made, weight, 1e-5, n_rows)()
    join_parts_torch(given, own, expected, weight, 1e-5, n_rows)
    torch.testing.assert_close(made, expected, equal_nan=True)
    assert torch.isfinite(made[:, :3]).all()


def test_memory_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(BadPointer, match="weight"):
        bind_norm(torch.randn(2, 8), torch.zeros(2, 8), torch.empty(0), None, 1e-6)


def compile_all() -> None:
    given, parts, live = torch.zeros(8, 35 * 256), torch.zeros(35, 8, 256), torch.ones(1, dtype=torch.int32)
    compile_launch(bind_join_parts(given, given, parts, torch.ones(256), 1e-6, live), amd=True)
    x, weight, n_rows = torch.zeros(8, 6144), torch.ones(4096), torch.ones(1, dtype=torch.int32)
    compile_launch(bind_norm(x[:, :4096], x[:, :4096], weight, None, 1e-6, n_rows))
    compile_launch(bind_norm(x[:, :4096].bfloat16(), x[:, :4096].bfloat16(), weight, weight, 1e-6), amd=True)
