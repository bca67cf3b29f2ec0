"""`ostinato serve --replicas` as a program, ways to speak to it (those of the single server's tests), and a cluster."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai

from ostinato import LLM
from tests.traps import Traps, loaded_by_m

DEADLINE_S = 240.0  # of whatever a loaded machine may take long for


@dataclass(slots=True)
class Replicas:
    """Replicas that run. `llm`: the same model in this process, to compare with."""

    url: str
    llm: LLM
    process: subprocess.Popen[str]
    said: list[str]
    traps: Traps

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

    def health(self) -> dict[str, Any]:
        facts: dict[str, Any] = self.get("/health").json()
        return facts

    def stop(self) -> int:
        """As an operator does; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


def until(true: Callable[[], bool], every_s: float = 0.05) -> None:
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(every_s)


@contextmanager
def program(
    command: list[Any], environment: Mapping[str, str], seen: str, folder: Path | None = None
) -> Iterator[tuple[Any, list[str], str]]:
    """A program, once it has said something; with all it says, and what was seen. Stopped at the end of the block."""
    process = subprocess.Popen(
        [*map(str, command)], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
    )
    heard = process.stdout
    assert heard is not None
    said: list[str] = []
    reading = threading.Thread(target=lambda: said.extend(iter(heard.readline, "")), daemon=True)
    reading.start()
    try:
        found: list[str] = []

        def ready() -> bool:
            assert process.poll() is None, "".join(said)
            found[:] = re.findall(seen, "".join(said))
            return bool(found)

        until(ready)
        yield process, said, found[0]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reading.join(10)
        heard.close()


@contextmanager
def replicas(
    model: Path,
    n: int,
    *words: str,
    context: int = 1024,
    slots: int = 4,
    mode: str = "auto",
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Replicas]:
    """The program, ready; started in a folder full of traps, and stopped at the end of the block."""
    command = [sys.executable, "-m", "ostinato", "serve", model.name, "--replicas", n, "--port", 0, "--device", "cpu"]
    command += ["--context", context, "--slots", slots, "--mode", mode, *words]
    quiet = {"RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="traps") as name:
        folder = Path(name)
        traps = Traps(folder, spared=loaded_by_m() | {"ostinato"})
        (folder / model.name).symlink_to(model)
        with (
            program(command, {**environment, **quiet}, r"ready: .* at (http://\S+)", folder) as (process, said, url),
            LLM(model, device="cpu", context=context, mode=mode) as llm,
        ):
            yield Replicas(url, llm, process, said, traps)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster that is there already. `environment`: of a process that joins it."""

    address: str
    dashboard: str
    environment: Mapping[str, str]


@contextmanager
def ray_head() -> Iterator[Cluster]:
    """`ray start --head` in a process of its own, with four cores to give and a token of its own."""
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "OMP_NUM_THREADS": "1",
    }
    head, client, dashboard, agent = free_ports(4)
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", 4]
        command += ["--port", head, "--ray-client-server-port", client, "--dashboard-agent-listen-port", agent]
        command += ["--include-dashboard", "true", "--dashboard-port", dashboard, "--temp-dir", folder]
        command += ["--object-store-memory", 128 * 2**20, "--node-ip-address", "127.0.0.1"]
        with program(command, environment, "Ray runtime started"):
            yield Cluster(f"127.0.0.1:{head}", f"http://127.0.0.1:{dashboard}", environment)


def free_ports(n: int) -> list[int]:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [one.getsockname()[1] for one in held]


def killed_at(lines: int, out: Path, command: list[Any], environment: Mapping[str, str] = os.environ) -> int:
    """Run a batch and kill it once its output has so many lines; how many it has then."""

    def written() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    with subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, env=environment) as running:
        try:
            until(lambda: running.poll() is not None or written() >= lines, every_s=0.005)
        finally:
            running.kill()
        _, said = running.communicate()
    assert written() >= lines, said
    return written()
