"""A wake event that native code can ring: an event for whoever waits in Python, set by a write to a file.

The native loop rings at every step boundary without touching the interpreter; whoever waits sleeps in the kernel until
then. It has the words of `threading.Event`, so that a loop paced by Python can have one of those in its place.
"""

from __future__ import annotations

import math
import os
import select
import weakref
from contextlib import suppress
from typing import Protocol


class WakeEvent(Protocol):
    """Set whenever something may have happened; cleared by the one who listens, before it looks."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class FileWakeEvent:
    """A wake event with a file to ring it by: eight bytes written to `fd`."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self.fd = self._poll = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._poll, self.fd = os.pipe()
            os.set_blocking(self._poll, False)
            os.set_blocking(self.fd, False)
        for file in {self.fd, self._poll}:
            # Not before nobody holds it: a number that was closed may be somebody else's file by then.
            weakref.finalize(self, os.close, file)

    def set(self) -> None:
        with suppress(BlockingIOError):  # full: it rings already
            os.write(self.fd, (1).to_bytes(8, "little"))

    def clear(self) -> None:
        with suppress(BlockingIOError):  # nothing, or nothing more
            while os.read(self._poll, 4096):
                pass

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it rang within this time, in steps of a millisecond."""
        poll = select.poll()
        poll.register(self._poll, select.POLLIN)
        return bool(poll.poll(None if timeout is None else math.ceil(timeout * 1000)))
