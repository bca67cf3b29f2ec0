"""HTTP between the server's own processes, over sockets in a folder that only this user can open.

A connection carries one request: closing it cancels the request, and its end before the answer is complete means that
the process at the other end has died. Nothing here knows about models or APIs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import httptools

ID: Final = "x-ostinato-id"  # of a request that is passed on
CLIENT: Final = "x-ostinato-client"  # the address that sent it
_MOST_UNREAD: Final = 2**18  # bytes of an answer that wait to be taken; then reading pauses

RawHeaders = Sequence[tuple[bytes, bytes]]


class UpstreamGone(Exception):
    """The process that was asked has ended, or closed the connection before its answer was complete."""


class UpstreamAnswer:
    """An answer while it arrives: its head is there, its parts follow."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.status, self.headers = connection.status, connection.headers

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The body, as it arrives."""
        while part := await self._connection.part():
            yield part

    async def body(self) -> bytes:
        return b"".join([part async for part in self.parts()])


@asynccontextmanager
async def asked(
    path: str,
    method: str,
    target: bytes,
    headers: RawHeaders = (),
    body: bytes = b"",
    opened: Callable[[Callable[[], None]], None] = lambda close: None,
) -> AsyncGenerator[UpstreamAnswer, None]:
    """Send a request to the process that serves the socket at `path`; the answer, when its head has arrived. `opened`
    is called with a function that gives the request up.

    Raises:
        UpstreamGone: there is no such process, or it ended before the answer began.
    """
    loop = asyncio.get_running_loop()
    try:
        _, connection = await loop.create_unix_connection(_Connection, path)
    except OSError as error:
        raise UpstreamGone(str(error)) from error
    try:
        opened(connection.close)
        connection.send(method, target, headers, body)
        await connection.head()
        yield UpstreamAnswer(connection)
    finally:
        connection.close()


class _Connection(asyncio.Protocol):
    """One connection and its one answer. The callbacks that begin with `on_` are those of the parser."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._n_unread = 0
        self._has_head = self._complete = self._lost = self._paused = False
        self._changed = asyncio.Event()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    def send(self, method: str, target: bytes, headers: RawHeaders, body: bytes) -> None:
        assert self._transport is not None
        lines = [b"%s %s HTTP/1.1" % (method.encode(), target), b"connection: close"]
        lines += [b"%s: %s" % pair for pair in headers]
        if body or method == "POST":
            lines.append(b"content-length: %d" % len(body))
        self._transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)

    async def head(self) -> None:
        while not self._has_head:
            await self._change()

    async def part(self) -> bytes:
        """What has arrived since the last call; empty at the end."""
        while not self._parts and not self._complete:
            await self._change()
        part = b"".join(self._parts)
        self._parts.clear()
        self._n_unread = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return part

    async def _change(self) -> None:
        if self._lost:
            raise UpstreamGone("the connection was closed before the answer was complete")
        self._changed.clear()
        await self._changed.wait()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # both loops give one
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._lost = True
            self.close()
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._changed.set()

    # The parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._n_unread += len(body)
        if self._n_unread > _MOST_UNREAD and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._complete = True
