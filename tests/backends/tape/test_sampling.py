"""The tape's sampler against `sample_step_torch`: the real source, with a small kernel around it, in the emulator.

Tokens are the twin's, drawn ones too; log-probabilities are within 1e-5. A row's bits know neither its neighbours nor
the order in which threads come by.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato import build
from ostinato.backends.torch.ops.sample_step import sample_step_torch
from ostinato.backends.torch.tables import tensor_tables
from ostinato.errors import HardwareCannot
from ostinato.loop.layout import MAX_TOP, Arena, Layout, SampledRows
from tests.backends.admissions import Setting, write_admission
from tests.backends.tape.emulator import Program, compiled, constants, headers_of, words
from tests.backends.torch.test_sample_step import SETTINGS, VOCAB

pytestmark = pytest.mark.slow  # each shape is compiled

# Every block copies the logits of its own tiles, as the head's product would leave them; then the two calls of tape.cu.
SOURCE = r"""
#include "sampling.h"

struct Given {
    char* table;
    const float* given;  // [rows, vocab]
    const Segment* head;
    u64 *summaries, *marks;
    float *logits, *scaled;
    State* state;
};

KERNEL(choosing, Given, all, N_COMPUTE_THREADS) {
    Tape tape = {};
    tape.view.table = all.table;
    tape.summaries = all.summaries;
    tape.marks = all.marks;
    tape.logits = all.logits;
    tape.scaled = all.scaled;
    tape.state = all.state;
    ComputeThread p = {};
    p.thread = thread();
    p.warp = p.thread / 32;
    p.lane = p.thread % 32;
    p.tag = all.state->tag;
    p.activations = (u16*)shared_memory();
    const int n_rows = *TABLE_n_rows(tape.view);
    for (int row = 0; row < n_rows; ++row) {
        const u64 from = (u64)row * VOCAB(tape.view);
        for_own_ids(p, *all.head, all.given + from, [&](int id, float value, bool inside) {
            if (inside) tape.logits[from + id] = value;
        });
    }
    summarise(p, tape, *all.head, n_rows);
    for (int row = block(); row < n_rows; row += N_BLOCKS) sample_row(p, tape, row);
}
"""

# The same with a step boundary that begins as soon as it may, and changes what every slot asks for.
CHANGING = (
    SOURCE.rstrip().removesuffix("}")
    + r"""
    sync_compute_warps();
    if (block() != 0 || p.thread != 0) return;
    for (int row = 0; row < n_rows; ++row) {
        while ((u32)(load_acquire(tape.marks + N_BLOCKS + row) >> 32) != p.tag) relax();
        TABLE_temperature(tape.view)[TABLE_row_slot(tape.view)[row]] = 1.0f;
    }
}
"""
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A vocabulary and the card that chooses from it."""

    vocab: int = VOCAB
    n_tokens: int = VOCAB - 9
    n_blocks: int = 3
    n_compute_warps: int = 2
    max_rows: int = 8
    first: int = 1  # the block that has the head's first tile
    listed: int = 1024
    n_buckets: int = 1024
    deadline_ns: int = 10_000_000_000
    source: str = SOURCE

    @property
    def layout(self) -> Layout:
        return Layout(n_slots=self.max_rows + 2, max_pages=2, vocab=self.vocab)

    @property
    def headers(self) -> dict[str, str]:
        shape = constants(
            N_BLOCKS=self.n_blocks,
            N_COMPUTE_WARPS=self.n_compute_warps,
            MAX_ROWS=self.max_rows,
            N_TOKENS=self.n_tokens,
            LISTED=self.listed,
            N_BUCKETS=self.n_buckets,
            ACTIVATION_BYTES=32 * 1024,
            STAGES=1,
            TILES_AT_ONCE=4,
            HIDDEN=64,
            N_LAYERS=1,
            DEADLINE_NS=f"{self.deadline_ns}LL",
        )
        return {"shape.h": shape + '#include "layout.h"\n', "layout.h": self.layout.header(page_tokens=16)}

    @property
    def program(self) -> Program:
        return compiled(self.source, "choosing.cpp", headers=self.headers)


SMALL = Shape()
CRAMPED = replace(SMALL, listed=32, n_buckets=16)  # nothing fits: every search goes on to its end
LARGE = Shape(vocab=20_011, n_tokens=20_000, n_blocks=5)


