"""The kinds of memory through their one interface: what they have in common, and what tells each from the others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.decoder.cells.memory.coordinator import Coordinator, flush, prepare_with_retry
from ostinato.decoder.cells.memory.cursor import MemoryPart, PreparedBatch
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.recurrent import RecurrentMemory
from ostinato.decoder.cells.memory.splits import split_seq
from ostinato.decoder.cells.memory.status import Status
from ostinato.errors import AllocationFailed, ComputeFailed, InternalError, InvalidBatch, NoSlot
from tests.counts import soak
from tests.decoder.cells.memory.makers import cache_of, digest, splitter_of
from tests.vectors.kv_cells import told
from tests.vectors.ubatches import seq_lists


def kv(size: int = 16, unified: bool = True) -> Coordinator:
    return Coordinator(cache_of(size, unified=unified))


def two_cache(size: int = 16, windowed: int = 6, n_swa: int = 2, unified: bool = True) -> Coordinator:
    return Coordinator(
        cache_of(size, unified=unified), cache_of(windowed, unified=unified, kind="standard", n_swa=n_swa)
    )


def recurrent(n_snapshots: int = 0) -> Coordinator:
    return Coordinator(recurrent=RecurrentMemory(4, n_snapshots=n_snapshots))


def hybrid(size: int = 16, unified: bool = True, n_snapshots: int = 0) -> Coordinator:
    return Coordinator(cache_of(size, unified=unified), recurrent=RecurrentMemory(4, n_snapshots=n_snapshots))


KINDS: dict[str, Callable[[], Coordinator]] = {
    "kv": kv,
    "two_cache": two_cache,
    "recurrent": recurrent,
    "hybrid": hybrid,
}


def full(memory: Coordinator) -> KVCache:
    assert memory.full is not None
    return memory.full


def small(memory: Coordinator) -> KVCache:
    assert memory.windowed is not None
    return memory.windowed


def states(memory: Coordinator) -> RecurrentMemory:
    assert memory.recurrent is not None
    return memory.recurrent


def prepare(memory: Coordinator, ids: list[list[int]], n_ubatch: int = 8, all_outputs: bool = False) -> PreparedBatch:
    return memory.prepare_batch(splitter_of(ids, memory=memory, limit=4), n_ubatch, all_outputs)


def decode(memory: Coordinator, ids: list[list[int]], n_ubatch: int = 8, all_outputs: bool = False) -> PreparedBatch:
    cursor = prepare(memory, ids, n_ubatch, all_outputs)
    assert cursor.status is Status.SUCCESS
    for _ in cursor.ubatches:
        cursor.apply()
        cursor.advance()
    return cursor


def contents(memory: Coordinator) -> Any:
    """Everything a memory keeps."""
    caches = [part for part in vars(memory).values() if isinstance(part, KVCache)]
    states = [part.state.copy() for part in vars(memory).values() if isinstance(part, RecurrentMemory)]
    return [digest(cache) for cache in caches], states


def behaviour(build: Callable[[], Coordinator]) -> dict[str, Any]:
    """Answers to questions that any memory understands."""
    memory, shared = build(), build()
    order = [u.index.tolist() for u in decode(memory, [[0], [1], [0], [0]], all_outputs=True).ubatches]
    decode(memory, [[0]] * 4)
    try:
        takes_shared = not decode(shared, [[0, 1], [0]]).status.is_failure
    except InvalidBatch:
        takes_shared = False
    cursor = prepare(memory, [[0]])
    parts: dict[str, MemoryPart[Any] | None] = {
        "full": memory.full,
        "windowed": memory.windowed,
        "recurrent": memory.recurrent,
    }
    found = {
        "order of rows": order,
        "takes shared tokens": takes_shared,
        "parts": [name for name, part in parts.items() if part is not None and cursor.place(part) is not None],
        "first position kept": memory.pos_min(0),
        "forgets the last token": memory.seq_rm(0, 6),
        "forgets the first token": memory.seq_rm(0, 0, 1),
        "worst case": memory.prepare_full(),
    }
    memory.seq_rm(0)
    assert memory.pos_min(0) is memory.pos_max(0) is None
    return found


EXPECTED: dict[str, dict[str, Any]] = {
    "kv": {
        "order of rows": [[0, 1, 2, 3]],
        "takes shared tokens": True,
        "parts": ["full"],
        "first position kept": 0,
        "forgets the last token": True,
        "forgets the first token": True,
        "worst case": (16, 1),
    },
    "two_cache": {
        "order of rows": [[0, 1, 2, 3]],
        "takes shared tokens": True,
        "parts": ["full", "windowed"],
        "first position kept": 2,
        "forgets the last token": True,
        "forgets the first token": True,
        "worst case": (16, 1, 6, 1),
    },
    "recurrent": {
        "order of rows": [[0, 2, 3], [1]],
        "takes shared tokens": False,
        "parts": ["recurrent"],
        "first position kept": 6,
        "forgets the last token": False,
        "forgets the first token": False,
        "worst case": (0, 4),
    },
    "hybrid": {
        "order of rows": [[0, 2, 3], [1]],
        "takes shared tokens": True,
        "parts": ["full", "recurrent"],
        "first position kept": 6,
        "forgets the last token": False,
        "forgets the first token": False,
        "worst case": (16, 1, 0, 4),
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_behaves_as_its_layers_need(kind: str) -> None:
    assert behaviour(KINDS[kind]) == EXPECTED[kind]


@pytest.mark.parametrize(("asked", "given"), [*permutations(KINDS, 2)])
def test_no_kind_can_stand_in_for_another(asked: str, given: str) -> None:
    differing = [
        question for question, answer in behaviour(KINDS[given]).items() if answer != EXPECTED[asked][question]
    ]
    assert set(differing) - {"parts", "worst case"}  # seen in what it does, not only in what it is made of


# A cursor (MC-7)


@pytest.mark.parametrize("kind", KINDS)
def test_preparing_and_dropping_a_cursor_changes_nothing_mc_7(kind: str) -> None:
    memory = KINDS[kind]()
    decode(memory, [[0], [0]])
    before = contents(memory)
    assert prepare(memory, [[0], [1], [0]], n_ubatch=2).status is Status.SUCCESS
    assert contents(memory) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_cursor_walks_its_ubatches_and_ends_mc_7(kind: str) -> None:
    memory = KINDS[kind]()
    cursor = prepare(memory, [[0]] * 3, n_ubatch=2)
    assert [u.n_tokens for u in cursor.ubatches] == [2, 1]
    with pytest.raises(InternalError, match="not applied"):
        cursor.advance()
    cursor.apply()
    with pytest.raises(InternalError, match="applied already"):
        cursor.apply()
    assert cursor.advance()
    assert cursor.ubatch.index.tolist() == [2]
    cursor.apply()
    assert not cursor.advance()
    with pytest.raises(InternalError, match="no current ubatch"):
        _ = cursor.ubatch
    assert memory.pos_max(0) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_rolling_back_a_ubatch_keeps_those_before_it_g_4(kind: str) -> None:
    memory = KINDS[kind]()
    cursor = prepare(memory, [[0], [1], [0], [0]], n_ubatch=2)
    cursor.apply()
    cursor.advance()
    before = {s: (memory.pos_min(s), memory.pos_max(s)) for s in range(4)}
    cursor.apply()
    assert {s: (memory.pos_min(s), memory.pos_max(s)) for s in range(4)} != before
    cursor.roll_back()
    cursor.roll_back()  # nothing is left to take back
    assert {s: (memory.pos_min(s), memory.pos_max(s)) for s in range(4)} == before
    with pytest.raises(InternalError, match="not applied"):
        cursor.advance()


@pytest.mark.parametrize("kind", KINDS)
def test_the_shape_of_a_step_is_the_same_for_the_next_one_gs_2(kind: str) -> None:
    memory = KINDS[kind]()
    shapes = set()
    for _ in range(3):
        cursor = prepare(memory, [[0]])
        cursor.apply()
        shapes.add(cursor.shape)
    assert len(shapes) == 1


def test_the_worst_case_is_of_all_cells_in_all_streams_mc_4() -> None:
    assert hybrid().prepare_full() == (16, 1, 0, 4)
    assert kv(unified=False).prepare_full() == (16, 4)
    assert recurrent().prepare_full() == (0, 4)


# Both parts or neither (HY-2, HY-3)


@pytest.mark.parametrize("build", [lambda: hybrid(size=4), lambda: two_cache(size=4, windowed=16)])
def test_a_batch_that_one_part_cannot_take_is_taken_by_none_hy_2(build: Callable[[], Coordinator]) -> None:
    memory = build()
    decode(memory, [[0]] * 3)
    before = contents(memory)
    assert prepare(memory, [[0]] * 2).status is Status.FAILED_PREPARE
    assert contents(memory) == before
    assert prepare(memory, [[0]]).status is Status.SUCCESS


def test_windows_that_are_all_in_use_fail_the_whole_two_cache_hy_2() -> None:
    memory = two_cache(windowed=4, n_swa=5)
    decode(memory, [[0]] * 4)
    before = contents(memory)
    assert prepare(memory, [[1]]).status is Status.FAILED_PREPARE
    assert contents(memory) == before


def test_recurrent_memory_is_asked_before_attention_hy_3(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = hybrid()
    monkeypatch.setattr(states(memory), "prepare", lambda _: None)
    monkeypatch.setattr(full(memory), "prepare", lambda _: 1 / 0)
    assert prepare(memory, [[0]]).status is Status.FAILED_PREPARE


def test_a_part_that_cannot_be_applied_takes_the_others_back_hy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = hybrid()
    decode(memory, [[0]])
    cursor = prepare(memory, [[0]])
    before = contents(memory)
    monkeypatch.setattr(states(memory), "apply", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cursor.apply()
    assert contents(memory) == before
    cursor.roll_back()
    assert contents(memory) == before


# Sequence operations on two parts (HY-4..7)


def test_a_hybrid_that_cannot_forget_changes_neither_part_hy_4() -> None:
    memory = hybrid()
    decode(memory, [[0]] * 3)
    before = contents(memory)
    assert memory.seq_rm(0, 1) is False
    assert memory.seq_rm(None, 0, 2) is False
    assert contents(memory) == before
    assert memory.seq_rm(0)
    assert full(memory).pos_max(0) is states(memory).pos_max(0) is None


def test_a_hybrid_with_snapshots_rolls_both_parts_back_hy_4() -> None:
    memory = hybrid(n_snapshots=2)
    decode(memory, [[0]] * 4)
    assert memory.seq_rm(0, 3)
    assert (full(memory).pos_max(0), states(memory).pos_max(0)) == (2, 2)
    assert (memory.pos_min(0), memory.pos_max(0)) == (2, 2)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("seq_add", (0, None, None, -9)),  # attention would free cells; a state cannot go below 0
        ("seq_add", (1, None, None, 1)),  # shared
        ("seq_div", (1, None, None, 2)),
        ("seq_div", (0, None, None, -1)),
        ("seq_cp", (0, 9)),  # attention knows the id, recurrent memory does not
        ("seq_keep", (9,)),
        ("seq_rm", (9, None, None)),
        ("seq_rm", (-2, None, None)),
    ],
)
def test_what_one_part_refuses_is_done_to_neither_hy_5(name: str, arguments: tuple[Any, ...]) -> None:
    memory = hybrid()
    decode(memory, [[0], [0], [1]])
    memory.seq_cp(1, 2)
    before = contents(memory)
    with pytest.raises(InvalidBatch):
        getattr(memory, name)(*arguments)
    assert contents(memory) == before


def test_sequence_operations_reach_both_parts_hy_5() -> None:
    memory = hybrid()
    decode(memory, [[0], [0], [1]])
    memory.seq_cp(0, 2)
    memory.seq_keep(2)
    memory.seq_add(2, None, None, 7)
    memory.seq_div(2, None, None, 4)
    for part in (full(memory), states(memory)):
        assert [part.pos_max(s) for s in range(4)] == [None, None, 2, None]
    assert flush(memory)
    memory.clear()
    assert memory.pos_max(2) is full(memory).pos_max(2) is states(memory).pos_max(2) is None


def test_operations_reach_both_caches_hy_5() -> None:
    memory = two_cache(windowed=16)
    decode(memory, [[0], [0], [1]])
    memory.seq_cp(0, 2)
    memory.seq_keep(2)
    memory.seq_add(2, None, None, 7)
    memory.seq_div(2, None, None, 4)
    for part in (full(memory), small(memory)):
        assert [part.pos_max(s) for s in range(4)] == [None, None, 2, None]
        assert part.has_shift
    assert flush(memory)
    assert not full(memory).has_shift
    assert not small(memory).has_shift
    assert memory.seq_rm(2, 2)
    assert full(memory).pos_max(2) == small(memory).pos_max(2) == 1
    memory.clear()
    assert full(memory).pos_max(2) is small(memory).pos_max(2) is None


def test_a_copy_that_one_cache_refuses_is_made_in_neither_hy_5() -> None:
    memory = two_cache(unified=False)
    decode(memory, [[0]] * 3)
    before = contents(memory)
    with pytest.raises(InvalidBatch, match="only the whole of 0 can be copied"):
        memory.seq_cp(0, 1, 0, 2)
    with pytest.raises(InvalidBatch, match="does not exist"):
        memory.seq_keep(4)
    with pytest.raises(InvalidBatch, match="does not exist"):
        memory.seq_rm(4)
    assert contents(memory) == before


def test_positions_of_two_parts_are_those_that_both_have_hy_6() -> None:
    memory = hybrid()
    decode(memory, [[0]] * 3)
    states(memory).seq_rm(0)
    assert full(memory).pos_max(0) == 2
    assert memory.pos_min(0) is memory.pos_max(0) is None
    windows = two_cache()
    decode(windows, [[0]] * 9, n_ubatch=3)
    assert (full(windows).pos_min(0), windows.pos_min(0), windows.pos_max(0)) == (0, 3, 8)


def test_caches_of_different_size_cannot_shift_hy_7() -> None:
    memory = two_cache()
    decode(memory, [[0]] * 3)
    before = contents(memory)
    assert not memory.can_shift
    for name in ("seq_add", "seq_div"):
        with pytest.raises(InvalidBatch, match="the caches have") as refused:
            getattr(memory, name)(0, None, None, 2)
        assert refused.value.reason == "shift_unsupported"
    memory.seq_add(0, None, None, 0)  # what changes nothing is no shift
    memory.seq_div(0, 2, 2, 5)
    assert contents(memory) == before
    assert two_cache(windowed=16).can_shift
    no_shift = KVCache(8, n_seq_max=1, unified=True, can_shift=False)
    assert not Coordinator(no_shift, recurrent=RecurrentMemory(1)).can_shift


# Splits (SP-15, MC-6)


@pytest.mark.parametrize("build", [lambda: kv(unified=False), lambda: two_cache(unified=False), recurrent])
@pytest.mark.parametrize("all_outputs", [False, True])
def test_shared_tokens_are_refused_where_sequences_have_memory_of_their_own_mc_6(
    build: Callable[[], Coordinator], all_outputs: bool
) -> None:
    memory = build()
    if memory.recurrent is not None and all_outputs:
        assert prepare(memory, [[0, 1]], all_outputs=True).status is Status.SUCCESS
        return
    with pytest.raises(InvalidBatch) as refused:
        prepare(memory, [[2], [0, 1]], all_outputs=all_outputs)
    assert (refused.value.reason, refused.value.index) == ("coupled_unsupported", 1)


@pytest.mark.parametrize("all_outputs", [False, True])
def test_a_hybrid_with_streams_refuses_shared_tokens_however_it_splits_rm_5(all_outputs: bool) -> None:
    memory = hybrid(unified=False)
    with pytest.raises(InvalidBatch, match="one sequence"):
        prepare(memory, [[0, 1]], all_outputs=all_outputs)
    decode(memory, [[0], [1], [0]], all_outputs=all_outputs)
    assert (memory.pos_max(0), memory.pos_max(1)) == (1, 0)


def test_the_last_tokens_stay_together_where_there_are_snapshots_sp_15() -> None:
    builds: list[Callable[[int], Coordinator]] = [recurrent, lambda n: hybrid(n_snapshots=n)]
    for build in builds:
        assert [u.n_tokens for u in prepare(build(2), [[0]] * 9).ubatches] == [6, 3]
        assert [u.n_tokens for u in prepare(build(0), [[0]] * 9).ubatches] == [8, 1]


def test_two_caches_try_equal_sets_when_batch_order_does_not_fit_sp_15() -> None:
    # Three tokens at once need three cells. In equal sets the second of sequence 0 comes by itself, and by then its
    # first is out of the window.
    memory = two_cache(windowed=2, n_swa=1)
    cursor = decode(memory, [[0], [1], [0]])
    assert [u.index.tolist() for u in cursor.ubatches] == [[0, 1], [2]]
    assert (memory.pos_min(0), memory.pos_max(0), memory.pos_max(1)) == (1, 1, 0)
    roomy = decode(two_cache(), [[0], [1], [0]])
    assert [u.index.tolist() for u in roomy.ubatches] == [[0, 1, 2]]


def test_a_state_forks_where_a_set_of_sequences_shrinks_d_24() -> None:
    memory = recurrent()
    cursor = decode(memory, [[0, 1], [0, 1], [0], [1], [0]], all_outputs=True)
    assert [u.index.tolist() for u in cursor.ubatches] == [[0, 1], [2, 4], [3]]
    assert (memory.pos_max(0), memory.pos_max(1)) == (3, 2)
    assert states(memory).state.tail[0] != states(memory).state.tail[1]


@pytest.mark.soak
@given(st.data())
@settings(max_examples=soak(600), derandomize=True, deadline=None)
def test_splitting_by_sequence_takes_every_token_once_in_order_and_no_set_shrinks(data: st.DataObject) -> None:
    sets = [frozenset({0, 1, 2})] * data.draw(st.integers(0, 2)) + [frozenset({0, 1})] * data.draw(st.integers(0, 3))
    ids = [sorted(one) for one in sets] + data.draw(st.lists(st.sampled_from([[0], [1], [2], [3]]), max_size=8))
    if not ids:
        return
    splitter = splitter_of(ids)
    ubatches = split_seq(splitter, data.draw(st.integers(1, 5)))
    assert ubatches is not None
    taken = [i for u in ubatches for i in u.index.tolist()]
    assert sorted(taken) == list(range(len(ids)))
    for s in range(4):
        mine = [i for i in taken if s in ids[i]]
        assert mine == sorted(mine)
    for ubatch in ubatches:
        assert len({tuple(one) for one in seq_lists(ubatch)}) == 1


def test_a_batch_that_can_never_fit_is_still_only_without_room_mc_9() -> None:
    assert prepare(kv(size=4), [[0]] * 5).status is Status.FAILED_PREPARE


# What the decoder makes of the answers (D-11, D-12, MC-5)


class Scripted(Coordinator):
    """A memory whose update and batches end as told."""

    def __init__(self, update: Status, *batches: Status) -> None:
        super().__init__(cache_of())
        self.update, self.batches, self.applied = update, list(batches), 0

    def apply_update(self) -> None:
        self.applied += 1

    def prepare_update(self, optimise: bool) -> Status:
        return self.update

    def prepare_batch(self, splitter: Any, n_ubatch: int, all_outputs: bool) -> PreparedBatch:
        return PreparedBatch((), status=self.batches.pop(0))


def test_pending_work_is_carried_out_or_its_failure_raised_mc_5() -> None:
    assert flush(Scripted(Status.NO_UPDATE)) is False
    done = Scripted(Status.SUCCESS)
    assert flush(done)
    assert done.applied == 1
    with pytest.raises(AllocationFailed):
        flush(Scripted(Status.FAILED_PREPARE))
    with pytest.raises(ComputeFailed):
        flush(Scripted(Status.FAILED_COMPUTE))


@pytest.mark.parametrize("failure", [Status.FAILED_PREPARE, Status.FAILED_COMPUTE])
def test_an_optimise_that_fails_did_nothing_and_there_is_no_second_try_d_12(failure: Status) -> None:
    memory = Scripted(failure, Status.FAILED_PREPARE)
    with pytest.raises(NoSlot) as refused:
        prepare_with_retry(memory, splitter_of([[0]]), 1, False)
    assert (refused.value.code, memory.applied, memory.batches) == (1, 0, [])


def test_a_full_memory_is_no_slot_and_unchanged_g_3() -> None:
    memory = kv(size=4)
    decode(memory, [[0]] * 4)
    before = contents(memory)
    with pytest.raises(NoSlot, match="no room"):
        prepare_with_retry(memory, splitter_of([[1]], memory=memory), 8, False)
    assert contents(memory) == before
    assert len([cell for cell in told(full(memory).streams[0].cells) if cell is not None]) == 4
