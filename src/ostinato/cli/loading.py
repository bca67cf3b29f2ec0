"""Opening a model for a verb: the `LLM` with the user's options, and its progress if that takes a while.

Imports the engine only when called, so that `--help` stays quick.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ostinato.cli.output import detail, talk
from ostinato.files.fetch import megabytes
from ostinato.options import LoadOptions

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ostinato.llm import LLM

QUIET_S: Final = 1.0
_LINE_EVERY_S: Final = 2.0


class LoadProgress:
    """Called with (bytes done, total bytes); a second after the first call it shows a bar, or, without a terminal, a
    few plain lines."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._said = 0.0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._started is None:
            self._started = now
        if now - self._started < QUIET_S:
            return
        if sys.stderr.isatty():
            self._show(done, total)
        elif now - self._said >= _LINE_EVERY_S or done == total:
            self._said = now
            talk(f"loading: {megabytes(done)} of {megabytes(total)}")

    def _show(self, done: int, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        if self._bar is None:
            columns = (TextColumn("loading"), BarColumn(), DownloadColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("loading", total=total)
        assert self._task is not None
        self._bar.update(self._task, completed=done)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextmanager
def opened(model: str, options: LoadOptions) -> Iterator[LLM]:
    """The model, loaded with the user's options, and closed at the end of the block."""
    from ostinato import LLM

    progress = LoadProgress()
    try:
        llm = LLM(model, progress=progress, talk=talk, load=options)
    finally:
        progress.close()
    with llm:
        activations = "" if llm.activations is None else f", activations {llm.activations}"
        threads = "" if llm.threads is None else f", {llm.threads} threads"
        kept = f"{llm.dtype}{activations}, KV {llm.kv_type}, context {llm.context}{threads}"
        detail(f"{llm.path}: {llm.device}, {llm.mode}, {kept}")
        for reason in llm.why_not:
            detail(f"not {reason}")
        yield llm
