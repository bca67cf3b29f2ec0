"""Clients of every kind, over plain sockets: those that want an answer, and those that do harm.

An honest client checks that its request ends exactly once, with the answer that it has had before, or with an error
that says why. A harmful one is slow, vanishes, cancels, or sends what is no request; the server must answer or
disconnect it in bounded time, and never with an error of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tests.serve.hostile import NOISE, SCHEMAS

ANSWER_S: Final = 90.0  # for any answer: a model may be loaded, or a process that hangs be killed, in between
LONG_ANSWER: Final = 6_000  # tokens, so that an answer can be left in the middle
LONGEST_BODY: Final = 8 * 2**20
_WORDS: Final = ("hello", "a", "tell me more", "x" * 40, "naïve", "one two three four five six seven", "世界", "?")


# HTTP


class Cut(Exception):
    """The connection ended in the middle of an answer."""


class Reply(NamedTuple):
    """The head of an answer, and its body as it arrives."""

    status: int
    headers: Mapping[str, str]
    parts: AsyncIterator[bytes]

    @property
    def id(self) -> str | None:
        return self.headers.get("x-request-id")


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def request_bytes(path: str, content: bytes, *more: str, method: str = "POST") -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: 127.0.0.1",
        "content-type: application/json",
        f"content-length: {len(content)}",
        "connection: close",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def reply_of(reader: asyncio.StreamReader) -> Reply:
    try:
        first = (await reader.readline()).split()
        if len(first) < 2 or not first[1].isdigit():
            raise Cut("no answer")
        headers = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
    except OSError as error:
        raise Cut(str(error)) from error
    return Reply(int(first[1]), headers, _parts(reader, headers))


async def _parts(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    try:
        if headers.get("transfer-encoding") != "chunked":
            yield await reader.readexactly(int(headers.get("content-length", 0)))
            return
        while size := int((await reader.readline()).partition(b";")[0] or b"-", 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise Cut(str(error)) from error


async def get(port: int, path: str, seconds: float) -> tuple[int, bytes]:
    """A page of the server."""
    async with asyncio.timeout(seconds), connected(port) as (reader, writer):
        writer.write(request_bytes(path, b"", method="GET"))
        reply = await reply_of(reader)
        return reply.status, b"".join([part async for part in reply.parts])


# Honest clients


class End(NamedTuple):
    """How a request ended: `whole` with its text, an `error` event, or a `status`, with what the server says; `cut` if
    the connection ended first. `id` as the server logs it."""

    kind: str
    text: str = ""
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Api:
    """A path, a body for a text, and how its stream and its whole answer are read."""

    path: str
    body: Callable[[str, int], dict[str, Any]]
    whole: Callable[[Any], str]
    delta: Callable[[Any], str]
    is_last: Callable[[Any], bool]  # of the events of a stream; also `[DONE]`, as a text
    headers: tuple[str, ...] = ()


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _choice(event: Any) -> Any:
    choices = event.get("choices") if isinstance(event, dict) else None
    return choices[0] if choices else {}


GREEDY: Final = {"temperature": 0, "seed": 1}
APIS: Final = (
    Api(
        "/v1/chat/completions",
        lambda text, most: {"messages": _messages(text), "max_tokens": most, "ignore_eos": True, **GREEDY},
        lambda answer: str(answer["choices"][0]["message"]["content"]),
        lambda event: (_choice(event).get("delta") or {}).get("content") or "",
        lambda event: bool(event == "[DONE]"),
    ),
    Api(
        "/v1/completions",
        lambda text, most: {"prompt": text, "max_tokens": most, "ignore_eos": True, **GREEDY},
        lambda answer: str(answer["choices"][0]["text"]),
        lambda event: _choice(event).get("text") or "",
        lambda event: bool(event == "[DONE]"),
    ),
    Api(
        "/v1/responses",
        lambda text, most: {"input": text, "max_output_tokens": most, "temperature": 0},
        lambda answer: "".join(
            part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]
        ),
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        lambda event: event["type"] in ("response.completed", "response.incomplete"),
    ),
    Api(
        "/v1/messages",
        lambda text, most: {"messages": _messages(text), "max_tokens": most, "model": "", "temperature": 0},
        lambda answer: "".join(block["text"] for block in answer["content"] if block["type"] == "text"),
        lambda event: event["delta"].get("text", "") if event["type"] == "content_block_delta" else "",
        lambda event: bool(event["type"] == "message_stop"),
        ("anthropic-version: 2023-06-01",),
    ),
    Api(
        "/api/chat",
        lambda text, most: {"messages": _messages(text), "options": {"num_predict": most, **GREEDY}},
        lambda answer: str(answer["message"]["content"]),
        lambda event: str((event.get("message") or {}).get("content", "")),
        lambda event: bool(event.get("done")),
    ),
)


def events_in(body: bytes) -> list[Any]:
    """The events of a stream: objects, and `[DONE]` as a text. Comments and names of events are none."""
    found: list[Any] = []
    for line in body.decode().splitlines():
        if line.startswith("{"):
            found.append(json.loads(line))
        elif line.startswith("data: "):
            found.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
    return found


def is_error(event: Any) -> bool:
    return isinstance(event, dict) and (event.get("type") in ("error", "response.failed") or bool(event.get("error")))


def end_of_stream(api: Api, body: bytes, id: str | None) -> End:
    """How a stream ended that came whole; ValueError if it ended never, twice, or before its last event."""
    events = events_in(body)
    ends = [index for index, event in enumerate(events) if is_error(event) or api.is_last(event)]
    if len(ends) != 1 or ends[0] != len(events) - 1:
        raise ValueError(f"a stream of {len(events)} events has its ends at {ends}: {body[-600:]!r}")
    if is_error(events[-1]):
        return End("error", json.dumps(events[-1]), id)
    return End("whole", "".join(api.delta(event) for event in events), id)


async def ask(port: int, api: Api, body: dict[str, Any]) -> End:
    """Send a request, and read its answer to the end. ValueError for an answer that has none, or more than one."""
    async with asyncio.timeout(ANSWER_S), connected(port) as (reader, writer):
        id = None
        try:
            writer.write(request_bytes(api.path, json.dumps(body).encode(), *api.headers))
            reply = await reply_of(reader)
            id = reply.id
            content = b"".join([part async for part in reply.parts])
            if await reader.read(1):
                raise ValueError(f"{api.path}: there is more after the answer")
        except (Cut, OSError) as error:
            return End("cut", str(error), id)
    if reply.status != 200:
        return End(f"status {reply.status}", content.decode(errors="replace"), id)
    if body["stream"]:
        return end_of_stream(api, content, id)
    return End("whole", api.whole(json.loads(content)), id)


def honest(chance: random.Random, models: tuple[str, ...]) -> tuple[Api, dict[str, Any], str]:
    """A request, and what names its answer: the same text in the same API has the same answer, streamed or not."""
    api, text = chance.choice(APIS), chance.choice(_WORDS)
    most = chance.choice((1, 2, 8, 40, 200))
    body = {**api.body(text, most), "model": chance.choice(models), "stream": chance.random() < 0.6}
    return api, body, f"{api.path} {text} {most}"


# Harmful clients: each returns its status, or None if it did not wait for one


Harm = Callable[[int, random.Random, str], Awaitable[int | None]]


def _long(model: str, **more: Any) -> bytes:
    body = {"model": model, "messages": _messages("hello"), "max_tokens": LONG_ANSWER, "ignore_eos": True}
    return request_bytes("/v1/chat/completions", json.dumps({**body, "stream": True, **more}).encode())


def _reset(writer: asyncio.StreamWriter) -> None:
    """Have the connection end without a goodbye, as when a cable is pulled."""
    lingering = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, lingering)


async def vanishes_while_asking(port: int, chance: random.Random, model: str) -> None:
    async with connected(port) as (_, writer):
        sent = _long(model)
        writer.write(sent[: chance.randrange(1, len(sent))])
        await asyncio.sleep(chance.random() * 0.05)
        _reset(writer)


async def vanishes_while_answered(port: int, chance: random.Random, model: str) -> None:
    async with connected(port) as (reader, writer):
        writer.write(_long(model, stream=chance.random() < 0.7, n=chance.choice((1, 1, 2))))
        await asyncio.sleep(chance.random() * 0.3)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await reader.read(chance.choice((1, 1000, 100_000)))
        _reset(writer)


async def cancels(port: int, chance: random.Random, model: str) -> None:
    """Reads some events, and closes the connection in good manners."""
    async with asyncio.timeout(ANSWER_S), connected(port) as (reader, writer):
        writer.write(_long(model, n=chance.choice((1, 1, 3))))
        reply = await reply_of(reader)
        left = chance.choice((1, 3, 30))
        async for _ in reply.parts:
            left -= 1
            if left <= 0:
                break


async def reads_slowly(port: int, chance: random.Random, model: str) -> None:
    async with connected(port) as (reader, writer):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.write(_long(model))
        for _ in range(chance.randrange(5, 40)):
            if not await reader.read(chance.choice((1, 50, 500))):
                return
            await asyncio.sleep(chance.random() * 0.2)


async def writes_slowly(port: int, chance: random.Random, model: str) -> int | None:
    """A short request in many pieces; it is answered all the same."""
    async with asyncio.timeout(ANSWER_S), connected(port) as (reader, writer):
        sent = _long(model, max_tokens=2)
        step = max(1, len(sent) // chance.randrange(5, 25))
        for begin in range(0, len(sent), step):
            writer.write(sent[begin : begin + step])
            await asyncio.sleep(chance.random() * 0.15)
        return await _status(reader)


async def sends_noise(port: int, chance: random.Random, model: str) -> int | None:
    async with asyncio.timeout(ANSWER_S), connected(port) as (reader, writer):
        headers = "".join(f"x-{n}: {'y' * 900}\r\n" for n in range(chance.choice((1, 300))))
        noise = (*NOISE, chance.randbytes(chance.randrange(1, 5000)), f"GET / HTTP/1.1\r\n{headers}".encode())
        with suppress(OSError):
            writer.write(chance.choice(noise) + b"\r\n\r\n")
            writer.write_eof()
        return await _status(reader)


async def sends_a_hostile_body(port: int, chance: random.Random, model: str) -> int | None:
    api = chance.choice(APIS)
    async with asyncio.timeout(ANSWER_S), connected(port) as (reader, writer):
        content = hostile_body(chance, {**api.body("hello", 4), "model": model})
        wrong = chance.choice(((), (), (), ("content-encoding: gzip",), ("content-length: 3", "x: y")))
        with suppress(OSError):
            writer.write(request_bytes(api.path, content, *api.headers, *wrong))
            await writer.drain()
            if wrong[1:] or chance.random() < 0.2:
                writer.write_eof()
        return await _status(reader)


async def sends_a_schema_bomb(port: int, chance: random.Random, model: str) -> int | None:
    schema = {"name": "x", "schema": chance.choice([*SCHEMAS.values()])}
    wanted = {"type": "json_schema", "json_schema": schema}
    async with asyncio.timeout(ANSWER_S), connected(port) as (reader, writer):
        writer.write(_long(model, max_tokens=10, response_format=wanted))
        return await _status(reader)


async def _status(reader: asyncio.StreamReader) -> int | None:
    try:
        reply = await reply_of(reader)
        async for _ in reply.parts:
            pass
        return reply.status
    except Cut:
        return None


def hostile_body(chance: random.Random, body: dict[str, Any]) -> bytes:
    """A body with something wrong: in its bytes, its nesting, its size, or the type of a field."""
    good = json.dumps(body).encode()
    match chance.randrange(8):
        case 0:
            return good[: chance.randrange(len(good))]
        case 1:
            at = chance.randrange(len(good))
            return good[:at] + chance.randbytes(chance.randrange(1, 9)) + good[at + 1 :]
        case 2:
            return b"[" * chance.choice((10, 1000, 100_000))
        case 3:
            return b'{"a":' * 5000 + b"1" + b"}" * 5000
        case 4:
            return chance.choice((b"", b"null", b"[]", b'"x"', b"1e999", b"\xff\xfe{}", b"{}{}"))
        case 5:
            return json.dumps({**body, "messages": _messages("word " * chance.choice((10_000, 1_000_000)))}).encode()
        case 6:
            return b" " * (LONGEST_BODY + 1)
        case _:
            strange: tuple[Any, ...] = (
                None,
                -1,
                1e308,
                2**70,
                "",
                "\ud800",
                [],
                [[]],
                {},
                {"a": [1]},
                True,
                ["x"] * 5000,
            )
            field = chance.choice([*body, "stop", "n", "tools", "response_format", "logit_bias", "top_p", "stream"])
            return json.dumps({**body, field: chance.choice(strange)}).encode()


HARMS: Final[tuple[Harm, ...]] = (
    vanishes_while_asking,
    vanishes_while_answered,
    cancels,
    reads_slowly,
    writes_slowly,
    sends_noise,
    sends_a_hostile_body,
    sends_a_schema_bomb,
)
