"""The row buffers behind a decoder's outputs: raw logits, embeddings, and the results of backend samplers (OUT-2..6).

All rows of a reservation are slices of one block of four-byte items. Rows are only numbers here: `output.py` knows
which token a row belongs to, and when it may be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.errors import InternalError

ITEM_BYTES: Final = 4
# How "no token" is kept in the int32 column of sampled tokens (OUT-6); it never leaves this file.
_NO_TOKEN: Final = -1

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


@dataclass(frozen=True, slots=True)
class OutputSizes:
    """Items of each buffer for a number of rows; 0 for buffers that are not wanted (OUT-3)."""

    rows: int
    logits: int
    embeddings: int
    sampled_logits: int
    probs: int
    candidates: int
    sampled_tokens: int

    @staticmethod
    def of(rows: int, *, n_vocab: int, n_embd: int, sampling: bool) -> OutputSizes:
        """`n_embd` is 0 where no embeddings are wanted."""
        vocab, sampled = rows * n_vocab, rows * n_vocab if sampling else 0
        return OutputSizes(rows, vocab, rows * n_embd, sampled, sampled, sampled, rows if sampling else 0)

    @property
    def buffers(self) -> tuple[int, ...]:
        """In their order in the block."""
        return (self.logits, self.embeddings, self.sampled_logits, self.probs, self.candidates, self.sampled_tokens)

    @property
    def n_items(self) -> int:
        return sum(self.buffers)


def swap_rows(buffer: Any, swaps: Iterable[Swap]) -> None:
    """Exchange rows of a tensor or array in place, pair after pair."""
    for i, j in swaps:
        buffer[[i, j]] = buffer[[j, i]]


class Filled:
    """Rows [rows, width], each marked once it was written; unmarked rows hold data of an earlier batch."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.written: NDArray[np.bool_] = np.zeros(len(values), np.bool_)

    def write(self, first: int, rows: Tensor) -> None:
        """Copy rows [n, width], of any dtype and device, to the rows from `first` on."""
        # Checked here because copy_ would silently broadcast a narrow row over the whole width.
        if first < 0 or first + len(rows) > len(self.values) or rows.shape[1:] != self.values.shape[1:]:
            raise InternalError(
                f"rows {list(rows.shape)} written from row {first} on; reserved: {list(self.values.shape)} (G-5)"
            )
        self.values[first : first + len(rows)].copy_(rows)
        self.written[first : first + len(rows)] = True

    def swap(self, swaps: Iterable[Swap]) -> None:
        swap_rows(self.values, swaps)
        swap_rows(self.written, swaps)

    def row(self, row: int) -> Tensor | None:
        return self.values[row] if self.written[row] else None


class Kept:
    """Rows [rows, n_vocab] of which a sampler fills a part; the count says how much."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.counts = np.zeros(len(values), np.int64)

    def write(self, row: int, values: Tensor | None) -> None:
        """Copy values [k] to the row; None leaves its count at 0."""
        if values is None:
            return
        if len(values) > self.values.shape[1]:
            raise InternalError(f"row {row}: {len(values)} sampled values for {self.values.shape[1]} tokens (SR-6)")
        self.values[row, : len(values)].copy_(values)
        self.counts[row] = len(values)

    def swap(self, swaps: Iterable[Swap]) -> None:
        swap_rows(self.values, swaps)
        swap_rows(self.counts, swaps)

    def count(self, row: int) -> int:
        return int(self.counts[row])

    def row(self, row: int) -> Tensor | None:
        count = self.count(row)
        return self.values[row, :count] if count else None


class SampledRows:
    """Results of samplers; these buffers exist only while there is a sampler (OUT-3)."""

    def __init__(self, logits: Tensor, probs: Tensor, candidates: Tensor, tokens: Tensor) -> None:
        self.logits = Kept(logits)
        self.probs = Kept(probs)
        self.candidates = Kept(candidates.view(torch.int32))
        self._tokens = tokens.view(torch.int32)
        self._tokens.fill_(_NO_TOKEN)

    def write(self, row: int, sampled: Sampled) -> None:
        if not 0 <= row < len(self._tokens):
            raise InternalError(f"sampled data for row {row} of {len(self._tokens)} (G-5)")
        if sampled.token is not None:
            self._tokens[row] = sampled.token
        self.logits.write(row, sampled.logits)
        self.probs.write(row, sampled.probs)
        self.candidates.write(row, sampled.candidates)

    def swap(self, swaps: Iterable[Swap]) -> None:
        swap_rows(self._tokens, swaps)
        for kept in (self.logits, self.probs, self.candidates):
            kept.swap(swaps)

    def token(self, row: int) -> int | None:
        token = int(self._tokens[row])
        return None if token == _NO_TOKEN else token

    def counts(self, row: int) -> Counts:
        return Counts(self.logits.count(row), self.probs.count(row), self.candidates.count(row))


class OutputRows:
    """The rows of one reservation."""

    def __init__(self, items: Tensor, sizes: OutputSizes) -> None:
        """Slice the first items of the block into buffers; old contents stay, and are never read (OUT-4)."""
        parts = list(torch.split(items[: sizes.n_items], list(sizes.buffers)))
        logits, embeddings, kept, probs, candidates = (
            part.view(sizes.rows, -1) if len(part) else part for part in parts[:5]
        )
        self.n_rows = sizes.rows
        self.logits = Filled(logits)
        self.embeddings = Filled(embeddings) if len(embeddings) else None
        self.sampled = SampledRows(kept, probs, candidates, parts[5]) if sizes.sampled_tokens else None

    def swap(self, swaps: Iterable[Swap]) -> None:
        """Exchange rows in every buffer (OUT-12)."""
        for rows in (self.logits, self.embeddings, self.sampled):
            if rows is not None:
                rows.swap(swaps)
