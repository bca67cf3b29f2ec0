"""Pages of layers that see a window: a sequence holds those of its last positions, and gives the others back.

While a prompt is computed, pages are taken before each chunk and released after it. For the decode loop, which must not
wait for the host, the page table is complete from the start: its entries name the same few pages again and again, so
that the device overwrites a page when its window has left it. A sequence is promised all it may hold when it
begins, so taking a page never fails. Integers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ostinato.cache.groups import PageGroup, cycle_pages, first_page, lease_pages
from ostinato.cache.pages import Pages
from ostinato.errors import InternalError


@dataclass(slots=True, eq=False)
class WindowLease:
    """The windowed pages of one sequence: consecutive ones, from index `first` of its page table on. They move."""

    promised: int
    first: int = 0
    pages: list[int] = field(default_factory=list)
    cycle_first: int | None = None  # the index from which the decode loop uses its pages again and again

    @property
    def stop(self) -> int:
        """The index after its last page."""
        return self.first + len(self.pages)


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive pages of a page table, from index `first` on."""

    first: int = 0
    pages: Sequence[int] = ()

    def at(self, index: int) -> int | None:
        """The page at this index of the page table; None where it is not among these."""
        return self.pages[index - self.first] if 0 <= index - self.first < len(self.pages) else None


class WindowPages:
    """The pool of one windowed group. `make_room` is called with a number of pages that should become free."""

    def __init__(self, group: PageGroup, page_tokens: int, chunk_rows: int, make_room: Callable[[int], object]) -> None:
        assert group.window is not None
        self.n_pages, self.window = group.n_pages, group.window
        self.pages = Pages(group.n_pages, page_tokens)
        self._page_tokens, self._make_room = page_tokens, make_room
        self._most = lease_pages(group.window, page_tokens, chunk_rows)
        self._n_cycle = cycle_pages(group.window, page_tokens)
        self._promised = 0

    @property
    def n_unpromised(self) -> int:
        """Pages that no lease may take: free ones, and those that hold the windows of earlier prompts."""
        return self.n_pages - self._promised

    def open(self, n_positions: int) -> WindowLease | None:
        """Promise a sequence of n_positions its pages; None where too few are left."""
        lease = WindowLease(min(self._most, -(-n_positions // self._page_tokens)))
        if lease.promised > self.n_unpromised:
            return None
        self._promised += lease.promised
        return lease

    def close(self, lease: WindowLease) -> None:
        """Release its pages and its promise."""
        self._promised -= lease.promised
        self.pages.release(lease.pages)
        lease.pages = []

    def first_seen(self, n_held: int) -> int:
        """The index of the first page that a sequence with n_held positions needs, to go on or to be saved."""
        return first_page(self.window, n_held, self._page_tokens)

    def begin_with(self, lease: WindowLease, run: PageRun) -> None:
        """Hold these pages, which hold its last positions, in place of its own."""
        self.pages.hold(run.pages)
        self.pages.release(lease.pages)
        lease.first, lease.pages = run.first, list(run.pages)

    def trim(self, lease: WindowLease, n_held: int) -> None:
        """Release the pages that no position from n_held - 1 on sees."""
        n = max(0, min(self.first_seen(n_held) - lease.first, len(lease.pages)))
        self.pages.release(lease.pages[:n])
        del lease.pages[:n]
        lease.first += n

    def cover(self, lease: WindowLease, n_held: int, n_positions: int) -> None:
        """Hold pages for the window before position n_held and for all positions from there to n_positions."""
        if not lease.pages:
            lease.first = self.first_seen(n_held)
        self._take(lease, -(-n_positions // self._page_tokens) - lease.stop)

    def begin_cycle(self, lease: WindowLease, n_prompt: int, n_positions: int) -> None:
        """Hold the pages that the decode loop needs from position n_prompt on: fewer than it has positions, because it
        uses each of them again when its window has left it."""
        lease.cycle_first = n_prompt // self._page_tokens
        self.cover(lease, n_prompt, min(n_positions, (lease.cycle_first + self._n_cycle) * self._page_tokens))

    def table(self, lease: WindowLease, n_pages: int) -> list[int]:
        """Its page table up to its last page, and once the loop decodes, of n_pages entries; 0 where no position is
        read any more."""
        table = [0] * lease.first + lease.pages
        if lease.cycle_first is not None:
            cycle = lease.pages[lease.cycle_first - lease.first :]
            table += [cycle[(index - lease.cycle_first) % len(cycle)] for index in range(lease.stop, n_pages)]
        return table

    def last_pages(self, lease: WindowLease, n_held: int, n_written: int) -> PageRun | None:
        """The pages of the last positions of a sequence with n_held, if the loop wrote up to n_written; None where it
        has written over them."""
        first, stop = self.first_seen(n_held), -(-n_held // self._page_tokens)
        oldest = max(0, n_written - 1) // self._page_tokens - self._n_cycle + 1  # of the indices in the cycle
        if first < lease.first or (lease.cycle_first is not None and oldest > max(first, lease.cycle_first)):
            return None
        table = self.table(lease, stop)
        return PageRun(first, table[first:stop])

    def _take(self, lease: WindowLease, n: int) -> None:
        if n <= 0:
            return
        if n > self.pages.n_free:
            self._make_room(n - self.pages.n_free)
        taken = self.pages.take(n)
        if taken is None or len(lease.pages) + n > lease.promised:
            held = f"{len(lease.pages)} windowed pages and {n} more"
            raise InternalError(f"{held}; {lease.promised} were promised, and {self.pages.n_free} are free")
        lease.pages += taken
