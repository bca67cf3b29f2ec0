"""Times on a GPU, by its own events: how fast it reads memory, and how long each node of a step takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch

from ostinato.loop.plan import Node

# How long a profiled step waits, in cycles, so that the host has queued all of it before it begins.
HOLD_CYCLES: Final = 20_000_000


def gpu_bandwidth(device: str, n_bytes: int, repeats: int) -> float:
    """Bytes per second of a plain read of so much memory, the best of several."""
    data = torch.ones(n_bytes // 4, dtype=torch.float32, device=device)
    data.sum()
    return n_bytes / min(_seconds(lambda: data.sum(), device) for _ in range(repeats))


class EventTimer:
    """Wraps nodes so that each adds up its own time. Before a step's first node the device waits, so that nothing waits
    for the host after it."""

    def __init__(self, first: str, device: torch.device) -> None:
        self._first, self._device = first, device
        self._events: list[tuple[str, Any, Any]] = []
        self._hold: Callable[[int], None] = getattr(torch.cuda, "_sleep", lambda cycles: None)

    def timed(self, node: Node) -> Node:
        def run() -> None:
            if node.name == self._first:
                self._hold(HOLD_CYCLES)
            began, ended = timing_event(), timing_event()
            began.record()
            node.run()
            ended.record()
            self._events.append((node.name, began, ended))

        return replace(node, run=run)

    def forget(self) -> None:
        self._events = []

    def microseconds(self) -> dict[str, float]:
        """By the node's name, all steps together."""
        torch.cuda.synchronize(self._device)
        spent: dict[str, float] = {}
        for name, began, ended in self._events:
            spent[name] = spent.get(name, 0.0) + began.elapsed_time(ended) * 1e3
        return spent


def _seconds(work: Callable[[], object], device: str) -> float:
    with torch.cuda.device(device):
        began, ended = timing_event(), timing_event()
        began.record()
        work()
        ended.record()
        ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def timing_event() -> Any:
    """A CUDA event; torch leaves its events untyped."""
    kind: Any = torch.cuda.Event
    return kind(enable_timing=True)
