"""What callers may do to a sequence in a KV cache: remove, copy, keep, shift, divide (SQ-2..16).

The functions work on streams and assume that `kv_cache.py` has checked the call. Positions are a `PositionSpan`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ostinato.cache.sequences import Ints
from ostinato.decoder.cells.memory.slots import Stream
from ostinato.errors import InvalidBatch

NO_END: Final = int(np.iinfo(np.int64).max)
# Positions stay far from the limit of their 64 bits, however often they are shifted.
MAX_DISTANCE: Final = 1 << 31


class PositionSpan(NamedTuple):
    """Positions [start, stop)."""

    start: int
    stop: int

    @staticmethod
    def of(p0: int | None, p1: int | None) -> PositionSpan:
        """From the caller's bounds: None, or a negative one, stands for the beginning or for no end."""
        return PositionSpan(0 if p0 is None else max(p0, 0), NO_END if p1 is None or p1 < 0 else p1)

    @property
    def nothing(self) -> bool:
        """Whether shift and divide call it an empty range; an inverted one is none (SQ-11, SQ-16)."""
        return self.start == self.stop

    def holds(self, position: int) -> bool:
        return self.start <= position < self.stop


@dataclass(frozen=True, slots=True)
class PositionChange:
    """Positions move by a distance (SQ-11), or become their quotients (SQ-14)."""

    distance: int = 0
    divisor: int = 1

    def changes(self, span: PositionSpan) -> bool:
        """False where nothing would move; that is always allowed."""
        return not span.nothing and (self.distance, self.divisor) != (0, 1)

    def check(self) -> None:
        if abs(self.distance) >= MAX_DISTANCE:
            raise InvalidBatch(f"positions cannot be shifted by {self.distance}: it is too far", reason="shift_range")
        if not 1 <= self.divisor < MAX_DISTANCE:
            raise InvalidBatch(  # SQ-14
                f"positions cannot be divided by {self.divisor}: it must be at least 1", reason="divisor"
            )

    def of(self, position: int) -> int:
        return (position + self.distance) // self.divisor


class SequenceMemory(ABC):
    """Memory whose sequences can move. Positions [p0, p1): None stands for the beginning, or for no end."""

    @abstractmethod
    def move(self, s: int, span: PositionSpan, change: PositionChange) -> None:
        """Change the positions of a sequence; InvalidBatch, and no change, where that is not possible."""

    def seq_add(self, s: int, p0: int | None, p1: int | None, distance: int) -> None:
        """Shift positions (SQ-11, RM-16); keys follow at the next update."""
        self.move(s, PositionSpan.of(p0, p1), PositionChange(distance=distance))

    def seq_div(self, s: int, p0: int | None, p1: int | None, divisor: int) -> None:
        """Divide positions (SQ-14, RM-16); keys follow at the next update."""
        self.move(s, PositionSpan.of(p0, p1), PositionChange(divisor=divisor))


def selected(stream: Stream, s: int, span: PositionSpan) -> Ints:
    """The cells of a sequence whose positions are in the span."""
    return np.flatnonzero(stream.cells.member[s] & stream.cells.in_range(*span))


def remove(stream: Stream, s: int, span: PositionSpan) -> None:
    """The sequence loses the positions (SQ-2)."""
    stream.lower_head(stream.cells.remove(selected(stream, s, span), s))


def remove_any(streams: Iterable[Stream], span: PositionSpan) -> None:
    """Every sequence loses the positions (SQ-3)."""
    for stream in streams:
        cells = np.flatnonzero(stream.cells.in_range(*span))
        stream.cells.empty(cells)
        stream.lower_head(cells)


def copy_within(stream: Stream, a: int, b: int, span: PositionSpan) -> None:
    """Cells of a become cells of b as well, where they are not already (SQ-5)."""
    cells = selected(stream, a, span)
    stream.cells.add(cells[~stream.cells.member[b, cells]], b)


def copy_across(source: Stream, target: Stream, a: int, b: int) -> None:
    """The target stream holds what a has, at the same indices, for b, and awaits the same shifts (SQ-7, SQ-9)."""
    mine, theirs = target.cells, source.cells
    mine.reset()
    cells = np.flatnonzero(theirs.member[a])
    mine.set_position(cells, theirs.position[cells], None if theirs.grid is None else theirs.grid[cells])
    mine.add(cells, np.full(len(cells), b))
    mine.shift[cells] = theirs.shift[cells]
    mine.has_shift = bool(mine.shift.any())
    target.head = source.head


def keep(streams: Iterable[Stream], s: int) -> None:
    """Every other sequence loses everything, in all streams (SQ-10)."""
    for stream in streams:
        used = np.flatnonzero(stream.cells.position >= 0)
        stream.lower_head(stream.cells.keep(used, s))


def move(stream: Stream, s: int, span: PositionSpan, change: PositionChange) -> None:
    """Positions change; what falls below zero is gone. After a shift the next search starts there, or at 0 (SQ-11)."""
    if change.distance:
        freed = stream.cells.shift_by(selected(stream, s, span), change.distance)
        stream.head = int(freed.min()) if len(freed) else 0
    else:
        stream.cells.divide_by(selected(stream, s, span), change.divisor)


def check_not_shared(stream: Stream, s: int, span: PositionSpan) -> None:
    """Refuse to move cells that other sequences hold too (SQ-13)."""
    cells = selected(stream, s, span)
    shared = cells[stream.cells.n_owners[cells] > 1]
    if len(shared):
        position, owners = int(stream.cells.position[shared[0]]), stream.cells.ids(int(shared[0]))
        raise InvalidBatch(
            f"position {position} of sequence {s} is shared by sequences {owners}, so it cannot move for one of them; "
            "remove it from the others first",  # SQ-13
            reason="shared_cell",
        )
