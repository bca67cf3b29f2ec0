"""Pages against a plain oracle: who holds which is counted anew, and nothing leaks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ostinato.cache.groups import page_groups
from ostinato.cache.kv_bytes import page_bytes
from ostinato.cache.pages import Pages
from ostinato.errors import InternalError
from ostinato.models.named_shapes import named_shape
from tests.counts import soak

HOLDERS = st.integers(0, 3)


class PagesAgainstHolders(RuleBasedStateMachine):
    """Holders take pages, share those of others, and give some back."""

    @initialize(n_pages=st.integers(1, 9))
    def begin(self, n_pages: int) -> None:
        self.pages, self.n_pages = Pages(n_pages, 4), n_pages
        self.held: dict[int, list[int]] = {holder: [] for holder in range(4)}

    def counts(self) -> list[int]:
        return [self.pages.n_holders(page) for page in range(self.n_pages)]

    @rule(holder=HOLDERS, n=st.integers(0, 5))
    def take(self, holder: int, n: int) -> None:
        before, room = self.counts(), self.pages.n_free
        taken = self.pages.take(n)
        if n > room:
            assert taken is None
            assert self.counts() == before
            return
        assert taken is not None
        assert len(set(taken)) == n
        assert all(before[page] == 0 for page in taken)
        self.held[holder] += taken

    @rule(a=HOLDERS, b=HOLDERS, n=st.integers(0, 5))
    def share(self, a: int, b: int, n: int) -> None:
        some = self.held[a][:n]
        self.pages.hold(some)
        self.held[b] = [*self.held[b], *some]

    @rule(holder=HOLDERS, n=st.integers(0, 5))
    def release(self, holder: int, n: int) -> None:
        given_up, self.held[holder] = self.held[holder][:n], self.held[holder][n:]
        freed = self.pages.release(given_up)
        still = {page for pages in self.held.values() for page in pages}
        assert sorted(freed) == sorted(set(given_up) - still)

    @rule(page=st.integers(-2, 12))
    def misuse(self, page: int) -> None:
        """Freeing what is free, or what does not exist, is refused and changes nothing."""
        before, room = self.counts(), self.pages.n_free
        if not 0 <= page < self.n_pages or self.pages.n_holders(page) == 0:
            for call in (self.pages.release, self.pages.hold):
                with pytest.raises(InternalError):
                    call([page])
        else:
            with pytest.raises(InternalError):
                self.pages.release([page] * (self.pages.n_holders(page) + 1))
        assert (self.counts(), self.pages.n_free) == (before, room)

    @invariant()
    def counts_are_exact_and_nothing_leaks(self) -> None:
        held = Counter(page for pages in self.held.values() for page in pages)
        assert self.counts() == [held[page] for page in range(self.n_pages)]
        assert self.pages.n_free == self.n_pages - len(held)


TestPagesAgainstHolders = pytest.mark.soak(PagesAgainstHolders.TestCase)
TestPagesAgainstHolders.settings = settings(
    max_examples=soak(600), stateful_step_count=30, derandomize=True, deadline=None
)


def test_pages_are_granted_from_the_first() -> None:
    pages = Pages(4, 16)
    assert (pages.take(2), pages.take(1), pages.take(2)) == ([0, 1], [2], None)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_pages_must_be_able_to_hold_something(sizes: tuple[int, int]) -> None:
    with pytest.raises(InternalError):
        Pages(*sizes)
    with pytest.raises(InternalError):
        Pages(2, 2).take(-1)


def test_pages_that_were_written_are_granted_again_before_those_that_were_only_promised() -> None:
    pages = Pages(64, 16)
    for _ in range(3):
        promised = pages.take(40)
        assert promised is not None
        assert promised[:2] == [0, 1]  # what a short answer writes
        pages.release(promised)


def test_layers_that_read_anothers_keys_and_values_have_no_pages() -> None:
    plain = named_shape("tiny").with_attention(window=(None, 64))
    whole = replace(plain, layers=plain.layers * 2)
    shared = whole.with_attention(kv_from=(None, None, 0, 1))
    sizes = {"context": 256, "n_pages": 8, "page_tokens": 16, "chunk_rows": 64}
    layers = [[group.layers for group in page_groups(shape, **sizes)] for shape in (whole, shared)]
    assert layers == [[(0, 2), (1, 3)], [(0,), (1,)]]
    assert 2 * page_bytes(shared, "f16", 16) == page_bytes(whole, "f16", 16)
