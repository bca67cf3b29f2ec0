"""The step boundary: the twin keeps its promises, and the C++ does to every byte what the twin does.

The same random scripts of a host (admissions, cancellations, grants, masks, a slow reader) run over several copies of
the arenas: one by the twin, one by `step_boundary.cpp`, one by lanes that take turns as the threads of a CUDA block
would, and one by the GPU, where there is one.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import build
from ostinato.backends.cuda.start import source
from ostinato.errors import HardwareCannot
from ostinato.loop.layout import (
    GRANT_PAGES,
    MAX_STOP_IDS,
    MAX_TOP,
    End,
    Fault,
    Finish,
    InboxKind,
    InboxWord,
    Layout,
    OutboxWord,
    SlotState,
    Tables,
    Word,
)
from ostinato.loop.step_boundary import StepBoundary, native_headers

CPU = torch.device("cpu")
PAGE_TOKENS = 4
PLAN_HASH = 0xFEDC_BA98_7654_3210  # more than an int64 holds: bits are compared, not numbers
EPOCH = 3
START_NS = 7 << 40 | 1_000  # more than 32 bits hold
LAYOUTS = (
    Layout(n_slots=3, max_pages=6, vocab=40, inbox_entries=16, outbox_entries=6),
    Layout(n_slots=2, max_pages=GRANT_PAGES, vocab=33, inbox_entries=4, outbox_entries=16),
    Layout(n_slots=1, max_pages=2, vocab=5, inbox_entries=2, outbox_entries=2),
    Layout(n_slots=11, max_pages=40, vocab=64, inbox_entries=32, outbox_entries=32),
)
ROOMY = Layout(n_slots=3, max_pages=6, vocab=40, inbox_entries=16, outbox_entries=64)


def as_int64(bits: int) -> int:
    return int(np.uint64(bits).astype(np.int64))


# Tables, the time in ns and, for lanes, the order in which they take turns; 1 if a step follows.
Native = Callable[[Tables, int, int], int]


@dataclass(frozen=True)
class Entry:
    """An outbox entry, read."""

    slot: int
    generation: int
    token: int
    position: int
    finish: Finish
    logprob: float
    time_ns: int
    top_ids: tuple[int, ...]


@dataclass
class Table:
    """The arenas of one engine, with the host's side of them and a sampler that chooses what the test says."""

    layout: Layout
    native: Native | None = None  # else the twin
    clock_ns: int = START_NS
    tables: Tables = field(init=False)

    def __post_init__(self) -> None:
        self.tables = Tables.of(self.layout)
        self.tables.table.host("plan_hash")[0] = as_int64(PLAN_HASH)
        self.tables.table.host("epoch")[0] = EPOCH
        self._twin = StepBoundary(
            self.tables, plan_hash=PLAN_HASH, epoch=EPOCH, page_tokens=PAGE_TOKENS, clock=lambda: self.clock_ns
        )

    def run(self) -> None:
        """One step boundary."""
        if self.native is None:
            self._twin()
        else:
            assert self.native(self.tables, self.clock_ns, 0) == self.word(Word.GO)

    def word(self, word: Word) -> int:
        return int(self.tables.rings.host("words")[word, 0])

    def set_word(self, word: Word, value: int) -> None:
        self.tables.rings.host("words")[word, 0] = value

    def of(self, name: str) -> np.ndarray:
        return self.tables.table.host(name)

    def publish(
        self,
        kind: int,
        slot: int = 0,
        generation: int = 0,
        first: int = 0,
        pages: tuple[int, ...] = (),
        count: int | None = None,
    ) -> None:
        head = self.word(Word.INBOX_HEAD)
        entry = self.tables.rings.host("inbox")[head % self.layout.inbox_entries]
        entry[:] = 0
        entry[InboxWord.KIND], entry[InboxWord.SLOT], entry[InboxWord.GENERATION] = kind, slot, generation
        entry[InboxWord.COUNT], entry[InboxWord.FIRST] = len(pages) if count is None else count, first
        entry[InboxWord.PAGES : InboxWord.PAGES + len(pages)] = pages
        self.set_word(Word.INBOX_HEAD, head + 1)

    def admit(self, slot: int, generation: int, *, first_token: int = 1, **admission: int | tuple[int, ...]) -> None:
        """Stage an admission and publish it; what is not given is what a plain request has."""
        for name in self.tables.admissions.names:
            self.tables.admissions.host(name)[slot] = 0
        plain = {"generation": generation, "position": 5, "left": 9, "granted": self.layout.max_pages * PAGE_TOKENS}
        for name, value in {**plain, **admission}.items():
            row = self.tables.admissions.host(name)[slot : slot + 1]
            if isinstance(value, tuple):
                row[0, : len(value)] = value
            else:
                row[0] = value
        self.of("first_token")[slot] = first_token
        self.publish(InboxKind.ADMIT, slot, generation)

    def step(self, *tokens: int) -> None:
        """A step whose sampler chooses these tokens, one for each row, and its step boundary."""
        assert self.of("n_rows")[0] == len(tokens)
        self.of("chosen")[: len(tokens)] = tokens
        self.clock_ns += 10
        self.run()

    def drain(self, most: int = 1_000_000) -> list[Entry]:
        tail, head = self.word(Word.OUTBOX_TAIL), self.word(Word.OUTBOX_HEAD)
        end = min(head, tail + most)
        entries = [self._entry(at % self.layout.outbox_entries) for at in range(tail, end)]
        self.set_word(Word.OUTBOX_TAIL, end)
        return entries

    def _entry(self, place: int) -> Entry:
        rings = self.tables.rings
        words = rings.host("outbox")[place]
        return Entry(
            slot=int(words[OutboxWord.SLOT]),
            generation=int(words[OutboxWord.GENERATION]),
            token=int(words[OutboxWord.TOKEN]),
            position=int(words[OutboxWord.POSITION]),
            finish=Finish(int(words[OutboxWord.FINISH])),
            logprob=float(words[OutboxWord.LOGPROB : OutboxWord.LOGPROB + 1].view(np.float32)[0]),
            time_ns=int(words[OutboxWord.TIME :].view(np.int64)[0]),
            top_ids=tuple(rings.host("outbox_top_ids")[place].tolist()),
        )

    def states(self) -> list[SlotState]:
        return [SlotState(state) for state in self.of("state").tolist()]

    def why(self) -> End:
        assert self.word(Word.GO) == 0
        return End(self.word(Word.WHY))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A store of compiled files for this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OSTINATO_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def library(source: str, name: str, layout: Layout) -> ctypes.CDLL:
    flags = (*build.CXX_FLAGS, "-Werror")
    try:
        path = build.shared_object(source, name, headers=native_headers(layout, PAGE_TOKENS), flags=flags)
    except HardwareCannot as error:
        pytest.skip(f"the C++ step boundary was not tested: {error}")
    return ctypes.CDLL(str(path))


