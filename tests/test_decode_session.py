"""A session by hand: enter, admit, trigger, read, exit; what the device was asked for; and what is refused."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato import LLM, DecodeCounts, DecodedToken, DecodeInvariantError, DecodeSession, NoSlot, Sampling
from ostinato.errors import BadInput, BadOption, HardwareCannot, QueueFull, Unsupported
from ostinato.loop.layout import Word
from tests.cli import tiny_model
from tests.engine.rig import held

GREEDY = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
LONG = Sampling(max_tokens=150, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("session") / "tiny.gguf")


@pytest.fixture(scope="module")
def opened(path: Path) -> Iterator[DecodeSession]:
    session = DecodeSession(path, device="cpu", slots=3, context=256, threads=1)
    yield session
    session.close()


@pytest.fixture
def session(opened: DecodeSession) -> Iterator[DecodeSession]:
    """In decode mode, with every slot free."""
    opened.enter()
    yield opened
    opened.exit()
    opened.read()
    if opened._generations:
        opened.enter()
        for slot in list(opened._generations):
            opened.cancel(slot)
        opened.trigger()
        list(opened.tokens())
        opened.exit()


@cache
def expected_of(path: Path, prompt: str) -> list[int]:
    """The tokens of an `LLM`."""
    with LLM(path, device="cpu", context=256, slots=1, threads=1) as llm:
        return list(llm.generate(prompt, GREEDY).token_ids)


def of_slot(tokens: list[DecodedToken], slot: int) -> list[int | None]:
    return [one.token for one in tokens if one.slot == slot]


def test_the_tokens_are_those_of_an_llm_and_one_launch_made_them(session: DecodeSession, path: Path) -> None:
    """E-25."""
    texts = ("the sea", "one two")
    expected = [expected_of(path, text) for text in texts]
    before = session.counts
    slots = [session.admit(text, GREEDY) for text in texts]
    session.trigger()
    tokens = list(session.tokens())
    assert [of_slot(tokens, slot) for slot in slots] == expected
    after = session.counts
    # The first token comes from the prompt, so 24 tokens take 23 steps.
    assert after == DecodeCounts(before.triggers + 1, before.launches + 1, before.instantiations, before.steps + 23, 0)


def test_a_token_has_its_position_the_devices_time_and_at_the_end_a_reason(session: DecodeSession) -> None:
    slot = session.admit([5, 9, 2], Sampling(max_tokens=4, temperature=0, ignore_eos=True, logprobs=2))
    session.trigger()
    tokens = list(session.tokens())
    assert [one.position for one in tokens] == [3, 4, 5, 6]
    times = [one.time_ns for one in tokens]
    assert times == sorted(times)
    assert times[0] > 0
    assert [one.finish_reason for one in tokens] == [None, None, None, "length"]
    assert all(len(one.top) == 2 and one.logprob <= 0 for one in tokens)
    assert {one.slot for one in tokens} == {slot}


@pytest.mark.parametrize("alone", [False, True])
def test_a_prompt_admitted_while_the_loop_runs_joins_it(path: Path, alone: bool) -> None:
    """`alone`, as on the persistent kernel: the loop yields to the prompt, and is triggered again."""
    with DecodeSession(path, device="cpu", slots=2, context=tiny_model.CONTEXT, threads=1) as session:
        session._runner.start.alone = alone
        first = session.admit("the sea", replace(GREEDY, max_tokens=tiny_model.CONTEXT - 100))
        session.trigger()
        stream = session.tokens()
        tokens = [next(stream)]
        second = session.admit("one two", GREEDY)
        while tokens[-1].slot != second or tokens[-1].finish_reason is None:
            tokens.append(next(stream))
        session.cancel(first)
        tokens += stream
        assert len(of_slot(tokens, second)) == 24
        assert (tokens[-1].slot, tokens[-1].finish_reason) == (first, "cancelled")
        assert of_slot(tokens, first)[:24] == expected_of(path, "the sea")
        assert session.counts.triggers == (3 if alone else 1)  # for the chunk and for the first token


def test_a_cancelled_sequence_ends_and_its_slot_is_free_again(session: DecodeSession) -> None:
    slot = session.admit("the sea", Sampling(max_tokens=200, temperature=0, ignore_eos=True))
    session.cancel(slot)
    session.trigger()
    last = list(session.tokens())[-1]
    assert (last.slot, last.token, last.finish_reason) == (slot, None, "cancelled")
    assert session.admit("one", GREEDY) == slot


def test_a_loop_that_ended_with_a_full_outbox_is_triggered_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.backends.runner.OUTBOX_ENTRIES", 8)
    with DecodeSession(path, device="cpu", slots=1, context=256, threads=1) as session:
        session.admit("the sea", LONG)
        session.trigger()
        assert len(list(session.tokens())) == 150
        assert session.counts.triggers > 1


def test_decode_mode_can_be_entered_again_and_nothing_is_built_again(path: Path) -> None:
    session = DecodeSession(path, device="cpu", slots=1, context=256, threads=1)
    answers = []
    for _ in range(2):
        session.enter()
        session.admit("the sea", GREEDY)
        session.trigger()
        session.exit()  # waits for the loop's end
        answers.append(session.read())
    assert [one.token for one in answers[0]] == [one.token for one in answers[1]]
    assert session.counts.instantiations == 1
    session.close()


ATTACKS: dict[str, tuple[str, Callable[[DecodeSession], object]]] = {
    "a token is submitted by a second trigger": ("I-2", DecodeSession.trigger),
    "the session is closed": ("I-3", DecodeSession.close),
    "the host takes part in a step": ("I-8", DecodeSession.step),
    "decode mode is entered twice": ("I-9", DecodeSession.enter),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attempt_to_break_an_invariant_is_refused_by_name_and_changes_nothing(
    session: DecodeSession, attack: str
) -> None:
    slot = session.admit("the sea", LONG)
    invariant, strike = ATTACKS[attack]
    before = session.plan, session.counts.instantiations
    with held(session._runner):  # so that it surely runs
        session.trigger()
        with pytest.raises(DecodeInvariantError) as refused:
            strike(session)
    assert refused.value.invariant == invariant
    tokens = list(session.tokens())
    assert len(of_slot(tokens, slot)) == 150
    assert (session.plan, session.counts.instantiations) == before


def test_a_trigger_outside_decode_mode_is_refused_and_a_step_of_the_hosts_is_allowed(opened: DecodeSession) -> None:
    with pytest.raises(DecodeInvariantError, match="enter it first"):
        opened.trigger()
    slot = opened.admit("the sea", Sampling(max_tokens=3, temperature=0, ignore_eos=True))
    for _ in range(3):
        opened.step()
    tokens = opened.read()
    assert len(of_slot(tokens, slot)) == 3
    assert tokens[-1].finish_reason == "length"


def test_more_sequences_than_slots_or_pages_are_refused_and_nothing_is_taken(path: Path) -> None:
    with DecodeSession(path, device="cpu", slots=2, context=64, threads=1) as session:
        for _ in range(2):
            session.admit("the sea", GREEDY)
        with pytest.raises(NoSlot, match="all 2 slots"):
            session.admit("the sea", GREEDY)
        session.trigger()
        assert len(list(session.tokens())) == 48
        session.admit("the sea", GREEDY)
        session.trigger()
        assert len(list(session.tokens())) == 24


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        ("", None, BadInput),
        ([], None, BadInput),
        ([10**9], None, BadInput),
        ([True], None, BadInput),
        ("the sea", Sampling(stop="a"), Unsupported),
        ("the sea", Sampling(json_mode=True), Unsupported),
        ("the sea", 3, BadOption),
    ],
)
def test_what_cannot_be_admitted_is_refused_and_takes_no_slot(
    session: DecodeSession, prompt: object, sampling: object, error: type[Exception]
) -> None:
    with pytest.raises(error):
        session.admit(prompt, sampling)  # type: ignore[arg-type]
    assert session._generations == {}


@pytest.mark.parametrize("slot", [1, -1, None, [], "0"])
def test_a_slot_that_holds_no_sequence_cannot_be_cancelled(session: DecodeSession, slot: Any) -> None:
    with pytest.raises(BadInput, match=re.escape(f"slot {slot!r} holds no sequence; taken: none")):
        session.cancel(slot)


@pytest.mark.parametrize("slot", [True, False, 0.0, np.array([0, 1]), "0"])
def test_a_slot_that_is_taken_is_cancelled_by_its_number_alone(session: DecodeSession, slot: Any) -> None:
    session.admit("the sea", GREEDY)
    session.admit("one two", GREEDY)
    with pytest.raises(BadInput, match=r"holds no sequence; taken: \[0, 1\]"):
        session.cancel(slot)
    session.cancel(np.int64(1))  # type: ignore[arg-type]
    session.trigger()
    assert {one.slot: one.finish_reason for one in session.tokens()} == {0: "length", 1: "cancelled"}


def test_another_thread_exits_and_closes_for_one_that_has_ended(path: Path) -> None:
    def enter() -> DecodeSession:
        session = DecodeSession(path, device="cpu", slots=1, context=256, threads=1)
        session.enter()
        session.admit([5, 9, 2], GREEDY)
        return session

    with ThreadPoolExecutor(1) as pool:
        session = pool.submit(enter).result()
        with pytest.raises(BadInput, match="for the thread that opened it"):
            session.exit()
    with pytest.raises(BadInput, match="for the thread that opened it"):
        session.trigger()
    session.exit()
    session.close()
    assert not session.entered


def test_calls_of_another_thread_are_refused_and_change_nothing(session: DecodeSession, path: Path) -> None:
    session.admit("the sea", GREEDY)
    calls: tuple[Callable[[], object], ...] = (
        lambda: session.admit("one two", GREEDY),
        lambda: session.cancel(0),
        lambda: next(session.tokens()),
        session.trigger,
        session.read,
        session.exit,
        session.close,
        lambda: session.__exit__(ValueError, ValueError(), None),
    )
    with ThreadPoolExecutor(1) as other:
        for call in calls:
            with pytest.raises(BadInput, match="for the thread that opened it"):
                other.submit(call).result()
    session.trigger()
    assert [one.token for one in session.tokens()] == expected_of(path, "the sea")


def test_a_full_inbox_says_what_empties_it(session: DecodeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = session.admit("the sea", GREEDY)
    monkeypatch.setattr(session._runner.host, "cancel", lambda *_: False)
    with pytest.raises(QueueFull, match="the inbox is full: trigger, then cancel again"):
        session.cancel(slot)


def test_tokens_of_sequences_that_were_not_triggered_are_refused(session: DecodeSession, path: Path) -> None:
    slot = session.admit("the sea", GREEDY)
    with pytest.raises(BadInput, match=rf"the sequences of slots \[{slot}\] wait for a trigger"):
        next(session.tokens())
    session.trigger()
    assert of_slot(list(session.tokens()), slot) == expected_of(path, "the sea")
    assert list(session.tokens()) == []


def test_a_sequence_admitted_after_the_loops_end_waits_for_the_next_trigger(session: DecodeSession) -> None:
    session.admit("the sea", GREEDY)
    session.trigger()
    stream = session.tokens()
    first = [next(stream)]
    session.exit()  # waits for the loop's end
    session.enter()
    second = session.admit("one two", GREEDY)
    first += stream
    assert of_slot(first, second) == []
    session.trigger()
    assert len(of_slot(list(session.tokens()), second)) == 24


def test_a_mode_that_the_host_paces_is_refused_before_weights_are_read(path: Path) -> None:
    """E-26."""
    read: list[int] = []
    with pytest.raises(HardwareCannot, match="paced by the host"):
        DecodeSession(path, device="cpu", mode="eager", progress=lambda done, _: read.append(done))
    assert read == []


def test_an_error_inside_the_block_ends_the_loop_soon(path: Path) -> None:
    session = DecodeSession(path, device="cpu", slots=1, context=tiny_model.CONTEXT, threads=1)
    session.admit("the sea", replace(GREEDY, max_tokens=tiny_model.CONTEXT - 100))
    host = session._runner.host

    def fail() -> None:
        with session:
            session.trigger()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert host.word(Word.STEPS) < tiny_model.CONTEXT - 200
    session.close()  # again: nothing


def test_a_closed_session_answers_nothing(path: Path) -> None:
    with DecodeSession(path, device="cpu", slots=1, context=256, threads=1) as session:
        pass
    calls: tuple[Callable[[], object], ...] = (
        session.enter,
        session.trigger,
        session.exit,
        session.step,
        session.read,
        lambda: session.admit("the sea"),
        lambda: session.cancel(0),
        lambda: next(session.tokens()),
        lambda: session.counts,
        lambda: session.plan,
    )
    for call in calls:
        with pytest.raises(BadInput, match="this session is closed"):
            call()


def test_a_session_that_is_not_closed_ends_with_its_last_reference(path: Path) -> None:
    session = DecodeSession(path, device="cpu", slots=1, context=2048, threads=1)
    session.enter()
    session.admit("the sea", Sampling(max_tokens=2000, temperature=0, ignore_eos=True))
    session.trigger()
    runner = session._runner
    del session
    assert not runner.decode_mode.on
    assert not runner.decode_mode.running
