"""Pages of the KV cache: fixed runs of cells, granted whole to one sequence in position order.

A page that several sequences hold, such as a shared prefix, is stored once with a count of its holders; a sequence
that writes to it gets a copy first. Integers only: `kv_cache.py` finds and fills cells, and the owner of the tensors
copies keys and values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ostinato.cache.sequences import Ints
from ostinato.errors import InternalError


class PageCopy(NamedTuple):
    """Keys and values of a whole page that must be copied before the target is written."""

    source: int
    target: int


class Pages:
    """`n_pages` pages of `page_cells` cells: the number of holders of each, and the free pages."""

    def __init__(self, n_pages: int, page_cells: int) -> None:
        if n_pages < 1 or page_cells < 1:
            raise InternalError(f"{n_pages} pages of {page_cells} cells cannot hold anything")
        self.page_cells = page_cells
        self._holders = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))  # the last is granted first: at the start, page 0

    @property
    def n_free(self) -> int:
        return len(self._free)

    def n_holders(self, page: int) -> int:
        """The number of holders of a page."""
        self._check_exists(page)
        return self._holders[page]

    def take(self, n: int) -> list[int] | None:
        """Take n free pages, each with one holder; None, and nothing taken, when fewer are free."""
        if n < 0:
            raise InternalError(f"{n} pages cannot be taken")
        if n > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(n)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to each of these pages, which must have one already."""
        pages = list(pages)
        for page in pages:
            self._check_exists(page)
            if self._holders[page] == 0:
                raise InternalError(f"page {page} is free and cannot be shared; take it instead")
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Remove a holder from each of these pages; returns the pages that are free now."""
        pages = list(pages)
        for page, times in Counter(pages).items():
            self._check_exists(page)
            if times > self._holders[page]:
                raise InternalError(f"page {page} has {self._holders[page]} holders and was released by {times}")
        freed = []
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                freed.append(page)
        self._free.extend(freed)
        return freed

    def _check_exists(self, page: int) -> None:
        if not 0 <= page < len(self._holders):
            raise InternalError(f"there is no page {page}; there are {len(self._holders)}")


class PageTables:
    """The pages of every sequence, in position order: position p is in page p // page_cells of its table."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._tables: dict[int, list[int]] = {}

    def pages_of(self, sequence: int) -> tuple[int, ...]:
        """The pages of a sequence; none when it is unknown."""
        return tuple(self._tables.get(sequence, ()))

    def capacity(self, sequence: int) -> int:
        """Positions that a sequence has cells for."""
        return len(self._tables.get(sequence, ())) * self._pages.page_cells

    def reserve(self, sequence: int, n_positions: int) -> list[int] | None:
        """Give a sequence cells for its first n_positions; the pages added. None, and no change, without room."""
        have = len(self._tables.get(sequence, ()))
        added = self._pages.take(max(0, self._n_pages(n_positions) - have))
        if added is not None:
            self._tables.setdefault(sequence, []).extend(added)
        return added

    def adopt(self, sequence: int, prefix: Sequence[int]) -> None:
        """Start a new sequence with pages that have holders, such as a cached prefix; it becomes another holder."""
        self._check_new(sequence)
        if len(set(prefix)) != len(prefix):
            raise InternalError(f"a page cannot come twice in one sequence: {list(prefix)}")
        self._pages.hold(prefix)
        self._tables[sequence] = list(prefix)

    def share(self, source: int, target: int, n_positions: int) -> None:
        """Start a new sequence with the pages of another's first n_positions, the last perhaps in part."""
        self._check_known(source)
        if n_positions > self.capacity(source):
            raise InternalError(f"sequence {source} has {self.capacity(source)} positions, not {n_positions} to share")
        self.adopt(target, self._tables[source][: self._n_pages(n_positions)])

    def make_writable(self, sequence: int, first: int, stop: int) -> list[PageCopy] | None:
        """Make a sequence the only holder of the pages of positions [first, stop); returns the copies needed, in order.

        None, and no change, when there are too few free pages for the copies.
        """
        self._check_positions(sequence, first, stop)
        table = self._tables[sequence]
        places = range(first // self._pages.page_cells, self._n_pages(stop)) if first < stop else range(0)
        shared = [place for place in places if self._pages.n_holders(table[place]) > 1]
        fresh = self._pages.take(len(shared))
        if fresh is None:
            return None
        copies = [PageCopy(table[place], page) for place, page in zip(shared, fresh, strict=True)]
        for place, page in zip(shared, fresh, strict=True):
            table[place] = page
        self._pages.release(copy.source for copy in copies)
        return copies

    def cells(self, sequence: int, first: int, stop: int) -> Ints:
        """The cells of positions [first, stop) of a sequence, in order."""
        self._check_positions(sequence, first, stop)
        positions = np.arange(first, stop)
        table = np.array(self._tables[sequence], np.int64)
        size = self._pages.page_cells
        return table[positions // size] * size + positions % size

    def trim(self, sequence: int, n_positions: int) -> list[int]:
        """Keep only the pages of a sequence's first n_positions; returns the pages that are free now."""
        self._check_known(sequence)
        table = self._tables[sequence]
        n_kept = self._n_pages(n_positions)
        given_up = table[n_kept:]
        del table[n_kept:]
        return self._pages.release(given_up)

    def release(self, sequence: int) -> list[int]:
        """Forget a sequence; returns the pages that are free now."""
        self._check_known(sequence)
        return self._pages.release(self._tables.pop(sequence))

    def _n_pages(self, n_positions: int) -> int:
        if n_positions < 0:
            raise InternalError(f"there are no {n_positions} positions")
        return -(-n_positions // self._pages.page_cells)

    def _check_known(self, sequence: int) -> None:
        if sequence not in self._tables:
            raise InternalError(f"sequence {sequence} has no pages, or has given them back already")

    def _check_new(self, sequence: int) -> None:
        if sequence in self._tables:
            raise InternalError(f"sequence {sequence} has pages already; release it first")

    def _check_positions(self, sequence: int, first: int, stop: int) -> None:
        self._check_known(sequence)
        if first < 0 or stop > self.capacity(sequence):
            raise InternalError(
                f"positions {first} to {stop} of sequence {sequence} are not reserved; it has {self.capacity(sequence)}"
            )
