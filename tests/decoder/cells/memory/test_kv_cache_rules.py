"""The KV cache against a slow and plain one, and the rules that no vector shows."""

from __future__ import annotations

import timeit
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.cache.sequences import Ints
from ostinato.cache.state_block import CellRows
from ostinato.cache.window import Window, WindowKind
from ostinato.decoder.cells.memory.coordinator import Coordinator, flush
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.sequence_ops import NO_END
from ostinato.decoder.cells.memory.slots import Slot, StreamSlot
from ostinato.decoder.cells.memory.splits import split_equal, split_simple
from ostinato.errors import Aborted, InternalError, InvalidBatch
from tests.counts import soak
from tests.decoder.cells.memory.kv_oracle import Oracle, masked
from tests.decoder.cells.memory.makers import cache_of, digest, splitter_of
from tests.vectors.kv_cells import told
from tests.vectors.ubatches import ubatch_of

N_SEQ = 3
KINDS: list[WindowKind] = ["none", "standard", "chunked", "symmetric"]


class Both:
    """A cache and the oracle, doing the same things."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        unified = data.draw(st.booleans())
        kind, n_swa = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(1, 4))
        size = data.draw(st.integers(3, 9))
        self.n_ubatch = data.draw(st.integers(1, 6))
        self.cache = KVCache(size, n_seq_max=N_SEQ, unified=unified, window=Window(kind, n_swa))
        self.memory = Coordinator(self.cache)
        self.oracle = Oracle(size, N_SEQ, unified, kind, n_swa)

    def check(self) -> None:
        """Equal in everything; nothing leaked (KC-3, KC-4)."""
        streams = self.cache.streams
        assert [(s.head, s.cells.has_shift, told(s.cells)) for s in streams] == self.oracle.told()
        assert self.cache.pending_copies == self.oracle.pending
        for s in range(N_SEQ):
            assert self.cache.pos_min(s) == self.oracle.pos_min(s)
            assert self.cache.pos_max(s) == self.oracle.pos_max(s)
        for stream in streams:
            used = [i for i, cell in enumerate(told(stream.cells)) if cell is not None]
            assert stream.cells.used == len(used) == int(stream.cells.member.any(axis=0).sum())
            assert (stream.cells.used_min, stream.cells.used_stop) == (min(used, default=0), max(used, default=-1) + 1)

    def decode(self) -> None:
        """A batch of single tokens, perhaps rolled back at one ubatch; or only prepared."""
        update = self.memory.prepare_update(optimise=False)
        assert update.value == self.oracle.update()
        self.memory.apply_update()
        shared = self.cache.unified and self.data.draw(st.integers(0, 3)) == 0
        ids = self.data.draw(st.lists(st.integers(0, N_SEQ - 1), min_size=1, max_size=7))
        try:
            splitter = splitter_of([[0, 1] for _ in ids] if shared else [[s] for s in ids], memory=self.memory)
        except InvalidBatch:  # sequences that share tokens are not in step
            return
        before = digest(self.cache)
        cursor = self.memory.prepare_batch(splitter, self.n_ubatch, False)
        assert digest(self.cache) == before
        if self.cache.unified:
            ubatches = split_simple(splitter, self.n_ubatch)
        else:
            ubatches = split_equal(splitter, self.n_ubatch, sequential=True)
        assert ubatches is not None
        slots = self.oracle.plan(ubatches)
        assert cursor.status.is_failure == (slots is None)
        if slots is None:
            return
        fail_at = self.data.draw(st.integers(-1, len(slots) - 1))
        for k, slot in enumerate(slots):
            place = cursor.place(self.cache)
            assert place is not None
            assert [(part.stream, part.cells.tolist()) for part in place.streams] == slot
            cursor.apply()
            self.oracle.apply(cursor.ubatch, slot)
            self.see(self.cache.visible(cursor.ubatch, place), cursor.ubatch, slot)
            if k == fail_at:
                cursor.roll_back()
                self.oracle.roll_back(slot)
                return
            assert cursor.advance() == (k + 1 < len(slots))

    def see(self, masks: list[Any], ubatch: Any, slot: list[tuple[int, list[int]]]) -> None:
        """KV-16, one token and one cell at a time."""
        for (number, tokens), mask in zip(self.oracle.groups(ubatch), masks, strict=True):
            cells = self.oracle.streams[number].cells
            for row, (position, ids) in enumerate(tokens):
                for i, cell in enumerate(cells):
                    seen = cell is not None and ids[0] in cell.ids and cell.position <= position
                    if seen and cell is not None:
                        seen = not masked(self.oracle.kind, self.oracle.n_swa, cell.position, position)
                    assert mask[row, i] == seen

    def operate(self) -> None:
        """A sequence operation; one that is refused changes nothing."""
        draw = self.data.draw
        a = draw(st.sampled_from([s for s in range(N_SEQ) if self.oracle.pos_max(s) is not None] or [0]))
        b = draw(st.integers(0, N_SEQ - 1))
        p0, p1 = draw(st.none() | st.integers(0, 6)), draw(st.none() | st.integers(0, 8))
        bounds = (p0 or 0, NO_END if p1 is None else p1)
        by = draw(st.integers(-3, 3))
        any_or_a = draw(st.sampled_from([None, a, a]))
        calls: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
            "seq_rm": ((any_or_a, p0, p1), (any_or_a, *bounds)),
            "seq_cp": ((a, b, p0, p1), (a, b, *bounds)),
            "seq_keep": ((a,), (a,)),
            "seq_add": ((a, p0, p1, by), (a, *bounds, by)),
            "seq_div": ((a, p0, p1, by), (a, *bounds, by)),
            "clear": ((), ()),
        }
        name = draw(st.sampled_from([*["seq_cp", "seq_rm", "seq_add"] * 3, "seq_div", "seq_keep", "clear"]))
        ours, theirs = calls[name]
        before = digest(self.cache)
        expected = getattr(self.oracle, name)(*theirs)
        if expected == "invalid":
            with pytest.raises(InvalidBatch):
                getattr(self.memory, name)(*ours)
            assert digest(self.cache) == before
        else:
            assert getattr(self.memory, name)(*ours) == expected


@pytest.mark.soak
@pytest.mark.slow
@given(st.data())
@settings(max_examples=soak(3_000), derandomize=True, deadline=None)
def test_any_operations_leave_the_cache_as_the_plain_one(data: st.DataObject) -> None:
    both = Both(data)
    for _ in range(data.draw(st.integers(3, 14))):
        if data.draw(st.booleans()):
            both.decode()
        else:
            both.operate()
        both.check()


def decode(cache: KVCache, seq_id: list[list[int]], pos: list[int] | None = None, n_ubatch: int = 32) -> list[Slot]:
    """Decode as a whole; the slots."""
    memory = Coordinator(cache)
    cursor = memory.prepare_batch(splitter_of(seq_id, pos, memory=memory), n_ubatch, False)
    assert not cursor.status.is_failure
    slots = cache.prepare(cursor.ubatches)
    assert slots is not None
    for _ in slots:
        cursor.apply()
        cursor.advance()
    return slots


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("contiguous", [False, True])
@given(
    used=st.lists(st.booleans(), min_size=1, max_size=10), head=st.integers(0, 10), n=st.integers(1, 6), data=st.data()
)
@settings(max_examples=soak(1_500), derandomize=True, deadline=None)
def test_searching_finds_the_first_cells_as_a_walk_would_kv_5(
    contiguous: bool, used: list[bool], head: int, n: int, data: st.DataObject
) -> None:
    cache = cache_of(len(used))
    cells = np.flatnonzero(used)
    cache.streams[0].cells.set_position(cells, cells)
    cache.streams[0].cells.add(cells, cells * 0)
    cache.streams[0].head = min(head, len(used))
    slot = cache.find_slot(ubatch_of([[1]] * n), contiguous=contiguous)
    assert (None if slot is None else slot.streams[0].cells.tolist()) == walk(used, min(head, len(used)), n, contiguous)


def walk(used: list[bool], head: int, n: int, contiguous: bool) -> list[int] | None:
    """KV-5, one cell after the other."""
    size = len(used)
    if n > size:
        return None
    at, tested, found = (0 if head > sum(used) + 2 * n else head), 0, list[int]()
    while True:
        if at + (n if contiguous else 1) > size:
            tested, at = tested + size - at, 0
            continue
        for _ in range(n if contiguous else 1):
            at, tested = at + 1, tested + 1
            if not used[at - 1]:
                found.append(at - 1)
            elif contiguous:
                break
        if len(found) == n:
            return found
        if contiguous:
            found = []
        if tested >= size:
            return None


def test_a_size_that_is_no_multiple_of_the_padding_is_a_mistake_kv_1() -> None:
    with pytest.raises(InternalError, match="no multiple"):
        KVCache(100, n_seq_max=1, unified=True, padding=32)
    assert KVCache(128, n_seq_max=1, unified=True, padding=32).n_kv() == 128


def test_rows_that_are_not_grouped_by_stream_are_a_mistake_kv_4() -> None:
    cache = cache_of(unified=False)
    for ids in ([[0], [1], [0]], [[0], [1], [0], [1]], [[0, 1], [0]], [[1], [1], [0], [0]]):
        before = digest(cache)
        with pytest.raises(InternalError, match="grouped by sequence"):
            cache.prepare([ubatch_of(ids)])
        assert digest(cache) == before


def test_a_slot_of_another_ubatch_is_refused_before_any_change_kv_10() -> None:
    cache = cache_of()
    decode(cache, [[0, 1], [0]], [0, 1])
    before = digest(cache)
    ubatch = ubatch_of([[2], [2]])
    wrong = [[2], [3, 3], [3, 99], [-1, 3], [0, 3]]  # too few, one twice, outside, outside, one of two sequences
    for cells in wrong:
        with pytest.raises(InternalError):
            cache.apply(ubatch, Slot((StreamSlot(0, 0, np.array(cells)),)))
        assert digest(cache) == before


def test_an_apply_that_fails_half_way_is_undone_kv_9(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(4, kind="standard", n_swa=2)
    decode(cache, [[0]] * 4)
    cache.streams[0].head = 1  # so that cell 1 is overwritten, and position 0 purged
    ubatch = ubatch_of([[0]], [4])
    slot = cache.find_slot(ubatch)
    assert slot is not None
    before = digest(cache)
    monkeypatch.setattr(cache.streams[0].cells, "remove", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.apply(ubatch, slot)
    monkeypatch.undo()
    assert digest(cache) == before
    cache.apply(ubatch, slot)
    assert cache.pos_min(0) == 2


@pytest.mark.parametrize(("n_seqs", "has_room"), [(3, True), (5, False)])
def test_preparing_changes_nothing_whether_there_is_room_or_not_kv_9(n_seqs: int, has_room: bool) -> None:
    cache = cache_of(6, kind="standard", n_swa=2)
    decode(cache, [[0]] * 5)
    decode(cache, [[1]])
    memory = Coordinator(cache)
    before = digest(cache)
    ids = [[i % n_seqs] for i in range(30)]  # windows move on and give up cells while the batch is tried
    cursor = memory.prepare_batch(splitter_of(ids, memory=memory), 2, False)
    assert cursor.status.is_failure != has_room
    assert digest(cache) == before


def test_rolling_back_takes_shared_tokens_from_all_their_sequences_kv_14() -> None:
    cache = cache_of()
    decode(cache, [[0, 1], [0, 1]])
    before = digest(cache)
    ubatch = ubatch_of([[0, 1], [1]], [2, 3])
    slot = cache.find_slot(ubatch)
    assert slot is not None
    cache.apply(ubatch, slot)
    assert cache.pos_max(1) == 3
    cache.roll_back(ubatch, slot)
    assert digest(cache) == before
    with pytest.raises(InternalError, match="rolled back"):
        cache.roll_back(ubatch, slot)


def test_rolling_back_does_not_bring_back_window_cells_and_says_so_kv_15() -> None:
    cache = cache_of(4, kind="standard", n_swa=2)
    decode(cache, [[0]] * 4)
    ubatch = ubatch_of([[0]], [4])
    slot = cache.find_slot(ubatch)
    assert slot is not None
    cache.apply(ubatch, slot)
    cache.roll_back(ubatch, slot)
    assert (cache.pos_min(0), cache.pos_max(0)) == (1, 3)
    cursor = Coordinator(cache).prepare_batch(splitter_of([[0]], memory=cache), 1, False)
    assert not cursor.status.is_failure


def test_only_the_primary_sequence_of_a_token_decides_what_it_sees_kv_16() -> None:
    cache = cache_of()
    decode(cache, [[0], [1], [1]], [0, 0, 1])
    ubatch = ubatch_of([[0, 1]], [9])
    slot = cache.find_slot(ubatch)
    assert slot is not None
    cache.apply(ubatch, slot)
    assert cache.visible(ubatch, slot)[0].tolist() == [[True, False, False, True, False, False, False, False]]


def test_without_causality_a_row_sees_what_is_ahead_of_it_kv_16() -> None:
    cache = cache_of(4)
    ubatch = ubatch_of([[0], [0], [1]], [0, 1, 0])
    slot = cache.find_slot(ubatch)
    assert slot is not None
    cache.apply(ubatch, slot)
    seen = cache.visible(ubatch, slot, causal=False)[0].astype(int)
    assert seen.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]]


def test_equal_positions_of_an_image_are_ordered_by_row_and_column_kv_16() -> None:
    cache = KVCache(8, n_seq_max=1, unified=True, n_pos_dims=3)
    grid = [(0, 0), (0, 1), (1, 0), (1, 1)]  # y, x of four tokens at the same first position
    pos = np.array([[5] * 4, [y for y, _ in grid], [x for _, x in grid]])
    ubatch = replace(ubatch_of([[0]] * 4), pos=pos)
    slot = cache.find_slot(ubatch)
    assert slot is not None
    cache.apply(ubatch, slot)
    seen = cache.visible(ubatch, slot)[0][:, :4]
    assert seen.tolist() == np.tri(4, dtype=bool).tolist()
    with pytest.raises(InvalidBatch, match="cannot be shifted"):
        cache.seq_add(0, None, None, 2)
    with pytest.raises(InvalidBatch, match="cannot be shifted"):
        cache.seq_div(0, None, None, 2)


@pytest.mark.parametrize("unified", [True, False])
def test_ids_out_of_range_are_refused_by_every_operation_sq_1(unified: bool) -> None:
    cache = cache_of(unified=unified, n_seq_max=2)
    decode(cache, [[0], [1]])
    bad = 256 if unified else 2
    before = digest(cache)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("seq_rm", (bad, 0, None)),
        ("seq_cp", (0, bad)),
        ("seq_cp", (bad, 0)),
        ("seq_keep", (bad,)),
        ("seq_add", (bad, 0, None, 1)),
        ("seq_div", (bad, 0, None, 2)),
        ("pos_min", (bad,)),
        ("pos_max", (-1,)),
        ("seq_rm", (-1, 0, None)),
    ]
    for name, arguments in calls:
        with pytest.raises(InvalidBatch, match="does not exist"):
            getattr(cache, name)(*arguments)
    assert digest(cache) == before


def test_shared_cells_cannot_be_divided_either_sq_13() -> None:
    cache = cache_of()
    decode(cache, [[0, 1], [0, 1]])
    before = digest(cache)
    with pytest.raises(InvalidBatch, match="cannot move") as refused:
        cache.seq_div(0, None, None, 2)
    assert refused.value.reason == "shared_cell"
    assert digest(cache) == before
    cache.seq_div(0, 5, None, 2)  # no shared cell in range


@pytest.mark.parametrize("distance", [1 << 31, -(1 << 31), 1 << 70])
def test_shifts_that_no_position_survives_are_refused(distance: int) -> None:
    cache = cache_of()
    decode(cache, [[0]])
    with pytest.raises(InvalidBatch, match="too far"):
        cache.seq_add(0, None, None, distance)


class Recorder:
    """Tensors that write down what is asked of them, and fail when told to."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.fails = False

    def copy_stream(self, source: int, target: int) -> None:
        self.log.append(("copy", source, target))

    def shift_keys(self, stream: int, shifts: Ints) -> None:
        if self.fails:
            raise Aborted("stopped", reason="abort")
        self.log.append(("shift", stream, shifts.tolist()))

    def zero(self) -> None:
        self.log.append(("zero",))