def in_cpp(layout: Layout) -> Native:
    """step_boundary.h compiled for the CPU, with its sizes as constants as a GPU has them."""
    return called(cpp_library(layout).boundary_at)


def cpp_library(layout: Layout) -> ctypes.CDLL:
    return library(Path(__file__).with_name("step_boundary.cpp").read_text(), "step_boundary.cpp", layout)


def in_lanes(layout: Layout) -> Native:
    """step_boundary.h in lanes that take turns."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the step boundary was not run in lanes: they are switched as Linux does")
    source = Path(__file__).with_name("lanes.cpp").read_text()
    return called(library(source, "lanes.cpp", layout).boundary_in_lanes)


def called(function: Callable[..., int]) -> Native:
    def run(tables: Tables, now_ns: int, order: int) -> int:
        at = [ctypes.c_void_p(address) for address in (*tables.addresses, tables.grammar_address)]
        rest = (ctypes.c_uint64(PLAN_HASH), ctypes.c_uint64(EPOCH), ctypes.c_int64(now_ns), ctypes.c_uint32(order))
        return int(function(*at, *rest))

    return run


@cache  # a module is loaded once and never unloaded (E-8)
def in_cuda(layout: Layout) -> Native:
    """step_boundary.cu on the GPU, over copies of the arenas."""
    if not torch.cuda.is_available():
        pytest.skip("the CUDA step boundary was not run: no GPU")
    from cuda.core import Device, LaunchConfig, ObjectCode, launch

    Device(0).set_current()
    major, minor = torch.cuda.get_device_capability(0)
    headers = native_headers(layout, PAGE_TOKENS)
    binary = build.cubin(source("step_boundary.cu"), "step_boundary.cu", arch=f"sm_{major}{minor}", headers=headers)
    kernel = ObjectCode.from_cubin(binary).get_kernel("step_boundary")
    stream = Device(0).create_stream()

    def run(tables: Tables, now_ns: int, order: int) -> int:
        table, admissions, rings = (torch.from_numpy(arena.memory) for arena in tables.arenas)
        table, admissions, rings = table.cuda(), admissions.pin_memory(), rings.pin_memory()
        torch.cuda.synchronize()
        at = (table.data_ptr(), admissions.data_ptr(), rings.data_ptr(), 0)  # no grammars
        shape = LaunchConfig(grid=1, block=128)
        launch(stream, shape, kernel, *at, np.uint64(PLAN_HASH), np.uint64(EPOCH))
        torch.cuda.synchronize()
        words, step_ns = tables.rings.host("words"), tables.table.host("step_ns")
        head, last_ns = int(words[Word.OUTBOX_HEAD, 0]), int(step_ns[0])
        tables.table.memory[:] = table.cpu().numpy()
        tables.rings.memory[:] = rings.numpy()
        # The device's time is its own: what it stamped becomes what the test expects, and only that.
        if step_ns[0] != last_ns:
            times = tables.rings.host("outbox").view(np.int64)[:, OutboxWord.TIME // 2]
            for place in range(head, int(words[Word.OUTBOX_HEAD, 0])):
                assert times[place % layout.outbox_entries] == step_ns[0]
                times[place % layout.outbox_entries] = now_ns
            step_ns[0] = now_ns
        return int(words[Word.GO, 0])

    return run


Laid = Callable[[Layout], Table]
BODIES = {"cpp": in_cpp, "lanes": in_lanes, **({"cuda": in_cuda} if torch.cuda.is_available() else {})}


@pytest.fixture(
    params=[None, *(pytest.param(native, marks=pytest.mark.slow) for native in BODIES.values())],
    ids=["twin", *BODIES],
)
def laid(request: pytest.FixtureRequest, home: None) -> Laid:
    """A table for a layout, with the step boundary in each of its bodies."""
    return lambda layout: Table(layout, request.param and request.param(layout))


@pytest.fixture
def table(laid: Laid) -> Table:
    return laid(ROOMY)


# --- a token's way ---


def test_the_first_token_stands_at_its_own_place_and_the_next_ones_follow(table: Table) -> None:
    table.admit(1, generation=7, first_token=30, position=5)
    table.run()
    assert table.word(Word.GO) == 1
    assert table.of("row_slot")[: table.of("n_rows")[0]].tolist() == [1]
    assert (table.of("token")[1], table.of("position")[1]) == (30, 5)
    table.step(31)
    table.step(32)
    entries = table.drain()
    assert [(e.slot, e.generation, e.token, e.position) for e in entries] == [
        (1, 7, 30, 5),
        (1, 7, 31, 6),
        (1, 7, 32, 7),
    ]
    assert {e.finish for e in entries} == {Finish.NONE}
    assert [e.time_ns for e in entries] == [START_NS, START_NS + 10, START_NS + 20]
    assert table.of("made")[1] == 3
    assert table.of("left")[1] == 6
    assert table.word(Word.STEPS) == 2
    assert table.word(Word.LIVE) == 1


def test_a_sequence_ends_when_nothing_is_left_and_its_slot_leaves_the_step(table: Table) -> None:
    table.admit(0, generation=1, left=2)
    table.admit(2, generation=2)
    table.run()
    table.step(3, 4)
    assert [e.finish for e in table.drain()] == [Finish.NONE, Finish.NONE, Finish.LENGTH, Finish.NONE]
    assert table.states() == [SlotState.FINISHED, SlotState.FREE, SlotState.LIVE]
    assert table.of("row_slot")[0] == 2
    assert table.word(Word.LIVE) == 1


def test_a_stop_id_ends_a_sequence_even_as_its_last_token(table: Table) -> None:
    table.admit(0, generation=1, left=2, n_stop=2, stop_ids=(8, 9, 4))
    table.run()
    table.step(9)
    assert [e.finish for e in table.drain()] == [Finish.NONE, Finish.STOP]
    assert table.why() == End.IDLE


def test_only_the_first_n_stop_ids_count(table: Table) -> None:
    table.admit(0, generation=1, n_stop=1, stop_ids=(8, 9))
    table.run()
    table.step(9)
    assert table.states()[0] == SlotState.LIVE


def test_an_admission_whose_first_token_is_its_last_never_enters_a_step(table: Table) -> None:
    table.admit(0, generation=1, left=1)
    table.run()
    assert [e.finish for e in table.drain()] == [Finish.LENGTH]
    assert table.why() == End.IDLE
    assert table.word(Word.STEPS) == 0


def test_made_tokens_are_counted_for_penalties_and_forgotten_by_the_next_admission(table: Table) -> None:
    table.admit(0, generation=1, first_token=7, penalised=1)
    table.run()
    table.step(7)
    assert table.of("counts")[0, 7] == 2
    table.publish(InboxKind.CANCEL, 0, 1)
    table.admit(0, generation=2, first_token=8, penalised=1)
    table.step(7)
    assert table.of("counts")[0, 7] == 0
    assert table.of("counts")[0, 8] == 1


def test_most_probable_tokens_travel_with_their_entry(table: Table) -> None:
    table.of("first_top_ids")[1] = range(MAX_TOP)
    table.admit(1, generation=1, n_logprobs=2)
    table.run()
    table.of("top_ids")[0] = range(5, 5 + MAX_TOP)
    table.of("chosen_logprob")[0] = -0.5
    table.step(3)
    first, second = table.drain()
    assert first.top_ids == tuple(range(MAX_TOP))
    assert second.top_ids == tuple(range(5, 5 + MAX_TOP))
    assert second.logprob == -0.5


# --- what the host asks ---


def test_a_cancellation_is_told_once_and_only_to_the_right_generation(table: Table) -> None:
    table.admit(0, generation=4)
    table.publish(InboxKind.CANCEL, 0, 3)
    table.run()
    assert table.states()[0] == SlotState.LIVE
    table.publish(InboxKind.CANCEL, 0, 4)
    table.publish(InboxKind.CANCEL, 0, 4)
    table.step(2)
    assert [(e.token, e.finish) for e in table.drain()] == [(1, Finish.NONE), (2, Finish.NONE), (-1, Finish.CANCELLED)]
    assert table.states()[0] == SlotState.FINISHED
    assert table.word(Word.INBOX_TAIL) == table.word(Word.INBOX_HEAD)


def test_a_sequence_that_finishes_in_the_step_is_not_cancelled_as_well(table: Table) -> None:
    table.admit(0, generation=4, left=2)
    table.run()
    table.publish(InboxKind.CANCEL, 0, 4)
    table.step(2)
    assert [e.finish for e in table.drain()] == [Finish.NONE, Finish.LENGTH]


def test_a_cancelled_slot_is_admitted_anew_at_the_same_boundary(table: Table) -> None:
    table.admit(0, generation=1)
    table.run()
    table.publish(InboxKind.CANCEL, 0, 1)
    table.admit(0, generation=2, first_token=20)
    table.step(2)
    entries = table.drain()
    assert [(e.generation, e.finish) for e in entries[-2:]] == [(1, Finish.CANCELLED), (2, Finish.NONE)]
    assert table.states()[0] == SlotState.LIVE


def test_a_slot_without_pages_pauses_until_it_is_granted_more(table: Table) -> None:
    table.admit(0, generation=1, position=3, granted=4, pages=(9,))
    table.run()
    assert table.of("n_rows")[0] == 1
    table.step(2)  # its place is 4, which has no page
    assert table.states()[0] == SlotState.PAUSED
    assert table.why() == End.IDLE
    table.publish(InboxKind.GRANT, 0, 2, first=1, pages=(5,))  # of another generation
    table.run()
    assert table.states()[0] == SlotState.PAUSED
    table.publish(InboxKind.GRANT, 0, 1, first=1, pages=(5, 6))
    table.run()
    assert table.states()[0] == SlotState.LIVE
    assert table.of("granted")[0] == 3 * PAGE_TOKENS
    assert table.of("pages")[0, 0, :3].tolist() == [9, 5, 6]
    assert table.word(Word.GO) == 1
    assert len(table.drain()) == 2, "a step boundary that only wakes commits nothing"


def test_a_constrained_slot_waits_for_a_mask_after_every_token(table: Table) -> None:
    table.admit(0, generation=1, constrained=1)
    table.admit(1, generation=2)
    table.run()
    assert table.states()[:2] == [SlotState.PAUSED, SlotState.LIVE]
    table.tables.admissions.host("mask_bits")[0] = 0b101
    table.publish(InboxKind.MASK, 0, 1)
    table.step(3)
    assert table.of("mask_bits")[0, 0] == 0b101
    assert table.of("n_rows")[0] == 2
    table.step(3, 4)
    assert table.states()[:2] == [SlotState.PAUSED, SlotState.LIVE]


def test_a_mask_for_who_sat_there_before_is_ignored(table: Table) -> None:
    table.admit(0, generation=2, constrained=1)
    table.publish(InboxKind.MASK, 0, 1)
    table.run()
    assert table.states()[0] == SlotState.PAUSED


def test_stop_ends_the_loop_and_leaves_the_living_as_they_are(table: Table) -> None:
    table.admit(0, generation=1)
    table.run()
    table.publish(InboxKind.STOP)
    table.admit(1, generation=2)
    table.step(2)
    assert table.why() == End.STOP
    assert table.word(Word.ENDS) == 1
    assert table.word(Word.LIVE) == 1
    assert table.states() == [SlotState.LIVE, SlotState.FREE, SlotState.FREE], (
        "what follows a stop is for the next trigger"
    )
    table.run()
    assert table.word(Word.GO) == 1
    assert table.of("n_rows")[0] == 2
    assert [e.token for e in table.drain()] == [1, 2, 1], "no token is committed twice"


def test_yield_ends_the_loop_and_the_next_trigger_goes_on(table: Table) -> None:
    table.admit(0, generation=1)
    table.run()
    table.set_word(Word.YIELD, 1)
    table.step(2)
    assert table.why() == End.YIELD
    assert table.of("n_rows")[0] == 0
    table.set_word(Word.YIELD, 0)
    table.run()
    table.step(3)
    assert [e.position for e in table.drain()] == [5, 6, 7]


@pytest.mark.parametrize(
    "entry",
    [
        {"kind": 0},
        {"kind": 6},
        {"kind": InboxKind.ADMIT, "slot": 3},
        {"kind": InboxKind.CANCEL, "slot": -1},
        {"kind": InboxKind.GRANT, "first": 6, "pages": (1,)},
        {"kind": InboxKind.GRANT, "first": -1},
        {"kind": InboxKind.GRANT, "count": GRANT_PAGES + 1},
        {"kind": InboxKind.GRANT, "count": -1},
        {"kind": InboxKind.ADMIT, "slot": 1},  # the slot has a live sequence
    ],
    ids=str,
)
def test_an_entry_that_no_host_of_ours_writes_is_a_fault(table: Table, entry: dict[str, int]) -> None:
    table.admit(1, generation=1)
    table.run()
    table.publish(**entry)  # type: ignore[arg-type]  # pages is the tuple among the ints
    table.step(2)
    assert table.word(Word.FAULT) == Fault.INBOX
    assert table.why() == End.FAULT
    assert table.word(Word.INBOX_TAIL) == 1, "the entry stays where it can be looked at"
    assert [e.token for e in table.drain()] == [1, 2], "what was made before is told"


def test_a_head_that_has_run_away_from_the_inbox_is_a_fault(table: Table) -> None:
    table.set_word(Word.INBOX_HEAD, ROOMY.inbox_entries + 1)
    table.run()
    assert table.word(Word.FAULT) == Fault.INBOX


# --- drift (I-10) ---


@pytest.mark.parametrize(("name", "fault"), [("plan_hash", Fault.PLAN), ("epoch", Fault.EPOCH)])
def test_drift_ends_the_loop_and_nothing_of_its_last_step_is_told(table: Table, name: str, fault: Fault) -> None:
    table.admit(0, generation=1)
    table.run()
    table.of(name)[0] += 1
    position, made = int(table.of("position")[0]), int(table.of("made")[0])
    table.publish(InboxKind.CANCEL, 0, 1)
    table.step(2)
    assert table.word(Word.FAULT) == fault
    assert table.why() == End.FAULT
    assert len(table.drain()) == 1
    assert (table.of("position")[0], table.of("made")[0]) == (position, made)
    assert (table.word(Word.LIVE), table.word(Word.STEPS), table.word(Word.INBOX_TAIL)) == (0, 0, 1)
    assert table.of("n_rows")[0] == 0


def test_a_fault_is_for_good(table: Table) -> None:
    table.set_word(Word.FAULT, Fault.EPOCH)
    table.admit(0, generation=1)
    for ends in (1, 2):
        table.run()
        assert (table.word(Word.FAULT), table.word(Word.ENDS)) == (Fault.EPOCH, ends)
    assert table.states()[0] == SlotState.FREE


# --- a reader that sleeps ---


def test_a_full_outbox_ends_the_loop_and_loses_nothing(laid: Laid) -> None:
    table = laid(Layout(n_slots=2, max_pages=40, vocab=99, inbox_entries=8, outbox_entries=8))
    table.admit(0, generation=1, left=50)
    table.run()
    token = 2
    heard = []
    for _ in range(200):
        if table.word(Word.GO):
            table.step(token)
            token += 1
        elif table.why() == End.OUTBOX_FULL:
            assert table.of("n_rows")[0] == 0
            heard += table.drain(most=3)
            table.run()
    heard += table.drain()
    assert [e.token for e in heard] == list(range(1, 51))
    assert [e.position for e in heard] == list(range(5, 55))
    assert [e.finish for e in heard if e.finish] == [Finish.LENGTH]


def test_an_admission_waits_in_the_inbox_while_the_outbox_is_full_and_a_cancellation_does_not(laid: Laid) -> None:
    table = laid(Layout(n_slots=2, max_pages=4, vocab=99, inbox_entries=8, outbox_entries=4))
    table.admit(0, generation=1)
    table.run()
    assert table.why() == End.OUTBOX_FULL
    table.publish(InboxKind.CANCEL, 0, 1)
    table.admit(1, generation=2)
    table.run()
    assert table.why() == End.OUTBOX_FULL
    assert table.word(Word.INBOX_HEAD) - table.word(Word.INBOX_TAIL) == 1
    assert [e.finish for e in table.drain()] == [Finish.NONE, Finish.CANCELLED]
    table.run()
    assert table.states() == [SlotState.FINISHED, SlotState.LIVE]


# --- random scripts ---


@dataclass(frozen=True)
class Act:
    """Something that happens between two step boundaries; what does not fit the moment is left out."""

    what: str
    slot: int = 0
    right: bool = True
    n: int = 0
    seed: int = 0


KINDS = ["admit"] * 4 + ["step"] * 8 + ["cancel", "grant", "mask", "mask", "drain", "drain", "stop", "yield", "go"]


def acts(wild: bool) -> st.SearchStrategy[list[Act]]:
    one = st.builds(
        Act,
        what=st.sampled_from([*KINDS, *(["wild"] if wild else [])]),
        slot=st.integers(0, 10),
        right=st.sampled_from([True, True, True, False]),
        n=st.integers(0, 8),
        seed=st.integers(0, 2**31),
    )
    return st.lists(one, min_size=10, max_size=80)


class Script:
    """Plays acts over a table as a host of ours would, apart from `wild` entries; remembers whom it admitted."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.generation = 0
        self.seated: dict[int, int] = {}  # the last generation of each slot, as the host knows it
        self.admitted: dict[int, tuple[int, int, int]] = {}  # generation: slot, position, left
        self.finished: dict[int, Finish] = {}
        self.heard: list[Entry] = []

    def play(self, act: Act) -> None:
        """Apply one act; a step boundary is run by `step` alone."""
        slot = act.slot % self.table.layout.n_slots
        table, rng = self.table, np.random.default_rng(act.seed)
        generation = self.seated.get(slot, 0) if act.right else 99_999
        if act.what == "step":
            self._choose(rng)
        elif act.what == "drain":
            self.hear(act.n)
        elif act.what in ("yield", "go"):
            table.set_word(Word.YIELD, act.what == "yield")
        elif table.word(Word.INBOX_HEAD) - table.word(Word.INBOX_TAIL) == table.layout.inbox_entries:
            return
        elif act.what == "admit":
            self._admit(slot, rng)
        elif act.what == "cancel":
            table.publish(InboxKind.CANCEL, slot, generation)
        elif act.what == "grant":
            count = min(act.n, GRANT_PAGES, table.layout.max_pages)
            first = int(rng.integers(0, table.layout.max_pages - count + 1))
            table.publish(InboxKind.GRANT, slot, generation, first, tuple(rng.integers(0, 99, count).tolist()))
        elif act.what == "mask":
            bits = table.tables.admissions.host("mask_bits")
            bits[slot] = rng.integers(-(2**31), 2**31, bits.shape[1])
            table.publish(InboxKind.MASK, slot, generation)
        elif act.what == "stop":
            table.publish(InboxKind.STOP)
        else:
            kind, somewhere = int(rng.integers(-1, 8)), int(rng.integers(-2, 4))
            table.publish(kind, somewhere, generation, int(rng.integers(-1, 12)), tuple(range(act.n)))

    def _admit(self, slot: int, rng: np.random.Generator) -> None:
        if slot in self.seated and self.seated[slot] not in self.finished:
            return
        table, layout = self.table, self.table.layout
        for name in table.tables.admissions.names:  # every byte of an admission must arrive, whatever it is
            admission = table.tables.admissions.host(name)[slot : slot + 1].view(np.int32)
            admission[:] = rng.integers(-(2**31), 2**31, admission.shape)
        self.generation += 1
        values = {
            "generation": self.generation,
            "position": int(rng.integers(0, 6)),
            "left": int(rng.integers(1, 12)),
            "granted": int(rng.integers(0, layout.max_pages * PAGE_TOKENS + 1)),
            "n_logprobs": int(rng.integers(0, 3)),
            "n_stop": int(rng.integers(0, 3)),
            "constrained": int(rng.random() < 0.2),
            "grammar": 0,  # tests/engine/test_grammars.py has slots under grammars
            "penalised": int(rng.integers(0, 2)),
        }
        for name, value in values.items():
            table.tables.admissions.host(name)[slot] = value
        table.tables.admissions.host("stop_ids")[slot] = rng.integers(0, layout.vocab, MAX_STOP_IDS)
        table.of("first_token")[slot] = rng.integers(0, layout.vocab)
        table.of("first_logprob")[slot] = rng.random()
        table.of("first_top_ids")[slot] = rng.integers(0, layout.vocab, MAX_TOP)
        table.of("first_top_logprobs")[slot] = rng.random(MAX_TOP)
        table.publish(InboxKind.ADMIT, slot, self.generation)
        self.seated[slot] = self.generation
        self.admitted[self.generation] = (slot, values["position"], values["left"])

    def _choose(self, rng: np.random.Generator) -> None:
        layout, n = self.table.layout, self.table.layout.n_slots
        self.table.of("chosen")[:] = rng.integers(0, layout.vocab, n)
        self.table.of("chosen_logprob")[:] = rng.random(n)
        self.table.of("top_ids")[:] = rng.integers(0, layout.vocab, (n, MAX_TOP))
        self.table.of("top_logprobs")[:] = rng.random((n, MAX_TOP))

    def hear(self, most: int) -> None:
        for entry in self.table.drain(most):
            self.heard.append(entry)
            if entry.finish:
                self.finished[entry.generation] = entry.finish


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), script=acts(wild=False))
def test_whatever_the_host_does_every_admission_is_told_whole_and_ends_once(layout: Layout, script: list[Act]) -> None:
    """E-71."""
    table = Table(layout)
    host = Script(table)
    for act in script:
        host.play(act)
        if act.what == "step":
            n_rows, before = int(table.of("n_rows")[0]), table.word(Word.OUTBOX_HEAD)
            rows = table.of("row_slot")[:n_rows].copy()
            table.run()
            places = np.arange(before, before + n_rows) % layout.outbox_entries
            told = table.tables.rings.host("outbox")[places, OutboxWord.SLOT]
            assert told.tolist() == rows.tolist(), "the rows of a step come first, in order"
            assert rows.tolist() == sorted(rows.tolist())
            assert table.word(Word.OUTBOX_HEAD) - table.word(Word.OUTBOX_TAIL) <= layout.outbox_entries
            assert table.word(Word.LIVE) == table.states().count(SlotState.LIVE)
            assert bool(table.word(Word.GO)) == bool(table.of("n_rows")[0])
    table.set_word(Word.YIELD, 0)
    # Read everything, cancel each sequence that is live or waits for pages, and let the inbox run empty.
    for _ in range(100):
        host.hear(1_000_000)
        for slot, generation in host.seated.items():
            if generation not in host.finished and table.word(Word.INBOX_HEAD) == table.word(Word.INBOX_TAIL):
                table.publish(InboxKind.CANCEL, slot, generation)
        table.run()
    host.hear(1_000_000)

    assert table.word(Word.FAULT) == Fault.NONE
    assert table.why() == End.IDLE
    assert set(host.finished) == set(host.admitted)
    for generation, (slot, position, left) in host.admitted.items():
        told = [e for e in host.heard if e.generation == generation]
        tokens = [e for e in told if e.finish != Finish.CANCELLED]
        assert {e.slot for e in told} == {slot}
        assert [e.position for e in tokens] == list(range(position, position + len(tokens)))
        assert 1 <= len(tokens) <= left
        assert [e.finish for e in told[:-1]] == [Finish.NONE] * (len(told) - 1)
        assert (told[-1].finish == Finish.LENGTH) <= (len(tokens) == left)


