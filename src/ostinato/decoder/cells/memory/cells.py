"""One stream's table of cells: which position and which sequences each holds (KC-1..15).

Arrays over all cells, so that searching and masking need no loop; a call that changes cells checks its arguments first,
and raises InternalError on misuse before anything has changed. `slots.py` decides where tokens go; the
backend's `kv_store.py` holds keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ostinato.cache.sequences import MAX_SEQ, Ints
from ostinato.cache.window import Window
from ostinato.errors import InternalError

Bools = NDArray[np.bool_]

EMPTY: Final = -1  # inside the position array only; callers see None
NOWHERE: Final = np.iinfo(np.int64).max  # the lowest position of a sequence that has none


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A copy of some cells, for `Cells.restore`."""

    cells: Ints
    position: Ints
    grid: Ints | None
    pair_cells: Ints
    pair_ids: Ints


def indices(cells: ArrayLike) -> Ints:
    """Cell indices as an array; a single index becomes an array of one."""
    return np.atleast_1d(np.asarray(cells, np.int64))


class Cells:
    """`size` cells, each empty or holding a position, a set of sequences, and the pending shift of its key.

    `grid` adds a (y, x) pair to every cell, for models with several position dimensions.
    """

    def __init__(self, size: int, *, grid: bool = False) -> None:
        self.size = size
        self.position: Ints = np.full(size, EMPTY, np.int64)
        self.shift: Ints = np.zeros(size, np.int64)
        self.grid: Ints | None = np.zeros((size, 2), np.int64) if grid else None
        # One row per sequence: a query about a sequence reads one contiguous row, and the rows of unused sequences are
        # pages of zeros that the system has not allocated.
        self.member: Bools = np.zeros((MAX_SEQ, size), np.bool_)
        self.n_owners: NDArray[np.int16] = np.zeros(size, np.int16)
        self._id_sum: NDArray[np.int32] = np.zeros(size, np.int32)  # of a cell with one owner: the owner
        self.used = 0
        self.has_shift = False
        # The extremes of each sequence's positions (KC-4); stale ones are computed again at the next query. A sequence
        # with cells never has a negative highest position, stale or not.
        self._lowest: Ints = np.full(MAX_SEQ, NOWHERE, np.int64)
        self._highest: Ints = np.full(MAX_SEQ, EMPTY, np.int64)
        self._stale: Bools = np.zeros(MAX_SEQ, np.bool_)

    # Queries

    @property
    def used_min(self) -> int:
        """The lowest used index; 0 when nothing is used (KC-3)."""
        return int((self.position >= 0).argmax())

    @property
    def used_stop(self) -> int:
        """One past the highest used index; 0 when nothing is used (KC-3)."""
        return self.size - int((self.position[::-1] >= 0).argmax()) if self.used else 0

    def pos_min(self, s: int) -> int | None:
        """The lowest position of a sequence; None when it has no cell (KC-4)."""
        self._refresh(s)
        return int(self._lowest[s]) if self._highest[s] >= 0 else None

    def pos_max(self, s: int) -> int | None:
        """The highest position of a sequence; None when it has no cell (KC-4)."""
        self._refresh(s)
        return int(self._highest[s]) if self._highest[s] >= 0 else None

    def in_range(self, p0: int, p1: int) -> Bools:
        """The cells whose position is in [p0, p1); never an empty one (KC-15)."""
        return (self.position >= max(p0, 0)) & (self.position < p1)

    def single_owner(self, cells: Ints) -> Ints:
        """The one sequence that each of these cells belongs to; they must have exactly one."""
        self._require(self.n_owners[cells] == 1, cells, "must belong to one sequence")
        return self._id_sum[cells].astype(np.int64)

    def evictable(self, window: Window) -> Bools:
        """The cells of one sequence that are out of its window, seen from its next position (SW-3), [size]."""
        if window.reaches_all:
            return np.zeros(self.size, np.bool_)
        single = self.n_owners == 1
        next_position = self._all_highest()[np.where(single, self._id_sum, 0)] + 1
        found: Bools = single & window.masked(self.position, next_position)
        return found

    def ids(self, cell: int) -> list[int]:
        """The sequences of a cell, ascending."""
        found: list[int] = np.flatnonzero(self.member[:, cell]).tolist()
        return found

    # Changes: `cells` are distinct indices

    def set_position(self, cells: ArrayLike, positions: ArrayLike, grid: Ints | None = None) -> None:
        """Set the positions of empty cells; `add` then sets their sequences (KC-5)."""
        at, where = self._distinct(cells), np.asarray(positions, np.int64)
        self._require(self.position[at] < 0, at, "is in use and cannot be set")
        self._require(np.broadcast_to(where, at.shape) >= 0, at, "cannot hold a negative position")
        self.position[at] = where
        if self.grid is not None:
            self.grid[at] = 0 if grid is None else grid
        self.used += len(at)

    def add(self, cells: ArrayLike, ids: ArrayLike) -> None:
        """Cell i of `cells` gains sequence i of `ids`; a cell may come several times with different ids (KC-6)."""
        at, who = indices(cells), indices(ids)
        at, who = np.broadcast_arrays(at, who)
        self._require_distinct(at * MAX_SEQ + who)
        self._require(self.position[at] >= 0, at, "is empty and cannot gain a sequence")
        self._require(~self.member[who, at], at, "has the sequence already")
        # Membership is set last here and first in `_drop`, so that after an interrupt `restore` finds all it must undo.
        np.add.at(self.n_owners, at, 1)
        np.add.at(self._id_sum, at, who.astype(np.int32))
        self.member[who, at] = True
        np.minimum.at(self._lowest, who, self.position[at])
        np.maximum.at(self._highest, who, self.position[at])

    def remove(self, cells: ArrayLike, s: int) -> Ints:
        """The cells lose sequence s; those left without any become empty and are returned (KC-7)."""
        at = self._distinct(cells)
        self._require(self.member[s, at], at, f"does not have sequence {s}")
        self._drop(at, np.full(len(at), s))
        freed: Ints = at[self.n_owners[at] == 0]
        self._vacate(freed)
        return freed

    def empty(self, cells: ArrayLike) -> None:
        """Used cells lose all their sequences (KC-8)."""
        at = self._distinct(cells)
        self._require(self.position[at] >= 0, at, "is empty already")
        self._drop(*self._pairs(at))
        self._vacate(at)

    def keep(self, cells: ArrayLike, s: int) -> Ints:
        """The cells lose every sequence but s; those that become empty are returned (KC-9)."""
        at = self._distinct(cells)
        of_s = self.member[s, at]
        shared = at[of_s & (self.n_owners[at] > 1)]
        pair_cells, pair_ids = self._pairs(shared)
        others = pair_ids != s
        self._drop(pair_cells[others], pair_ids[others])
        freed: Ints = at[~of_s & (self.position[at] >= 0)]
        self.empty(freed)
        return freed

    def shift_by(self, cells: ArrayLike, distance: int) -> Ints:
        """Positions and shifts of used cells grow; those that fall below zero become empty and are returned (KC-10)."""
        at = self._distinct(cells)
        self._require(self.position[at] >= 0, at, "is empty and cannot be shifted")
        self._move(at, self.position[at] + distance)
        freed: Ints = at[self.position[at] < 0]
        self._drop(*self._pairs(freed))
        self._vacate(freed)
        return freed

    def divide_by(self, cells: ArrayLike, divisor: int) -> None:
        """Positions of used cells become the quotient; shifts grow by new minus old (KC-11)."""
        at = self._distinct(cells)
        self._require(self.position[at] >= 0, at, "is empty and cannot be divided")
        self._move(at, self.position[at] // divisor)

    def reset_shift(self) -> None:
        """Clear all pending shifts: the keys have been rotated (KC-13)."""
        self.shift[:] = 0
        self.has_shift = False

    def reset(self) -> None:
        """Every cell becomes empty (KC-13)."""
        self.member[self._highest >= 0] = False
        self.position[:] = EMPTY
        self.n_owners[:] = 0
        self._id_sum[:] = 0
        if self.grid is not None:
            self.grid[:] = 0
        self.used = 0
        self._lowest[:] = NOWHERE
        self._highest[:] = EMPTY
        self._stale[:] = False
        self.reset_shift()

    # Undo

    def save(self, cells: ArrayLike) -> Saved:
        """What these cells hold, for `restore`; allowed only while none of them has a pending shift (KC-14)."""
        at = self._distinct(cells)
        self._require(self.shift[at] == 0, at, "awaits a shift, so it cannot be saved: apply the pending update first")
        grid = None if self.grid is None else self.grid[at]
        return Saved(at, self.position[at], grid, *self._pairs(at))

    def restore(self, saved: Saved) -> None:
        """Restore saved cells; all other cells stay as they are (KC-14)."""
        at = saved.cells
        pair_cells, pair_ids = self._pairs(at)
        self._stale[pair_ids] = True
        self.member[pair_ids, pair_cells] = False
        self.n_owners[at] = 0
        self._id_sum[at] = 0
        self.shift[at] = 0
        self.position[at] = saved.position
        if self.grid is not None and saved.grid is not None:
            self.grid[at] = saved.grid
        self.used = int(np.count_nonzero(self.position >= 0))
        self.add(saved.pair_cells, saved.pair_ids)

    # Inside

    def _pairs(self, cells: Ints) -> tuple[Ints, Ints]:
        """Every (cell, sequence) of these cells, as two arrays."""
        n_owners = self.n_owners[cells]
        single, shared = cells[n_owners == 1], cells[n_owners > 1]
        owner = self._id_sum[single].astype(np.int64)
        if not len(shared):
            return single, owner
        ids, places = np.nonzero(self.member[:, shared])
        return np.concatenate([single, shared[places]]), np.concatenate([owner, ids])

    def _drop(self, cells: Ints, ids: Ints) -> None:
        """The cells lose these sequences; a cell left without any is not emptied here."""
        position = self.position[cells]
        at_edge = (position <= self._lowest[ids]) | (position >= self._highest[ids])
        self._stale[ids[at_edge]] = True
        self.member[ids, cells] = False
        np.subtract.at(self._id_sum, cells, ids.astype(np.int32))
        np.subtract.at(self.n_owners, cells, 1)

    def _vacate(self, cells: Ints) -> None:
        """Cells without sequences become empty."""
        self.position[cells] = EMPTY
        self.shift[cells] = 0
        if self.grid is not None:
            self.grid[cells] = 0
        self.used -= len(cells)

    def _move(self, cells: Ints, positions: Ints) -> None:
        """Used cells get new positions, and the difference becomes a pending shift of their keys."""
        if not len(cells):
            return
        _, ids = self._pairs(cells)
        self._stale[ids] = True
        self.shift[cells] += positions - self.position[cells]
        self.position[cells] = positions
        self.has_shift = True

    def _all_highest(self) -> Ints:
        """The highest position of every sequence, [MAX_SEQ]; negative for those without a cell."""
        for s in np.flatnonzero(self._stale).tolist():
            self._refresh(s)
        return self._highest

    def _refresh(self, s: int) -> None:
        if not self._stale[s]:
            return
        positions = self.position[self.member[s]]
        self._lowest[s] = positions.min(initial=NOWHERE)
        self._highest[s] = positions.max(initial=EMPTY)
        self._stale[s] = False

    def _require(self, holds: Bools, cells: Ints, what: str) -> None:
        if not holds.all():
            raise InternalError(f"cell {cells[~holds][0]} of {self.size} {what}")  # KC-12

    def _distinct(self, cells: ArrayLike) -> Ints:
        at = indices(cells)
        self._require_distinct(at)
        return at

    def _require_distinct(self, keys: Ints) -> None:
        ascending = bool((keys[1:] > keys[:-1]).all())  # nearly always true, and cheaper than sorting
        if not ascending and len(np.unique(keys)) != len(keys):
            raise InternalError("the same cell was named twice")  # KC-12
