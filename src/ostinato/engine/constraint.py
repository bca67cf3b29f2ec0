"""Answers that must follow something: which tokens may come next is computed here, beside the engine's own thread.

A slot under a constraint waits after every token for its bits; all others go on. So whatever takes long, a strange
grammar or many of them, holds up nobody else. What the bits mean, `text/grammar.py` knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ostinato.errors import InternalError, OstinatoError
from ostinato.options import Sampling

# More than the work needs: three may be at grammars that take long, and the others' masks still come.
N_WORKERS: Final = 4


class Constraint(Protocol):
    """What one answer must follow; of its own state, used by one thread at a time."""

    ends: frozenset[int]  # ids that end the answer, whatever else was asked for

    def mask(self) -> np.ndarray:
        """One bit for each id that may come next, int32 words; never none."""

    def take(self, token: int) -> None:
        """Go on by a token of the mask; raises where the answer cannot go on."""


Constrain = Callable[[Sampling], Constraint | None]

Owner = TypeVar("Owner")


class Ready(NamedTuple, Generic[Owner]):
    """The bits for the next token of a seat, or why there are none."""

    owner: Owner
    bits: np.ndarray | None
    error: OstinatoError | None


class Masks(Generic[Owner]):
    """Computes bits on threads of its own, started with the first question; `wake` is rung when some are ready."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._ready: deque[Ready[Owner]] = deque()
        self._workers: ThreadPoolExecutor | None = None

    def compute(self, owner: Owner, constraint: Constraint, token: int) -> None:
        """Let a constraint go on by a token, and compute what may come next. One question of a seat at a time."""
        if self._workers is None:
            self._workers = ThreadPoolExecutor(N_WORKERS, thread_name_prefix="ostinato-masks")
        self._workers.submit(self._answer, owner, constraint, token)

    def _answer(self, owner: Owner, constraint: Constraint, token: int) -> None:
        try:
            constraint.take(token)
            ready = Ready(owner, constraint.mask(), None)
        except OstinatoError as error:
            ready = Ready(owner, None, error)
        except Exception as error:
            wrapped = InternalError(f"what may come next could not be computed: {error!r}")
            wrapped.__cause__ = error
            ready = Ready(owner, None, wrapped)
        self._ready.append(ready)
        self._wake()

    def take(self) -> list[Ready[Owner]]:
        """What has been computed since the last time."""
        return [self._ready.popleft() for _ in range(len(self._ready))]

    def close(self) -> None:
        """End the threads; what they are at is finished first, and nobody hears of it."""
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)
