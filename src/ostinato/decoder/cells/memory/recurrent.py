"""Recurrent memory as integers: one cell holds the whole running state of a sequence, or of several sequences that
are still equal (RM-1..19).

Nothing here holds states: a `StateRun` says where a run reads and writes them, and `recurrent_state.py` finds the cells
of a ubatch. A refused call has changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ostinato.cache.state_run import StateRun, StateSource
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.memory.recurrent_state import NoCell, State, load, place
from ostinato.decoder.cells.memory.sequence_ops import NO_END, PositionChange, PositionSpan, SequenceMemory
from ostinato.decoder.cells.memory.status import Status
from ostinato.errors import InternalError, InvalidBatch


class StateTensors(Protocol):
    """The states behind the cells."""

    def zero(self) -> None:
        """Forget all states."""


class RecurrentMemory(SequenceMemory):
    """A cell for each of `n_seq_max` sequences, with `n_snapshots` earlier states beside the newest one."""

    can_shift = True  # only a number changes (RM-18)

    def __init__(self, n_seq_max: int, *, n_snapshots: int = 0, tensors: StateTensors | None = None) -> None:
        self.size = max(1, n_seq_max)
        self.n_snapshots = n_snapshots
        self._tensors = tensors
        self._state = State.empty(self.size)
        self._before: State | None = None  # the state before the last `apply`; None after any other change

    @property
    def state(self) -> State:
        """The cells and tails; read-only."""
        return self._state

    @property
    def n_keep_tail(self) -> int:
        """The last tokens of a sequence that no split may divide, so that every snapshot is valid (SP-12, SP-15)."""
        return self.n_snapshots + 1 if self.n_snapshots > 0 else 0

    # Placement

    def check_ids(self, ubatches: Sequence[Ubatch]) -> None:
        """Refuse sequences that can have no cell (RM-4)."""
        for ubatch in ubatches:
            too_big = ubatch.seq_id >= self.size
            if too_big.any():
                entry = int(too_big.argmax())
                row = int(ubatch.seq_start.searchsorted(entry, side="right")) - 1
                what = f"sequence {ubatch.seq_id[entry]} has no recurrent state; ids are 0 to {self.size - 1}"  # RM-4
                raise InvalidBatch.of_token(int(ubatch.index[row]), what, "seq_range")

    def prepare(self, ubatches: Sequence[Ubatch]) -> list[StateRun] | None:
        """Where each ubatch would run after those before it; None without room. Changes nothing (RM-3)."""
        self.check_ids(ubatches)
        scratch = self._state.copy()
        try:
            return [place(scratch, ubatch) for ubatch in ubatches]
        except NoCell:
            return None

    def apply(self, ubatch: Ubatch, run: StateRun) -> None:
        """Place the ubatch as `prepare` said (RM-6)."""
        state = self._state.copy()
        if place(state, ubatch) != run:
            raise InternalError("recurrent memory has changed since the ubatch was prepared")  # RM-6
        self._state, self._before = state, self._state

    def roll_back(self, ubatch: Ubatch, run: StateRun) -> None:
        """Every sequence is as before the last `apply`; its run must not have written any state (RM-19)."""
        if self._before is None:
            raise InternalError("there is no applied ubatch to roll back in recurrent memory")  # RM-19
        self._state, self._before = self._before, None

    def shape(self, run: StateRun) -> tuple[int, int]:
        """The cells that a run spans: the first, and how many."""
        return run.head, run.count

    # Sequence operations: p0 and p1 bound positions [p0, p1); None: the beginning, or no end

    def seq_rm(self, s: int | None, p0: int | None = None, p1: int | None = None) -> bool:
        """Remove everything, or roll back the newest positions; False where the state cannot forget them (RM-9)."""
        span = PositionSpan.of(p0, p1)
        if s is None:
            return self._remove_all(span)
        self.check_id(s)
        last = self.pos_max(s)
        if last is None or span.start >= span.stop or span.start > last:
            return True
        if span.stop <= last:
            return False
        if span.start > 0:
            return self._back(s, last, span.start - 1)
        state = self._change()
        state.lower_head(state.leave(s))
        return True

    def seq_cp(self, a: int, b: int, p0: int | None = None, p1: int | None = None) -> None:
        """b shares the state of a, whatever the range, and its pending roll back (RM-12)."""
        self.check_cp(a, b, p0, p1)
        if a != b:
            self._change().join(a, b)

    def seq_keep(self, s: int) -> None:
        """Remove every other sequence (RM-15)."""
        self.check_id(s)
        state = self._change()
        for other in range(self.size):
            if other != s:
                state.leave(other)
        state.lower_head([cell for cell in range(self.size) if cell != state.tail[s]])

    def move(self, s: int, span: PositionSpan, change: PositionChange) -> None:
        """Only the number changes (RM-16)."""
        self.check_move(s, span, change)
        cell = self._moved_cell(s, span)
        if cell is not None and change.changes(span):
            state = self._change()
            state.position[cell] = change.of(state.position_of(cell))

    def clear(self, data: bool = False) -> None:
        """Forget every sequence; with `data` the states too."""
        self._state, self._before = State.empty(self.size), None
        if data and self._tensors is not None:
            self._tensors.zero()

    def pos_max(self, s: int) -> int | None:
        """The position of the last token of a sequence; None when it has no state, or can have none (RM-17)."""
        cell = self._state.tail[s] if 0 <= s < self.size else None
        return None if cell is None else self._state.position_of(cell)

    pos_min = pos_max

    # Checks of the same calls, for memories that must check all parts before they change one (HY-5)

    def check_id(self, s: int) -> None:
        if not 0 <= s < self.size:
            raise InvalidBatch(  # RM-11
                f"sequence {s} has no recurrent state; ids are 0 to {self.size - 1}", reason="seq_range"
            )

    def check_cp(self, a: int, b: int, p0: int | None, p1: int | None) -> None:
        self.check_id(a)
        self.check_id(b)

    def check_move(self, s: int, span: PositionSpan, change: PositionChange) -> None:
        self.check_id(s)
        if not change.changes(span):
            return
        change.check()
        cell = self._moved_cell(s, span)
        if cell is None:
            return
        if len(self._state.ids[cell]) > 1:
            raise InvalidBatch(
                f"the state of sequence {s} is shared by sequences {sorted(self._state.ids[cell])}, so its position "
                "cannot move for one of them",  # RM-16
                reason="shared_cell",
            )
        position = self._state.position_of(cell)
        if change.of(position) < 0:
            raise InvalidBatch(
                f"the state of sequence {s} is at position {position} and cannot be shifted by {change.distance}, to "
                "below 0",  # RM-16
                reason="shift_range",
            )

    # Saved states

    def source_of(self, s: int) -> StateSource | None:
        """The cell and the plane that hold the state of a sequence now; None when it has none (ST-11)."""
        cell = self._state.tail[s]
        source = None if cell is None else self._state.source[cell]
        return None if source is None else StateSource(source, self._state.back[s])

    def load(self, ids: frozenset[int], position: int) -> StateRun:
        """Give sequences without a cell one of their own; the caller does the moves, then writes plane 0 (ST-11)."""
        for s in ids:
            self.check_id(s)
            if self._state.tail[s] is not None:
                raise InternalError(f"sequence {s} has a state already; remove it before one is loaded")  # ST-5
        # There is a cell for each sequence, and these have none, so `empty_from` cannot fail (RM-7).
        return load(self._change(), ids, position)

    # Pending work

    def prepare_update(self, optimise: bool = False) -> Status:
        """Nothing is ever pending (RM-18)."""
        return Status.NO_UPDATE

    # Inside

    def _change(self) -> State:
        """The state, for a change after which an earlier `apply` can no longer be rolled back."""
        self._before = None
        return self._state

    def _remove_all(self, span: PositionSpan) -> bool:
        if span.start >= span.stop:
            return True
        if span != (0, NO_END):
            return False
        state = self._change()
        state.lower_head([cell for s in range(self.size) for cell in state.leave(s)])
        return True

    def _back(self, s: int, last: int, target: int) -> bool:
        """Let the next run of s start from the snapshot at the target position; whether there is one (RM-9, RM-14)."""
        total = self._state.back[s] + last - target
        if total > min(self.n_snapshots, self._state.n_last[s] - 1):
            return False
        state = self._change()
        cell = state.own_cell(s)
        state.position[cell] = target
        state.back[s] = total
        return True

    def _moved_cell(self, s: int, span: PositionSpan) -> int | None:
        """The cell of a sequence, if its position is in the span."""
        cell = self._state.tail[s]
        return cell if cell is not None and span.holds(self._state.position_of(cell)) else None
