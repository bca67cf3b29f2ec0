"""Answers that must follow something: masks go through the inbox, the device samples, and no other request waits."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.constraint import Constraint
from ostinato.engine.engine import Engine
from ostinato.engine.request import Request
from ostinato.errors import BadInput, InternalError, Unsupported
from ostinato.loop.layout import bits_of
from ostinato.options import Sampling
from tests.engine.opened import DEADLINE_S, alone, bits, ids, open_engine, prompt, sampling, until

END = 127
N_WORDS = 4


class Cycle:
    """A constraint without a grammar: each token must be of the next set of a list; after the last comes the end."""

    ends = frozenset({END})

    def __init__(
        self,
        sets: Sequence[Sequence[int]],
        pause_s: float = 0,
        break_at: int | None = None,
        taken: list[int] | None = None,
    ) -> None:
        self._sets, self._pause_s, self._break_at = sets, pause_s, break_at
        self._at = 0
        self.taken = [] if taken is None else taken
        self.threads: set[str] = set()

    def mask(self) -> np.ndarray:
        return bits_of(self._sets[self._at] if self._at < len(self._sets) else [END], N_WORDS)

    def take(self, token: int) -> None:
        self.threads.add(threading.current_thread().name)
        assert token in self._sets[self._at]
        self.taken.append(token)
        time.sleep(self._pause_s)
        self._at += 1
        if self._at == self._break_at:
            raise BadInput("the answer cannot go on: too complex")


@contextmanager
def constrained_engine(make: Callable[[], Constraint], **words: object) -> Iterator[Engine]:
    """An engine in which a request with a regex gets `make()`."""

    def constrain(wanted: Sampling) -> Constraint | None:
        return None if wanted.rule is None else make()

    with open_engine(constrain=constrain, eog_ids=(END,), **words) as engine:  # type: ignore[arg-type]  # any words
        yield engine


FOLLOW = sampling(regex="x", ignore_eos=False)
SETS = [[3, 4, 5], [6], [7, 8, 9, 10], [11, 12], [13]]


@pytest.mark.parametrize("mode", ["loop", "eager"])
def test_every_token_is_of_its_mask_and_the_end_is_a_stop(mode: str) -> None:
    cycle = Cycle(SETS)
    with constrained_engine(lambda: cycle, mode=mode) as engine:
        request = engine.submit(prompt(1, 20), FOLLOW)
        found = ids(request)
        assert all(token in allowed for token, allowed in zip(found, SETS, strict=False))
        assert found[len(SETS) :] == [END]
        assert request.finish_reason == "stop"
        assert cycle.taken == found[:-1]
        assert request.mask_s > 0
        stats = engine.stats()
        assert (stats.ended, stats.pages_leased, stats.live) == ({"stop": 1}, 0, 0)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    sets=st.lists(st.lists(st.integers(0, 126), min_size=1, max_size=20), min_size=1, max_size=6),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 1000),
)
def test_the_choice_is_the_models_own_among_what_is_allowed(
    sets: list[list[int]], temperature: float, seed: int
) -> None:
    """Greedy: the likeliest of each mask, by the model's own numbers; the same with a bias in place of the mask."""
    wanted = {"temperature": temperature, "seed": seed, "top_k": 0, "top_p": 1.0}
    with constrained_engine(lambda: Cycle(sets)) as engine:
        found = ids(engine.submit(prompt(2, 9), sampling(regex="x", **wanted)))
        assert [token in allowed for token, allowed in zip(found, sets, strict=False)] == [True] * len(sets)
        if temperature == 0:
            banned = [token for token in range(128) if token not in sets[0]]
            biased = sampling(max_tokens=1, **wanted, logit_bias=dict.fromkeys(banned, -100.0))
            assert ids(engine.submit(prompt(2, 9), biased)) == found[:1]


def launches_of(engine: Engine, wanted: Sampling) -> tuple[int, int]:
    """How many tokens an answer has, and how many launches it takes."""
    before = engine.runner.start.n_launches
    n = len(ids(engine.submit(prompt(1, 20), wanted)))
    until(lambda: not engine.runner.decode_mode.running, "the loop has ended")
    return n, engine.runner.start.n_launches - before


