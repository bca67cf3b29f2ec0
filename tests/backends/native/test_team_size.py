"""The size of a team, with a clock of the test's own: all members on a quiet machine, fewer beside busy neighbours."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from ostinato import build
from ostinato.backends.native import library
from ostinato.errors import HardwareCannot

STEP, CHUNK = 1, 2
JobTime = Callable[[int], tuple[float, float]]  # members -> seconds that a job takes, and those slept at barriers


@cache
def size_library() -> ctypes.CDLL:
    source = Path(__file__).with_name("team_size.cpp").read_text()
    flags = ("-std=c++17", "-O2", *os.environ.get("OSTINATO_CPU_FLAGS", "").split())
    try:
        path = build.shared_object(
            source, "team_size.cpp", headers={"team_size.h": library.source("team_size.h")}, flags=flags
        )
    except HardwareCannot as error:
        pytest.skip(f"the size of the team was not tested: {error}")
    opened = ctypes.CDLL(str(path))
    opened.size_new.restype = ctypes.c_void_p
    opened.size_job_ended.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 2, *[ctypes.c_int64] * 3]
    return opened


class Machine:
    """A team on a machine whose time passes only with its jobs."""

    def __init__(self, n: int) -> None:
        self._library = size_library()
        self._size = ctypes.c_void_p(self._library.size_new(n))
        self.now = 100.0

    def job(self, time: JobTime, kind: int = STEP, n_rows: int = 1) -> int:
        """Run one job: with how many members."""
        members = self.members
        took, slept = time(members)
        self.now += took
        self._library.size_job_ended(self._size, kind, n_rows, *(int(1e9 * s) for s in (self.now, took, slept)))
        return members

    def jobs(self, time: JobTime, seconds: float) -> list[int]:
        """Jobs for so long: the members of each."""
        until, used = self.now + seconds, []
        while self.now < until:
            used.append(self.job(time))
        return used

    @property
    def members(self) -> int:
        return int(self._library.size_next(self._size))

    @property
    def trials(self) -> int:
        return int(self._library.size_trials(self._size))

    def close(self) -> None:
        self._library.size_free(self._size)


@pytest.fixture
def machine() -> Iterator[Callable[[int], Machine]]:
    opened: list[Machine] = []

    def of(n: int) -> Machine:
        opened.append(Machine(n))
        return opened[-1]

    yield of
    for one in opened:
        one.close()


def quiet(members: int) -> tuple[float, float]:
    """A core for every member, and a little imbalance."""
    took = 0.010 / members
    return took, 0.05 * took


def contended(n_cores: int, n_free: int) -> JobTime:
    """Up to `n_free` members have a core; one more, and every barrier waits for the member without."""

    def time(members: int) -> tuple[float, float]:
        took, _ = quiet(members)
        return (took, 0.0) if members <= n_free else (20 * took, 19 * took)

    assert n_free < n_cores
    return time


@pytest.mark.parametrize("n", [2, 3, 16])
def test_on_a_quiet_machine_the_number_never_changes(machine: Callable[[int], Machine], n: int) -> None:
    team = machine(n)
    assert set(team.jobs(quiet, 5)) == {n}
    assert team.trials == 0


@pytest.mark.parametrize(("n", "n_free"), [(2, 1), (4, 3), (4, 1), (16, 15), (16, 8), (16, 7), (16, 3), (16, 1)])
def test_a_team_that_waits_for_preempted_cores_falls_back_to_as_many_as_have_one(
    machine: Callable[[int], Machine], n: int, n_free: int
) -> None:
    team = machine(n)
    time = contended(n, n_free)
    team.jobs(time, 10)
    used = team.jobs(time, 10)
    assert sorted(used)[len(used) // 2] == n_free
    ideal = 10 / quiet(n_free)[0]
    assert len(used) > 0.9 * ideal


def test_it_falls_back_within_two_windows(machine: Callable[[int], Machine]) -> None:
    team = machine(2)
    team.jobs(quiet, 1)
    team.jobs(contended(2, 1), 0.2)
    assert team.members == 1


def test_jobs_longer_than_a_window_are_compared_too(machine: Callable[[int], Machine]) -> None:
    def prompt(members: int) -> tuple[float, float]:
        took, slept = contended(2, 1)(members)
        return 100 * took, 100 * slept

    team = machine(2)
    used = [team.job(prompt, CHUNK, 512) for _ in range(12)]
    assert used[:2] == [2, 1]
    assert used.count(1) >= 8


@pytest.mark.parametrize("n", [2, 4, 16])
def test_it_returns_to_full_strength_when_the_neighbour_ends(machine: Callable[[int], Machine], n: int) -> None:
    team = machine(n)
    team.jobs(contended(n, 1), 10)
    assert team.members < n
    team.jobs(quiet, 5)
    assert set(team.jobs(quiet, 5)) == {n}


def test_it_falls_back_soon_when_the_neighbour_returns(machine: Callable[[int], Machine]) -> None:
    team = machine(2)
    team.jobs(contended(2, 1), 10)
    while team.members == 1:
        team.job(quiet)
    team.jobs(quiet, 0.5)
    team.jobs(contended(2, 1), 1.5)
    assert team.members == 1


def test_a_trial_that_was_lucky_is_corrected_at_once(machine: Callable[[int], Machine]) -> None:
    """Two members run well for as long as the trial lasts, since a thread that slept is favoured at first."""
    team = machine(2)
    team.jobs(contended(2, 1), 1)
    while team.members == 1:
        team.job(contended(2, 1))
    assert set(team.jobs(quiet, 0.08)) == {2}
    assert [team.job(contended(2, 1)) for _ in range(3)] == [2, 1, 1]


def unbalanced(members: int) -> tuple[float, float]:
    """All cores are free; members sleep since their shares of the work differ."""
    return quiet(members)[0], 0.5 * quiet(members)[0]


def test_full_strength_is_kept_where_it_is_best_though_members_wait(machine: Callable[[int], Machine]) -> None:
    team = machine(4)
    used = team.jobs(unbalanced, 20)
    assert len(used) > 0.96 * 20 / quiet(4)[0]
    assert used.count(4) > 0.9 * len(used)


def test_a_neighbour_that_comes_in_a_pause_ends_it(machine: Callable[[int], Machine]) -> None:
    team = machine(2)
    while team.trials < 6:  # pauses have become long
        team.job(unbalanced)
    while team.members == 1:
        team.job(unbalanced)
    assert [team.job(contended(2, 1)) for _ in range(3)] == [2, 1, 1]


def test_noise_of_a_third_costs_little(machine: Callable[[int], Machine]) -> None:
    chance = random.Random(0)

    def noisy(members: int) -> tuple[float, float]:
        took, slept = contended(2, 1)(members)
        factor = chance.uniform(0.67, 1.33)
        return factor * took, factor * slept

    team = machine(2)
    assert len(team.jobs(noisy, 20)) > 0.9 * 20 / quiet(1)[0]


def test_only_jobs_of_one_kind_are_compared(machine: Callable[[int], Machine]) -> None:
    """Chunks of prompts between the steps, each as long as ten of them."""

    def chunk(members: int) -> tuple[float, float]:
        took, slept = quiet(members)
        return 10 * took, 10 * slept

    def late_chunk(members: int) -> tuple[float, float]:
        took, slept = time(members)
        return 10 * took, 10 * slept

    time = contended(2, 1)
    team = machine(2)
    for _ in range(300):
        assert team.job(chunk, CHUNK, 256) == 2
        assert team.job(quiet) == 2
    used = [team.job(time) for _ in range(200) for _ in [team.job(late_chunk, CHUNK, 256)]]
    assert used.count(1) > 150


def test_slower_jobs_of_a_quiet_machine_start_no_trial(machine: Callable[[int], Machine]) -> None:
    """As those of a longer context, after a neighbour has ended."""
    team = machine(2)
    team.jobs(contended(2, 1), 2)
    team.jobs(quiet, 5)
    trials = team.trials

    def longer(members: int) -> tuple[float, float]:
        took, slept = quiet(members)
        return 3 * took, 3 * slept

    assert set(team.jobs(longer, 5)) == {2}
    assert team.trials == trials


def test_a_trial_whose_kind_of_job_does_not_come_again_is_given_up(machine: Callable[[int], Machine]) -> None:
    team = machine(2)
    while team.trials == 0:
        team.job(contended(2, 1))
    assert team.members == 1
    for n_rows in range(2, 200):  # never two of a kind
        team.job(quiet, CHUNK, n_rows)
    assert team.members == 2
    assert team.trials == 1
