"""Passes messages of requests from the engine's thread to the event loop, many at a time.

The engine's thread only appends and, if no wake is pending, wakes the loop once: its cost does not grow with the
number of readers. A queue whose reader is too far behind is closed, so that memory stays bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ostinato.engine.request import Request, RequestMessage


class TokenQueue:
    """Unread messages of one caller, each with the number of its answer."""

    def __init__(self, bound: int, overflowing: Callable[[], None]) -> None:
        """`overflowing` is called when more than `bound` messages wait: the reader is too slow."""
        self._bound, self._overflowing = bound, overflowing
        self._messages: deque[tuple[int, RequestMessage]] = deque()
        self._arrival = asyncio.Event()
        self.overflowed = False

    def put(self, index: int, message: RequestMessage) -> None:
        """Add a message. Call on the event loop."""
        if self.overflowed:
            return
        self._messages.append((index, message))
        if len(self._messages) > self._bound:
            self.overflowed = True
            self._messages.clear()
            self._overflowing()
        self._arrival.set()

    def wake(self) -> None:
        """Wake the reader without a message."""
        self._arrival.set()

    async def look(self) -> None:
        """Wait for a message or a wake."""
        await self._arrival.wait()
        self._arrival.clear()

    def take(self) -> tuple[int, RequestMessage] | None:
        """The next message. None if there is none: earlier wakes are then consumed, and `look` waits for a new one."""
        if self._messages:
            return self._messages.popleft()
        self._arrival.clear()
        return None


class TokenDispatcher:
    """One instance serves all requests of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: deque[tuple[TokenQueue, int, RequestMessage]] = deque()
        self._woken = False

    def sink(self, box: TokenQueue, index: int) -> Callable[[Request, RequestMessage], None]:
        """The sink that an engine calls with an answer's messages."""

        def put(_: Request, message: RequestMessage) -> None:
            self._arrived.append((box, index, message))
            if not self._woken:
                self._woken = True
                with suppress(RuntimeError):  # the loop is closed: no reader is left
                    self._loop.call_soon_threadsafe(self._hand_out)

        return put

    def _hand_out(self) -> None:
        # Before any message is taken: a message that arrives from now on wakes again.
        self._woken = False
        while self._arrived:
            box, index, message = self._arrived.popleft()
            box.put(index, message)
