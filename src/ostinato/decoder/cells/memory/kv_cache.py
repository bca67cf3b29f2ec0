"""The KV cache as integers: streams of cells, slots for ubatches, sequence operations, pending work (KV, SQ, UP).

Nothing here holds keys or values: `CellTensors` copies and rotates them, and `Slot` and `visible` say which cells a
forward writes and sees. A refused call has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from ostinato.cache.sequences import MAX_SEQ, Ints
from ostinato.cache.state_block import CellRows
from ostinato.cache.window import CELL_STEP, Window, round_up
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.memory import sequence_ops as ops
from ostinato.decoder.cells.memory.cells import Bools, Cells
from ostinato.decoder.cells.memory.sequence_ops import PositionChange, PositionSpan, SequenceMemory
from ostinato.decoder.cells.memory.slots import Journal, Slot, Stream, StreamSlot, rows_of
from ostinato.decoder.cells.memory.status import Status
from ostinato.errors import InternalError, InvalidBatch


class CellTensors(Protocol):
    """The keys and values behind the cells. A failure is raised as one of the decode errors."""

    def copy_stream(self, source: int, target: int) -> None:
        """Copy all keys and values of a stream."""

    def shift_keys(self, stream: int, shifts: Ints) -> None:
        """Rotate the keys of a stream, cell by cell; 0 leaves a cell alone. All layers, or an error and none."""

    def zero(self) -> None:
        """Forget all keys and values."""


class KVCache(SequenceMemory):
    """`size` cells in one stream for all sequences (`unified`), or that many for each of `n_seq_max` sequences.

    `padding`: cell counts are multiples of it. `can_shift`: keys can be rotated to other positions.
    `n_pos_dims`: position dimensions of the model.
    """

    def __init__(
        self,
        size: int,
        *,
        n_seq_max: int,
        unified: bool,
        window: Window | None = None,
        padding: int = 1,
        can_shift: bool = True,
        n_pos_dims: int = 1,
        tensors: CellTensors | None = None,
    ) -> None:
        if size < 1 or size % padding:
            raise InternalError(f"a cache of {size} cells is no multiple of its padding of {padding}")  # KV-1
        self.size = size
        self.unified = unified
        self.window = window or Window()
        self.can_shift = can_shift and n_pos_dims == 1
        self.pending_copies: list[tuple[int, int]] = []
        self._n_ids = MAX_SEQ if unified else n_seq_max
        self._pad = max(padding, CELL_STEP)
        self._tensors = tensors
        n_streams = 1 if unified else n_seq_max
        self.streams = tuple(Stream(size, self.window, grid=n_pos_dims > 1) for _ in range(n_streams))

    # Slots

    def find_slot(self, ubatch: Ubatch, *, contiguous: bool = False) -> Slot | None:
        """Cells for every row of the ubatch; None when a stream has too few. Changes nothing (KV-3, KV-7)."""
        found = []
        for number, rows in self._groups(ubatch):
            cells = self.streams[number].find(rows.stop - rows.start, contiguous=contiguous)
            if cells is None:
                return None
            found.append(StreamSlot(number, rows.start, cells))
        return Slot(tuple(found))

    def prepare(self, ubatches: Sequence[Ubatch]) -> list[Slot] | None:
        """A slot for each ubatch, as if those before it were in place; None when one has none.

        It changes nothing (KV-8, KV-9).
        """
        slots: list[Slot] = []
        journal = Journal()
        try:
            for ubatch in ubatches:
                slot = self.find_slot(ubatch)
                if slot is None:
                    return None
                slots.append(slot)
                if len(slots) < len(ubatches):  # no search follows the last
                    self._place(ubatch, slot, journal)
            return slots
        finally:
            journal.undo()

    def apply(self, ubatch: Ubatch, slot: Slot) -> None:
        """Put the ubatch into its slot, completely or, on any failure, not at all (KV-10..12)."""
        groups = [(number, rows.start, rows.stop) for number, rows in self._groups(ubatch)]
        if groups != [(part.stream, part.rows.start, part.rows.stop) for part in slot.streams]:
            raise InternalError("the slot is not of this ubatch: their rows or streams differ")  # KV-10
        for part in slot.streams:
            self.streams[part.stream].check(part.cells)
        with Journal() as journal:
            self._place(ubatch, slot, journal)

    def roll_back(self, ubatch: Ubatch, slot: Slot) -> None:
        """Empty exactly the cells that `apply` filled, for all ids of their tokens (KV-14)."""
        for part in slot.streams:
            cells = self.streams[part.stream].cells
            if not np.array_equal(cells.position[part.cells], ubatch.first_pos[part.rows]):
                raise InternalError(
                    f"stream {part.stream} no longer holds the ubatch that is to be rolled back"  # KV-14
                )
        for part in slot.streams:
            self.streams[part.stream].take_back(part.cells)

    def n_kv(self, slot: Slot | None = None) -> int:
        """Cells that attention reads, for a slot that has been applied; None: for all streams (KV-13)."""
        parts = range(len(self.streams)) if slot is None else [part.stream for part in slot.streams]
        used = max(self.streams[number].cells.used_stop for number in parts)
        return min(self.size, max(self._pad, round_up(used, self._pad)))

    def shape(self, slot: Slot) -> tuple[int, int]:
        """Of an applied slot: the cells that attention reads, and the streams."""
        return self.n_kv(slot), len(slot.streams)

    def visible(self, ubatch: Ubatch, slot: Slot, *, causal: bool = True) -> list[Bools]:
        """For each stream of an applied slot, where a row sees a cell, bool [rows, n_kv] (KV-16)."""
        n_kv = self.n_kv(slot)
        return [
            _seen(self.streams[part.stream].cells, ubatch, part.rows, n_kv, self.window, causal=causal)
            for part in slot.streams
        ]

    # Sequence operations: p0 and p1 bound positions [p0, p1); None: the beginning, or no end

    def seq_rm(self, s: int | None, p0: int | None = None, p1: int | None = None) -> bool:
        """Remove positions of a sequence, or of all (None). Always possible (SQ-2, SQ-3)."""
        if s is None:
            ops.remove_any(self.streams, PositionSpan.of(p0, p1))
        else:
            self.check_id(s)
            ops.remove(self._stream_of(s), s, PositionSpan.of(p0, p1))
        return True

    def seq_cp(self, a: int, b: int, p0: int | None = None, p1: int | None = None) -> None:
        """Add cells of a to b; across streams only all of them, with data copied at the next update (SQ-5..9)."""
        self.check_cp(a, b, p0, p1)
        if a == b:
            return
        source, target = self._stream_of(a), self._stream_of(b)
        if source is target:
            ops.copy_within(source, a, b, PositionSpan.of(p0, p1))
        else:
            ops.copy_across(source, target, a, b)
            self.pending_copies.append((a, b))  # with several streams, each id is the number of its stream

    def seq_keep(self, s: int) -> None:
        """Remove every other sequence (SQ-10)."""
        self.check_id(s)
        ops.keep(self.streams, s)

    def move(self, s: int, span: PositionSpan, change: PositionChange) -> None:
        self.check_move(s, span, change)
        if change.changes(span):
            ops.move(self._stream_of(s), s, span, change)

    def clear(self, data: bool = False) -> None:
        """Forget every sequence and all pending work; with `data` the keys and values too (KV-2)."""
        for stream in self.streams:
            stream.cells.reset()
            stream.head = 0
        self.pending_copies.clear()
        if data and self._tensors is not None:
            self._tensors.zero()

    def pos_min(self, s: int) -> int | None:
        """The lowest position of a sequence; None when it has none (SQ-15)."""
        self.check_id(s)
        return self._stream_of(s).cells.pos_min(s)

    def pos_max(self, s: int) -> int | None:
        """The highest position of a sequence; None when it has none (SQ-15)."""
        self.check_id(s)
        return self._stream_of(s).cells.pos_max(s)

    # Checks of the same calls, for memories that must check all parts before they change one (HY-5)

    def check_id(self, s: int) -> None:
        if not 0 <= s < self._n_ids:
            raise InvalidBatch(  # SQ-1
                f"sequence {s} does not exist; ids are 0 to {self._n_ids - 1}", reason="seq_range"
            )

    def check_cp(self, a: int, b: int, p0: int | None, p1: int | None) -> None:
        self.check_id(a)
        self.check_id(b)
        if self._stream_of(a) is self._stream_of(b):
            return
        span, last = PositionSpan.of(p0, p1), self.pos_max(a)
        if span.start > 0 or span.stop <= (-1 if last is None else last):
            raise InvalidBatch(
                f"sequences {a} and {b} are in streams of their own, so only the whole of {a} can be copied, not "
                f"positions {p0} to {p1} of {last}",  # SQ-6
                reason="partial_copy",
            )

    def check_move(self, s: int, span: PositionSpan, change: PositionChange) -> None:
        self.check_id(s)
        if not change.changes(span):
            return
        change.check()
        if not self.can_shift:
            raise InvalidBatch(  # SQ-12
                "positions cannot be shifted or divided in this cache", reason="shift_unsupported"
            )
        ops.check_not_shared(self._stream_of(s), s, span)

    # Pending work

    @property
    def has_shift(self) -> bool:
        return any(stream.cells.has_shift for stream in self.streams)

    def prepare_update(self, optimise: bool = False) -> Status:
        """Whether anything is pending; there is nothing to optimise here (UP-2, UP-7)."""
        return Status.SUCCESS if self.pending_copies or self.has_shift else Status.NO_UPDATE

    def apply_update(self) -> None:
        """Carry out the stream copies in order, then the key shifts; what fails stays pending (UP-3, UP-5)."""
        while self.pending_copies:
            if self._tensors is not None:
                self._tensors.copy_stream(*self.pending_copies[0])
            del self.pending_copies[0]
        for number, stream in enumerate(self.streams):
            if stream.cells.has_shift:
                if self._tensors is not None:
                    self._tensors.shift_keys(number, stream.cells.shift.copy())
                stream.cells.reset_shift()

    # Saved states: which cells are saved, and where they are loaded

    def saved_cells(self, s: int) -> Ints:
        """The cells of a sequence worth saving, ascending: not those out of the window of its last position (ST-4)."""
        cells = self._stream_of(s).cells
        found = np.flatnonzero(cells.member[s])
        last = np.array(cells.pos_max(s) or 0)
        kept: Ints = found[~self.window.masked(cells.position[found], last)]
        return kept

    def load_sequence(self, s: int, position: Ints, grid: Ints | None = None) -> Ints | None:
        """Cells for a saved sequence, which replaces what s had; None, and s empty, when there are too few (ST-5)."""
        self.seq_rm(s)
        stream = self._stream_of(s)
        cells = stream.find(len(position), contiguous=False)
        if cells is not None:
            rows = CellRows(position, grid, np.ones_like(position), np.full(len(position), s))
            with Journal() as journal:
                stream.place(cells, rows, journal)
        return cells

    def load_stream(self, number: int, rows: CellRows) -> None:
        """Put the saved cells of a whole stream into an empty one, from cell 0 on (ST-7)."""
        stream = self.streams[number]
        with Journal() as journal:
            stream.place(np.arange(len(rows.position)), rows, journal)
            stream.head = 0

    # Inside

    def _groups(self, ubatch: Ubatch) -> Iterator[tuple[int, slice]]:
        """Which rows of a ubatch go to which stream (KV-4)."""
        n_rows = ubatch.n_tokens
        if self.unified:
            yield 0, slice(0, n_rows)
            return
        n_each, rest = divmod(n_rows, ubatch.n_seqs_unq)
        if rest or not np.array_equal(ubatch.seq_id, np.repeat(ubatch.seq_id_unq, n_each)):
            raise InternalError(
                "rows for streams of their own must be grouped by sequence, each of one sequence"  # KV-4
            )
        for k, s in enumerate(ubatch.seq_id_unq.tolist()):
            yield s, slice(k * n_each, (k + 1) * n_each)

    def _place(self, ubatch: Ubatch, slot: Slot, journal: Journal) -> None:
        for part in slot.streams:
            self.streams[part.stream].place(part.cells, rows_of(ubatch, part.rows), journal)

    def _stream_of(self, s: int) -> Stream:
        return self.streams[0 if self.unified else s]


def _seen(cells: Cells, ubatch: Ubatch, rows: slice, n_kv: int, window: Window, *, causal: bool) -> Bools:
    """Where a row sees a cell: of its primary sequence, not after its position, and in its window."""
    stop = cells.used_stop
    seen = np.zeros((rows.stop - rows.start, n_kv), np.bool_)
    key, query = cells.position[:stop], ubatch.first_pos[rows, None]
    near = cells.member[ubatch.primary[rows], :stop]
    if causal:
        near &= key <= query
    if causal and cells.grid is not None and ubatch.pos.ndim == 2 and len(ubatch.pos) >= 3:
        y, x = ubatch.pos[1, rows, None], ubatch.pos[2, rows, None]
        key_y, key_x = cells.grid[:stop, 0], cells.grid[:stop, 1]
        near &= (key != query) | (key_y < y) | ((key_y == y) & (key_x <= x))
    if not window.reaches_all:
        near &= ~window.masked(key, query)
    seen[:, :stop] = near
    return seen