@dataclass(frozen=True, slots=True)
class Step:
    """What a step left of its rows: tokens, log-probabilities, and the most likely."""

    tokens: list[int]
    logprobs: np.ndarray  # float32 [rows]
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    @property
    def bits(self) -> tuple[object, ...]:
        return self.tokens, self.logprobs.tobytes(), self.top_ids.tobytes(), self.top_logprobs.tobytes()

    def row(self, row: int) -> Step:
        rows = slice(row, row + 1)
        return Step(self.tokens[rows], self.logprobs[rows], self.top_ids[rows], self.top_logprobs[rows])


def seated(shape: Shape, rows: list[Setting]) -> Arena:
    """A table in which row r is slot r + 1, and every other slot holds something else."""
    table = tensor_tables(shape.layout, torch.device("cpu")).table
    for row, setting in enumerate(rows):
        table["row_slot"][row] = row + 1
        write_admission(table, row + 1, setting, shape.vocab)
    table["n_rows"][0] = len(rows)
    table["chosen"].fill_(-7)
    table["top_ids"].fill_(-7)
    return table


def left(table: Arena, n_rows: int) -> Step:
    names = ("chosen", "chosen_logprob", "top_ids", "top_logprobs")
    chosen, *others = (table.host(name)[:n_rows].copy() for name in names)
    assert (table.host("chosen")[n_rows:] == -7).all()
    return Step(chosen.tolist(), *others)


def by_twin(shape: Shape, logits: Tensor, rows: list[Setting]) -> Step:
    table = seated(shape, rows)
    taken = SampledRows.of(table)._replace(n_rows=len(rows))
    sample_step_torch(logits, table, taken, n_tokens=shape.n_tokens)
    return left(table, len(rows))


