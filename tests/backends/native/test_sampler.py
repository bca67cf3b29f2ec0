"""The native sampler against the step's twin: the same token for the same logits and settings, and fair draws."""

from __future__ import annotations

import ctypes
import math
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.backends.native.cpu_levels import LEVELS, architecture, features, levels_of
from ostinato.backends.native.library import source
from ostinato.backends.torch.ops.philox import uniform_torch
from ostinato.backends.torch.ops.sample_step import sample_step_torch
from ostinato.backends.torch.tables import tensor_tables
from ostinato.build import shared_object
from ostinato.errors import HardwareCannot
from ostinato.loop.layout import MAX_TOP, Layout, SampledRows
from tests.backends.admissions import Setting, write_admission
from tests.backends.native.test_step_boundary import View
from tests.counts import soak

CPU = torch.device("cpu")
PAGE_TOKENS = 16
HEADERS = ("sampler.h", "scalars.h", "lanes.h", "lanes_neon.h", "layout.h", "philox.h")


@pytest.fixture(scope="module", params=[level.name for level in levels_of(architecture())[:3]])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The sampler at every level that this CPU has."""
    try:
        level = LEVELS[request.param]
        if missing := level.needs - features():
            pytest.skip(f"the native sampler was not tested for {level.words}: this CPU lacks {sorted(missing)}")
        headers = {name: source(name) for name in HEADERS}
        flags = (*level.flags, *(os.environ.get("OSTINATO_CPU_FLAGS", "").split() or ["-Werror"]))
        code = Path(__file__).with_name("sampler.cpp").read_text()
        return ctypes.CDLL(str(shared_object(code, "sampler.cpp", headers=headers, flags=flags)))
    except HardwareCannot as error:
        pytest.skip(f"the native sampler was not tested: {error}")


@dataclass(frozen=True)
class Choice:
    """What a sampler left."""

    token: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Chooser:
    """One engine's tables, and both samplers over them."""

    def __init__(self, library: ctypes.CDLL, vocab: int, n_slots: int = 3) -> None:
        self.layout = Layout(n_slots=n_slots, max_pages=2, vocab=vocab, inbox_entries=4, outbox_entries=8)
        self.tables = tensor_tables(self.layout, CPU)
        self._words = self.layout.words(PAGE_TOKENS)
        self._library = library
        library.bytes_of_sampler.restype = ctypes.c_uint64
        # One byte more than asked for, to see that it is left alone.
        self._n_bytes = int(library.bytes_of_sampler(vocab))
        self._scratch = np.full(self._n_bytes + 128, 0xAB, dtype=np.uint8)
        self._first_byte = -self._scratch.ctypes.data % 64
        self._view = View(*self.tables.addresses, self._words.ctypes.data)

    def native(self, logits: Tensor, slot: int, n_tokens: int, *, row: int = 0, first: bool = False) -> Choice:
        assert logits.is_contiguous()
        self._library.choose_one(
            ctypes.byref(self._view),
            ctypes.c_void_p(logits.data_ptr()),
            row,
            slot,
            int(first),
            n_tokens,
            ctypes.c_void_p(self._scratch.ctypes.data + self._first_byte),
        )
        assert (self._scratch[self._first_byte + self._n_bytes :] == 0xAB).all()
        return self._left("first_token", "first_logprob", "first_top", slot) if first else self._step_left(row)

    def twin(self, logits: Tensor, slot: int, n_tokens: int) -> Choice:
        """One row of a step."""
        table = self.tables.table
        table["row_slot"][0] = slot
        rows = SampledRows.of(table)._replace(n_rows=1)
        sample_step_torch(logits.unsqueeze(0), table, rows, n_tokens=n_tokens)
        return self._step_left(0)

    def twin_first(self, logits: Tensor, slot: int, n_tokens: int) -> Choice:
        table, given, row_slot = self.tables.table, self.tables.admissions, torch.tensor([slot], dtype=torch.int32)
        rows = SampledRows.of(table)._replace(n_rows=1, row_slot=row_slot, position=given["position"], offset=0)
        sample_step_torch(logits.unsqueeze(0), given, rows, n_tokens=n_tokens, first=True)
        return self._step_left(0)

    def _step_left(self, row: int) -> Choice:
        return self._left("chosen", "chosen_logprob", "top", row)

    def _left(self, token: str, logprob: str, top: str, at: int) -> Choice:
        table = self.tables.table
        return Choice(
            int(table[token][at]),
            float(table[logprob][at]),
            table[f"{top}_ids"][at].tolist(),
            table[f"{top}_logprobs"][at].tolist(),
        )


def close(ours: float, theirs: float) -> bool:
    if math.isnan(theirs) or math.isinf(theirs):
        return math.isnan(ours) == math.isnan(theirs) and (math.isnan(ours) or ours == theirs)
    return abs(ours - theirs) <= 1e-5 * max(1.0, abs(theirs))


def same(ours: Choice, theirs: Choice, n_top: int) -> None:
    assert ours.token == theirs.token
    assert close(ours.logprob, theirs.logprob), (ours.logprob, theirs.logprob)
    assert ours.top_ids[:n_top] == theirs.top_ids[:n_top]
    assert all(map(close, ours.top_logprobs[:n_top], theirs.top_logprobs[:n_top]))


