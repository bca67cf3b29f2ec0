"""From the engine's thread to the event loop: messages of requests, handed over many at a time.

The engine's thread only appends and, where nobody has been woken yet, wakes the loop once: what it costs there does
not grow with the number of readers. A box whose reader is too far behind is closed, so that memory stays bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ostinato.engine.request import Message, Request


class TokenQueue:
    """What came for one HTTP request, each with the number of the answer it belongs to, until it is read."""

    def __init__(self, bound: int, overflowing: Callable[[], None]) -> None:
        """`overflowing` is called when more than `bound` messages wait: the reader is too slow."""
        self._bound, self._overflowing = bound, overflowing
        self._messages: deque[tuple[int, Message]] = deque()
        self._arrival = asyncio.Event()
        self.overflowed = False

    def put(self, index: int, message: Message) -> None:
        """On the event loop."""
        if self.overflowed:
            return
        self._messages.append((index, message))
        if len(self._messages) > self._bound:
            self.overflowed = True
            self._messages.clear()
            self._overflowing()
        self._arrival.set()

    def wake(self) -> None:
        """Let the reader look, though nothing came."""
        self._arrival.set()

    async def look(self) -> None:
        """Return when there is something to read, or somebody rang."""
        await self._arrival.wait()
        self._arrival.clear()

    def take(self) -> tuple[int, Message] | None:
        """The next message; None where there is none now: then whoever rang before was heard, and `look` waits anew."""
        if self._messages:
            return self._messages.popleft()
        self._arrival.clear()
        return None


class TokenDispatcher:
    """One for all requests of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: deque[tuple[TokenQueue, int, Message]] = deque()
        self._woken = False

    def sink(self, box: TokenQueue, index: int) -> Callable[[Request, Message], None]:
        """What an engine is given to tell an answer's messages to."""

        def put(_: Request, message: Message) -> None:
            self._arrived.append((box, index, message))
            if not self._woken:
                self._woken = True
                with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                    self._loop.call_soon_threadsafe(self._hand_out)

        return put

    def _hand_out(self) -> None:
        # Before anything is taken: what arrives from now on rings again.
        self._woken = False
        while self._arrived:
            box, index, message = self._arrived.popleft()
            box.put(index, message)
