"""`make chaos` in a minute, or less; and that it notices what it looks for."""

from __future__ import annotations

import asyncio
import random
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bench import chaos_loop, chaos_server
from bench.chaos_clients import APIS, End, end_of_stream, hostile_body
from bench.chaos_held import MB, Held, growth
from bench.chaos_loop import Reader
from bench.chaos_server import Asked, Chaos, ServerReport, Span
from ostinato.engine.request import Cancelled, Request, RequestMessage, Token
from tests.counts import soak, soaking
from tests.engine.opened import bits, open_engine, prompt, sampling

CHAT = APIS[0]


@pytest.mark.skipif(not soaking(), reason="a server under faults on a busy machine takes long: OSTINATO_SOAK=1 only")
@pytest.mark.soak
@pytest.mark.slow
def test_a_server_under_every_fault_loses_nothing_and_leaks_nothing(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**31) if soaking() else 3
    report = chaos_server.run(soak(60, part=6), seed, tmp_path)
    assert report.wrong == [], f"seed {seed}"
    assert report.ends["whole"]
    assert report.faults


@pytest.mark.slow
def test_the_server_starts_from_any_folder_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    server = chaos_server.Server(tmp_path)
    asyncio.run(server.start())
    assert (server.end(), server.left()) == (0, [])


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("kind", chaos_loop.KINDS)
def test_random_admissions_and_cancels_end_once_with_the_tokens_they_have_alone(kind: Any) -> None:
    n = soak(20_000, part=50)
    report = chaos_loop.run(kind, n, seed=7)
    assert report.wrong == []
    assert report.counts["admitted"] >= n
    assert report.counts["cancelled in its answer"]


# What it notices


def told_of(*messages: RequestMessage) -> list[str]:
    """What is said of a request with these messages, whose answer has two tokens."""
    wrong: list[str] = []
    with open_engine(n_slots=1) as engine:
        answer = tuple(engine.submit(prompt(1, 4), sampling(max_tokens=2)))
    asked = chaos_loop.Asked((1,), sampling(max_tokens=2), tuple(bits(answer)))
    reader = Reader(asked, None, lambda _, __, what: wrong.append(what) if what else None)
    request: Any = object()
    for message in messages:
        reader(request, message)
    return wrong


def test_an_end_without_a_cause_an_error_and_a_second_end_are_noticed() -> None:
    assert told_of(Cancelled()) == ["it ended as cancelled, and cancel() had not been called"]
    assert told_of(RuntimeError("x")) == ["RuntimeError: x"]
    (_, second) = told_of(Cancelled(), Cancelled())
    assert second == "Cancelled after its end"


def test_another_token_than_alone_is_noticed() -> None:
    (wrong,) = told_of(Token(1, 0.0, (), 0, 0, None))
    assert "which it is not alone" in wrong


@pytest.mark.slow
def test_a_request_that_never_ends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver, n_ends = Request._deliver, count()

    def losing(self: Request, message: RequestMessage) -> None:
        if not (self.ended and next(n_ends) == 300):
            deliver(self, message)

    monkeypatch.setattr(Request, "_deliver", losing)
    monkeypatch.setattr(chaos_loop, "QUIET_S", 0.3)
    report = chaos_loop.run("kv", 400, seed=1)
    (wrong,) = report.wrong
    assert wrong == f"{report.counts['accepted']} were accepted and {report.counts['ended']} have ended"


