"""The GPU's sampler, run by Triton's interpreter, against its twin; and compiled for both makers' cards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.backends.cuda.triton.sample import Tiles, bind_sample, sample_workspace, tiles_for, uniform
from ostinato.backends.torch.ops.philox import uniform_torch
from ostinato.backends.torch.ops.sample import penalise_torch
from ostinato.backends.torch.tables import tensor_tables
from ostinato.errors import BadPointer
from ostinato.loop.layout import Arena, Layout, SampledRows
from tests.backends.admissions import Setting, write_admission
from tests.backends.cuda.triton.test_attend import compile_launch
from tests.backends.torch.test_sample_step import SETTINGS, VOCAB, row_of, step, table_of
from tests.counts import soaking

ROOMY = Tiles(block=128, sub=8, wanted=20, capacity=128, small=32, chunk=128)
TIGHT = Tiles(block=64, sub=16, wanted=5, capacity=16, small=8, chunk=128)  # searches nearly always


def launches(logits: Tensor, table: Arena, n_tokens: int, tiles: Tiles) -> tuple[dict[str, Tensor], list[object]]:
    rows, vocab = logits.shape
    workspace = sample_workspace(rows, vocab, logits.device, tiles)
    for buffer in workspace.values():  # poison: whatever a kernel reads of it without having written shows
        buffer.fill_(float("nan") if buffer.is_floating_point() else -1)
    bound = bind_sample(logits, table, workspace, SampledRows.of(table), n_tokens=n_tokens, tiles=tiles)
    return workspace, [launch for _, launch in bound]


def sample(logits: Tensor, table: Arena, n_rows: int, n_tokens: int, tiles: Tiles = ROOMY) -> None:
    table["n_rows"].fill_(n_rows)
    for launch in launches(logits, table, n_tokens, tiles)[1]:
        assert callable(launch)
        launch()


def admitted(all_settings: list[Setting], vocab: int) -> Arena:
    """A row for each setting, in slots counted from the end."""
    n = len(all_settings)
    table = table_of(n, vocab)
    table["row_slot"].copy_(torch.arange(n - 1, -1, -1))
    for row, setting in enumerate(all_settings):
        write_admission(table, n - 1 - row, setting, vocab)
    return table


def in_id_order(logits: Tensor, setting: Setting, n_tokens: int) -> int:
    """An unfiltered draw through the ids in their order, which is the kernel's own where nothing is filtered."""
    row = row_of(setting, logits.shape[0], n_tokens)
    warm = penalise_torch(logits.unsqueeze(0), row)[0] / max(setting.temperature, 1e-6)
    running = warm.double().softmax(-1).cumsum(-1)
    target = uniform_torch(row.seed, row.position).double() * running[-1]
    return int(torch.searchsorted(running, target, right=True))


def check(logits: Tensor, all_settings: list[Setting], n_tokens: int, tiles: Tiles) -> None:
    """Run both and compare all they write."""
    vocab = logits.shape[1]
    mine, twins = admitted(all_settings, vocab), admitted(all_settings, vocab)
    sample(logits, mine, len(all_settings), n_tokens, tiles)
    step(logits, twins, len(all_settings), n_tokens)
    expected = twins["chosen"].tolist()
    for row, setting in enumerate(all_settings):
        unfiltered = setting.top_k in (0, *range(vocab, 9999)) and setting.top_p >= 1 and setting.min_p == 0
        if setting.temperature > 0 and unfiltered:
            expected[row] = in_id_order(logits[row], setting, n_tokens)
    assert mine["chosen"].tolist() == expected
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(expected).unsqueeze(1))[:, 0]
    torch.testing.assert_close(mine["chosen_logprob"], logprobs, atol=1e-5, rtol=0)
    assert mine["top_ids"].tolist() == twins["top_ids"].tolist()
    torch.testing.assert_close(mine["top_logprobs"], twins["top_logprobs"], atol=1e-5, rtol=0)


