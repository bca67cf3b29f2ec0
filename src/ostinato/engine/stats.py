"""An engine's statistics: a snapshot of its counters, and the gaps between tokens by the device's own clock."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

RECENT_GAPS: Final = 4096


@dataclass(frozen=True, slots=True)
class Gaps:
    """Microseconds between two tokens of one sequence: how many gaps were measured, and figures of the latest ones."""

    n: int
    median_us: float
    p99_us: float
    longest_us: float


@dataclass(frozen=True, slots=True)
class Stats:
    """An engine at one moment; counts are since it was opened."""

    mode: str
    n_slots: int
    waiting: int  # requests in the queue
    prefilling: int  # requests in a slot whose prompt is being computed
    live: int  # requests in a slot that decode
    submitted: int
    ended: dict[str, int]  # by stop, length, cancelled, error
    steps: int
    tokens: int  # generated for requests
    prompt_tokens: int  # computed
    cached_tokens: int  # of prompts, not computed again
    pages: int
    pages_leased: int
    pages_cached: int
    resident_bytes: int | None  # of this process, mapped files included; None where the system does not tell
    gaps: Gaps
    triggers: int  # launches of the whole loop
    launches: int  # of graphs and kernels, by the host
    instantiations: int  # of graphs
    host_copies: int  # between host and device, outside the rings: for prompts; a step makes none
    fault: str | None


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot at one moment; a free slot has only its number and state."""

    slot: int
    state: Literal["free", "prefill", "live"]
    request: int | None = None
    prompt_tokens: int = 0
    prompt_done: int = 0  # positions of the prompt that are in memory
    tokens: int = 0  # of the answer, so far
    most: int = 0  # tokens that the answer may have


class GapMeter:
    """Gathers gaps; the last few thousand are kept."""

    def __init__(self) -> None:
        self._n = 0
        self._recent: deque[int] = deque(maxlen=RECENT_GAPS)

    def add(self, gap_ns: int) -> None:
        self._n += 1
        self._recent.append(gap_ns)

    def read(self) -> Gaps:
        """The figures now; from any thread."""
        recent = sorted(self._recent.copy())
        if not recent:
            return Gaps(0, 0.0, 0.0, 0.0)
        p99 = recent[min(len(recent) - 1, len(recent) * 99 // 100)]
        return Gaps(self._n, statistics.median(recent) / 1e3, p99 / 1e3, recent[-1] / 1e3)
