"""The sanitizer against its oracle, and the rules that no vector shows."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.decoder.batch.batch import Batch, SeqMasks
from ostinato.decoder.batch.clean import CleanBatch
from ostinato.decoder.batch.sanitizer import sanitize
from ostinato.errors import InvalidBatch
from tests.counts import soak
from tests.decoder.batch import oracle
from tests.decoder.batch.cases import cases
from tests.decoder.batch.oracle import Case, Clean, Refusal

WIDTH = 3


@dataclass(frozen=True)
class View:
    """A memory with these extremes."""

    extremes: dict[int, tuple[int, int]]

    def pos_min(self, s: int) -> int | None:
        return self.extremes[s][0] if s in self.extremes else None

    def pos_max(self, s: int) -> int | None:
        return self.extremes[s][1] if s in self.extremes else None


def with_lists(case: Case) -> Batch:
    embd = None if case.n_rows is None else np.ones((case.n_rows, WIDTH), np.float32)
    return Batch(token=case.token, embd=embd, pos=case.pos, seq_id=case.seq_id, output=case.output)


def with_arrays(case: Case) -> Batch:
    """The same batch as arrays, ids flat with counts."""
    lists = case.seq_id
    return replace(
        with_lists(case),
        token=None if case.token is None else np.array(case.token),
        pos=None if case.pos is None else np.array(case.pos),
        seq_id=None if lists is None else np.array([s for ids in lists for s in ids], np.int32),
        n_seq_id=None if lists is None else np.array([len(ids) for ids in lists]),
        output=None if case.output is None else np.array(case.output, np.int8),
    )


def judged(case: Case, batch: Batch) -> CleanBatch:
    return sanitize(
        batch,
        n_vocab=case.n_vocab,
        n_seq_limit=case.n_seq_limit,
        output_all=case.output_all,
        n_pos_per_embd=case.n_pos_per_embd,
        memory=None if case.memory is None else View(case.memory),
    )


def refusal_of(case: Case, batch: Batch | None = None) -> InvalidBatch:
    with pytest.raises(InvalidBatch) as raised:
        judged(case, with_lists(case) if batch is None else batch)
    return raised.value


def sets_of(clean: CleanBatch) -> list[set[int]]:
    return [{s for s in range(256) if clean.sets[number] >> s & 1} for number in clean.set_of.tolist()]


def agrees(clean: CleanBatch, expected: Clean, case: Case) -> None:
    lists = [clean.ids_of(i) for i in range(clean.n_tokens)]
    assert clean.pos.reshape(-1, clean.n_tokens)[0].tolist() == expected.pos
    assert lists == expected.seq_id
    assert clean.primary.tolist() == [ids[0] for ids in expected.seq_id]
    assert sets_of(clean) == [set(ids) for ids in expected.seq_id]
    assert len(set(clean.sets)) == len(clean.sets)
    assert clean.output.tolist() == expected.output
    assert clean.n_outputs == sum(expected.output)
    assert list(clean.unique) == expected.unique
    assert clean.spans == expected.spans
    assert clean.has_coupling == expected.has_coupling
    assert (clean.token is None) == (case.token is None)
    assert clean.token is None or clean.token.tolist() == case.token
    assert (clean.embd is None) == (case.n_rows is None)


def compare_with_the_oracle(case: Case, batch: Batch, expected: Clean | Refusal) -> None:
    if isinstance(expected, Refusal):
        error = refusal_of(case, batch)
        assert Refusal(error.reason, error.index) == expected
    else:
        agrees(judged(case, batch), expected, case)


@pytest.mark.slow
@pytest.mark.soak
def test_every_batch_is_judged_as_the_rules_say() -> None:
    reached = set()

    @settings(max_examples=soak(6_000), derandomize=True, deadline=None, database=None)
    @given(case=cases())
    def agree(case: Case) -> None:
        expected = oracle.sanitize(case)
        reached.add(expected.reason if isinstance(expected, Refusal) else "ok")
        compare_with_the_oracle(case, with_lists(case), expected)
        compare_with_the_oracle(case, with_arrays(case), expected)

    agree()
    position = {"pos_negative", "pos_memory_gap", "pos_not_contiguous", "coupled_diverged", "subset_diverged"}
    ids = {"seq_empty", "seq_range", "seq_duplicate"}
    assert reached == {"ok", "empty", "n_seq_max", "token_range", "shape", "pos_decreasing"} | ids | position


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=soak(1_000), derandomize=True, deadline=None)
@given(st.lists(st.sets(st.integers(0, 255), min_size=1, max_size=6), min_size=1, max_size=8), st.booleans())
def test_sets_over_the_whole_range_of_ids_are_judged_as_the_rules_say(groups: list[set[int]], shrink: bool) -> None:
    lists = [sorted(group) for group in groups]
    if shrink:
        lists += [ids[1:] for ids in lists if len(ids) > 1]
    case = Case(token=[0] * len(lists), seq_id=lists, n_seq_limit=256)
    compare_with_the_oracle(case, with_arrays(case), oracle.sanitize(case))


def test_a_refusal_leaves_nothing_behind_for_the_next_batch() -> None:
    """S-1."""
    good = Case(token=[1, 2], pos=[4, 5])
    refusal_of(replace(good, pos=[5, 4]))
    agrees(judged(good, with_lists(good)), Clean([4, 5], [[0], [0]], [False, True], [0], {0: (4, 5)}), good)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case(token=[1, 2, 128]), "token 2: id 128 is outside the vocabulary of 128"),
        (Case(token=[1], n_seq_limit=257), "a limit of 257 sequences is above 256"),
        (Case(token=[1], seq_id=[[9]]), "token 0: sequence ids [9] must be from 0 to 7"),
        (Case(token=[1], seq_id=[[]]), "token 0: belongs to no sequence"),
        (Case(token=[1], seq_id=[[3, 3]]), "token 0: sequence ids [3, 3] repeat"),
        (Case(token=[1, 1], pos=[0, -1]), "token 1: position -1 is negative"),
        (Case(token=[1], pos=[7], memory={0: (0, 5)}), "token 0: position 7 does not follow 5, the last of sequence 0"),
        (Case(token=[1, 1, 1], pos=[2, 5, 3]), "token 1: position 5 leaves a hole after 3 in sequence 0"),
        (Case(token=[1, 1], pos=[1, 0]), "token 1: position 0 is lower than 1, the one before it in sequence 0"),
        (Case(token=[1, 1], pos=[0, 1], seq_id=[[0], [0, 1]]), "token 1: its sequences [0, 1] are not all among [0]"),
        (
            Case(token=[1, 1], pos=[3, 4], seq_id=[[2], [0, 1]], memory={0: (0, 3), 1: (1, 3)}),
            "token 1: sequence 1 holds 1 to 3 in memory and sequence 0 holds 0 to 3 in memory",
        ),
        (
            Case(token=[1], pos=[4], seq_id=[[0, 1]], memory={0: (0, 3)}),
            "token 0: sequence 1 holds nothing in memory and sequence 0 holds 0 to 3 in memory",
        ),
    ],
)
def test_a_refusal_names_the_token_and_what_is_wrong_with_it(case: Case, words: str) -> None:
    assert words in str(refusal_of(case))


@pytest.mark.parametrize(
    ("case", "reason", "index"),
    [
        # Each case breaks the rule it is refused by, and later ones too.
        (Case(token=[], n_seq_limit=300, pos=[1, 2]), "empty", None),
        (Case(token=[999], n_seq_limit=300, pos=[]), "n_seq_max", None),
        (Case(token=[0, 999], pos=[0], seq_id=[[9]]), "token_range", 1),
        (Case(token=[0, 1], pos=[-1], seq_id=[[9], []]), "shape", None),
        (Case(token=[0, 1], pos=[-1, 9], seq_id=[[9, 9], []]), "seq_range", 0),
        (Case(token=[0, 1], pos=[-1, 9], seq_id=[[0, 0, 9], []]), "seq_range", 0),
        (Case(token=[0, 1], pos=[-1, 9], seq_id=[[0, 0], [9]]), "seq_duplicate", 0),
        (Case(token=[0, 1], pos=[-1, 9], seq_id=[[0], []]), "seq_empty", 1),
        (Case(token=[0, 1], pos=[9, -1], memory={0: (0, 0)}), "pos_negative", 1),
        (Case(token=[0, 1], pos=[9, 7], memory={0: (0, 0)}), "pos_memory_gap", 1),
        (Case(token=[0, 1], pos=[9, 7], memory={1: (0, 0)}), "pos_not_contiguous", 0),
        (Case(token=[0, 1], pos=[2, 1], seq_id=[[0], [0, 1]], memory={0: (0, 0)}), "coupled_diverged", 1),
        (Case(token=[0, 1], pos=[1, 0], seq_id=[[0], [0, 1]], memory={}), "subset_diverged", 1),
        (Case(token=[0, 1], pos=[1, 0], seq_id=[[0, 1], [0]], memory={}), "pos_decreasing", 1),
    ],
)
def test_the_first_failing_check_decides(case: Case, reason: str, index: int | None) -> None:
    """G-7."""
    error = refusal_of(case)
    assert (error.reason, error.index, error.code) == (reason, index, -1)


def test_the_last_walk_goes_by_token_and_not_by_sequence() -> None:
    """S-16: sequence 1 is out of order at token 3, sequence 0 only at token 4."""
    error = refusal_of(Case(token=[1] * 5, pos=[1, 0, 1, 0, 0], seq_id=[[0], [1], [1], [1], [0]]))
    assert (error.reason, error.index) == ("pos_decreasing", 3)


@pytest.mark.parametrize(
    "fields",
    [
        {"token": [0.5, 1.0]},
        {"token": ["a", "b"]},
        {"token": [[1, 2]], "n_tokens": 2},
        {"token": 5},
        {"token": [1, 2], "embd": [[1.0], [2.0, 3.0]]},
        {"token": [1, 2], "embd": [1.0, 2.0]},
        {"token": [1, 2], "n_tokens": 3},
        {"token": [1, 2], "pos": [0.0, 1.0]},
        {"token": [1, 2], "output": ["x", "y"]},
        {"token": [1, 2], "seq_id": [0, 1]},
        {"token": [1, 2], "seq_id": [[0], 1]},
        {"token": [1, 2], "seq_id": 7},
        {"token": [1, 2], "seq_id": [[0], [None]]},
        {"token": [1, 2], "seq_id": [0, 1], "n_seq_id": [2, 1]},
        {"token": [1, 2], "seq_id": [0, 1], "n_seq_id": [3, -1]},
        {"token": [1, 2], "seq_id": [[0], [1]], "n_seq_id": [1, 2]},
        {"token": [1, 2], "n_seq_id": [1, 1]},
        {"token": [1, 2], "seq_id": SeqMasks([1])},
        {"token": [1, 2], "seq_id": SeqMasks([1, 1], primary=[0])},
        {"token": [1, 2], "seq_id": SeqMasks([1, -1])},
        {"token": [1, 2], "seq_id": SeqMasks([1, 1]), "n_seq_id": [1, 1]},
    ],
)
def test_fields_of_a_wrong_shape_or_type_are_refused(fields: dict[str, Any]) -> None:
    """S-5."""
    assert refusal_of(Case(), Batch(**fields)).reason == "shape"


def test_numbers_beyond_64_bits_are_out_of_range_and_not_wrapped() -> None:
    assert refusal_of(Case(), Batch(token=np.array([2**64 - 1], np.uint64))).reason == "token_range"


@pytest.mark.parametrize("seq_id", [[[0, 2], [2, 0]], ((0, 2), (2, 0)), np.array([[0, 2], [2, 0]])])
def test_ids_may_come_as_lists_tuples_or_a_table(seq_id: Any) -> None:
    clean = sanitize(Batch(token=[1, 2], seq_id=seq_id), n_vocab=8, n_seq_limit=4)
    assert [clean.ids_of(i) for i in range(2)] == [[0, 2], [2, 0]]
    assert clean.set_of.tolist() == [0, 0]


def test_the_callers_arrays_are_not_changed_and_not_kept() -> None:
    token, pos = np.array([1, 2]), np.array([0, 1])
    ids, counts, flags = np.array([0, 1, 0]), np.array([2, 1]), np.array([2, 0])
    before = [array.copy() for array in (token, pos, ids, counts, flags)]
    batch = Batch(token=token, pos=pos, seq_id=ids, n_seq_id=counts, output=flags)
    clean = sanitize(batch, n_vocab=8, n_seq_limit=4)
    for array, copy in zip((token, pos, ids, counts, flags), before, strict=True):
        assert np.array_equal(array, copy)
        array[:] = 3
    assert clean.token is not None
    assert (clean.token.tolist(), clean.pos.tolist(), clean.seq_id.tolist()) == ([1, 2], [0, 1], [0, 1, 0])
    assert clean.output.tolist() == [True, False]


def test_masks_list_ids_ascending_unless_a_primary_id_is_named() -> None:
    """S-19."""
    masks = [0b1101, 0b1000]
    plain = sanitize(Batch(token=[1, 2], seq_id=SeqMasks(masks)), n_vocab=8, n_seq_limit=4)
    assert [plain.ids_of(i) for i in range(2)] == [[0, 2, 3], [3]]
    named = sanitize(Batch(token=[1, 2], seq_id=SeqMasks(masks, primary=[2, 3])), n_vocab=8, n_seq_limit=4)
    assert [named.ids_of(i) for i in range(2)] == [[2, 0, 3], [3]]
    assert named.primary.tolist() == [2, 3]
    assert sets_of(plain) == sets_of(named)


def test_a_primary_id_outside_its_mask_is_refused() -> None:
    """S-19."""
    error = refusal_of(Case(), Batch(token=[1, 2], seq_id=SeqMasks([0b11, 0b01], primary=[0, 1])))
    assert (error.reason, error.index) == ("shape", 1)
    assert str(error) == "token 1: the primary id 1 is not one of its sequences [0]"


def test_an_empty_mask_is_a_token_without_sequence() -> None:
    assert refusal_of(Case(), Batch(token=[1], seq_id=SeqMasks([0]))).reason == "seq_empty"


def test_only_the_first_position_dimension_is_judged() -> None:
    """S-18, and S-7 looks at the first alone as well."""
    batch = Batch(embd=np.ones((2, WIDTH)), pos=[3, 4, -9, 50, 7, -1])
    clean = sanitize(batch, n_vocab=8, n_seq_limit=1, n_pos_per_embd=3)
    assert clean.pos.tolist() == [[3, 4], [-9, 50], [7, -1]]
    by_dimension = replace(batch, pos=np.array([[3, 4], [-9, 50], [7, -1]]))
    assert np.array_equal(sanitize(by_dimension, n_vocab=8, n_seq_limit=1, n_pos_per_embd=3).pos, clean.pos)


@pytest.mark.parametrize("pos", [None, [5, 6]])
def test_a_token_batch_repeats_its_position_in_every_dimension(pos: list[int] | None) -> None:
    """U-3."""
    clean = sanitize(Batch(token=[1, 2], pos=pos), n_vocab=8, n_seq_limit=1, n_pos_per_embd=2, memory=View({0: (0, 4)}))
    assert clean.pos.tolist() == [[5, 6], [5, 6]]


def test_memory_without_a_last_position_counts_as_empty() -> None:
    """HY-6: a hybrid may know a first position and no last."""

    class HalfEmpty:
        def pos_min(self, s: int) -> int | None:
            return 3 * s

        def pos_max(self, s: int) -> int | None:
            return None

    clean = sanitize(Batch(token=[1], seq_id=[[0, 1]]), n_vocab=8, n_seq_limit=4, memory=HalfEmpty())
    assert clean.pos.tolist() == [0]


def test_every_id_of_the_range_can_share_one_token() -> None:
    """C-1: sets of 256 ids take several machine words."""
    everyone = list(range(256))
    lists = [everyone, everyone[:100], everyone[100:], [255]]
    clean = sanitize(Batch(token=[1] * 4, seq_id=lists), n_vocab=8, n_seq_limit=256)
    assert clean.pos.tolist() == [0, 1, 1, 2]
    assert sets_of(clean) == [set(ids) for ids in lists]
    error = refusal_of(Case(n_seq_limit=256), Batch(token=[1] * 3, seq_id=[everyone, [200, 201], [199, 200]]))
    assert (error.reason, error.index) == ("subset_diverged", 2)
