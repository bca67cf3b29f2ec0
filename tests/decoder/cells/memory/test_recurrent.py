"""Recurrent memory: the states that runs really leave behind, against each sequence's own history of tokens.

A state is stood for by the tuple of all tokens that went into it. `Store` does to its rows what a run is told to do,
so a wrong source, plane or move shows as a sequence with another sequence's history.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.cache.state_run import Move, StateRun, StateSource
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.memory.coordinator import Coordinator
from ostinato.decoder.cells.memory.cursor import PreparedBatch
from ostinato.decoder.cells.memory.recurrent import RecurrentMemory
from ostinato.decoder.cells.memory.recurrent_state import State, place
from ostinato.errors import InternalError, InvalidBatch
from tests.counts import soak
from tests.decoder.cells.memory.makers import splitter_of
from tests.vectors.ubatches import ubatch_of

N_SEQ = 4
History = tuple[int, ...]
GARBAGE: History = (-1,)


class Store:
    """Rows of 1 + n_snapshots planes, each the history that went into the state."""

    def __init__(self, n_rows: int, n_planes: int) -> None:
        self.rows = [[GARBAGE] * n_planes for _ in range(n_rows)]

    def run(self, run: StateRun, ubatch: Ubatch) -> list[tuple[int, int, History]]:
        """What a run reads and computes; nothing is written before `commit`."""
        assert ubatch.token is not None
        writes = [
            (move.target, plane, state) for move in run.moves for plane, state in enumerate(self.rows[move.source])
        ]
        for k, start in enumerate(run.starts):
            history = () if start is None else self.rows[start.row][start.plane]
            tokens = ubatch.token[k * ubatch.n_seq_tokens : (k + 1) * ubatch.n_seq_tokens].tolist()
            for back in range(min(len(tokens), len(self.rows[0]))):
                writes.append((run.head + k, back, history + tuple(tokens[: len(tokens) - back])))
        return writes

    def commit(self, writes: list[tuple[int, int, History]]) -> None:
        for row, plane, state in writes:
            self.rows[row][plane] = state


@dataclass
class Told:
    """What a sequence should be: its tokens, its position, and how many of its last tokens can be forgotten."""

    history: History
    position: int
    can_forget: int


class Both:
    """Recurrent memory over a store, and what each sequence should be."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.n_snapshots = data.draw(st.sampled_from([2, 3, 1, 0]))
        self.n_ubatch = data.draw(st.integers(self.n_snapshots + 2, 8))
        self.states = RecurrentMemory(N_SEQ, n_snapshots=self.n_snapshots)
        self.memory = Coordinator(recurrent=self.states)
        self.store = Store(N_SEQ, 1 + self.n_snapshots)
        self.told: dict[int, Told] = {}
        self.next_token = 0

    def check(self) -> None:
        """RM-2, positions (RM-17), and the state that the next run would start from (RM-13)."""
        state = self.states.state
        for s in range(N_SEQ):
            holding = [cell for cell, ids in enumerate(state.ids) if s in ids]
            assert holding == ([] if state.tail[s] is None else [state.tail[s]])
            told, source = self.told.get(s), self.states.source_of(s)
            assert self.memory.pos_min(s) == self.memory.pos_max(s) == (None if told is None else told.position)
            assert (source is None) == (told is None)
            if told is not None and source is not None:
                assert self.store.rows[source.row][source.plane] == told.history
        for cell, ids in enumerate(state.ids):
            assert bool(ids) == (state.position[cell] is not None) == (state.source[cell] is not None)
        assert state.used == len({cell for cell in state.tail if cell is not None})

    def decode(self) -> None:
        """A batch; a run may fail, and then its ubatch has never been (RM-19)."""
        all_outputs = self.data.draw(st.booleans())
        ids = self.batch(all_outputs)
        tokens = list(range(self.next_token, self.next_token + len(ids)))
        self.next_token += len(ids)
        try:
            splitter = splitter_of(ids, token=tokens, memory=self.memory, limit=N_SEQ)
        except InvalidBatch:  # shared tokens of sequences that are not in step
            return
        before = self.states.state.copy()
        cursor = self.memory.prepare_batch(splitter, self.n_ubatch, all_outputs)
        assert self.states.state == before
        self.run(cursor)

    def batch(self, may_share: bool) -> list[list[int]]:
        single = st.integers(0, N_SEQ - 1).map(lambda s: [s])
        if self.data.draw(st.booleans()):  # one sequence by itself: the run is long, and can be rolled back
            return [self.data.draw(single)] * self.data.draw(st.integers(2, 6))
        rest = self.data.draw(st.lists(single, min_size=1, max_size=9))
        shared = self.data.draw(st.sampled_from([[], [[0, 1]], [[2, 1, 0], [2, 1, 0]]])) if may_share else []
        return [*shared, *rest]

    def run(self, cursor: PreparedBatch) -> None:
        fails_at = self.data.draw(st.integers(-6, len(cursor.ubatches) - 1))
        more = True
        for k in range(len(cursor.ubatches)):
            assert more
            cursor.apply()
            run = cursor.place(self.states)
            assert run is not None
            writes = self.store.run(run, cursor.ubatch)
            if k == fails_at:
                cursor.roll_back()
                return
            self.store.commit(writes)
            self.tell(cursor.ubatch)
            more = cursor.advance()

    def tell(self, ubatch: Ubatch) -> None:
        assert ubatch.token is not None
        n = ubatch.n_seq_tokens
        for k in range(ubatch.n_seqs):
            tokens = tuple(ubatch.token[k * n : (k + 1) * n].tolist())
            ids = ubatch.ids_of(k * n)
            assert all(ubatch.ids_of(row) == ids for row in range(k * n, (k + 1) * n))
            had = self.told.get(ids[0], Told((), -1, 0))
            last = int(ubatch.first_pos[(k + 1) * n - 1])
            for s in ids:
                self.told[s] = Told(had.history + tokens, last, min(self.n_snapshots, n - 1))

    def remove(self) -> None:
        """RM-9 for a single sequence, and RM-11 for all."""
        s = self.data.draw(st.sampled_from([None, *range(N_SEQ)]))
        p0, p1 = self.data.draw(st.none() | st.integers(0, 12)), self.data.draw(st.none() | st.integers(0, 14))
        before = self.states.state.copy()
        expected = self.forget_all(p0, p1) if s is None else self.forget(s, p0 or 0, 10**9 if p1 is None else p1)
        assert self.memory.seq_rm(s, p0, p1) is expected
        if not expected:
            assert self.states.state == before

    def forget_all(self, p0: int | None, p1: int | None) -> bool:
        if p1 is not None:
            return (p0 or 0) >= p1
        if not p0:
            self.told.clear()
        return not p0

    def forget(self, s: int, p0: int, p1: int) -> bool:
        told = self.told.get(s)
        if told is None or p0 >= p1 or p0 > told.position:
            return True
        if p1 <= told.position:
            return False
        if p0 == 0:
            del self.told[s]
            return True
        r = told.position - (p0 - 1)
        if r > told.can_forget:
            return False
        self.told[s] = Told(told.history[: len(told.history) - r], p0 - 1, told.can_forget - r)
        return True

    def known(self) -> int:
        """A sequence: the one rolled back, one that has a state, or any."""
        back = [s for s in self.told if self.states.state.back[s]]
        return self.data.draw(st.sampled_from(back or sorted(self.told) or [0]) | st.integers(0, N_SEQ - 1))

    def back(self) -> None:
        """A roll back by a few tokens, which random ranges seldom are."""
        s = self.known()
        if s in self.told:
            p0 = self.told[s].position + 1 - self.data.draw(st.integers(1, 3))
            expected = self.forget(s, max(p0, 0), 10**9)
            assert self.memory.seq_rm(s, p0, None) is expected

    def operate(self) -> None:
        a, b = self.known(), self.data.draw(st.integers(0, N_SEQ - 1))
        name = self.data.draw(st.sampled_from(["copy", "copy", "copy", "copy", "keep", "shift", "load", "clear"]))
        if name == "copy":
            self.memory.seq_cp(a, b, 1, 2)  # the range is ignored (RM-12)
            if a != b:
                self.told.pop(b, None)
                if a in self.told:
                    self.told[b] = self.told[a]
        elif name == "keep":
            self.memory.seq_keep(a)
            self.told = {s: told for s, told in self.told.items() if s == a}
        elif name == "shift":
            self.shift(a)
        elif name == "load":
            self.load(a)
        else:
            self.memory.clear()
            self.told.clear()

    def shift(self, s: int) -> None:
        told = self.told.get(s)
        shared = sum(1 for cell in self.states.state.tail if cell is not None and cell == self.states.state.tail[s]) > 1
        if told is None or shared:
            return
        self.memory.seq_add(s, None, None, 3)
        self.told[s] = Told(told.history, told.position + 3, told.can_forget)

    def load(self, s: int) -> None:
        """ST-11: a saved state of one token's worth of roll back."""
        self.memory.seq_rm(s)
        run = self.states.load(frozenset({s}), 7)
        moves = [(m.target, plane, x) for m in run.moves for plane, x in enumerate(self.store.rows[m.source])]
        self.store.commit([*moves, (run.head, 0, (1_000_000 + s,))])
        self.told[s] = Told((1_000_000 + s,), 7, 0)