def noise(rows: int, vocab: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * scale


@triton.jit  # type: ignore[untyped-decorator]  # triton's own
def uniform_kernel(seeds: Any, positions: Any, out: Any, N: tl.constexpr) -> None:
    at = tl.arange(0, N)
    tl.store(out + at, uniform(tl.load(seeds + at), tl.load(positions + at)))


def test_uniform_numbers_have_the_bits_of_the_twins() -> None:
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randint(0, 2**63 - 1, (512,), generator=generator)
    positions = torch.randint(0, 2**40, (512,), generator=generator)
    seeds[:3], positions[:3] = torch.tensor([0, 2**63 - 1, 2**32 - 1]), torch.tensor([0, 2**32 - 1, 2**31])
    out = torch.empty(512, dtype=torch.float64)
    uniform_kernel[(1,)](seeds, positions, out, N=512)
    assert out.tolist() == uniform_torch(seeds, positions).double().tolist()


@pytest.mark.slow
def test_greedy_rows_take_what_the_twin_takes() -> None:
    """E-68."""
    ties = torch.zeros(1003)
    ties[[77, 400, 999]] = 2.0
    zeros = torch.full((1003,), -0.0)
    zeros[500:] = 0.0
    logits = torch.cat((noise(4, 1003).round(), torch.stack((ties, zeros)), noise(2, 1003)))
    logits[3, 1000:] = 99.0  # padding of the embedding, never chosen
    many = tuple((30 * i, -100.0 + i) for i in range(0, 32))
    check(
        logits,
        [
            Setting(),
            Setting(bias=((5, 60.0), (6, 30.0), (6, 31.0), (1002, 100.0))),
            Setting(min_tokens=3, stop_ids=tuple(logits[2].argsort(descending=True)[:4].tolist()), made={4: 2}),
            Setting(n_logprobs=5),
            Setting(n_logprobs=20, allowed=frozenset(range(300, 1003))),
            Setting(n_logprobs=20),
            Setting(repetition=1.7, presence=0.31, frequency=0.173, prompt=tuple(range(0, 1003, 3)), made={8: 3, 9: 7}),
            Setting(bias=many, repetition=0.8, prompt=(1, 2, 3)),
        ],
        1000,
        replace(ROOMY, block=512, chunk=512),
    )


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_draws_are_the_twins_whether_listed_or_searched(tiles: Tiles) -> None:
    common = [
        Setting(temperature=0.8, top_k=12, top_p=0.95),
        Setting(temperature=1.3, top_p=0.97),
        Setting(temperature=1.0, min_p=0.01),
        Setting(temperature=0.7, top_k=150, top_p=0.9, min_p=0.001),
        Setting(temperature=1.0, allowed=frozenset({3, 90, 91}), top_p=0.99),
        Setting(temperature=1.0),
    ]
    check(noise(6, VOCAB, 2.0), [replace(s, seed=i) for i, s in enumerate(common)], VOCAB - 3, tiles)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_the_narrowest_filters_leave_the_largest_with_the_lowest_id(tiles: Tiles) -> None:
    logits = noise(5, 203).round()
    logits[4] = 1.0  # all alike
    narrow = [
        Setting(temperature=1.0, top_k=1),
        Setting(temperature=5.0, top_p=0.0),
        Setting(temperature=5.0, top_p=1e-6),
        Setting(temperature=0.5, min_p=1.0, top_p=0.0),
        Setting(temperature=1.0, top_p=0.001),
    ]
    table = admitted(narrow, 203)
    sample(logits, table, 5, 203, tiles)
    assert table["chosen"].tolist() == logits.argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_equals_at_the_edge_are_kept_from_the_lowest_id_on(tiles: Tiles) -> None:
    logits = torch.zeros((4, 203))
    logits[:, 50] = 1.0
    logits[:, 60:] = -1.0
    edges = [
        Setting(temperature=1.0, top_k=20, seed=1),
        Setting(temperature=1.0, top_p=0.3, seed=2),
        Setting(temperature=1.0, min_p=1.0 / 2.8, seed=3),
        Setting(temperature=1.0, top_k=55, top_p=0.9, seed=4),
    ]
    check(logits, edges, 203, tiles)


@pytest.mark.slow
@given(
    picked=st.lists(SETTINGS, min_size=3, max_size=3),
    n_tokens=st.sampled_from([VOCAB, VOCAB - 9]),
    scale=st.sampled_from([0.0, 0.5, 3.0, 10.0]),
    grain=st.booleans(),
    seed=st.integers(0, 2**31),
    n_logprobs=st.integers(0, 20),
    tiles=st.sampled_from([ROOMY, TIGHT]),
)
@settings(max_examples=10, derandomize=True, deadline=None)
def test_any_setting_gives_what_the_twin_gives(
    picked: list[Setting], n_tokens: int, scale: float, grain: bool, seed: int, n_logprobs: int, tiles: Tiles
) -> None:
    logits = noise(3, VOCAB, scale, seed)
    logits = logits.round() if grain else logits
    check(logits, [replace(s, n_logprobs=n_logprobs) for s in picked], n_tokens, tiles)


def drawn(logits: Tensor, setting: Setting, n: int, tiles: Tiles) -> list[int]:
    """n draws from one row of logits with seeds of their own: what comes before the draw runs once."""
    vocab = logits.shape[0]
    table = admitted([replace(setting, seed=i) for i in range(n)], vocab)
    workspace, (shape, gather, choose) = launches(logits.expand(n, vocab).contiguous(), table, vocab, tiles)
    assert callable(shape)
    assert callable(gather)
    assert callable(choose)
    table["n_rows"].fill_(1)
    shape()
    gather()
    for buffer in workspace.values():
        buffer.copy_(buffer[:1].expand_as(buffer).clone())
    table["n_rows"].fill_(n)
    choose()
    chosen: list[int] = table["chosen"].tolist()
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "kept", "tiles"),
    [
        (Setting(temperature=1.0, top_k=3), {61, 5, 33}, ROOMY),
        (Setting(temperature=1.0, top_p=0.2), {61, 5}, ROOMY),
        (Setting(temperature=1.0, top_p=0.2), {61, 5}, TIGHT),
        (Setting(temperature=1.0, min_p=0.4), {61, 5, 33, 40}, TIGHT),
    ],
)
def test_all_that_is_kept_is_drawn_and_nothing_else(setting: Setting, kept: set[int], tiles: Tiles) -> None:
    logits = torch.full((70,), -1.0)
    logits[[61, 5, 33, 40]] = torch.tensor([2.0, 1.9, 1.8, 1.2])
    assert set(drawn(logits, setting, 24, replace(tiles, block=128))) == kept


