"""Pages of each admitted sequence, whether it may get more, and pages kept of earlier prompts.

A sequence is admitted with all the pages it may ever need where they fit, else with a part, and gets more later. A
page is granted only if, afterwards, there is still an order in which every admitted sequence can get its worst case and
finish (the banker's rule, for one resource), so no sequence waits for ever. Integers only; `torch/paged.py` holds the
tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ostinato.cache.pages import Pages
from ostinato.cache.prefix import PrefixCache
from ostinato.errors import InternalError


@dataclass(frozen=True, slots=True)
class Holding:
    """The pages that an admitted sequence has and may still need; others hold its `shared` pages too."""

    alone: int
    shared: tuple[int, ...]
    needs: int


def all_can_finish(free: int, holdings: Sequence[Holding]) -> bool:
    """Whether there is an order in which each sequence gets all it needs, finishes, and releases its pages.

    >>> all_can_finish(1, [Holding(3, (), 1), Holding(2, (), 4)])
    True
    >>> all_can_finish(1, [Holding(3, (), 2), Holding(2, (), 4)])
    False
    """
    if sum(holding.needs for holding in holdings) <= free:
        return True
    holders = Counter(page for holding in holdings for page in holding.shared)
    # Finishing only frees pages: if the sequence with the smallest need cannot finish, no other order helps.
    for holding in sorted(holdings, key=lambda holding: holding.needs):
        if holding.needs > free:
            return False
        free += holding.alone
        for page in holding.shared:
            holders[page] -= 1
            free += holders[page] == 0
    return True


@dataclass(slots=True, eq=False)
class Lease:
    """The pages of one admitted sequence, in position order, and its number of pages in the worst case. It grows."""

    pages: list[int]
    worst: int

    @property
    def short(self) -> int:
        """Pages that it may still need."""
        return self.worst - len(self.pages)


class Reserve:
    """A pool of pages that are leased to sequences; unleased pages may hold prefixes until they are needed."""

    def __init__(
        self, n_pages: int, page_tokens: int, *, reuse: bool, kind: Callable[[int], int] = lambda _: 0
    ) -> None:
        """`reuse`: cache prompts' pages for later prompts of the same `kind`, by their length (`Prefill.rows_for`). Not
        for recurrent models, whose past is not in pages alone."""
        self.n_pages, self.page_tokens = n_pages, page_tokens
        self._pages = Pages(n_pages, page_tokens)
        self._prefixes = PrefixCache(self._pages, kind) if reuse else None
        self._leases: list[Lease] = []
        self._holders: dict[int, int] = {}  # of each leased page, the number of leases
        self._kept: list[int] = []  # pages of one sequence that has ended

    @property
    def n_available(self) -> int:
        """Pages in no lease: free ones, and cached ones that would be evicted."""
        return self.n_pages - len(self._holders)

    @property
    def n_cached(self) -> int:
        """Pages that hold a prefix, leased or not."""
        return 0 if self._prefixes is None else len(self._prefixes)

    def pages_for(self, n_positions: int) -> int:
        return -(-n_positions // self.page_tokens)

    def open(
        self, prompt: Sequence[int], n_positions: int, *, all_now: bool, begin: Sequence[int] | None = None
    ) -> Lease | None:
        """Lease pages for a prompt that may grow to n_positions; None, and no change, while that is not safe.

        Its cached beginning is shared, or the pages of `begin` are. `all_now` asks for all pages that it may need;
        without that, or where that is not safe, it gets those of the prompt and one more.
        """
        found = self.find(prompt) if begin is None else list(begin)
        lease = Lease(found, self.pages_for(n_positions))
        least = min(lease.worst, self.pages_for(len(prompt)) + 1)
        self._leases.append(lease)
        self._pages.hold(found)
        self._count(found)
        for size in (lease.worst, least) if all_now else (least,):
            n_more = size - len(found)
            if self._is_safe(lease, n_more):
                self._take(lease, n_more)
                return lease
        self.close(lease)
        return None

    def extend(self, lease: Lease, n: int) -> list[int]:
        """Add up to n pages to a lease, as many as are safe; returns them."""
        n = min(n, lease.short)
        while n > 0 and not self._is_safe(lease, n):
            n //= 2
        return self._take(lease, n)

    def share(self, lease: Lease, prompt: Sequence[int]) -> int:
        """Replace a lease's own pages by cached ones, before they are written; the number of cached positions."""
        found = self.find(prompt)
        own = [(place, page) for place, page in enumerate(found) if lease.pages[place] != page]
        self._pages.hold(page for _, page in own)
        self._count(page for _, page in own)
        given_up = [lease.pages[place] for place, _ in own]
        for place, page in own:
            lease.pages[place] = page
        self._discount(given_up)
        self._pages.release(given_up)
        return len(found) * self.page_tokens

    def remember(self, lease: Lease, prompt: Sequence[int], n_done: int) -> None:
        """Let later prompts find the pages that are full with the first n_done tokens of this one."""
        if self._prefixes is not None:
            self._prefixes.add(prompt, lease.pages[: n_done // self.page_tokens])

    def keep(self, lease: Lease, n_positions: int) -> None:
        """Close a lease, but hold the pages of its first positions until they are needed, or others are kept."""
        kept = lease.pages[: self.pages_for(n_positions)]
        self._pages.hold(kept)
        self.close(lease)
        self.forget()
        self._kept = kept

    @property
    def kept(self) -> Sequence[int]:
        """The pages that are kept; empty where none were kept, or where they were needed."""
        return self._kept

    def is_kept_alone(self, page: int) -> bool:
        """Whether a kept page is neither leased nor cached, so that a sequence that takes it may write to it."""
        return self._pages.n_holders(page) == 1

    def forget(self) -> None:
        """Release the kept pages."""
        self._pages.release(self._kept)
        self._kept = []

    def close(self, lease: Lease) -> None:
        """Release all pages of a lease."""
        self._leases.remove(lease)
        self._discount(lease.pages)
        self._pages.release(lease.pages)

    def find(self, prompt: Sequence[int]) -> list[int]:
        """The pages of the prompt's longest beginning that is cached."""
        return [] if self._prefixes is None else self._prefixes.find(prompt)

    def _is_safe(self, lease: Lease, n_more: int) -> bool:
        """Whether all sequences could still finish if this lease got `n_more` pages."""
        free = self.n_available - n_more
        return free >= 0 and all_can_finish(
            free, [self._holding(each, n_more if each is lease else 0) for each in self._leases]
        )

    def _holding(self, lease: Lease, n_more: int) -> Holding:
        # A holder of a shared page holds all pages before it too, so the shared pages come first.
        shared = tuple(takewhile(lambda page: self._holders[page] > 1, lease.pages))
        return Holding(len(lease.pages) - len(shared) + n_more, shared, lease.short - n_more)

    def _take(self, lease: Lease, n: int) -> list[int]:
        self._evict(n)
        if self._kept and n > self._pages.n_free:
            self.forget()
            self._evict(n)
        taken = self._pages.take(n)
        if taken is None:
            raise InternalError(f"{n} pages were promised, and {self._pages.n_free} of {self.n_pages} are free")
        self._count(taken)
        lease.pages.extend(taken)
        return taken

    def _evict(self, n: int) -> None:
        """Evict prefixes until n pages are free, as far as possible."""
        if self._prefixes is not None and n > self._pages.n_free:
            self._prefixes.evict(n - self._pages.n_free)

    def _count(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] = self._holders.get(page, 0) + 1

    def _discount(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
