"""How a token is chosen: Philox against its published vectors, the chain of filters against a plain one."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.backends.torch.ops.philox import philox_torch, uniform_torch
from ostinato.backends.torch.ops.sample import SampleRows, penalise_torch, sample_filtered_torch
from tests.backends.torch.choice import sample_torch

PHILOX = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def rows_of(
    n_rows: int = 1,
    vocab: int = 8,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
) -> SampleRows:
    def all_rows(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((n_rows,), value, dtype=dtype)

    return SampleRows(
        temperature=all_rows(temperature),
        top_k=all_rows(top_k, torch.int64),
        top_p=all_rows(top_p),
        min_p=all_rows(min_p),
        repetition=all_rows(1.0),
        presence=all_rows(0.0),
        frequency=all_rows(0.0),
        seed=all_rows(seed, torch.int64),
        position=torch.arange(position, position + n_rows),
        in_prompt=torch.zeros((n_rows, vocab), dtype=torch.bool),
        made=torch.zeros((n_rows, vocab), dtype=torch.int32),
        bias=torch.zeros((n_rows, vocab)),
    )


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert tuple(philox_torch(torch.tensor([counter]), torch.tensor([key]))[0].tolist()) == expected


def test_a_draw_is_a_function_of_seed_and_position_alone() -> None:
    seeds, positions = torch.tensor([7, 8, 7, 2**62 + 7]), torch.tensor([3, 3, 4, 3])
    together = uniform_torch(seeds, positions)
    apart = [float(uniform_torch(seeds[i : i + 1], positions[i : i + 1])) for i in range(4)]
    assert together.tolist() == apart
    assert len(set(apart)) == 4


def test_uniform_numbers_are_even_and_below_one() -> None:
    numbers = uniform_torch(torch.full((20_000,), 42), torch.arange(20_000))
    assert 0 <= float(numbers.min()) <= float(numbers.max()) < 1
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 45  # chi-square with 19 degrees, beyond one in a thousand


def test_temperature_zero_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    assert sample_torch(logits, rows_of(vocab=4, temperature=0)).token.tolist() == [1]


def test_the_log_probability_is_the_models_own_before_any_filter() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    rows = replace(rows_of(vocab=4, temperature=0), bias=torch.tensor([[50.0, 0, 0, 0]]))
    chosen = sample_torch(logits, rows)
    assert chosen.token.tolist() == [0]
    assert math.isclose(float(chosen.logprob), float(logits.log_softmax(-1)[0, 0]), rel_tol=1e-6)


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log().expand(8000, 4)
    counts = Counter(sample_filtered_torch(logits, rows_of(8000, 4, seed=11)).tolist())
    for token, share in enumerate([0.5, 0.25, 0.125, 0.125]):
        assert abs(counts[token] - 8000 * share) < 4 * math.sqrt(8000 * share)


def allowed(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Which tokens the filters keep, in plain Python."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[:top_k] if top_k else order
    exps = [math.exp(logits[i] - logits[order[0]]) for i in order]
    shares = [e / sum(exps) for e in exps]
    kept: set[int] = set()
    before = 0.0
    for token, share in zip(order, shares, strict=True):
        if kept and before >= top_p:
            break
        if share >= min_p * shares[0]:
            kept.add(token)
        before += share
    return kept | {order[0]}


@pytest.mark.slow
@given(
    # a grid of values a step apart, so that no sum lands within rounding of a limit
    logits=st.lists(st.integers(-4, 4).map(float), min_size=2, max_size=9),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([0.0, 0.1037, 0.5113, 0.9017, 1.0]),
    min_p=st.sampled_from([0.0, 0.0511, 0.3071, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_a_draw_stays_within_what_the_filters_keep_and_reaches_all_of_it(
    logits: list[float], top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    n = 400
    rows = rows_of(n, len(logits), top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    drawn = set(sample_filtered_torch(torch.tensor([logits]).expand(n, -1), rows).tolist())
    kept = allowed(logits, top_k, top_p, min_p)
    assert drawn <= kept
    likely = {t for t in kept if math.exp(logits[t] - max(logits)) / len(logits) > 0.03}
    assert likely <= drawn


def test_penalties_count_what_was_seen() -> None:
    rows = replace(
        rows_of(vocab=4),
        repetition=torch.tensor([2.0]),
        presence=torch.tensor([0.5]),
        frequency=torch.tensor([0.25]),
        in_prompt=torch.tensor([[True, False, False, False]]),
        made=torch.tensor([[0, 3, 0, 1]], dtype=torch.int32),
        bias=torch.tensor([[0.0, 0.0, 7.0, 0.0]]),
    )
    out = penalise_torch(torch.tensor([[4.0, 4.0, 4.0, -4.0]]), rows)
    assert out.tolist() == [[2.0, 2.0 - 0.5 - 0.75, 11.0, -8.0 - 0.5 - 0.25]]


def test_rows_of_one_call_do_not_know_each_other() -> None:
    logits = torch.randn((5, 16), generator=torch.Generator().manual_seed(1))
    rows = rows_of(5, 16, temperature=0.8, top_k=5, seed=3)
    together = sample_filtered_torch(logits, rows).tolist()
    apart = [
        int(sample_filtered_torch(logits[i : i + 1], rows_of(1, 16, temperature=0.8, top_k=5, seed=3, position=i)))
        for i in range(5)
    ]
    assert together == apart
