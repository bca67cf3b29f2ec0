"""The cells of recurrent memory, and how a ubatch finds its own (RM-6).

`source` is the physical row that holds a cell's state. It is the cell itself, except after a copy on write or a swap,
until the next run has moved the state to the cell's own row. At most 256 cells: plain Python.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ostinato.cache.state_run import Move, StateRun, StateSource
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.errors import InternalError

NO_SEQUENCES: frozenset[int] = frozenset()


class NoCell(Exception):
    """No empty cell is left (RM-7); `RecurrentMemory` turns it into an answer."""


@dataclass(slots=True)
class State:
    """Cells with their position, sequences and source; and per sequence its cell and what it may roll back.

    Mutable: `RecurrentMemory` owns one, and plans on copies of it.
    """

    position: list[int | None]  # per cell: of the last token
    ids: list[frozenset[int]]  # per cell: the sequences whose state it is
    source: list[int | None]  # per cell: the row that holds its state
    tail: list[int | None]  # per sequence: its cell
    back: list[int]  # per sequence: roll back pending, in tokens
    n_last: list[int]  # per sequence: tokens of its last run, so n_last - 1 snapshots are valid (RM-14)
    head: int = 0

    @staticmethod
    def empty(size: int) -> State:
        return State([None] * size, [NO_SEQUENCES] * size, [None] * size, [None] * size, [0] * size, [0] * size)

    def copy(self) -> State:
        """An independent copy."""
        lists = (self.position[:], self.ids[:], self.source[:], self.tail[:], self.back[:], self.n_last[:])
        return State(*lists, head=self.head)

    @property
    def used(self) -> int:
        return sum(1 for ids in self.ids if ids)

    def position_of(self, cell: int) -> int:
        """The position of a used cell."""
        position = self.position[cell]
        if position is None:
            raise InternalError(f"recurrent cell {cell} is empty and has no position")  # RM-2
        return position

    def lower_head(self, freed: Iterable[int]) -> None:
        """Start the next search at the lowest freed cell, if that is before the head."""
        self.head = min(self.head, *freed, self.head)

    def empty_from(self, start: int) -> int:
        """The first empty cell at or after start, cyclic."""
        size = len(self.ids)
        for step in range(size):
            cell = (start + step) % size
            if not self.ids[cell]:
                return cell
        raise NoCell

    def leave(self, s: int) -> list[int]:
        """Remove a sequence's state; returns its cell if that has become empty."""
        cell = self.tail[s]
        self.tail[s], self.back[s], self.n_last[s] = None, 0, 0
        if cell is None:
            return []
        self.ids[cell] -= {s}
        if self.ids[cell]:
            return []
        self.position[cell] = self.source[cell] = None
        return [cell]

    def join(self, a: int, b: int) -> None:
        """Replace the state of b by a share of that of a (RM-12)."""
        self.leave(b)
        cell = self.tail[a]
        if cell is not None:
            self.ids[cell] |= {b}
            self.tail[b], self.back[b], self.n_last[b] = cell, self.back[a], self.n_last[a]

    def own_cell(self, s: int, start: int | None = None) -> int:
        """The cell of s alone: its own, or an empty one that reads the same row (copy on write, RM-6, RM-10)."""
        shared = self.tail[s]
        if shared is not None and len(self.ids[shared]) == 1:
            return shared
        cell = self.empty_from(self.head if start is None else start)
        if shared is not None:
            self.position[cell], self.source[cell] = self.position[shared], self.source[shared]
            self.ids[shared] -= {s}
        self.ids[cell] = frozenset({s})
        self.tail[s] = cell
        return cell

    def swap(self, a: int, b: int) -> None:
        """Swap two cells; their states stay in their rows."""
        if a == b:
            return
        self.position[a], self.position[b] = self.position[b], self.position[a]
        self.source[a], self.source[b] = self.source[b], self.source[a]
        self.ids[a], self.ids[b] = self.ids[b], self.ids[a]
        for cell in (a, b):
            for s in self.ids[cell]:
                self.tail[s] = cell


def place(state: State, ubatch: Ubatch) -> StateRun:
    """Give every set of an equal-length ubatch a cell, side by side; returns what its run must do (RM-6)."""
    sets = [ubatch.ids_of(k * ubatch.n_seq_tokens) for k in range(ubatch.n_seqs)]
    if not ubatch.equal_seqs:
        raise InternalError("recurrent memory takes ubatches of equally long sets only")  # RM-6
    if state.head > state.used + 2 * len(sets):
        state.head = 0
    for ids in sets:
        for s in ids[1:]:
            state.leave(s)
    low, high = _claim(state, [ids[0] for ids in sets])
    for k, ids in enumerate(sets):
        cell = state.tail[ids[0]]
        assert cell is not None  # just claimed
        state.swap(low + k, cell)
    starts = tuple(_start(state, low + k, ids[0]) for k, ids in enumerate(sets))
    last_rows = range(ubatch.n_seq_tokens - 1, ubatch.n_tokens, ubatch.n_seq_tokens)
    for k, (ids, row) in enumerate(zip(sets, last_rows, strict=True)):
        cell = low + k
        state.position[cell], state.ids[cell], state.source[cell] = int(ubatch.first_pos[row]), frozenset(ids), cell
        for s in ids:
            state.tail[s], state.back[s], state.n_last[s] = cell, 0, ubatch.n_seq_tokens
    state.head = low
    return StateRun(low, high - low + 1, starts, _bring_home(state, low, high, len(sets)))


def load(state: State, ids: frozenset[int], position: int) -> StateRun:
    """Give sequences without a cell one; their state cannot be rolled back, as after a run of one token (RM-14)."""
    cell = state.empty_from(state.head)
    state.position[cell], state.ids[cell], state.source[cell] = position, ids, cell
    for s in ids:
        state.tail[s], state.back[s], state.n_last[s] = cell, 0, 1
    return StateRun(cell, 1, (None,), _bring_home(state, cell, cell, 1))


def _claim(state: State, primaries: list[int]) -> tuple[int, int]:
    """Give every primary sequence a cell of its own; returns the lowest and the highest of these."""
    candidate = state.head
    cells = []
    for s in primaries:
        had = state.tail[s]
        cell = state.own_cell(s, candidate)
        if cell != had:
            candidate = cell + 1
        cells.append(cell)
    return min(cells), max(cells)


def _start(state: State, cell: int, primary: int) -> StateSource | None:
    row = state.source[cell]
    return None if row is None else StateSource(row, state.back[primary])


def _bring_home(state: State, low: int, high: int, n_sets: int) -> tuple[Move, ...]:
    """Rows to copy for sequences outside the run: those the run spans, and those whose row would be overwritten.

    The latter may be anywhere: after a roll back of a shared state, its owner reads another cell's row (RM-10).
    """
    written = set(range(low, low + n_sets))
    moves: list[Move] = []
    grown = True
    while grown:
        grown = False
        for cell, row in enumerate(state.source):
            if row is not None and row != cell and (low <= cell <= high or row in written):
                moves.append(Move(row, cell))
                written.add(cell)
                state.source[cell] = cell
                grown = True
    return tuple(moves)
