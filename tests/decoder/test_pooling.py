"""Pooling: one vector per sequence, however the sequence is spread over ubatches (PL-1..12)."""

from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.decoder.pooling import Pooled, Pooling, pooling
from ostinato.errors import BadOption, InternalError
from ostinato.files.unpack import Floats
from tests.vectors.ubatches import ubatch_of

WIDTH = 5


class Token(NamedTuple):
    ids: list[int]
    position: int


tokens = st.builds(
    Token, st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), st.integers(0, 6)
)  # positions repeat and jump: pooling asks nothing of them
batches = st.lists(tokens, min_size=1, max_size=12)


def rows_for(n: int) -> Floats:
    return np.random.default_rng(n).standard_normal((n, WIDTH)).astype(np.float32)


def pooled_over(kind: Pooling, batch: list[Token], cuts: list[int], rows: Floats) -> Pooled:
    """The batch as ubatches that end at the cuts."""
    pooled = Pooled(kind)
    edges = [0, *cuts, len(batch)]
    for begin, end in pairwise(edges):
        if begin < end:
            part = batch[begin:end]
            pooled.add(ubatch_of([t.ids for t in part], [t.position for t in part]), rows[begin:end])
    return pooled


def obvious(kind: Pooling, batch: list[Token], rows: Floats) -> dict[int, Floats]:
    """Each sequence on its own, from the rules as written."""
    answers = {}
    for sequence in {s for token in batch for s in token.ids}:
        own = [(token.position, i) for i, token in enumerate(batch) if sequence in token.ids]
        if kind is Pooling.MEAN:
            answers[sequence] = np.stack([rows[i] for _, i in own]).mean(0)
        else:
            answers[sequence] = rows[(min if kind is Pooling.CLS else max)(own)[1]]
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Pooling.MEAN, Pooling.CLS, Pooling.LAST])
@settings(derandomize=True, deadline=None)
@given(data=st.data())
def test_pooling_does_not_depend_on_the_split(kind: Pooling, data: st.DataObject) -> None:  # PL-4..10
    batch = data.draw(batches)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch)), max_size=4)))
    rows = rows_for(len(batch))
    results = pooled_over(kind, batch, cuts, rows).results()
    expected = obvious(kind, batch, rows)
    assert results.keys() == expected.keys()
    for sequence, vector in expected.items():
        np.testing.assert_allclose(results[sequence], vector, rtol=1e-6, atol=1e-6)


def test_the_mean_has_the_same_bits_however_the_batch_was_split() -> None:  # PL-9, D-24
    batch = [Token([0], position) for position in range(64)]
    rows = rows_for(64)
    vectors = [pooled_over(Pooling.MEAN, batch, cuts, rows).results()[0] for cuts in ([], [1], [13, 40], [*range(64)])]
    assert all(np.array_equal(vectors[0], vector) for vector in vectors)


def test_rank_passes_the_chosen_row_through_the_head() -> None:  # PL-7, PL-3
    rows = rows_for(3)
    ubatch = ubatch_of([[0], [0], [2]])
    for rank_by, expected in ((Pooling.CLS, rows[0]), (Pooling.LAST, rows[1]), (Pooling.MEAN, rows[:2].mean(0))):
        pooled = Pooled(Pooling.RANK, head=lambda chosen: chosen[:2] * 10, rank_by=rank_by)
        pooled.add(ubatch, rows)
        results = pooled.results()
        assert set(results) == {0, 2}
        np.testing.assert_allclose(results[0], expected[:2] * 10, rtol=1e-6)


def test_a_head_that_fails_does_so_inside_its_ubatch() -> None:  # PL-7, CX-2
    def broken(chosen: Floats) -> Floats:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        Pooled(Pooling.RANK, head=broken).add(ubatch_of([[0]]), rows_for(1))


def test_pooling_none_keeps_no_vectors() -> None:  # PL-2, PL-11
    pooled = Pooled(Pooling.NONE)
    assert pooled.per_token
    pooled.add(ubatch_of([[0]]), rows_for(1))
    assert pooled.results() == {}
    assert pooled.get(0) is None


def test_a_sequence_that_was_not_in_the_batch_has_no_vector() -> None:  # PL-11
    pooled = Pooled(Pooling.LAST)
    pooled.add(ubatch_of([[3]]), rows_for(1))
    assert pooled.get(3) is not None
    assert pooled.get(0) is None


def test_a_new_batch_starts_empty() -> None:  # PL-3
    pooled = Pooled(Pooling.MEAN)
    pooled.add(ubatch_of([[0], [1]]), rows_for(2))
    pooled.clear()
    assert pooled.results() == {}
    pooled.add(ubatch_of([[0]]), np.ones((1, WIDTH), np.float32))
    assert np.array_equal(cast(Floats, pooled.get(0)), np.ones(WIDTH))


def test_a_chosen_row_is_a_copy() -> None:  # PL-9: the next ubatch may write where this one was
    pooled = Pooled(Pooling.CLS)
    rows = np.ones((1, WIDTH), np.float32)
    pooled.add(ubatch_of([[0]]), rows)
    rows[:] = 0
    assert np.array_equal(cast(Floats, pooled.get(0)), np.ones(WIDTH))


def test_vectors_are_float32_whatever_the_model_computes_in() -> None:
    for kind in (Pooling.MEAN, Pooling.CLS, Pooling.LAST):
        pooled = Pooled(kind)
        pooled.add(ubatch_of([[0], [0]]), np.ones((2, WIDTH), np.float16))
        assert cast(Floats, pooled.get(0)).dtype == np.float32


def test_pooling_that_was_never_settled_is_our_own_fault() -> None:  # PL-1
    with pytest.raises(InternalError):
        Pooled(cast(Pooling, None))
    with pytest.raises(InternalError):
        Pooled(Pooling.RANK, head=lambda rows: rows, rank_by=Pooling.NONE)


def test_a_head_goes_with_rank_and_only_with_it() -> None:  # PL-7
    with pytest.raises(InternalError):
        Pooled(Pooling.RANK)
    with pytest.raises(InternalError):
        Pooled(Pooling.MEAN, head=lambda rows: rows)


def test_a_row_is_needed_for_every_token() -> None:  # PL-12
    with pytest.raises(InternalError, match="2 rows to pool for 3 tokens"):
        Pooled(Pooling.MEAN).add(ubatch_of([[0], [0], [0]]), rows_for(2))


def test_an_unknown_pooling_is_refused_with_the_known_names() -> None:
    assert [pooling(name) for name in ("none", "mean", "cls", "last", "rank")] == list(Pooling)
    with pytest.raises(BadOption, match=r"unknown pooling 'men'; known: mean \(the nearest\), cls, last, none, rank"):
        pooling("men")
