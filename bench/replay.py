"""How long a launch takes as a node of a CUDA graph: how every kernel of a step is launched in earnest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def replayed_us(launches: Sequence[Callable[[], object]], rounds: int = 20) -> float:
    """Microseconds of one launch: all of them in one graph, which is replayed some rounds; the best is taken."""
    return min(replays_us(launches, rounds)) / len(launches)


def replays_us(launches: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Microseconds of all launches together, captured into one graph, of each of its replays."""
    for launch in launches:
        launch()  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times: list[float] = []
    for _ in range(rounds):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1000)
    return times
