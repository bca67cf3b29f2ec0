"""How long planning a ubatch takes when the KV cache is half full and when it is nearly full.

    python -m bench.kv_planner

Holes lie anywhere, as after many requests of different lengths. The last line is the note for docs/lab.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from bench.note import Series, as_json, versions
from ostinato.cache.window import Window
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.batch.sanitizer import sanitize
from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.cells.memory.coordinator import Coordinator
from ostinato.decoder.cells.memory.kv_cache import KVCache

SIZES: Final = (4_096, 32_768, 131_072)
FILLS: Final = (0.50, 0.99)
N_UBATCH: Final = 512
ROUNDS: Final = 15
MIN_ROUND_S: Final = 0.02


def filled(size: int, fill: float, window: Window) -> KVCache:
    """A cache in which that share of the cells, anywhere, belongs to eight sequences."""
    cache = KVCache(size, n_seq_max=256, unified=True, window=window)
    taken = np.sort(np.random.default_rng(0).permutation(size)[: int(size * fill)])
    cells = cache.streams[0].cells
    cells.set_position(taken, np.arange(len(taken)) // 8)
    cells.add(taken, np.arange(len(taken)) % 8)
    cache.streams[0].head = size // 3
    return cache


def splitter_of(n_tokens: int, n_seqs: int) -> Splitter:
    """A batch of new sequences, as many tokens of each."""
    ids = [[100 + i % n_seqs] for i in range(n_tokens)]
    return Splitter(sanitize(Batch(token=[1] * n_tokens, seq_id=ids), n_vocab=2, n_seq_limit=256))


def microseconds(work: Callable[[], object]) -> tuple[float, ...]:
    """The time of one call, round by round; a round is as many calls as fill a fair span."""
    work()
    begin = time.perf_counter()
    work()
    n_calls = max(1, int(MIN_ROUND_S / max(time.perf_counter() - begin, 1e-7)))
    rounds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(n_calls):
            work()
        rounds.append((time.perf_counter() - begin) / n_calls * 1e6)
    return tuple(rounds)


def measure(size: int, n_tokens: int, n_seqs: int, window: Window) -> list[Series]:
    """Split and plan the batch at every fill; what the splitter alone takes is in it, and is the same for both."""
    splitter = splitter_of(n_tokens, n_seqs)
    found = []
    for fill in FILLS:
        memory = Coordinator(filled(size, fill, window))
        if memory.prepare_batch(splitter, N_UBATCH, False).status.is_failure:
            continue
        runs = microseconds(partial(memory.prepare_batch, splitter, N_UBATCH, False))
        kind = "windowed" if not window.reaches_all else "full"
        task = f"plan {n_tokens} tokens of {n_seqs} sequences in {size} {kind} cells at {fill:.0%}"
        found.append(Series("ostinato", task, "us", runs))
    return found


def main() -> None:
    series: list[Series] = []
    cases = [
        (1, 1, Window()),
        (32, 32, Window()),
        (40, 1, Window()),
        (1_024, 8, Window()),
        (32, 32, Window("standard", 64)),
    ]
    for size in SIZES:
        for n_tokens, n_seqs, window in cases:
            pair = measure(size, n_tokens, n_seqs, window)
            series += pair
            times = "   ".join(f"{one.median:8.1f} us" for one in pair)
            ratio = (
                f"   {pair[1].median / pair[0].median:.2f} times" if len(pair) == len(FILLS) else "   (no room at 99 %)"
            )
            print(f"{pair[0].task[:-7]:<58} {times}{ratio}")
    print(
        as_json(
            "does planning slow down when the KV cache is nearly full?",
            "python -m bench.kv_planner",
            versions("numpy"),
            includes="split and prepare, without applying; one thread",
            fills=FILLS,
            series=series,
        )
    )


if __name__ == "__main__":
    main()
