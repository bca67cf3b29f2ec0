"""The line in front of an engine: requests that wait, first come first served, and what other threads ask.

The only thing that callers' threads and the engine's thread both touch; one lock guards all of it. `bell` wakes the
engine's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ostinato.engine.request import Request
from ostinato.errors import LineFull, OstinatoError


class Line:
    """Requests in order of arrival; cancellations; whether to close."""

    def __init__(self, bound: int, n_slots: int, bell: Callable[[], None]) -> None:
        """`bound`: how many may wait, beside those for whom a slot is free."""
        self._bound, self._n_free_slots, self._bell = bound, n_slots, bell
        self._room = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._cancelled: list[Request] = []
        self._shut: Callable[[], OstinatoError] | None = None
        self._closing = False
        self.n_joined = 0

    # Any thread

    def join(self, request: Request, *, wait: bool) -> None:
        """Go to the end of the line. When it is full: `wait` for room, or LineFull."""
        with self._room:
            while self._shut is None and len(self._waiting) >= self._bound + self._n_free_slots:
                if not wait:
                    raise LineFull(
                        f"every slot is taken, and {len(self._waiting)} requests wait already, the most that may (the "
                        "option `queue`); try again later"
                    )
                self._room.wait()
            if self._shut is not None:
                raise self._shut()
            self._waiting.append(request)
            self.n_joined += 1
        self._bell()

    def cancel(self, request: Request) -> None:
        """Ask for a cancellation."""
        with self._room:
            self._cancelled.append(request)
        self._bell()

    def close(self) -> None:
        """Ask the engine's thread to end."""
        with self._room:
            self._closing = True
        self._bell()

    def __len__(self) -> int:
        return len(self._waiting)

    # The engine's thread

    @property
    def closing(self) -> bool:
        return self._closing

    def first(self) -> Request | None:
        """Who is next; they stay in line."""
        with self._room:
            return self._waiting[0] if self._waiting else None

    def seat_first(self) -> None:
        """The first leaves the line for a slot."""
        with self._room:
            self._waiting.popleft()
            self._n_free_slots -= 1
            self._room.notify_all()

    def free_slot(self) -> None:
        """A slot is free again."""
        with self._room:
            self._n_free_slots += 1
            self._room.notify_all()

    def drop(self, request: Request) -> bool:
        """Take a request out of the line; False where it is not in it."""
        with self._room:
            if request not in self._waiting:
                return False
            self._waiting.remove(request)
            self._room.notify_all()
            return True

    def take_cancelled(self) -> list[Request]:
        """Who asked to be cancelled since the last time."""
        with self._room:
            asked, self._cancelled = self._cancelled, []
            return asked

    def shut(self, why: Callable[[], OstinatoError]) -> list[Request]:
        """Nobody may join any more: they are told `why`. Who was still waiting."""
        with self._room:
            self._shut = self._shut or why
            left = list(self._waiting)
            self._waiting.clear()
            self._room.notify_all()
            return left
