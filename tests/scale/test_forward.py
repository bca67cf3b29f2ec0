"""The way through the ingress with replicas that are played: who is asked again, and what a client is told."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from anthropic.types.shared import ErrorResponse
from openai.types.responses import ResponseErrorEvent

from ostinato.errors import BadOption
from ostinato.scale.local import Call
from ostinato.scale.settings import ScaleOptions
from ostinato.serve.app import guarded
from ostinato.serve.errors import Refusal
from ostinato.serve.front import FrontService
from ostinato.serve.settings import ServeOptions

pytest.importorskip("ray", reason="the extra `scale` is not installed: the ingress was not tested")
pytestmark = pytest.mark.slow  # it imports Ray
STREAM = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json")]


@pytest.fixture(scope="module")
def deployment() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns of itself
        from ostinato.scale import deployment
    return deployment


class Played:
    """Replicas that answer by a script: for each time they are asked, parts to send or an error to die of."""

    def __init__(self, *scripts: list[Any]) -> None:
        self._scripts = list(scripts)
        self.calls: list[Call] = []
        self.cancelled = 0

    def options(self, **_: Any) -> Any:
        return SimpleNamespace(answer=SimpleNamespace(remote=self._remote))

    def _remote(self, call: Call) -> Any:
        self.calls.append(call)
        return _Answer(self, self._scripts.pop(0))


class _Answer:
    def __init__(self, played: Played, parts: list[Any]) -> None:
        self._played, self._parts = played, parts

    async def __aiter__(self) -> AsyncIterator[Any]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            yield part

    def cancel(self) -> None:
        self._played.cancelled += 1


def passed(deployment: ModuleType, played: Played, path: str = "/v1/completions") -> list[dict[str, Any]]:
    """What a client is sent."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    forward = deployment.Forwarder(FrontService(ServeOptions("x"), 1), played)
    asyncio.run(forward._pass(Call("POST", path, b"{}"), send, SimpleNamespace(outcome="", error=None)))
    return sent


def died() -> Exception:
    from ray.exceptions import ActorDiedError

    error: Exception = ActorDiedError()
    return error


def test_a_request_without_a_byte_of_its_answer_is_asked_again(deployment: ModuleType) -> None:
    played = Played([died()], [(200, STREAM, "x"), died()], [(200, STREAM, "y"), b"data: 1\n\n"])
    sent = passed(deployment, played)
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert b"".join(message.get("body", b"") for message in sent) == b"data: 1\n\n"
    assert len(played.calls) == 3


def test_one_that_always_dies_is_told_503(deployment: ModuleType) -> None:
    with pytest.raises(Refusal, match="has died") as caught:
        passed(deployment, Played([died()], [died()], [died()]))
    assert caught.value.status == 503


def test_a_stream_that_breaks_off_ends_with_one_error_event(deployment: ModuleType) -> None:
    played = Played([(200, STREAM, "x"), b"data: 1\n\n", died()])
    sent = passed(deployment, played)
    events = b"".join(message.get("body", b"") for message in sent).decode().strip().split("\n\n")
    assert events[0] == "data: 1"
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "engine_restarting"
    assert len(events) == 2
    assert sent[-1]["more_body"] is False
    assert len(played.calls) == played.cancelled == 1


def test_a_stream_of_a_response_that_breaks_off_ends_with_an_event_of_its_kind(deployment: ModuleType) -> None:
    played = Played([(200, STREAM, "x"), b"event: a\ndata: 1\n\nevent: b\ndata: 2\n\n", died()])
    body = b"".join(message.get("body", b"") for message in passed(deployment, played, "/v1/responses")).decode()
    name, data = body.strip().split("\n\n")[-1].split("\n")
    event = ResponseErrorEvent.model_validate_json(data.removeprefix("data: "))
    assert (name, event.code, event.sequence_number) == ("event: error", "engine_restarting", 2)


