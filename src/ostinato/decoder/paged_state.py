"""One sequence of the paged memory kind as a saved state: the same parts and bytes as the cell kinds have.

In between, the sequence is held in host memory. `PagedState` copies it out of pages and into them as work beside the
loop; `cache/state_file.py` writes and checks the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ostinato.backends.base import PageTables, SequenceCopy
from ostinato.cache import state_file
from ostinato.cache.sequences import Ints
from ostinato.cache.state_block import DAMAGED, CellRows, Form, StateBlock, StateSelection, check_finite
from ostinato.cache.window import Window
from ostinato.decoder.sizes import layers_of, window_of
from ostinato.errors import BadFile
from ostinato.files.unpack import Bytes
from ostinato.models.shape import Shape

SEQUENCE: Final = 0
EVERYTHING: Final = Window()


@dataclass(slots=True, eq=False)
class HostPart:
    """A part of one sequence in the host's memory; mutable, because it is read or loaded."""

    form: Form
    layout: dict[str, Any]
    layers: Sequence[int] = ()
    window: Window = EVERYTHING
    positions: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # of the rows, ascending
    tensors: list[Bytes] = field(default_factory=list)  # each [positions, bytes of a cell]

    n_streams = 1

    @property
    def forgets_nothing(self) -> bool:
        return self.window.reaches_all and self.layout["part"] == "attention"

    def span(self, n: int) -> range:
        """The positions to save of a sequence of n positions."""
        if self.layout["part"] == "recurrent":
            return range(n - 1, n)
        seen = ~self.window.masked(np.arange(n), np.array(n - 1))
        return range(int(seen.argmax()), n)

    def check_ready(self, s: int | None) -> None:
        """Nothing to check: there is one sequence, and nothing is ever pending."""

    def choose(self, s: int | None) -> list[StateSelection]:
        n = len(self.positions)
        rows = CellRows(self.positions, None, np.ones(n, np.int64), np.zeros(n, np.int64))
        return [StateSelection(rows, self.tensors)]

    def check(self, s: int | None, number: int, block: StateBlock) -> None:
        positions = np.sort(block.rows.position)
        if (block.rows.n_ids != 1).any() or (np.diff(positions) != 1).any():
            raise BadFile(f"the saved state is not of one sequence without gaps; {DAMAGED}")
        check_finite(block, self.form)

    def empty(self, s: int | None) -> None:
        self.positions, self.tensors = np.empty(0, np.int64), []

    def load(self, s: int | None, blocks: Sequence[StateBlock]) -> None:
        (block,) = blocks
        order = np.argsort(block.rows.position)
        self.positions = block.rows.position[order]
        self.tensors = [data.reshape(len(order), -1)[order] for data in block.data]

    def end_at(self, s: int, last: int) -> None:
        raise BadFile("this is a partial state, and no sequence is in memory that it could be a part of")  # ST-12


class PagedState:
    """A sequence between pages and bytes. Made for one save or one load."""

    def __init__(self, shape: Shape, copy: SequenceCopy, context: int, rope_set: int = 0) -> None:
        self._copy, self._rope_set = copy, rope_set if shape.n_rope_sets > 1 else None
        kv: list[HostPart] = []
        if shape.attention:
            window = window_of(shape)
            kv.append(self._attention(layers_of(shape, windowed=False), EVERYTHING, context))
            if window is not None:
                kv.append(self._attention(layers_of(shape, windowed=True), Window("standard", window), context))
        self._kv = tuple(kv)
        self._states = None
        if shape.recurrent:
            form = Form(1, False, copy.state_cells())
            self._states = HostPart(form, state_file.recurrent_layout(list(shape.recurrent), form))
        self._parts = state_file.StateParts(shape.family, self._kv, self._states)

    @property
    def largest(self) -> int:
        """An upper bound for the bytes of a state that can be loaded."""
        return state_file.largest(self._parts)

    # Beside the loop

    def read(self, pages: PageTables, slot: int | None, n: int) -> None:
        """Copy the first n positions out of their pages, and the state out of its slot."""
        for part in self._kv:
            span = part.span(n)
            part.positions, part.tensors = np.array(span), self._copy.read_kv(part.layers, pages, span)
        if self._states is not None and slot is not None:
            self._states.positions, self._states.tensors = np.array(self._states.span(n)), self._copy.read_states(slot)

    def write(self, pages: PageTables, slot: int | None) -> None:
        """Copy the loaded sequence into pages, and its state into the slot."""
        for part in self._kv:
            span = range(int(part.positions[0]), int(part.positions[-1]) + 1)
            self._copy.write_kv(part.layers, pages, span, part.tensors)
        if self._states is not None and slot is not None:
            self._copy.write_states(slot, self._states.tensors)

    # Bytes

    def save(self, note: Mapping[str, Any]) -> bytes:
        """The sequence that was read, as bytes, with a note."""
        return state_file.save(self._parts, SEQUENCE, note=note)

    def load(self, data: bytes, n: int) -> None:
        """Load the bytes of a sequence of n positions; BadFile where they are of another sequence, or damaged."""
        state_file.load(self._parts, SEQUENCE, data)
        for part in (*self._kv, *(() if self._states is None else (self._states,))):
            if not n or not len(part.positions) or range(part.positions[0], part.positions[-1] + 1) != part.span(n):
                raise BadFile(f"the saved state does not have the {n} positions of its note; save it again")
            part.tensors = [self._copy.staged(rows) for rows in part.tensors]

    def _attention(self, layers: Sequence[int], window: Window, context: int) -> HostPart:
        form = Form(context, False, self._copy.kv_cells(layers))
        layout = state_file.attention_layout(layers, window, form, rope_set=self._rope_set)
        return HostPart(form, layout, layers, window)
