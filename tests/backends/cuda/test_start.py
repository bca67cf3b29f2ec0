"""Starts on CUDA beside a stand-in for it: streams and events, captures and the graphs they make, marks (E)."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.backends.cuda.chunks import BUCKETS, FusedChunks
from ostinato.backends.cuda.graph import CudaGraph
from ostinato.backends.cuda.launch import TritonLaunch
from ostinato.backends.cuda.ready import compile_missing
from ostinato.backends.cuda.stamps import Stamps
from ostinato.backends.cuda.start import CudaStart
from ostinato.backends.cuda.start import source as cuda_source
from ostinato.backends.cuda.while_graph import WhileGraph
from ostinato.backends.torch.kernels import play, twin_kernels
from ostinato.backends.torch.model import Model
from ostinato.build import cubin, shared_object
from ostinato.errors import HardwareCannot, NotWarmed
from ostinato.loop.guard import Guard
from ostinato.loop.plan import Node
from tests.backends.cuda.stand_in import StandIn, stand_in_driver, stand_in_start
from tests.backends.families import family_model
from tests.engine.rig import DEADLINE_S, Driver, open_loop

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def test_a_step_has_one_stream_a_prompt_another_and_no_call_waits_in_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """E-5, E-6, E-9: every node ran once before anything is built of them; after that no call waits for the device."""
    cuda = StandIn(monkeypatch)
    start = stand_in_start(CudaStart, cuda, monkeypatch)
    monkeypatch.setattr(start, "_make", lambda: cuda.note("make"))
    start.build()
    warm = [what for what, _ in cuda.noted if what != "synchronize"]
    assert warm == ["one", "two", "make"]
    cuda.noted.clear()
    start.launch()
    assert start.wait(DEADLINE_S)
    assert start.failure() is None
    one_step = [("one", "loop"), ("two", "loop"), ("step boundary", "loop"), ("event on loop", "loop")]
    assert cuda.noted == [("step boundary", "loop"), ("event on loop", "loop"), *(3 * one_step)]
    cuda.noted.clear()
    work = start.beside(lambda: cuda.note("prompt"))
    work.result(DEADLINE_S)
    assert cuda.noted == [("prompt", "side"), ("event on side", "side")]
    start.close()


def compilable(name: str) -> TritonLaunch:
    """A launch of a kernel by that name."""
    made = SimpleNamespace(run=None)
    kernel = SimpleNamespace(__name__=name, __module__=__name__, warmup=lambda *_, **__: made)
    return TritonLaunch(kernel, (1,), (torch.zeros(4),), {})


@pytest.mark.parametrize("kind", [CudaStart, CudaGraph, WhileGraph])
def test_a_kernel_that_is_not_compiled_is_named_before_anything_runs_or_is_captured(
    kind: type[CudaStart], monkeypatch: pytest.MonkeyPatch
) -> None:
    """E-9: a compiler inside a capture would break it."""
    cuda = StandIn(monkeypatch)
    start = stand_in_start(kind, cuda, monkeypatch)
    monkeypatch.setattr(start, "_make", lambda: cuda.note("capture"))
    monkeypatch.setattr("ostinato.backends.cuda.ready._READY", {})
    ready, launch = (compilable(name) for name in ("matmul_kernel", "norm_kernel"))
    forgotten = partial(play, [launch])
    nodes = [replace(node, run=run) for node, run in zip(start._plan.nodes, (ready, forgotten), strict=True)]
    monkeypatch.setattr(start, "_plan", replace(start._plan, nodes=tuple(nodes)))
    compile_missing([ready], CPU)
    with pytest.raises(NotWarmed, match="norm_kernel is not compiled for cpu, and a graph is to be captured"):
        start.build()
    assert cuda.noted == []
    start.close()


def test_chunks_with_a_kernel_that_is_not_compiled_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-9, of a bucket and of what follows a chunk."""
    cuda, model = StandIn(monkeypatch), family_model("llama")
    driver = open_loop(model=model, mode="twin", n_pages=64, context=128)
    prefill = fused_prefill(driver, model, (8, 16))
    prefill._launches[16].append(compilable("gemm_kernel"))
    with pytest.raises(NotWarmed, match="gemm_kernel is not compiled"):
        prefill.capture(cuda.Stream())
    assert cuda.noted == []
    driver.runner.close()


