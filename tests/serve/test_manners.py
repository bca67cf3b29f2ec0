"""One client's request delays no other client: large bodies, slow bodies, abandoned work."""

from __future__ import annotations

import asyncio
import json
import random
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from ostinato.serve import app as application
from ostinato.serve import body as bodies
from ostinato.serve.messages_body import MessagesBody
from ostinato.serve.responses_body import ResponsesBody
from ostinato.serve.service import Service
from ostinato.serve.settings import ServeLimits, ServeOptions
from ostinato.serve.shapes import ChatBody, CompletionBody, EmbeddingBody
from tests.serve.running import Running, serving

HELLO: Any = [{"role": "user", "content": "hello"}]
HEAD = "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"


def connected(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=60)


def rest_of(client: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    return b"".join(iter(lambda: client.recv(65_536), b""))


# BodyCounts


def oracle(value: Any) -> bodies.BodyCounts:
    """Keys, objects and lists, and items but the first of each, of a parsed value."""
    if not isinstance(value, dict | list):
        return bodies.BodyCounts(0, 0)
    inside = [oracle(one) for one in (value.values() if isinstance(value, dict) else value)]
    nodes = 1 + (len(value) if isinstance(value, dict) else 0) + sum(one.nodes for one in inside)
    return bodies.BodyCounts(nodes, max(0, len(value) - 1) + sum(one.items for one in inside))


def some_value(rng: random.Random, depth: int) -> Any:
    text = "".join(rng.choices('a"\\,:{}[]é\n', k=rng.randrange(8)))
    match rng.randrange(4 if depth else 2):
        case 0:
            return text
        case 1:
            return rng.choice([None, True, -1.5, 7])
        case 2:
            return [some_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    return {text + str(number): some_value(rng, depth - 1) for number in range(rng.randrange(5))}


def test_the_counts_of_a_body_are_those_of_its_value_wherever_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    for _ in range(500):
        value = some_value(rng, 4)
        body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        monkeypatch.setattr(bodies, "_STEP_BYTES", rng.randrange(1, 12))
        assert bodies.counted(body, 10**6, 10**6) == oracle(value), body


MANY: dict[str, tuple[str, type[BaseModel], bytes]] = {
    "messages": ("/v1/chat/completions", ChatBody, json.dumps({"messages": HELLO * 200_000}).encode()),
    "keys": (
        "/v1/completions",
        CompletionBody,
        json.dumps({"prompt": "x", "metadata": {f"k{i}": 1 for i in range(600_000)}}).encode(),
    ),
    "items": ("/v1/responses", ResponsesBody, json.dumps({"input": HELLO * 200_000}).encode()),
    "anthropic": (
        "/v1/messages",
        MessagesBody,
        json.dumps({"max_tokens": 5, "messages": HELLO * 200_000}).encode(),
    ),
    "ids": ("/v1/embeddings", EmbeddingBody, json.dumps({"input": [[7] * 1000] * 1500}).encode()),
}


@contextmanager
def lag_of(server: Running) -> Iterator[list[float]]:
    """The longest time in which the event loop did not run, as the one item of the list afterwards."""
    found: list[float] = []
    ended = threading.Event()

    async def watch() -> None:
        longest, last = 0.0, time.monotonic()
        while not ended.is_set():
            await asyncio.sleep(0.001)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        found.append(longest)

    watching = asyncio.run_coroutine_threadsafe(watch(), server.loop)
    try:
        yield found
    finally:
        ended.set()
        watching.result(60)


@pytest.mark.parametrize("name", MANY)
def test_a_body_with_too_many_parts_is_refused_and_delays_no_stream(server: Running, name: str) -> None:
    path, kind, body = MANY[name]
    with connected(server) as client, lag_of(server) as lag:
        client.sendall(HEAD.format(path, len(body)).encode() + body)
        reply = rest_of(client)
    began = time.monotonic()
    kind.model_validate(json.loads(body))
    parse_s = time.monotonic() - began
    assert reply.startswith(b"HTTP/1.1 413"), reply
    assert b"the most that are taken" in reply
    # On a machine that does nothing else it is 10 ms. Here other tests run: compared with what parsing would take.
    assert lag[0] < max(0.05, parse_s / 2), f"the loop stood still for {lag[0]:.3f} s; parsing takes {parse_s:.3f} s"


def kinds_of_bodies() -> dict[str, Any]:
    """The records of all bodies, by path."""
    front: Any = application.create_app(Service(ServeOptions("none")))
    routes = [each for each in front._app.routes if isinstance(each, APIRoute)]
    return {each.path: each.body_field.field_info.annotation for each in routes if each.body_field is not None}


def lists_in(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for name, value in schema.items():
            if name != "metadata":
                yield from lists_in(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from lists_in(value)


def test_every_list_of_every_body_is_given_up_at_its_first_bad_item() -> None:
    kinds = kinds_of_bodies()
    assert len(kinds) >= 8
    for path, kind in kinds.items():
        slow = [each for each in lists_in(kind.__pydantic_core_schema__) if not each.get("fail_fast")]
        assert not slow, f"{path}: {slow[:1]}; its record is no FailFastModel"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (ChatBody, {"messages": [{"rol": 1, "content": [1] * 100}] * 100}),
        (ChatBody, {"messages": HELLO, "logit_bias": {str(i): "x" for i in range(1001)}}),
        (CompletionBody, {"prompt": [-1] * 1000}),
        (MessagesBody, {"messages": [{"role": "x", "content": [{"type": 1}] * 100}] * 100}),
        (ResponsesBody, {"input": [{"role": "x", "content": [{"type": "x"}] * 100}] * 100}),
    ],
)
def test_a_body_with_many_errors_reports_few(kind: type[BaseModel], value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(value)
    assert caught.value.error_count() < 10


# Abandoned work


def busy_threads(name: str) -> int:
    """How many threads of a pool are computing: idle ones wait for the next work in `_worker` itself."""
    frames = sys._current_frames()
    found = [frames.get(each.ident or 0) for each in threading.enumerate() if each.name.startswith(name)]
    return sum(frame is not None and frame.f_code.co_name != "_worker" for frame in found)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [[7] * 500] * 500}),
        ("/v1/completions", {"prompt": [[7] * 500] * 120, "echo": True, "logprobs": 0, "max_tokens": 0}),
    ],
)
def test_abandoned_work_beside_the_answers_stops_between_texts(server: Running, path: str, body: Any) -> None:
    content = json.dumps(body).encode()
    began = time.monotonic()
    assert server.post("/v1/embeddings", {"input": [7] * 500}).status_code == 200
    one_s = time.monotonic() - began
    server.log.clear()
    with ExitStack() as clients:
        for _ in range(4):  # as many as there are threads for this
            client = clients.enter_context(connected(server))
            client.sendall(HEAD.format(path, len(content)).encode() + content)
        until(lambda: busy_threads("ostinato-beside") == 4)
    began = time.monotonic()
    assert server.post("/v1/embeddings", {"input": "a text"}).status_code == 200
    next_s = time.monotonic() - began
    until(lambda: busy_threads("ostinato-beside") == 0)
    idle_s = time.monotonic() - began
    # Each of the four ends with the text that it works on; the others are 480 texts or more.
    assert max(next_s, idle_s) < max(1.0, 40 * one_s), f"answered after {next_s:.2f} s, idle after {idle_s:.2f} s"
    until(lambda: [line["outcome"] for line in server.log if line["path"] == path].count("cancelled") == 4)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


# Time


@pytest.mark.slow
def test_a_body_that_drips_is_given_up_at_its_deadline(tiny: Path) -> None:
    limits = ServeLimits(body_s=1.0, body_gap_s=0.7)
    with serving(tiny, llm={"context": 64, "slots": 1}, limits=limits) as server, connected(server) as client:
        client.sendall(HEAD.format("/v1/completions", 1000).encode())
        end = time.monotonic() + 20
        while not select.select([client], [], [], 0.1)[0] and time.monotonic() < end:
            client.sendall(b" ")
        reply = rest_of(client)
        assert reply.startswith(b"HTTP/1.1 408"), reply
        assert b"the whole body did not come within 1 s" in reply
