"""A wake event that native code can set: a thread waits for it in Python, and a write to a file sets it.

The native loop sets it at step boundaries without touching the interpreter; the waiting thread sleeps in the
operating system until then. It has the methods of `threading.Event`, which a loop paced by Python uses instead.
"""

from __future__ import annotations

import math
import os
import select
import weakref
from contextlib import suppress
from typing import Protocol


class WakeEvent(Protocol):
    """Set whenever something may have happened; the waiting thread clears it before it looks."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class FileWakeEvent:
    """A wake event that is set by writing eight bytes to the file `fd`."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self.fd = self._poll = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._poll, self.fd = os.pipe()
            os.set_blocking(self._poll, False)
            os.set_blocking(self.fd, False)
        for file in {self.fd, self._poll}:
            # Closed only when this object is unreachable: the system may give a closed number to another file. Not at
            # exit, where it would come before the end of threads that set it.
            weakref.finalize(self, os.close, file).atexit = False

    def set(self) -> None:
        with suppress(BlockingIOError):  # full: it is set already
            os.write(self.fd, (1).to_bytes(8, "little"))

    def clear(self) -> None:
        with suppress(BlockingIOError):  # nothing left to read
            while os.read(self._poll, 4096):
                pass

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it was set within this time, in steps of a millisecond."""
        poll = select.poll()
        poll.register(self._poll, select.POLLIN)
        return bool(poll.poll(None if timeout is None else math.ceil(timeout * 1000)))
