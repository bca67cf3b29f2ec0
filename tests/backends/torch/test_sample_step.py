"""The step's sampler over the slot table against `sample_torch`: the same tokens for the same settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.backends.torch.ops.sample import SampleRows
from ostinato.backends.torch.ops.sample_step import sample_step_torch
from ostinato.backends.torch.tables import tensor_tables
from ostinato.loop.layout import Arena, Layout, SampledRows
from tests.backends.admissions import Setting, write_admission
from tests.backends.torch.choice import sample_torch


def row_of(setting: Setting, vocab: int, n_tokens: int) -> SampleRows:
    """The same setting as one row of `sample_torch`, put together from the request's own values."""

    def one(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([value], dtype=dtype)

    bias, in_prompt = torch.zeros((1, vocab)), torch.zeros((1, vocab), dtype=torch.bool)
    made = torch.zeros((1, vocab), dtype=torch.int32)
    bias[0, n_tokens:] = float("-inf")
    for token, value in setting.bias:
        bias[0, token] += value
    if setting.n_made < setting.min_tokens:
        bias[0, list(setting.stop_ids)] = float("-inf")
    if setting.allowed is not None:
        bias[0, [i for i in range(vocab) if i not in setting.allowed]] = float("-inf")
    in_prompt[0, list(setting.prompt)] = True
    for token, times in setting.made.items():
        made[0, token] = times
    return SampleRows(
        temperature=one(setting.temperature),
        top_k=one(setting.top_k, torch.int64),
        top_p=one(setting.top_p),
        min_p=one(setting.min_p),
        repetition=one(setting.repetition),
        presence=one(setting.presence),
        frequency=one(setting.frequency),
        seed=one(setting.seed, torch.int64),
        position=one(setting.position + 1, torch.int64),
        in_prompt=in_prompt,
        made=made,
        bias=bias,
    )


def table_of(n_slots: int, vocab: int) -> Arena:
    return tensor_tables(Layout(n_slots=n_slots, max_pages=2, vocab=vocab), torch.device("cpu")).table


def step(logits: Tensor, table: Arena, n_rows: int, n_tokens: int) -> None:
    sample_step_torch(logits, table, SampledRows.of(table)._replace(n_rows=n_rows), n_tokens=n_tokens)


def chosen_by_step(logits: Tensor, setting: Setting, n_tokens: int) -> tuple[int, float, Arena]:
    """One row, in slot 1 of 3."""
    vocab = logits.shape[0]
    table = table_of(3, vocab)
    table["row_slot"][0] = 1
    write_admission(table, 1, setting, vocab)
    step(logits.unsqueeze(0), table, 1, n_tokens)
    return int(table["chosen"][0]), float(table["chosen_logprob"][0]), table


VOCAB = 203
IDS = st.integers(0, VOCAB - 1)
SETTINGS = st.builds(
    Setting,
    temperature=st.sampled_from([0.0, 0.0, 0.01, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 40, 1000]),
    top_p=st.sampled_from([0.0, 0.1037, 0.5113, 0.9017, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.0511, 0.3071, 1.0]),
    repetition=st.sampled_from([1.0, 1.3, 0.5]),
    presence=st.sampled_from([0.0, 0.6, -1.1]),
    frequency=st.sampled_from([0.0, 0.37, -0.2]),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**20),
    min_tokens=st.integers(0, 9),
    stop_ids=st.lists(IDS, max_size=4).map(tuple),
    bias=st.lists(st.tuples(IDS, st.floats(-100, 100, width=32)), max_size=5).map(tuple),
    prompt=st.lists(IDS, max_size=30).map(tuple),
    made=st.dictionaries(IDS, st.integers(1, 5), max_size=6),
    allowed=st.none() | st.frozensets(IDS, min_size=1, max_size=60),
)


