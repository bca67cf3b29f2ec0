"""Constrained answers: what a loop follows by itself, and what threads beside the engine's own compute for it.

Where a loop has memory for grammars and a constraint is an automaton, the loop follows it. Otherwise a slot under a
constraint waits after every token for its mask; all other slots continue, so a slow grammar delays only its own
request. `text/matchers.py` makes constraints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ostinato.errors import InternalError, OstinatoError
from ostinato.loop.grammars import CompiledGrammar
from ostinato.options import Sampling

# More than the work needs: while three threads compute slow grammars, the fourth still serves the other slots.
N_WORKERS: Final = 4


class Constraint(Protocol):
    """What one answer must follow. It has state of its own, and one thread at a time uses it."""

    ends: frozenset[int]  # ids that end the answer, in addition to the request's own

    def mask(self) -> np.ndarray:
        """One bit for each id that may come next, int32 words; at least one bit is set."""

    def take(self, token: int) -> None:
        """Advance by a token that the mask allowed; raises where the answer cannot continue."""


Constrain = Callable[[Sampling], Constraint | None]


def compiled_grammar(constraint: Constraint) -> CompiledGrammar | None:
    """A constraint before its first token in the form that loops follow; None where it has no such form."""
    from ostinato.text.automaton import AutomatonMatcher

    if not isinstance(constraint, AutomatonMatcher):
        return None
    return CompiledGrammar(
        constraint.rule, constraint.automaton, constraint.trie, constraint.min_tokens, constraint.ignores_ends
    )


Owner = TypeVar("Owner")


class Ready(NamedTuple, Generic[Owner]):
    """The mask for the next token of an owner, a sequence in a slot, or the error that prevented it."""

    owner: Owner
    bits: np.ndarray | None
    error: OstinatoError | None


class Masks(Generic[Owner]):
    """Computes masks on threads of its own, started at the first use; it calls `wake` when a mask is ready."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._ready: deque[Ready[Owner]] = deque()
        self._workers: ThreadPoolExecutor | None = None

    def compute(self, owner: Owner, constraint: Constraint, token: int) -> None:
        """Advance a constraint by a token and compute the next mask. At most one computation per owner at a time."""
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
        """The masks that were computed since the last call."""
        return [self._ready.popleft() for _ in range(len(self._ready))]

    def close(self) -> None:
        """End the threads, after the masks that they compute now; those results are dropped."""
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)
