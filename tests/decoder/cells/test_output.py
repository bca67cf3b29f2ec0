"""Output rows: reserved, filled in the order of the ubatches, read in the order of the batch (OUT-1..19)."""

import resource
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.decoder.cells.output import Absence, Counts, Lookup, Outputs, Sampled, resolve, row_swaps, zeros
from ostinato.errors import AllocationFailed, InternalError
from tests.vectors.output import raw_written

N_VOCAB, N_EMBD, N_BATCH, N_SEQ = 8, 4, 16, 2

distinct_ids = st.lists(st.integers(0, N_BATCH - 1), unique=True)


def outputs_with(
    out_ids: list[int], *, embeddings: bool = False, sampling: bool = False, allocate: Callable[[int], Tensor] = zeros
) -> Outputs:
    """Outputs with rows reserved for out_ids; nothing written, nothing published."""
    outputs = Outputs(n_vocab=N_VOCAB, n_embd_out=N_EMBD, n_batch=N_BATCH, n_seq_max=N_SEQ, allocate=allocate)
    outputs.reserve(len(out_ids), embeddings=embeddings, sampling=sampling)
    return outputs


def numbered(out_ids: list[int], width: int) -> Tensor:
    """A row per output that holds its batch index."""
    return torch.tensor(out_ids, dtype=torch.float32).reshape(-1, 1).expand(-1, width)


def naive_swaps(out_ids: list[int]) -> list[tuple[int, int]]:
    """OUT-10 as it is written."""
    order, swaps = list(out_ids), []
    for i in range(len(order) - 1):
        j = min(range(i, len(order)), key=lambda k: order[k])
        if j != i:
            order[i], order[j] = order[j], order[i]
            swaps.append((i, j))
    return swaps


# Reservation


def test_there_is_always_a_row_for_every_sequence() -> None:  # OUT-2
    outputs = Outputs(n_vocab=N_VOCAB, n_embd_out=N_EMBD, n_batch=N_BATCH, n_seq_max=N_SEQ)
    for asked, n_rows in ((0, N_SEQ), (5, 5)):
        buffers = outputs.reserve(asked, embeddings=False, sampling=False).values()
        assert {len(rows.values) for rows in buffers} == {n_rows}


def test_each_buffer_has_its_items_and_only_if_it_is_wanted() -> None:  # OUT-3
    outputs = outputs_with([])
    everything = {
        name: rows.values.numel() for name, rows in outputs.reserve(3, embeddings=True, sampling=True).items()
    }
    raw = {"logits": 24, "embeddings": 12}
    assert everything == {**raw, "sampled_logits": 24, "probs": 24, "candidates": 24, "sampled_tokens": 3}
    assert outputs.capacity_bytes == 4 * (4 * 24 + 12 + 3)
    bare = outputs.reserve(3, embeddings=False, sampling=False)
    assert [rows.values.numel() for rows in bare.values()] == [24, 0, 0, 0, 0, 0]


def test_memory_grows_to_exactly_the_need_and_never_shrinks() -> None:  # OUT-4
    asked: list[int] = []

    def counted(n_items: int) -> Tensor:
        asked.append(n_items)
        return zeros(n_items)

    outputs = outputs_with([0] * 4, allocate=counted)
    outputs.reserve(1, embeddings=False, sampling=False)
    assert asked == [4 * N_VOCAB]
    outputs.reserve(5, embeddings=False, sampling=False)
    assert asked == [4 * N_VOCAB, 5 * N_VOCAB]
    assert outputs.capacity_bytes == 5 * N_VOCAB * 4


def test_a_reservation_forgets_ids_count_and_swaps() -> None:  # OUT-5, OUT-13
    outputs = outputs_with([1, 0])
    outputs.publish([1, 0], 2)
    assert len(outputs.swaps) == 1
    outputs.reserve(2, embeddings=False, sampling=False)
    assert outputs.n_outputs == len(outputs.swaps) == 0
    assert outputs.ids == (None,) * N_BATCH


