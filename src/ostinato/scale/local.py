"""The server's application without a socket: bytes of a request in, the parts of an HTTP response out.

Replicas and batches call the same application as the single server, so that an answer and its digest are the same in
each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.types import Message

from ostinato.llm import LLM
from ostinato.serve.app import create_app
from ostinato.serve.log import Write, given_id, write_line
from ostinato.serve.service import Service
from ostinato.serve.settings import ServeOptions

# Parts of an answer that are passed on at once: its head, its opening, its first token.
_AT_ONCE: Final = 4
_JSON: Final = ((b"host", b"localhost"), (b"content-type", b"application/json"))


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, as it travels between processes: the whole body, and what of the head matters."""

    method: str
    path: str
    body: bytes = b""
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = _JSON
    client: str | None = None
    id: str | None = None
    prefix: tuple[bytes, ...] = ()  # of the prompt, for the router
    full: tuple[str, ...] = ()  # replicas that have refused it because their queues were full


class LocalServer:
    """The application over one model. Create, open and call it on one event loop."""

    def __init__(self, options: ServeOptions, *, write: Write = write_line) -> None:
        # Calls from this process, or from the ingress, are authorised already.
        inside = replace(options, keys=(), no_key=True, cors=(), host="127.0.0.1")
        self.service = Service(inside, write=write)
        self._app = create_app(self.service)

    async def messages(self, call: Call, gather_s: float = 0.0) -> AsyncGenerator[Message, None]:
        """The parts that the application sends; if the caller stops reading, the request is cancelled.

        After the first parts, parts that arrive within `gather_s` of each other are joined.
        """
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        given = False

        async def receive() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": call.body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.put_nowait(message)

        async def run() -> None:
            given_id.set(call.id)
            try:
                await self._app(_scope(call), receive, send)
            finally:
                sent.put_nowait(None)

        running = asyncio.ensure_future(run())
        try:
            n_parts, next_s = 0, 0.0
            while (message := await sent.get()) is not None:
                if n_parts >= _AT_ONCE and gather_s:
                    await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                    message = _gathered(message, sent)
                    next_s = time.monotonic() + gather_s
                n_parts += 1
                yield message
        finally:
            gone.set()
            if not running.done():
                # The application notices that its reader has left; wait only that long.
                await asyncio.wait((running,), timeout=1.0)
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        """POST a body; the status and the whole answer."""
        status, parts = 500, []
        async for message in self.messages(Call("POST", path, body)):
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))
        return status, b"".join(parts)


def _gathered(first: Message, sent: asyncio.Queue[Message | None]) -> Message:
    """A part joined with all parts that wait behind it; the end marker stays in the queue."""
    parts = [first.get("body", b"")]
    more = first.get("more_body", False)
    while not sent.empty():
        following = sent.get_nowait()
        if following is None:
            sent.put_nowait(None)
            break
        parts.append(following.get("body", b""))
        more = following.get("more_body", False)
    return {"type": "http.response.body", "body": b"".join(parts), "more_body": more}


def _scope(call: Call) -> dict[str, Any]:
    headers: Sequence[tuple[bytes, bytes]] = call.headers
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": list(headers),
        "client": None if call.client is None else (call.client, 0),
        "server": ("localhost", 0),
        "state": {},
    }


LoadLLM = Callable[[], LLM]
