"""A front and its workers in one thread of the tests' process: what the supervisor does between them is played."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato import LLM
from ostinato.engine.choose import Room
from ostinato.options import LoadOptions
from ostinato.serve.app import create_app
from ostinato.serve.front import Front
from ostinato.serve.response_keeper import FrontKeeper
from ostinato.serve.service import Service
from ostinato.serve.settings import ServeLimits, ServeOptions
from ostinato.serve.supervisor import private_sockets
from ostinato.serve.worker import AdmittedLLM, Worker, from_front
from tests.serve.running import DEADLINE_S, Client

LoadModel = Callable[[int], LLM]


@dataclass(slots=True)
class Fronted(Client):
    """A front that runs. `workers` are those of the models that are loaded, by their index."""

    front: Front
    loop: asyncio.AbstractEventLoop
    options: ServeOptions
    sockets: dict[str, socket.socket]
    load: LoadModel
    workers: dict[int, Worker] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    log: list[dict[str, Any]] = field(default_factory=list)  # of the workers
    front_log: list[dict[str, Any]] = field(default_factory=list)
    needs: int = 1  # of the device's memory, for each model
    whole: int = 100

    def heard(self, index: int, event: Mapping[str, Any]) -> None:
        """What the supervisor tells the front of a worker."""
        self.front.models.heard({**event, "model": index})

    def told(self, event: dict[str, Any]) -> None:
        """What the supervisor does for the front."""
        match event["event"]:
            case "load":
                self.start(event["model"])
            case "go" | "look" as command:
                self.workers[event["model"]].heard({"command": command})
            case "unload":
                self.workers[event["model"]].signalled()

    def start(self, index: int) -> None:
        self.heard(index, {"event": "starting"})
        task = asyncio.ensure_future(self._work(index))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _work(self, index: int) -> None:
        keeper = FrontKeeper(self.sockets["front"].getsockname()) if self.options.n_kept_responses else None
        service = Service(self.options.of_engine(index), keeper=keeper, write=self.log.append)
        refused: list[str] = []

        def tell(event: dict[str, Any]) -> None:
            if event["event"] == "refused":
                refused.append(event["told"])
            if event["event"] in ("needs", "ready", "fault"):
                self.loop.call_soon_threadsafe(self.heard, index, event)

        worker = Worker(service, self.sockets[str(index)].dup(), tell, from_front(create_app(service)))
        self.workers[index] = worker

        def load() -> LLM:
            worker._admitted(lambda: Room("cpu", self.needs, self.whole - self._taken(), self.whole))
            return self.load(index)

        await worker.run(load)
        service.close()
        del self.workers[index]
        how = {"unloaded": not refused, "starting_another": False, "restarts": {}}
        self.heard(index, {"event": "ended", "why": refused[0] if refused else None, **how})

    def _taken(self) -> int:
        """The memory of the other models."""
        return self.needs * (len(self.workers) - 1)

    def state(self, index: int) -> str:
        return self.front.models.all[index].state

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)


def admitted(options: ServeOptions, index: int) -> LLM:
    """A model as a worker loads it, without waiting for room."""
    return AdmittedLLM(options.models[index], options.load, lambda _: None, lambda _: None, beside_others=True)


@contextmanager
def fronting(
    *models: Path,
    load: LoadModel | None = None,
    limits: ServeLimits | None = None,
    llm: dict[str, Any] | None = None,
    sizes: tuple[int, int] = (1, 100),
    **words: Any,
) -> Iterator[Fronted]:
    """A front over models; the words are those of `ServeOptions`. `sizes`: what each model needs of a device's memory,
    and what the device has."""
    loading = {"device": "cpu", "context": 512, "slots": 2, **(llm or {})}
    first, *more = map(str, models)
    options = ServeOptions(
        first, more_models=tuple(more), load=LoadOptions(**loading), limits=limits or ServeLimits(), **words
    )
    started = threading.Event()
    found: list[Fronted] = []

    async def main(opened: ExitStack) -> None:
        sockets = private_sockets(len(models), opened)
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        url = "http://{}:{}".format(*listening.getsockname()[:2])
        paths = [sockets[str(index)].getsockname() for index in range(len(models))]
        front = Front(
            options,
            paths,
            {},
            tell=lambda event: found[0].told(event),
            listening=listening,
            private=sockets["front"].dup(),
        )
        run = Fronted(
            url,
            front,
            asyncio.get_running_loop(),
            options,
            sockets,
            load or (lambda index: admitted(options, index)),
        )
        run.needs, run.whole = sizes
        front._service.write = run.front_log.append
        found.append(run)
        started.set()
        await front.run()
        for worker in list(run.workers.values()):
            worker.stop()
        await asyncio.gather(*run.tasks)

    def work() -> None:
        with ExitStack() as opened:
            asyncio.run(main(opened))

    thread = threading.Thread(target=work, name="tests-front")
    thread.start()
    try:
        assert started.wait(DEADLINE_S)
        yield found[0]
    finally:
        with suppress(RuntimeError):
            found[0].loop.call_soon_threadsafe(found[0].front.stop)
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the front did not end"
