"""Random operations on a decoder of every kind, against an oracle that computes all from the token histories.

After every step memory holds what the oracle says and nothing else; logits agree to 1e-4; what is refused has changed
nothing, byte for byte (G-3), and what fails half way leaves whole ubatches only (G-4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor

from ostinato.decoder.cells.memory.status import Status
from ostinato.errors import Aborted, AllocationFailed, ComputeFailed, InvalidBatch, NoSlot
from tests.counts import soak
from tests.decoder.cells.batches import Drawn, draw_batch, spoil
from tests.decoder.cells.oracle import Entry, History, Memory, Row, inside
from tests.decoder.cells.rig import FAULTS, KINDS, N_VOCAB, Fault, Kind, Rig, assert_close, contents, induced

N_BATCH, N_OUTPUTS_MAX, MAX_POSITION = 16, 15, 120
NO_END = 1 << 30

CLASSES: dict[Fault, type[BaseException]] = {
    "abort": Aborted,
    "op": ComputeFailed,
    "interrupt": KeyboardInterrupt,
    "outputs": AllocationFailed,
    "graph": ComputeFailed,
    "graph memory": AllocationFailed,
    "apply": ComputeFailed,
    "extract": ComputeFailed,
    "rows": ComputeFailed,
    "commit": ComputeFailed,
}

Bounds = tuple[int | None, int | None]

bounds = st.one_of(
    st.just((None, None)),
    st.tuples(st.one_of(st.none(), st.integers(-1, 16)), st.one_of(st.none(), st.integers(-1, 24))),
)


class Operations(RuleBasedStateMachine):
    """A decoder and its oracle, told the same things."""

    kind: ClassVar[Kind]

    def __init__(self) -> None:
        super().__init__()
        self.published: dict[int, Tensor | None] = {}  # what the last accepted batch gave, by batch index
        self.saved: list[tuple[History, bytes]] = []
        self.saved_all: list[tuple[Memory, bytes]] = []

    @initialize(
        data=st.data(),
        n_ubatch=st.integers(1, 8),
        cells=st.sampled_from([16, 24, 40]),
        n_rs_seq=st.sampled_from([0, 1, 2, 2]),
        embeddings=st.sampled_from([False, False, True]),
    )
    def build(self, data: st.DataObject, n_ubatch: int, cells: int, n_rs_seq: int, embeddings: bool) -> None:
        recurs = self.kind.startswith(("recurrent", "hybrid"))
        # Where one stream serves all, it takes any id, also above n_seq_max; states have a cell each (C-4, RM-4).
        ids = (0, 1, 2) if recurs or self.kind.endswith("-streams") else (0, 2, 255)
        self.rig = Rig.of(
            self.kind,
            ids,
            cells=cells,
            n_ubatch=max(n_ubatch, n_rs_seq + 2) if recurs else n_ubatch,
            n_batch=N_BATCH,
            n_outputs_max=N_OUTPUTS_MAX,
            n_rs_seq=n_rs_seq if recurs else 0,
            embeddings=embeddings,
        )
        self.decoder, self.oracle, self.memory = self.rig.decoder, self.rig.oracle, self.rig.decoder.memory
        # How far each sequence can surely go back by its snapshots, and how far at most (RM-14).
        self.back = dict.fromkeys(ids, (0, 0))
        self.decode(data)

    @invariant()
    def memory_is_what_the_oracle_says(self) -> None:
        self.rig.check()

    # Decoding

    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        self._decode(draw_batch(data.draw, self.rig, n_outputs_max=N_OUTPUTS_MAX))

    @rule(seed=st.integers(0, N_VOCAB - 1))
    def step(self, seed: int) -> None:
        """One more token for every sequence that there is."""
        following = {s: self.oracle.next_position(s) for s in self.oracle.ids}
        rows = [Row((seed + 5 * s) % N_VOCAB, at, (s,)) for s, at in following.items() if at is not None]
        if rows:
            self._decode(Drawn(tuple(rows), (True,) * len(rows), generated=True))

    @rule(data=st.data(), fault=st.sampled_from(FAULTS), n=st.integers(0, 24))
    def fail(self, data: st.DataObject, fault: Fault, n: int) -> None:
        n = n if fault in ("abort", "op", "interrupt") else n % 4
        self._decode(draw_batch(data.draw, self.rig, n_outputs_max=N_OUTPUTS_MAX), fault, n)

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        good = draw_batch(data.draw, self.rig, n_outputs_max=N_OUTPUTS_MAX, coupled=False)
        bad = spoil(data.draw, self.rig, good, self.decoder.settings.n_seq_limit)
        refused = self._refused(lambda: self.decoder.decode(bad.batch), bad.reason)
        assert refused.index == bad.index
        assert bad.index is None or str(refused).startswith(f"token {bad.index}:")
        self._check_published()

    def _refused(self, call: Callable[[], object], reason: str) -> InvalidBatch:
        """The call is refused for that reason, and not a byte of memory changes."""
        before = contents(self.decoder)
        with pytest.raises(InvalidBatch) as refused:
            call()
        assert refused.value.reason == reason
        assert contents(self.decoder) == before
        return refused.value

    def _decode(self, drawn: Drawn, fault: Fault | None = None, n: int = 0) -> None:
        self.rig.record.done = []
        before = None
        if fault is None:
            before = self.decoder.save_all(), contents(self.decoder)  # after pending updates, which are allowed
        try:
            with induced(self.rig, fault, n) as signal:
                self.decoder.decode(drawn.batch, abort=signal)
        except NoSlot:
            assert not (self._may_fit(drawn) and self._fits_near(drawn))
            assert self.rig.record.done == []
            assert before is None or (self.decoder.save_all(), contents(self.decoder)) == before
            self._check_published()
        except BaseException as error:
            if fault is None or not isinstance(error, CLASSES[fault]):
                raise
            self._commit(drawn, failed=True)
            if self.memory.prepare_update(optimise=False) is Status.SUCCESS:
                self._check_published()  # it was the pending update that was stopped: the batch had not begun (UP-5)
            else:
                self._check_nothing_published()
        else:
            assert self._may_fit(drawn)
            self._check_outputs(drawn, self._commit(drawn, failed=False))
        self.rig.check()

    def _commit(self, drawn: Drawn, *, failed: bool) -> list[Entry]:
        """What is in memory now: the ubatches that ran."""
        done = sorted(index for ubatch in self.rig.record.done for index in ubatch)
        assert failed or done == list(range(len(drawn.rows)))
        for s in self.oracle.ids:
            n = len(set(drawn.of(s)) & set(done))
            if n:
                most = min(self.rig.n_snapshots, n - 1)
                # The last tokens of a sequence stay together in one ubatch (SP-12), but not where another split is due.
                self.back[s] = (0 if failed or drawn.coupled or self.rig.embeds else most, most)
        return self.oracle.decode([drawn.rows[index] for index in done])

    def _check_outputs(self, drawn: Drawn, entries: list[Entry]) -> None:
        outputs = [index for index, flag in enumerate(drawn.outputs) if flag or self.rig.embeds]
        assert self.decoder.outputs.n_outputs == len(outputs)
        self.published = {}
        for index in reversed(range(len(drawn.rows))):
            logits = self.decoder.logits(index)
            assert (logits is not None) == (index in outputs)
            self.published[index] = None if logits is None else logits.clone()
        for index in outputs:
            assert_close(self.published[index], self.oracle.truth.logits(entries[index]), f"logits of token {index}")
            if self.rig.embeds:
                hidden = self.oracle.truth.of(entries[index]).hidden[0]
                assert_close(self.decoder.embedding(index), hidden, f"hidden row of token {index}")
        if outputs:
            assert torch.equal(cast(Tensor, self.decoder.logits(-1)), cast(Tensor, self.published[outputs[-1]]))

    def _check_published(self) -> None:
        """A batch that was refused has not touched the rows of the one before (OUT-16)."""
        for index, wanted in self.published.items():
            logits = self.decoder.logits(index)
            assert (logits is None) == (wanted is None)
            assert logits is None or wanted is None or torch.equal(logits, wanted)

    def _check_nothing_published(self) -> None:
        self.published = {}
        assert self.decoder.outputs.n_outputs == 0
        assert self.decoder.logits(-1) is None
        assert set(self.decoder.outputs.ids) == {None}

    def _some(self, data: st.DataObject) -> int:
        """A sequence, of those that hold something where there are any."""
        held = [s for s in self.oracle.ids if self.oracle.pos_max(s) is not None]
        s: int = data.draw(st.sampled_from(held or self.oracle.ids))
        return s

    def _go_on(self, data: st.DataObject) -> None:
        """What was done to memory shows in what is decoded next; or only later, after more was done to it."""
        self.rig.check()
        if data.draw(st.integers(0, 2)):
            self.decode(data)

    # Room

    def _may_fit(self, drawn: Drawn) -> bool:
        """Whether there are cells for full attention, where nothing is ever evicted."""
        capacity = self.decoder.settings.capacity
        if not self.oracle.attends:
            return True
        if self.oracle.unified:
            return len(drawn.rows) + self.oracle.n_full() <= capacity
        return all(len(drawn.of(s)) + self.oracle.n_full([s]) <= capacity for s in self.oracle.ids)

    def _fits_near(self, drawn: Drawn) -> bool:
        """Whether the windowed cache has cells enough without evicting anything."""
        windowed = self.decoder.parts.windowed
        if windowed is None:
            return True
        if self.oracle.unified:
            return len(drawn.rows) + self.oracle.n_near() <= windowed[0].size
        return all(len(drawn.of(s)) + self.oracle.n_near([s]) <= windowed[0].size for s in self.oracle.ids)

    # Sequences

    @rule(data=st.data(), at=bounds)
    def remove(self, data: st.DataObject, at: Bounds) -> None:
        self._remove(self._some(data) if data.draw(st.integers(0, 7)) else None, *at)
        self._go_on(data)

    @rule(data=st.data(), distances=st.lists(st.integers(1, 2), min_size=1, max_size=2), fork=st.booleans())
    def roll_back(self, data: st.DataObject, distances: list[int], fork: bool) -> None:
        """Some tokens that have just been decoded are taken back, once or twice, perhaps with a fork in between."""
        self.decode(data)
        s = self._some(data)
        for n in distances:
            last = self.oracle.pos_max(s)
            if last is not None and last >= n:
                self._remove(s, last + 1 - n, None)
            if fork:
                self._copy(s, data.draw(st.sampled_from(self.oracle.ids)), None, None)
        self._go_on(data)

    def _remove(self, s: int | None, p0: int | None, p1: int | None) -> None:
        wanted = self._forgettable(s, p0, p1)
        before = contents(self.decoder)
        removed = self.memory.seq_rm(s, p0, p1)
        assert wanted is None or removed == wanted
        if not removed:
            assert contents(self.decoder) == before
            return
        for t in self.oracle.ids if s is None else [s]:
            state = self.oracle.of[t].state
            if state is not None and inside(state.position, p0, p1):
                n = state.position + 1 - max(p0 or 0, 0)
                sure, most = self.back[t]
                self.back[t] = (max(0, sure - n), max(0, most - n))
        self.oracle.remove(s, p0, p1)

    def _forgettable(self, s: int | None, p0: int | None, p1: int | None) -> bool | None:
        """Whether memory can forget the range (RM-9, RM-11); None where it depends on how a batch was split."""
        start, stop = max(p0 or 0, 0), NO_END if p1 is None or p1 < 0 else p1
        if not self.oracle.recurs or start >= stop:
            return True
        if s is None:
            return (start, stop) == (0, NO_END)
        state = self.oracle.of[s].state
        if state is None or start > state.position:
            return True
        if stop <= state.position:
            return False
        sure, most = self.back[s]
        n = state.position + 1 - start
        return True if start == 0 or n <= sure else False if n > most else None

    @rule(data=st.data(), at=bounds)
    def copy(self, data: st.DataObject, at: Bounds) -> None:
        self._copy(self._some(data), data.draw(st.sampled_from(self.oracle.ids)), *at)
        self._go_on(data)

    def _copy(self, a: int, b: int, p0: int | None, p1: int | None) -> None:
        ends = [held.position for held in self.oracle.of[a].full]
        partial = (p0 or 0) > 0 or (p1 is not None and 0 <= p1 <= max(ends, default=-1))
        if a != b and partial and not self.oracle.unified:
            self._refused(lambda: self.memory.seq_cp(a, b, p0, p1), "partial_copy")
            return
        self.memory.seq_cp(a, b, p0, p1)
        self.oracle.copy(a, b, p0, p1)
        self.back[b] = self.back[a]

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        s = self._some(data)
        self.memory.seq_keep(s)
        self.oracle.keep(s)
        self._go_on(data)

    @rule(zero=st.booleans())
    def clear(self, zero: bool) -> None:
        self.memory.clear(zero)
        self.oracle.remove(None, None, None)

    @rule(data=st.data(), at=bounds, distance=st.integers(-8, 8).filter(bool))
    def shift(self, data: st.DataObject, at: Bounds, distance: int) -> None:
        s = self._some(data)
        if max((held.position for held in self.oracle.of[s].full), default=0) + distance > MAX_POSITION:
            return
        state = self.oracle.of[s].state
        below = state is not None and inside(state.position, *at) and state.position + distance < 0
        if self._moves(s, at, lambda: self.memory.seq_add(s, *at, distance), "shift_range" if below else None):
            self.oracle.shift(s, *at, distance)
        self._go_on(data)

    @rule(data=st.data(), at=bounds, divisor=st.integers(0, 3).filter(lambda divisor: divisor != 1))
    def divide(self, data: st.DataObject, at: Bounds, divisor: int) -> None:
        s = self._some(data)
        wrong = "divisor" if divisor < 1 else None
        if self._moves(s, at, lambda: self.memory.seq_div(s, *at, divisor), wrong):
            self.oracle.divide(s, *at, divisor)
        self._go_on(data)

    def _moves(self, s: int, at: Bounds, move: Callable[[], None], wrong: str | None) -> bool:
        """Whether positions moved; refused are moves of what is shared, or cannot turn, or for a reason given."""
        p0, p1 = at
        if (p0 if p0 is not None and p0 > 0 else 0) == (NO_END if p1 is None or p1 < 0 else p1):
            move()  # an empty range: nothing happens, whatever is asked
            return False
        if not self.memory.can_shift:
            self._refused(move, "shift_unsupported")
            return False
        if wrong == "divisor":
            self._refused(move, wrong)
            return False
        if self.oracle.is_shared(s, p0, p1):
            self._refused(move, "shared_cell")
            return False
        if wrong is not None:
            self._refused(move, wrong)
            return False
        move()
        return True

    # States

    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        s = self._some(data)
        self.saved.append((self.oracle.saved(s), self.decoder.save_sequence(s)))

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        if not self.saved:
            return
        s = self._some(data)
        history, state = self.saved[data.draw(st.integers(0, len(self.saved) - 1))]
        self.back[s] = (0, 0)
        self.oracle.remove(s, None, None)
        try:
            self.decoder.load_sequence(s, state)
        except NoSlot:
            room = self.decoder.settings.capacity - self.oracle.n_full(None if self.oracle.unified else [s])
            assert len(history.full) > room or self.oracle.window is not None
        else:
            self.oracle.restore(s, history)
        self._go_on(data)

    @rule()
    def save_everything(self) -> None:
        self.saved_all.append((self.oracle.saved_all(), self.decoder.save_all()))

    @rule(data=st.data())
    def restore_everything(self, data: st.DataObject) -> None:
        if not self.saved_all:
            return
        memory, state = self.saved_all[data.draw(st.integers(0, len(self.saved_all) - 1))]
        self.decoder.load_all(state)
        self.oracle.restore_all(memory)
        self.back = dict.fromkeys(self.oracle.ids, (0, 0))
        self._go_on(data)

    @rule()
    def look_closely(self) -> None:
        self.rig.check_tensors()


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_does_what_the_token_histories_say(kind: Kind) -> None:
    run_state_machine_as_test(
        type("Operations", (Operations,), {"kind": kind}),
        settings=settings(
            max_examples=soak(240, part=20),
            stateful_step_count=24,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
