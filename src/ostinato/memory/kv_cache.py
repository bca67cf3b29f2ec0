"""One sequence's cells: position p is cell p. Says what a forward's rows may look at.

Integers and masks; the tensors are `store.py`'s.
"""

import torch
from torch import Tensor

from ostinato.memory.store import KVStore


class KVCache:
    """The cells of one sequence, filled from the start; a `models.blocks.KV`."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self.length = 0
        self._masks: dict[int | None, Tensor | None] = {}

    def clear(self) -> None:
        """Forget the sequence."""
        self.length = 0
        self._masks.clear()

    def advance(self, n_rows: int) -> None:
        """The rows of the last forward are now part of the sequence."""
        self.length += n_rows
        self._masks.clear()

    def extend(self, layer: int, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Write this forward's k and v after the sequence; give the cells its rows may see, and the mask."""
        first, stop = self._visible(k.shape[0], window)
        keys, values = self._store.keys[layer], self._store.values[layer]
        keys.write(self.length, k)
        values.write(self.length, v)
        if window not in self._masks:  # the same for every layer of this forward
            self._masks[window] = self._mask(k.shape[0], window, k.device)
        return keys.read(first, stop, k.dtype), values.read(first, stop, v.dtype), self._masks[window]

    def _visible(self, n_rows: int, window: int | None) -> tuple[int, int]:
        """The cells that any of the rows sees."""
        first = 0 if window is None else max(0, self.length + 1 - window)
        return first, self.length + n_rows

    def _mask(self, n_rows: int, window: int | None, device: torch.device) -> Tensor | None:
        """True where a row sees a cell: itself and before, no further back than the window. None: all see all."""
        if n_rows == 1:
            return None
        first, stop = self._visible(n_rows, window)
        cells = torch.arange(first, stop, device=device)
        rows = torch.arange(self.length, stop, device=device).unsqueeze(-1)
        seen = cells <= rows
        return seen if window is None else seen & (rows - cells < window)
