"""Prompts that begin alike are computed once: the same bits with and without, and told in `cached_tokens`."""

from __future__ import annotations

import pytest

from ostinato.decoder.paged import REPLACED_TOKENS
from tests.engine.opened import LONG, PAGE, Gate, alone, bits, ids, line_held, open_engine, prompt, sampling, until
from tests.random_model import MemoryKind

WANTED = sampling(max_tokens=6, temperature=0.7, seed=3, logprobs=2)
START = prompt(1, 100)


@pytest.mark.parametrize("kind", ["kv", "swa", "all swa"])
@pytest.mark.parametrize("shared", [15, 16, 47, 48, 100])
def test_a_shared_beginning_is_reused_in_whole_pages_with_the_same_bits(kind: MemoryKind, shared: int) -> None:
    with open_engine(kind) as engine:
        first = engine.submit(START, WANTED)
        assert bits(first) == alone(START, WANTED, kind)
        assert first.cached_tokens == 0
        again = engine.submit([*START[:shared], *prompt(2, 28)], WANTED)
        assert bits(again) == alone([*START[:shared], *prompt(2, 28)], WANTED, kind)
        assert again.cached_tokens == shared // PAGE * PAGE
        assert engine.stats().cached_tokens == again.cached_tokens
        assert engine.stats().prompt_tokens == 100 + shared + 28 - again.cached_tokens


@pytest.mark.parametrize("n", [16, 17, 32, 33, 96])
def test_of_the_very_same_prompt_at_least_one_token_is_computed(n: int) -> None:
    with open_engine() as engine:
        answers = [engine.submit(prompt(1, n), WANTED) for _ in range(1)]
        found = [bits(answers[0])]
        answers += [engine.submit(prompt(1, n), WANTED) for _ in range(3)]
        found += [bits(answer) for answer in answers[1:]]
        assert found == [alone(prompt(1, n), WANTED)] * 4
        assert [answer.cached_tokens for answer in answers] == [0, *[(n - 1) // PAGE * PAGE] * 3]


def test_a_prompt_is_found_while_its_request_still_lives() -> None:
    with open_engine(context=LONG) as engine:
        first = engine.submit(START, sampling())
        next(first)
        second = engine.submit([*START[:64], 5], WANTED)
        assert bits(second) == alone([*START[:64], 5], WANTED)
        assert second.cached_tokens == 64
        assert not first.ended
        first.cancel()


def test_requests_that_arrive_together_share_their_beginning() -> None:
    with open_engine() as engine:
        with line_held(engine):
            requests = [engine.submit([*START[:80], i, i], WANTED) for i in range(8)]
        answers = [bits(request) for request in requests]
        assert answers == [alone([*START[:80], i, i], WANTED) for i in range(8)]
        assert [request.cached_tokens for request in requests] == [0, *[80] * 7]


def test_pages_of_a_chunk_that_was_computed_before_a_cancellation_are_kept() -> None:
    with open_engine(context=512) as engine:
        gate = Gate(engine)
        long = prompt(1, 400)
        first = engine.submit(long, WANTED)
        gate.reached.wait()
        first.cancel()
        assert list(first) == []
        gate.open()
        second = engine.submit(long, WANTED)
        assert bits(second) == alone(long, WANTED, context=512)
        assert second.cached_tokens == engine.runner.chunks.rows  # the one chunk that was under way


def test_what_was_decoded_is_not_shared() -> None:
    """Pages that decode has written have other bits than prefill's."""
    with open_engine() as engine:
        first = engine.submit(START[:20], sampling(max_tokens=60))
        answer = ids(first)
        second = engine.submit([*START[:20], *answer], WANTED)
        assert bits(second) == alone([*START[:20], *answer], WANTED)
        assert second.cached_tokens == PAGE


@pytest.mark.parametrize(("kind", "mode"), [("recurrent", "loop"), ("hybrid", "loop"), ("hybrid", "eager")])
def test_models_that_recur_share_what_a_snapshot_follows(kind: MemoryKind, mode: str) -> None:
    """The same prompt again begins at the snapshot that was taken before its end."""
    with open_engine(kind, mode=mode) as engine:
        requests = [engine.submit(START, WANTED) for _ in range(2)]
        answers = [bits(request) for request in requests]
        assert answers == [alone(START, WANTED, kind, mode=mode)] * 2
        last = len(START) - REPLACED_TOKENS
        shared = 0 if mode == "eager" else last // PAGE * PAGE if kind == "hybrid" else last
        assert [request.cached_tokens for request in requests] == [0, shared]


def test_the_least_recently_used_prompt_is_forgotten_first() -> None:
    with open_engine(n_slots=1, context=128, n_pages=8) as engine:

        def cached(seed: int) -> int:
            request = engine.submit(prompt(seed, 40), sampling(max_tokens=2))
            assert len(ids(request)) == 2
            until(lambda: engine.stats().pages_leased == 0, "its pages are back")
            return request.cached_tokens

        assert [cached(1), cached(2), cached(3)] == [0, 0, 0]
        assert engine.stats().pages_cached == 6
        assert cached(1) == 32
        assert cached(4) == 0  # 3 pages and 2 are free: the last page of 2 has to go
        assert cached(5) == 0  # 3 pages and 1 is free
        assert [cached(1), cached(4), cached(5)] == [32, 32, 32]
        assert cached(2) == 0


def test_a_request_that_needs_every_page_gets_them() -> None:
    with open_engine(n_slots=2, context=128, n_pages=8) as engine:
        for seed in range(4):
            assert len(ids(engine.submit(prompt(seed, 40), sampling(max_tokens=2)))) == 2
        whole = engine.submit(prompt(9, 100), sampling(max_tokens=28))
        assert bits(whole) == alone(prompt(9, 100), sampling(max_tokens=28), context=128)


def test_reuse_can_be_left_off() -> None:
    with open_engine(share_prefixes=False) as engine:
        requests = [engine.submit(START, WANTED) for _ in range(2)]
        assert [len(ids(request)) for request in requests] == [6, 6]
        assert [request.cached_tokens for request in requests] == [0, 0]
        assert engine.stats().pages_cached == 0


def test_prompts_that_are_cut_into_other_chunks_do_not_share() -> None:
    """In eager on the CPU a long prompt has wider chunks, whose products may have other bits."""
    with open_engine(mode="eager", context=512) as engine:
        rows_for = engine.runner.chunks.rows_for
        short, long = prompt(1, 100), [*prompt(1, 100), *prompt(2, 200)]
        assert rows_for(len(short)) != rows_for(len(long))
        assert bits(engine.submit(short, WANTED)) == alone(short, WANTED, mode="eager", context=512)
        second = engine.submit(long, WANTED)
        assert bits(second) == alone(long, WANTED, mode="eager", context=512)
        assert second.cached_tokens == 0
        third = engine.submit([*long[:290], 7], WANTED)
        assert bits(third) == alone([*long[:290], 7], WANTED, mode="eager", context=512)
        assert third.cached_tokens == 288


def test_the_native_loops_prompts_share_whatever_their_length() -> None:
    """Its bits do not depend on where a prompt was cut."""
    with open_engine(mode="loop", context=512) as engine:
        short, long = prompt(1, 100), [*prompt(1, 100), *prompt(2, 300)]
        assert bits(engine.submit(short, WANTED)) == alone(short, WANTED, context=512)
        second = engine.submit(long, WANTED)
        assert bits(second) == alone(long, WANTED, context=512)
        assert second.cached_tokens == 96
