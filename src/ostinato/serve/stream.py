"""Answers on the wire: events or lines as they are made, or one JSON object; and disconnected clients.

Bytes only: the modules named after the endpoints make the content of events.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ostinato.serve.answers import Answers, TokenUpdate
from ostinato.serve.errors import Refusal, refusal_of
from ostinato.serve.log import Record

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": waiting\n\n"
EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"  # one JSON object on each line
CLIENT_GONE: Final = 499  # nginx's code; it appears only in the log

encode: Final = msgspec.json.Encoder().encode


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(content), status, headers, media_type="application/json")


def event(content: dict[str, Any]) -> bytes:
    """One event.

    >>> event({"a": 1})
    b'data: {"a":1}\\n\\n'
    """
    return b"data: " + encode(content) + b"\n\n"


def named_event(content: dict[str, Any]) -> bytes:
    """One event, named by its `type`.

    >>> named_event({"type": "a"})
    b'event: a\\ndata: {"type":"a"}\\n\\n'
    """
    name: str = content["type"]
    return f"event: {name}\n".encode() + event(content)


def error_event(refusal: Refusal) -> bytes:
    """The last event of a stream that failed, in the shape that chats and completions have."""
    # The standard library's JSON can encode any text that a client sent, even a lone surrogate.
    return b"data: " + json.dumps(refusal.body()).encode() + b"\n\n"


async def formatted(
    answers: Answers, format: Callable[[Sequence[TokenUpdate]], bytes], keep_alive: bytes = KEEP_ALIVE
) -> AsyncGenerator[bytes, None]:
    """A stream's parts while tokens arrive, as an API formats them; `keep_alive` while none arrives."""
    while not answers.done:
        updates = await answers.more()
        if not updates:
            yield keep_alive
            continue
        began = time.perf_counter()
        part = format(updates)
        answers.host_s += time.perf_counter() - began
        if part:
            yield part


class TimedSend:
    """Sends the messages of one response; a client that reads nothing for so long is a `TimeoutError`.

    As `asyncio.timeout` around each send, which would cost more than the send itself: here one timer serves all.
    """

    def __init__(self, send: Send, seconds: float | None) -> None:
        """Without `seconds` there is no deadline. The caller must `close` it."""
        self._send, self._seconds = send, seconds
        self._due: float | None = None  # of the message that is being sent
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_late = False

    async def __call__(self, message: Message) -> None:
        if self._seconds is None:
            await self._send(message)
            return
        loop = asyncio.get_running_loop()
        self._due, self._task = loop.time() + self._seconds, asyncio.current_task()
        if self._timer is None:
            self._timer = loop.call_at(self._due, self._look)
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self._is_late and self._task is not None and not self._task.uncancel():
                raise TimeoutError from None
            raise
        finally:
            self._due = None

    def _look(self) -> None:
        """Cancel the send whose deadline has passed, or wait for the deadline of the current one."""
        self._timer = None
        if self._due is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._due:
            self._timer = loop.call_at(self._due, self._look)
        elif self._task is not None:
            self._is_late = self._task.cancel()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class EventStream(Response):
    """A response that lasts until its events end, its client disconnects, or a failure adds one error event."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        answers: Answers,
        record: Record,
        write_s: float,
        *,
        headers: Mapping[str, str] | None = None,
        failed: Callable[[Refusal], bytes] = error_event,
        media_type: str = EVENTS,
    ) -> None:
        """`failed` makes the error event."""
        given = {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})}
        super().__init__(headers=given, media_type=media_type)
        del self.headers["content-length"]
        self._events, self._answers, self._record, self._write_s = events, answers, record, write_s
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if await while_connected(receive, self._pump(send)) is None:
                self._record.outcome = "cancelled"
        finally:
            self._answers.close()

    async def _pump(self, send: Send) -> bool:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            with closing(TimedSend(send, self._write_s)) as timed:
                async with aclosing(self._events) as events:
                    async for part in events:
                        await timed({"type": "http.response.body", "body": part, "more_body": True})
        except TimeoutError:
            self._record.outcome, self._record.error = "cancelled", "the reader took nothing for too long"
            return True
        except Exception as error:
            await self._tell(error, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    async def _tell(self, error: Exception, send: Send) -> None:
        """The one error event, which ends the stream; no `[DONE]` follows."""
        refusal = refusal_of(error)
        self._record.outcome, self._record.error = "error", f"{type(error).__name__}: {error}"
        last = self._failed(refusal)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._write_s):
                await send({"type": "http.response.body", "body": last, "more_body": True})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of the work; if the client disconnects first, cancel the work and return None."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            doing.cancel()
            with suppress(asyncio.CancelledError):
                await doing
            return None
        return doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def at_once(
    request: Request,
    work: Coroutine[Any, Any, dict[str, Any]],
    answers: Answers,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The whole answer as one JSON object."""
    record: Record = request.state.record
    try:
        content = await while_connected(request.receive, work)
    finally:
        answers.close()
    if content is None:
        return client_gone(record)
    return json_response(content, headers=headers)


def client_gone(record: Record) -> Response:
    """A response to a disconnected client; only the log and the metrics see it."""
    record.outcome = "cancelled"
    return Response(status_code=CLIENT_GONE)
