"""The thread team: no member passes a barrier early, threads hand over ownership, and one that dies blocks no other."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from ostinato import build
from ostinato.backends.native import library
from ostinato.errors import HardwareCannot

DEADLINE_S = 30.0


@cache
def team_library() -> ctypes.CDLL:
    source = Path(__file__).with_name("team.cpp").read_text()
    headers = {name: library.source(name) for name in ("team.h", "team_size.h")}
    flags = ("-std=c++17", "-O2", "-pthread", *os.environ.get("OSTINATO_CPU_FLAGS", "").split())
    try:
        path = build.shared_object(source, "team.cpp", headers=headers, flags=flags)
    except HardwareCannot as error:
        pytest.skip(f"the thread team was not tested: {error}")
    opened = ctypes.CDLL(str(path))
    opened.team_new.restype = ctypes.c_void_p
    for name in ("free", "caller_dies", "keep_waiting", "play"):
        getattr(opened, f"team_{name}").restype = None
    return opened


class Team:
    """A team of n members, and what tests let it play."""

    def __init__(self, n: int) -> None:
        self._library = team_library()
        self._team = ctypes.c_void_p(self._library.team_new(n))

    def _call(self, name: str, *arguments: int) -> int:
        return int(getattr(self._library, f"team_{name}")(self._team, *map(ctypes.c_int, arguments)) or 0)

    def wrong(self, n_jobs: int, n_phases: int) -> int:
        """How often a member was let through a barrier too early."""
        return self._call("wrong", n_jobs, n_phases)

    def caller_dies(self, in_a_job: bool) -> int:
        return self._call("caller_dies", in_a_job)

    def keep_waiting(self, n_jobs: int, late_us: int) -> None:
        """Jobs in which the last member is late by so much."""
        self._call("keep_waiting", n_jobs, late_us)

    def play(self, n_steps: int, step_us: int) -> None:
        """Steps with the turn passed between them."""
        self._call("play", n_steps, step_us)

    def steps_until_turn(self) -> int:
        return self._call("steps_until_turn")

    def steps_after_a_missed_offer(self, most: int) -> int:
        """Steps until a waiter has the turn that had no core when it was offered; `most` where it was forgotten."""
        return self._call("steps_after_a_missed_offer", most)

    def passes_for(self, n_waiters: int) -> int:
        return self._call("passes_for", n_waiters)

    def wrong_after_a_passed_turn_died(self) -> int:
        return self._call("wrong_after_a_passed_turn_died")

    def active(self) -> int:
        return self._call("active")

    def trials(self) -> int:
        return self._call("trials")

    def free(self) -> int:
        return self._call("free")


@pytest.fixture
def three() -> Iterator[Team]:
    team = Team(3)
    yield team
    team.free()


def within(seconds: float, call: Callable[[], int]) -> int:
    """What a call gives; an error, and not a hang, where it does not come back."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "the team is stuck"
    return found[0]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_no_member_passes_a_barrier_before_all_have_reached_it(n: int) -> None:
    team = Team(n)
    assert within(DEADLINE_S, lambda: team.wrong(40, 25)) == 0
    team.free()


def test_any_thread_may_call_one_at_a_time(three: Team) -> None:
    wrong: list[int] = []
    threads = [threading.Thread(target=lambda: wrong.append(three.wrong(20, 10))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert wrong == [0, 0, 0, 0]


@pytest.mark.parametrize("in_a_job", [True, False])
def test_a_caller_that_dies_leaves_a_team_that_the_next_one_can_use(three: Team, in_a_job: bool) -> None:
    for _ in range(3):
        within(DEADLINE_S, lambda: three.caller_dies(in_a_job))
        assert within(DEADLINE_S, lambda: three.wrong(5, 20)) == 0


def test_a_team_whose_caller_died_can_be_closed() -> None:
    team = Team(3)
    within(DEADLINE_S, lambda: team.caller_dies(True))
    before = time.monotonic()
    within(DEADLINE_S, team.free)
    assert time.monotonic() - before < 5


def test_a_waiting_thread_owns_the_team_between_two_steps(three: Team) -> None:
    """During a loop of 400 steps of half a millisecond a thread asks ten times: it owns the team after the step under
    way or the next, and later only if it lost its core between looking and asking."""
    player = threading.Thread(target=lambda: three.play(400, 500))
    player.start()
    while team_library().team_steps() < 5:
        time.sleep(0.001)
    passed = [three.steps_until_turn() for _ in range(10)]
    still_playing = player.is_alive()
    player.join(DEADLINE_S)
    assert still_playing
    assert sorted(passed)[5] <= 2
    assert max(passed) < 100
    assert team_library().team_steps() == 400


def test_a_thread_that_missed_an_offer_for_want_of_a_core_is_offered_ownership_again(three: Team) -> None:
    assert within(DEADLINE_S, lambda: three.steps_after_a_missed_offer(2000)) < 1000


def test_all_who_wait_have_the_turn_one_after_the_other(three: Team) -> None:
    """No thread's request is forgotten because another thread was served; more passes only if a thread asked late."""
    assert sorted(within(DEADLINE_S, lambda: three.passes_for(5)) for _ in range(5))[2] <= 5


def test_who_dies_with_a_turn_that_was_passed_to_it_leaves_it_to_who_passed_it(three: Team) -> None:
    for _ in range(3):
        assert within(DEADLINE_S, three.wrong_after_a_passed_turn_died) == 0


def test_a_member_whose_core_was_stolen_rests_and_is_tried_again(three: Team) -> None:
    assert three.active() == 3
    deadline = time.monotonic() + DEADLINE_S
    while three.active() == 3:
        assert time.monotonic() < deadline, "no member rests"
        three.keep_waiting(1, 4000)
    assert three.trials() >= 1
    while three.active() < 3:
        assert time.monotonic() < deadline, "no member was tried again"
        assert three.wrong(1, 1) == 0


@pytest.mark.slow
def test_members_sleep_while_there_is_nothing_to_do(three: Team) -> None:
    three.wrong(5, 20)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.05
