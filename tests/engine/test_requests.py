"""Requests through an engine: who waits and who passes whom, cancelling, threads, and exactly one end each."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

import pytest

from ostinato.backends.base import ChunkOutput, ChunkPart, ChunkWant
from ostinato.engine.engine import Engine
from ostinato.engine.request import Request, RequestMessage, Token
from ostinato.errors import BadInput, DecodeInvariantError, EngineDead, PromptTooLong, QueueFull
from ostinato.loop.layout import End, Word
from tests.engine.opened import (
    DEADLINE_S,
    LONG,
    PAGE,
    Gate,
    alone,
    bits,
    decoding,
    ids,
    line_held,
    open_engine,
    prompt,
    sampling,
    until,
)
from tests.engine.rig import stray

SHORT = sampling(max_tokens=5)


def collect(request: Request) -> tuple[list[Token], BaseException | None]:
    """All tokens of a request, and its error where it has one; a second reading finds nothing more."""
    tokens: list[Token] = []
    error = None
    try:
        tokens.extend(request)
    except EngineDead as dead:
        error = dead
    assert list(request) == []
    return tokens, error


# In line


@pytest.mark.parametrize("mode", ["loop", "eager"])
def test_requests_run_together_and_each_gets_its_own_answer(mode: str) -> None:
    with open_engine(mode=mode) as engine:
        requests = [engine.submit(prompt(i, 10 + i), SHORT) for i in range(9)]
        answers = [bits(request) for request in requests]
        assert answers == [alone(prompt(i, 10 + i), SHORT, mode=mode) for i in range(9)]
        assert {request.finish_reason for request in requests} == {"length"}
        assert len({request.id for request in requests}) == 9
        stats = engine.stats()
        assert (stats.submitted, stats.ended, stats.tokens) == (9, {"length": 9}, 45)
        assert (stats.waiting, stats.prefilling, stats.live, stats.pages_leased) == (0, 0, 0, 0)
        assert stats.mode == mode
        assert stats.steps >= 4 * 3  # nine answers of five tokens in four slots, the first of each by its prompt


def test_first_come_first_served() -> None:
    with open_engine(n_slots=1, context=LONG) as engine:
        ended: list[int] = []
        before = decoding(engine)
        requests = [
            engine.submit(prompt(i, 8), sampling(max_tokens=1 + i % 3), sink=lambda r, m: ended.append(r.id))
            for i in range(6)
        ]
        assert engine.stats().waiting == 6
        before.cancel()
        until(lambda: all(request.ended for request in requests), "all have ended")
        assert list(dict.fromkeys(ended)) == [request.id for request in requests]


def test_one_too_large_for_the_free_pages_holds_its_place() -> None:
    with open_engine(mode="eager", n_slots=3, context=256, n_pages=20) as engine:  # whose steps take a while
        first = engine.submit(prompt(1, 4), sampling(max_tokens=200))  # 13 pages, all at once
        next(first)
        large = engine.submit(prompt(2, 150), sampling(max_tokens=30))
        small = engine.submit(prompt(3, 4), SHORT)
        until(lambda: engine.stats().waiting == 2, "both wait")
        time.sleep(0.02)
        assert small.prefill_began is None  # a slot and a page are free, but an earlier request waits
        assert not large.ended
        first.cancel()
        assert ids(large) == [t[0] for t in alone(prompt(2, 150), sampling(max_tokens=30), mode="eager")]
        assert len(ids(small)) == 5
        assert large.prefill_began is not None
        assert small.prefill_began is not None
        assert large.prefill_began < small.prefill_began


def test_a_full_line_refuses_and_has_room_again_later() -> None:
    with open_engine(n_slots=1, context=LONG, queue=2) as engine:
        before = decoding(engine)
        waiting = [engine.submit(prompt(i, 5), SHORT) for i in range(2)]
        with pytest.raises(QueueFull, match=r"slots: 1\) .* \(queue: 2\)") as refused:
            engine.submit(prompt(7, 5), SHORT)
        assert refused.value.http_status == 429
        before.cancel()
        assert [len(ids(request)) for request in waiting] == [5, 5]
        assert len(ids(engine.submit(prompt(7, 5), SHORT))) == 5
        assert engine.stats().submitted == 4


def test_slots_that_are_free_are_no_line() -> None:
    with open_engine(n_slots=3, queue=0) as engine, line_held(engine):
        requests = [engine.submit(prompt(i, 5), SHORT) for i in range(3)]
        with pytest.raises(QueueFull):
            engine.submit(prompt(3, 5), SHORT)
        assert len(requests) == 3


def test_a_caller_that_asks_for_it_waits_for_room_in_the_queue() -> None:
    with open_engine(n_slots=1, context=LONG, queue=0) as engine:
        before = decoding(engine)
        found: list[list[int]] = []
        thread = threading.Thread(target=lambda: found.append(ids(engine.submit(prompt(1, 5), SHORT, wait=True))))
        thread.start()
        time.sleep(0.02)
        assert thread.is_alive()
        before.cancel()
        thread.join(DEADLINE_S)
        assert [len(answer) for answer in found] == [5]


def test_bad_requests_are_refused_by_the_call() -> None:
    with open_engine(context=64) as engine:
        with pytest.raises(PromptTooLong, match="64"):
            engine.submit([1] * 64, SHORT)
        with pytest.raises(BadInput, match="empty"):
            engine.submit([], SHORT)
        with pytest.raises(BadInput, match="128"):
            engine.submit([128], SHORT)
        with pytest.raises(BadInput, match="at most 16"):
            engine.submit([1], sampling(stop_token_ids=tuple(range(17))))
        assert engine.stats().submitted == 0


# Ends


def test_an_end_id_ends_an_answer_and_the_context_does() -> None:
    free = ids(t for t in _tokens(alone(prompt(1, 6), sampling(max_tokens=40))))
    with open_engine(eog_ids=(free[7], 10_000), context=40) as engine:
        ended = engine.submit(prompt(1, 6), sampling(max_tokens=40, ignore_eos=False))
        assert ids(ended) == free[: free.index(free[7]) + 1]
        assert ended.finish_reason == "stop"
        at_length = engine.submit(prompt(1, 6), sampling())
        assert len(ids(at_length)) == 34
        assert at_length.finish_reason == "length"


def _tokens(found: list[tuple[int, float, tuple[tuple[int, float], ...], int, None]]) -> list[Token]:
    return [Token(*found_one[:4], 0, found_one[4]) for found_one in found]


def test_every_token_has_its_position_and_the_devices_time() -> None:
    """E-63."""
    with open_engine() as engine:
        tokens = list(engine.submit(prompt(1, 20), sampling(max_tokens=6, logprobs=3)))
        assert [token.position for token in tokens] == [20, 21, 22, 23, 24, 25]
        times = [token.time_ns for token in tokens]
        assert times == sorted(set(times))
        assert [len(token.top) for token in tokens] == [3] * 6
        assert all(token.top[0] == (token.token, token.logprob) for token in tokens)
        gaps = engine.stats().gaps
        assert gaps.n == 5
        assert 0 < gaps.median_us <= gaps.p99_us <= gaps.longest_us


def test_a_request_that_waits_can_be_cancelled() -> None:
    with open_engine(n_slots=1, context=LONG) as engine:
        before = decoding(engine)
        waiting, after = engine.submit(prompt(1, 5), SHORT), engine.submit(prompt(2, 5), SHORT)
        waiting.cancel()
        assert list(waiting) == []
        assert waiting.finish_reason == "cancelled"
        before.cancel()
        assert len(ids(after)) == 5
        assert waiting.prefill_began is None


def test_a_request_can_be_cancelled_while_its_prompt_runs() -> None:
    with open_engine(n_slots=2, context=512, n_pages=40) as engine:
        gate = Gate(engine)
        request = engine.submit(prompt(1, 400), SHORT)
        other = engine.submit(prompt(2, 5), SHORT)
        assert gate.reached.wait(DEADLINE_S)
        request.cancel()
        assert list(request) == []  # at once, though the device still has its pages
        assert engine.stats().pages_leased > 20
        gate.open()
        assert len(ids(other)) == 5
        until(lambda: engine.stats().pages_leased == 0, "all pages are back")
        assert engine.stats().prompt_tokens < 300


def test_a_request_can_be_cancelled_while_the_prompt_before_it_runs() -> None:
    with open_engine() as engine:
        gate = Gate(engine)
        first, second = engine.submit(prompt(1, 5), SHORT), engine.submit(prompt(2, 5), SHORT)
        assert gate.reached.wait(DEADLINE_S)
        second.cancel()
        assert list(second) == []
        gate.open()
        assert len(ids(first)) == 5
        assert second.prefill_began is None


def test_a_cancelled_sequence_gives_back_its_slot_and_pages() -> None:
    with open_engine(n_slots=1, context=LONG) as engine:
        for seed in range(5):
            request = decoding(engine, seed)
            request.cancel()
            request.cancel()
            rest = list(request)
            assert request.finish_reason == "cancelled"
            assert all(token.finish_reason is None for token in rest)
        assert bits(engine.submit(prompt(1, 5), SHORT)) == alone(prompt(1, 5), SHORT)
        assert engine.stats().pages_leased == 0
        assert engine.stats().ended == {"cancelled": 5, "length": 1}


def test_a_prompt_that_fails_ends_its_own_request_and_no_other() -> None:
    with open_engine() as engine:
        run = engine.runner.chunks.run

        def fails(parts: Sequence[ChunkPart], rows: int, want: ChunkWant | None = None) -> ChunkOutput:
            if parts[0].tokens[0] == 77:
                raise RuntimeError("no such luck")
            return run(parts, rows, want)

        engine.runner.chunks.run = fails  # type: ignore[method-assign]  # fails on purpose
        good, bad, later = (engine.submit([first, 1, 2, 3], SHORT) for first in (1, 77, 2))
        with pytest.raises(Exception, match="no such luck"):
            list(bad)
        assert list(bad) == []
        assert bits(good) == alone([1, 1, 2, 3], SHORT)
        assert bits(later) == alone([2, 1, 2, 3], SHORT)
        assert engine.stats().ended == {"error": 1, "length": 2}
        assert engine.stats().pages_leased == 0


# Rings and pages


def test_a_full_outbox_pauses_the_loop_and_loses_nothing() -> None:
    wanted = sampling(max_tokens=60)
    with open_engine(n_slots=2, outbox_entries=8) as engine:
        heard: list[RequestMessage] = []

        def slow(request: Request, message: RequestMessage) -> None:
            if len(heard) in (3, 30):
                until(lambda: engine.runner.host.word(Word.WHY) == End.OUTBOX_FULL, "the outbox is full")
                time.sleep(0.01)
            heard.append(message)

        request = engine.submit(prompt(1, 9), wanted, sink=slow)
        until(lambda: request.ended, "it has ended")
        found = [message for message in heard if isinstance(message, Token)]
        assert bits(found) == alone(prompt(1, 9), wanted)
        assert engine.stats().triggers > 1


@pytest.mark.slow
def test_pages_are_topped_up_where_not_all_fit_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = sampling(max_tokens=100)
    with open_engine(n_slots=3, context=128, n_pages=16) as engine:
        granted: list[int] = []
        grant = engine.runner.host.grant

        def counted(slot: int, generation: int, first: int, pages: list[int]) -> int:
            granted.append(len(pages))
            return grant(slot, generation, first, pages)

        monkeypatch.setattr(engine.runner.host, "grant", counted)
        with line_held(engine):
            requests = [engine.submit(prompt(i, 20), wanted) for i in range(4)]
        answers = [bits(request) for request in requests]
        assert answers == [alone(prompt(i, 20), wanted, context=128) for i in range(4)]
        assert len(granted) > 4
        assert engine.stats().pages_leased == 0


def test_an_inbox_that_is_full_is_filled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(n_slots=3, context=128, n_pages=16) as engine:
        publish, n_refused = engine.runner.host._publish, 0

        def sometimes(*words: object) -> bool:
            nonlocal n_refused
            n_refused += 1
            return n_refused % 3 == 0 and publish(*words)  # type: ignore[arg-type]  # as they come

        monkeypatch.setattr(engine.runner.host, "_publish", sometimes)
        with line_held(engine):
            requests = [engine.submit(prompt(i, 20), sampling(max_tokens=60)) for i in range(4)]
        answers = [bits(request) for request in requests]
        assert answers == [alone(prompt(i, 20), sampling(max_tokens=60), context=128) for i in range(4)]


# Any thread


@pytest.mark.slow
def test_many_threads_ask_and_cancel_and_each_has_one_end() -> None:
    """E-10."""
    with open_engine(n_slots=4, context=128, n_pages=14) as engine:
        ends: list[tuple[int, str | None, list[int]]] = []

        def ask(seed: int) -> None:
            for turn in range(4):
                request = engine.submit(prompt(seed, 5 + 7 * turn), sampling(max_tokens=20), wait=True)
                found = []
                for token in request:
                    found.append(token.token)
                    if seed % 3 == turn % 3 and len(found) == 3:
                        request.cancel()
                ends.append((seed * 4 + turn, request.finish_reason, found))

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(ends) == 36
        for number, reason, found in ends:
            seed, turn = divmod(number, 4)
            whole = [t[0] for t in alone(prompt(seed, 5 + 7 * turn), sampling(max_tokens=20))]
            assert found == whole[: len(found)]
            assert reason == ("length" if len(found) == 20 else "cancelled")
        until(lambda: engine.stats().pages_leased == 0, "all pages are back")
        assert sum(engine.stats().ended.values()) == 36


# Death


def plant_drift(engine: Engine) -> None:
    stray(engine.runner.tables.table["epoch"])[0] += 1


@pytest.mark.parametrize("mode", ["loop", "eager"])
def test_planted_drift_is_fatal_and_everybody_gets_exactly_one_error(mode: str) -> None:
    with open_engine(mode=mode, n_slots=2, context=LONG) as engine:
        done = engine.submit(prompt(5, 4), SHORT)
        assert len(ids(done)) == 5
        requests = [decoding(engine, 1), decoding(engine, 2)]
        requests += [engine.submit(prompt(i, 5), SHORT) for i in range(4)]
        plant_drift(engine)
        errors = [collect(request)[1] for request in requests]
        assert all(isinstance(error, EngineDead) for error in errors)
        assert len({id(error) for error in errors}) == len(errors)
        assert engine.stats().ended == {"length": 1, "error": 6}
        fault = engine.stats().fault
        assert fault is not None
        assert "epoch" in fault
        with pytest.raises(EngineDead, match="epoch"):
            engine.submit(prompt(1, 5), SHORT)
        requests[0].cancel()
        assert done.finish_reason == "length"
    engine.close()


@pytest.mark.parametrize("mode", ["loop", "eager"])
def test_a_step_that_fails_is_fatal_too(mode: str) -> None:
    """E-2."""
    with open_engine(mode=mode) as engine:

        def fails() -> None:
            raise RuntimeError("a bad step")

        if mode == "loop":
            engine.runner.start._native.run_loop = fails  # type: ignore[attr-defined]  # of the native loop
        else:
            object.__setattr__(engine.runner._plan.nodes[1], "run", fails)
        request = engine.submit(prompt(1, 5), SHORT)
        with pytest.raises(EngineDead, match="a bad step"):
            list(request)
        with pytest.raises(EngineDead):
            engine.submit(prompt(1, 5), SHORT)


def test_a_refused_attempt_changes_nothing_and_the_running_requests_finish() -> None:
    wanted = sampling(max_tokens=40)
    with open_engine() as engine:
        requests = [engine.submit(prompt(i, 5), wanted) for i in range(3)]
        first = next(requests[0])
        for attempt in (
            engine.runner.start.close,
            engine.runner.start.build,
            engine.runner.decode_mode.enter,
            engine.runner.decode_mode.step,
        ):
            with pytest.raises(DecodeInvariantError):
                attempt()
        answers = [bits([first, *requests[0]]), *map(bits, requests[1:])]
        assert answers == [alone(prompt(i, 5), wanted) for i in range(3)]
        assert engine.stats().fault is None


def test_a_fault_of_the_engines_own_thread_leaves_no_request_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine() as engine:

        def broken(*_: object) -> None:
            raise ValueError("a bug")

        monkeypatch.setattr(engine._scheduler, "_assign_slots", broken)
        request = engine.submit(prompt(1, 5), SHORT)
        with pytest.raises(EngineDead, match="a bug"):
            list(request)


def test_pages_are_as_wide_as_these_tests_think() -> None:
    with open_engine() as engine:
        assert engine.runner.page_tokens == PAGE


def test_an_engine_hears_a_loop_that_cannot_ring_and_ends_just_before_it_goes_to_sleep() -> None:
    """As on a GPU, where no event tells the host that the loop has written to the outbox or ended."""
    rung: list[int] = []
    with open_engine(mode="eager") as engine:  # the native loop rings by a file; this one calls what Python can replace
        engine.runner.start._wake = lambda: rung.append(0)  # type: ignore[attr-defined]  # a loop without a wake event
        patience = engine._scheduler._wait_s

        def late() -> float | None:
            until(lambda: not engine.runner.decode_mode.running, "the loop has ended")
            return patience()

        engine._scheduler._wait_s = late  # type: ignore[method-assign]  # the last moment for the loop to end
        for turn in range(4):
            request = engine.submit(prompt(turn, 3), sampling(max_tokens=3), sink=lambda _request, _message: None)
            until(partial(getattr, request, "ended"), f"request {turn} has ended")
    assert len(rung) >= 4, "the loop rang another wake event than the one that was silenced"


def test_a_loop_that_makes_no_step_any_more_is_given_up_with_one_error_each(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()

    def stand_still() -> None:
        stuck.wait(DEADLINE_S)

    with open_engine() as engine:
        engine.runner.start._native.run_loop = stand_still  # type: ignore[attr-defined]  # of the native loop
        request = engine.submit(prompt(99, 4), sampling())
        monkeypatch.setattr("ostinato.engine.scheduler.STALLED_S", 0.2)
        until(partial(getattr, request, "ended"), "the request has ended")  # who read on would help, and stand too
        stuck.set()
        with pytest.raises(EngineDead, match="no step"):
            list(request)
        with pytest.raises(EngineDead):
            engine.submit(prompt(1, 3), SHORT)