def test_a_thousand_engines_share_a_few_streams_and_events_and_a_sick_one_is_not_lent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """E-4."""
    cuda = StandIn(monkeypatch)
    start: Any = None
    for number in range(1000):
        if number % 100:
            start = CudaStart(start._plan, start._tables, Guard())
        else:  # opened, used and closed twice
            start = stand_in_start(CudaStart, cuda, monkeypatch)
            start.build()
            start.launch()
            assert start.wait(DEADLINE_S)
            works = [start.beside(lambda: None) for _ in range(3)]
            assert all(work.done() and work.done() for work in works)
            start.close()
        start.close()
    assert cuda.n_streams == 2
    assert cuda.n_events == 4  # of a step, and of three jobs at once
    two = [stand_in_start(CudaStart, cuda, monkeypatch) for _ in range(2)]
    assert two[0].stream is not two[1].stream
    cuda.sick = True
    for start in two:
        start.close()
    cuda.sick, before = False, cuda.n_streams
    stand_in_start(CudaStart, cuda, monkeypatch).close()
    assert cuda.n_streams == before + 2


@pytest.mark.parametrize("kind", [CudaGraph, WhileGraph])
def test_a_captured_step_with_another_number_of_nodes_than_the_plan_is_refused(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E-61: the launches of two nodes, one of two kernels, and a step boundary."""
    cuda = StandIn(monkeypatch)
    captured = stand_in_driver(cuda, monkeypatch)
    start = stand_in_start(kind, cuda, monkeypatch)
    one, two = start._plan.nodes
    start._plan = replace(start._plan, nodes=(replace(one, n_launches=1), replace(two, n_launches=2)))
    captured.append(0)
    for n_nodes in (3, 5):
        captured[0] = n_nodes
        with pytest.raises(
            HardwareCannot, match=f"has {n_nodes} nodes, and the plan has 3 launches and a step boundary"
        ):
            start.build()
        assert start.n_instantiations == 0
    captured[0] = 4
    start.build()
    assert (start.n_nodes, start.n_instantiations) == (4, 1)
    start.close()


def test_a_capture_is_ended_whatever_happens_inside_and_the_stream_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """E-59."""
    cuda, broken = StandIn(monkeypatch), [True]
    stand_in_driver(cuda, monkeypatch)
    start = stand_in_start(WhileGraph, cuda, monkeypatch)
    monkeypatch.setattr(start, "_warm", lambda: None)

    def two() -> None:
        if broken[0]:
            raise RuntimeError("operation not permitted when stream is capturing")

    start._plan = replace(start._plan, nodes=(start._plan.nodes[0], replace(start._plan.nodes[1], run=two)))
    with pytest.raises((RuntimeError, HardwareCannot), match="not permitted"):
        start.build()
    assert [what for what, _ in cuda.noted] == ["begin", "one", "end"]
    assert start.n_instantiations == 0
    cuda.noted.clear()
    broken[0] = False
    start.build()
    assert [what for what, _ in cuda.noted] == ["begin", "one", "step boundary", "end"]
    assert start.n_instantiations == 1


class Clock:
    """The kernel of a mark as C++, launched by a stand-in, and a clock turned by hand: each mark takes 2 us."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        source, n_changed = re.subn(r"asm volatile\(.*globaltimer.*\);", "now = now_ns;", cuda_source("stamp.cu"))
        assert n_changed == 1
        source = '#define __global__\nextern "C" { unsigned long long now_ns; }\n' + source
        library = ctypes.CDLL(str(shared_object(source, "stamp.cpp", flags=("-O1",))))
        self._now, self._stamp = ctypes.c_ulonglong.in_dll(library, "now_ns"), library.stamp
        self._now.value = 1_000_000
        cuda = SimpleNamespace(
            LaunchConfig=SimpleNamespace, Stream=SimpleNamespace(from_handle=int), launch=self._launch
        )
        monkeypatch.setitem(sys.modules, "cuda.core", cuda)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=1))
        monkeypatch.setattr("ostinato.backends.cuda.stamps.loaded", lambda *_: SimpleNamespace(get_kernel=str))

    def _launch(self, stream: int, config: SimpleNamespace, kernel: str, *addresses: int) -> None:
        assert (stream, config.grid, config.block, kernel) == (1, 1, 1, "stamp")
        self.turn(2_000)
        self._stamp(*map(ctypes.c_void_p, addresses))

    def turn(self, ns: int) -> None:
        self._now.value += ns