@pytest.mark.soak
@pytest.mark.slow
@given(st.data())
@settings(max_examples=soak(3_000), derandomize=True, deadline=None)
def test_every_sequence_keeps_the_state_of_its_own_tokens(data: st.DataObject) -> None:
    both = Both(data)
    for _ in range(data.draw(st.integers(4, 18))):
        data.draw(st.sampled_from([both.decode, both.decode, both.back, both.remove, both.operate]))()
        both.check()


def states_of(memory: Coordinator) -> RecurrentMemory:
    assert memory.recurrent is not None
    return memory.recurrent


def decoded(ids: list[list[int]], *, n_snapshots: int = 0) -> Coordinator:
    memory = Coordinator(recurrent=RecurrentMemory(N_SEQ, n_snapshots=n_snapshots))
    more(memory, ids)
    return memory


def more(memory: Coordinator, ids: list[list[int]]) -> None:
    cursor = memory.prepare_batch(splitter_of(ids, memory=memory, limit=N_SEQ), 8, False)
    for _ in cursor.ubatches:
        cursor.apply()
        cursor.advance()


def test_at_least_one_cell_rm_1() -> None:
    assert [RecurrentMemory(n).size for n in (0, 1, 7)] == [1, 1, 7]


def test_swapped_cells_are_brought_home_with_the_run_rm_6() -> None:
    memory = decoded([[2], [0], [1]])  # 0 and 1 sit in cells 0 and 1 of the first run, 2 in cell 2 of the second
    assert states_of(memory).state.tail[:3] == [1, 2, 0]
    splitter = splitter_of([[0], [1], [2]], memory=memory, limit=N_SEQ)
    cursor = memory.prepare_batch(splitter, 8, False)
    run = cursor.place(states_of(memory))
    assert run == StateRun(0, 3, (StateSource(1, 0), StateSource(2, 0), StateSource(0, 0)), ())
    more(memory, [[1]])
    splitter = splitter_of([[1], [2]], memory=memory, limit=N_SEQ)
    run = memory.prepare_batch(splitter, 8, False).place(states_of(memory))
    assert run == StateRun(0, 3, (StateSource(2, 0), StateSource(0, 0)), (Move(1, 2),))