# --- the twin's C++ ---


def compare(native: Native, layout: Layout, script: list[Act], drifts: str | None) -> None:
    """Play a script over two copies of the arenas; after each step boundary every byte must agree."""
    twin, other = Table(layout), Table(layout)
    hosts = Script(twin), Script(other)
    for i, act in enumerate(script):
        for host in hosts:
            host.play(act)
        if act.what != "step":
            continue
        if drifts and i > len(script) // 2:
            for table in (twin, other):
                table.of(drifts)[0] = 1
        twin.clock_ns += 1
        twin.run()
        go = native(other.tables, twin.clock_ns, act.seed)
        assert go == twin.word(Word.GO)
        for name in ("table", "rings"):
            ours, theirs = getattr(twin.tables, name), getattr(other.tables, name)
            if not np.array_equal(ours.memory, theirs.memory):
                wrong = [field for field in ours.names if not np.array_equal(ours.host(field), theirs.host(field))]
                raise AssertionError(f"after act {i}, {act}, the {name} differ in {wrong}")


scripts = given(
    layout=st.sampled_from(LAYOUTS),
    script=acts(wild=True),
    drifts=st.sampled_from([None, None, None, None, "plan_hash", "epoch"]),
)
many = settings(max_examples=150, deadline=None)


@pytest.mark.slow
@many
@scripts
def test_cpp_does_to_every_byte_what_the_twin_does(
    home: None, layout: Layout, script: list[Act], drifts: str | None
) -> None:
    compare(in_cpp(layout), layout, script, drifts)


@pytest.mark.slow
@many
@scripts
def test_threads_of_a_block_agree_with_the_twin_in_whatever_order_they_run(
    home: None, layout: Layout, script: list[Act], drifts: str | None
) -> None:
    compare(in_lanes(layout), layout, script, drifts)


@pytest.mark.slow
@many
@scripts
def test_cuda_does_to_every_byte_what_the_twin_does(
    home: None, layout: Layout, script: list[Act], drifts: str | None
) -> None:
    compare(in_cuda(layout), layout, script, drifts)


@pytest.mark.slow
def test_cpp_tells_the_time_of_its_own_clock(home: None) -> None:
    layout = LAYOUTS[2]
    table = Table(layout)
    table.admit(0, generation=1)
    native = cpp_library(layout).step_boundary
    at = [ctypes.c_void_p(address) for address in (*table.tables.addresses, 0)]
    native(*at, ctypes.c_uint64(PLAN_HASH), ctypes.c_uint64(EPOCH))
    (entry,) = table.drain()
    assert entry.time_ns > 0
    assert entry.time_ns == table.of("step_ns")[0]
