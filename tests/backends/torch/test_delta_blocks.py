"""The gated delta rule in blocks against the scan over time: any length, any decay, any block, cut between blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ostinato.backends.torch.ops.delta_blocks import BLOCK, decays, delta_blocks_torch
from ostinato.backends.torch.ops.delta_rule import delta_rule_torch
from ostinato.models.blocks import DeltaDecay

SEQS, KEY_HEADS, HEADS, KEY, VALUE = 2, 2, 4, 20, 24
# Both forms round every product and sum once, in other orders: 2^-24 of sums of up to KEY + BLOCK terms of size 1.
SINGLE = 2**-24 * (KEY + BLOCK)
# By what is added to alpha: softplus(-20) leaves a decay of 1, softplus(20) one of exp(-20), softplus(200) one of 0.
ALPHA = {"usual": 0.0, "near 1": -20.0, "near 0": 20.0, "at 0": 200.0}


class Given(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    beta: Tensor
    decay: DeltaDecay
    state: Tensor

    def rows(self, start: int, stop: int) -> tuple[Tensor, ...]:
        return tuple(each[:, start:stop] for each in self[:5])


def given(t: int, dtype: torch.dtype, alpha: str = "usual", seed: int = 0) -> Given:
    source = torch.Generator().manual_seed(1000 * t + seed)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=source, dtype=torch.float64)

    steps = noise(SEQS, t, HEADS)
    if alpha == "mixed":
        choices = torch.tensor(list(ALPHA.values()), dtype=torch.float64)
        steps += choices[torch.randint(len(choices), steps.shape, generator=source)]
    else:
        steps += ALPHA[alpha]
    q, k, v = noise(SEQS, t, KEY_HEADS, KEY), noise(SEQS, t, KEY_HEADS, KEY), noise(SEQS, t, HEADS, VALUE)
    beta, state = noise(SEQS, t, HEADS), noise(SEQS, HEADS, VALUE, KEY)
    decay = DeltaDecay((-noise(HEADS).exp()).to(dtype), noise(HEADS).to(dtype))
    q, k, v, steps, beta, state = (each.to(dtype) for each in (q, k, v, steps, beta, state))
    return Given(q, k, v, steps, beta, decay, state)


def both(case: Given, *, block: int = BLOCK, tiled: bool = False, n_planes: int = 1) -> tuple[Tensor, ...]:
    words: dict[str, Any] = {"decay": case.decay, "tiled": tiled, "state": case.state, "n_planes": n_planes}
    return (*delta_blocks_torch(*case[:5], **words, block=block), *delta_rule_torch(*case[:5], **words))


@pytest.mark.parametrize("alpha", [*ALPHA, "mixed"])
@pytest.mark.parametrize(
    ("t", "block"), [(1, 16), (2, 16), (15, 16), (16, 16), (17, 16), (100, 16), (64, 64), (150, 64)]
)
def test_blocks_of_any_number_of_rows_agree_with_the_scan(t: int, block: int, alpha: str) -> None:
    found, ends, expected, planes = both(given(t, torch.float64, alpha), block=block)
    assert_close(found, expected, atol=1e-10, rtol=1e-10)
    assert_close(ends, planes, atol=1e-10, rtol=1e-10)
    found, ends, expected, planes = both(given(t, torch.float32, alpha), block=block)
    for one, other in ((found, expected), (ends, planes)):
        assert_close(one, other, atol=SINGLE * float(planes.abs().max()), rtol=0)
        assert one.dtype == torch.float32


def test_tiled_heads_share_the_keys_that_they_share_in_the_scan() -> None:
    found, ends, expected, planes = both(given(40, torch.float64), block=16, tiled=True)
    assert_close(found, expected, atol=1e-10, rtol=1e-10)
    assert_close(ends, planes, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("t", "n_planes"), [(40, 3), (17, 17), (3, 8), (2, 2), (1, 4), (33, 2)])
def test_planes_are_the_states_after_the_last_rows(t: int, n_planes: int) -> None:
    found, ends, expected, planes = both(given(t, torch.float64), block=16, n_planes=n_planes)
    assert ends.shape == planes.shape
    assert_close(found, expected, atol=1e-10, rtol=1e-10)
    assert_close(ends, planes, atol=1e-10, rtol=1e-10)


def test_a_cut_between_blocks_changes_nothing_and_one_inside_a_block_only_the_rounding() -> None:
    case = given(100, torch.float32)
    words: dict[str, Any] = {"decay": case.decay, "tiled": False, "n_planes": 1}
    whole, end = delta_blocks_torch(*case[:5], state=case.state, block=16, **words)
    for cut, bound in ((48, 1e-7), (50, 1e-5)):
        first, between = delta_blocks_torch(*case.rows(0, cut), state=case.state, block=16, **words)
        rest, last = delta_blocks_torch(*case.rows(cut, 100), state=between[:, 0], block=16, **words)
        assert_close(torch.cat([first, rest], 1), whole, atol=bound, rtol=bound)
        assert_close(last, end, atol=bound, rtol=bound)


def test_equal_keys_that_are_replaced_whole_stay_bounded() -> None:
    """The worst conditioned system: every A[i, j] is 1, and only the newest value is left under the key."""
    case = given(BLOCK, torch.float32)
    rows = [each.clone() for each in case[:5]]
    rows[1][:] = rows[1][:, :1]
    rows[3][:], rows[4][:] = -100.0, 100.0  # no decay, and a share of 1
    y, end = delta_blocks_torch(*rows, decay=case.decay, tiled=False, state=case.state, n_planes=1)
    key = rows[1][:, 0].repeat_interleave(2, 1)
    key = key / key.norm(dim=-1, keepdim=True)
    assert_close((end[:, 0] @ key.unsqueeze(-1)).squeeze(-1), rows[2][:, -1], atol=1e-4, rtol=0)
    assert float(y.abs().max()) < 10


def test_a_decay_is_summed_from_its_own_rows() -> None:
    """Behind a step of -2000 differences of float32 sums would have lost steps of 1e-5."""
    g = torch.full((BLOCK,), -1e-5)
    g[3] = -2000.0
    found = decays(g).double()
    expected = torch.zeros(BLOCK, BLOCK, dtype=torch.float64)
    for i in range(BLOCK):
        for j in range(i + 1):
            expected[i, j] = g[j + 1 : i + 1].double().sum().exp()
    assert_close(found, expected, atol=0, rtol=1e-6)
