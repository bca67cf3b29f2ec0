"""An answer that another process makes, on its way to the client.

Of a stream only whole events are passed on, so that one whose process dies can end with one error event. Nothing here
knows which process it is.
"""

from __future__ import annotations

import json
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.types import Send

from ostinato.serve.errors import Refusal
from ostinato.serve.messages import anthropic_error_event
from ostinato.serve.ollama import ollama_error_line
from ostinato.serve.responses_output import lost_event
from ostinato.serve.stream import EVENTS, LINES, TimedSend, error_event
from ostinato.serve.upstream import RawHeaders

_DATA: Final = b"\ndata: "


def stream_error(path: str, refusal: Refusal, n_events: int) -> bytes:
    """The last event of a path's stream when the process that made the first `n_events` has died."""
    match path:
        case "/v1/responses":
            return lost_event(refusal, n_events)
        case "/v1/messages":
            return anthropic_error_event(refusal)
        case "/api/chat" | "/api/generate":
            return ollama_error_line(refusal)
    return error_event(refusal)


class Relay:
    """Sends an answer to the client of a request for `path`. If the client reads nothing for `write_s`, that is a
    `TimeoutError`. The caller must `close` it."""

    def __init__(self, send: Send, path: str, write_s: float | None = None) -> None:
        self._send, self._path = TimedSend(send, write_s), path
        self._ending = b""  # of an event or line, if it streams
        self._held = b""  # the beginning of an event whose end has not arrived
        self._n_events = 0
        self.began = False

    async def begin(self, status: int, headers: RawHeaders) -> None:
        """Send the head."""
        kind = Headers(raw=list(headers)).get("content-type", "")
        self._ending = b"\n\n" if kind.startswith(EVENTS) else b"\n" if kind.startswith(LINES) else b""
        self.began = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def part(self, part: bytes) -> None:
        """Send a part of the body."""
        if self._ending:
            part, self._held = self._whole(self._held + part)
            self._n_events += (b"\n" + part).count(_DATA)  # comments are none
        if part:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})

    def _whole(self, part: bytes) -> tuple[bytes, bytes]:
        end = part.rfind(self._ending) + len(self._ending) if self._ending in part else 0
        return part[:end], part[end:]

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": self._held, "more_body": False})

    async def fail(self, refusal: Refusal) -> None:
        """The one error event of an interrupted stream; no `[DONE]` follows. Another answer just ends."""
        self._held = b""
        if self._ending:
            last = stream_error(self._path, refusal, self._n_events)
            await self._send({"type": "http.response.body", "body": last, "more_body": True})
        await self.end()

    def close(self) -> None:
        self._send.close()


def refusal_in(status: int, body: bytes) -> Refusal:
    """An error that another process has answered with, in any API's shape."""
    try:
        error: Any = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return Refusal(status, f"the model's process answered with {status}")
    if not isinstance(error, dict):
        return Refusal(status, str(error))
    return Refusal(status, str(error.get("message")), param=error.get("param"), code=error.get("code"))
