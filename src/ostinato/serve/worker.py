"""A worker: HTTP and engine in one process, started by the supervisor with the listening socket.

It answers from its start, with 503 until the model is loaded. It ends when it has drained after a SIGTERM, at once
after a second one, when its supervisor has died, or shortly after its engine died: then it reports why, and the
supervisor starts the next. It reads its settings from standard input and writes events as lines of JSON; one of them
is a heartbeat, sent every second from the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, TypeVar

from ostinato.errors import OstinatoError
from ostinato.llm import LLM
from ostinato.processes import keep_stderr
from ostinato.serve.app import create_app
from ostinato.serve.http import HttpServer
from ostinato.serve.service import Service
from ostinato.serve.settings import ServeOptions

FAULT_EXIT: Final = 70  # the engine died: start another worker
HEARTBEAT_S: Final = 1.0
_LOOK_S: Final = 0.1

Tell = Callable[[dict[str, Any]], None]
T = TypeVar("T")


class Worker:
    """Runs one worker process."""

    def __init__(self, service: Service, listening: socket.socket, tell: Tell) -> None:
        self._service, self._listening, self._tell = service, listening, tell
        self._server = HttpServer(create_app(service), service.limits)
        self._n_signals = 0
        self._code: int | None = None

    async def run(self, load: Callable[[], LLM]) -> int:
        """Serve until the end and return the exit code."""
        serving = asyncio.ensure_future(self._server.serve([self._listening]))
        loading = asyncio.ensure_future(self._load(load))
        watching = asyncio.ensure_future(self._watch())
        try:
            await watching
        finally:
            loading.cancel()
            self._server.should_exit = True
            await serving
            with suppress(asyncio.CancelledError):
                await loading
        return self._code or 0

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

    async def _load(self, load: Callable[[], LLM]) -> None:
        began = time.perf_counter()
        try:
            llm = await in_daemon_thread(load)
        except OstinatoError as error:
            self._refuse(error.exit_code, str(error))
            return
        except MemoryError as error:
            self._refuse(4, f"this machine ran out of memory: {error or 'no more to be had'}")
            return
        except Exception as error:
            traceback.print_exception(error)
            self._refuse(OstinatoError.exit_code, f"this is our fault: {type(error).__name__}: {error}")
            return
        self._service.open(llm)
        facts = self._service.health()
        self._tell({"event": "ready", "seconds": time.perf_counter() - began, **facts})

    def _refuse(self, code: int, message: str) -> None:
        self._tell({"event": "refused", "message": message})
        self._code = code or OstinatoError.exit_code
        self._service.stop()

    async def _watch(self) -> None:
        """Return when the worker should end."""
        service = self._service
        while True:
            if service.stopping.is_set():
                await self._until_idle(service.limits.fault_s)
                return
            if service.state == "draining" and service.idle.is_set():
                return
            fault = None if service.model is None else service.model.fault
            if fault is not None:
                service.die(fault)
                self._tell({"event": "fault", "reason": fault})
                self._code = FAULT_EXIT
                await self._until_idle(service.limits.fault_s)
                return
            await asyncio.sleep(_LOOK_S)

    async def _until_idle(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._service.idle.wait()


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run work in a daemon thread, so that the process can end before the work does."""
    made: Future[T] = Future()
    made.set_running_or_notify_cancel()  # from now on its caller may go, and the work ends all the same

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="ostinato-load", daemon=True).start()
    return await asyncio.wrap_future(made)


async def serve(options: ServeOptions, restarts: dict[str, int], listening: socket.socket, tell: Tell) -> int:
    """A worker in this process until its end, with its signals and its supervisor's pipe."""
    service = Service(options, restarts=restarts)
    worker = Worker(service, listening, tell)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.signalled)
    loop.add_reader(0, _on_end_of_input, loop, worker)

    def talk(text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def load() -> LLM:
        llm = LLM(options.model, load=options.load, talk=talk)
        # What is loaded now stays: later collections, which stop every thread, need not visit it again (100 ms).
        gc.collect()
        gc.freeze()
        return llm

    beating = asyncio.ensure_future(_heartbeat(tell))
    code = await worker.run(load)
    if code != FAULT_EXIT:  # the resources of a dead engine end with the process
        await loop.run_in_executor(None, service.close)
    beating.cancel()
    return code


async def _heartbeat(tell: Tell) -> None:
    """Send heartbeats from the event loop: if it hangs, they stop, and the supervisor starts another worker."""
    while True:
        tell({"event": "alive"})
        await asyncio.sleep(HEARTBEAT_S)


def _on_end_of_input(loop: asyncio.AbstractEventLoop, worker: Worker) -> None:
    """The supervisor holds the other end of standard input and writes nothing more: end of file means it has died."""
    if not os.read(0, 4096):
        loop.remove_reader(0)
        worker.stop()


def _runner() -> Callable[[Coroutine[Any, Any, int]], int]:
    """The faster event loop, if it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run


def main() -> None:
    """The worker process; its settings are the first line of standard input."""
    keep_stderr()
    line = b""
    while not line.endswith(b"\n"):  # byte by byte: what follows belongs to the event loop
        part = os.read(0, 1)
        if not part:
            sys.exit(2)
        line += part
    given = json.loads(line)
    options = ServeOptions.from_json(given["options"])
    listening = socket.socket(fileno=given["socket"])
    events: int = given["events"]
    os.set_blocking(events, False)

    def tell(event: dict[str, Any]) -> None:
        # A line is short enough to be written whole or not at all: a suspended supervisor (Ctrl-Z) blocks no loop.
        with suppress(OSError):
            os.write(events, json.dumps(event).encode() + b"\n")

    code = _runner()(serve(options, given["restarts"], listening, tell))
    sys.stderr.flush()
    # Not `sys.exit`, which waits for threads: one may still load, and those of a dead engine never end.
    os._exit(code)


if __name__ == "__main__":
    main()
