"""Opening a model for a verb: the `LLM` with the user's options, and its progress if that takes a while.

Imports the engine only when called, so that `--help` stays quick.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from ostinato.cli.output import detail, talk
from ostinato.errors import NotNumbers
from ostinato.files.fetch import megabytes
from ostinato.options import LoadOptions
from ostinato.text.renderer_process import early_renderer

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from ostinato.llm import LLM

QUIET_S: Final = 1.0
_LINE_EVERY_S: Final = 2.0


class ProgressBar:
    """Work on standard error: on a terminal a bar of rich's columns, in a log a plain line now and then."""

    def __init__(self, *, transient: bool = False) -> None:
        self._transient = transient
        self._said = 0.0
        self._bar: Progress | None = None

    def _columns(self) -> Sequence[ProgressColumn]:
        raise NotImplementedError

    def _show(self, done: int, total: int, line: str, every_s: float, **fields: Any) -> None:
        if sys.stderr.isatty():
            if self._bar is None:
                from rich.console import Console
                from rich.progress import Progress

                self._bar = Progress(*self._columns(), console=Console(stderr=True), transient=self._transient)
                self._bar.start()
                self._bar.add_task("", total=total, completed=done, **fields)
            self._bar.update(self._bar.task_ids[0], completed=done, **fields)
        elif (now := time.monotonic()) - self._said >= every_s:
            self._said = now
            talk(line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class LoadProgress(ProgressBar):
    """Called with (bytes done, total bytes); silent for the first second."""

    def __init__(self) -> None:
        super().__init__(transient=True)
        self._started: float | None = None

    def _columns(self) -> Sequence[ProgressColumn]:
        from rich.progress import BarColumn, DownloadColumn, TextColumn

        return TextColumn("loading"), BarColumn(), DownloadColumn()

    def __call__(self, done: int, total: int) -> None:
        if self._started is None:
            self._started = time.monotonic()
        if time.monotonic() - self._started >= QUIET_S:
            line = f"loading: {megabytes(done)} of {megabytes(total)}"
            self._show(done, total, line, 0.0 if done == total else _LINE_EVERY_S)


@contextmanager
def opened(model: str, options: LoadOptions, *, chats: bool = False) -> Iterator[LLM]:
    """The model, loaded with the user's options, and closed at the end of the block. `chats`: its chat template will
    be rendered soon."""
    with early_renderer() if chats else nullcontext():
        from ostinato import LLM

        progress = LoadProgress()
        try:
            llm = LLM(model, progress=progress, talk=talk, load=options)
            if chats and llm.template is not None:
                llm.template.start()
        finally:
            progress.close()
    with llm:
        activations = "" if llm.activations is None else f", activations {llm.activations}"
        threads = "" if llm.threads is None else f", {llm.threads} threads"
        kept = f"{llm.dtype}{activations}, KV {llm.kv_type}, context {llm.context}{threads}"
        detail(f"{llm.path}: {llm.device}, {llm.mode}, {kept}")
        for reason in llm.why_not:
            detail(f"not {reason}")
        try:
            yield llm
        except NotNumbers as error:
            raise NotNumbers(f"{llm.path}: {error}") from None
