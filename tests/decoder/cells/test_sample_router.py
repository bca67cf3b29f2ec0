"""The sample router: who is sampled, what is refused, which rows are filled, what a failed batch leaves (SR-1..11)."""

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.decoder.batch.batch import Batch, SeqMasks
from ostinato.decoder.cells.output import Absence, Outputs, Sampled
from ostinato.decoder.cells.sample_router import BackendSampler, SampleRouter
from ostinato.errors import InternalError, InvalidBatch
from tests.decoder.cells.samplers import GreedySampler, TopKSampler
from tests.vectors.ubatches import ubatch_of

N_VOCAB = 8


@dataclass
class Remembering:
    """A sampler with state: what it has been told, in order."""

    seen: list[str] = field(default_factory=list)
    supported: bool = True
    fails: bool = False

    def begin(self) -> None:
        if self.fails:
            raise ValueError("not today")
        self.seen.append("begin")

    def apply(self, logits: Tensor) -> Sampled:
        token = int(logits.argmax())
        self.seen.append(f"row {token}")
        return Sampled(token=token)

    def snapshot(self) -> list[str]:
        return list(self.seen)

    def restore(self, snapshot: Any) -> None:
        self.seen = list(snapshot)


def router_with(samplers: dict[int, BackendSampler]) -> SampleRouter:
    router = SampleRouter()
    for sequence, sampler in samplers.items():
        assert router.register(sequence, sampler)
    return router


