"""The outputs of a decode: rows of logits, embeddings and sampled data, found by batch index.

Rows are filled in the order in which the ubatches ran, and put into batch order at the first read (OUT-8..12). Every
returned tensor is a read-only view into buffers owned here, valid until the next accepted decode. The buffers
themselves are in `output_rows.py`, pooled vectors in `decoder/pooling.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ostinato.decoder.cells.output_rows import ITEM_BYTES, Counts, FilledRows, Sampled, Swap, row_widths, rows_over
from ostinato.errors import AllocationFailed, InternalError

__all__ = ["Absence", "Counts", "Lookup", "Outputs", "Sampled", "resolve", "row_swaps", "zeros"]

Value = TypeVar("Value")


class Absence(StrEnum):
    """Why a lookup found nothing."""

    NEGATIVE_RANGE = "negative_range"  # counted from the end, past the first row
    RANGE = "range"  # not an index of any batch
    NOT_OUTPUT = "not_output"  # that token was not an output
    CORRUPT = "corrupt"  # a row that was never published
    NO_LOGITS = "no_logits"
    NO_EMBEDDING = "no_embedding"
    NO_SAMPLE = "no_sample"


class Lookup(NamedTuple, Generic[Value]):
    """A value, or None and the reason; a failed lookup changes nothing (OUT-19)."""

    value: Value | None
    reason: Absence | None = None


def row_swaps(out_ids: Sequence[int]) -> tuple[Swap, ...]:
    """The swaps by which selection sort would order out_ids (OUT-10), found without searching for the smallest."""
    order = list(out_ids)
    place = {index: row for row, index in enumerate(order)}
    swaps = []
    for i, smallest in enumerate(sorted(order)):
        j = place[smallest]
        if j != i:
            order[i], order[j] = smallest, order[i]
            place[order[j]] = j
            swaps.append((i, j))
    return tuple(swaps)


def resolve(index: int, ids: Sequence[int | None], n_outputs: int) -> Lookup[int]:
    """The row of a batch index, or of an output counted from the end (OUT-14)."""
    if index < 0:
        return Lookup(n_outputs + index) if n_outputs + index >= 0 else Lookup(None, Absence.NEGATIVE_RANGE)
    if index >= len(ids):
        return Lookup(None, Absence.RANGE)
    row = ids[index]
    if row is None:
        return Lookup(None, Absence.NOT_OUTPUT)
    return Lookup(row) if row < n_outputs else Lookup(None, Absence.CORRUPT)


def zeros(n_items: int) -> Tensor:
    """Zeroed float32 memory; the system allocates each page when it is first written."""
    return torch.from_numpy(np.zeros(n_items, np.float32))


class Outputs:
    """The output rows of one decoder: `reserve`, write while the ubatches run, `publish`, read.

    Memory comes from `allocate`, which returns zeroed float32 items on the CPU. `synchronize` is called before
    anything is read (D-19).
    """

    def __init__(
        self,
        *,
        n_vocab: int,
        n_embd_out: int,
        n_batch: int,
        n_seq_max: int,
        allocate: Callable[[int], Tensor] = zeros,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        self._n_vocab = n_vocab
        self._n_embd_out = n_embd_out
        self._n_batch = n_batch
        self._n_seq_max = n_seq_max
        self._allocate = allocate
        self._synchronize = synchronize
        self._items: Tensor | None = None
        self._rows: dict[str, FilledRows] | None = None
        self._swaps: tuple[Swap, ...] = ()
        self.unpublish()

    # Before the run

    def reserve(self, n_outputs: int, *, embeddings: bool, sampling: bool) -> Mapping[str, FilledRows]:
        """Reserve rows for the next batch; the outputs of the last batch are dropped (OUT-1..7, OUT-13).

        AllocationFailed when there is no memory for them; nothing can be read then.
        """
        self._rows = None
        self.unpublish()
        n_rows, n_embd = max(n_outputs, self._n_seq_max), self._n_embd_out if embeddings else 0
        widths = row_widths(n_vocab=self._n_vocab, n_embd=n_embd, sampling=sampling)
        # The first reader reorders rows, perhaps outside inference mode, so the buffers must not be inference tensors.
        with torch.inference_mode(False):
            self._rows = rows_over(self._at_least(n_rows * sum(widths.values())), n_rows, widths)
        return self._rows

    def _at_least(self, n_items: int) -> Tensor:
        """Memory for n_items: the present memory while it suffices, else as much as is needed (OUT-4)."""
        if self._items is not None and len(self._items) >= n_items:
            return self._items
        self._items = None  # released first, so that old and new memory need not fit at once
        try:
            self._items = self._allocate(n_items)
        except (MemoryError, RuntimeError) as error:  # torch's allocators raise RuntimeError
            raise AllocationFailed(
                f"no memory for the outputs of this batch: {n_items * ITEM_BYTES} bytes could not be had; "  # OUT-7
                "ask for fewer outputs at once",
                reason="outputs",
            ) from error
        return self._items

    # While the ubatches run

    def write_logits(self, first_row: int, rows: Tensor) -> None:
        """Copy raw logits [n, n_vocab], of any dtype and device, to the rows from `first_row` on."""
        self._reserved()["logits"].write(first_row, rows)

    def write_embeddings(self, first_row: int, rows: Tensor) -> None:
        """Copy embeddings [n, n_embd_out] to the rows from `first_row` on (PL-2)."""
        self._reserved()["embeddings"].write(first_row, rows)

    def write_sampled(self, row: int, sampled: Sampled) -> None:
        """Copy a sampler's results for a row; results that it did not produce keep a count of 0 (SR-6)."""
        token = None if sampled.token is None else torch.tensor([sampled.token])
        results = {"sampled_tokens": token, "sampled_logits": sampled.logits}
        for name, values in {**results, "probs": sampled.probs, "candidates": sampled.candidates}.items():
            if values is not None:
                self._reserved()[name].write(row, values[None], partly=True)

    def _reserved(self) -> dict[str, FilledRows]:
        if self._rows is None:
            raise InternalError("output rows were written, but none are reserved")  # G-5
        return self._rows

    # After the run

    def publish(self, out_ids: Sequence[int], n_outputs: int) -> None:
        """Make the rows findable: row r was filled by batch index out_ids[r] (D-17, OUT-8..10)."""
        n_rows = len(self._reserved()["logits"].counts)
        if len(out_ids) != n_outputs or n_outputs > n_rows:
            raise InternalError(f"{len(out_ids)} output ids for {n_outputs} outputs in {n_rows} rows")  # OUT-8
        batch_order = sorted(out_ids)
        if len(set(batch_order)) < n_outputs or (
            n_outputs and not 0 <= batch_order[0] <= batch_order[-1] < self._n_batch
        ):
            raise InternalError(f"output ids {list(out_ids)} repeat or leave the batch of {self._n_batch}")  # OUT-9
        self.unpublish()
        for row, index in enumerate(batch_order):
            self._ids[index] = row
        self._swaps = row_swaps(out_ids)
        self._n_outputs = n_outputs

    def unpublish(self) -> None:
        """Make all outputs unreadable: a ubatch failed (D-16), or a new reservation was made."""
        self._n_outputs = 0
        self._ids: list[int | None] = [None] * self._n_batch
        self._swaps = ()

    # Reading: state

    @property
    def n_outputs(self) -> int:
        """Rows published by the last decode."""
        return self._n_outputs

    @property
    def ids(self) -> tuple[int | None, ...]:
        """The row of every batch index, [n_batch]."""
        return tuple(self._ids)

    @property
    def swaps(self) -> tuple[Swap, ...]:
        """Row swaps that are recorded and not yet made."""
        return self._swaps

    @property
    def capacity_bytes(self) -> int:
        """Bytes held for rows."""
        return 0 if self._items is None else len(self._items) * ITEM_BYTES

    def row(self, index: int) -> Lookup[int]:
        """The row of a batch index; a negative one counts from the last output in batch order (OUT-14, OUT-15)."""
        return resolve(index, self._ids, self._n_outputs)

    # Reading: rows

    def logits(self, index: int) -> Lookup[Tensor]:
        """Sampled logits [count] where a sampler kept some, else the raw row [n_vocab] (OUT-17)."""
        sampled = self.sampled_logits(index)
        if sampled.reason is not Absence.NO_SAMPLE:
            return sampled
        return self._found(index, "logits", Absence.NO_LOGITS)

    def embedding(self, index: int) -> Lookup[Tensor]:
        """The embedding row [n_embd_out] of an output; absent with any pooling but none (OUT-18)."""
        return self._found(index, "embeddings", Absence.NO_EMBEDDING)

    def all_logits(self) -> Lookup[Tensor]:
        """Raw logits of every output in batch order [n_outputs, n_vocab]; absent unless all were extracted."""
        return self._all("logits", Absence.NO_LOGITS)

    def all_embeddings(self) -> Lookup[Tensor]:
        """Embeddings of every output in batch order [n_outputs, n_embd_out], with pooling none."""
        return self._all("embeddings", Absence.NO_EMBEDDING)

    # Reading: results of backend samplers (SR-9)

    def sampled_token(self, index: int) -> Lookup[int]:
        """The token a sampler chose."""
        token, reason = self._found(index, "sampled_tokens", Absence.NO_SAMPLE)
        return Lookup(None if token is None else int(token), reason)

    def sampled_tokens(self) -> tuple[int | None, ...]:
        """The sampled token of every output, in batch order."""
        return tuple(self.sampled_token(row - self._n_outputs).value for row in range(self._n_outputs))

    def sampled_logits(self, index: int) -> Lookup[Tensor]:
        """The logits a sampler kept, [count]."""
        return self._found(index, "sampled_logits", Absence.NO_SAMPLE)

    def sampled_probs(self, index: int) -> Lookup[Tensor]:
        """The probabilities a sampler computed, [count]."""
        return self._found(index, "probs", Absence.NO_SAMPLE)

    def candidates(self, index: int) -> Tensor:
        """The token ids that sampled logits or probabilities belong to, int32; all ids where none were kept."""
        kept = self._found(index, "candidates", Absence.NO_SAMPLE).value
        return torch.arange(self._n_vocab, dtype=torch.int32) if kept is None else kept

    def counts(self, index: int) -> Counts:
        """Lengths of the sampled data of an index; without sampling buffers logits count as `n_vocab`."""
        rows, row = self._in_order(), self.row(index).value
        if rows is None or not rows["sampled_tokens"].width:
            return Counts(self._n_vocab, 0, 0)
        names = ("sampled_logits", "probs", "candidates")
        return Counts(*(0 if row is None else int(rows[name].counts[row]) for name in names))

    # Shared by all readers

    def _found(self, index: int, name: str, absence: Absence) -> Lookup[Tensor]:
        """The row of an index in this buffer, with the rows in batch order."""
        row = self.row(index)
        if row.value is None:
            return Lookup(None, row.reason)
        rows = self._in_order()
        value = None if rows is None else rows[name].row(row.value)
        return Lookup(value, absence if value is None else None)

    def _all(self, name: str, absence: Absence) -> Lookup[Tensor]:
        rows = self._in_order()
        if rows is None or not rows[name].width or not rows[name].counts[: self._n_outputs].all():
            return Lookup(None, absence)
        return Lookup(rows[name].values[: self._n_outputs])

    def reorder(self) -> None:
        """Make the recorded row swaps now, instead of at the first read (OUT-12)."""
        self._in_order()

    def _in_order(self) -> dict[str, FilledRows] | None:
        """The rows, after the recorded swaps were made in every buffer (OUT-12)."""
        self._synchronize()
        for rows in (self._rows or {}).values() if self._swaps else ():
            rows.swap(self._swaps)
        self._swaps = ()
        return self._rows
