"""Output: data to standard output, messages to standard error, and no markup in a model's text.

Every verb writes through here. Nothing here decides what is written.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from ostinato.errors import BadInput, OstinatoError, PromptTooLong
from ostinato.extras import without_command
from ostinato.processes import keep_stderr

if TYPE_CHECKING:
    from ostinato.llm import Piece

_UTF8: Final = ("utf-8", "utf8")


class ReaderGone(Exception):
    """The reader of our output closed it, as in `ostinato run ... | head -1`; this is not an error."""


class _Detail:
    """Whether `--verbose` was given. One per process: errors are reported after everything else has ended."""

    wanted = False


def set_verbose(value: bool) -> bool:
    """The callback of `--verbose`, which may stand before the verb, after it, or both."""
    _Detail.wanted = _Detail.wanted or value
    return value


def is_verbose() -> bool:
    return _Detail.wanted


def prepare() -> None:
    """Keep unencodable characters (written as `?`) and lost messages from stopping the program. A standard output that
    is closed refuses the first write, as one that is full does."""
    keep_stderr()
    if sys.stdout is None:
        nowhere = os.open(os.devnull, os.O_RDONLY)  # also keeps a model's file from becoming descriptor 1
        sys.stdout = open(nowhere, "w", encoding="utf-8")  # noqa: SIM115  open as long as we run
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def told(error: OstinatoError) -> str:
    """An error's message in the words of the command line."""
    if isinstance(error, PromptTooLong):
        return error.told("give a larger --context (`ostinato inspect` shows what the model was trained for)")
    return str(error)


def talk(text: str) -> None:
    """A message line on standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def detail(text: str) -> None:
    """A message line with `--verbose` only."""
    if is_verbose():
        talk(text)


def write(text: str) -> None:
    """Data, unchanged and at once; no markup, no wrapping."""
    with writing():
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def writing() -> Iterator[None]:
    """What standard output refuses becomes ReaderGone or BadInput."""
    try:
        yield
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        drop_output()
        why = "it is closed" if error.errno == errno.EBADF else error.strerror or error
        raise BadInput(f"cannot write to standard output: {why}") from error


class AnswerWriter:
    """Writes an answer as it comes: its text as data, its reasoning as a message, dimmed on a terminal."""

    def __init__(self) -> None:
        self._in_reasoning = False

    def write(self, piece: Piece) -> None:
        """Write a part of an answer."""
        if piece.reasoning:
            from typer import secho

            self._in_reasoning = True
            secho(piece.reasoning, dim=True, nl=False, err=True)
        if piece.text:
            self._end_reasoning()
            write(piece.text)

    def end(self) -> None:
        """End the last line."""
        self._end_reasoning()
        write("\n")

    def _end_reasoning(self) -> None:
        if self._in_reasoning:
            talk("\n")
        self._in_reasoning = False


def write_line(text: str) -> None:
    write(text + "\n")


def write_json(value: dict[str, Any]) -> None:
    """One JSON object on one line; escaped to ASCII if the output accepts nothing else."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    write_line(json.dumps(value, ensure_ascii=encoding not in _UTF8, allow_nan=False))


def write_columns(rows: Iterable[Sequence[str]], *, numbers: bool = False) -> None:
    """Rows of texts, the columns aligned, the last as long as it is; `numbers`: all but the first to the right."""
    lines = [tuple(row) for row in rows]
    n_columns = max((len(line) for line in lines), default=0)
    beyond = 0 if numbers else 1
    widths = [max((len(line[i]) for line in lines if len(line) > i + beyond), default=0) for i in range(n_columns)]
    for line in lines:
        cells = [cell.rjust(widths[i]) if numbers and i else cell.ljust(widths[i]) for i, cell in enumerate(line)]
        write_line("  ".join(cells).rstrip())


class InstallHints:
    """Reasons in a table: where a package is missing, what to type is told once, below the table."""

    def __init__(self) -> None:
        self._commands: dict[str, str] = {}

    def cell(self, reason: str) -> str:
        """A reason without what to type."""
        short, command = without_command(reason)
        if command is not None:
            self._commands[short] = command
        return short

    @property
    def lines(self) -> list[str]:
        """What to type, a line for each that a cell needs."""
        return [f"{needs.removeprefix('needs ')}: {command}" for needs, command in self._commands.items()]


def drop_output() -> None:
    """Discard the remaining output: its reader has closed it, and Python would report an error at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
