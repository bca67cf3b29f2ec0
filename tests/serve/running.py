"""A server of its own in a thread of the tests' process, and ways to speak to it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai

from ostinato import LLM
from ostinato.serve.service import Service
from ostinato.serve.settings import ServeLimits, ServeOptions
from ostinato.serve.worker import Worker

DEADLINE_S = 60.0


@dataclass(slots=True)
class Client:
    """Ways to speak to a server."""

    url: str

    def openai(self, key: str = "none", **words: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S, **words)

    def http(self, **words: Any) -> httpx2.Client:
        # No certificates: reading them takes longer than most requests here.
        return httpx2.Client(base_url=self.url, timeout=DEADLINE_S, verify=False, **words)

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
        with self.http(headers=headers) as client:
            return client.post(path, json=body)

    def get(self, path: str, **headers: str) -> httpx2.Response:
        with self.http(headers=headers) as client:
            return client.get(path)


@dataclass(slots=True)
class Running(Client):
    """A server that runs. `log` is what it wrote, `told` what it told its supervisor."""

    service: Service
    worker: Worker
    loop: asyncio.AbstractEventLoop
    log: list[dict[str, Any]]
    told: list[dict[str, Any]]
    exit_code: list[int] = field(default_factory=list)

    @property
    def llm(self) -> LLM:
        assert self.service.model is not None
        return self.service.model

    def call(self, work: Callable[[], None]) -> None:
        """Do something on the server's own thread."""
        self.loop.call_soon_threadsafe(work)


@contextmanager
def serving(
    model: str | Path,
    *,
    limits: ServeLimits | None = None,
    load: Callable[[], LLM] | None = None,
    make_id: Callable[[], str] | None = None,
    clock: Callable[[], float] = time.time,
    wait: bool = True,
    send_bytes: int | None = None,
    llm: dict[str, Any] | None = None,
    **words: Any,
) -> Iterator[Running]:
    """A server over a model; the words are those of `ServeOptions`, `llm` those of `LoadOptions`. `send_bytes`: the
    system's buffer for what a client has not read."""
    from ostinato.options import LoadOptions

    loading = {"device": "cpu", **(llm or {})}
    options = ServeOptions(str(model), load=LoadOptions(**loading), limits=limits or ServeLimits(), **words)
    listening = socket.create_server((options.host, 0))
    # As uvloop, which a worker runs on, does by itself; else a kept connection waits 40 ms for each answer.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if send_bytes is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    host, port = listening.getsockname()[:2]
    started = threading.Event()
    found: list[Running] = []
    log: list[dict[str, Any]] = []
    told: list[dict[str, Any]] = []
    codes: list[int] = []

    def tell(event: dict[str, Any]) -> None:
        told.append(event)
        if event["event"] in ("ready", "refused"):
            started.set()

    async def main() -> None:
        more: dict[str, Any] = {} if make_id is None else {"make_id": make_id}
        service = Service(options, write=log.append, clock=clock, **more)
        worker = Worker(service, listening, tell)
        loop = asyncio.get_running_loop()
        found.append(Running(f"http://{host}:{port}", service, worker, loop, log, told, codes))
        if not wait:
            started.set()
        try:
            codes.append(await worker.run(load or (lambda: LLM(model, **loading))))
        finally:
            await loop.run_in_executor(None, service.close)

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="tests-server")
    thread.start()
    try:
        assert started.wait(DEADLINE_S)
        yield found[0]
    finally:
        with suppress(RuntimeError):
            found[0].loop.call_soon_threadsafe(found[0].worker.stop)
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the server did not end"


def only(server: Running, text: str) -> dict[str, Any]:
    """Sampling whose answer is one token again and again."""
    return {"temperature": 0, "seed": 1, "logit_bias": {str(server.llm.tokenize(text)[0]): 100}}