def test_no_empty_cell_is_no_room_rather_than_a_crash_rm_7() -> None:
    memory = RecurrentMemory(2)
    full = State([5, 5], [frozenset({0}), frozenset({1})], [0, 1], [None, 1], [0, 0], [1, 1])
    memory._state = full  # a broken invariant on purpose: sequence 0 is in a cell that it does not know
    assert memory.prepare([ubatch_of([[0]], n_seqs=1, equal_seqs=True)]) is None
    assert memory.state is full


def test_ubatches_of_unequal_sets_are_a_mistake_rm_6() -> None:
    with pytest.raises(InternalError, match="equally long sets"):
        place(State.empty(2), ubatch_of([[0], [1]]))


def test_an_id_without_a_cell_names_its_token_rm_4() -> None:
    memory = Coordinator(recurrent=RecurrentMemory(2))
    with pytest.raises(InvalidBatch, match=r"token 1: sequence 5 .*ids are 0 to") as refused:
        memory.prepare_batch(splitter_of([[0], [5]]), 8, False)
    assert (refused.value.reason, refused.value.index) == ("seq_range", 1)
    assert memory.pos_max(5) is None


def test_shared_tokens_that_cannot_be_split_name_the_first_rm_5() -> None:
    memory = Coordinator(recurrent=RecurrentMemory(4))
    with pytest.raises(InvalidBatch, match=r"token 0: belongs to sequences \[0, 1\].*one sequence") as refused:
        memory.prepare_batch(splitter_of([[0, 1], [0]]), 8, False)
    assert refused.value.reason == "coupled_unsupported"


def test_rolling_back_one_owner_leaves_the_state_of_the_other_rm_10() -> None:
    memory = decoded([[0]] * 4, n_snapshots=2)
    memory.seq_cp(0, 1)
    assert memory.seq_rm(0, 3)
    assert (memory.pos_max(0), memory.pos_max(1)) == (2, 3)
    assert (states_of(memory).source_of(0), states_of(memory).source_of(1)) == (StateSource(0, 1), StateSource(0, 0))
    cursor = memory.prepare_batch(splitter_of([[1]], memory=memory, limit=N_SEQ), 8, False)
    run = cursor.place(states_of(memory))
    assert run is not None
    assert run.moves == (Move(0, 1),)  # the row of 1 is written, and 0 still needs it


