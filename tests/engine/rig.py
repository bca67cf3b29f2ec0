"""A loop over a tiny random model, driven by hand, and what tests ask of it.

`loop` is the native one, over weights in tiles, where it runs the model's family, and elsewhere its twin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_uint8
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ostinato.backends.native.backend import why_not_blocks
from ostinato.backends.native.start import NativeLoop
from ostinato.backends.runner import Runner
from ostinato.backends.torch.backend import TWIN
from ostinato.backends.torch.model import Model
from ostinato.engine.choose import settle_model
from ostinato.engine.driver import GREEDY as GREEDY
from ostinato.engine.driver import LoopDriver
from ostinato.engine.open import open_runner
from ostinato.loop.layout import Word
from ostinato.loop.memory import address_of
from ostinato.options import KVType, Sampling
from tests.backends.native.tiled import tiled
from tests.random_model import MemoryKind, random_model

DEADLINE_S = 60.0


class Driver(LoopDriver):
    """Admits sequences and collects their tokens. Pages are given out in order and never taken back."""

    def admit(
        self,
        slot: int,
        prompt: Sequence[int],
        *,
        most: int = 8,
        sampling: Sampling = GREEDY,
        stop_ids: Sequence[int] = (),
        pages: Sequence[int] | None = None,
        granted: int | None = None,
        admit: bool = True,
    ) -> int:
        return super().admit(
            slot, prompt, most=most, sampling=sampling, stop_ids=stop_ids, pages=pages, granted=granted, admit=admit
        )

    def tokens(self, generation: int) -> list[int]:
        return [e.token for e in self.entries if e.generation == generation and e.token is not None]

    def word(self, word: Word) -> int:
        return self.runner.host.word(word)


def stray(memory: Any) -> np.ndarray:
    """Memory of the host as code with a stray pointer reaches it, whatever guards the arrays over it; bfloat16, which
    numpy does not have, as its bits."""
    place = (c_uint8 * memory.nbytes).from_address(address_of(memory))
    kind = (
        memory.dtype
        if isinstance(memory, np.ndarray)
        else str(memory.dtype).removeprefix("torch.").replace("bfloat16", "uint16")
    )
    return np.ctypeslib.as_array(place).view(kind).reshape(memory.shape)


@contextmanager
def held(runner: Runner) -> Iterator[None]:
    """The native loop waits at its next step boundary, or before its first, until this thread is done."""
    assert isinstance(runner.start, NativeLoop)
    native = runner.start._native
    native._call("ostinato_acquire")
    try:
        yield
    finally:
        native._call("ostinato_release")


def open_loop(
    kind: MemoryKind = "kv",
    *,
    model: Model | None = None,
    mode: str = "loop",
    n_slots: int = 4,
    context: int = 128,
    n_pages: int = 64,
    kv_type: KVType = "f32",
    outbox_entries: int | None = None,
    threads: int = 2,
    grammar_bytes: int = 0,
) -> Driver:
    """A driver of a new loop; close it with `driver.runner.close()`."""
    model = model or random_model(kind)
    if mode in ("loop", "auto") and isinstance(model.embedding, Tensor):
        if why_not_blocks(model.shape) is None:
            model = tiled(model)
        else:
            mode = TWIN
    settled = settle_model(
        model, mode, context=context, n_pages=n_pages, n_slots=n_slots, kv_type=kv_type, threads=threads
    )
    settled = replace(settled, grammar_bytes=grammar_bytes)
    return Driver(open_runner(model, settled, outbox_entries=outbox_entries))