def test_marks_between_nodes_tell_what_each_takes_without_what_they_take_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """E-63: the step boundary takes 30 us, the nodes 100 and 7."""
    StandIn(monkeypatch)
    clock = Clock(monkeypatch)
    works = [partial(clock.turn, ns) for ns in (100_000, 7_000)]
    plain = [Node("one", "a", works[0], (), (), 0, 1), Node("two", "b", works[1], (), (), 0, 3)]
    stamps = Stamps(plain, CPU)
    nodes = [stamps.timed(node) for node in plain]
    assert [node.n_launches for node in nodes] == [4, 4]
    for _ in range(2):  # the first time warms
        stamps.forget()
        for _ in range(5):
            for node in nodes:
                node.run()
            clock.turn(30_000)
    assert stamps.microseconds() == {"one": 500.0, "two": 35.0}
    assert stamps.between(5) == 30.0


def test_a_mark_compiles_for_a_card() -> None:
    """E-63."""
    assert cubin(cuda_source("stamp.cu"), "stamp.cu", arch="sm_90").startswith(b"\x7fELF")


def fused_prefill(driver: Driver, model: Model, buckets: Sequence[int]) -> FusedChunks:
    runner = driver.runner
    words = (model, runner.memory, runner.tables, model.shape.vocab, twin_kernels())
    runner.chunks = FusedChunks(*words, buckets=buckets)
    return runner.chunks


def if_any_row(prefill: FusedChunks, launch: Callable[[], object]) -> None:
    if int(prefill._n):
        launch()


def test_a_bucket_that_cannot_be_captured_leaves_the_others_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-56, E-58: a graph for each bucket, whatever the prompts; one failure is that bucket's alone."""
    cuda, model = StandIn(monkeypatch), family_model("llama")
    plain, driver = (open_loop(model=model, mode="twin", n_pages=512, context=128) for _ in range(2))
    prefill = fused_prefill(driver, model, (8, 16, 32, 64))
    # Buckets are warmed without rows, and the twins need one.
    for launches in prefill._launches.values():
        launches[:] = [partial(if_any_row, prefill, launch) for launch in launches]
    captures: list[int] = []

    @contextmanager
    def graph(graph: Any, **words: Any) -> Iterator[None]:
        rows = prefill._buckets[len(captures)]
        captures.append(rows)

        def replay() -> None:
            cuda.note(f"replay {rows}")
            for launch in prefill._launches[rows]:
                launch()

        graph.replay = replay
        if rows == 16:
            raise RuntimeError("captured once and never again")
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    prefill.capture(cuda.Stream())
    assert captures == [8, 16, 32, 64]
    assert prefill.failures == {16: "captured once and never again"}
    assert driver.runner.fallen_back == ("prompts of 16 rows are launched node by node: captured once and never again",)
    for n in range(1, 65, 3):
        for each in (plain, driver):
            each.admit(0, [(7 * i) % 131 for i in range(n)], most=1)
            each.run()
    assert [entry.token for entry in driver.entries] == [entry.token for entry in plain.entries]
    used = {what for what, _ in cuda.noted if what.startswith("replay")}
    assert used == {"replay 8", "replay 32", "replay 64"}
    assert len(captures) == 4
    assert len(BUCKETS) <= 8
    for each in (plain, driver):
        each.runner.close()
