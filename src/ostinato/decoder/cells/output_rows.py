"""The row buffers behind a decoder's outputs: raw logits, embeddings, and the results of backend samplers (OUT-2..6).

All rows of a reservation are slices of one block of four-byte items. Rows are only numbers here: `output.py` knows
which token a row belongs to, and when it may be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.errors import InternalError

ITEM_BYTES: Final = 4
_INTEGERS: Final = ("candidates", "sampled_tokens")

Swap = tuple[int, int]


class Counts(NamedTuple):
    """How many sampled logits, probabilities and candidates a row has."""

    logits: int
    probs: int
    candidates: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """A backend sampler's results for one row; None where it has none. Tensors are [k], k at most `n_vocab`."""

    token: int | None = None
    logits: Tensor | None = None
    probs: Tensor | None = None
    candidates: Tensor | None = None


class FilledRows:
    """Rows [rows, width], each filled as far as its count says; beyond it there is data of an earlier batch."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.counts = np.zeros(len(values), np.int64)

    def write(self, first: int, rows: Tensor, *, partly: bool = False) -> None:
        """Copy rows [n, k], of any dtype and device, to the rows from `first` on; k is the width, unless `partly`."""
        n, k = rows.shape
        # Checked here because copy_ would silently broadcast a narrow row over the whole width.
        if first < 0 or first + n > len(self.values) or not (k == self.width or (partly and k < self.width)):
            raise InternalError(
                f"rows {list(rows.shape)} written from row {first} on; reserved: {list(self.values.shape)}"  # G-5, SR-6
            )
        self.values[first : first + n, :k].copy_(rows)
        self.counts[first : first + n] = k

    def swap(self, swaps: Iterable[Swap]) -> None:
        """Exchange rows in place, pair after pair (OUT-12)."""
        for i, j in swaps:
            self.values[[i, j]] = self.values[[j, i]]
            self.counts[[i, j]] = self.counts[[j, i]]

    @property
    def width(self) -> int:
        """0 where the rows were not asked for."""
        return self.values.shape[1]

    def row(self, row: int) -> Tensor | None:
        count = int(self.counts[row])
        return self.values[row, :count] if count else None


def row_widths(*, n_vocab: int, n_embd: int, sampling: bool) -> dict[str, int]:
    """Items that a row has in each buffer, in their order in the block; 0 in those that are not wanted (OUT-3)."""
    sampled = n_vocab if sampling else 0
    raw = {"logits": n_vocab, "embeddings": n_embd}
    return {**raw, "sampled_logits": sampled, "probs": sampled, "candidates": sampled, "sampled_tokens": int(sampling)}


def rows_over(items: Tensor, n_rows: int, widths: Mapping[str, int]) -> dict[str, FilledRows]:
    """The first items of a block as buffers of n_rows rows; old contents stay, and are never read (OUT-4)."""
    sizes = [n_rows * width for width in widths.values()]
    parts = zip(widths.items(), torch.split(items[: sum(sizes)], sizes), strict=True)
    return {
        name: FilledRows(part.view(torch.int32 if name in _INTEGERS else torch.float32).view(n_rows, width))
        for (name, width), part in parts
    }