def test_old_rows_are_garbage_that_no_call_can_read() -> None:  # OUT-4, OUT-17
    outputs = outputs_with([0])
    outputs.write_logits(0, numbered([3], N_VOCAB))
    outputs.publish([0], 1)
    assert outputs.logits(0).value is not None
    outputs.reserve(1, embeddings=False, sampling=False)
    outputs.publish([0], 1)
    assert outputs.logits(0) == Lookup(None, Absence.NO_LOGITS)
    assert raw_written(outputs, 1) == [False]


def test_sampling_rows_start_without_token_and_counts() -> None:  # OUT-6
    outputs = outputs_with([0], sampling=True)
    outputs.publish([0], 1)
    assert outputs.sampled_token(0) == Lookup(None, Absence.NO_SAMPLE)
    assert outputs.counts(0) == Counts(0, 0, 0)


@pytest.mark.parametrize("failure", [MemoryError("full"), RuntimeError("not enough memory")])
def test_a_failed_allocation_leaves_nothing_to_read(failure: Exception) -> None:  # OUT-7
    limit = 4 * N_VOCAB

    def tight(n_items: int) -> Tensor:
        if n_items > limit:
            raise failure
        return zeros(n_items)

    outputs = outputs_with([0, 1], allocate=tight)
    outputs.write_logits(0, numbered([0, 1], N_VOCAB))
    outputs.publish([0, 1], 2)
    with pytest.raises(AllocationFailed, match="160 bytes"):
        outputs.reserve(5, embeddings=False, sampling=False)
    assert outputs.n_outputs == 0
    assert outputs.logits(0) == Lookup(None, Absence.NOT_OUTPUT)
    assert outputs.all_logits() == Lookup(None, Absence.NO_LOGITS)
    outputs.reserve(4, embeddings=False, sampling=False)  # and less can still be had
    assert outputs.capacity_bytes == limit * 4


# Ids, order, swaps


@settings(derandomize=True, deadline=None)
@given(distinct_ids)
def test_swaps_are_those_of_a_selection_sort(out_ids: list[int]) -> None:  # OUT-10
    assert list(row_swaps(out_ids)) == naive_swaps(out_ids)


@settings(derandomize=True, deadline=None)  # the first call warms torch up
@given(distinct_ids)
def test_reading_brings_every_buffer_into_batch_order(out_ids: list[int]) -> None:  # OUT-9, OUT-11, OUT-12, SR-10
    outputs = outputs_with(out_ids, embeddings=True, sampling=True)
    outputs.write_logits(0, numbered(out_ids, N_VOCAB))
    outputs.write_embeddings(0, numbered(out_ids, N_EMBD))
    for row, index in enumerate(out_ids):
        kept = numbered([index], index % N_VOCAB + 1)[0]
        outputs.write_sampled(row, Sampled(token=index, logits=kept, probs=kept[:1], candidates=kept))
    outputs.publish(out_ids, len(out_ids))
    assert outputs.sampled_tokens() == tuple(sorted(out_ids))
    assert outputs.swaps == ()
    for row, index in enumerate(sorted(out_ids)):
        assert outputs.row(index) == outputs.row(row - len(out_ids)) == Lookup(row)
        count = index % N_VOCAB + 1
        assert outputs.counts(index) == (count, 1, count)
        logits, embedding, probs = outputs.logits(index), outputs.embedding(index), outputs.sampled_probs(index)
        assert logits.value is not None
        assert logits.value.tolist() == [index] * count
        assert embedding.value is not None
        assert embedding.value.tolist() == [index] * N_EMBD
        assert probs.value is not None
        assert probs.value.tolist() == [index]
        assert outputs.candidates(index).tolist() == [index] * count
    every, rows = outputs.all_logits().value, outputs.all_embeddings().value
    assert every is not None
    assert rows is not None
    assert every[:, 0].tolist() == rows[:, 0].tolist() == sorted(out_ids)


def test_reading_twice_reorders_once() -> None:  # OUT-12
    outputs = outputs_with([2, 0, 1])
    outputs.write_logits(0, numbered([2, 0, 1], N_VOCAB))
    outputs.publish([2, 0, 1], 3)
    for _ in range(2):
        assert [float(row[0]) for i in range(3) if (row := outputs.logits(i).value) is not None] == [0, 1, 2]


