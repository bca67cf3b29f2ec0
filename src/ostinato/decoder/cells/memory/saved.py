"""The parts of cell memory for saved states: which cells are saved, and where they are loaded.

A part knows nothing of the others; `cache/state_file.py` calls them in order and handles failures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.torch.kv_store import KVStore, StateStore
from ostinato.backends.torch.sequence_copy import cell_form
from ostinato.cache.sequences import MAX_SEQ, Ints
from ostinato.cache.state_block import DAMAGED, CellRows, Form, StateBlock, StateSelection, check_finite
from ostinato.cache.state_file import attention_layout, recurrent_layout
from ostinato.cache.state_run import StateRun, StateSource
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.recurrent import RecurrentMemory
from ostinato.errors import BadFile, InternalError, NoSlot
from ostinato.files.unpack import Bytes


@dataclass(frozen=True, slots=True)
class SavedKV:
    """A KV cache and its tensors."""

    cache: KVCache
    store: KVStore
    rope_set: int | None = None  # of a model that has several

    @property
    def n_streams(self) -> int:
        return len(self.cache.streams)

    @property
    def form(self) -> Form:
        grid = self.cache.streams[0].cells.grid is not None
        return Form(self.cache.size, grid, tuple(cell_form(tensor[0]) for tensor in self._tensors(0)))

    @property
    def layout(self) -> dict[str, Any]:
        return attention_layout(self.store.keys, self.cache.window, self.form, rope_set=self.rope_set)

    @property
    def forgets_nothing(self) -> bool:
        """Whether partial states leave it out: it keeps all positions while other parts drop old ones (ST-12)."""
        return self.cache.window.reaches_all

    def check_ready(self, s: int | None) -> None:
        if self.cache.pending_copies or self.cache.has_shift:
            raise InternalError("copies or shifts are pending: carry them out before saving or loading")  # ST-10
        if s is not None:
            self.cache.check_id(s)

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
        check_finite(block, self.form)

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
                f"{self.cache.size} are free; remove another sequence first",  # ST-5
                reason="no_room",
            )
        self._fill(self._stream(s), cells, block)

    def end_at(self, s: int, last: int) -> None:
        """Remove positions after the end of a partial state; BadFile where the part does not reach that far."""
        mine = self.cache.pos_max(s)
        if mine is None or mine < last:
            raise BadFile(
                f"the partial state ends at position {last}, and of sequence {s} the part that it left out ends at "
                f"{mine}; load a full state, or run the tokens again"  # ST-12
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
        return StateSelection(rows, _bytes(self._tensors(number), (torch.from_numpy(cells),)))

    def _fill(self, number: int, cells: Ints, block: StateBlock) -> None:
        if not len(cells):
            return
        at = torch.from_numpy(cells)
        for tensor, data in zip(self._tensors(number), block.data, strict=True):
            tensor[at] = _tensor_of(data, tensor[0])

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
        return Form(self.memory.size, False, tuple(cell_form(tensor[0, 0]) for tensor in self._tensors))

    @property
    def layout(self) -> dict[str, Any]:
        return recurrent_layout(self.store.layers, self.form)

    def check_ready(self, s: int | None) -> None:  # nothing is ever pending (RM-18)
        if s is not None:
            self.memory.check_id(s)

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
        index = torch.from_numpy(at[:, 0]), torch.from_numpy(at[:, 1])
        return [StateSelection(rows, _bytes(self._tensors, index))]

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
            layer: tuple(_tensor_of(next(data), state[0, 0]).unsqueeze(1) for state in states)
            for layer, states in self.store.layers.items()
        }
        self.store.commit(_together(runs), new)

    def _source(self, s: int) -> StateSource:
        source = self.memory.source_of(s)
        if source is None:
            raise InternalError(f"sequence {s} has a recurrent cell and no state")  # RM-2
        return source

    @property
    def _tensors(self) -> list[Tensor]:
        """Each [cells, planes, ...]."""
        return [state for states in self.store.layers.values() for state in states]


def _bytes(tensors: Sequence[Tensor], index: tuple[Tensor, ...]) -> Iterator[Bytes]:
    """The rows at an index of each tensor."""
    for tensor in tensors:
        yield tensor[index].reshape(-1).view(torch.uint8).cpu().numpy()


def _tensor_of(data: Bytes, cell: Tensor) -> Tensor:
    """Rows [n, ...] from their bytes, with the example cell's shape, dtype and device; a copy."""
    return torch.from_numpy(data.copy()).view(cell.dtype).reshape(-1, *cell.shape).to(cell.device)


def _together(runs: Sequence[StateRun]) -> StateRun:
    """One run that writes what these runs write, in their order. Moves are allowed only if there is a single run."""
    if len(runs) == 1:
        return runs[0]
    if [run.head for run in runs] != list(range(len(runs))) or any(run.moves for run in runs):
        raise InternalError("the states of a whole memory go to its first cells, and it was not empty")  # ST-7
    return StateRun(0, len(runs), (None,) * len(runs), ())
