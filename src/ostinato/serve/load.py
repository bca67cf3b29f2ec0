"""A load generator: many clients send requests to any server of OpenAI's API, and are timed.

Either an arrival rate (an open loop: a slow answer does not delay later arrivals) or a number of clients that each
send the next request when one is answered. HTTP is written by hand over asyncio, so that the client's own time stays
small. No engine here.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import ssl
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from ostinato.errors import BadInput

LoadKind = Literal["chat", "completions"]
_LINE_BYTES: Final = 8 * 2**20
# Short and common: about a token each in any vocabulary. A server's own count is what is reported.
_WORDS: Final = """
    the of and to in is was for on with his that by at from it as are be this had not or but one they you were
    their an said all we when out so up into time has two more than now people my over know place years live back
    give most very after thing our just name good man think say great where help through line right too means old
    any same tell boy follow came want show also around form three small set put end does another well large must
""".split()  # noqa: SIM905  a text reads better than a hundred quotes


class Lengths(NamedTuple):
    """A range to draw whole numbers from, both ends included."""

    least: int
    most: int


_SIXTY_FOUR: Final = Lengths(64, 64)


@dataclass(frozen=True, slots=True)
class Load:
    """The load on the server. `rate` in requests per second, or `clients` at once: one of the two."""

    url: str
    model: str | None = None
    kind: LoadKind = "chat"
    n_requests: int = 64
    clients: int | None = 8
    rate: float | None = None
    prompt: Lengths = _SIXTY_FOUR  # in words
    answer: Lengths = _SIXTY_FOUR  # in tokens
    stream: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0
    key: str | None = None
    seed: int = 0
    timeout_s: float = 300.0


@dataclass(slots=True)
class Outcome:
    """One request: times are seconds since the load began; gaps are between tokens as they arrived."""

    asked: float
    ended: float = 0.0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    n_tokens: int = 0
    n_prompt: int = 0
    error: str | None = None
    said: str = ""  # the server's error message, or the system's
    finish: str | None = None


class Spread(NamedTuple):
    """Percentiles of a figure."""

    n: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float


def spread(values: Sequence[float]) -> Spread | None:
    """None without values.

    >>> spread([1.0, 2.0, 3.0, 4.0]).p50
    2.0
    """
    if not values:
        return None
    ordered = sorted(values)
    shares = (quantile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99, 1.0))
    return Spread(len(ordered), math.fsum(ordered) / len(ordered), *shares)


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load: times in seconds, tokens as the server counted them."""

    seconds: float
    answered: int
    errors: dict[str, int]
    requests_s: float
    tokens: int
    tokens_s: float
    prompt_tokens: int
    first_token_s: Spread | None
    gap_s: Spread | None
    per_token_s: Spread | None  # of each request, the mean of its gaps
    whole_s: Spread | None


def report(outcomes: Sequence[Outcome]) -> LoadReport:
    """The figures of a load; requests that failed count as errors and in nothing else."""
    good = [one for one in outcomes if one.error is None]
    began = min((one.asked for one in outcomes), default=0.0)
    seconds = max((one.ended for one in outcomes), default=0.0) - began
    tokens = sum(one.n_tokens for one in good)
    return LoadReport(
        seconds=seconds,
        answered=len(good),
        errors=dict(Counter(one.error for one in outcomes if one.error is not None)),
        requests_s=len(good) / seconds if seconds else 0.0,
        tokens=tokens,
        tokens_s=tokens / seconds if seconds else 0.0,
        prompt_tokens=sum(one.n_prompt for one in good),
        first_token_s=spread([one.first - one.asked for one in good if one.first is not None]),
        gap_s=spread([gap for one in good for gap in one.gaps]),
        per_token_s=spread([math.fsum(one.gaps) / len(one.gaps) for one in good if one.gaps]),
        whole_s=spread([one.ended - one.asked for one in good]),
    )


# Sending requests


async def run(load: Load) -> list[Outcome]:
    """Send all requests; every wait has a deadline, so this ends for any server."""
    server = Server.at(load.url)
    chance = random.Random(load.seed)
    bodies = [_body(load, chance) for _ in range(load.n_requests)]
    began = time.perf_counter()
    if load.rate is not None:
        return await _by_rate(load, server, bodies, chance, began)
    return await _by_clients(load, server, bodies, began)


async def _by_rate(
    load: Load, server: Server, bodies: Sequence[dict[str, Any]], chance: random.Random, began: float
) -> list[Outcome]:
    """Arrivals of a Poisson process, as of many independent clients."""
    assert load.rate is not None
    tasks: list[asyncio.Task[Outcome]] = []
    due = 0.0
    for body in bodies:
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(_ask(load, server, body, began)))
        due += chance.expovariate(load.rate)
    return list(await asyncio.gather(*tasks))


async def _by_clients(load: Load, server: Server, bodies: Sequence[dict[str, Any]], began: float) -> list[Outcome]:
    left = iter(bodies)
    outcomes: list[Outcome] = []

    async def client() -> None:
        for body in left:
            outcomes.append(await _ask(load, server, body, began))

    await asyncio.gather(*(client() for _ in range(load.clients or 1)))
    return outcomes