@pytest.mark.slow
def test_unfiltered_draws_follow_the_probabilities() -> None:
    logits = torch.full((100,), float("-inf"))
    share = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits[[2, 40, 70, 99]] = share.log()
    tokens = torch.tensor(drawn(logits, Setting(temperature=1.0), 300, replace(TIGHT, block=32)))
    counts = torch.stack([(tokens == i).sum() for i in (2, 40, 70, 99)])
    assert int(counts.sum()) == 300
    assert float(((counts - 300 * share) ** 2 / (300 * share)).sum()) < 16.3  # beyond one in a thousand


@pytest.mark.slow
def test_a_row_does_not_know_its_place_or_its_company() -> None:
    logits = noise(6, VOCAB)
    alike = [
        Setting(temperature=0.9, top_p=0.9, seed=5, n_logprobs=3),
        Setting(n_logprobs=4, repetition=1.2, prompt=(4, 5)),
        Setting(temperature=1.1, seed=8),
    ]
    together = admitted([*alike[::-1], *alike], VOCAB)
    sample(torch.cat((noise(3, VOCAB, seed=9), logits[:3])), together, 6, VOCAB, ROOMY)
    for row, setting in enumerate(alike):
        table = table_of(4, VOCAB)
        table["row_slot"][0] = row
        write_admission(table, row, setting, VOCAB)
        sample(logits[row].expand(4, -1).contiguous(), table, 1, VOCAB, ROOMY)
        for name in ("chosen", "chosen_logprob", "top_ids", "top_logprobs"):
            assert table[name][0].tolist() == together[name][3 + row].tolist(), name


