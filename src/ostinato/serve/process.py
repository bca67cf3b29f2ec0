"""A process of the server under its supervisor: its settings and commands, its signals, and its heartbeat.

It reads its settings as the first line of standard input, and commands as further lines; it writes events as lines of
JSON. One of them is a heartbeat, sent every second from the event loop. It ends when it has drained after a SIGTERM, at
once after a second one, and when its supervisor has died. `worker.py` and `front.py` are the two kinds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from starlette.types import ASGIApp

from ostinato.processes import keep_stderr
from ostinato.serve.http import HttpServer
from ostinato.serve.service import Service

HEARTBEAT_S: Final = 1.0
_LOOK_S: Final = 0.1

ProcessEvent = dict[str, Any]
Tell = Callable[[ProcessEvent], None]


class ServerProcess:
    """Serves an application on a socket until it should end."""

    def __init__(self, service: Service, app: ASGIApp, listening: socket.socket, tell: Tell) -> None:
        self._service, self._listening, self._tell = service, listening, tell
        self._server = HttpServer(app, service.limits)
        self._n_signals = 0
        self._code: int | None = None

    async def run(self) -> int:
        """Serve until the end and return the exit code."""
        serving = asyncio.ensure_future(self._server.serve([self._listening]))
        try:
            while not await self.has_ended():
                await asyncio.sleep(_LOOK_S)
        finally:
            self._server.should_exit = True
            await serving
        return self._code or 0

    async def has_ended(self) -> bool:
        """Whether the process should end now."""
        service = self._service
        if service.stopping.is_set():
            await self.until_idle(service.limits.fault_s)
            return True
        return service.state == "draining" and service.idle.is_set()

    async def until_idle(self, seconds: float) -> None:
        """Let running requests send their last events."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._service.idle.wait()

    def signalled(self) -> None:
        """The first signal drains, the second stops."""
        self._n_signals += 1
        if self._n_signals > 1:
            self._service.stop()
            return
        self._service.drain()
        self._tell({"event": "draining", "running": self._service.n_running})

    def stop(self) -> None:
        """End at once: the supervisor has died."""
        self._service.stop()

    def heard(self, command: ProcessEvent) -> None:
        """Act on a command of the supervisor."""

    async def run_supervised(self) -> int:
        """Run with the process's signals, its supervisor's commands and its heartbeat."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.signalled)
        commands = _Commands(self)
        loop.add_reader(0, commands.read)
        beating = asyncio.ensure_future(_heartbeat(self._tell))
        try:
            return await self.run()
        finally:
            beating.cancel()
            loop.remove_reader(0)


class _Commands:
    """Standard input after its first line. The supervisor holds the other end: end of file means it has died."""

    def __init__(self, process: ServerProcess) -> None:
        self._process, self._rest = process, b""

    def read(self) -> None:
        part = os.read(0, 65_536)
        if not part:
            asyncio.get_running_loop().remove_reader(0)
            self._process.stop()
            return
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            self._process.heard(json.loads(line))


async def _heartbeat(tell: Tell) -> None:
    """Send heartbeats from the event loop: if it hangs, they stop, and the supervisor starts another process."""
    while True:
        tell({"event": "alive"})
        await asyncio.sleep(HEARTBEAT_S)


def talk(text: str) -> None:
    """Write a sentence to the log."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class EventPipe:
    """Writes events to the supervisor, without waiting for it: while it is suspended (Ctrl-Z) and the pipe is full,
    heartbeats are dropped, and other events are kept until a later one can be written."""

    def __init__(self, file: int) -> None:
        os.set_blocking(file, False)
        self._file, self._kept = file, b""
        self._lock = threading.Lock()  # a model is loaded by a thread of its own

    def __call__(self, event: ProcessEvent) -> None:
        line = json.dumps(event).encode() + b"\n"
        with self._lock:
            # What is kept says as well that this process is alive.
            is_beat = event["event"] == "alive" and not self._kept
            self._kept += line if is_beat or event["event"] != "alive" else b""
            try:
                self._kept = self._kept[os.write(self._file, self._kept) :]
            except BlockingIOError:
                if is_beat:
                    self._kept = b""
            except OSError:
                self._kept = b""  # the supervisor has died, which standard input tells


def main(serve: Callable[[dict[str, Any], Tell], Coroutine[Any, Any, int]]) -> None:
    """Run a process of the server; its settings are the first line of standard input."""
    keep_stderr()
    line = b""
    while not line.endswith(b"\n"):  # byte by byte: what follows belongs to the event loop
        part = os.read(0, 1)
        if not part:
            sys.exit(2)
        line += part
    given: dict[str, Any] = json.loads(line)
    events: int = given["events"]
    code = _runner()(serve(given, EventPipe(events)))
    sys.stderr.flush()
    # Not `sys.exit`, which waits for threads: one may still load, and those of a dead engine never end.
    os._exit(code)


def _runner() -> Callable[[Coroutine[Any, Any, int]], int]:
    """The faster event loop, if it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run