@dataclass(frozen=True, slots=True)
class Card:
    """What lies in the card's memory. Hops hold the tag before, and what was not written is no number."""

    shape: Shape
    table: Arena
    given: np.ndarray
    tag: int = 77

    def run(self, *, n_blocks: int, seed: int = 0) -> tuple[list[bool], bool]:
        """Which rows are told to be chosen, and whether a block gave up waiting."""
        shape, before = self.shape, (self.tag - 1) << 32
        head = np.array([0, -(-shape.vocab // 16), shape.first, 0], np.int32)
        summaries = np.full(shape.max_rows * shape.n_blocks * 8 + 1, before | 5, np.uint64)
        summaries = summaries[summaries.ctypes.data % 16 // 8 :]
        marks = np.full(shape.n_blocks + shape.max_rows, before, np.uint64)
        room = np.full((2, shape.max_rows, shape.vocab), np.nan, np.float32)
        state = np.array([self.tag, 0], np.uint32)
        argument = words(self.table.memory.numpy(), self.given, head, summaries, marks, room[0], room[1], state)
        shape.program.run("choosing", argument, n_blocks=n_blocks, shared_bytes=32 * 1024, seed=seed)
        told = [bool(mark == self.tag << 32) for mark in marks]
        assert all(told[:n_blocks])  # what they wrote lies in memory, whichever block samples
        return told[shape.n_blocks :], bool(state[1])


def by_tape(shape: Shape, logits: Tensor, rows: list[Setting], *, seed: int = 0) -> Step:
    assert logits.shape == (len(rows), shape.vocab)
    card = Card(shape, seated(shape, rows), np.ascontiguousarray(logits.numpy()))
    told, gave_up = card.run(n_blocks=shape.n_blocks, seed=seed)
    assert told == [row < len(rows) for row in range(shape.max_rows)]
    assert not gave_up
    return left(card.table, len(rows))


def assert_same(made: Step, expected: Step) -> None:
    assert made.tokens == expected.tokens
    np.testing.assert_allclose(made.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    assert (made.top_ids == expected.top_ids).all()
    np.testing.assert_allclose(made.top_logprobs, expected.top_logprobs, rtol=0, atol=1e-5)


def noise(vocab: int, seed: int, scale: float = 1.0, grain: float = 0.0) -> Tensor:
    values = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return values.round() if grain else values  # many equals


@st.composite
def a_row(draw: st.DrawFn) -> tuple[Setting, Tensor]:
    setting = replace(draw(SETTINGS), n_logprobs=draw(st.sampled_from([0, 0, 1, 5, 20])))
    scale, grain = draw(st.sampled_from([0.0, 0.5, 3.0, 10.0])), draw(st.sampled_from([0.0, 1.0]))
    return setting, noise(VOCAB, draw(st.integers(0, 2**31)), scale, grain)


# --- the same as the twin ---


@pytest.mark.parametrize("shape", [SMALL, CRAMPED], ids=["small", "cramped"])
@given(rows=st.lists(a_row(), min_size=1, max_size=8), seed=st.integers(0, 2**32))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_rows_are_chosen_as_the_twin_chooses(shape: Shape, rows: list[tuple[Setting, Tensor]], seed: int) -> None:
    wishes, logits = [setting for setting, _ in rows], torch.stack([values for _, values in rows])
    assert_same(by_tape(shape, logits, wishes, seed=seed), by_twin(shape, logits, wishes))


@pytest.mark.parametrize(
    "setting",
    [
        Setting(temperature=0.8),
        Setting(temperature=0.8, top_p=0.93),
        Setting(temperature=1.1, top_k=50, top_p=0.9),
        Setting(temperature=0.7, min_p=0.02),
        Setting(temperature=0.9, top_k=3000),
        Setting(temperature=2.5),
        Setting(temperature=2.5, top_p=0.99),
        Setting(temperature=2.5, min_p=0.001, top_p=0.97),
        Setting(temperature=2.5, top_k=9000, top_p=0.6, min_p=0.002),
    ],
    ids=str,
)
def test_a_large_vocabulary_is_drawn_from_as_the_twin_draws(setting: Setting) -> None:
    logits = noise(LARGE.vocab, 1, 2.5).expand(8, -1)
    rows = [replace(setting, seed=seed) for seed in range(8)]
    assert_same(by_tape(LARGE, logits, rows), by_twin(LARGE, logits, rows))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 0.001, 0.3])
def test_more_near_equals_than_a_list_holds_are_drawn_from_as_the_twin_draws(scale: float) -> None:
    logits = noise(LARGE.vocab, 3, scale).expand(4, -1)
    rows = [
        Setting(temperature=1.0, seed=5),
        Setting(temperature=1.0, top_p=0.7003, seed=6),
        Setting(temperature=1.0, top_k=7001, seed=7),
        Setting(temperature=0.5, min_p=0.9001, n_logprobs=20, seed=8),
    ]
    assert_same(by_tape(LARGE, logits, rows), by_twin(LARGE, logits, rows))


def test_an_id_with_several_biases_gets_their_sum_in_their_order() -> None:
    values = torch.randn(512, generator=torch.Generator().manual_seed(4)).tolist()
    bias = tuple((i * 7 % VOCAB, value) for i, value in enumerate(values))
    rows = [Setting(bias=bias, n_logprobs=3), Setting(bias=bias[:33], temperature=0.7, seed=3), Setting(bias=bias[:32])]
    logits = torch.stack([noise(VOCAB, row) for row in range(3)])
    assert_same(by_tape(SMALL, logits, rows), by_twin(SMALL, logits, rows))


def test_ids_beyond_the_tokens_are_likely_but_never_chosen() -> None:
    logits = noise(VOCAB, 1).repeat(3, 1)
    logits[:, SMALL.n_tokens :] += 20
    rows = [Setting(n_logprobs=12), Setting(temperature=1.0, seed=1), Setting(temperature=1.0, top_p=0.5, seed=2)]
    made = by_tape(SMALL, logits, rows)
    assert_same(made, by_twin(SMALL, logits, rows))
    assert max(made.tokens) < SMALL.n_tokens <= made.top_ids[0, :9].min()


def test_where_all_is_banned_id_zero_is_chosen() -> None:
    rows = [
        Setting(temperature=safe_temperature, allowed=frozenset(), n_logprobs=n)
        for safe_temperature in (0.0, 1.0)
        for n in (0, 2)
    ]
    logits = torch.arange(float(VOCAB)).expand(4, -1)
    made = by_tape(SMALL, logits, rows)
    assert_same(made, by_twin(SMALL, logits, rows))
    assert made.tokens == [0] * 4


ODD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@pytest.mark.parametrize("odd", list(ODD))
def test_what_is_no_number_is_chosen_as_the_twin_chooses(odd: str) -> None:
    logits = noise(VOCAB, 2, 3.0).repeat(6, 1)
    logits[:, 60:90] = ODD[odd]
    allowed = frozenset(range(0, VOCAB, 2)) - {60}
    rows = [
        Setting(),
        Setting(temperature=0.8, seed=1),
        Setting(temperature=0.8, top_k=3, seed=1),
        Setting(allowed=allowed),
        Setting(temperature=1.0, top_p=0.9, allowed=frozenset(range(40)), seed=4),
        Setting(repetition=1.5, presence=0.5, prompt=(61, 70)),
    ]
    made, expected = by_tape(SMALL, logits, rows), by_twin(SMALL, logits, rows)
    assert made.tokens == expected.tokens
    np.testing.assert_allclose(made.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def test_a_row_of_minus_infinity_has_a_token_and_no_logprob() -> None:
    logits = torch.full((2, VOCAB), float("-inf"))
    rows = [Setting(), Setting(temperature=1.0)]
    made, expected = by_tape(SMALL, logits, rows), by_twin(SMALL, logits, rows)
    assert made.tokens == expected.tokens == [0, 0]
    assert np.isnan(made.logprobs).all()
    assert np.isnan(expected.logprobs).all()


def test_the_most_likely_of_odd_logits_are_ids() -> None:
    logits = torch.full((2, VOCAB), float("nan"))
    logits[1, 5:] = float("-inf")
    made = by_tape(SMALL, logits, [Setting(n_logprobs=20)] * 2)
    assert made.top_ids.tolist() == [list(range(MAX_TOP))] * 2


def test_blocks_without_an_id_have_nothing_to_say() -> None:
    shape = replace(SMALL, vocab=37, n_tokens=33, n_blocks=7, first=5)
    logits = torch.stack([noise(37, row, 2.0) for row in range(8)])
    rows = [Setting(temperature=0.9 * (row % 2), top_k=row, n_logprobs=row, seed=row) for row in range(8)]
    assert_same(by_tape(shape, logits, rows), by_twin(shape, logits, rows))


# --- bits ---

MIXED = [
    Setting(),
    Setting(temperature=0.9, seed=11, n_logprobs=7),
    Setting(temperature=1.3, top_p=0.9, seed=12),
    Setting(repetition=1.3, frequency=0.2, prompt=(3, 5), made={9: 2}, n_logprobs=2),
    Setting(temperature=0.7, top_k=11, min_p=0.01, seed=13, bias=((4, 3.0),)),
]


@pytest.mark.parametrize("shape", [SMALL, CRAMPED], ids=["small", "cramped"])
def test_any_order_of_threads_leaves_the_same_bits(shape: Shape) -> None:
    logits = torch.stack([noise(VOCAB, row, 2.0) for row in range(len(MIXED))])
    bits = {str(by_tape(shape, logits, MIXED, seed=seed).bits) for seed in range(12)}
    assert len(bits) == 1


@pytest.mark.parametrize("shape", [SMALL, CRAMPED], ids=["small", "cramped"])
def test_a_row_alone_has_the_bits_that_it_has_among_neighbours(shape: Shape) -> None:
    logits = torch.stack([noise(VOCAB, row, 2.0) for row in range(len(MIXED))])
    together = by_tape(shape, logits, MIXED)
    for row in range(len(MIXED)):
        assert by_tape(shape, logits[row : row + 1], MIXED[row : row + 1], seed=row).bits == together.row(row).bits


def test_a_block_that_comes_late_to_a_choice_reads_no_slot_that_the_boundary_has_changed() -> None:
    shape, rows = replace(SMALL, n_compute_warps=8, source=CHANGING), [Setting()] * 3
    logits = torch.stack([noise(VOCAB, row, 2.0) for row in range(3)])
    for seed in range(160):
        assert by_tape(shape, logits, rows, seed=seed).tokens == logits[:, : shape.n_tokens].argmax(1).tolist()


# --- a block that is stuck ---


@pytest.mark.parametrize("setting", [Setting(), Setting(temperature=1.0, top_p=0.9, n_logprobs=3)], ids=str)
def test_a_block_that_never_speaks_is_given_up_and_the_step_runs_out(setting: Setting) -> None:
    shape = replace(SMALL, deadline_ns=20_000_000)
    rows = [setting] * 2
    card = Card(shape, seated(shape, rows), noise(2 * VOCAB, 1).numpy())
    told, gave_up = card.run(n_blocks=shape.n_blocks - 1)
    assert gave_up
    assert told[:2] == [True, True]
    assert all(0 <= token < shape.n_tokens for token in card.table["chosen"][:2].tolist())


# --- the card ---


@cache
def cubin(shape: Shape) -> bytes:
    headers = {name: text for name, text in headers_of(SOURCE, shape.headers).items() if name != "machine_cpu.h"}
    return build.cubin(SOURCE, "choosing.cu", arch="sm_90", headers=headers)


def test_it_compiles_for_the_card() -> None:
    try:
        binary = cubin(Shape(vocab=128_256, n_tokens=128_256, n_blocks=132, n_compute_warps=8))
    except HardwareCannot as error:
        pytest.skip(f"nothing was compiled for CUDA: {error}")
    assert b"choosing" in binary