def _body(load: Load, chance: random.Random) -> dict[str, Any]:
    text = " ".join(chance.choice(_WORDS) for _ in range(chance.randint(*load.prompt)))
    body: dict[str, Any] = {"max_tokens": chance.randint(*load.answer), "temperature": load.temperature}
    body |= {"messages": [{"role": "user", "content": text}]} if load.kind == "chat" else {"prompt": text}
    if load.model is not None:
        body["model"] = load.model
    if load.ignore_eos:
        body["ignore_eos"] = True
    if load.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


async def _ask(load: Load, server: Server, body: dict[str, Any], began: float) -> Outcome:
    outcome = Outcome(asked=time.perf_counter() - began)
    path = "/v1/chat/completions" if load.kind == "chat" else "/v1/completions"
    try:
        async with asyncio.timeout(load.timeout_s), aclosing(server.post(path, body, load.key)) as lines:
            await (_read_stream if load.stream else _read_whole)(lines, outcome, began)
    except TimeoutError:
        outcome.error = "timeout"
    except ServerSaid as error:
        outcome.error, outcome.said = error.kind, error.words
    except (OSError, asyncio.IncompleteReadError, ValueError, KeyError) as error:
        outcome.error, outcome.said = type(error).__name__, str(error)
    outcome.ended = time.perf_counter() - began
    return outcome


async def _read_stream(lines: AsyncGenerator[bytes, None], outcome: Outcome, began: float) -> None:
    last = 0.0
    n_chunks = 0
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        now = time.perf_counter() - began
        content = line[5:].strip()
        if content == b"[DONE]":
            outcome.n_tokens = outcome.n_tokens or n_chunks
            return
        chunk = json.loads(content)
        if "error" in chunk:
            raise ServerSaid("error event", _words_of(content))
        usage = chunk.get("usage")
        if usage:
            outcome.n_tokens, outcome.n_prompt = usage["completion_tokens"], usage["prompt_tokens"]
        for choice in chunk.get("choices") or ():
            outcome.finish = choice.get("finish_reason") or outcome.finish
            if not _says_something(choice):
                continue
            n_chunks += 1
            if outcome.first is None:
                outcome.first = now
            else:
                outcome.gaps.append(now - last)
            last = now
    raise ServerSaid("the stream ended without [DONE]")


def _says_something(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


async def _read_whole(lines: AsyncGenerator[bytes, None], outcome: Outcome, began: float) -> None:
    reply = json.loads(b"".join([line async for line in lines]))
    outcome.n_tokens, outcome.n_prompt = reply["usage"]["completion_tokens"], reply["usage"]["prompt_tokens"]
    outcome.finish = reply["choices"][0]["finish_reason"]


# HTTP


class ServerSaid(Exception):
    """The server answered with an error: its kind, for counting, and its message."""

    def __init__(self, kind: str, words: str = "") -> None:
        super().__init__(kind)
        self.kind, self.words = kind, words


def _words_of(reply: bytes) -> str:
    """The message of an error: OpenAI's field, or the whole text."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(reply)["error"]["message"])
    return reply.decode(errors="replace").strip()[:500]


@dataclass(frozen=True, slots=True)
class Server:
    """Where to connect to."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None

    @classmethod
    def at(cls, url: str) -> Server:
        """From `http://host:port`, with or without `/v1`."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise BadInput(f"{url!r} is no address of a server; give one such as http://127.0.0.1:8000")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), path, tls)

    async def post(self, path: str, body: dict[str, Any], key: str | None) -> AsyncGenerator[bytes, None]:
        """The lines of the answer's body as they arrive; `ServerSaid` for any status but success."""
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.tls, limit=_LINE_BYTES)
        try:
            writer.write(self._request(path, json.dumps(body).encode(), key))
            await writer.drain()
            status, headers = await _head(reader)
            pieces = _chunked(reader) if headers.get("transfer-encoding") == "chunked" else _sized(reader, headers)
            if status != 200:
                async with aclosing(pieces) as parts:
                    raise ServerSaid(f"HTTP {status}", _words_of(b"".join([part async for part in parts])))
            rest = b""
            async with aclosing(pieces) as parts:
                async for part in parts:
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        yield line
            if rest:
                yield rest
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _request(self, path: str, content: bytes, key: str | None) -> bytes:
        secret = f"authorization: Bearer {key}\r\n" if key else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (
            f"POST {self.path}{path} HTTP/1.1\r\nhost: {host}:{self.port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n{secret}\r\n"
        ).encode() + content


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status = (await reader.readline()).split()
    if len(status) < 2 or not status[1].isdigit():
        raise ServerSaid("no HTTP")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip().lower()
    return int(status[1]), headers


async def _chunked(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    while size := int((await reader.readline()).partition(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _sized(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
    if "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
        return
    while part := await reader.read(65_536):
        yield part