def test_an_update_copies_streams_in_order_and_then_shifts_keys_up_3() -> None:
    tensors = Recorder()
    cache = KVCache(4, n_seq_max=3, unified=False, tensors=tensors)
    decode(cache, [[0], [0]])
    cache.seq_cp(0, 1)
    cache.seq_add(1, 1, None, 5)
    cache.seq_cp(1, 2)
    assert flush(Coordinator(cache))
    assert tensors.log == [("copy", 0, 1), ("copy", 1, 2), ("shift", 1, [0, 5, 0, 0]), ("shift", 2, [0, 5, 0, 0])]
    assert not flush(Coordinator(cache))
    assert len(tensors.log) == 4


def test_a_failed_key_shift_stays_pending_up_5() -> None:
    tensors = Recorder()
    cache = KVCache(4, n_seq_max=2, unified=False, tensors=tensors)
    decode(cache, [[0]])
    cache.seq_cp(0, 1)
    cache.seq_add(1, None, None, 3)
    tensors.fails = True
    with pytest.raises(Aborted):
        flush(Coordinator(cache))
    assert cache.has_shift
    assert cache.pending_copies == []  # the copy was done, and is not done twice
    tensors.fails = False
    assert flush(Coordinator(cache))
    assert tensors.log == [("copy", 0, 1), ("shift", 1, [3, 0, 0, 0])]
    assert not cache.has_shift


