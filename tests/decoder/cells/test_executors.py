"""One ubatch through its stages: order, classes of failure, roll back, and where the results go (UX-1..3, CX-1..7)."""

from typing import cast

import pytest
import torch
from torch import Tensor

from ostinato.decoder.cells.compute_executor import Computed, ComputeExecutor, Extractor
from ostinato.decoder.cells.output import Absence, Outputs
from ostinato.decoder.cells.sample_router import SampleRouter
from ostinato.decoder.cells.ubatch_executor import Executed, UbatchExecutor
from ostinato.decoder.pooling import Pooled, Pooling
from ostinato.errors import Aborted, AllocationFailed, ComputeFailed, InternalError
from tests.decoder.cells.samplers import GreedySampler
from tests.vectors.compute_executor import Recorder
from tests.vectors.ubatch_executor import Memory
from tests.vectors.ubatches import ubatch_of

N_VOCAB, N_EMBD = 8, 4
COMPUTING = ComputeExecutor(batch=4, single=1)


# Ubatch executor


def test_a_ubatch_gives_its_rows_and_the_cells_it_looked_at() -> None:  # UX-3
    memory, executor = Memory(), UbatchExecutor()
    assert executor.execute(memory, lambda: 3, expected=3) == Executed(rows=3, n_visible=256)
    assert (memory.n_applied, memory.n_roll_backs, executor.n_roll_backs) == (1, 0, 0)


def test_memory_is_applied_before_anything_is_computed() -> None:  # UX-1, D-26
    memory = Memory()

    def compute() -> int:
        assert memory.n_applied == 1
        return 0

    UbatchExecutor().execute(memory, compute, expected=0)


def raising(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    "failure",
    [
        Aborted("stopped", reason="abort"),
        AllocationFailed("no room", reason="graph"),
        InternalError("a row outside its buffer"),
        KeyboardInterrupt(),
    ],
)
def test_the_first_failure_is_what_the_caller_sees(failure: BaseException) -> None:  # UX-2
    memory = Memory()
    with pytest.raises(type(failure)) as seen:
        UbatchExecutor().execute(memory, lambda: raising(failure), expected=1)
    assert seen.value is failure
    assert memory.n_roll_backs == 1


def test_a_roll_back_that_fails_carries_both_failures() -> None:  # UX-2
    stopped = Aborted("stopped by hand", reason="abort")
    with pytest.raises(InternalError, match=r"still gone.*stopped by hand") as fatal:
        UbatchExecutor().execute(Memory(fail_roll_back=True), lambda: raising(stopped), expected=1)
    both = fatal.value.__cause__
    assert isinstance(both, BaseExceptionGroup)
    assert both.exceptions[0] is stopped
    assert isinstance(both.exceptions[1], ValueError)


def test_memory_that_cannot_be_applied_is_a_failed_computation() -> None:  # UX-1, D-21
    memory = Memory(fail_apply=True)
    with pytest.raises(ComputeFailed, match="the cells are gone"):
        UbatchExecutor().execute(memory, lambda: raising(AssertionError("must not run")), expected=1)
    assert memory.n_roll_backs == 1


# Compute executor


def test_the_stages_say_how_many_rows_and_whether_the_graph_was_there() -> None:  # CX-1
    for reused in (False, True):
        done = COMPUTING.execute(ubatch_of([[0], [0]], output=[0, 1]), Recorder(None, None, reused))
        assert (done.rows, done.reused) == (1, reused)


def test_one_token_has_a_thread_setting_of_its_own() -> None:  # CX-4
    stages = Recorder(None, None, reused=False)
    for n_tokens in (1, 2, 5):
        COMPUTING.execute(ubatch_of([[0]] * n_tokens), stages)
    assert stages.n_threads == [1, 4, 4]


@pytest.mark.parametrize("stage", ["prepare", "alloc", "bind", "run", "extract"])
def test_a_failed_stage_drops_the_stored_graph(stage: str) -> None:  # GS-3
    stages = Recorder(stage, None, reused=False)
    with pytest.raises((ComputeFailed, AllocationFailed)) as failed:
        COMPUTING.execute(ubatch_of([[0]]), stages)
    assert stages.dropped == 1
    assert isinstance(failed.value.__cause__, ValueError)


