"""A CUDA that is not there: what is asked of it, in which order and on which stream."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.backends.torch.tables import tensor_tables
from ostinato.loop.guard import Guard
from ostinato.loop.layout import Layout, Word
from ostinato.loop.plan import Buffer, Node, Plan

CPU = torch.device("cpu")


class StandIn:
    """Streams, events and graphs that note what happens to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[tuple[str, str]] = []
        self.n_streams = self.n_events = 0
        self.sick = False
        self._current = ["default"]
        monkeypatch.setattr("ostinato.backends.cuda.pool._POOLS", {})
        for name in ("Stream", "Event", "CUDAGraph", "stream", "graph", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def note(self, what: str) -> None:
        self.noted.append((what, self._current[-1]))

    def Stream(self, device: Any = None, priority: int = 0) -> Any:
        name = "loop" if priority < 0 else "side"
        self.n_streams += 1
        return SimpleNamespace(
            name=name, cuda_stream=1, synchronize=lambda: self.note("synchronize"), query=lambda: self.is_well()
        )

    def Event(self) -> Any:
        self.n_events += 1
        return SimpleNamespace(record=lambda stream: self.note(f"event on {stream.name}"), query=lambda: self.is_well())

    def CUDAGraph(self, keep_graph: bool = False) -> Any:
        return SimpleNamespace(replay=lambda: None, raw_cuda_graph=lambda: 1, instantiate=lambda: None)

    def is_well(self) -> bool:
        if self.sick:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return True

    def synchronize(self, device: Any = None) -> None:
        self.note("synchronize")

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self._current.append(stream.name)
        try:
            yield
        finally:
            self._current.pop()

    @contextmanager
    def graph(self, graph: Any, **words: Any) -> Iterator[None]:
        yield


def stand_in_start(kind: Any, cuda: StandIn, monkeypatch: pytest.MonkeyPatch, n_steps: int = 3) -> Any:
    """A start of that kind over a plan of two nodes; the step boundary says go for so many steps."""
    tables = tensor_tables(Layout(n_slots=2, max_pages=1, vocab=8), CPU)
    nodes = tuple(Node(name, "test", partial(cuda.note, name), (), ("x",)) for name in ("one", "two"))
    start = kind(Plan("cpu", (Buffer.of("x", torch.zeros(4)),), nodes, 64), tables, Guard())
    words, left = tables.rings.host("words"), [n_steps]

    def step_boundary() -> None:
        cuda.note("step boundary")
        words[Word.GO, 0] = left[0] > 0
        left[0] -= 1

    monkeypatch.setattr("ostinato.backends.cuda.start.loaded", lambda *_: SimpleNamespace(get_kernel=str))
    monkeypatch.setattr(start, "_run_boundary", step_boundary)
    return start


def stand_in_driver(cuda: StandIn, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A driver whose captures have as many nodes as the list says, or three while it is empty."""
    captured: list[int] = []

    def begin(stream: Any, *_: Any) -> tuple[int]:
        cuda.note("begin")
        return (0,)

    def end(stream: Any) -> tuple[int, None]:
        cuda.note("end")
        return (0, None)

    def n_nodes() -> int:
        return captured[0] if captured else 3

    body = SimpleNamespace(handle=0, nodes=lambda: [1] * n_nodes())
    graph = SimpleNamespace(
        create_condition=lambda default_value: 0,
        launch=lambda *_: SimpleNamespace(while_loop=lambda _: SimpleNamespace(body=body)),
        instantiate=lambda: SimpleNamespace(),
    )
    modes = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    driver = SimpleNamespace(
        CUstream=int,
        CUgraph=int,
        CUstreamCaptureMode=modes,
        cuStreamBeginCaptureToGraph=begin,
        cuStreamEndCapture=end,
        cuGraphGetNodes=lambda graph: (0, [], n_nodes()),
    )
    core = SimpleNamespace(
        LaunchConfig=lambda **_: None,
        Stream=SimpleNamespace(from_handle=int),
        launch=lambda *_: cuda.note("step boundary"),
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setitem(sys.modules, "cuda.core.graph", SimpleNamespace(GraphDefinition=lambda: graph))
    return captured
