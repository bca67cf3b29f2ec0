"""The cells of one stream as bytes: a block of a saved state.

First what the cells hold, as int64: positions, then y and x where the model has them, then the number of ids of each
cell, then the ids. After that their rows of one tensor after the other, raw, in the order of the cells. A memory kind
chooses the cells and loads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ostinato.cache.sequences import MAX_SEQ, Ints
from ostinato.cache.state_bytes import StreamCounts
from ostinato.errors import BadFile
from ostinato.files.unpack import Bytes

MAX_POSITION: Final = 1 << 62
DAMAGED: Final = "the state is damaged: save it again"

_INT_BYTES: Final = 8
_CHECKED_WORDS: Final = 1 << 22
# The exponent bits of a float; with all of them set the float is infinite or NaN.
_EXPONENTS: Final[Mapping[str, tuple[type[np.unsignedinteger[Any]], int]]] = {
    "float32": (np.uint32, 0x7F800000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
}
_ITEM_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True, eq=False)
class CellRows:
    """The data that cells store of their tokens."""

    position: Ints  # [rows]
    grid: Ints | None  # [rows, 2] as (y, x), of models with several position dimensions
    n_ids: Ints  # [rows]
    ids: Ints  # [ids] of all rows, one row after the other


@dataclass(frozen=True, slots=True, eq=False)
class StateSelection:
    """Cells to be saved: what they hold, and the bytes of their rows in each tensor, which are taken once and one after
    the other, so that only one copy of a tensor is in memory."""

    rows: CellRows
    tensors: Iterable[Bytes]

    @property
    def counts(self) -> StreamCounts:
        return StreamCounts(len(self.rows.position), len(self.rows.ids))

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the block."""
        rows = self.rows
        for ints in (rows.position, rows.grid, rows.n_ids, rows.ids):
            if ints is not None and ints.size:
                yield np.ascontiguousarray(ints, np.int64).data
        for tensor in self.tensors if len(rows.position) else ():
            yield tensor.data


@dataclass(frozen=True, slots=True, eq=False)
class StateBlock:
    """Cells that were saved: what they hold, and their rows of each tensor, as views of the saved bytes."""

    rows: CellRows
    data: tuple[Bytes, ...]

    @property
    def n_cells(self) -> int:
        return len(self.rows.position)


@dataclass(frozen=True, slots=True)
class CellForm:
    """One cell of a tensor: the name of its type, and its shape."""

    dtype: str  # float32, bfloat16, float16 or int8
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {'x'.join(map(str, self.shape))}"


@dataclass(frozen=True, slots=True)
class Form:
    """What the blocks of a part are like: at most `size` cells, each of these in one tensor."""

    size: int
    grid: bool
    cells: tuple[CellForm, ...]

    def n_bytes(self, counts: StreamCounts) -> int:
        """Bytes that a block takes."""
        n_ints = counts.n_cells * (4 if self.grid else 2) + counts.n_ids
        return n_ints * _INT_BYTES + counts.n_cells * sum(cell.n_bytes for cell in self.cells)

    def read(self, counts: StreamCounts, data: memoryview) -> StateBlock:
        """Parse a block of exactly `n_bytes`; BadFile where its cells hold values that no cell can."""
        n = counts.n_cells
        if n > self.size:
            raise BadFile(
                f"the saved state has {n} cells and this memory only {self.size}: load it with a context as large as "
                "where it was saved"
            )
        ends = np.cumsum([n, 2 * n if self.grid else 0, n, counts.n_ids]).tolist()
        ints = np.frombuffer(data, np.int64, ends[-1]).copy()  # aligned and writable
        position, grid, n_ids, ids = np.split(ints, ends[:-1])
        rows = CellRows(position, grid.reshape(n, 2) if self.grid else None, n_ids, ids)
        _check(rows)
        borders = np.cumsum([ends[-1] * _INT_BYTES, *(n * cell.n_bytes for cell in self.cells)]).tolist()
        whole = np.frombuffer(data, np.uint8)
        return StateBlock(rows, tuple(whole[start:stop] for start, stop in pairwise(borders)))


def check_finite(block: StateBlock, form: Form) -> None:
    """Refuse rows that hold other than finite numbers."""
    if not all(_all_finite(data, cell.dtype) for data, cell in zip(block.data, form.cells, strict=True)):
        raise BadFile("the saved state has keys or values that are no numbers; nothing can go on from it")


def _all_finite(data: Bytes, dtype: str) -> bool:
    if dtype not in _EXPONENTS:
        return True  # small integers
    kind, exponent = _EXPONENTS[dtype]
    words = data.view(kind)
    starts = range(0, len(words), _CHECKED_WORDS)  # in slices, so that the masks stay small
    return not any(((words[at : at + _CHECKED_WORDS] & exponent) == exponent).any() for at in starts)


def _check(rows: CellRows) -> None:
    """Refuse values that cells cannot hold."""
    n_ids, ids = rows.n_ids, rows.ids
    if not _all_within(rows.position, 0, MAX_POSITION):
        raise BadFile(f"the saved state has a position that is negative or too high; {DAMAGED}")
    if not _all_within(n_ids, 1, MAX_SEQ + 1) or int(n_ids.sum()) != len(ids):
        raise BadFile(f"the saved state has a wrong number of sequences in a cell; {DAMAGED}")
    if not _all_within(ids, 0, MAX_SEQ):
        raise BadFile(f"the saved state has a sequence id outside 0 to {MAX_SEQ - 1}; {DAMAGED}")
    cell = np.repeat(np.arange(len(n_ids)), n_ids)
    if (np.diff(cell * MAX_SEQ + ids) <= 0).any():
        raise BadFile(f"the saved state names a sequence twice in one cell, or out of order; {DAMAGED}")


def _all_within(ints: NDArray[np.int64], least: int, stop: int) -> bool:
    return not len(ints) or (int(ints.min()) >= least and int(ints.max()) < stop)
