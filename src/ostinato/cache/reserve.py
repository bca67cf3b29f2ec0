"""Who has which pages, who may get more, and what is kept of earlier prompts.

A sequence is admitted with all the pages it may ever need where they fit, else with a part, and topped up later. No
page is given unless afterwards there is an order in which every admitted sequence can have its worst case and finish
(the banker's rule, for one resource): so nobody waits for ever. Integers only; the tensors are `torch/paged.py`'s.
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
    """What a admitted sequence has and may still ask for, in pages; other admitted ones have the `shared` pages too."""

    alone: int
    shared: tuple[int, ...]
    needs: int


def all_can_finish(free: int, holdings: Sequence[Holding]) -> bool:
    """Whether there is an order in which each gets all it needs, finishes, and gives back what it had.

    >>> all_can_finish(1, [Holding(3, (), 1), Holding(2, (), 4)])
    True
    >>> all_can_finish(1, [Holding(3, (), 2), Holding(2, (), 4)])
    False
    """
    if sum(holding.needs for holding in holdings) <= free:
        return True
    holders = Counter(page for holding in holdings for page in holding.shared)
    # Finishing only adds to what is free: if the most modest cannot, nobody can, and no other order is better.
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
    """The pages of one admitted sequence, in position order, and how many it has in the worst case. It grows."""

    pages: list[int]
    worst: int

    @property
    def short(self) -> int:
        """Pages that may still be asked for."""
        return self.worst - len(self.pages)


class Reserve:
    """A pool of pages, leased to sequences; what nobody has leased may hold prefixes until it is needed."""

    def __init__(
        self, n_pages: int, page_tokens: int, *, reuse: bool, kind: Callable[[int], int] = lambda _: 0
    ) -> None:
        """`reuse`: keep prompts' pages for later ones, of the same `kind` by their length (`Prefill.rows_for`). Not for
        models that recur: a page is not all of their past."""
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

        Its beginning is shared where it is cached, or is what `begin` says. `all_now` asks for all it may need; if that
        is not safe, and without it, a part will do: the prompt and one page more.
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
        """Up to n more pages for a lease: as many as are safe, none where none are."""
        n = min(n, lease.short)
        while n > 0 and not self._is_safe(lease, n):
            n //= 2
        return self._take(lease, n)

    def share(self, lease: Lease, prompt: Sequence[int]) -> int:
        """Put cached pages in the place of a lease's own, before it is written; how many positions are cached then."""
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
        """Give everything back, but hold the pages of its first positions until they are needed, or others are kept."""
        kept = lease.pages[: self.pages_for(n_positions)]
        self._pages.hold(kept)
        self.close(lease)
        self.forget()
        self._kept = kept

    @property
    def kept(self) -> Sequence[int]:
        """The pages that are kept; none where there are none, or they were needed."""
        return self._kept

    def is_kept_alone(self, page: int) -> bool:
        """Whether a page that is kept is neither leased nor cached: whoever takes it may write to it."""
        return self._pages.n_holders(page) == 1

    def forget(self) -> None:
        """Keep nothing."""
        self._pages.release(self._kept)
        self._kept = []

    def close(self, lease: Lease) -> None:
        """Give everything back."""
        self._leases.remove(lease)
        self._discount(lease.pages)
        self._pages.release(lease.pages)

    def find(self, prompt: Sequence[int]) -> list[int]:
        """The pages of the prompt's longest beginning that is cached."""
        return [] if self._prefixes is None else self._prefixes.find(prompt)

    def _is_safe(self, lease: Lease, n_more: int) -> bool:
        """Whether everyone could still finish if this lease got so many pages more."""
        free = self.n_available - n_more
        return free >= 0 and all_can_finish(
            free, [self._holding(each, n_more if each is lease else 0) for each in self._leases]
        )

    def _holding(self, lease: Lease, n_more: int) -> Holding:
        # Who shares a page shares all before it, so that the first page of one's own ends them.
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
        """Give up prefixes, so that n pages are free if that can be."""
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
