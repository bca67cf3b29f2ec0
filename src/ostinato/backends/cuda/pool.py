"""Streams and events that outlive engines: taken from here and given back, so that few are ever created (E-4).

A driver that creates and destroys thousands of them ends in obscure errors. Only streams and events known to work
are given back. A device has one pool for the life of the process.
"""

from __future__ import annotations

from typing import Any, Final

import torch


class Pool:
    """The free streams and events of one device; `n_streams` and `n_events` count those ever created."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, list[Any]] = {}  # free ones, by priority
        self._events: list[Any] = []
        self.n_streams = 0
        self.n_events = 0

    def stream(self, priority: int) -> Any:
        """A stream with no other user; a lower number means a higher priority."""
        free = self._streams.setdefault(priority, [])
        if free:
            return free.pop()
        self.n_streams += 1
        return torch.cuda.Stream(self._device, priority=priority)

    def event(self) -> Any:
        """An event without timing and with no other user; it counts as passed until it is recorded."""
        if self._events:
            return self._events.pop()
        self.n_events += 1
        return torch.cuda.Event()

    def take_back(self, stream: Any, priority: int) -> None:
        """Return a stream that is no longer used; kept if it is idle, dropped if it is busy or failed."""
        if _is_passed(stream):
            self._streams.setdefault(priority, []).append(stream)

    def take_back_event(self, event: Any) -> None:
        """The same of an event."""
        if _is_passed(event):
            self._events.append(event)


def _is_passed(mark: Any) -> bool:
    try:
        return bool(mark.query())
    except RuntimeError:  # the device is gone
        return False


_POOLS: Final[dict[str, Pool]] = {}


def pool_of(device: torch.device) -> Pool:
    """The pool of a device."""
    return _POOLS.setdefault(str(device), Pool(device))
