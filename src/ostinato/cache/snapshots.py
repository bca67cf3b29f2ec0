"""Snapshots of recurrent states, found again by the tokens before them, so that a prompt need not begin from nothing.

A state cannot be rolled back, so a beginning is reused only where a snapshot was taken: `decoder/paged.py` says where.
Snapshots lie in the host's memory, as `SequenceCopy` reads them; together they take a bounded number of bytes, and the
least recently used goes first. Bytes and integers only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ostinato.files.unpack import Bytes


@dataclass(frozen=True, slots=True, eq=False)
class StateSnapshot:
    """The states of a sequence after these tokens."""

    tokens: tuple[int, ...]
    rope_set: int
    states: tuple[Bytes, ...]

    @property
    def n_bytes(self) -> int:
        return sum(state.nbytes for state in self.states)


class StateSnapshots:
    """Snapshots of at most so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._by_use: OrderedDict[tuple[int, tuple[int, ...]], StateSnapshot] = OrderedDict()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._by_use)

    def beginnings(self, tokens: Sequence[int], rope_set: int) -> Iterator[StateSnapshot]:
        """Those after whose tokens this sequence goes on by at least one token, the longest first."""
        prompt = tuple(tokens)
        shorter = [one for one in self._by_use.values() if len(one.tokens) < len(prompt) and one.rope_set == rope_set]
        for one in sorted(shorter, key=lambda one: len(one.tokens), reverse=True):
            if prompt[: len(one.tokens)] == one.tokens:
                yield one

    def has(self, tokens: Sequence[int], rope_set: int) -> bool:
        return (rope_set, tuple(tokens)) in self._by_use

    def use(self, snapshot: StateSnapshot) -> None:
        """It was reused: it goes last."""
        if (key := (snapshot.rope_set, snapshot.tokens)) in self._by_use:
            self._by_use.move_to_end(key)

    def add(self, snapshot: StateSnapshot) -> None:
        """Keep a snapshot in place of those used least recently; one that is larger than all may be is not kept."""
        key = snapshot.rope_set, snapshot.tokens
        if snapshot.n_bytes > self._most_bytes:
            return
        if key in self._by_use:
            self.n_bytes -= self._by_use.pop(key).n_bytes
        self._by_use[key] = snapshot
        self.n_bytes += snapshot.n_bytes
        while self.n_bytes > self._most_bytes:
            self.n_bytes -= self._by_use.popitem(last=False)[1].n_bytes
