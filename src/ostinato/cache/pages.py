"""Pages of the KV cache: fixed runs of cells, granted whole to one sequence in position order.

A page that several hold, as a shared prefix, is stored once and counted. Integers only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush

from ostinato.errors import InternalError


class Pages:
    """`n_pages` pages of `page_cells` cells: the number of holders of each, and the free pages."""

    def __init__(self, n_pages: int, page_cells: int) -> None:
        if n_pages < 1 or page_cells < 1:
            raise InternalError(f"{n_pages} pages of {page_cells} cells cannot hold anything")
        self.page_cells = page_cells
        self._holders = [0] * n_pages
        # A heap: the lowest is granted first, so that memory which was written before is written again, and pages that
        # were only promised cost nothing.
        self._free = list(range(n_pages))

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
        taken = [heappop(self._free) for _ in range(n)]
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
        for page in freed:
            heappush(self._free, page)
        return freed

    def _check_exists(self, page: int) -> None:
        if not 0 <= page < len(self._holders):
            raise InternalError(f"there is no page {page}; there are {len(self._holders)}")
