"""Starts Ray on this machine or joins a cluster, and computes the resources of each replica.

Every wait has a deadline: for an address that does not answer, for a cluster whose cores are in use.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

from ostinato import errors
from ostinato.errors import BadInput, EngineDead, FetchFailed, HardwareCannot, OstinatoError
from ostinato.extras import check_extra
from ostinato.processes import python_command
from ostinato.scale.settings import Routing, ScaleOptions
from ostinato.serve.settings import ServeOptions

JOIN_S: Final = 20.0
START_S: Final = 600.0  # for a replica to be ready; loading a large model takes minutes
_OURS: Final = re.compile(r"\s*ostinato\.errors\.(\w+): (.*)")
_FREE_S: Final = 5.0  # Ray releases the resources of a killed run after about this time
_STORE_BYTES: Final = 128 * 2**20  # requests and answers go from process to process; nothing large is kept
_SETTINGS: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Our code never blocks the event loop, so it needs no thread of its own, and no hand-over between two threads.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}

NodeResources = Mapping[str, float]  # the resources of a machine: CPU, GPU


def check_address(address: str) -> None:
    """Refuse an address that does not answer within a deadline."""
    if address == "auto":
        return  # Ray looks among this machine's processes
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "://" in address:
        raise BadInput(
            f"--ray-address is {address!r}; it must be HOST:PORT of the cluster's head, as `ray start` printed it, or "
            "auto for a cluster on this machine; this machine must be one of the cluster's"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=JOIN_S / 2).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"--ray-address {address}: no answer ({reason}); is the cluster's head up?") from error
    command = python_command("-m", "ray.scripts.scripts", "health-check", "--address", address)
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=JOIN_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BadInput(f"--ray-address {address}: who answers there is no Ray cluster, or is not well") from error
    if "AuthenticationError" in asked.stderr:
        raise BadInput(
            f"--ray-address {address}: the cluster wants its token; set RAY_AUTH_MODE=token here, and have the token "
            "in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
    if asked.returncode:
        reason = last_line(asked.stderr or asked.stdout)
        raise BadInput(f"--ray-address {address}: what answers there is no Ray cluster of this version: {reason}")


def with_whole_path(options: ServeOptions) -> ServeOptions:
    """The options for a process with another current folder: a model that is a path here is named by its whole path."""
    path = Path(options.model)
    return replace(options, model=str(path.absolute())) if path.exists() else options


@contextmanager
def joined(address: str | None, *, quiet: bool = False) -> Iterator[Any]:
    """Ray, started on this machine or joined; stopped or left at the end of the block.

    Ray has its processes import from the folder in which it was started: they get an empty one.
    """
    check_extra("scale", "more than one replica")
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
    with TemporaryDirectory(prefix="ostinato-") as empty:
        try:
            with chdir(empty):
                ray.init(**words)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise HardwareCannot(f"Ray cannot be {'joined' if address else 'started'} here: {error}") from error
        try:
            yield ray
        finally:
            with unheard():
                ray.shutdown()


@contextmanager
def unheard() -> Iterator[None]:
    """While we stop our own actors: Ray reports each of them as an error, on this process's standard output."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def free_nodes(ray: Any) -> list[NodeResources]:
    """The free resources of each machine of the cluster; waits briefly for resources in use."""
    from ray._private.state import available_resources_per_node

    end = time.monotonic() + _FREE_S
    while True:
        found: list[NodeResources] = list(available_resources_per_node().values())
        missing = ray.cluster_resources().get("CPU", 0.0) - sum(node.get("CPU", 0.0) for node in found)
        if missing < 0.01 or time.monotonic() > end:
            return found
        time.sleep(0.2)


def placed(
    nodes: Sequence[NodeResources],
    options: ServeOptions,
    replicas: int,
    most: int | None = None,
    routing: Routing = "prefix",
) -> ScaleOptions:
    """The resources of each replica: one GPU, or a share of the cores. Refused if there are not enough."""
    gpus, cores = (sum(node.get(kind, 0.0) for node in nodes) for kind in ("GPU", "CPU"))
    device = options.load.device
    wanted = max(replicas, most or 0)
    if device.startswith("cuda:"):
        raise BadInput(f"--device {device} names one GPU; with replicas give cuda, and each takes one of its own")
    if device == "cuda" or (device == "auto" and gpus):
        if replicas > gpus:
            fewer = f"--replicas {gpus:.0f} or less, " if gpus >= 1 else ""
            raise HardwareCannot(
                f"{replicas} replicas need {replicas} GPUs, one each, and the cluster has {gpus:.0f} to give; give "
                f"{fewer}more machines, or --device cpu"
            )
        return ScaleOptions(replicas, most, gpus=1.0, cpus=1.0 if cores >= wanted else 0.0, routing=routing)
    return ScaleOptions(replicas, most, cpus=_share([node.get("CPU", 0.0) for node in nodes], wanted), routing=routing)


def _share(cores: Sequence[float], wanted: int) -> float:
    """The most cores that each replica can have, none of them on two machines: whole cores, or a fraction of one."""
    cores = [free + 1e-6 for free in cores]  # Ray's fractions of a core may sum to slightly less than one
    whole = range(int(max(cores, default=0.0)), 0, -1)
    for share in (*map(float, whole), *(part / 100 for part in range(99, 0, -1))):
        if sum(int(free / share) for free in cores) >= wanted:
            return share
    raise HardwareCannot(
        f"the cluster has no core to give to {wanted} replicas; end what runs there, or add machines to it"
    )


def error_elsewhere(text: str) -> OstinatoError:
    """The error of another process, from its traceback: one of our classes, or the text of the last line."""
    found = [match for match in map(_OURS.fullmatch, text.splitlines()) if match]
    kind = getattr(errors, found[-1][1], None) if found else None
    if isinstance(kind, type) and issubclass(kind, BadInput | FetchFailed | HardwareCannot | EngineDead):
        return cast(OstinatoError, kind(found[-1][2]))
    return EngineDead(f"a replica failed: {last_line(text)}")


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"
