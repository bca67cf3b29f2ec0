"""Cells for tokens: find them, fill them, and undo that (KV-5, KV-6, KV-10..12).

A `Stream` is a table of cells with the index at which the next search starts; a `Slot` says which cells of which
streams a ubatch gets. `kv_cache.py` distributes the sequences of a cache over streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ostinato.cache.sequences import Ints
from ostinato.cache.state_block import CellRows
from ostinato.cache.window import Window
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.memory.cells import Bools, Cells, Saved
from ostinato.errors import InternalError


@dataclass(frozen=True, slots=True, eq=False)
class StreamSlot:
    """The cells of one stream that some rows of a ubatch get: row `first_row + i` gets `cells[i]`."""

    stream: int
    first_row: int
    cells: Ints

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + len(self.cells))


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Where a ubatch goes: one entry per stream that it touches, together all its rows in order."""

    streams: tuple[StreamSlot, ...]


def rows_of(ubatch: Ubatch, rows: slice) -> CellRows:
    """What cells store of some rows of a ubatch."""
    grid = None
    if ubatch.pos.ndim == 2 and len(ubatch.pos) >= 3:  # the dimensions are time, y, x
        grid = np.ascontiguousarray(ubatch.pos[1:3, rows].T)
    starts = ubatch.seq_start[rows.start : rows.stop + 1]
    return CellRows(ubatch.first_pos[rows], grid, np.diff(starts), ubatch.seq_id[starts[0] : starts[-1]])


class Journal:
    """Records cells before they change, to undo the changes (KV-9); as a context manager, it does so on any failure."""

    def __init__(self) -> None:
        self._entries: list[tuple[Stream, Saved, int]] = []

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.undo()

    def note(self, stream: Stream, cells: Ints) -> None:
        """These cells of the stream, and its head, are about to change."""
        self._entries.append((stream, stream.cells.save(cells), stream.head))

    def undo(self) -> None:
        """Restore everything that was noted."""
        while self._entries:
            stream, saved, head = self._entries[-1]
            stream.cells.restore(saved)
            stream.head = head
            self._entries.pop()


class Stream:
    """A table of cells and the index at which the next search starts."""

    def __init__(self, size: int, window: Window, *, grid: bool) -> None:
        self.cells = Cells(size, grid=grid)
        self.head = 0
        self._window = window

    def find(self, n_rows: int, *, contiguous: bool) -> Ints | None:
        """Cells for that many rows, from the head on and around; None when there are not enough (KV-5)."""
        if n_rows > self.cells.size:
            return None
        start = self.head
        # Start at the first cell if there is much free space before the head, or if the head is past the end.
        if start > self.cells.used + 2 * n_rows or start >= self.cells.size:
            start = 0
        usable = self._usable()
        if contiguous:
            return _first_run(usable, start, n_rows)
        after = start + np.flatnonzero(usable[start:])[:n_rows]
        if len(after) == n_rows:
            return after
        before = np.flatnonzero(usable[:start])[: n_rows - len(after)]
        return np.concatenate([after, before]) if len(after) + len(before) == n_rows else None

    def check(self, cells: Ints) -> None:
        """Whether rows can be put into these cells; InternalError where not."""
        if len(cells) == 0 or cells.min() < 0 or cells.max() >= self.cells.size or len(np.unique(cells)) != len(cells):
            raise InternalError(f"a slot names cells that a stream of {self.cells.size} does not have, or one twice")
        self.cells.single_owner(cells[self.cells.position[cells] >= 0])

    def place(self, at: Ints, rows: CellRows, journal: Journal) -> None:
        """Put rows into cells, over those that are out of their window (KV-10); the head follows (KV-11)."""
        journal.note(self, at)
        occupied = at[self.cells.position[at] >= 0]
        owners, positions = self.cells.single_owner(occupied), self.cells.position[occupied]
        self.cells.empty(occupied)
        self.cells.set_position(at, rows.position, rows.grid)
        self.cells.add(np.repeat(at, rows.n_ids), rows.ids)
        self._purge(owners, positions, journal)
        self.head = int(at[-1]) + 1 if len(at) else self.head

    def take_back(self, cells: Ints) -> None:
        """Empty cells that were filled; the next search may start there (KV-14)."""
        self.cells.empty(cells)
        self.lower_head(cells)

    def lower_head(self, freed: Ints) -> None:
        """Start the next search at the lowest freed cell, if that is before the head (SQ-4)."""
        if len(freed):
            self.head = min(self.head, int(freed.min()))

    def _usable(self) -> Bools:
        usable = self.cells.position < 0
        if not self._window.reaches_all:
            usable |= self.cells.evictable(self._window)
        return usable

    def _purge(self, owners: Ints, positions: Ints, journal: Journal) -> None:
        """A sequence that lost a position loses those before it too, so that it has no holes (KV-12)."""
        for s in np.unique(owners).tolist():
            lost = int(positions[owners == s].max())
            lowest = self.cells.pos_min(s)
            if lowest is not None and lowest <= lost:
                rest = np.flatnonzero(self.cells.member[s] & self.cells.in_range(lowest, lost + 1))
                journal.note(self, rest)
                self.cells.remove(rest, s)


def _first_run(usable: Bools, start: int, length: int) -> Ints | None:
    """The first run of usable cells that begins at or after start, else before it; a run does not wrap."""
    n_usable = np.concatenate([[0], np.cumsum(usable)])
    begins = np.flatnonzero(n_usable[length:] - n_usable[:-length] == length)
    if not len(begins):
        return None
    later = begins[begins >= start]
    first = int(later[0] if len(later) else begins[0])
    return np.arange(first, first + length)