def test_a_first_token_needs_the_admissions_alone() -> None:
    tables = tensor_tables(Layout(n_slots=2, max_pages=2, vocab=VOCAB), torch.device("cpu"))
    setting = Setting(repetition=1.5, frequency=2.0, prompt=tuple(range(90)), position=17, min_tokens=1, stop_ids=(2,))
    logits = noise(1, VOCAB)
    logits[0, 2], logits[0, 5], logits[0, 100] = 50.0, 20.0, 19.0  # banned, seen, and so the largest
    write_admission(tables.admissions, 1, setting, VOCAB)
    chosen, logprob = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    workspace = sample_workspace(1, VOCAB, logits.device, ROOMY)
    one, given, most = torch.ones(1, dtype=torch.int32), tables.admissions, SampledRows.of(tables.table)
    rows = most._replace(
        n_rows=one, row_slot=one, position=given["position"], offset=0, chosen=chosen, chosen_logprob=logprob
    )
    bound = bind_sample(logits, given, workspace, rows, n_tokens=VOCAB, first=True, tiles=ROOMY)
    for _, launch in bound:
        launch()
    assert chosen.tolist() == [100]


def test_dead_rows_are_neither_read_nor_written() -> None:
    table = admitted([Setting(), Setting(), Setting()], VOCAB)
    for name in ("chosen", "top_ids"):
        table[name].fill_(-7)
    logits = torch.full((3, VOCAB), float("nan"))
    logits[0] = torch.arange(float(VOCAB))
    table["row_slot"][1:] = 10**6  # a slot that is none
    sample(logits, table, 1, VOCAB)
    assert table["chosen"].tolist() == [VOCAB - 1, -7, -7]
    assert bool((table["top_ids"] == -7).all())
    sample(logits, table, 0, VOCAB)
    assert table["chosen"].tolist() == [VOCAB - 1, -7, -7]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's word on what is under test
def test_a_logit_that_is_no_number_still_gives_an_id() -> None:
    logits = torch.full((2, VOCAB), float("nan"))
    table = admitted([Setting(), Setting(temperature=1.0, top_k=4)], VOCAB)
    sample(logits, table, 2, VOCAB - 3)
    assert all(0 <= token < VOCAB - 3 for token in table["chosen"].tolist())


def test_where_all_is_banned_id_zero_is_chosen() -> None:
    banned = frozenset[int]()
    table = admitted([Setting(temperature=t, allowed=banned, top_k=k) for t, k in ((0, 0), (1, 0), (1, 5))], VOCAB)
    sample(noise(3, VOCAB), table, 3, VOCAB)
    assert table["chosen"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("vocab", [17, 1003, 32_000, 50_257, 128_256, 151_936, 262_144])
def test_tiles_cut_any_vocabulary_into_about_a_thousand_subs(vocab: int) -> None:
    tiles = tiles_for(vocab)
    assert tiles.block % tiles.sub == 0
    assert tiles.n_blocks(vocab) * tiles.block >= vocab
    assert tiles.n_subs(vocab) <= 1088
    assert vocab <= tiles.capacity or 0 < tiles.wanted < tiles.n_subs(vocab)


def test_binding_names_the_argument_that_does_not_fit() -> None:
    """E-1."""
    table = table_of(2, VOCAB)
    with pytest.raises(BadPointer, match="logits"):
        launches(torch.zeros((2, VOCAB), dtype=torch.float64), table, VOCAB, ROOMY)
    with pytest.raises(BadPointer, match="prompt_bits"):
        launches(torch.zeros((2, 3 * VOCAB)), table, VOCAB, ROOMY)
    with pytest.raises(BadPointer, match="aligned to 16"):
        launches(torch.zeros((3, VOCAB))[1:], table, VOCAB, ROOMY)


def compile_all() -> None:
    """For both makers, with short lists: a long sort takes the compiler seconds, and is the same code."""
    vocab = 128256
    tiles = tiles_for(vocab) if soaking() else replace(tiles_for(vocab), capacity=64, small=64)
    tables = tensor_tables(Layout(n_slots=2, max_pages=2, vocab=vocab), torch.device("cpu"))
    workspace = sample_workspace(2, vocab, torch.device("cpu"), tiles)
    given = torch.zeros((2, vocab)), tables.table, workspace, SampledRows.of(tables.table)
    step, first = (bind_sample(*given, n_tokens=vocab - 5, first=first, tiles=tiles) for first in (False, True))
    for _, launch in (*step, first[0]):
        compile_launch(launch)