def test_what_a_process_holds_may_not_grow() -> None:
    small, large = Held(100 * MB, 10, 4), Held(200 * MB, 10, 4)
    assert growth([small, large, large]) == []
    assert growth([small, small, large]) == ["memory grew from 100.0 MiB in its third quarter to 200.0 MiB"]
    assert growth([small] * 15 + [large]) == []  # a long body that was under way
    leak = [Held(100 * MB + number * MB // 4, 10, 4) for number in range(200)]
    assert growth(leak) == ["memory grew from 131.1 MiB in its third quarter to 143.6 MiB"]
    assert growth(leak[:80]) == []  # a short life
    assert growth([small, small, Held(100 * MB, 12, 5)], handles=1, threads=1) == ["handles grew from 10 to 12"]


@pytest.mark.parametrize(
    ("body", "ends"),
    [
        (b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n', "[]"),
        (b"data: [DONE]\n\ndata: [DONE]\n\n", "[0, 1]"),
        (b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n', "[0, 1]"),
        (b'data: [DONE]\n\ndata: {"choices": []}\n\n', "[0]"),
    ],
    ids=["none", "two", "an error and another", "before the last event"],
)
def test_a_stream_without_exactly_one_end_is_noticed(body: bytes, ends: str) -> None:
    with pytest.raises(ValueError, match="has its ends at") as error:
        end_of_stream(CHAT, body, None)
    assert ends in str(error.value)


def test_a_stream_has_its_text_or_its_error() -> None:
    parts = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n: a comment\n\n'
    assert end_of_stream(CHAT, parts * 2 + b"data: [DONE]\n\n", "7") == End("whole", "aa", "7")
    assert end_of_stream(CHAT, parts + b'data: {"error": {"message": "x"}}\n\n', None).kind == "error"


class PlayedServer:
    """A server that only has a log."""

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)

    def new_lines(self) -> list[str]:
        return self._lines


def judged(ended: End, *, storm: bool, faults: tuple[Span, ...] = (), log: tuple[str, ...] = ()) -> list[str]:
    """What is said of a request that ran from 10 to 11."""
    server: Any = PlayedServer(*log)
    chaos = Chaos(server, 0, ServerReport())
    chaos._faults.spans += faults
    one = Asked(10.0, 11.0, "x", ended)
    chaos._check_log([one], storm=storm)
    chaos._judge(one, storm=storm)
    return chaos.report.wrong


LINE = '{"id": "a", "outcome": "stop"}'


@pytest.mark.parametrize("kind", ["cut", "error", "status 503"])
def test_an_error_is_excused_by_a_fault_of_its_time_alone(kind: str) -> None:
    death = Span("front", 9.0, 9.1)
    assert judged(End(kind), storm=True, faults=(death,)) == []
    assert judged(End(kind), storm=True, faults=(Span("front", 12.0, 12.1),))
    assert judged(End(kind), storm=True)
    assert judged(End(kind), storm=False, faults=(death,))
    assert judged(End("status 500"), storm=True, faults=(death,))
    assert judged(End("lost"), storm=True, faults=(death,))


def test_a_cut_connection_is_not_excused_by_the_death_of_a_worker() -> None:
    assert judged(End("cut"), storm=True, faults=(Span("worker", 10.5, 10.6),))


def test_a_request_that_is_not_in_the_log_once_is_noticed() -> None:
    answered = End("whole", "text", "a")
    assert judged(answered, storm=True, log=(LINE,)) == []
    assert judged(answered, storm=True) == ["round 0: the request a (x, whole) is in the log 0 times"]
    assert judged(answered, storm=True, log=(LINE, LINE)) == ["round 0: the request a (x, whole) is in the log 2 times"]
    assert judged(answered, storm=True, faults=(Span("log", 10.5, 10.6),)) == []


@pytest.mark.parametrize(
    "line",
    [
        "the worker of one ended: signal SIGSEGV; starting another",
        "the front ended: exit code 1; starting another",
        "error: two: the worker ended before the model was loaded: exit code 1",
        "Traceback (most recent call last):",
    ],
)
def test_a_death_that_is_none_of_the_faults_is_noticed(line: str) -> None:
    assert judged(End("whole", "", "a"), storm=True, log=(LINE, line))


def test_a_death_by_a_fault_is_not_noticed_in_a_storm_alone() -> None:
    line = "the worker of one ended: signal SIGKILL, which the system sends where memory runs out; starting another"
    assert judged(End("whole", "", "a"), storm=True, log=(LINE, line)) == []
    assert judged(End("whole", "", "a"), storm=False, log=(LINE, line))


def test_another_answer_to_the_same_request_is_noticed() -> None:
    server: Any = PlayedServer()
    chaos = Chaos(server, 0, ServerReport())
    now = time.monotonic()
    for text in ("a", "b"):
        chaos._judge(Asked(now, now, "x", End("whole", text)), storm=False)
    assert chaos.report.wrong == ["round 0: x: the answer was 'a', and is 'b'"]


def test_hostile_bodies_are_of_every_kind() -> None:
    chance = random.Random(0)
    made = {hostile_body(chance, CHAT.body("hello", 4)) for _ in range(200)}
    assert any(len(one) > 8 * 2**20 for one in made)
    assert any(one.startswith(b"[[[") for one in made)
    assert len(made) > 50
