"""A sequence's keys, values and states between torch's paged memory and the host, in the order of positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ostinato.backends.base import PageTables
from ostinato.backends.torch.kv_store import AnyValues
from ostinato.backends.torch.paged import PagedMemory
from ostinato.cache.state_block import CellForm
from ostinato.files.unpack import Bytes


class TorchSequenceCopy:
    """`SequenceCopy` over paged memory; to and from a GPU by pinned memory, without waiting."""

    def __init__(self, memory: PagedMemory) -> None:
        self._memory = memory

    def kv_cells(self, layers: Sequence[int]) -> tuple[CellForm, ...]:
        return tuple(cell_form(part[0, 0]) for _, half in self._halves(layers) for part in half.parts)

    def state_cells(self) -> tuple[CellForm, ...]:
        return tuple(cell_form(state[0, 0]) for state in self._states())

    def read_kv(self, layers: Sequence[int], pages: PageTables, positions: range) -> list[Bytes]:
        return [_to_host(view[index]) for view, index in self._places(layers, pages, positions)]

    def write_kv(self, layers: Sequence[int], pages: PageTables, positions: range, rows: Sequence[Bytes]) -> None:
        for (view, index), some in zip(self._places(layers, pages, positions), rows, strict=True):
            view[index] = _to_device(some, view[0, 0])

    def read_states(self, slot: int) -> list[Bytes]:
        return [_to_host(state[slot, :1]) for state in self._states()]

    def write_states(self, slot: int, rows: Sequence[Bytes]) -> None:
        for state, some in zip(self._states(), rows, strict=True):
            state[slot, :1] = _to_device(some, state[0, 0])

    def staged(self, rows: Bytes) -> Bytes:
        return torch.from_numpy(rows).pin_memory().numpy() if self._is_on_gpu else rows

    @property
    def _is_on_gpu(self) -> bool:
        halves = [] if self._memory.kv is None else [half.values for half in self._memory.kv.halves]
        return any(tensor.is_cuda for tensor in (*halves, *self._states()))

    def _states(self) -> list[Tensor]:
        states = self._memory.states
        return [] if states is None else [state for of_layer in states.layers.values() for state in of_layer]

    def _halves(self, layers: Sequence[int]) -> list[tuple[int, AnyValues]]:
        """Each layer with its keys, then each with its values."""
        kv = self._memory.kv
        return [] if kv is None else [(layer, half[layer]) for half in (kv.keys, kv.values) for layer in layers]

    def _places(
        self, layers: Sequence[int], pages: PageTables, positions: range
    ) -> Iterator[tuple[Tensor, tuple[Tensor | slice, ...]]]:
        """Each tensor as its pages lie, and the index of these positions in it."""
        size = self._memory.page_tokens
        for layer, half in self._halves(layers):
            table = pages[self._memory.group_of[layer]]
            for part in half.parts:
                at = torch.arange(positions.start, positions.stop, device=part.device)
                page, token = _sent(table, part.device)[at // size], at % size
                yield part[0].view(-1, size, *part.shape[2:]), (page, token)


def _sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    tensor = torch.tensor(numbers, dtype=torch.int64)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def cell_form(cell: Tensor) -> CellForm:
    """The form of cells like this one."""
    return CellForm(str(cell.dtype).removeprefix("torch."), tuple(cell.shape))


def _to_host(rows: Tensor) -> Bytes:
    """Rows [n, ...] as bytes [n, bytes of a row]."""
    kept = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
    kept.copy_(rows, non_blocking=True)
    return kept.view(len(rows), -1).view(torch.uint8).numpy()


def _to_device(rows: Bytes, cell: Tensor) -> Tensor:
    """The same rows as a tensor, where a cell like this one lies."""
    tensor = torch.from_numpy(rows).view(cell.dtype).view(-1, *cell.shape)
    return tensor.to(cell.device, non_blocking=True)