def test_optimising_finds_nothing_to_do_up_7() -> None:
    cache = cache_of()
    decode(cache, [[0]])
    assert Coordinator(cache).prepare_update(optimise=True).value == "no_update"


def test_clearing_the_data_too_zeroes_it_kv_2() -> None:
    tensors = Recorder()
    cache = KVCache(4, n_seq_max=2, unified=False, tensors=tensors)
    decode(cache, [[0]])
    cache.clear()
    assert tensors.log == []
    cache.clear(data=True)
    assert tensors.log == [("zero",)]


def test_a_saved_sequence_leaves_out_what_its_last_position_does_not_see_st_4() -> None:
    cache = cache_of(8, kind="standard", n_swa=2)
    decode(cache, [[0]] * 5)
    assert cache.saved_cells(0).tolist() == [3, 4]
    assert cache.saved_cells(1).tolist() == []


def test_a_loaded_sequence_replaces_the_old_one_or_leaves_it_empty_st_5() -> None:
    cache = cache_of(4)
    decode(cache, [[0], [1]])
    cells = cache.load_sequence(0, np.array([5, 6, 7]))
    assert cells is not None
    assert cells.tolist() == [0, 2, 3]
    assert (cache.pos_min(0), cache.pos_max(0)) == (5, 7)
    assert cache.load_sequence(1, np.arange(3)) is None
    assert cache.pos_max(1) is None
    assert cache.pos_max(0) == 7
    assert cache.load_sequence(0, np.arange(0)) is not None  # an empty state empties the target (ST-6)
    assert cache.pos_max(0) is None


