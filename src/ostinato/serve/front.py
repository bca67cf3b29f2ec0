"""The front: the process that clients reach. It checks requests, and passes each on to the process of its model.

It holds no model, so that it outlives all of them; kept responses live here. The supervisor tells it how the models'
processes fare, and starts and ends them as `served_models.py` asks.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from ostinato.serve import process
from ostinato.serve.app import create_app
from ostinato.serve.errors import Refusal
from ostinato.serve.forward import ModelForwarder
from ostinato.serve.front_status import FrontStatus
from ostinato.serve.http import HttpServer
from ostinato.serve.metrics import Metrics
from ostinato.serve.process import ProcessEvent, ServerProcess, Tell
from ostinato.serve.response_keeper import KeptResponses
from ostinato.serve.served_models import ServedModels, restored
from ostinato.serve.service import Service
from ostinato.serve.settings import ServeOptions


class FrontService(Service):
    """The server's state in a process without a model. Requests are taken from the start, and wait for their model."""

    def __init__(self, options: ServeOptions, n_engines: int, **words: Any) -> None:
        super().__init__(options, **words)
        self.metrics = Metrics(None)
        self.most_running *= n_engines
        self.state, self.why = "ready", ""

    @property
    def only_model(self) -> str | None:
        return None

    def begin(self) -> None:
        if self.state != "ready":
            raise Refusal(503, f"not now: {self.why}; try again later", code="draining")
        super().begin()


class Front(ServerProcess):
    """Runs the front's process."""

    def __init__(self, options: ServeOptions, sockets: list[str], restarts: dict[str, int], **given: Any) -> None:
        """`sockets`: the paths of the workers' sockets; `given`: the front's own two sockets, and `tell`."""
        service = FrontService(options, len(sockets))
        self.models = ServedModels(options, sockets, given["tell"])
        kept = None if service.responses is None else KeptResponses(service.responses)
        status = FrontStatus(service, self.models, restarts)
        app = create_app(service, status=status, forward=ModelForwarder(service, self.models, kept))
        super().__init__(service, app, given["listening"], given["tell"])
        self._private = None if kept is None else HttpServer(kept, service.limits)
        self._private_socket: socket.socket = given["private"]

    async def run(self) -> int:
        if self._private is None:
            return await super().run()
        keeping = asyncio.ensure_future(self._private.serve([self._private_socket]))
        try:
            return await super().run()
        finally:
            self._private.should_exit = True
            await keeping

    def heard(self, command: ProcessEvent) -> None:
        self.models.heard(command)

    def signalled(self) -> None:
        super().signalled()
        if self._service.stopping.is_set():
            if self._service.n_running and self._n_signals == 2:
                self._tell({"event": "stopped", "running": self._service.n_running})
            self._stop_requests()

    def stop(self) -> None:
        super().stop()
        self._stop_requests()

    def _stop_requests(self) -> None:
        self.models.stop(Refusal(503, "the server is being stopped", code="draining"))


async def serve(given: dict[str, Any], tell: Tell) -> int:
    """A front in this process until its end."""
    options = ServeOptions.from_json(given["options"])
    front = Front(
        options,
        given["workers"],
        given["restarts"],
        tell=tell,
        listening=socket.socket(fileno=given["socket"]),
        private=socket.socket(fileno=given["private"]),
    )
    restored(front.models, given["told"])
    return await front.run_supervised()


def main() -> None:
    process.main(serve)


if __name__ == "__main__":
    main()