def compared(library: ctypes.CDLL, logits: Tensor, setting: Setting, n_tokens: int) -> Choice:
    """Both samplers over one row; they must agree."""
    vocab = logits.shape[0]
    chooser = Chooser(library, vocab)
    write_admission(chooser.tables.table, 1, setting, vocab)
    theirs = chooser.twin(logits, 1, n_tokens)
    ours = chooser.native(logits, 1, n_tokens, row=2)
    same(ours, theirs, min(setting.n_logprobs, vocab))
    return ours


def ids(vocab: int) -> st.SearchStrategy[int]:
    return st.integers(0, vocab - 1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Setting, int]:
    """Logits of some vocabulary, with equals and infinities, and settings for a slot."""
    vocab = draw(st.sampled_from([1, 2, 15, 16, 17, 31, 63, 64, 65, 203, 1000, 5003]))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(vocab, generator=noise) * draw(st.sampled_from([0.0, 0.5, 3.0, 10.0, 50.0]))
    logits = logits + draw(st.sampled_from([0.0, -30.0, 100.0]))
    if draw(st.booleans()):
        logits = logits.round()  # many equals
    if draw(st.integers(0, 3)) == 0:
        logits[torch.rand(vocab, generator=noise) < draw(st.sampled_from([0.1, 0.9, 1.1]))] = float("-inf")
    setting = Setting(
        temperature=draw(st.sampled_from([0.0, 0.0, 1e-9, 0.01, 0.7, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 7, 40, 1000])),
        top_p=draw(st.sampled_from([0.0, 0.1037, 0.5113, 0.9017, 1.0, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.0511, 0.3071, 1.0])),
        repetition=draw(st.sampled_from([1.0, 1.3, 0.5])),
        presence=draw(st.sampled_from([0.0, 0.6, -1.1])),
        frequency=draw(st.sampled_from([0.0, 0.37, -0.2])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        position=draw(st.integers(0, 2**31 - 2)),
        min_tokens=draw(st.integers(0, 9)),
        stop_ids=tuple(draw(st.lists(ids(vocab), max_size=4))),
        bias=tuple(draw(st.lists(st.tuples(ids(vocab), st.floats(-100, 100, width=32)), max_size=5))),
        prompt=tuple(draw(st.lists(ids(vocab), max_size=30))),
        made=draw(st.dictionaries(ids(vocab), st.integers(1, 5), max_size=6)),
        allowed=draw(st.none() | st.none() | st.frozensets(ids(vocab), max_size=60)),
        n_logprobs=draw(st.sampled_from([0, 0, 1, 5, MAX_TOP])),
    )
    return logits, setting, max(1, vocab - draw(st.sampled_from([0, 0, 9])))


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=soak(1500), deadline=None)
@given(case=cases())
def test_the_native_sampler_chooses_what_the_twin_chooses(
    library: ctypes.CDLL, case: tuple[Tensor, Setting, int]
) -> None:
    compared(library, *case)


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=soak(500), deadline=None)
@given(case=cases())
def test_the_first_token_comes_from_the_admissions_alone(
    library: ctypes.CDLL, case: tuple[Tensor, Setting, int]
) -> None:
    logits, setting, n_tokens = case
    vocab = logits.shape[0]
    chooser = Chooser(library, vocab)
    chooser.tables.table.memory.fill_(0x55)  # as left by the slot's previous sequence
    write_admission(chooser.tables.admissions, 1, setting, vocab)
    theirs = chooser.twin_first(logits, 1, n_tokens)
    same(chooser.native(logits, 1, n_tokens, first=True), theirs, min(setting.n_logprobs, vocab))


