"""Snapshots of states: found by the tokens before them, bounded in bytes, the least recently used goes first."""

import numpy as np

from ostinato.cache.snapshots import StateSnapshot, StateSnapshots


def snapshot(*tokens: int, n_bytes: int = 100, rope_set: int = 0) -> StateSnapshot:
    return StateSnapshot(tokens, rope_set, (np.zeros((1, n_bytes), np.uint8),))


def found(kept: StateSnapshots, *tokens: int, rope_set: int = 0) -> list[tuple[int, ...]]:
    return [one.tokens for one in kept.beginnings(tokens, rope_set)]


def test_the_longest_beginning_comes_first_and_leaves_a_token_to_compute() -> None:
    kept = StateSnapshots(1000)
    for tokens in ((1, 2), (1, 2, 3, 4), (1, 2, 5), (9,)):
        kept.add(snapshot(*tokens))
    assert found(kept, 1, 2, 3, 4, 7) == [(1, 2, 3, 4), (1, 2)]
    assert found(kept, 1, 2, 3, 4) == [(1, 2)]
    assert found(kept, 1, 2, 3, 4, 7, rope_set=1) == []
    assert kept.has([1, 2, 5], 0)
    assert not kept.has([1, 2, 5], 1)


def test_bytes_are_bounded_and_the_least_recently_used_goes_first() -> None:
    kept = StateSnapshots(300)
    first, second, third = (snapshot(n) for n in (1, 2, 3))
    for one in (first, second, third):
        kept.add(one)
    kept.use(first)
    kept.add(snapshot(4))
    assert (len(kept), kept.n_bytes) == (3, 300)
    assert not kept.has([2], 0)
    kept.add(snapshot(5, n_bytes=250))
    assert (len(kept), kept.n_bytes, kept.has([5], 0)) == (1, 250, True)


def test_one_that_is_too_large_is_not_kept_and_a_second_of_the_same_tokens_takes_the_place_of_the_first() -> None:
    kept = StateSnapshots(300)
    kept.add(snapshot(1, n_bytes=301))
    assert len(kept) == 0
    kept.add(snapshot(1, n_bytes=200))
    kept.add(snapshot(1, n_bytes=100))
    assert (len(kept), kept.n_bytes) == (1, 100)
