"""A worker: one model's engine with the application over it, in a process of its own.

It serves a socket that only the front connects to. It asks for its memory before it reads any weights, and answers 503
until the model is loaded. When its engine dies, it reports why and ends shortly after; the supervisor starts the next.
"""

from __future__ import annotations

import asyncio
import gc
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, TypeVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ostinato.backends.base import Settled
from ostinato.engine.choose import Room, room_for
from ostinato.errors import OstinatoError
from ostinato.files.checkpoint import Checkpoint
from ostinato.llm import LLM
from ostinato.models.shape import Shape
from ostinato.options import LoadOptions, Talk
from ostinato.serve import process
from ostinato.serve.app import create_app
from ostinato.serve.errors import OUR_FAULT, cause_of, without_folders
from ostinato.serve.loadable import with_context_of
from ostinato.serve.log import given_id
from ostinato.serve.process import ProcessEvent, ServerProcess, Tell, talk
from ostinato.serve.response_keeper import FrontKeeper
from ostinato.serve.service import Service
from ostinato.serve.settings import ServeOptions
from ostinato.serve.upstream import CLIENT, ID

FAULT_EXIT: Final = 70  # the engine died: start another worker

T = TypeVar("T")


class Worker(ServerProcess):
    """Runs one worker process."""

    def __init__(self, service: Service, listening: socket.socket, tell: Tell, app: ASGIApp | None = None) -> None:
        super().__init__(service, app or create_app(service), listening, tell)
        self.commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.beside_others = False  # whether the front has other models too

    async def run(self, load: Callable[[], LLM] | None = None) -> int:
        """Serve until the end and return the exit code."""
        loading = asyncio.ensure_future(self._open(load or self.load))
        try:
            return await super().run()
        finally:
            loading.cancel()
            with suppress(asyncio.CancelledError):
                await loading

    def heard(self, command: ProcessEvent) -> None:
        self.commands.put(command["command"])

    def load(self) -> LLM:
        """Load the model when the front says that there is room."""
        options = self._service.options
        llm = AdmittedLLM(options.model, options.load, talk, self._admitted, beside_others=self.beside_others)
        # What is loaded now stays: later collections, which stop every thread, need not visit it again (100 ms).
        gc.collect()
        gc.freeze()
        return llm

    def _admitted(self, room: Callable[[], Room]) -> None:
        """Ask for room, again after each look, until the model may be loaded."""
        while True:
            self.room = room()
            self._tell({"event": "needs", **self.room._asdict()})
            if self.commands.get() == "go":
                return

    async def _open(self, load: Callable[[], LLM]) -> None:
        began = time.perf_counter()
        try:
            llm = await in_daemon_thread(load)
        except OstinatoError as error:
            self._refuse(error.exit_code, str(error), cause_of(str(error)))
            return
        except MemoryError as error:
            self._refuse(4, f"this machine ran out of memory: {error or 'no more to be had'}", "memory ran out")
            return
        except Exception as error:
            traceback.print_exception(error)
            self._refuse(OstinatoError.exit_code, f"this is our fault: {type(error).__name__}: {error}", OUR_FAULT)
            return
        self._service.open(llm)
        facts = self._service.health()
        self._tell({"event": "ready", "seconds": time.perf_counter() - began, **facts})

    def _refuse(self, code: int, message: str, told: str) -> None:
        """End, because the model cannot be loaded. `told`: to clients."""
        self._tell({"event": "refused", "message": message, "told": told})
        self._code = code or OstinatoError.exit_code
        self._service.stop()

    async def has_ended(self) -> bool:
        service = self._service
        fault = None if service.model is None else service.model.fault
        if fault is not None and not service.stopping.is_set():
            service.die(without_folders(fault, service.options.models))
            self._tell({"event": "fault", "reason": fault})
            self._code = FAULT_EXIT
            await self.until_idle(service.limits.fault_s)
            return True
        return await super().has_ended()


class AdmittedLLM(LLM):
    """A model that is loaded when there is room for it."""

    def __init__(
        self,
        model: str,
        load: LoadOptions,
        talk: Talk,
        admitted: Callable[[Callable[[], Room]], None],
        *,
        beside_others: bool,
    ) -> None:
        """`beside_others`: whether other models are served too."""
        self._admitted, self._beside_others = admitted, beside_others
        super().__init__(model, load=load, talk=talk)

    def _choose(self, checkpoint: Checkpoint, shape: Shape, talk: Talk) -> Settled:
        if self._beside_others:
            fitting = with_context_of(shape, self._options)
            if fitting != self._options:
                talk(f"{self.name}: the context is {shape.context}, for which this model was trained")
            self._options = fitting
            # Before another model makes room: what is wrong with a tokenizer should cost that model nothing.
            super()._load_tokenizer(shape)
        self._admitted(lambda: room_for(checkpoint, shape, self._options))
        return super()._choose(checkpoint, shape, talk)

    def _load_tokenizer(self, shape: Shape) -> None:
        if not self._beside_others:
            super()._load_tokenizer(shape)


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


def from_front(app: ASGIApp) -> ASGIApp:
    """An application for requests that the front passes on: each keeps the id and the client that it has there. One
    without an id is the front's own, for a page that it merges, and neither logged nor counted."""

    async def identified(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        id, client = headers.get(ID), headers.get(CLIENT)
        given_id.set(id)
        known = {"client": None if client is None else (client, 0), "state": {"told_elsewhere": id is None or None}}
        await app({**scope, **known}, receive, send)

    return identified


def drop_waiting(listening: socket.socket) -> None:
    """Close connections that a worker before this one did not accept: the front, which was told of its end, asks anew
    when this one is ready, and would have each of these requests answered and logged twice."""
    listening.setblocking(False)
    with suppress(OSError):  # none waits, or it has gone already
        while True:
            listening.accept()[0].close()


async def serve(given: dict[str, Any], tell: Tell) -> int:
    """A worker in this process until its end."""
    options = ServeOptions.from_json(given["options"])
    listening = socket.socket(fileno=given["socket"])
    drop_waiting(listening)
    keeper = FrontKeeper(given["front"]) if options.n_kept_responses else None
    service = Service(options, keeper=keeper)
    worker = Worker(service, listening, tell, from_front(create_app(service)))
    worker.beside_others = given["beside_others"]
    code = await worker.run_supervised()
    if code != FAULT_EXIT:  # the resources of a dead engine end with the process
        await asyncio.get_running_loop().run_in_executor(None, service.close)
    return code


def main() -> None:
    process.main(serve)


if __name__ == "__main__":
    main()
