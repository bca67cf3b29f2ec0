"""Pages of each sequence, whether it may get more, and pages kept of earlier prompts.

A sequence begins with all the pages it may ever need where they fit and no other waits, else with a part, and gets more
later. A
page is granted only if, afterwards, there is still an order in which every sequence can get its worst case and
finish (the banker's rule, for one resource), so no sequence waits for ever. Pages of layers that see a window are
promised as a whole when a sequence begins (`window_pages.py`). Integers only; the backends hold the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Final

from ostinato.cache.groups import PageGroup, first_page
from ostinato.cache.pages import Pages
from ostinato.cache.prefix import Found, PrefixCache
from ostinato.cache.window_pages import PageRun, WindowLease, WindowPages
from ostinato.errors import InternalError

RECENT_PROMPTS: Final = 16  # whose pages stay cached, at least, even if no other prompt has used them


@dataclass(frozen=True, slots=True)
class Holding:
    """The pages that a sequence has and may still need; others hold its `shared` pages too."""

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
    """The pages of one sequence: those of layers that see everything, in position order, of which it may get more, and
    those of layers that see a window. `worst`: the entries of its page tables, in the worst case. Only leases of one
    `rope_set` share pages. It grows.
    """

    pages: list[int]
    worst: int
    windows: tuple[WindowLease, ...] = ()
    rope_set: int = 0

    @property
    def short(self) -> int:
        """Pages that it may still need."""
        return self.worst - len(self.pages)


@dataclass(frozen=True, slots=True)
class KeptPages:
    """Pages of a sequence that has ended, one run for each group: those that one like it needs to go on."""

    runs: tuple[PageRun, ...]
    n_positions: int


class Reserve:
    """Pools of pages that are leased to sequences; unleased pages may hold prefixes until they are needed.

    There is one pool for the layers that see everything, unless every layer sees a window, and one for each window.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        page_tokens: int,
        *,
        chunk_rows: int,
        share_prefixes: bool,
        kind: Callable[[int], int] = lambda _: 0,
        recent: int = RECENT_PROMPTS,
    ) -> None:
        """`chunk_rows`: of any chunk, at most. `share_prefixes`: cache prompts' pages for later prompts of the same
        `kind`, by their length (`Chunks.rows_for`); of a prompt that no other has shared, while it is one of so many
        `recent` ones. Of a recurrent model pages alone are of no use: its states must be there too (`snapshots.py`)."""
        self.page_tokens = page_tokens
        self._groups = tuple(groups)
        whole = [group for group in groups if group.window is None]
        self._pages = Pages(whole[0].n_pages, page_tokens) if whole else None
        self._windows = tuple(
            WindowPages(group, page_tokens, chunk_rows, partial(self._make_room, number))
            for number, group in enumerate(groups)
            if group.window is not None
        )
        windows = [group.window for group in groups]
        self._prefixes = PrefixCache(self._pools(), windows, kind, recent=recent) if share_prefixes else None
        self._leases: list[Lease] = []
        self._holders: Counter[int] = Counter()  # of each leased page of the whole group, the number of leases
        self._kept: KeptPages | None = None  # of one sequence that has ended

    @property
    def n_pages(self) -> int:
        """Pages of all groups."""
        return sum(group.n_pages for group in self._groups)

    @property
    def n_available(self) -> int:
        """Pages that no lease has or was promised: free ones, and cached ones that would be evicted."""
        return self._n_unleased + sum(windows.n_unpromised for windows in self._windows)

    @property
    def n_cached(self) -> int:
        """Pages that hold a prefix, leased or not."""
        return 0 if self._prefixes is None else len(self._prefixes)

    def sees_all(self, n_positions: int) -> bool:
        """Whether the last of so many positions sees the others in every layer."""
        return all(group.window is None or n_positions <= group.window for group in self._groups)

    def pages_for(self, n_positions: int) -> int:
        return -(-n_positions // self.page_tokens)

    def open(
        self,
        prompt: Sequence[int],
        n_positions: int,
        *,
        all_now: bool,
        begin: Sequence[PageRun] | None = None,
        rope_set: int = 0,
    ) -> Lease | None:
        """Lease pages for a prompt that may grow to n_positions; None, and no change, while that is not safe.

        Its cached beginning is shared, or the pages of `begin` are. `all_now` asks for all pages that it may need;
        without that, or where that is not safe, it gets those of the prompt and one more. Windowed pages, which do not
        grow with the sequence, are promised as a whole.
        """
        windows = self._open_windows(n_positions)
        if windows is None:
            return None
        runs = self.find(prompt, rope_set).runs if begin is None else begin
        lease = Lease([], self.pages_for(n_positions), windows, rope_set)
        self._leases.append(lease)
        self._begin_windows(lease, runs)
        if self._pages is None:
            return lease
        found = list(runs[0].pages) if runs else []
        lease.pages = found
        least = min(lease.worst, self.pages_for(len(prompt)) + 1)
        self._pages.hold(found)
        self._holders.update(found)
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

    def granted(self, lease: Lease) -> int:
        """The positions that have pages in every group."""
        return (lease.worst if self._pages is None else len(lease.pages)) * self.page_tokens

    def is_complete(self, lease: Lease) -> bool:
        """Whether it has all pages that it may need."""
        return self._pages is None or not lease.short

    def cover(self, lease: Lease, n_held: int, n_positions: int) -> None:
        """Take the windowed pages of the positions from n_held on to n_positions, which are about to be written."""
        for windows, own in self._each_window(lease):
            windows.cover(own, n_held, n_positions)

    def begin_cycle(self, lease: Lease, n_prompt: int, n_positions: int) -> None:
        """Take the windowed pages that the decode loop needs from position n_prompt on."""
        for windows, own in self._each_window(lease):
            windows.begin_cycle(own, n_prompt, n_positions)

    def tables(self, lease: Lease) -> list[list[int]]:
        """The page table of each group."""
        whole = [] if self._pages is None else [list(lease.pages)]
        return whole + [windows.table(own, lease.worst) for windows, own in self._each_window(lease)]

    def share(self, lease: Lease, prompt: Sequence[int], most: int | None = None) -> int:
        """Replace a lease's own pages by cached ones, of `most` positions at most, before they are written; the number
        of cached positions."""
        found = self.find(prompt, lease.rope_set, reuse=True, most=most)
        self._begin_windows(lease, found.runs)
        if self._pages is not None and found.runs:
            own = [(place, page) for place, page in enumerate(found.runs[0].pages) if lease.pages[place] != page]
            self._pages.hold(page for _, page in own)
            self._holders.update(page for _, page in own)
            given_up = [lease.pages[place] for place, _ in own]
            for place, page in own:
                lease.pages[place] = page
            self._discount(given_up)
            self._pages.release(given_up)
        return found.n_pages * self.page_tokens

    def remember(self, lease: Lease, prompt: Sequence[int], n_done: int) -> None:
        """Let later prompts find the pages that are full with the first n_done tokens of this one."""
        if self._prefixes is not None:
            whole = () if self._pages is None else (PageRun(0, lease.pages),)
            runs = (*whole, *(PageRun(own.first, own.pages) for own in lease.windows))
            self._prefixes.add(prompt, runs, n_done // self.page_tokens, lease.rope_set)

    def trim(self, lease: Lease, n_held: int) -> None:
        """Release the windowed pages that no later position sees."""
        for windows, own in self._each_window(lease):
            windows.trim(own, n_held)

    def keep(self, lease: Lease, n_positions: int, n_written: int) -> None:
        """Close a lease, but hold the pages of its first positions until they are needed, or others are kept.

        `n_written`: the positions that the loop has written. If it has written over a page of those, nothing is kept.
        """
        runs: list[PageRun | None] = []
        if self._pages is not None:
            runs.append(PageRun(0, lease.pages[: self.pages_for(n_positions)]))
        runs += [windows.last_pages(own, n_positions, n_written) for windows, own in self._each_window(lease)]
        kept = tuple(run for run in runs if run is not None)
        is_whole = len(kept) == len(runs)
        for pool, run in zip(self._pools(), kept if is_whole else (), strict=False):
            pool.hold(run.pages)
        self.close(lease)
        self.forget()
        self._kept = KeptPages(kept, n_positions) if is_whole else None

    def kept(self, n_positions: int) -> tuple[PageRun, ...] | None:
        """The kept pages that a sequence needs which goes on after the first positions of the kept one; None where none
        are kept, where they were needed elsewhere, or where a window reaches further back than they do."""
        if self._kept is None or n_positions > self._kept.n_positions:
            return None
        stop, runs = self.pages_for(n_positions), []
        for number, run in enumerate(self._kept.runs):
            first = first_page(self._groups[number].window, n_positions, self.page_tokens)
            if first < run.first:
                return None
            runs.append(PageRun(first, run.pages[first - run.first : stop - run.first]))
        return tuple(runs)

    def is_kept_alone(self, n_positions: int) -> bool:
        """Whether the kept pages with this position are neither leased nor cached, so that a sequence that takes them
        may write to them."""
        last = [] if self._kept is None else [run.at(n_positions // self.page_tokens) for run in self._kept.runs]
        return all(page is None or pool.n_holders(page) == 1 for pool, page in zip(self._pools(), last, strict=False))

    def forget(self) -> None:
        """Release the kept pages."""
        kept, self._kept = self._kept, None
        for pool, run in zip(self._pools(), () if kept is None else kept.runs, strict=False):
            pool.release(run.pages)

    def close(self, lease: Lease) -> None:
        """Release all pages of a lease."""
        self._leases.remove(lease)
        for windows, own in self._each_window(lease):
            windows.close(own)
        if self._pages is not None:
            self._discount(lease.pages)
            self._pages.release(lease.pages)

    def find(self, prompt: Sequence[int], rope_set: int = 0, *, reuse: bool = False, most: int | None = None) -> Found:
        """The prompt's longest beginning that is cached, of `most` positions at most; `reuse`: it will be read."""
        if self._prefixes is None:
            return Found(0, ())
        return self._prefixes.find(prompt, rope_set, reuse=reuse, most=most)

    # Groups

    def _pools(self) -> list[Pages]:
        return ([] if self._pages is None else [self._pages]) + [windows.pages for windows in self._windows]

    def _each_window(self, lease: Lease) -> Iterable[tuple[WindowPages, WindowLease]]:
        return zip(self._windows, lease.windows, strict=True)

    def _open_windows(self, n_positions: int) -> tuple[WindowLease, ...] | None:
        opened = [windows.open(n_positions) for windows in self._windows]
        leases = tuple(lease for lease in opened if lease is not None)
        if len(leases) == len(opened):
            return leases
        for windows, lease in zip(self._windows, opened, strict=True):
            if lease is not None:
                windows.close(lease)
        return None

    def _begin_windows(self, lease: Lease, runs: Sequence[PageRun]) -> None:
        if runs:
            for (windows, own), run in zip(self._each_window(lease), runs[self._pages is not None :], strict=True):
                windows.begin_with(own, run)

    # The group that sees everything

    @property
    def _n_unleased(self) -> int:
        return 0 if self._pages is None else self._groups[0].n_pages - len(self._holders)

    def _is_safe(self, lease: Lease, n_more: int) -> bool:
        """Whether all sequences could still finish if this lease got `n_more` pages."""
        free = self._n_unleased - n_more
        return free >= 0 and all_can_finish(
            free, [self._holding(each, n_more if each is lease else 0) for each in self._leases]
        )

    def _holding(self, lease: Lease, n_more: int) -> Holding:
        # A holder of a shared page holds all pages before it too, so the shared pages come first.
        shared = tuple(takewhile(lambda page: self._holders[page] > 1, lease.pages))
        return Holding(len(lease.pages) - len(shared) + n_more, shared, lease.short - n_more)

    def _take(self, lease: Lease, n: int) -> list[int]:
        assert self._pages is not None
        if n > self._pages.n_free:
            self._make_room(0, n - self._pages.n_free)
        taken = self._pages.take(n)
        if taken is None:
            raise InternalError(f"{n} pages were promised, and {self._pages.n_free} are free")
        self._holders.update(taken)
        lease.pages.extend(taken)
        return taken

    def _make_room(self, group: int, n: int) -> None:
        """Free n more pages of a group, as far as possible: of prefixes first, then those that are kept."""
        pool, wanted = self._pools()[group], self._pools()[group].n_free + n
        self._evict(group, n)
        if self._kept is not None and pool.n_free < wanted:
            self.forget()
            self._evict(group, wanted - pool.n_free)

    def _evict(self, group: int, n: int) -> None:
        if self._prefixes is not None and n > 0:
            self._prefixes.evict(group, n)

    def _discount(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
