"""Attention windows: the positions that a query no longer sees, and the size of a windowed cache (SW-1, SW-2, SW-5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ostinato.cache.sequences import Ints
from ostinato.errors import InternalError

WindowKind = Literal["none", "standard", "chunked", "symmetric"]

# Cache sizes, and the number of cells that attention reads, are multiples of this (C-3, KV-13, SW-5).
CELL_STEP: Final = 256


def round_up(n: int, step: int) -> int:
    """The least multiple of step that is not below n."""
    return -(-n // step) * step


@dataclass(frozen=True, slots=True)
class Window:
    """How far attention reaches: `size` positions, counted as `kind` says; "none" reaches all positions."""

    kind: WindowKind = "none"
    size: int = 0

    def __post_init__(self) -> None:
        if self.kind != "none" and self.size < 1:
            raise InternalError(f"a {self.kind} window must hold at least one position, not {self.size}")  # SW-1

    @property
    def reaches_all(self) -> bool:
        return self.kind == "none"

    def masked(self, key: Ints, query: Ints) -> NDArray[np.bool_]:
        """True where a key position is outside the window of a query position; the two broadcast (SW-2)."""
        out: NDArray[np.bool_]
        if self.kind == "standard":
            out = query - key >= self.size
        elif self.kind == "chunked":
            out = key < query // self.size * self.size
        elif self.kind == "symmetric":
            out = np.abs(query - key) > self.size // 2
        else:
            out = np.zeros(np.broadcast_shapes(key.shape, query.shape), np.bool_)
        return out


def windowed_size(
    base: int, window_size: int, *, n_seq_max: int, unified: bool, n_ubatch: int, full: bool = False
) -> int:
    """Cells of the windowed cache that goes with a full cache of `base` cells: the windows and one ubatch (SW-5).

    `full` makes it as large as the full cache, so that positions can be shifted (HY-7).
    """
    if full:
        return base
    n_windows = n_seq_max if unified else 1
    return round_up(min(base, window_size * n_windows + n_ubatch), CELL_STEP)
