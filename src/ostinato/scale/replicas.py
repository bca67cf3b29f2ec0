"""The lifecycle of replicas under `ostinato serve --replicas`: start, serve, drain, stop.

If the cluster runs no Serve, one is started, and ends with the replicas; a Serve that was already running is left
unchanged.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from contextlib import suppress
from typing import Any, Final, NamedTuple, Self

from ostinato.errors import BadInput, HardwareCannot
from ostinato.extras import check_extra
from ostinato.files.store import resolve
from ostinato.options import Talk
from ostinato.scale.cluster import (
    START_S,
    error_elsewhere,
    free_nodes,
    joined,
    last_line,
    placed,
    unheard,
    with_whole_path,
)
from ostinato.scale.settings import Routing, ScaleOptions
from ostinato.serve.settings import ServeOptions
from ostinato.serve.supervisor import listen

APP: Final = "ostinato"
_LOOK_S: Final = 3.0  # between two checks of the application, while it serves
_MISSED: Final = 3  # failed checks in a row mean that it is gone; one may be a restart of Serve's controller
_ANSWER_S: Final = 10.0  # for the ingress, to acknowledge a drain


def run_replicas(
    options: ServeOptions,
    replicas: int,
    most: int | None,
    address: str | None,
    talk: Talk,
    *,
    routing: Routing = "prefix",
) -> int:
    """Serve with so many replicas until a signal, then drain; return the exit code."""
    if most is not None and most < replicas:
        raise BadInput(f"--max-replicas is {most}; it must be {replicas} or more, as --replicas is")
    check_extra("scale", "more than one replica")
    if address is None:  # before anything starts: an unknown name, a download, or a port in use
        resolve(options.model, talk=talk)
        free_port(options)
    options = with_whole_path(options)
    with joined(address) as ray, Signals() as signals:
        place = place_of(options, ray)
        scaling = placed(free_nodes(ray), options, replicas, most, routing)
        talk(f"starting {replicas} replicas of {options.model}")
        try:
            if not start(options, scaling, place, signals):
                return 0
            signals.starting = False
            talk(f"ready: {options.names[0][0]} at http://{place} ({replicas} replicas on Ray Serve)")
            _watch(signals)
            _drain(signals, talk)
        finally:
            with unheard():
                _stop(place)
    return 0


class ServeAddress(NamedTuple):
    """The address of Serve's proxy. `ours`: Serve is started with the replicas, and ends with them."""

    host: str
    port: int
    ours: bool
    head: str | None  # its machine, if that is not this one

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" + (f" of the cluster's head, {self.head}" if self.head else "")


def place_of(options: ServeOptions, ray: Any) -> ServeAddress:
    """The requested address. Refused if another program listens there, or if Serve already listens elsewhere."""
    head = ray.get_runtime_context().gcs_address.rpartition(":")[0]
    elsewhere = None if head == ray.util.get_node_ip_address() else head
    there = _listening()
    if there is None:
        port = free_port(options) if elsewhere is None else options.port
        if not port:
            raise BadInput(f"--port 0 takes a free port of this machine, and the cluster's head is {head}; name one")
        return ServeAddress(options.host, port, True, elsewhere)
    if _is_there():
        raise BadInput(
            f"the cluster has an application {APP!r} already; end it where it was started, or with `serve shutdown`"
        )
    if there != (options.host, options.port or there[1]):
        host, port = there
        raise BadInput(f"Serve runs on this cluster, and listens at {host}:{port}; give --host {host} --port {port}")
    return ServeAddress(*there, False, elsewhere)


def _listening() -> tuple[str, int] | None:
    """The address of the cluster's Serve; None if it runs none."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else (str(client.http_config.host), int(client.http_config.port))


def free_port(options: ServeOptions) -> int:
    """The requested port, refused if it is in use; a free one for port 0."""
    with listen(options.host, options.port) as probe:
        return int(probe.getsockname()[1])


def start(options: ServeOptions, scaling: ScaleOptions, place: ServeAddress, signals: Signals) -> bool:
    """Start Serve's proxy and the application, or raise the reason why not. False if a signal came first."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    from ostinato.scale.deployment import application

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # its import enables its messages
    quiet = {"log_level": "ERROR", "enable_access_log": False}
    try:
        if place.ours:
            http = {"host": place.host, "port": place.port}
            serve.start(proxy_location="HeadOnly", http_options=http, logging_config=quiet)
        target = serve.RunTarget(application(options, scaling), name=APP, route_prefix="/", logging_config=quiet)
        serve.run_many([target], wait_for_applications_running=False)
        return _until_running(serve, signals)
    except (RuntimeError, RayServeException) as error:
        raise HardwareCannot(f"the replicas did not start: {last_line(str(error))}") from error


def _until_running(serve: Any, signals: Signals) -> bool:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        found = serve.status().applications.get(APP)
        state = str(found.status.value) if found is not None else ""
        if state == "RUNNING":
            return True
        if found is not None and state in ("DEPLOY_FAILED", "UNHEALTHY"):
            messages = (one.message for one in found.deployments.values() if one.message)
            raise error_elsewhere(next(messages, found.message))
        if signals.first.wait(0.2):
            return False
    raise HardwareCannot(f"no replica was ready within {START_S:.0f} s; does the cluster have room for them?")


class Signals:
    """The first signal drains, the second stops. Until the replicas are up, the first stops, as Ray may wait long."""

    def __init__(self) -> None:
        self.first, self.second = threading.Event(), threading.Event()
        self.starting = True

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._heard) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: object) -> None:
        (self.second if self.first.is_set() else self.first).set()
        if self.starting and self.second.is_set():
            raise KeyboardInterrupt


def _watch(signals: Signals) -> None:
    """Wait for a signal, or until the application is removed from the cluster."""
    missed = 0
    while not signals.first.wait(_LOOK_S):
        missed = 0 if _is_there() else missed + 1
        if missed == _MISSED:
            raise HardwareCannot("the application is gone: it was deleted, or Serve was stopped, on this cluster")


def _is_there() -> bool:
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        return APP in serve.status().applications
    except (RayError, RayServeException):
        return False


def _drain(signals: Signals, talk: Talk) -> None:
    """Let running requests finish, unless a second signal comes."""
    from ray import serve
    from ray.exceptions import RayError

    from ostinato.scale.deployment import INGRESS

    try:
        ingress = serve.get_deployment_handle(INGRESS, APP)
        running = sum(ingress.broadcast("drain").results(timeout_s=_ANSWER_S))
        talk(f"draining: {running} requests run; once more to stop them" if running else "stopping")
        while running and not signals.second.wait(0.2):
            running = sum(ingress.broadcast("running").results(timeout_s=_ANSWER_S))
    except (KeyError, TimeoutError, RayError) as error:
        talk(f"note: the ingress does not answer ({type(error).__name__}): nothing can be drained")


def _stop(place: ServeAddress) -> None:
    """Remove the application, and stop Serve unless it was running before or has other applications."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    with suppress(RayError, RayServeException, TimeoutError):
        if place.ours and not serve.status().applications.keys() - {APP}:
            serve.shutdown()
        elif _is_there():
            serve.delete(APP)
