"""Copies a sequence's keys and values between the native loop's pages and a saved state, in position order.

Within a page the native loop keeps keys by number and values by position (`src/attention.h`); a saved state has both
position by position, as every other backend does. A saved state of a recurrent layer likewise has the sizes that the
shape states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from ostinato.backends.base import PageTables
from ostinato.backends.native.pages import PAGE_TOKENS, NativePages
from ostinato.cache.state_block import CellForm
from ostinato.files.unpack import Bytes

_NAMES: Final = {np.dtype(np.uint16): "bfloat16"}  # which is kept as its bits


class NativeSequenceCopy:
    """`SequenceCopy` over native memory, which is the host's own. It is made before decode mode is on, whose lock
    covers the arrays of others: a copy is work of the device, beside the loop."""

    def __init__(self, pages: NativePages) -> None:
        self._pages = pages.views()

    def kv_cells(self, layers: Sequence[int]) -> tuple[CellForm, ...]:
        examples = (view[0, :, :, 0] if is_key else view[0, :, 0] for _, view, is_key in self._views(layers))
        return tuple(CellForm(_NAMES.get(cell.dtype, str(cell.dtype)), cell.shape) for cell in examples)

    def state_cells(self) -> tuple[CellForm, ...]:
        return tuple(CellForm(str(state.dtype), state.shape[1:]) for state in self._states())

    def read_kv(self, layers: Sequence[int], pages: PageTables, positions: range) -> list[Bytes]:
        n = len(positions)
        found = (view[index] for view, index in self._places(layers, pages, positions))
        return [np.ascontiguousarray(rows).view(np.uint8).reshape(n, -1) for rows in found]

    def write_kv(self, layers: Sequence[int], pages: PageTables, positions: range, rows: Sequence[Bytes]) -> None:
        for (view, index), some in zip(self._places(layers, pages, positions), rows, strict=True):
            view[index] = some.view(view.dtype).reshape(view[index].shape)

    def read_states(self, slot: int) -> list[Bytes]:
        return [np.ascontiguousarray(state[slot]).view(np.uint8).reshape(1, -1) for state in self._states()]

    def write_states(self, slot: int, rows: Sequence[Bytes]) -> None:
        for state, some in zip(self._states(), rows, strict=True):
            state[slot] = some.view(state.dtype).reshape(state.shape[1:])

    def staged(self, rows: Bytes) -> Bytes:
        return rows

    def _states(self) -> list[np.ndarray]:
        """Views of all states, [slots, ...], with the sizes that the shape states."""
        return [state.swapaxes(-1, -2) for of_layer in self._pages.states.values() for state in of_layer]

    def _views(self, layers: Sequence[int]) -> Iterator[tuple[int, np.ndarray, bool]]:
        """Each layer with its keys, then each with its values, with the scales behind them; whether it is keys."""
        for is_key in (True, False):
            for number in layers:
                layer = self._pages.layers[number]
                both = (layer.keys, layer.key_scales) if is_key else (layer.values, layer.value_scales)
                for array in both:
                    if array.size:
                        yield number, array, is_key

    def _places(
        self, layers: Sequence[int], pages: PageTables, positions: range
    ) -> Iterator[tuple[np.ndarray, tuple[Any, ...]]]:
        at, whole = np.arange(positions.start, positions.stop), slice(None)
        token = at % PAGE_TOKENS
        for layer, view, is_key in self._views(layers):
            page = np.asarray(pages[self._pages.group_of[layer]], np.int64)[at // PAGE_TOKENS]
            yield view, ((page, whole, whole, token) if is_key else (page, whole, token))
