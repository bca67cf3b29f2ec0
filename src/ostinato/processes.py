"""Processes: how we start Python, what a forked child must not use, and a standard error that ends no process.

The current folder may hold a `random.py` or an `http.py`; a process that we start must not import it.
"""

import io
import os
import sys
from typing import Any, Final

from ostinato.errors import StderrUnwritable, Unsupported

_STDERR: Final = 2


def python_command(*words: str) -> list[str]:
    """The command line of another Python process, such as `python_command("-m", "pip")`: this interpreter, without the
    current folder on its path."""
    return [sys.executable, "-P", *words]


class OpenedHere:
    """Remembers the process that opened something. A forked child has a copy of its memory and none of its threads."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def __bool__(self) -> bool:
        return self._process == os.getpid()

    def check(self) -> None:
        """Refuse use in a forked child, which has none of the threads."""
        if not self:
            raise Unsupported(
                f"this model was opened in process {self._process} and is used in its forked child {os.getpid()}, "
                "which has none of its threads; open the model in the child, or start children with "
                'multiprocessing.get_context("spawn")'
            )


class LossyFile(io.FileIO):
    """A file for messages: what cannot be written to it (a full disk, a reader that has left) is lost, and counted.

    Python's own buffer would raise, keep the message, and raise again at exit. When messages can be written again, a
    line says how many were lost.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.error: OSError | None = None  # of the last message, if it was lost
        self._n_lost = 0

    def write(self, data: Any) -> int:
        """Write all of it, or lose it."""
        try:
            if self.error is not None:
                why = self.error.strerror or self.error
                self._write_all(f"\nnote: {self._n_lost} messages before this one were lost: {why}\n".encode())
            self._write_all(bytes(data))
            self.error, self._n_lost = None, 0
        except OSError as error:
            self.error = error
            self._n_lost += 1
        return memoryview(data).nbytes

    def _write_all(self, data: bytes) -> None:
        while data:
            n = super().write(data)
            if n is None:
                raise BlockingIOError("its reader is too slow")
            data = data[n:]


def keep_stderr() -> None:
    """Make standard error lose what cannot be written to it: messages end no process."""
    if sys.stderr is None:  # it is closed, and a file that is opened later would take its place
        nowhere = os.open(os.devnull, os.O_RDONLY)  # a closed standard error is one that cannot be written to
        if nowhere != _STDERR:
            os.dup2(nowhere, _STDERR)
            os.close(nowhere)
        os.set_inheritable(_STDERR, True)
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    # A `TextIOWrapper` takes a raw file too, as Python's own does with `-u`; it hands over line by line.
    raw: Any = LossyFile(_STDERR)
    sys.stderr = io.TextIOWrapper(raw, encoding=encoding, errors="replace", line_buffering=True)


def check_stderr() -> None:
    """Refuse to go on if the last message could not be written."""
    raw = getattr(sys.stderr, "buffer", None)
    if isinstance(raw, LossyFile) and raw.error is not None:
        raise StderrUnwritable(
            f"cannot write to standard error, where the log goes: {raw.error.strerror or raw.error}; send it to a file "
            "on a disk with room, or to /dev/null"
        )