def test_marks_of_extracted_rows_move_with_their_rows() -> None:  # OUT-12, OUT-17
    outputs = outputs_with([5, 1])
    outputs.write_logits(0, numbered([5], N_VOCAB))  # only the row of token 5
    outputs.publish([5, 1], 2)
    assert raw_written(outputs, 2) == [False, True]
    assert outputs.logits(1) == Lookup(None, Absence.NO_LOGITS)
    assert outputs.logits(5).value is not None
    assert outputs.all_logits().reason is Absence.NO_LOGITS


def test_rows_written_in_inference_mode_can_be_reordered_outside_it() -> None:  # OUT-12
    with torch.inference_mode():
        outputs = outputs_with([1, 0], sampling=True)
        outputs.write_logits(0, numbered([1, 0], N_VOCAB))
        outputs.publish([1, 0], 2)
    row = outputs.logits(0).value
    assert row is not None
    assert float(row[0]) == 0


@pytest.mark.parametrize(("out_ids", "n_outputs"), [([0], 2), ([0, 0], 2), ([N_BATCH], 1), ([-1], 1), ([0, 1, 2], 3)])
def test_output_ids_that_cannot_be_are_our_own_fault(out_ids: list[int], n_outputs: int) -> None:  # OUT-8, G-5
    outputs = outputs_with([0, 1])
    with pytest.raises(InternalError):
        outputs.publish(out_ids, n_outputs)
    assert outputs.n_outputs == 0


def test_unpublished_rows_cannot_be_found() -> None:  # D-16
    outputs = outputs_with([0, 1])
    outputs.write_logits(0, numbered([0, 1], N_VOCAB))
    outputs.publish([0, 1], 2)
    outputs.unpublish()
    assert [outputs.logits(i).reason for i in (0, -1)] == [Absence.NOT_OUTPUT, Absence.NEGATIVE_RANGE]


# Writing


def test_rows_outside_the_reservation_are_our_own_fault() -> None:  # G-5
    outputs = outputs_with([0, 1], sampling=True)
    writes: list[Callable[[], None]] = [
        lambda: outputs.write_logits(1, numbered([0, 1], N_VOCAB)),
        lambda: outputs.write_logits(-1, numbered([0], N_VOCAB)),
        lambda: outputs.write_logits(0, numbered([0], 1)),
        lambda: outputs.write_embeddings(0, numbered([0], N_EMBD)),
        lambda: outputs.write_sampled(2, Sampled(token=1)),
        lambda: outputs.write_sampled(0, Sampled(logits=torch.zeros(N_VOCAB + 1))),  # SR-6
    ]
    for write in writes:
        with pytest.raises(InternalError):
            write()


def test_rows_of_any_dtype_are_kept_as_float32() -> None:
    outputs = outputs_with([0])
    outputs.write_logits(0, torch.full((1, N_VOCAB), 0.5, dtype=torch.bfloat16))
    outputs.publish([0], 1)
    row = outputs.logits(0).value
    assert row is not None
    assert row.dtype == torch.float32
    assert row.tolist() == [0.5] * N_VOCAB


# Lookup


@settings(derandomize=True, deadline=None)
@given(distinct_ids, st.integers(-2 * N_BATCH, 2 * N_BATCH))
def test_an_index_resolves_as_a_dictionary_would(out_ids: list[int], index: int) -> None:  # OUT-14, OUT-15
    outputs = outputs_with(out_ids)
    outputs.publish(out_ids, len(out_ids))
    rows = {token: row for row, token in enumerate(sorted(out_ids))}
    rows |= {row - len(out_ids): row for row in range(len(out_ids))}
    found = outputs.row(index)
    assert found.value == rows.get(index)
    assert (found.reason is None) == (index in rows)


def test_a_row_beyond_the_published_ones_is_corrupt() -> None:  # OUT-14
    assert resolve(0, [5, None], 2) == Lookup(None, Absence.CORRUPT)


