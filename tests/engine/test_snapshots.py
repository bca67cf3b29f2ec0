"""Prompts of recurrent models begin at a snapshot of the states; answers have the bits that they have from nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ostinato.backends import memory_rows
from ostinato.engine.choose import settle_model
from ostinato.engine.engine import Engine
from tests.backends.families import VOCAB, family_model
from tests.backends.native.tiled import tiled
from tests.engine.opened import bits, sampling, until

HYBRID = ("falcon-h1", "qwen35")  # whose other layers attend
FAMILIES = ("mamba", "mamba2", *HYBRID)
PAGE = 16
ROWS = 256  # of a chunk


@contextmanager
def opened(family: str, **words: Any) -> Iterator[Engine]:
    model = tiled(family_model(family))
    settled = settle_model(model, "loop", context=1024, n_pages=256, n_slots=3, threads=2)
    with Engine(model, settled, **words) as engine:
        yield engine


def ids(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=n)


def turns(family: str, **words: Any) -> tuple[list[Any], list[int]]:
    """A conversation of four turns: each prompt is the one before, its answer and something new."""
    prompt, found, cached = ids(1, 300), [], []
    with opened(family, **words) as engine:
        for turn in range(4):
            request = engine.submit(prompt, sampling(max_tokens=12, temperature=0.8, seed=7, logprobs=1))
            found.append(bits(request))
            cached.append(request.cached_tokens)
            prompt = [*prompt, *ids(100 + turn, 12), *ids(turn, 25)]
        until(lambda: engine.stats().pages_leased == 0, "all pages are back")
    return found, cached


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_of_a_conversation_begins_where_the_last_prompt_ended(family: str) -> None:
    found, cached = turns(family)
    expected, from_nothing = turns(family, share_prefixes=False)
    assert found == expected
    assert from_nothing == [0, 0, 0, 0]
    lengths = [0, 300, 337, 374]
    # Where layers attend too, whole pages before the prompt's last token.
    assert cached == ([n and (n - 1) // PAGE * PAGE for n in lengths] if family in HYBRID else lengths)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_begin_alike_share_whole_chunks_of_it(family: str) -> None:
    common = ids(3, ROWS + 40)
    with opened(family) as engine:
        for n, seed in enumerate((4, 5, 6)):
            request = engine.submit([*common, *ids(seed, 30)], sampling(max_tokens=3))
            bits(request)
            assert request.cached_tokens == (ROWS if n else 0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", *HYBRID])
def test_answers_at_random_are_those_of_an_engine_without_snapshots(family: str) -> None:
    """Four at once, cancelled ones among them, with room for few snapshots."""
    chance = random.Random(2)
    beginnings = [ids(seed, 290) for seed in range(3)]
    prompts = [
        [*chance.choice(beginnings)[: chance.choice((30, 256, 270, 290))], *ids(50 + i, chance.randrange(1, 40))]
        for i in range(24)
    ]

    def answers(**words: Any) -> tuple[list[Any], int]:
        found = []
        with opened(family, **words) as engine:
            for first in range(0, len(prompts), 4):
                requests = [engine.submit(p, sampling(max_tokens=6, logprobs=1)) for p in prompts[first : first + 4]]
                doomed = engine.submit(beginnings[0], sampling(max_tokens=500))
                found += [bits(request) for request in requests]
                doomed.cancel()
            until(lambda: engine.stats().pages_leased == 0, "all pages are back")
            return found, engine.stats().cached_tokens

    expected, none = answers(share_prefixes=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_rows, "MOST_SNAPSHOTS", 4)
        found, n_cached = answers()
    assert found == expected
    assert none == 0
    assert n_cached > 1000
