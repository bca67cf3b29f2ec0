"""The graph scheduler: reserved once, built per shape, reused while the shape stays (GS-1..5)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.graphs import GraphKey, GraphScheduler, Setup
from ostinato.decoder.cells.settings import settle
from ostinato.errors import Aborted, AllocationFailed, ComputeFailed, InternalError, OstinatoError
from tests.vectors.ubatches import ubatch_of

LIMITS = settle(n_ctx=512, n_ubatch=64, n_seq_max=4, n_outputs_max=16)
PLAIN = Setup()
SAMPLED = Setup(samplers=frozenset({0}))
EQUAL = ubatch_of([[0], [1]], [0, 0], n_seqs=2, equal_seqs=True)


def accept(worst: GraphKey) -> None:
    return


def scheduler(
    build: Callable[[GraphKey], object] = lambda key: object(), reserve: Callable[[GraphKey], None] = accept
) -> GraphScheduler[object]:
    return GraphScheduler("decoder", build, reserve)


def ready() -> GraphScheduler[object]:
    made = scheduler()
    made.ensure_reserved(made.worst_key(LIMITS, PLAIN, memory=(512, 1)))
    return made


def key_of(graphs: GraphScheduler[object], ubatch: Ubatch, setup: Setup = PLAIN, **changes: Any) -> GraphKey:
    arguments = {"n_outputs": ubatch.n_outputs, "memory": (256, 1), **changes}
    return graphs.key(ubatch, setup, **arguments)


def counters(graphs: GraphScheduler[object]) -> tuple[int, int, int]:
    return graphs.n_reserved, graphs.n_built, graphs.n_reused


def test_a_second_batch_of_the_same_shape_reserves_and_builds_nothing() -> None:  # GS-2, GS-4
    graphs = ready()
    first = graphs.prepare(key_of(graphs, ubatch_of([[0]], [0])))
    assert counters(graphs) == (1, 1, 0)
    assert not graphs.ensure_reserved(graphs.worst_key(LIMITS, PLAIN, memory=(512, 1)))
    second = graphs.prepare(key_of(graphs, ubatch_of([[1]], [7])))  # another sequence at another position
    assert counters(graphs) == (1, 1, 1)
    assert second.graph is first.graph
    assert (first.reused, second.reused) == (False, True)


def test_the_worst_case_is_as_large_as_the_limits_allow() -> None:  # GS-1
    graphs = scheduler()
    worst = graphs.worst_key(LIMITS, PLAIN, memory=(512, 1))
    assert (worst.n_tokens, worst.n_seqs, worst.n_outputs) == (64, 4, 16)
    small = graphs.worst_key(replace(LIMITS, n_ctx=8, n_outputs_max=99), PLAIN, memory=(8, 1))
    assert (small.n_tokens, small.n_outputs) == (8, 8)


def test_a_reservation_is_due_at_first_and_after_each_request() -> None:  # GS-1, UP-8
    reserved: list[GraphKey] = []
    graphs = scheduler(reserve=reserved.append)
    worst = graphs.worst_key(LIMITS, PLAIN, memory=(512, 1))
    assert graphs.ensure_reserved(worst)
    assert not graphs.ensure_reserved(worst)
    graphs.request_reservation()
    graphs.request_reservation()
    assert graphs.reservation_due
    assert graphs.ensure_reserved(worst)
    assert reserved == [worst, worst]
    assert graphs.n_reserved == 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((ubatch_of([[0]]), PLAIN), (ubatch_of([[0], [0]]), PLAIN), id="n_tokens"),
        pytest.param((ubatch_of([[0], [0]]), PLAIN), (ubatch_of([[0], [1]]), PLAIN), id="n_seqs_unq"),
        pytest.param(
            (ubatch_of([[0], [1]]), PLAIN), (ubatch_of([[0], [1]], n_seqs=2, equal_seqs=True), PLAIN), id="equal flag"
        ),
        pytest.param(
            (ubatch_of([[0, 1]] * 2, n_seqs=1, equal_seqs=True), PLAIN),
            (ubatch_of([[0, 1]] * 2, n_seqs=2, equal_seqs=True), PLAIN),
            id="n_seqs and n_seq_tokens",
        ),
        pytest.param(
            (EQUAL, PLAIN), (ubatch_of([[1], [2]], [0, 0], n_seqs=2, equal_seqs=True), PLAIN), id="ids of equal"
        ),
        pytest.param((EQUAL, PLAIN), (replace(EQUAL, token=None, embd=np.ones((2, 4))), PLAIN), id="input"),
        pytest.param((EQUAL, PLAIN), (EQUAL, Setup(settings="not causal")), id="settings"),
        pytest.param((EQUAL, PLAIN), (EQUAL, Setup(adapters=("one",))), id="adapters"),
        pytest.param((EQUAL, PLAIN), (EQUAL, SAMPLED), id="samplers"),
        pytest.param(
            (ubatch_of([[0], [1]], output=[1, 0]), SAMPLED), (ubatch_of([[0], [1]], output=[0, 1]), SAMPLED), id="flags"
        ),
        pytest.param((ubatch_of([[0, 1]]), SAMPLED), (ubatch_of([[1, 0]]), SAMPLED), id="primary ids"),
    ],
)
def test_a_graph_is_not_reused_for_another_shape(before: tuple[Ubatch, Setup], after: tuple[Ubatch, Setup]) -> None:
    graphs = ready()  # GS-2
    for ubatch, setup in (before, after):
        assert not graphs.prepare(key_of(graphs, ubatch, setup, n_outputs=1)).reused
    assert counters(graphs) == (1, 2, 0)


@pytest.mark.parametrize("changes", [{"n_outputs": 2}, {"memory": (512, 1)}, {"memory": (256, 2)}])
def test_output_counts_and_memory_shapes_are_part_of_the_shape(changes: dict[str, Any]) -> None:  # GS-2
    graphs = ready()
    graphs.prepare(key_of(graphs, EQUAL, n_outputs=1))
    assert not graphs.prepare(key_of(graphs, EQUAL, **{"n_outputs": 1, **changes})).reused


def test_without_samplers_flags_and_ids_do_not_matter() -> None:  # GS-2
    graphs = ready()
    graphs.prepare(key_of(graphs, ubatch_of([[0], [1]], output=[1, 0]), n_outputs=1))
    assert graphs.prepare(key_of(graphs, ubatch_of([[3], [2]], output=[0, 1]), n_outputs=1)).reused


def test_only_the_last_graph_is_kept() -> None:  # GS-2
    graphs = ready()
    one, two = key_of(graphs, ubatch_of([[0]])), key_of(graphs, ubatch_of([[0], [0]]))
    assert [graphs.prepare(key).reused for key in (one, two, one, one)] == [False, False, False, True]


@pytest.mark.parametrize("how", ["invalidate", "request_reservation"])
def test_a_graph_that_was_dropped_is_built_again(how: str) -> None:  # GS-3
    graphs = ready()
    key = key_of(graphs, EQUAL)
    graphs.prepare(key)
    getattr(graphs, how)()
    graphs.ensure_reserved(graphs.worst_key(LIMITS, PLAIN, memory=(512, 1)))
    assert not graphs.prepare(key).reused


@pytest.mark.parametrize(
    ("failure", "seen"),
    [
        (MemoryError(), AllocationFailed),
        (ValueError("no such op"), ComputeFailed),
        (Aborted("stopped", reason="abort"), Aborted),
        (InternalError("a bug"), InternalError),
    ],
)
def test_failures_have_a_class_and_leave_the_work_to_be_done_again(
    failure: Exception, seen: type[OstinatoError]
) -> None:  # GS-3, G-1
    def broken(key: GraphKey) -> None:
        raise failure

    graphs = scheduler(reserve=broken)
    worst = graphs.worst_key(LIMITS, PLAIN, memory=(512, 1))
    with pytest.raises(seen):
        graphs.ensure_reserved(worst)
    assert graphs.reservation_due
    graphs = scheduler(build=broken)
    graphs.ensure_reserved(worst)
    for _ in range(2):
        with pytest.raises(seen):
            graphs.prepare(key_of(graphs, EQUAL))
    assert counters(graphs) == (1, 0, 0)


def test_nothing_runs_before_the_worst_case_is_reserved() -> None:  # GS-1
    graphs = scheduler()
    with pytest.raises(InternalError, match="before the worst case"):
        graphs.prepare(key_of(graphs, EQUAL))


def test_decoder_and_encoder_keep_graphs_of_their_own_type() -> None:  # GS-5
    encoder = GraphScheduler[object]("encoder", lambda key: key, accept)
    decoder = ready()
    assert (encoder.graph_type, decoder.graph_type) == ("encoder", "decoder")
    assert key_of(encoder, EQUAL) != key_of(decoder, EQUAL)