LARGE = [49_152, 151_936]
DRAWS = [
    Setting(temperature=0.8),
    Setting(temperature=3.0),
    Setting(temperature=0.8, top_p=0.95),
    Setting(temperature=1.0, top_p=0.5113),
    Setting(temperature=1.1, top_k=50, top_p=0.9017),
    Setting(temperature=0.7, min_p=0.0211),
    Setting(temperature=0.9, top_k=3000),
    Setting(temperature=30.0, top_k=40),
    Setting(temperature=30.0, top_k=20_000, top_p=0.7017),
    Setting(temperature=30.0, min_p=0.9311),
    Setting(temperature=5.0, top_p=0.9017, allowed=frozenset(range(0, 40_000, 3))),
    Setting(temperature=5.0, allowed=frozenset(range(5_000))),
    Setting(temperature=0.0, repetition=1.2, prompt=tuple(range(100, 400)), made={7: 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize("setting", DRAWS, ids=str)
@pytest.mark.parametrize("vocab", LARGE)
def test_a_large_vocabulary_is_chosen_from_as_the_twin_does(library: ctypes.CDLL, vocab: int, setting: Setting) -> None:
    for number, scale in enumerate([1.0, 2.5, 4.0, 2.5]):
        logits = torch.randn(vocab, generator=torch.Generator().manual_seed(number)) * scale
        compared(library, logits, replace(setting, seed=number, n_logprobs=number), vocab - 7)


@pytest.mark.parametrize("top_p", [0.5, 0.25, 1.0])
@pytest.mark.parametrize("vocab", [6, 10, 4096, 4097, 6000])
def test_equals_are_cut_where_the_twin_cuts_them(library: ctypes.CDLL, vocab: int, top_p: float) -> None:
    # Every share is the same, and a cut lies exactly between two of them.
    for seed in range(5):
        compared(library, torch.zeros(vocab), Setting(temperature=1.0, top_p=top_p, seed=seed), vocab)


def test_where_all_is_banned_id_zero_is_chosen(library: ctypes.CDLL) -> None:
    for temperature in (0.0, 1.0):
        setting = Setting(temperature=temperature, allowed=frozenset())
        assert compared(library, torch.arange(64.0), setting, 64).token == 0


def test_of_equals_the_lowest_id_is_chosen_and_ranked_first(library: ctypes.CDLL) -> None:
    logits = torch.zeros(200)
    logits[[151, 30, 77]] = 2.0
    choice = compared(library, logits, Setting(n_logprobs=5), 200)
    assert choice.token == 30
    assert choice.top_ids[:5] == [30, 77, 151, 0, 1]


def test_nothing_and_less_than_nothing_are_equals(library: ctypes.CDLL) -> None:
    logits = torch.full((40,), -3.0)
    logits[5], logits[9] = -0.0, 0.0
    for seed in range(8):
        compared(library, logits, Setting(temperature=0.5, top_k=1, seed=seed), 40)
        assert compared(library, logits, Setting(temperature=0.5, top_k=1, seed=seed), 40).token == 5


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_no_numbers_give_the_first_of_them_and_no_probability(
    library: ctypes.CDLL, odd: float, temperature: float
) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(3))
    logits[[70, 200]] = odd
    choice = compared(library, logits, Setting(temperature=temperature), 300)
    assert choice.token == 70
    assert math.isnan(choice.logprob)


def test_an_id_named_twice_by_the_bias_gets_the_sum(library: ctypes.CDLL) -> None:
    setting = Setting(bias=((3, 0.1), (9, 1e-8), (3, 0.2), (3, 0.3)))
    logits = torch.zeros(20)
    logits[4] = 0.6
    compared(library, logits, setting, 20)


def test_only_what_was_asked_for_is_written(library: ctypes.CDLL) -> None:
    chooser = Chooser(library, 50)
    table = chooser.tables.table
    write_admission(table, 1, Setting(n_logprobs=2, seed=4, temperature=1.0), 50)
    table["row_slot"][0] = 1
    before = table.memory.clone()
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    given_logits = logits.clone()
    chooser.native(logits, 1, 50, row=2)
    assert torch.equal(logits, given_logits)
    after = table.memory.clone()
    chosen = {"chosen": 1, "chosen_logprob": 1, "top_ids": 2, "top_logprobs": 2}
    table.memory.copy_(before)
    untouched = {name: table[name].clone() for name in table.names}
    table.memory.copy_(after)
    for name in table.names:
        now = table[name].clone()
        if name in chosen:
            now[2] = untouched[name][2] if now.dim() == 1 else now[2]
            if now.dim() == 2:
                now[2, : chosen[name]] = untouched[name][2, : chosen[name]]
        assert torch.equal(now, untouched[name]), name


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**31 - 2))
@example(seed=0, position=0)
def test_a_draw_is_placed_by_our_uniform_number(library: ctypes.CDLL, seed: int, position: int) -> None:
    # Equal logits, unfiltered: the draw lies at the uniform number's own place.
    vocab = 4096
    choice = compared(library, torch.zeros(vocab), Setting(temperature=1.0, seed=seed, position=position), vocab)
    number = float(uniform_torch(torch.tensor([seed]), torch.tensor([position + 1])))
    assert choice.token == int(number * vocab)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [0, 6])
def test_draws_are_as_likely_as_their_shares_say(library: ctypes.CDLL, top_k: int) -> None:
    n_draws, vocab = 20_000, 12
    logits = torch.linspace(0, 2.2, vocab)
    chooser = Chooser(library, vocab)
    write_admission(chooser.tables.table, 1, Setting(temperature=0.9, top_k=top_k, seed=11), vocab)
    position = chooser.tables.table["position"]
    counts: Counter[int] = Counter()
    for i in range(n_draws):
        position[1] = i
        counts[chooser.native(logits, 1, vocab).token] += 1
    scaled = (logits / 0.9).double()
    if top_k:
        scaled[: vocab - top_k] = float("-inf")
    expected = (scaled.softmax(-1) * n_draws).tolist()
    assert all(counts[i] == 0 for i, share in enumerate(expected) if share == 0)
    likely = [i for i, share in enumerate(expected) if share > 0]
    chi_squared = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in likely)
    degrees = len(likely) - 1
    # 1 in 10,000 by chance, by Wilson and Hilferty; and the draws are the same every time.
    assert chi_squared < degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3