def test_a_run_consumes_the_pending_roll_back_and_a_failed_one_does_not_rm_13() -> None:
    memory = decoded([[0]] * 4, n_snapshots=2)
    assert memory.seq_rm(0, 2)
    for fails in (True, False):
        cursor = memory.prepare_batch(splitter_of([[0]], memory=memory, limit=N_SEQ), 8, False)
        cursor.apply()
        run = cursor.place(states_of(memory))
        assert run is not None
        assert run.starts == (StateSource(0, 2),)
        assert states_of(memory).state.back[0] == 0
        if fails:
            cursor.roll_back()
            assert states_of(memory).state.back[0] == 2
    assert not memory.seq_rm(0, 2)  # the last run was of one token (RM-14)


def test_a_copy_inherits_what_can_be_rolled_back_rm_14() -> None:
    memory = decoded([[0]] * 4, n_snapshots=2)
    memory.seq_cp(0, 3)
    assert not memory.seq_rm(3, 1)
    assert memory.seq_rm(3, 2)


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("seq_add", (0, None, None, -3), "shift_range"),
        ("seq_add", (1, None, None, 1), "shared_cell"),
        ("seq_div", (1, None, None, 2), "shared_cell"),
        ("seq_div", (0, None, None, 0), "divisor"),
        ("seq_add", (0, None, None, 1 << 40), "shift_range"),
        ("seq_rm", (4, None, None), "seq_range"),
        ("seq_cp", (0, 4), "seq_range"),
        ("seq_keep", (-1,), "seq_range"),
    ],
)
def test_refused_operations_change_nothing_rm_11_rm_16(name: str, arguments: tuple[Any, ...], reason: str) -> None:
    memory = decoded([[0], [0], [1]])
    memory.seq_cp(1, 2)
    before = states_of(memory).state.copy()
    with pytest.raises(InvalidBatch) as refused:
        getattr(memory, name)(*arguments)
    assert refused.value.reason == reason
    assert states_of(memory).state == before


def test_shifts_out_of_range_of_the_state_or_of_nothing_do_nothing_rm_16() -> None:
    memory = decoded([[0], [0]])
    for arguments in ((0, 0, 1, 5), (0, 2, None, 5), (0, 0, None, 0), (0, 1, 1, 5), (3, None, None, 5)):
        memory.seq_add(*arguments)
        assert memory.pos_max(0) == 1
    memory.seq_div(0, 5, 5, 0)
    memory.seq_div(0, None, None, 1)
    assert memory.pos_max(0) == 1


def test_updates_are_never_needed_and_shifting_is_always_possible_rm_18() -> None:
    memory = decoded([[0]])
    memory.seq_add(0, None, None, 5)
    assert memory.prepare_update(optimise=True).value == "no_update"
    assert memory.can_shift


def test_rolling_back_what_was_not_applied_is_a_mistake_rm_19() -> None:
    memory = RecurrentMemory(2)
    ubatch = ubatch_of([[0]], n_seqs=1, equal_seqs=True)
    (run,) = memory.prepare([ubatch]) or []
    with pytest.raises(InternalError, match="no applied ubatch"):
        memory.roll_back(ubatch, run)
    memory.apply(ubatch, run)
    memory.seq_cp(0, 1)  # since then the memory has changed otherwise
    with pytest.raises(InternalError, match="no applied ubatch"):
        memory.roll_back(ubatch, run)


def test_a_plan_that_memory_has_outgrown_is_refused_rm_6() -> None:
    memory = RecurrentMemory(2)
    ubatch = ubatch_of([[0]], n_seqs=1, equal_seqs=True)
    (run,) = memory.prepare([ubatch]) or []
    memory.load(frozenset({1}), 3)
    before = memory.state.copy()
    with pytest.raises(InternalError, match="has changed since"):
        memory.apply(ubatch, run)
    assert memory.state == before


def test_loading_over_a_state_is_a_mistake_st_5() -> None:
    memory = states_of(decoded([[0]]))
    with pytest.raises(InternalError, match="has a state already"):
        memory.load(frozenset({0}), 3)
    memory.load(frozenset({1, 2}), 3)
    assert (memory.pos_max(1), memory.pos_max(2)) == (3, 3)


def test_clearing_the_data_too_zeroes_it() -> None:
    class Zeroed:
        count = 0

        def zero(self) -> None:
            self.count += 1

    states = Zeroed()
    memory = RecurrentMemory(2, tensors=states)
    memory.clear()
    memory.clear(data=True)
    assert states.count == 1
