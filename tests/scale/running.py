"""`ostinato serve --replicas` as a program, and ways to speak to it: those of the single server's tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai

from ostinato import LLM

DEADLINE_S = 120.0


@dataclass(slots=True)
class Replicas:
    """Replicas that run. `llm`: the same model in this process, to compare with."""

    url: str
    llm: LLM
    process: subprocess.Popen[str]
    said: list[str]

    def openai(self, key: str = "none", **words: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S, **words)

    def http(self, **words: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=DEADLINE_S, **words)

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


def until(true: Callable[[], bool], seconds: float = DEADLINE_S) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


@contextmanager
def replicas(
    model: Path, n: int, *words: str, context: int = 1024, slots: int = 4, mode: str = "auto"
) -> Iterator[Replicas]:
    """The program, ready; stopped at the end of the block."""
    command = [sys.executable, "-m", "ostinato", "serve", model, "--replicas", n, "--port", 0, "--device", "cpu"]
    command += ["--context", context, "--slots", slots, "--mode", mode, *words]
    environment = {**os.environ, "RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*map(str, command)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    )
    heard = process.stderr
    assert heard is not None
    said: list[str] = []
    reading = threading.Thread(target=lambda: said.extend(iter(heard.readline, "")), daemon=True)
    reading.start()
    try:
        found: list[str] = []

        def ready() -> bool:
            assert process.poll() is None, "".join(said)
            found[:] = re.findall(r"ready: .* at (http://\S+)", "".join(said))
            return bool(found)

        until(ready)
        with LLM(model, device="cpu", context=context, mode=mode) as llm:
            yield Replicas(found[0], llm, process, said)
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
