"""Copies a sequence's keys and values between the native loop's pages and a saved state, in position order.

Within a page the native loop keeps keys by number and values by position (`src/attention.h`); a saved state has both
position by position, as every other backend does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.native.pages import PAGE_TOKENS, NativePages
from ostinato.backends.torch.sequence_copy import PageTables


class NativeSequenceCopy:
    """`SequenceCopy` over native pages, which are the host's own memory."""

    def __init__(self, pages: NativePages) -> None:
        self._pages = pages

    def read_kv(self, layers: Sequence[int], pages: PageTables, positions: range) -> list[Tensor]:
        """Keys of these layers, then values, each [positions, heads, ...]; scales follow where there are some."""
        return [view[index] for view, index in self._places(layers, pages, positions)]

    def write_kv(self, layers: Sequence[int], pages: PageTables, positions: range, tensors: Sequence[Tensor]) -> None:
        """Write what `read_kv` returned."""
        for (view, index), rows in zip(self._places(layers, pages, positions), tensors, strict=True):
            view[index] = rows

    def read_states(self, slot: int) -> list[Tensor]:
        """Recurrent families do not run in the native loop."""
        return []

    def write_states(self, slot: int, tensors: Sequence[Tensor]) -> None:
        """Nothing to write, since `read_states` returns nothing."""

    def kv_cells(self, layers: Sequence[int]) -> tuple[Tensor, ...]:
        """One cell of each tensor of `read_kv`, as an example."""
        return tuple(view[0, :, :, 0] if is_key else view[0, :, 0] for _, view, is_key in self._views(layers))

    def state_cells(self) -> tuple[Tensor, ...]:
        """The same for `read_states`."""
        return ()

    def _views(self, layers: Sequence[int]) -> Iterator[tuple[int, Tensor, bool]]:
        """Each layer with its keys, then each with its values, with the scales behind them; whether it is keys."""
        for is_key in (True, False):
            for number in layers:
                layer = self._pages.layers[number]
                both = (layer.keys, layer.key_scales) if is_key else (layer.values, layer.value_scales)
                for array in both if both[1].size else both[:1]:
                    yield number, _tensor_over(array), is_key

    def _places(
        self, layers: Sequence[int], pages: PageTables, positions: range
    ) -> Iterator[tuple[Tensor, tuple[Tensor | slice, ...]]]:
        at, whole = torch.arange(positions.start, positions.stop), slice(None)
        token = at % PAGE_TOKENS
        for layer, view, is_key in self._views(layers):
            page = torch.tensor(pages[self._pages.group_of[layer]], dtype=torch.int64)[at // PAGE_TOKENS]
            yield view, ((page, whole, whole, token) if is_key else (page, whole, token))


def _tensor_over(array: np.ndarray) -> Tensor:
    """The same memory as a tensor; bfloat16 is kept as its bits."""
    return (
        torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == np.uint16
        else torch.from_numpy(array)
    )
