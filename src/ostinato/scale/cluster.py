"""Ray started or joined, and the replicas' life from `ostinato serve --replicas`: up, serving, drained, gone.

Nothing waits without a deadline: an address that nobody answers, a model that no replica can load.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from ostinato.errors import BadInput, HardwareCannot, OstinatoError
from ostinato.files.store import resolve
from ostinato.scale.settings import Routing, ScaleOptions
from ostinato.serve.settings import ServeOptions
from ostinato.serve.supervisor import listen

APP: Final = "ostinato"
JOIN_S: Final = 20.0
START_S: Final = 600.0
_STORE_BYTES: Final = 128 * 2**20  # requests and answers go from process to process; nothing large is kept
_SETTINGS: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ours never blocks its event loop: no thread of its own for it, and no hand-over between the two.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}

Talk = Callable[[str], None]


def check_ray() -> None:
    """Refuse, with what to install, where Ray is not here."""
    if importlib.util.find_spec("ray") is None:
        raise BadInput("replicas need Ray, which is not installed; install it with pip install 'ostinato[scale]'")


def check_address(address: str) -> None:
    """Refuse an address that nobody answers, within a deadline."""
    if address == "auto":
        return
    place = address.removeprefix("ray://")
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal():
        raise BadInput(f"--ray-address is {address!r}; it must be HOST:PORT, or auto for a cluster on this machine")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=JOIN_S / 2).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"--ray-address {address}: nobody answers there ({reason}); is the cluster's head up?"
        ) from error
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", place]
    try:
        code = subprocess.run(command, capture_output=True, timeout=JOIN_S, check=False).returncode
    except subprocess.TimeoutExpired:
        code = 1
    if code and not address.startswith("ray://"):
        raise BadInput(
            f"--ray-address {address}: who answers there is no Ray cluster of this version, is not well, or wants a "
            "token (set RAY_AUTH_MODE=token here if it was set there)"
        )


@contextmanager
def joined(address: str | None, talk: Talk, *, quiet: bool = False) -> Iterator[Any]:
    """Ray, started on this machine or joined; given back at the end of the block."""
    check_ray()
    if address is not None:
        check_address(address)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    words: dict[str, Any] = {"log_to_driver": not quiet, "logging_level": "ERROR", "namespace": "ostinato"}
    if address is None:
        words |= {"address": "local", "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        words |= {"num_cpus": os.cpu_count() or 1}
    else:
        words["address"] = address
    try:
        ray.init(**words)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise HardwareCannot(f"Ray cannot be {'joined' if address else 'started'} here: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def placed(
    ray: Any, options: ServeOptions, replicas: int, most: int | None = None, routing: Routing = "prefix"
) -> ScaleOptions:
    """What each replica gets of the cluster: one GPU, or a share of the cores. Refused where there is not enough."""
    resources = ray.cluster_resources()
    gpus, cores = int(resources.get("GPU", 0)), resources.get("CPU", 1.0)
    device = options.load.device
    wanted = max(replicas, most or 0)
    if device.startswith("cuda:"):
        raise BadInput(f"--device {device} names one GPU; with replicas give cuda, and each takes one of its own")
    if device == "cuda" or (device == "auto" and gpus):
        if replicas > gpus:
            fewer = f"--replicas {gpus} or less, " if gpus else ""
            raise HardwareCannot(
                f"{replicas} replicas need {replicas} GPUs, one each, and the cluster has {gpus}; give {fewer}more "
                "machines, or --device cpu"
            )
        return ScaleOptions(replicas, most, gpus=1.0, cpus=1.0 if cores >= wanted else 0.0, routing=routing)
    share = cores / wanted
    cpus = float(int(share)) if share >= 1 else max(0.01, int(share * 100) / 100)
    return ScaleOptions(replicas, most, cpus=cpus, routing=routing)


def run_replicas(
    options: ServeOptions,
    replicas: int,
    most: int | None,
    address: str | None,
    talk: Talk,
    *,
    routing: Routing = "prefix",
) -> int:
    """Serve with so many replicas until a signal, then drain; the exit code."""
    if most is not None and most < replicas:
        raise BadInput(f"--max-replicas is {most}; it must be {replicas} or more, as --replicas is")
    check_ray()
    if address is None:
        resolve(options.model, talk=talk)  # before anything starts: a name that nobody knows, or a download
    host, port = _free(options)
    with joined(address, talk) as ray:
        scaling = placed(ray, options, replicas, most, routing)
        talk(f"starting {replicas} replicas of {options.model}")
        waiting = _Signals()
        try:
            start(options, scaling, host, port)
            talk(f"ready: {options.alias or options.model} at http://{host}:{port} ({replicas} replicas on Ray Serve)")
            waiting.first.wait()
            _drain(waiting, talk)
        finally:
            waiting.restore()
            _stop(alone=address is None)
    return 0


def _free(options: ServeOptions) -> tuple[str, int]:
    """Where to listen: refused where somebody else does, a free port where any will do."""
    with listen(options.host, options.port) as probe:
        found = probe.getsockname()
        return options.host, int(found[1])


def start(options: ServeOptions, scaling: ScaleOptions, host: str, port: int) -> None:
    """Serve's proxy and the application, up and ready; or the reason why not."""
    from ray import serve

    from ostinato.scale.deployment import application

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # its import made it talk
    quiet = {"log_level": "ERROR", "enable_access_log": False}
    serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port}, logging_config=quiet)
    try:
        target = serve.RunTarget(application(options, scaling), name=APP, route_prefix="/", logging_config=quiet)
        serve.run_many([target], wait_for_applications_running=False)
        _until_running(serve)
    except RuntimeError as error:
        raise OstinatoError(f"the replicas did not start: {error}") from error


def _until_running(serve: Any) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        found = serve.status().applications.get(APP)
        state = str(found.status.value) if found is not None else ""
        if state == "RUNNING":
            return
        if found is not None and state in ("DEPLOY_FAILED", "UNHEALTHY"):
            messages = (one.message for one in found.deployments.values() if one.message)
            raise BadInput(_reason(next(messages, found.message)))
        time.sleep(0.2)
    raise HardwareCannot(f"no replica was ready within {START_S:.0f} s; does the cluster have room for them?")


def _reason(message: str) -> str:
    """Our own words out of a traceback of Ray's: its last line that names an error of ours, or its last one."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("ostinato.errors.")]
    told = (ours or lines or ["no reason was given"])[-1]
    return f"a replica cannot start: {told.partition(': ')[2] if ours else told}"


class _Signals:
    """The first asks to drain, the second to stop."""

    def __init__(self) -> None:
        self.first, self.second = threading.Event(), threading.Event()
        self._before = {number: signal.signal(number, self._heard) for number in (signal.SIGTERM, signal.SIGINT)}

    def _heard(self, number: int, frame: object) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _drain(waiting: _Signals, talk: Talk) -> None:
    """Let running requests end, unless a second signal comes."""
    from ray import serve

    from ostinato.scale.deployment import INGRESS

    handle = serve.get_deployment_handle(INGRESS, APP)
    running = sum(handle.broadcast("drain").results(timeout_s=10.0))
    talk(f"draining: {running} requests run; once more to stop them")
    while running and not waiting.second.wait(0.2):
        running = sum(handle.broadcast("running").results(timeout_s=10.0))


def _stop(*, alone: bool) -> None:
    from ray import serve

    if alone:
        serve.shutdown()
    else:
        serve.delete(APP)