def test_without_outputs_every_index_is_an_error() -> None:  # OUT-15, D-18
    outputs = outputs_with([])
    outputs.publish([], 0)
    reasons = {outputs.row(index).reason for index in (-1, 0, N_BATCH)}
    assert reasons == {Absence.NEGATIVE_RANGE, Absence.NOT_OUTPUT, Absence.RANGE}


def test_looking_up_what_is_not_there_changes_nothing() -> None:  # OUT-19
    outputs = outputs_with([3, 1])
    outputs.publish([3, 1], 2)
    before = outputs.ids, outputs.swaps, outputs.n_outputs
    for reader in (outputs.logits, outputs.embedding, outputs.sampled_token, outputs.sampled_probs):
        assert reader(0).reason is Absence.NOT_OUTPUT
        assert reader(-3).reason is Absence.NEGATIVE_RANGE
    assert (outputs.ids, outputs.swaps, outputs.n_outputs) == before


def test_sampled_logits_come_before_raw_ones() -> None:  # OUT-17
    outputs = outputs_with([0, 1], sampling=True)
    outputs.write_logits(0, numbered([0, 1], N_VOCAB))
    outputs.write_sampled(1, Sampled(logits=torch.tensor([9.0, 8.0]), candidates=torch.tensor([4, 2])))
    outputs.publish([0, 1], 2)
    raw, kept = outputs.logits(0).value, outputs.logits(1).value
    assert raw is not None
    assert kept is not None
    assert raw.tolist() == [0] * N_VOCAB
    assert kept.tolist() == [9, 8]


def test_an_embedding_that_was_not_written_is_absent() -> None:  # OUT-18
    outputs = outputs_with([0], embeddings=True)
    outputs.publish([0], 1)
    assert outputs.embedding(0) == Lookup(None, Absence.NO_EMBEDDING)
    assert outputs.all_embeddings() == Lookup(None, Absence.NO_EMBEDDING)


def test_without_sampling_rows_the_whole_vocabulary_is_the_answer() -> None:  # SR-9
    outputs = outputs_with([0])
    outputs.publish([0], 1)
    assert outputs.counts(0) == outputs.counts(7) == Counts(N_VOCAB, 0, 0)
    assert outputs.sampled_token(0).value is None
    assert outputs.sampled_tokens() == (None,)
    assert outputs.candidates(0).tolist() == outputs.candidates(7).tolist() == list(range(N_VOCAB))


def test_with_sampling_rows_an_unknown_index_counts_nothing() -> None:  # SR-9
    outputs = outputs_with([0], sampling=True)
    outputs.publish([0], 1)
    assert outputs.counts(7) == Counts(0, 0, 0)
    assert outputs.candidates(0).tolist() == list(range(N_VOCAB))


def test_every_reader_of_rows_synchronises_first() -> None:  # D-19
    waits: list[int] = []
    outputs = Outputs(
        n_vocab=N_VOCAB, n_embd_out=N_EMBD, n_batch=N_BATCH, n_seq_max=N_SEQ, synchronize=lambda: waits.append(1)
    )
    outputs.reserve(1, embeddings=True, sampling=True)
    outputs.write_logits(0, numbered([0], N_VOCAB))
    outputs.publish([0], 1)
    readers = (outputs.logits, outputs.embedding, outputs.sampled_token, outputs.candidates, outputs.counts)
    for n, reader in enumerate(readers, start=1):
        reader(0)
        assert len(waits) >= n
    waits.clear()
    outputs.all_logits()
    outputs.all_embeddings()
    outputs.sampled_tokens()
    assert len(waits) == 3


def test_memory_is_not_claimed_before_rows_are_written() -> None:
    outputs = Outputs(n_vocab=1 << 17, n_embd_out=N_EMBD, n_batch=1 << 11, n_seq_max=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outputs.reserve(1 << 11, embeddings=False, sampling=False)
    outputs.write_logits(0, torch.ones(1, 1 << 17))
    outputs.publish(range(1 << 11), 1 << 11)
    assert outputs.logits(0).value is not None
    assert outputs.capacity_bytes == 1 << 30
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 100 << 10
