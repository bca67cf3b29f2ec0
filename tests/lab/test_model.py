"""The arithmetic of launch overhead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import BadOption
from ostinato.lab.model import PAYS, Overhead, StartCost, stops_paying_us

LENGTHS = st.floats(0.01, 1e4)
COSTS = st.floats(0.0, 50.0)


def test_the_example_of_150_kernels() -> None:
    large, small = Overhead(150, 6.0, 18_000.0), Overhead(150, 6.0, 6_000.0)
    assert large.total_us == small.total_us == 900.0
    assert round(100 * large.share, 1) == 4.8
    assert round(100 * small.share) == 13
    assert small.speedup() == pytest.approx(6.9 / 6.0)


@pytest.mark.parametrize("numbers", [(0, 6.0, 1.0), (1, -1.0, 1.0), (1, 1.0, 0.0)])
def test_impossible_numbers_are_refused(numbers: tuple[int, float, float]) -> None:
    with pytest.raises(BadOption, match="there must be a kernel at least"):
        Overhead(*numbers)


@given(st.integers(1, 500), COSTS, COSTS, LENGTHS)
def test_a_step_is_never_shorter_than_its_bodies_or_its_submissions(
    kernels: int, kernel_us: float, submit_us: float, body_us: float
) -> None:
    cost = StartCost(kernel_us, submit_kernel_us=submit_us)
    step = cost.step(kernels, body_us)
    assert step >= kernels * body_us
    assert step >= kernels * submit_us


@given(COSTS, COSTS, COSTS, COSTS)
def test_the_end_of_paying_is_where_the_gain_falls_below_the_bar(
    kernel_us: float, submit_us: float, other_us: float, step_us: float
) -> None:
    baseline, other = StartCost(kernel_us, submit_kernel_us=submit_us), StartCost(other_us, step_us)
    end = stops_paying_us(baseline, other, 10)
    if end is None:
        assert baseline.step(10, 0.0) <= PAYS * other.step(10, 0.0)
        return
    for body_us, pays in ((0.9 * end, True), (1.1 * end + 0.1, False)):
        assert (baseline.step(10, body_us) > PAYS * other.step(10, body_us)) == pays
