"""The parts of memory for saved states: which cells are saved, and where they are loaded.

Attention and recurrent states implement the same interface (`StatePart`). A part knows nothing of the others;
`state_file.py` calls them in order and handles failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.torch.kv_store import KVStore, StateStore
from ostinato.cache.sequences import MAX_SEQ, Ints
from ostinato.cache.state_run import StateRun, StateSource
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.recurrent import RecurrentMemory
from ostinato.decoder.cells.memory.slots import CellRows
from ostinato.decoder.cells.memory.state_block import DAMAGED, Form, StateBlock, StateSelection, all_finite, tensor_of
from ostinato.errors import BadFile, InternalError, NoSlot


class StatePart(Protocol):
    """A part of memory. `s` is a sequence, or None for everything that the part holds."""

    @property
    def n_streams(self) -> int: ...

    @property
    def form(self) -> Form: ...

    @property
    def layout(self) -> dict[str, Any]:
        """The properties, as JSON, that a part must have to load the bytes of this one."""

    def check_id(self, s: int) -> None:
        """InvalidBatch for a sequence id that is out of range."""

    def check_flushed(self) -> None:
        """InternalError while copies or shifts are pending (ST-10)."""

    def choose(self, s: int | None) -> list[StateSelection]:
        """The cells to save: for each stream, or for the stream of the sequence."""

    def check(self, s: int | None, number: int, block: StateBlock) -> None:
        """BadFile for a block, of this stream, that the part cannot load."""

    def empty(self, s: int | None) -> None:
        """Remove the sequence, or everything."""

    def load(self, s: int | None, blocks: Sequence[StateBlock]) -> None:
        """Load checked blocks; what they replace has been removed."""


class AttentionPart(StatePart, Protocol):
    """A part with keys and values."""

    @property
    def forgets_nothing(self) -> bool:
        """Whether partial states leave it out: it keeps all positions while other parts drop old ones (ST-12)."""

    def end_at(self, s: int, last: int) -> None:
        """Remove positions after the end of a partial state; BadFile where the part does not reach that far."""


@dataclass(frozen=True, slots=True)
class SavedKV:
    """A KV cache and its tensors."""

    cache: KVCache
    store: KVStore

    @property
    def n_streams(self) -> int:
        return len(self.cache.streams)

    @property
    def form(self) -> Form:
        grid = self.cache.streams[0].cells.grid is not None
        return Form(self.cache.size, grid, tuple(tensor[0] for tensor in self._tensors(0)))

    @property
    def layout(self) -> dict[str, Any]:
        window, form = self.cache.window, self.form
        return {
            "part": "attention",
            "window": f"{window.kind} {window.size}",
            "grid": form.grid,
            "layers": list(self.store.keys),
            "tensors": form.tensors,
        }

    @property
    def forgets_nothing(self) -> bool:
        """Whether partial states leave it out: it keeps all positions while other parts drop old ones (ST-12)."""
        return self.cache.window.reaches_all

    def check_id(self, s: int) -> None:
        self.cache.check_rm(s)

    def check_flushed(self) -> None:
        if self.cache.pending_copies or self.cache.has_shift:
            raise InternalError("copies or shifts are pending: carry them out before saving or loading (ST-10)")

    def choose(self, s: int | None) -> list[StateSelection]:
        if s is None:
            return [self._choose_stream(number) for number in range(self.n_streams)]
        cells = self.cache.saved_cells(s)
        return [self._chosen(self._stream(s), cells, np.ones_like(cells), np.full(len(cells), s))]

    def check(self, s: int | None, number: int, block: StateBlock) -> None:
        rows = block.rows
        if s is None and not self.cache.unified and (rows.ids != number).any():
            raise BadFile(f"the saved state has another sequence in the stream of sequence {number}; {DAMAGED}")
        if s is not None and (rows.n_ids != 1).any():
            raise BadFile(f"the saved state of one sequence has several; {DAMAGED}")
        # Attention multiplies cells that a row must not see by zero. Zero times infinity is NaN, so infinities of one
        # sequence would reach all others of its stream.
        if not all(all_finite(data, cell) for data, cell in zip(block.data, self.form.cells, strict=True)):
            raise BadFile("the saved state has keys or values that are no numbers; nothing can go on from it")

    def empty(self, s: int | None) -> None:
        if s is None:
            self.cache.clear()
        else:
            self.cache.seq_rm(s)

    def load(self, s: int | None, blocks: Sequence[StateBlock]) -> None:
        if s is None:
            for number, block in enumerate(blocks):
                self.cache.load_stream(number, block.rows)
                self._fill(number, np.arange(block.n_cells), block)
            return
        (block,) = blocks
        cells = self.cache.load_sequence(s, block.rows.position, block.rows.grid)
        if cells is None:
            raise NoSlot(
                f"sequence {s} was not loaded and is empty now: it needs {block.n_cells} cells, and fewer of the "
                f"{self.cache.size} are free; remove another sequence first (ST-5)",
                reason="no_room",
            )
        self._fill(self._stream(s), cells, block)

    def end_at(self, s: int, last: int) -> None:
        """Remove positions after the end of a partial state; BadFile where the part does not reach that far."""
        mine = self.cache.pos_max(s)
        if mine is None or mine < last:
            raise BadFile(
                f"the partial state ends at position {last}, and of sequence {s} the part that it left out ends at "
                f"{mine}; load a full state, or run the tokens again (ST-12)"
            )
        self.cache.seq_rm(s, last + 1)

    def _choose_stream(self, number: int) -> StateSelection:
        table = self.cache.streams[number].cells
        used = np.flatnonzero(table.position >= 0)
        # All ids that a cell can have: n_seq_max does not limit ids where sequences share a stream (ST-9).
        present = np.array([s for s in range(MAX_SEQ) if table.pos_max(s) is not None], np.int64)
        place, who = np.nonzero(table.member[np.ix_(present, used)].T)
        return self._chosen(number, used, np.bincount(place, minlength=len(used)), present[who])

    def _chosen(self, number: int, cells: Ints, n_ids: Ints, ids: Ints) -> StateSelection:
        table = self.cache.streams[number].cells
        rows = CellRows(table.position[cells], None if table.grid is None else table.grid[cells], n_ids, ids)
        return StateSelection(rows, self._tensors(number), (torch.from_numpy(cells),))

    def _fill(self, number: int, cells: Ints, block: StateBlock) -> None:
        if not len(cells):
            return
        at = torch.from_numpy(cells)
        for tensor, data in zip(self._tensors(number), block.data, strict=True):
            tensor[at] = tensor_of(data, tensor[0])

    def _tensors(self, number: int) -> list[Tensor]:
        """Each [cells, ...]: keys of every layer, then values of every layer (ST-2)."""
        return [part[number] for half in self.store.halves for part in half.parts]

    def _stream(self, s: int) -> int:
        return 0 if self.cache.unified else s


@dataclass(frozen=True, slots=True)
class SavedStates:
    """Recurrent memory and its tensors: of every cell, only the state that its next run starts from is saved."""

    memory: RecurrentMemory
    store: StateStore

    n_streams = 1

    @property
    def form(self) -> Form:
        return Form(self.memory.size, False, tuple(tensor[0, 0] for tensor in self._tensors))

    @property
    def layout(self) -> dict[str, Any]:
        return {"part": "recurrent", "layers": list(self.store.layers), "tensors": self.form.tensors}

    def check_id(self, s: int) -> None:
        self.memory.check_rm(s)

    def check_flushed(self) -> None:
        """Nothing is ever pending (RM-18)."""

    def choose(self, s: int | None) -> list[StateSelection]:
        state = self.memory.state
        cells = range(self.memory.size) if s is None else [cell for cell in [state.tail[s]] if cell is not None]
        used = [cell for cell in cells if state.ids[cell]]
        owners = [sorted(state.ids[cell]) if s is None else [s] for cell in used]
        # Owners of one cell have the same roll back pending. It selects the plane that is saved (ST-11).
        at = np.array([self._source(ids[0]) for ids in owners], np.int64).reshape(-1, 2)
        rows = CellRows(
            np.array([state.position_of(cell) for cell in used], np.int64),
            None,
            np.array([len(ids) for ids in owners], np.int64),
            np.array([owner for ids in owners for owner in ids], np.int64),
        )
        return [StateSelection(rows, self._tensors, (torch.from_numpy(at[:, 0]), torch.from_numpy(at[:, 1])))]

    def check(self, s: int | None, number: int, block: StateBlock) -> None:
        ids = block.rows.ids
        if s is not None and len(ids) > 1:
            raise BadFile(f"the saved state of one sequence has {len(ids)}; {DAMAGED}")
        if s is None and len(ids) and int(ids.max()) >= self.memory.size:
            raise BadFile(
                f"the saved state has sequence {ids.max()}, and this memory only 0 to {self.memory.size - 1}; load it "
                "where as many sequences are allowed as where it was saved"
            )
        if len(np.unique(ids)) != len(ids):
            raise BadFile(f"the saved state has two recurrent states of one sequence; {DAMAGED}")

    def empty(self, s: int | None) -> None:
        if s is None:
            self.memory.clear()
        else:
            self.memory.seq_rm(s)

    def load(self, s: int | None, blocks: Sequence[StateBlock]) -> None:
        (block,) = blocks
        if not block.n_cells:
            return
        owners = np.split(block.rows.ids, np.cumsum(block.rows.n_ids)[:-1]) if s is None else [np.array([s])]
        positions = block.rows.position.tolist()
        runs = [self.memory.load(frozenset(ids.tolist()), p) for ids, p in zip(owners, positions, strict=True)]
        data = iter(block.data)
        new = {
            layer: tuple(tensor_of(next(data), state[0, 0]).unsqueeze(1) for state in states)
            for layer, states in self.store.layers.items()
        }
        self.store.commit(_together(runs), new)

    def _source(self, s: int) -> StateSource:
        source = self.memory.source_of(s)
        if source is None:
            raise InternalError(f"sequence {s} has a recurrent cell and no state (RM-2)")
        return source

    @property
    def _tensors(self) -> list[Tensor]:
        """Each [cells, planes, ...]."""
        return [state for states in self.store.layers.values() for state in states]


def _together(runs: Sequence[StateRun]) -> StateRun:
    """One run that writes what these runs write, in their order. Moves are allowed only if there is a single run."""
    if len(runs) == 1:
        return runs[0]
    if [run.head for run in runs] != list(range(len(runs))) or any(run.moves for run in runs):
        raise InternalError("the states of a whole memory go to its first cells, and it was not empty (ST-7)")
    return StateRun(0, len(runs), (None,) * len(runs), ())
