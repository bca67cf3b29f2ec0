"""The queue in front of an engine: waiting requests and work, first come first served, and cancellations.

It is the only object that callers' threads and the engine's thread share; one lock guards all of it. `wake` wakes the
engine's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ostinato.engine.request import Request
from ostinato.engine.work import Work
from ostinato.errors import OstinatoError, QueueFull
from ostinato.processes import OpenedHere


class RequestQueue:
    """Requests and work in order of arrival; cancellations; whether to close."""

    def __init__(self, bound: int, n_slots: int, wake: Callable[[], None]) -> None:
        """`bound`: how many requests may wait, in addition to one per free slot. Work may always wait."""
        self._bound, self._n_slots, self._n_free_slots, self._wake = bound, n_slots, n_slots, wake
        self._opened = OpenedHere()
        self._room = threading.Condition()
        self._waiting: deque[Request | Work] = deque()
        self._n_requests = 0  # of those that wait
        self._cancelled: list[Request | Work] = []
        self._closed_error: Callable[[], OstinatoError] | None = None
        self._closing = False
        self.n_submitted = 0

    # Any thread

    def put(self, one: Request | Work, *, wait: bool = False) -> None:
        """Append a request or work. When the queue is full, for a request: `wait` for room, or QueueFull."""
        self._opened.check()
        n = int(isinstance(one, Request))
        with self._room:
            while n and self._closed_error is None and self._n_requests >= self._bound + self._n_free_slots:
                if not wait:
                    raise QueueFull(
                        f"every slot is taken (slots: {self._n_slots}) and so is every place in the queue (queue: "
                        f"{self._bound}); try again later"
                    )
                self._room.wait()
            if self._closed_error is not None:
                raise self._closed_error()
            self._waiting.append(one)
            self._n_requests += n
            self.n_submitted += n
        self._wake()

    def cancel(self, request: Request | Work) -> None:
        """Ask for a cancellation; no effect in a forked child."""
        if not self._opened:
            return
        with self._room:
            self._cancelled.append(request)
        self._wake()

    def close(self) -> None:
        """Ask the engine's thread to end; no effect in a forked child."""
        if not self._opened:
            return
        with self._room:
            self._closing = True
        self._wake()

    def __len__(self) -> int:
        """Number of waiting requests."""
        return self._n_requests

    # The engine's thread

    @property
    def closing(self) -> bool:
        return self._closing

    def first(self, *, has_slot: bool) -> Request | Work | None:
        """The next request or work, which stays in the queue. While no slot is free, the first that needs no slot."""
        with self._room:
            if not has_slot and len(self._waiting) == self._n_requests:
                return None
            return next((one for one in self._waiting if has_slot or isinstance(one, Work)), None)

    def take_slot(self, request: Request) -> None:
        """The first request leaves the queue for a slot."""
        with self._room:
            self._take(request)
            self._n_free_slots -= 1

    def free_slot(self) -> None:
        """A slot is free again."""
        with self._room:
            self._n_free_slots += 1
            self._room.notify_all()

    def remove(self, one: Request | Work) -> bool:
        """Take a request or work out of the queue; False where it is not in it."""
        with self._room:
            if one not in self._waiting:
                return False
            self._take(one)
            return True

    def _take(self, one: Request | Work) -> None:
        self._waiting.remove(one)
        self._n_requests -= isinstance(one, Request)
        self._room.notify_all()

    def take_cancelled(self) -> list[Request | Work]:
        """Requests and work that were cancelled since the last call."""
        with self._room:
            cancelled, self._cancelled = self._cancelled, []
            return cancelled

    def refuse_all(self, why: Callable[[], OstinatoError]) -> list[Request | Work]:
        """Close the queue: every later `put` raises `why()`. Returns the requests and work that were waiting."""
        with self._room:
            self._closed_error = self._closed_error or why
            left = list(self._waiting)
            self._waiting.clear()
            self._n_requests = 0
            self._room.notify_all()
            return left