def test_a_loaded_stream_fills_cells_from_the_first_on_st_7() -> None:
    cache = cache_of(4, n_seq_max=2, unified=False)
    decode(cache, [[0]])
    cache.load_stream(1, CellRows(np.array([3, 4]), None, np.array([1, 1]), np.array([1, 1])))
    assert told(cache.streams[1].cells) == [[3, [1], 0], [4, [1], 0], None, None]
    assert [stream.head for stream in cache.streams] == [1, 0]


@pytest.mark.parametrize("window", [Window(), Window("standard", 16)])
def test_planning_in_a_cache_99_percent_full_takes_less_than_thrice_the_time_at_50_percent(window: Window) -> None:
    n_cells, ubatch, least = 32_768, ubatch_of([[9]] * 32), []
    for fill in (0.50, 0.99):
        cache = KVCache(n_cells, n_seq_max=256, unified=True, window=window)
        taken = np.sort(np.random.default_rng(1).permutation(n_cells)[: int(n_cells * fill)])
        cache.streams[0].cells.set_position(taken, taken)
        cache.streams[0].cells.add(taken, taken % 8)
        assert cache.prepare([ubatch, ubatch]) is not None
        # The least of many: whatever else the machine does only ever adds to it.
        least.append(min(timeit.repeat(partial(cache.prepare, [ubatch, ubatch]), number=1, repeat=40)))
    assert least[1] < 3 * least[0]