def test_a_loop_whose_only_slot_waits_for_its_mask_waits_too() -> None:
    with constrained_engine(lambda: Cycle(SETS * 4, pause_s=0.005)) as engine:
        assert launches_of(engine, FOLLOW) == (21, 1)
        assert launches_of(engine, sampling(max_tokens=21)) == (21, 1)


@pytest.mark.slow
def test_a_mask_that_takes_too_long_ends_the_loop_and_the_next_trigger_goes_on() -> None:
    with constrained_engine(lambda: Cycle(SETS[:1], pause_s=0.6)) as engine:
        n, launches = launches_of(engine, FOLLOW)
        assert n == 2
        assert launches > 1


def test_a_loop_that_waits_for_a_mask_admits_and_computes_for_others_at_once() -> None:
    with constrained_engine(lambda: Cycle(SETS * 40, pause_s=0.2)) as engine:
        slow = engine.submit(prompt(9, 8), FOLLOW)
        next(slow)
        began = time.perf_counter()
        for i in range(5):
            assert len(ids(engine.submit(prompt(i, 40), sampling(max_tokens=5)))) == 5
        behind = 5 * 5 * 0.2  # what they would take behind its masks
        assert time.perf_counter() - began < behind / 2, "requests waited for another one's masks"
        slow.cancel()


def test_the_answer_is_the_same_alone_and_among_others() -> None:
    free = sampling(max_tokens=40)
    with constrained_engine(lambda: Cycle(SETS * 4)) as engine:
        once = bits(engine.submit(prompt(1, 20), FOLLOW))
        others = [engine.submit(prompt(i, 12), free) for i in range(3, 5)]
        among = [engine.submit(prompt(1, 20), FOLLOW) for _ in range(5)]
        assert [bits(request) for request in among] == [once] * 5
        assert [bits(request) for request in others] == [alone(prompt(i, 12), free) for i in range(3, 5)]


def test_an_answer_without_room_for_its_end_is_cut_by_length() -> None:
    with constrained_engine(lambda: Cycle(SETS)) as engine:
        request = engine.submit(prompt(1, 20), sampling(regex="x", max_tokens=3))
        assert len(ids(request)) == 3
        assert request.finish_reason == "length"


def test_an_end_that_is_ignored_still_ends_what_must_end() -> None:
    with constrained_engine(lambda: Cycle(SETS)) as engine:
        request = engine.submit(prompt(1, 20), sampling(regex="x", ignore_eos=True, min_tokens=50, max_tokens=60))
        assert ids(request)[-1] == END
        assert request.finish_reason == "stop"


def test_a_stop_id_ends_it_before_its_grammar_does() -> None:
    with constrained_engine(lambda: Cycle(SETS)) as engine:
        request = engine.submit(prompt(1, 20), sampling(regex="x", stop_token_ids=(6,)))
        assert len(ids(request)) == 2
        assert request.finish_reason == "stop"


def test_it_can_be_cancelled_while_it_waits_for_a_mask() -> None:
    entered = threading.Event()

    class Slow(Cycle):
        def take(self, token: int) -> None:
            entered.set()
            time.sleep(0.1)
            super().take(token)

    with constrained_engine(lambda: Slow(SETS)) as engine:
        request = engine.submit(prompt(1, 20), FOLLOW)
        assert entered.wait(DEADLINE_S)
        request.cancel()
        until(lambda: request.ended, "it has ended")
        assert request.finish_reason == "cancelled"
        until(lambda: engine.stats().pages_leased == 0, "its pages are back")
        assert len(ids(engine.submit(prompt(1, 20), sampling(max_tokens=3)))) == 3


@pytest.mark.parametrize("n_slots", [1, 4])
def test_a_constraint_that_fails_ends_its_own_request_and_no_other(n_slots: int) -> None:
    with constrained_engine(lambda: Cycle(SETS, break_at=2), n_slots=n_slots) as engine:
        other = engine.submit(prompt(5, 9), sampling(max_tokens=30))
        request = engine.submit(prompt(1, 20), FOLLOW)
        with pytest.raises(BadInput, match="too complex"):
            list(request)
        assert bits(other) == alone(prompt(5, 9), sampling(max_tokens=30))
        until(lambda: engine.stats().pages_leased == 0, "its pages are back")
        assert engine.stats().ended == {"error": 1, "length": 1}
        assert len(ids(engine.submit(prompt(1, 20), sampling(max_tokens=3)))) == 3


