"""The process that renders chat templates (`renderer.py`): started, asked one line at a time, and ended.

It takes a tenth of a second to start, mostly for jinja2. A program that knows that it will render starts one early with
`early_renderer`, beside its own imports; the next template takes it.
"""

from __future__ import annotations

import json
import subprocess
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ostinato.errors import InternalError
from ostinato.processes import OpenedHere, python_command

START_SECONDS: Final = 30.0
_RENDERER: Final = Path(__file__).with_name("renderer.py")

_spare: Final[list[tuple[subprocess.Popen[bytes], OpenedHere]]] = []  # started early, and taken by no template yet


@contextmanager
def early_renderer() -> Iterator[None]:
    """Start a process that a template takes within this block, and do not wait for it."""
    own = _started(), OpenedHere()
    _spare.append(own)
    try:
        yield
    finally:
        with suppress(ValueError):  # a template took it
            _spare.remove(own)
            _end_process(*own)


def _taken() -> subprocess.Popen[bytes] | None:
    """The process that was started early, if it still runs and is ours."""
    try:
        process, opened = _spare.pop()
    except IndexError:
        return None
    if opened and process.poll() is None:
        return process
    _end_process(process, opened)
    return None


def _started() -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            python_command(str(_RENDERER)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for us, not for it
        )
    except OSError as error:
        raise InternalError(f"the template renderer could not be started: {error}") from error


class RendererProcess:
    """One rendering process: a request at a time, each with a deadline."""

    def __init__(self, owner: object, settings: Mapping[str, Any]) -> None:
        self._process = _taken() or _started()
        self._opened = OpenedHere()
        self.expired = False
        self.end = weakref.finalize(owner, _end_process, self._process, self._opened)
        if self.ask(json.dumps(settings).encode(), START_SECONDS) is None:
            self.end()
            code = self._process.returncode
            raise InternalError(f"the template renderer did not start (exit code {code}); is jinja2 installed?")

    def usable(self) -> bool:
        """Whether it still runs, and is ours: a forked process must not share the parent's."""
        return bool(self._opened) and self._process.poll() is None

    def exit_code(self) -> int:
        """How the process ended; it is ended when it has not by itself."""
        try:
            return self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def ask(self, request: bytes, seconds: float) -> dict[str, Any] | None:
        """The reply to one line; None when there was none in time, or the process ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        clock = threading.Timer(seconds, self._expire)
        clock.daemon = True
        clock.start()
        try:
            self._process.stdin.write(request + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        finally:
            clock.cancel()
            clock.join()
        return json.loads(line) if line.endswith(b"\n") else None

    def _expire(self) -> None:
        self.expired = True
        self._process.kill()


def _end_process(process: subprocess.Popen[bytes], opened: OpenedHere) -> None:
    if not opened:
        return  # a forked child ends, and its parent still needs the process
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:  # the pipe's remaining data is dropped
            pass
