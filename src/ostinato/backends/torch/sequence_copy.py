"""A sequence's keys, values and states between a backend's own store and the host, in the order of positions.

Run as work beside the loop: from a GPU what is read is there when that work is done, and what is written to one lies in
pinned memory until then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ostinato.backends.torch.kv_store import Half
from ostinato.backends.torch.paged import PagedMemory

PageTables = Sequence[Sequence[int]]  # of one sequence, one for each group of layers


class SequenceCopy:
    """Copies out of paged memory and into it."""

    def __init__(self, memory: PagedMemory) -> None:
        self._memory = memory

    def read_kv(self, layers: Sequence[int], pages: PageTables, positions: range) -> list[Tensor]:
        """Keys of these layers, then values, each [positions, heads, ...]; scales follow where there are some."""
        return [_to_host(view[index]) for view, index in self._places(layers, pages, positions)]

    def write_kv(self, layers: Sequence[int], pages: PageTables, positions: range, tensors: Sequence[Tensor]) -> None:
        """Put back what `read_kv` gave."""
        for (view, index), rows in zip(self._places(layers, pages, positions), tensors, strict=True):
            view[index] = rows.to(view.device, non_blocking=True)

    def read_states(self, slot: int) -> list[Tensor]:
        """The recurrent states of a slot, layer by layer, each [1, ...]."""
        return [_to_host(state[slot, :1]) for state in self._states()]

    def write_states(self, slot: int, tensors: Sequence[Tensor]) -> None:
        """Put back what `read_states` gave."""
        for state, rows in zip(self._states(), tensors, strict=True):
            state[slot, :1] = rows.to(state.device, non_blocking=True)

    def kv_cells(self, layers: Sequence[int]) -> tuple[Tensor, ...]:
        """One cell of each tensor of `read_kv`, as an example."""
        return tuple(part[0, 0] for _, half in self._halves(layers) for part in half.parts)

    def state_cells(self) -> tuple[Tensor, ...]:
        """The same of `read_states`."""
        return tuple(state[0, 0] for state in self._states())

    def _states(self) -> list[Tensor]:
        states = self._memory.states
        return [] if states is None else [state for of_layer in states.layers.values() for state in of_layer]

    def _halves(self, layers: Sequence[int]) -> list[tuple[int, Half]]:
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


def _to_host(rows: Tensor) -> Tensor:
    if rows.device.type == "cpu":
        return rows.clone()
    pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    return pinned.copy_(rows, non_blocking=True)
