"""Engines over tiny random models, and what tests ask of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from ostinato.backends.base import ChunkOutput, ChunkPart, ChunkWant
from ostinato.backends.torch.backend import TWIN
from ostinato.backends.torch.model import Model
from ostinato.engine.choose import settle_model
from ostinato.engine.engine import Engine
from ostinato.engine.request import Request, Token
from ostinato.options import NEUTRAL, Sampling
from tests.backends.native.tiled import tiled
from tests.random_model import MemoryKind, random_model

DEADLINE_S = 60.0
PAGE = 16  # positions of a page on the CPU
LONG = 16_384  # a context whose end no test sees: the native loop makes thousands of tokens a second of these models


@cache
def model_of(kind: MemoryKind) -> Model:
    """As users get it on a CPU: in tiles, where the native loop can run it."""
    model = random_model(kind)
    return tiled(model) if is_native(kind) else model


def is_native(kind: MemoryKind) -> bool:
    return kind != "encoder"


def open_engine(
    kind: MemoryKind = "kv",
    *,
    mode: str = "auto",
    n_slots: int = 4,
    context: int = 256,
    n_pages: int | None = None,
    **words: Any,
) -> Engine:
    """An engine of its own over a model that tests share; `n_pages` is by default enough for everybody."""
    if mode == "loop" and not is_native(kind):
        mode = TWIN
    one = -(-context // PAGE)
    pages = n_slots * one if n_pages is None else n_pages
    model = model_of(kind)
    return Engine(model, settle_model(model, mode, context=context, n_pages=pages, n_slots=n_slots), **words)


def sampling(**words: Any) -> Sampling:
    """Settled: greedy, and for ever, unless said otherwise."""
    return Sampling(**{"seed": 0, "ignore_eos": True, **words}).over(NEUTRAL)


def prompt(seed: int, n: int) -> list[int]:
    """n token ids that no other seed begins with."""
    return [(seed * 31 + i * i * 7 + i * seed * 3) % 128 for i in range(n)]


def ids(tokens: Iterable[Token]) -> list[int]:
    return [token.token for token in tokens]


def bits(tokens: Iterable[Token]) -> list[tuple[Any, ...]]:
    """All of an answer that may not depend on anything but the request."""
    return [(t.token, t.logprob, t.top, t.position, t.finish_reason) for t in tokens]


def alone(prompt: Sequence[int], wanted: Sampling, kind: MemoryKind = "kv", **words: Any) -> list[tuple[Any, ...]]:
    """The answer of an engine that has nothing else to do and has never done anything."""
    with open_engine(kind, n_slots=1, share_prefixes=False, **words) as engine:
        return bits(engine.submit(prompt, wanted))


def until(is_true: Callable[[], bool], what: str) -> None:
    """Wait for something that other threads bring about."""
    end = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.001)


@contextmanager
def line_held(engine: Engine) -> Iterator[None]:
    """What is submitted inside is in line before the engine looks at the first of it."""
    with engine._queue._room:
        yield


class Gate:
    """Prompts stop before their chunks until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        prefill = engine.runner.chunks
        run = prefill.run

        def gated(parts: Sequence[ChunkPart], rows: int, want: ChunkWant | None = None) -> ChunkOutput:
            self.reached.set()
            assert self._open.wait(DEADLINE_S)
            return run(parts, rows, want)

        prefill.run = gated  # type: ignore[method-assign]  # stands in the way on purpose

    def open(self) -> None:
        self._open.set()


def decoding(engine: Engine, seed: int = 99, n: int = 4) -> Request:
    """A request that decodes until it is cancelled or the context ends; it has its first token."""
    request = engine.submit(prompt(seed, n), sampling())
    next(request)
    return request
