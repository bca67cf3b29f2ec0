"""Pages are given only where everybody can still finish, shared where prompts begin alike, and never lost."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.cache.groups import one_group
from ostinato.cache.reserve import Holding, Lease, Reserve, all_can_finish

PAGE = 4


def reserve_of(n_pages: int, *, share_prefixes: bool) -> Reserve:
    return Reserve(one_group((0,), n_pages), PAGE, chunk_rows=8, share_prefixes=share_prefixes)


def holdings() -> st.SearchStrategy[list[Holding]]:
    shared = st.sets(st.integers(0, 3)).map(lambda pages: tuple(sorted(pages)))
    return st.lists(st.builds(Holding, st.integers(0, 6), shared, st.integers(0, 12)), max_size=5)


def by_trying_every_order(free: int, held: list[Holding]) -> bool:
    for order in permutations(held):
        left, open_still = free, list(order)
        while open_still and open_still[0].needs <= left:
            done = open_still.pop(0)
            still_held = {page for other in open_still for page in other.shared}
            left += done.alone + len(set(done.shared) - still_held)
        if not open_still:
            return True
    return False


@given(st.integers(0, 12), holdings())
@settings(max_examples=300, derandomize=True, deadline=None)
def test_the_bankers_rule_finds_an_order_exactly_where_there_is_one(free: int, held: list[Holding]) -> None:
    assert all_can_finish(free, held) == by_trying_every_order(free, held)


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(4, 20), st.booleans())
@settings(max_examples=150, derandomize=True, deadline=None)
def test_every_sequence_with_a_lease_finishes_and_no_page_is_lost(
    seed: int, n_pages: int, share_prefixes: bool
) -> None:
    """Sequences arrive, grow and end at random; at every moment at least one of them can go on."""
    chance = random.Random(seed)
    reserve = reserve_of(n_pages, share_prefixes=share_prefixes)
    # Of 2 letters, so that prompts begin alike.
    waiting = [
        ([chance.randrange(2)] * chance.randrange(1, n_pages * PAGE), chance.randrange(1, 30)) for _ in range(12)
    ]
    leased: list[tuple[Lease, int]] = []
    while waiting or leased:
        moved = False
        if waiting:
            prompt, most = waiting[0]
            n_positions = min(len(prompt) + most - 1, n_pages * PAGE)
            lease = reserve.open(prompt, n_positions, all_now=chance.random() < 0.3)
            if lease is not None:
                waiting.pop(0)
                assert reserve.share(lease, prompt) < len(prompt)
                if chance.random() < 0.8:
                    reserve.remember(lease, prompt, len(prompt))
                leased.append((lease, n_positions))
                moved = True
        for lease, n_positions in list(leased):
            if lease.short and chance.random() < 0.7:
                moved |= bool(reserve.extend(lease, chance.randrange(1, 4)))
            assert len(set(lease.pages)) == len(lease.pages)
            if not lease.short and (chance.random() < 0.5 or not moved):
                assert len(lease.pages) == -(-n_positions // PAGE)
                reserve.close(lease)
                leased.remove((lease, n_positions))
                moved = True
        if not moved:  # by chance, or a deadlock? at least one lease must be able to grow or be whole
            assert any(reserve.extend(lease, 1) or not lease.short for lease, _ in leased)
    assert reserve.n_available == n_pages
    assert reserve.open([9] * (n_pages * PAGE), n_pages * PAGE, all_now=True) is not None


def test_pages_of_a_prompt_that_others_read_are_not_given_away() -> None:
    reserve = reserve_of(6, share_prefixes=True)
    prompt = list(range(9))  # two whole pages and one token
    first = reserve.open(prompt, 12, all_now=True)
    assert first is not None
    reserve.remember(first, prompt, 9)
    second = reserve.open(prompt, 12, all_now=True)
    assert second is not None
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    reserve.close(first)
    assert reserve.n_available == 3
    assert reserve.open([50] * 16, 16, all_now=True) is None
    third = reserve.open([50] * 12, 12, all_now=True)
    assert third is not None
    assert not set(third.pages) & set(second.pages)


def test_the_least_recently_used_prefix_goes_first_and_its_last_page_before_its_first() -> None:
    reserve = reserve_of(6, share_prefixes=True)

    def ask(letter: int) -> int:
        """Run a prompt of two whole pages and a token; how much of it was there."""
        prompt = [letter] * 9
        lease = reserve.open(prompt, 9, all_now=True)
        assert lease is not None
        cached = reserve.share(lease, prompt)
        reserve.remember(lease, prompt, 9)
        reserve.close(lease)
        return cached

    assert [ask(1), ask(2)] == [0, 0]
    assert ask(1) == 8  # and is now the one used last
    assert reserve.n_cached == 4
    ask(3)  # three pages where two are free
    assert reserve.n_cached == 5
    assert ask(1) == 8
    assert ask(2) == 4  # its first page was left, its last was not


def test_a_sequence_that_began_early_shares_what_was_computed_meanwhile() -> None:
    reserve = reserve_of(8, share_prefixes=True)
    prompt = list(range(10))
    first, second = (reserve.open(prompt, 10, all_now=True) for _ in range(2))
    assert first is not None
    assert second is not None
    assert reserve.n_available == 2
    reserve.remember(first, prompt, 10)
    assert reserve.share(second, prompt) == 8
    assert second.pages[:2] == first.pages[:2]
    assert reserve.n_available == 4
    reserve.close(first)
    reserve.close(second)
    assert reserve.n_available == 8


def test_without_shared_prefixes_nothing_is_kept() -> None:
    reserve = reserve_of(4, share_prefixes=False)
    lease = reserve.open([1] * 9, 9, all_now=True)
    assert lease is not None
    reserve.remember(lease, [1] * 9, 9)
    assert reserve.share(lease, [1] * 9) == 0
    assert reserve.n_cached == 0


def test_what_is_kept_can_be_leased_again_and_costs_no_other_sequence_a_page() -> None:
    reserve = reserve_of(6, share_prefixes=True)
    prompt = [1] * 9
    lease = reserve.open(prompt, 16, all_now=True)
    assert lease is not None
    reserve.remember(lease, prompt, 9)
    pages = list(lease.pages)
    reserve.keep(lease, 10, 10)
    kept = reserve.kept(10)
    assert kept is not None
    assert [list(run.pages) for run in kept] == [pages[:3]]
    assert reserve.n_available == 6
    assert [reserve.is_kept_alone(position) for position in (0, 4, 9)] == [False, False, True]
    again = reserve.open([1] * 11, 11, all_now=True, begin=kept)
    assert again is not None
    assert again.pages == pages[:3]
    reserve.keep(again, 11, 11)
    everything = reserve.open([2] * 24, 24, all_now=True)
    assert everything is not None
    assert reserve.kept(1) is None
    assert reserve.n_cached == 0
    reserve.close(everything)
    assert reserve.n_available == 6


def test_of_prompts_that_came_once_the_recent_ones_wait_and_what_was_reused_stays() -> None:
    reserve = Reserve(one_group((0,), 64), PAGE, chunk_rows=8, share_prefixes=True, recent=3)

    def ask(*prompt: int) -> int:
        lease = reserve.open(prompt, len(prompt), all_now=True)
        assert lease is not None
        cached = reserve.share(lease, prompt)
        for n_done in (4, 8, len(prompt)):  # chunk by chunk
            reserve.remember(lease, prompt, n_done)
        reserve.close(lease)
        return cached

    common = [1, 2, 3, 4]
    assert ask(*common, *[5] * 5) == 0
    assert ask(*common, *[6] * 5) == 4
    for letter in range(10, 20):
        assert ask(*[letter] * 9) == 0
    assert reserve.n_cached == 1 + 3 * 2  # the common page, and two of each of the last three
    assert ask(*common, *[5] * 5) == 4
    assert ask(*[19] * 9) == 8
    assert ask(*[10] * 9) == 0


def test_pages_of_a_prompt_that_still_runs_are_not_given_up_however_many_came_after_it() -> None:
    reserve = Reserve(one_group((0,), 64), PAGE, chunk_rows=8, share_prefixes=True, recent=2)
    running, prompt = reserve.open([7] * 9, 9, all_now=True), [7] * 9
    assert running is not None
    reserve.remember(running, prompt, 9)
    for letter in range(10, 20):
        lease = reserve.open([letter] * 9, 9, all_now=True)
        assert lease is not None
        reserve.remember(lease, [letter] * 9, 9)
        reserve.close(lease)
    again = reserve.open(prompt, 9, all_now=True)
    assert again is not None
    assert again.pages[:2] == running.pages[:2]
    for lease in (running, again):
        reserve.close(lease)