def test_a_run_that_worked_keeps_its_graph() -> None:  # GS-3
    stages = Recorder(None, None, reused=False)
    COMPUTING.execute(ubatch_of([[0]]), stages)
    assert stages.dropped == 0


# Extraction


def extractor(
    n: int, *, sampled: tuple[int, ...] = (), pooling: Pooling | None = None, order: list[str] | None = None
) -> Extractor:
    """Rows for n outputs; with `order`, each destination writes down when it was reached."""
    outputs = Outputs(n_vocab=N_VOCAB, n_embd_out=N_EMBD, n_batch=16, n_seq_max=1)
    outputs.reserve(n, embeddings=pooling is not None, sampling=bool(sampled))
    router = SampleRouter()
    for sequence in sampled:
        router.register(sequence, GreedySampler())
    pooled = None if pooling is None else Pooled(pooling)
    if order is not None:
        outputs = _told(outputs, order)
    return Extractor(outputs, router, pooled)


def _told(outputs: Outputs, order: list[str]) -> Outputs:
    for name in ("write_logits", "write_embeddings", "write_sampled"):
        write = getattr(outputs, name)

        def wrapped(*args: object, name: str = name, write: object = write) -> None:
            order.append(name)
            write(*args)  # type: ignore[operator]  # one of the three, each with arguments of its own

        setattr(outputs, name, wrapped)
    return outputs


def computed(n: int) -> Computed:
    return Computed(logits=torch.ones(n, N_VOCAB), embeddings=torch.ones(n, N_EMBD))


def test_results_are_extracted_in_order() -> None:  # CX-6
    order: list[str] = []
    extract = extractor(2, sampled=(0,), pooling=Pooling.NONE, order=order)
    assert extract.extract(ubatch_of([[0], [1]]), computed(2), first_row=0, expected=2) == 2
    assert order == ["write_logits", "write_embeddings", "write_sampled"]


def test_raw_logits_stay_where_they_are_when_no_output_needs_them() -> None:  # CX-6, SR-7
    order: list[str] = []
    extract = extractor(1, sampled=(0,), order=order)
    extract.extract(ubatch_of([[0]]), computed(1), first_row=0, expected=1)
    assert order == ["write_sampled"]
    extract.outputs.publish([0], 1)
    assert extract.outputs.logits(0).reason is Absence.NO_LOGITS


def test_pooled_embeddings_go_to_their_sequences_and_not_to_rows() -> None:  # CX-6, OUT-18
    extract = extractor(2, pooling=Pooling.MEAN)
    extract.extract(ubatch_of([[0], [1]]), computed(2), first_row=0, expected=2)
    extract.outputs.publish([0, 1], 2)
    assert extract.outputs.embedding(0).reason is Absence.NO_EMBEDDING
    assert set(cast(Pooled, extract.pooled).results()) == {0, 1}


def test_rows_go_after_those_of_earlier_ubatches() -> None:  # D-15
    extract = extractor(3)
    for first_row, n in ((0, 1), (1, 2)):
        rows = Computed(logits=torch.full((n, N_VOCAB), float(first_row)))
        extract.extract(ubatch_of([[0]] * n), rows, first_row=first_row, expected=n)
    extract.outputs.publish([0, 1, 2], 3)
    assert cast(Tensor, extract.outputs.all_logits().value)[:, 0].tolist() == [0, 1, 1]


def test_a_ubatch_without_outputs_extracts_nothing() -> None:  # CX-7
    order: list[str] = []
    extract = extractor(1, pooling=Pooling.NONE, order=order)
    assert extract.extract(ubatch_of([[0]], output=[0]), computed(0), first_row=0, expected=0) == 0
    assert order == []


def test_a_wrong_number_of_rows_is_reported_and_not_written() -> None:  # UX-1
    order: list[str] = []
    extract = extractor(2, order=order)
    ubatch = ubatch_of([[0], [0]])
    memory = Memory()
    with pytest.raises(ComputeFailed, match="3 output rows where 2 were due"):
        UbatchExecutor().execute(
            memory, lambda: extract.extract(ubatch, computed(3), first_row=0, expected=2), expected=2
        )
    assert order == []
    assert memory.n_roll_backs == 1