@pytest.mark.slow
@given(
    setting=SETTINGS,
    n_tokens=st.sampled_from([VOCAB, VOCAB - 9]),
    scale=st.sampled_from([0.0, 0.5, 3.0, 10.0]),
    grain=st.sampled_from([0.0, 1.0]),
    noise=st.integers(0, 2**31),
)
@settings(max_examples=100, derandomize=True, deadline=None)
def test_a_step_chooses_what_sample_torch_chooses(
    setting: Setting, n_tokens: int, scale: float, grain: float, noise: int
) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(noise)) * scale
    logits = logits.round() if grain else logits  # many equals
    expected = sample_torch(logits.unsqueeze(0), row_of(setting, VOCAB, n_tokens))
    token, logprob, _ = chosen_by_step(logits, setting, n_tokens)
    assert token == int(expected.token)
    assert logprob == float(expected.logprob)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(temperature=0.8),
        Setting(temperature=0.8, top_p=0.93),
        Setting(temperature=1.1, top_k=50, top_p=0.9),
        Setting(temperature=0.7, min_p=0.02),
        Setting(temperature=0.9, top_k=3000),
    ],
    ids=str,
)
def test_a_large_vocabulary_is_drawn_from_as_sample_torch_draws(setting: Setting) -> None:
    logits = torch.randn(20_011, generator=torch.Generator().manual_seed(1)) * 2.5
    for seed in range(12):
        setting = replace(setting, seed=seed)
        expected = sample_torch(logits.unsqueeze(0), row_of(setting, 20_011, 20_000))
        assert chosen_by_step(logits, setting, 20_000)[0] == int(expected.token)


def test_the_tokens_of_a_request_are_those_of_sample_torch() -> None:
    prompt, ends = [1, 5, 5, 9], (3, 11)
    setting = Setting(
        temperature=0.9,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repetition=1.2,
        presence=0.3,
        frequency=0.2,
        bias=((3, 4.0), (9, -2.5)),
        seed=77,
        min_tokens=6,
        stop_ids=ends,
        n_logprobs=4,
        prompt=tuple(prompt),
        position=len(prompt) - 1,
    )
    noise = torch.Generator().manual_seed(5)
    for _ in range(30):
        logits = torch.randn(64, generator=noise) * 2
        choice = sample_torch(logits.unsqueeze(0), row_of(setting, 64, 60))
        likeliest = logits.log_softmax(-1).topk(4)
        token, logprob, table = chosen_by_step(logits, setting, 60)
        top = zip(table["top_ids"][0, :4].tolist(), table["top_logprobs"][0, :4].tolist(), strict=True)
        assert (token, logprob) == (int(choice.token), float(choice.logprob))
        assert list(top) == list(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))
        made = {**setting.made, token: setting.made.get(token, 0) + 1}
        setting = replace(setting, made=made, position=setting.position + 1)


def test_the_first_token_comes_from_the_admissions_alone() -> None:
    layout = Layout(n_slots=2, max_pages=2, vocab=40)
    tables = tensor_tables(layout, torch.device("cpu"))
    setting = Setting(temperature=1.0, repetition=1.5, prompt=(3, 4), seed=9, position=17, min_tokens=1, stop_ids=(2,))
    write_admission(tables.admissions, 1, setting, 40)
    logits = torch.randn((1, 40), generator=torch.Generator().manual_seed(2))
    table, given, row_slot = tables.table, tables.admissions, torch.tensor([1], dtype=torch.int32)
    rows = SampledRows.of(table)._replace(n_rows=1, row_slot=row_slot, position=given["position"], offset=0)
    sample_step_torch(logits, given, rows, n_tokens=40, first=True)
    expected = sample_torch(logits, row_of(replace(setting, position=16), 40, 40))
    assert int(table["chosen"][0]) == int(expected.token)


def test_the_most_likely_go_down_and_the_lowest_id_of_equals_comes_first() -> None:
    logits = torch.zeros(50)
    logits[[41, 7, 20]] = 2.0
    logits[30] = 5.0
    _, _, table = chosen_by_step(logits, Setting(n_logprobs=6), 50)
    assert table["top_ids"][0, :7].tolist() == [30, 7, 20, 41, 0, 1, 0]
    expected = logits.log_softmax(-1)
    assert table["top_logprobs"][0, :6].tolist() == expected[table["top_ids"][0, :6].long()].tolist()


def test_rows_beyond_the_count_are_left_alone() -> None:
    table = table_of(3, 16)
    table["row_slot"].copy_(torch.tensor([2, 0, 1]))
    table["chosen"].fill_(-7)
    logits = torch.full((3, 16), float("nan"))
    logits[0] = torch.arange(16.0)
    step(logits, table, 1, 12)
    assert table["chosen"].tolist() == [11, -7, -7]


def test_where_all_is_banned_id_zero_is_chosen() -> None:
    logits = torch.arange(64.0)
    for temperature in (0.0, 1.0):
        setting = Setting(temperature=temperature, allowed=frozenset())
        assert chosen_by_step(logits, setting, 64)[0] == 0