def peaks(*tokens: int) -> Tensor:
    """Logits rows whose largest entries are at these tokens."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), N_VOCAB).float()


def sampling_outputs(n: int) -> Outputs:
    outputs = Outputs(n_vocab=N_VOCAB, n_embd_out=4, n_batch=16, n_seq_max=1)
    outputs.reserve(n, embeddings=False, sampling=True)
    return outputs


# Registry


def test_registering_and_removing_tell_of_real_changes_only() -> None:  # SR-1, SR-2
    changes: list[int] = []
    router = SampleRouter(on_change=lambda: changes.append(1))
    greedy = GreedySampler()
    for sampler, n_changes in ((None, 0), (greedy, 1), (greedy, 1), (TopKSampler(2), 2), (None, 3), (None, 3)):
        assert router.register(0, sampler)
        assert len(changes) == n_changes


def test_a_sampler_that_cannot_run_in_the_graph_removes_the_earlier_one() -> None:  # SR-1, SR-2
    changes: list[int] = []
    router = SampleRouter(on_change=lambda: changes.append(1))
    assert not router.register(0, Remembering(supported=False))
    assert changes == []
    assert router.register(0, GreedySampler())
    assert not router.register(0, TopKSampler(0))
    assert router.samplers == frozenset()
    assert len(changes) == 2


@pytest.mark.parametrize("sequence", [-1, 4])
def test_a_sequence_that_cannot_exist_gets_no_sampler(sequence: int) -> None:  # G-6
    with pytest.raises(InvalidBatch) as refusal:
        SampleRouter(n_seq_limit=4).register(sequence, GreedySampler())
    assert refusal.value.reason == "seq_range"


# Limit


def refusal_of(router: SampleRouter, batch: Batch, *, limit: int, output_all: bool = False) -> InvalidBatch | None:
    try:
        router.check_limit(batch, limit=limit, output_all=output_all)
    except InvalidBatch as error:
        return error
    return None


def test_the_refusal_names_the_first_token_too_many() -> None:  # SR-4
    router = router_with({0: GreedySampler(), 1: GreedySampler()})
    batch = Batch(token=[0] * 5, seq_id=[[1], [0], [0], [1], [0]], output=[1, 1, 0, 1, 1])
    error = refusal_of(router, batch, limit=1)
    assert error is not None
    assert (error.reason, error.index) == ("seq_output_limit", 3)
    assert refusal_of(router, batch, limit=2) is None


def test_ids_out_of_range_are_skipped_by_the_limit() -> None:  # SR-4
    router = router_with({0: GreedySampler()})
    batch = Batch(token=[0] * 3, seq_id=[[-1], [999], [0]], output=[1, 1, 1])
    assert refusal_of(router, batch, limit=1) is None


@pytest.mark.parametrize(
    "batch",
    [
        Batch(token=[0] * 3, seq_id=[[0]] * 2, output=[1, 1, 1]),
        Batch(token=[0] * 3, output=[1, 1]),
        Batch(token=[0] * 3, n_seq_id=[1, 1, 1], seq_id=[0, 0], output=[1, 1, 1]),
        Batch(token=[0] * 3, seq_id=[0, 0, 0], output=[1, 1, 1]),
        Batch(token=[0] * 3, seq_id=cast(Any, [["a"], [0], [0]]), output=[1, 1, 1]),
        Batch(token=[0] * 3, output=cast(Any, [[1], [1, 1], 1])),
    ],
)
def test_a_batch_that_does_not_fit_together_is_left_to_the_sanitizer(batch: Batch) -> None:  # SR-4, G-7
    assert refusal_of(router_with({0: GreedySampler()}), batch, limit=1) is None


def test_the_limit_reads_ids_in_every_form() -> None:  # SR-4, S-19
    router = router_with({2: GreedySampler()})
    for batch in (
        Batch(token=[0] * 2, seq_id=[[0, 2], [2]], output=[1, 1]),
        Batch(token=[0] * 2, seq_id=np.array([0, 2, 2]), n_seq_id=np.array([2, 1]), output=np.array([True, True])),
        Batch(token=[0] * 2, seq_id=SeqMasks([0b101, 0b100]), output=[1, 1]),
    ):
        error = refusal_of(router, batch, limit=1)
        assert error is not None
        assert error.index == 1


@pytest.mark.slow
@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(-1, 5), min_size=1, max_size=3, unique=True), st.booleans()), min_size=1),
    st.sets(st.integers(0, 5)),
    st.integers(1, 3),
    st.booleans(),
)
def test_the_limit_is_that_of_a_walk_over_the_tokens(
    tokens: list[tuple[list[int], bool]], sampled: set[int], limit: int, output_all: bool
) -> None:  # SR-4
    counts: dict[int, int] = {}
    first = None
    for index, (ids, flag) in enumerate(tokens):
        for s in ids if flag or output_all else []:
            counts[s] = counts.get(s, 0) + 1
            if first is None and s in sampled and counts[s] > limit:
                first = index
    router = router_with({s: GreedySampler() for s in sampled})
    batch = Batch(token=[0] * len(tokens), seq_id=[ids for ids, _ in tokens], output=[flag for _, flag in tokens])
    error = refusal_of(router, batch, limit=limit, output_all=output_all)
    assert (None if error is None else error.index) == first


# Rows


def test_a_sampler_gets_its_rows_in_order_and_fills_the_global_ones() -> None:  # SR-3, SR-5, SR-6
    sampler = Remembering()
    router = router_with({1: sampler})
    outputs = sampling_outputs(5)
    router.run(ubatch_of([[1], [0], [1], [1]], output=[1, 1, 0, 1]), peaks(3, 4, 5), outputs, first_row=2)
    outputs.publish([0, 1, 2, 3, 4], 5)
    assert outputs.sampled_tokens() == (None, None, 3, None, 5)
    assert sampler.seen == ["row 3", "row 5"]


def test_a_shared_token_is_sampled_by_its_primary_sequence() -> None:  # SR-5, SR-7
    first, second = Remembering(), Remembering()
    router = router_with({0: first, 1: second})
    outputs = sampling_outputs(1)
    ubatch = ubatch_of([[1, 0]])
    assert router.wants_raw(ubatch)
    router.run(ubatch, peaks(2), outputs, first_row=0)
    assert (first.seen, second.seen) == ([], ["row 2"])


def test_samplers_without_rows_do_nothing() -> None:  # SR-8
    sampler = Remembering()
    outputs = sampling_outputs(1)
    router_with({3: sampler}).run(ubatch_of([[0]]), peaks(2), outputs, first_row=0)
    outputs.publish([0], 1)
    assert sampler.seen == []
    assert outputs.sampled_token(0).reason is Absence.NO_SAMPLE


def test_top_k_keeps_logits_and_candidates_and_chooses_nothing() -> None:  # SR-6, SR-9
    router = router_with({0: TopKSampler(3)})
    outputs = sampling_outputs(1)
    router.run(ubatch_of([[0]]), torch.arange(N_VOCAB).float().unsqueeze(0), outputs, first_row=0)
    outputs.publish([0], 1)
    assert outputs.counts(0) == (3, 0, 3)
    assert outputs.sampled_token(0).value is None
    assert outputs.candidates(0).tolist() == [7, 6, 5]
    assert cast(Tensor, outputs.sampled_logits(0).value).tolist() == [7, 6, 5]
    assert outputs.sampled_probs(0).reason is Absence.NO_SAMPLE


def test_top_k_of_more_than_the_vocabulary_keeps_all_of_it() -> None:  # SR-6
    assert len(cast(Tensor, TopKSampler(100).apply(torch.zeros(N_VOCAB)).logits)) == N_VOCAB


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True), st.booleans()), min_size=1),
    st.sets(st.integers(0, 3)),
)
def test_raw_logits_are_wanted_exactly_when_an_output_token_needs_them(
    tokens: list[tuple[list[int], bool]], sampled: set[int]
) -> None:  # SR-7
    router = router_with({s: GreedySampler() for s in sampled})
    ubatch = ubatch_of([ids for ids, _ in tokens], output=[flag for _, flag in tokens])
    wanted = any(flag and (len(ids) > 1 or not set(ids) <= sampled) for ids, flag in tokens)
    assert router.wants_raw(ubatch) == wanted


# Transactions


def test_a_failed_batch_leaves_samplers_as_they_were() -> None:  # SR-11, D-14
    sampler = Remembering(["earlier"])
    router = router_with({0: sampler, 1: sampler})
    router.begin()
    router.run(ubatch_of([[0], [1]]), peaks(1, 2), sampling_outputs(2), first_row=0)
    assert sampler.seen == ["earlier", "begin", "row 1", "row 2"]  # told once, though it serves two sequences
    router.undo()
    assert sampler.seen == ["earlier"]
    router.undo()
    assert sampler.seen == ["earlier"]


def test_a_batch_that_ran_is_remembered() -> None:  # SR-11
    sampler = Remembering()
    router = router_with({0: sampler})
    router.begin()
    router.run(ubatch_of([[0]]), peaks(1), sampling_outputs(1), first_row=0)
    router.commit()
    router.undo()
    assert sampler.seen == ["begin", "row 1"]


def test_a_sampler_that_cannot_begin_undoes_the_others() -> None:  # SR-11
    first, broken = Remembering(), Remembering(fails=True)
    router = router_with({0: first, 1: broken})
    with pytest.raises(ValueError, match="not today"):
        router.begin()
    assert first.seen == []
    assert router.register(1, None)  # and the router is usable


def test_nothing_begins_or_changes_inside_a_batch() -> None:  # D-20
    router = router_with({0: GreedySampler()})
    router.begin()
    with pytest.raises(InternalError):
        router.begin()
    with pytest.raises(InternalError):
        router.register(1, GreedySampler())
    router.commit()
    router.begin()
