"""`ostinato serve` as it is started, in processes of its own, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.serve.running import DEADLINE_S


class Program:
    """`ostinato serve` in a process of its own."""

    def __init__(self, *arguments: str, program: tuple[str, ...] = ("-m", "ostinato", "serve")) -> None:
        self.lines: list[str] = []
        self._heard = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._heard:
                self.lines.append(line.rstrip("\n"))
                self._heard.notify_all()

    def until(self, begins: str, n: int = 1) -> str:
        """The n-th line that begins so."""
        with self._heard:
            found = self._heard.wait_for(lambda: self._said(begins)[n - 1 :], DEADLINE_S)
        assert found, self.lines
        return found[0]

    def _said(self, begins: str) -> list[str]:
        return [line for line in self.lines if line.startswith(begins)]

    @property
    def log(self) -> list[dict[str, Any]]:
        """Its lines for requests."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    @property
    def url(self) -> str:
        return self.until("listening at ").split()[2].rstrip(";")

    def close(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@contextmanager
def program(*arguments: str, **words: Any) -> Iterator[Program]:
    running = Program(*arguments, **words)
    try:
        yield running
    finally:
        running.close()