def test_a_bug_in_a_constraint_is_told_as_ours() -> None:
    class Broken(Cycle):
        def take(self, token: int) -> None:
            raise ZeroDivisionError("oops")

    with constrained_engine(lambda: Broken(SETS)) as engine:
        with pytest.raises(InternalError, match="oops"):
            list(engine.submit(prompt(1, 20), FOLLOW))
        assert len(ids(engine.submit(prompt(1, 20), sampling(max_tokens=3)))) == 3


def mask_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("ostinato-masks")}


def test_masks_are_computed_beside_the_engines_thread() -> None:
    cycle, before = Cycle(SETS), mask_threads()  # of engines that others have open
    with constrained_engine(lambda: cycle) as engine:
        list(engine.submit(prompt(1, 20), FOLLOW))
    assert {name.rsplit("_", 1)[0] for name in cycle.threads} == {"ostinato-masks"}
    for thread in mask_threads() - before:
        thread.join(10)
    assert mask_threads() <= before


def test_an_engine_without_text_refuses_what_needs_it() -> None:
    with open_engine() as engine, pytest.raises(Unsupported, match="knows no text"):
        engine.submit(prompt(1, 5), FOLLOW)


@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "swa"])
def test_models_that_recur_follow_masks_too(kind: str) -> None:
    with constrained_engine(lambda: Cycle(SETS), kind=kind) as engine:
        assert [
            token in allowed for token, allowed in zip(ids(engine.submit(prompt(1, 20), FOLLOW)), SETS, strict=False)
        ] == [True] * len(SETS)


def test_many_come_and_go_and_nothing_is_left() -> None:
    with constrained_engine(lambda: Cycle(SETS * 3), n_slots=3, n_pages=12, context=64) as engine:
        requests: list[Request] = []
        for i in range(40):
            wanted = FOLLOW if i % 2 else sampling(max_tokens=7)
            requests.append(engine.submit(prompt(i, 10), wanted))
            if i % 5 == 0:
                requests[-1].cancel()
        for request in requests:
            list(request)
        stats = engine.stats()
        assert sum(stats.ended.values()) == 40
        assert (stats.live, stats.waiting, stats.prefilling, stats.pages_leased) == (0, 0, 0, 0)


def test_a_slow_constraint_does_not_hold_up_another() -> None:
    made = iter([Cycle(SETS * 40, pause_s=0.3), *(Cycle(SETS) for _ in range(8))])
    with constrained_engine(lambda: next(made)) as engine:
        slow = engine.submit(prompt(9, 8), FOLLOW)
        next(slow)
        began = time.perf_counter()
        for i in range(8):
            assert ids(engine.submit(prompt(i, 8), FOLLOW))[-1] == END
        assert time.perf_counter() - began < 8 * 5 * 0.3  # what they would take behind it
        assert not slow.ended


@pytest.mark.slow
def test_the_others_keep_their_pace_beside_a_slow_constraint() -> None:
    """A mask that takes 50 ms, two hundred steps of this model, holds up its own slot and no other."""

    def pace(beside: bool) -> float:
        with constrained_engine(lambda: Cycle([[1, 2]] * 200, pause_s=0.05), n_slots=4, context=1024) as engine:
            slow = engine.submit(prompt(9, 8), FOLLOW) if beside else None
            if slow is not None:
                next(slow)
            others = [engine.submit(prompt(i, 8), sampling(max_tokens=300)) for i in range(3)]
            times = [[token.time_ns for token in request] for request in others]
            if slow is not None:
                assert not slow.ended
                slow.cancel()
            return statistics.median(b - a for one in times for a, b in itertools.pairwise(one)) / 1e6

    free, beside = pace(False), pace(True)
    assert beside < 2 * free + 2, f"{free:.2f} ms a token alone, {beside:.2f} ms beside a slot whose masks take 50 ms"
