"""Layers that see a window keep its pages alone: the answers are those of an engine that keeps every position."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ostinato.backends import base
from ostinato.backends.memory_rows import shared_rows
from ostinato.cache.groups import lease_pages, one_group
from ostinato.engine.choose import choose_context, choose_pages, settle_model
from ostinato.engine.request import HeldSequence
from ostinato.engine.saved import load_sequence, save_sequence
from tests.engine.opened import LONG, PAGE, bits, model_of, open_engine, prompt, sampling, until
from tests.random_model import WIDE_WINDOW, WINDOW, MemoryKind

KINDS: tuple[MemoryKind, ...] = ("swa", "all swa")
BY_TORCH = [pytest.param(kind, "eager", marks=pytest.mark.slow) for kind in KINDS]
CONTEXT = 1024
Asked = tuple[list[int], int]


@pytest.fixture
def _every_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are opened from now on keep every position of every layer: the plain definition."""
    monkeypatch.setattr(base, "page_groups", lambda shape, *, n_pages, **_: one_group(shape.attention, n_pages))


def conversations(seed: int) -> list[Asked]:
    """Prompts that begin alike, of up to ten windows, and how many tokens are asked for."""
    chance = random.Random(seed)
    beginnings = [prompt(chance.randrange(50), 170) for _ in range(3)]
    return [
        ([*chance.choice(beginnings)[: chance.randrange(1, 170)], *prompt(i, chance.randrange(1, 40))], n)
        for i, n in enumerate(chance.choices((1, 5, 20, 60), k=16))
    ]


def answers(kind: MemoryKind, mode: str, asked: list[Asked], **words: Any) -> tuple[list[Any], list[int]]:
    """What four requests at a time get, and how many tokens of each prompt were cached."""
    with open_engine(kind, mode=mode, context=CONTEXT, **words) as engine:
        found, cached = [], []
        for first in range(0, len(asked), 4):
            requests = [
                engine.submit(ids, sampling(max_tokens=n, temperature=0.8, seed=i, logprobs=1))
                for i, (ids, n) in enumerate(asked[first : first + 4])
            ]
            found += [bits(request) for request in requests]
            cached += [request.cached_tokens for request in requests]
        until(lambda: engine.stats().pages_leased == 0, "all pages are back")
    return found, cached


@pytest.mark.parametrize(("kind", "mode"), [*((kind, "loop") for kind in KINDS), *BY_TORCH])
def test_answers_and_cached_prefixes_have_the_bits_of_an_engine_that_keeps_every_position(
    kind: MemoryKind, mode: str, request: pytest.FixtureRequest
) -> None:
    asked = conversations(1) if mode == "eager" else [*conversations(1), *conversations(2)]
    found, cached = answers(kind, mode, asked)
    crowded, _ = answers(kind, mode, asked, n_pages=CONTEXT // PAGE)  # no page is free for long
    request.getfixturevalue("_every_position")
    expected, _ = answers(kind, mode, asked, share_prefixes=False)
    assert found == expected
    assert crowded == expected
    assert sum(cached) > 200


@pytest.mark.parametrize(("kind", "mode"), [*((kind, "loop") for kind in KINDS), *BY_TORCH])
def test_a_sequence_that_has_left_its_window_far_behind_is_saved_and_loaded(kind: MemoryKind, mode: str) -> None:
    asked, wanted = prompt(7, 200), sampling(max_tokens=120)
    with open_engine(kind, mode=mode, context=CONTEXT) as engine:
        made = [token.token for token in engine.submit(asked, wanted, keep=True)]
        held = [*asked, *made[:-1]]
        data = save_sequence(engine, HeldSequence(held), {})
        expected = bits(engine.submit([*held, 3], wanted, resume=True))
    with open_engine(kind, mode=mode, context=CONTEXT) as other:
        assert load_sequence(other, data).tokens == held
        assert bits(other.submit([*held, 3], wanted, resume=True)) == expected


def test_an_answer_of_many_windows_is_made_by_one_trigger_without_more_grants(request: pytest.FixtureRequest) -> None:
    """The page table is complete at admission, so that the loop never waits for the host to move its window."""
    asked, n = prompt(1, 20), 160 * WIDE_WINDOW
    wanted = sampling(max_tokens=n, temperature=0.8, seed=1, logprobs=1)
    with open_engine("all swa", context=LONG, n_slots=1) as engine:
        grants = []
        engine.runner.host.grant = lambda *entry: grants.append(entry)  # type: ignore[method-assign, assignment]
        tokens = bits(engine.submit(asked, wanted))
        assert (len(tokens), engine.runner.decode_mode.n_triggers, grants) == (n, 1, [])
    request.getfixturevalue("_every_position")
    with open_engine("all swa", context=LONG, n_slots=1) as engine:
        assert tokens == bits(engine.submit(asked, wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_follows_the_window_and_not_the_context(kind: MemoryKind) -> None:
    shape = replace(model_of(kind).shape, context=1 << 17)
    settled = settle_model(model_of(kind), context=1 << 17, n_slots=2)
    pages = [group.n_pages for group in settled.groups(shape)]
    window = WIDE_WINDOW if kind == "all swa" else WINDOW
    windowed = 4 * lease_pages(window, PAGE, base.CHUNK_ROWS["cpu"])
    whole = 2 * (1 << 17) // PAGE
    assert pages == ([windowed] if kind == "all swa" else [whole, windowed])
    page = shared_rows(shape, replace(settled, context=WINDOW, n_pages=1, n_slots=1))[0].n_bytes // 2  # in one layer
    rows = {row.name: row.n_bytes for row in shared_rows(shape, settled)}
    assert rows["KV pages"] == page * (2 * windowed if kind == "all swa" else whole + windowed)
    # What was short for two layers is enough for one, or for windows.
    free = whole * page * 5 // 4
    assert choose_context(shape, settled, 1 << 17, free, print) == 1 << 17
    assert choose_pages(shape, settled, free) == whole
