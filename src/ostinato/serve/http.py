"""The HTTP server below the application: uvicorn, without its signals, and with a deadline for request heads."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ostinato.serve.settings import ServeLimits

IDLE_CONNECTION_S: Final = 30
BACKLOG: Final = 1024
SHUTDOWN_TIMEOUT_S: Final = 5


def protocol_with(head_s: float) -> type[HttpToolsProtocol]:
    """The protocol of one connection; it is closed if a whole head does not arrive in time."""

    class Protocol(HttpToolsProtocol):
        _clock: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            super().connection_made(transport)
            self._clock = self.loop.call_later(head_s, transport.close)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._clock is None:
                self._clock = self.loop.call_later(head_s, self.transport.close)

        def on_headers_complete(self) -> None:
            self._stop_clock()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_clock()
            super().connection_lost(exc)

        def _stop_clock(self) -> None:
            if self._clock is not None:
                self._clock.cancel()
                self._clock = None

    return Protocol


class HttpServer(uvicorn.Server):
    """uvicorn over an application. Its process handles signals, because a server that drains still answers."""

    def __init__(self, app: ASGIApp, limits: ServeLimits) -> None:
        settings: dict[str, Any] = {
            "http": protocol_with(limits.head_s),
            "ws": "none",
            "lifespan": "off",
            "log_config": None,
            "log_level": "critical",
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "backlog": BACKLOG,
            "timeout_keep_alive": IDLE_CONNECTION_S,
            "timeout_graceful_shutdown": SHUTDOWN_TIMEOUT_S,
        }
        super().__init__(uvicorn.Config(app, **settings))

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
