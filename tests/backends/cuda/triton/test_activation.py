"""The bends of a prompt's rows against their twins, in Triton's interpreter."""

from typing import get_args

import pytest
import torch

from ostinato.backends.cuda.triton.activation import bind_activate, bind_gated
from ostinato.backends.torch.ops.activation import activate_rows_torch, gated_rows_torch
from ostinato.errors import BadPointer
from ostinato.models.shape import Activation

FLOATS = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_rows_are_bent_as_the_twin_bends_them(activation: Activation, gated: bool) -> None:
    for given, left in ((a, b) for a in FLOATS for b in FLOATS):
        for width in (1, 100, 1030):
            random = torch.Generator().manual_seed(width)
            x = (torch.randn(3, 2 * width if gated else width, generator=random) * 5).to(given)
            ours, theirs = (torch.full((4, width), 7.0, dtype=left) for _ in range(2))
            (bind_gated if gated else bind_activate)(x, ours[:3], activation)()
            (gated_rows_torch if gated else activate_rows_torch)(x, theirs[:3], activation)
            # One rounding apart; far below zero 1 + erf(x) is the small rest of two large numbers.
            torch.testing.assert_close(ours, theirs, rtol=1e-2 if left == torch.bfloat16 else 1e-5, atol=2e-4)


def test_values_far_from_zero_do_not_overflow() -> None:
    x, out = torch.tensor([[-1e4, -100.0, 100.0, 1e4]]), torch.zeros(1, 4)
    for activation in get_args(Activation):
        bind_activate(x, out, activation)()
        far = {"relu2": (1e4, 1e8), "clamped_swiglu": (7.0, 7.0)}.get(activation, (100.0, 1e4))
        torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, *far]]), rtol=1e-5, atol=1e-5)


def test_buffers_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(BadPointer, match="x"):
        bind_gated(torch.zeros(3, 8), torch.zeros(3, 8), "silu")
    with pytest.raises(BadPointer, match="out"):
        bind_activate(torch.zeros(3, 8), torch.zeros(3, 8, dtype=torch.float16), "silu")