def test_comments_have_no_sequence_number_and_half_an_event_is_not_passed_on(deployment: ModuleType) -> None:
    parts = [b": waiting\n\n: wai", b"ting\n\nevent: a\nda", b"ta: 1\n\n: waiting\n\n", b'event: b\ndata: {"x']
    played = Played([(200, STREAM, "x"), *parts, died()])
    body = b"".join(message.get("body", b"") for message in passed(deployment, played, "/v1/responses")).decode()
    *before, last = body.strip().split("\n\n")
    assert before == [": waiting", ": waiting", "event: a\ndata: 1", ": waiting"]
    assert json.loads(last.split("\ndata: ")[1])["sequence_number"] == 1


def test_a_path_that_does_not_exist_is_told_so_before_its_body_is_read(deployment: ModuleType) -> None:
    options = ServeOptions("x")
    front = FrontService(options, 1)
    app = guarded(deployment.Forwarder(front, Played()), front)
    sent: list[Any] = []

    def asked(method: str, path: str) -> int:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x=1", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": method, "path": path, "query_string": b"", "root_path": "", "client": None,
            "headers": [(b"host", b"localhost"), (b"content-type", b"text/plain")],
        }  # fmt: skip

        async def ask() -> None:
            await app(scope, receive, send)

        asyncio.run(ask())
        return int(sent[-2]["status"])

    assert asked("POST", "/v1/nothing") == 404
    assert asked("POST", "/v1/models") == 405
    assert asked("POST", "/v1/completions") == 415


def test_a_stream_of_a_message_that_breaks_off_ends_with_an_event_of_its_kind(deployment: ModuleType) -> None:
    played = Played([(200, STREAM, "x"), b"event: a\ndata: 1\n\n", died()])
    body = b"".join(message.get("body", b"") for message in passed(deployment, played, "/v1/messages")).decode()
    name, data = body.strip().split("\n\n")[-1].split("\n")
    event = ErrorResponse.model_validate_json(data.removeprefix("data: "))
    assert (name, event.error.type) == ("event: error", "overloaded_error")


def test_a_stream_of_lines_that_breaks_off_ends_with_a_line_of_its_kind(deployment: ModuleType) -> None:
    lines = [(b"content-type", b"application/x-ndjson")]
    played = Played([(200, lines, "x"), b'{"done":false}\n', died()])
    body = b"".join(message.get("body", b"") for message in passed(deployment, played, "/api/chat")).decode()
    first, last = body.splitlines()
    assert json.loads(first) == {"done": False}
    assert list(json.loads(last)) == ["error"]


def test_replicas_keep_no_responses(deployment: ModuleType) -> None:
    with pytest.raises(BadOption, match="replicas keep no responses"):
        deployment.application(ServeOptions("tiny", keep_responses=3), ScaleOptions())


def test_a_full_line_sends_a_request_on_and_only_where_it_was_not(deployment: ModuleType) -> None:
    played = Played([(429, JSON, "x"), b"{}"], [(200, JSON, "y"), b"{}"])
    sent = passed(deployment, played)
    assert sent[0]["status"] == 200
    assert [call.full for call in played.calls] == [(), ("x",)]
    with pytest.raises(Refusal) as caught:
        passed(deployment, Played([(429, JSON, "x")], [(429, JSON, "x")]))
    assert caught.value.status == 429


def test_replicas_without_room_come_last(deployment: ModuleType) -> None:
    from ostinato.scale.router import full_last

    call = Call("POST", "/", full=("b",))
    assert full_last(["b", "a", "c"], SimpleNamespace(args=[call])) == ["a", "c", "b"]
    assert full_last(["b", "a"], None) == ["b", "a"]


def test_a_replica_whose_engine_died_says_so_to_serve(deployment: ModuleType) -> None:
    states: list[str] = []
    service = SimpleNamespace(state="ready", why="", die=states.append, stats=lambda: SimpleNamespace(fault=None))
    engine = SimpleNamespace(_server=SimpleNamespace(service=service))
    asyncio.run(deployment.EngineReplica.check_health(engine))
    service.stats = lambda: SimpleNamespace(fault="the device fell off")
    service.die = lambda why: vars(service).update(state="dead", why=why)
    with pytest.raises(RuntimeError, match="the device fell off"):
        asyncio.run(deployment.EngineReplica.check_health(engine))
