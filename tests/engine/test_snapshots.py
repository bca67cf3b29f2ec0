"""Prompts of recurrent models begin at a snapshot of the states; answers have the bits that they have from nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.backends import memory_rows
from ostinato.backends.base import Chunks
from ostinato.backends.cuda.chunks import FusedChunks
from ostinato.backends.cuda.plan import FusedPlan
from ostinato.backends.torch.backend import TWIN, TorchRunner
from ostinato.backends.torch.kernels import twin_kernels
from ostinato.backends.torch.ops.gemm import gemm_torch
from ostinato.backends.torch.ops.matmul import InputNorm, product_torch
from ostinato.backends.torch.ops.runs import ChunkRuns, RowRun
from ostinato.backends.torch.start import CpuLoop
from ostinato.backends.torch.weight import Weight
from ostinato.decoder.paged import REPLACED_TOKENS
from ostinato.engine.choose import settle_model
from ostinato.engine.engine import Engine
from ostinato.loop.plan import Plan
from ostinato.loop.start import Start
from tests.backends.families import VOCAB, family_model
from tests.backends.native.tiled import tiled
from tests.engine.opened import bits, sampling, until

HYBRID = ("falcon-h1", "qwen35")  # whose other layers attend
FAMILIES = ("mamba", "mamba2", *HYBRID)
BACKENDS = ("native", "cuda")  # of CUDA by the references of its kernels
PAGE = 16
ROWS = 256  # of a chunk
RUNS = ChunkRuns.__iter__


class References(TorchRunner):
    """The plan and the chunks of CUDA, over torch's references of their kernels."""

    def _made(self) -> tuple[Plan, Start, Chunks]:
        kernels = replace(twin_kernels(), gemm=partial(partial, gemm_by_rows))
        given = self.plain_model, self._kept, self._shared, self.n_tokens, kernels
        plan = FusedPlan(*given).plan()
        start = CpuLoop(plan, self._shared, self.guard, self.changed.set)
        return plan, start, FusedChunks(*given, buckets=(64, ROWS))


# Row by row, as kernels compute: the bits of a row of a torch operation may depend on how many rows there are.


def gemm_by_rows(x: Tensor, weight: Weight, out: Tensor, **words: Any) -> None:
    for row in range(len(x)):
        gemm_torch(x[row : row + 1], weight, out[row : row + 1], **words)


def product_by_rows(x: Tensor, weight: Weight, norm: InputNorm | None) -> Tensor:
    rows = [slice(row, row + 1) for row in range(len(x))]
    norms = [None if norm is None else replace(norm, stats=norm.stats[own]) for own in rows]
    return torch.cat([product_torch(x[own], weight, one) for own, one in zip(rows, norms, strict=True)])


def single_rows(runs: ChunkRuns) -> Iterator[RowRun]:
    for run in RUNS(runs):
        for row in range(run.n):
            yield RowRun(run.first + row, 1, run.slot, run.fresh and row == 0)


@contextmanager
def opened(family: str, backend: str = "native", **words: Any) -> Iterator[Engine]:
    model, mode = family_model(family), TWIN if backend == "cuda" else "loop"
    model = model if backend == "cuda" else tiled(model)
    settled = settle_model(model, mode, context=1024, n_pages=256, n_slots=3, threads=2)
    with pytest.MonkeyPatch.context() as patch:
        if backend == "cuda":
            patch.setattr("ostinato.engine.engine.open_runner", References)
            patch.setattr("ostinato.backends.torch.ops.matmul.product_torch", product_by_rows)
            patch.setattr(ChunkRuns, "__iter__", single_rows)
        with Engine(model, settled, **words) as engine:
            yield engine


def ids(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=n)


def last_snapshot(family: str, n: int) -> int:
    """Of a prompt of n tokens: whole pages where layers attend too."""
    every = PAGE if family in HYBRID else 1
    return max(0, n - REPLACED_TOKENS) // every * every


def turns(family: str, backend: str, **words: Any) -> tuple[list[Any], list[int]]:
    """A conversation of four turns: each prompt is the one before, its answer and something new."""
    prompt, found, cached = ids(1, 300), [], []
    with opened(family, backend, **words) as engine:
        for turn in range(4):
            request = engine.submit(prompt, sampling(max_tokens=12, temperature=0.8, seed=7, logprobs=1))
            found.append(bits(request))
            cached.append(request.cached_tokens)
            prompt = [*prompt, *ids(100 + turn, 12), *ids(turn, 25)]
        until(lambda: engine.stats().pages_leased == 0, "all pages are back")
    return found, cached


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_of_a_conversation_begins_where_the_last_prompt_ended(family: str, backend: str) -> None:
    found, cached = turns(family, backend)
    expected, from_nothing = turns(family, backend, share_prefixes=False)
    assert found == expected
    assert from_nothing == [0, 0, 0, 0]
    lengths = [0, 300, 337, 374]
    assert cached == [last_snapshot(family, n) for n in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_whose_turns_replace_the_last_tokens_of_a_prompt_begins_at_its_snapshot(family: str) -> None:
    """Of every length over two pages. All begin alike; the longest comes first, so that no snapshot follows the cached
    pages that the next ones begin with."""

    def answers(**words: Any) -> tuple[list[Any], list[bool]]:
        found, begun = [], []
        with opened(family, **words) as engine:
            for n in reversed(range(PAGE + REPLACED_TOKENS, 3 * PAGE + REPLACED_TOKENS)):
                prompt, least = [*ids(1, PAGE + 3), *ids(n, n - PAGE - 3)], 0
                for turn in range(3):
                    request = engine.submit(prompt, sampling(max_tokens=4, temperature=0.8, seed=7, logprobs=1))
                    found.append(bits(request))
                    begun.append(request.cached_tokens >= least)
                    least = last_snapshot(family, len(prompt))
                    assert least > 0
                    prompt = [*prompt[: -1 - (n + turn) % REPLACED_TOKENS], *ids(turn, 25)]
        return found, begun

    found, begun = answers()
    assert all(begun)
    assert found == answers(share_prefixes=False)[0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_begin_alike_share_whole_chunks_of_it(family: str, backend: str) -> None:
    common = ids(3, ROWS + 40)
    with opened(family, backend) as engine:
        for n, seed in enumerate((4, 5, 6)):
            request = engine.submit([*common, *ids(seed, 30)], sampling(max_tokens=3))
            bits(request)
            assert request.cached_tokens == (ROWS if n else 0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["mamba2", *HYBRID])
def test_answers_at_random_are_those_of_an_engine_without_snapshots(family: str, backend: str) -> None:
    """Four at once, cancelled ones among them, with room for few snapshots."""
    chance, n = random.Random(2), 24 if backend == "native" else 8
    beginnings = [ids(seed, 290) for seed in range(3)]
    prompts = [
        [*chance.choice(beginnings)[: chance.choice((30, 256, 270, 290))], *ids(50 + i, chance.randrange(1, 40))]
        for i in range(n)
    ]

    def answers(**words: Any) -> tuple[list[Any], int]:
        found = []
        with opened(family, backend, **words) as engine:
            for first in range(0, n, 4):
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
    assert n_cached > 40 * n
