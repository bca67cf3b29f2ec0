"""Pages against a plain oracle: who holds which is counted anew from the sequences, and no position loses its value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ostinato.cache.pages import PageCopy, Pages, PageTables
from ostinato.decoder.memory.kv_cache import KVCache
from ostinato.decoder.memory.slots import Slot, StreamSlot
from ostinato.errors import InternalError
from tests.counts import soak
from tests.vectors.ubatches import ubatch_of

SEQUENCES = st.integers(0, 3)


class PagesAgainstSequences(RuleBasedStateMachine):
    """Sequences reserve, write, fork, shrink and end; a store of cells shows whether their values survive."""

    @initialize(n_pages=st.integers(1, 9), page_cells=st.integers(1, 4))
    def begin(self, n_pages: int, page_cells: int) -> None:
        self.pages = Pages(n_pages, page_cells)
        self.tables = PageTables(self.pages)
        self.n_pages, self.page_cells = n_pages, page_cells
        self.cells: list[int | None] = [None] * (n_pages * page_cells)
        self.known: dict[int, list[int | None]] = {}  # sequence -> value of every position it has a cell for
        self.cached: list[int] = []  # pages held by nobody's table
        self.clock = 0

    def snapshot(self) -> tuple[object, ...]:
        counts = [self.pages.n_holders(page) for page in range(self.n_pages)]
        return counts, self.pages.n_free, {s: self.tables.pages_of(s) for s in range(4)}

    @rule(s=SEQUENCES, n=st.integers(0, 14))
    def reserve(self, s: int, n: int) -> None:
        before, had = self.snapshot(), len(self.tables.pages_of(s))
        needed = max(0, -(-n // self.page_cells) - had)
        room = self.pages.n_free
        added = self.tables.reserve(s, n)
        if needed > room:
            assert added is None
            assert self.snapshot() == before
            return
        assert added is not None
        assert len(added) == needed
        self.known.setdefault(s, []).extend([None] * (needed * self.page_cells))

    @rule(s=SEQUENCES, data=st.data())
    def write(self, s: int, data: st.DataObject) -> None:
        size = self.tables.capacity(s)
        if not size:
            return
        first = data.draw(st.integers(0, size - 1))
        stop = data.draw(st.integers(first, size))
        before = self.snapshot()
        copies = self.tables.make_writable(s, first, stop)
        if copies is None:
            assert self.snapshot() == before
            return
        for source, target in copies:
            width = self.page_cells
            self.cells[target * width : (target + 1) * width] = self.cells[source * width : (source + 1) * width]
        for position, cell in enumerate(self.tables.cells(s, first, stop).tolist(), start=first):
            self.clock += 1
            self.cells[cell] = self.known[s][position] = self.clock

    @rule(a=SEQUENCES, b=SEQUENCES, data=st.data())
    def share(self, a: int, b: int, data: st.DataObject) -> None:
        if a not in self.known or b in self.known:
            return
        n = data.draw(st.integers(0, self.tables.capacity(a)))
        self.tables.share(a, b, n)
        self.known[b] = self.known[a][: -(-n // self.page_cells) * self.page_cells]

    @rule(s=SEQUENCES, n=st.integers(0, 14))
    def trim(self, s: int, n: int) -> None:
        if s in self.known:
            self.tables.trim(s, n)
            del self.known[s][-(-n // self.page_cells) * self.page_cells :]

    @rule(s=SEQUENCES)
    def end(self, s: int) -> None:
        if s in self.known:
            self.tables.release(s)
            del self.known[s]

    @precondition(lambda self: not self.cached)
    @rule(s=SEQUENCES, n=st.integers(0, 3))
    def cache(self, s: int, n: int) -> None:
        """A prefix is kept by its pages alone; nobody may write to them meanwhile without a copy."""
        prefix = list(self.tables.pages_of(s)[:n])
        self.pages.hold(prefix)
        self.cached, self.cached_values = prefix, list(self.known.get(s, []))[: len(prefix) * self.page_cells]

    @rule(s=SEQUENCES)
    def adopt(self, s: int) -> None:
        if s not in self.known:
            self.tables.adopt(s, self.cached)
            self.known[s] = list(self.cached_values) if self.cached else []

    @rule()
    def drop_cached(self) -> None:
        self.pages.release(self.cached)
        self.cached = []

    @rule(page=st.integers(-2, 12))
    def misuse(self, page: int) -> None:
        """Freeing what is free, or what does not exist, is refused and changes nothing."""
        before = self.snapshot()
        if not 0 <= page < self.n_pages or self.pages.n_holders(page) == 0:
            for call in (self.pages.release, self.pages.hold):
                with pytest.raises(InternalError):
                    call([page])
        else:
            with pytest.raises(InternalError):
                self.pages.release([page] * (self.pages.n_holders(page) + 1))
        for s in set(range(4)) - set(self.known):
            with pytest.raises(InternalError):
                self.tables.release(s)
        assert self.snapshot() == before

    @invariant()
    def counts_are_exact_and_nothing_leaks(self) -> None:
        held = Counter(page for s in self.known for page in self.tables.pages_of(s)) + Counter(self.cached)
        assert [self.pages.n_holders(page) for page in range(self.n_pages)] == [held[p] for p in range(self.n_pages)]
        assert self.pages.n_free == self.n_pages - len(held)

    @invariant()
    def every_position_has_its_own_value(self) -> None:
        for s, values in self.known.items():
            assert self.tables.capacity(s) == len(values)
            found = [self.cells[cell] for cell in self.tables.cells(s, 0, len(values)).tolist()]
            assert [v for v, known in zip(found, values, strict=True) if known is not None] == [
                known for known in values if known is not None
            ]


TestPagesAgainstSequences = pytest.mark.soak(PagesAgainstSequences.TestCase)
TestPagesAgainstSequences.settings = settings(
    max_examples=soak(600), stateful_step_count=30, derandomize=True, deadline=None
)


def test_pages_are_granted_in_position_order_from_the_first() -> None:
    tables = PageTables(Pages(4, 16))
    assert tables.reserve(7, 17) == [0, 1]
    assert tables.reserve(7, 32) == []
    assert tables.reserve(8, 1) == [2]
    assert tables.cells(7, 14, 18).tolist() == [14, 15, 16, 17]
    assert tables.cells(8, 0, 2).tolist() == [32, 33]


def test_a_shared_prefix_is_stored_once_and_copied_by_the_first_to_write() -> None:
    pages = Pages(4, 4)
    tables = PageTables(pages)
    tables.reserve(0, 8)
    tables.share(0, 1, 6)
    assert (pages.n_free, pages.n_holders(1)) == (2, 2)
    assert tables.make_writable(1, 6, 7) == [PageCopy(1, 2)]
    assert tables.make_writable(0, 6, 8) == []  # alone now
    assert tables.make_writable(1, 0, 0) == []
    assert tables.pages_of(1) == (0, 2)


def test_a_page_comes_once_in_a_sequence() -> None:
    pages = Pages(2, 4)
    tables = PageTables(pages)
    tables.reserve(0, 4)
    with pytest.raises(InternalError, match="twice"):
        tables.adopt(1, [0, 0])
    assert pages.n_holders(0) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda tables: tables.cells(0, 0, 9),
        lambda tables: tables.cells(0, -1, 2),
        lambda tables: tables.cells(5, 0, 0),
        lambda tables: tables.make_writable(0, 7, 9),
        lambda tables: tables.share(0, 1, 9),
        lambda tables: tables.share(5, 1, 0),
        lambda tables: tables.share(0, 0, 4),
        lambda tables: tables.trim(5, 0),
        lambda tables: tables.trim(0, -1),
        lambda tables: tables.reserve(0, -1),
    ],
)
def test_what_is_not_reserved_is_refused(call: Callable[[PageTables], object]) -> None:
    pages = Pages(3, 4)
    tables = PageTables(pages)
    tables.reserve(0, 8)
    with pytest.raises(InternalError):
        call(tables)
    assert (tables.pages_of(0), pages.n_free) == ((0, 1), 1)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_pages_must_be_able_to_hold_something(sizes: tuple[int, int]) -> None:
    with pytest.raises(InternalError):
        Pages(*sizes)
    with pytest.raises(InternalError):
        Pages(2, 2).take(-1)


def test_paged_sequences_and_free_form_batches_share_one_cache() -> None:
    cache = KVCache(12, n_seq_max=4, unified=True)
    tables = PageTables(Pages(3, 4))
    for page in tables.reserve(0, 6) or []:
        cache.streams[0].withhold(np.arange(page * 4, page * 4 + 4))
    free_form = cache.find_slot(ubatch_of([[1]] * 4))
    assert free_form is not None
    assert free_form.streams[0].cells.tolist() == [8, 9, 10, 11]
    cache.apply(ubatch_of([[0]] * 6), Slot((StreamSlot(0, 0, tables.cells(0, 0, 6)),)))
    assert (cache.pos_min(0), cache.pos_max(0)) == (0, 5)
