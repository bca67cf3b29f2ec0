"""Tests of the lessons (E) that no other test file covers; each test cites its codes, which docs/rules.md explains."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ostinato
from bench.gpu_executor import perplexity
from bench.gpu_models import moved
from ostinato import LLM
from ostinato.backends.base import ChunkPart
from ostinato.backends.cuda.chunks import BUCKETS, FusedChunks
from ostinato.backends.cuda.graph import CudaGraph
from ostinato.backends.cuda.kernels import triton_kernels
from ostinato.backends.cuda.launch import TritonLaunch
from ostinato.backends.cuda.packed import Packed
from ostinato.backends.cuda.packed_types import PACKED_TYPES
from ostinato.backends.cuda.plan import Fusions
from ostinato.backends.cuda.ready import compile_missing
from ostinato.backends.cuda.stamps import Stamps
from ostinato.backends.cuda.start import CudaStart
from ostinato.backends.cuda.start import source as cuda_source
from ostinato.backends.cuda.while_graph import WhileGraph
from ostinato.backends.machine import TUNED
from ostinato.backends.torch.allocate import BumpAllocator
from ostinato.backends.torch.kernels import play, twin_kernels
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.ops.matmul import matmul_torch, n_stats
from ostinato.backends.torch.plan import tensors_of
from ostinato.backends.torch.tables import tensor_tables
from ostinato.backends.weights import Stack
from ostinato.build import cubin, shared_object
from ostinato.cache.kv_bytes import cell_bytes
from ostinato.engine.machine import choose_device
from ostinato.errors import BadFile, BadPointer, EngineDead, HardwareCannot, InternalError, NotWarmed, PlanStale
from ostinato.files.checkpoint import open_checkpoint
from ostinato.lab.random_weights import random_blocks
from ostinato.loop.guard import Guard
from ostinato.loop.layout import Finish, Layout, Word
from ostinato.loop.plan import Buffer, Node, Plan
from ostinato.models.blocks import GatedMLP, Layer
from ostinato.models.registry import read_shape
from tests.backends.cuda.packing import pack
from tests.backends.cuda.test_plan import fused_driver
from tests.backends.cuda.triton import (
    test_activation,
    test_add_norm,
    test_attend,
    test_chunk_attention,
    test_embed,
    test_experts,
    test_gemm,
    test_latent,
    test_logprobs,
    test_matmul,
    test_norm,
    test_runs,
    test_sample,
)
from tests.backends.cuda.triton.test_attend import Case, made, reference, run
from tests.backends.families import FAMILIES, LATENT, RECURRENT, family_model
from tests.backends.tape import test_unpack
from tests.built import build_model
from tests.engine.opened import LONG, decoding, ids, open_engine, prompt, sampling, until
from tests.engine.rig import DEADLINE_S, GREEDY, Driver, held, open_loop, stray
from tests.engine.test_loop import alone, by_full_forwards
from tests.models.test_refusals import refusal, spoiled_folder, spoiled_gguf
from tests.random_model import random_model

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
PACKAGE = Path(ostinato.__file__).parent
PROMPT = [5, 9, 2, 77, 31]


def n_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())  # asks no object anything


# Before anything is launched


SPOILED: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(0),
    "freed": lambda: freed(torch.rand(64)),
    "elsewhere": lambda: torch.rand(64, device="meta"),
    "of another type": lambda: torch.rand(64).half(),
    "with holes": lambda: torch.rand(128)[::2],
    "short": lambda: torch.rand(32),
}


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("wrong", SPOILED)
def test_memory_that_a_kernel_must_not_touch_is_refused_by_name_and_the_next_call_works(wrong: str) -> None:
    """E-1."""
    from ostinato.backends.cuda.triton.norm import bind_norm

    x, y, weight = torch.randn(3, 64), torch.full((3, 64), torch.nan), torch.rand(64)
    with pytest.raises(BadPointer, match="weight"):
        bind_norm(x, y, SPOILED[wrong](), None, 1e-6)
    bind_norm(x, y, weight, None, 1e-6)()
    assert bool(y.isfinite().all())


def test_a_gpu_number_that_is_not_there_is_refused_with_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-12."""
    monkeypatch.setattr("ostinato.engine.machine.driver_cuda", lambda: 13_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == "cuda:1"
    with pytest.raises(HardwareCannot, match=r"cuda:99: this machine has 2 GPU\(s\), numbered from 0"):
        choose_device("cuda:99")


def test_a_plan_in_which_a_launch_overwrites_what_it_reads_is_refused() -> None:
    """E-38."""
    memory = torch.zeros(8)
    buffers = (Buffer.of("a", memory[:6]), Buffer.of("b", memory[4:]), Buffer.of("c", memory[6:]))

    def plan(reads: str, writes: str) -> Plan:
        return Plan("cpu", buffers, (Node("n", "test", lambda: None, (reads,), (writes,)),), 16)

    with pytest.raises(InternalError, match="node n writes b, which overlaps a"):
        plan("a", "b")
    plan("a", "c")
    plan("a", "a")  # said to be in place


def test_a_plan_in_which_a_node_writes_to_a_weight_is_refused() -> None:
    weight, x = Buffer.of("w", torch.ones(2), is_weight=True), Buffer.of("x", torch.ones(2))
    nodes = [Node("n", "test", lambda: None, (one,), (other,)) for one, other in (("w", "x"), ("x", "w"))]
    assert Plan("cpu", (weight, x), (nodes[0],), 16).weights == (weight,)
    with pytest.raises(InternalError, match=r"nodes write to \['w'\], which the plan holds as weights"):
        Plan("cpu", (weight, x), tuple(nodes), 16)


@pytest.mark.parametrize("mode", ["twin", "loop"])
def test_any_buffer_of_a_plan_that_was_moved_is_named(mode: str) -> None:
    """E-31: tensors and arrays."""
    driver = open_loop(mode=mode)
    plan = driver.runner.plan
    plan.check()
    for number, buffer in enumerate(plan.buffers):
        elsewhere = replace(buffer, _memory=deepcopy(buffer._memory))
        stale = replace(plan, buffers=(*plan.buffers[:number], elsewhere, *plan.buffers[number + 1 :]))
        with pytest.raises(PlanStale, match=f"the buffer {re.escape(buffer.name)} was at"):
            stale.check()
    driver.runner.close()


# A CUDA that is not there: what is asked of it, in which order and on which stream


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


def test_a_step_has_one_stream_a_prompt_another_and_nobody_waits_in_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_device_that_broke_in_the_loop_is_found_when_decode_mode_is_left() -> None:
    """E-2."""
    driver = open_loop()
    driver.admit(0, PROMPT, most=3)
    driver.run()

    def health() -> None:
        raise EngineDead("the GPU no longer answers; the process must be restarted")

    driver.runner.start.health = health  # type: ignore[method-assign]  # a CPU has no such thing
    with pytest.raises(EngineDead, match="must be restarted"):
        driver.runner.decode_mode.exit()
    with pytest.raises(EngineDead, match="must be restarted"):
        driver.runner.decode_mode.enter()
    driver.runner.close()


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


def if_anybody(prefill: FusedChunks, launch: Callable[[], object]) -> None:
    if int(prefill._n):
        launch()


def test_a_bucket_that_cannot_be_captured_leaves_the_others_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-56, E-58: a graph for each bucket, whatever the prompts; one failure is that bucket's alone."""
    cuda, model = StandIn(monkeypatch), family_model("llama")
    plain, driver = (open_loop(model=model, mode="twin", n_pages=512, context=128) for _ in range(2))
    prefill = fused_prefill(driver, model, (8, 16, 32, 64))
    # Buckets are warmed with nobody in them, and the twins need somebody.
    for launches in prefill._launches.values():
        launches[:] = [partial(if_anybody, prefill, launch) for launch in launches]
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


# Kernels


def walled(rows: int, width: int, value: float) -> tuple[Tensor, Tensor]:
    """A matrix, and the memory it lies in: 256 more elements behind it, all of that value."""
    room = torch.full((rows * width + 256,), value)
    return room[: rows * width].view(rows, width), room


@pytest.mark.parametrize(
    ("width", "type", "n_rows"), [*((1000, None, n) for n in (1, 3, 15, 17)), (896, "Q8_0", 3), (1536, "Q4_K", 3)]
)
def test_products_of_odd_sizes_read_and_write_nothing_beyond_them(width: int, type: str | None, n_rows: int) -> None:
    """E-20, E-35."""
    from ostinato.backends.cuda.triton.matmul import bind_matmul

    n_slots, outs = 17, 16 + 5
    x, _ = walled(n_slots, width, torch.nan)
    out, room = walled(n_slots, outs, 12345.0)
    x[:n_rows] = torch.randn(n_rows, width)
    weight: Any = torch.randn(outs, width) / 32 if type is None else random_packed(type, outs, width)
    count = torch.tensor([n_rows], dtype=torch.int32)
    bind_matmul(x, weight, out, count)()
    expected = torch.zeros(n_slots, outs)
    matmul_torch(x, weight, expected, count)
    torch.testing.assert_close(out[:n_rows], expected[:n_rows], rtol=1e-4, atol=1e-4)
    assert bool((room[n_rows * outs :] == 12345.0).all())


def random_packed(type: str, rows: int, cols: int) -> Packed:
    return pack(type, torch.from_numpy(random_blocks(type, rows, cols, np.random.default_rng(1))), rows, cols)


@pytest.mark.slow
def test_types_that_stand_on_top_of_each_other_are_each_multiplied_by_their_own_kernel() -> None:
    """E-17, E-18."""
    from ostinato.backends.cuda.triton.matmul import bind_matmul

    plain = [torch.randn(16, 256, dtype=torch.float32).to(dtype) / 16 for dtype in (torch.float16, torch.bfloat16)]
    stack = Stack((*(random_packed(type, 16, 256) for type in PACKED_TYPES), *plain))
    x, count = torch.randn(3, 256), torch.tensor([2], dtype=torch.int32)
    out, expected = (torch.full((3, stack.shape[0]), 7.0) for _ in range(2))
    bind_matmul(x, stack, out, count)()
    matmul_torch(x, stack, expected, count)
    for start in range(0, stack.shape[0], 16):
        found, wanted = (each[:, start : start + 16] for each in (out, expected))
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("type", [None, "Q4_K", "Q8_0"])
def test_a_rows_bits_are_the_same_in_a_batch_of_1_2_8_and_32(type: str | None) -> None:
    """E-80."""
    from ostinato.backends.cuda.triton.matmul import bind_matmul

    # Whole numbers: the sums of a dot are exact, which the interpreter adds in another order for other sizes.
    x = torch.randint(-8, 9, (32, 256)).float()
    weight: Any = torch.randint(-8, 9, (48, 256)).bfloat16() if type is None else random_packed(type, 48, 256)
    alone = None
    for n_rows in (1, 2, 8, 9, 32):
        out, stats = torch.zeros(32, 48), torch.zeros(32, n_stats(48), 2)
        bind_matmul(x, weight, out, torch.tensor([n_rows], dtype=torch.int32), scale=0.3, stats=stats)()
        found = torch.cat((out[0], stats[0].flatten()))
        alone = found if alone is None else alone
        assert torch.equal(found, alone), n_rows


@pytest.mark.slow
def test_attention_is_right_at_every_length_to_66_and_at_1024() -> None:
    """E-50; tests/backends/cuda/triton/test_attend.py has the step boundaries of pages and splits beyond."""
    for positions in (range(66), (1023,)):
        step = made(Case(tuple(positions), n_heads=1, width=16))
        seen, _ = run(step, programs=1)
        for row, position in enumerate(positions):
            expected = torch.from_numpy(reference(step, row))
            assert (seen[row] - expected).abs().max() <= 1e-5 * expected.abs().max(), position


# By kernel a test that compares it with its reference.
KERNEL_TESTS: dict[str, Callable[[], None]] = {
    "activation_kernel": partial(test_activation.test_rows_are_bent_as_the_twin_bends_them, "silu", True),
    "add_norm_kernel": partial(test_add_norm.test_it_equals_the_twin_and_leaves_dead_rows_alone, 16),
    "attend_kernel": partial(test_attend.test_every_store_grouping_and_width_equals_the_twin, "f32", 1, 64),
    "append_chunk_kernel": partial(
        test_chunk_attention.test_appending_equals_the_twin_and_touches_nobody_else, "f32", torch.float32
    ),
    "chunk_attention_kernel": partial(test_chunk_attention.test_windows_caps_and_sinks_equal_float64, None, None),
    "embed_kernel": partial(test_embed.test_it_equals_the_twin_and_leaves_dead_rows_alone, torch.float32, None),
    "route_kernel": partial(test_experts.test_routing_takes_the_highest_scores_in_order_of_the_experts, True),
    "experts_gate_up_kernel": partial(test_experts.test_gate_and_up_of_each_rows_own_experts, "F32", 2),
    "experts_down_kernel": partial(test_experts.test_a_row_is_the_weighted_sum_of_its_experts, "F32", 2),
    "gemm_kernel": partial(test_gemm.test_every_weight_type_on_sizes_that_are_no_whole_tiles, "F32"),
    "logprobs_kernel": partial(test_logprobs.test_it_equals_the_twin, 131, 5, 128),
    "matmul_kernel": partial(test_matmul.test_every_weight_type_with_every_epilogue, "F32", "store"),
    "norm_kernel": partial(test_norm.test_rows_of_any_width_are_normed_as_the_twin_does, 64, False),
    "shape_kernel": test_sample.test_greedy_rows_take_what_the_twin_takes,
    "gather_kernel": partial(test_sample.test_draws_are_the_twins_whether_listed_or_searched, test_sample.ROOMY),
    "choose_kernel": test_sample.test_greedy_rows_take_what_the_twin_takes,
    "unpack_kernel": test_unpack.test_plain_weights_come_back_to_the_bit,
    "conv_kernel": partial(test_runs.test_a_convolution_carries_on_from_each_slots_inputs, test_runs.RUNS[0]),
    "keep_inputs_kernel": partial(test_runs.test_a_convolution_carries_on_from_each_slots_inputs, test_runs.RUNS[0]),
    "ssd_kernel": partial(test_runs.test_scans_carry_on_from_each_slots_state, test_runs.RUNS[1]),
    "selective_kernel": partial(test_runs.test_scans_carry_on_from_each_slots_state, test_runs.RUNS[1]),
    "delta_kernel": partial(test_runs.test_scans_carry_on_from_each_slots_state, test_runs.RUNS[1]),
    "short_conv_kernel": partial(
        test_runs.test_a_short_convolution_has_a_gate_before_it_and_one_after_it, test_runs.RUNS[0]
    ),
    "keep_gated_kernel": partial(
        test_runs.test_a_short_convolution_has_a_gate_before_it_and_one_after_it, test_runs.RUNS[0]
    ),
    "gate_kernel": partial(test_runs.test_rows_are_gated_and_normed_by_groups_in_either_order, test_runs.RUNS[0]),
    "selected_kernel": partial(test_runs.test_mambas_selected_parts_are_normed_and_set_apart, True),
    "join_parts_kernel": test_norm.test_parts_of_a_row_are_normed_alone_and_joined_for_live_rows,
    "gate_heads_kernel": partial(test_runs.test_what_heads_have_seen_is_gated_for_live_rows, torch.float32),
    "latent_rows_kernel": partial(test_latent.test_a_step_equals_the_twin_and_touches_nothing_else, "f32"),
    "heads_product_kernel": partial(test_latent.test_a_product_of_each_head_equals_the_twin, "F32", 20, True),
    "attend_latent_kernel": partial(test_latent.test_a_step_equals_the_twin_and_touches_nothing_else, "f32"),
    "merge_latent_kernel": partial(test_latent.test_a_step_equals_the_twin_and_touches_nothing_else, "f32"),
    "attend_latent_chunk_kernel": partial(test_latent.test_every_row_of_a_chunk_equals_the_twin, "f32", torch.float32),
}


def test_every_kernel_is_in_the_catalogue() -> None:
    """E-84."""
    launched = r"^@triton\.jit(?:\(.*\))?\ndef (\w+_kernel)\("
    modules = (PACKAGE / "backends").rglob("*.py")
    found = [name for path in modules for name in re.findall(launched, path.read_text(), re.MULTILINE)]
    assert sorted(found) == sorted(KERNEL_TESTS)


@pytest.mark.parametrize("name", KERNEL_TESTS)
def test_a_kernel_that_does_nothing_is_noticed_by_its_test(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-84."""
    from triton.runtime.errors import InterpreterError
    from triton.runtime.interpreter import InterpretedFunction

    run, missed = InterpretedFunction.run, []

    def without(kernel: Any, *args: Any, **words: Any) -> None:
        if kernel.__name__ == name:
            missed.append(name)
        else:
            run(kernel, *args, **words)

    monkeypatch.setattr(InterpretedFunction, "run", without)
    with pytest.raises((AssertionError, InterpreterError)):
        KERNEL_TESTS[name]()
    assert missed


# The step


class Launches:
    """Notes what kernels would be launched with, and launches none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        self.seen: list[tuple[Any, ...]] = []

        def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **words: Any) -> None:
            given = [(a.data_ptr(), a.shape) if isinstance(a, Tensor) else a for a in (*args, *words.values())]
            self.seen.append((kernel.__name__, grid, given, [*words]))

        monkeypatch.setattr(InterpretedFunction, "run", note)


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    """Notes the largest tensor that any op of torch gives with memory of its own."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        for one in given if isinstance(given, tuple | list) else (given,):
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, one.numel() * one.element_size())
        return given


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    """Notes every op of torch."""

    seen: list[str]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES + LATENT)
def test_a_fused_step_is_launches_and_nothing_else_and_the_same_whoever_lives(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E-46, E-52, E-61: no copy, no question to the device, no grid that follows from a length."""
    driver = fused_driver(family_model(family), triton_kernels(TUNED))
    table, launches = driver.runner.tables.table, Launches(monkeypatch)

    def recorded(n_rows: int, position: int) -> list[tuple[Any, ...]]:
        table["n_rows"].fill_(n_rows)
        table["position"].fill_(position)
        launches.seen = []
        watch = Watch()  # type: ignore[no-untyped-call]
        watch.seen = []
        for node in driver.runner.plan.nodes:
            if node.name == "masks":  # where Triton is interpreted, the twin finds them
                continue
            before = len(launches.seen)
            with watch:
                node.run()
            assert len(launches.seen) - before == node.n_launches, node.name
        assert watch.seen == []
        return launches.seen

    nobody = recorded(0, 0)
    assert nobody == recorded(1, 0) == recorded(3, 100)
    driver.runner.close()


def test_what_a_chunk_needs_beside_keys_and_values_does_not_grow_with_what_it_sees() -> None:
    """E-36, in torch: every op of a chunk after 200 positions, and after 4,000."""
    model, largest = random_model("kv", context=8192), []
    for start in (200, 4000):
        driver = open_loop(model=model, mode="eager", context=8192, n_pages=600)
        sizes = Sizes()  # type: ignore[no-untyped-call]
        with sizes:
            driver.runner.chunks.run([ChunkPart(list(range(64)), start, [list(range(300))], 0)], 64)
        largest.append(sizes.largest)
        driver.runner.close()
    assert largest[0] >= 64 * model.shape.hidden * 4  # its rows: the ops were seen
    assert largest[1] <= max(largest[0], 8 * (4000 + 64))  # a word for each position seen
    (_, keys, _) = model.shape.attention[0].qkv_widths
    assert largest[1] < 4000 * keys * 4


def test_what_the_native_loop_works_in_has_no_room_for_the_scores_of_a_chunk() -> None:
    """E-36: the same for 8,192 positions as for 1,024, but for less than one head's scores of a chunk."""
    driver, wide = (open_loop(context=context, n_pages=600) for context in (1024, 8192))
    rows = driver.runner.chunks.rows
    assert rows == wide.runner.chunks.rows
    small, large = (each.runner.plan.buffer("step.workspace").n_bytes for each in (driver, wide))
    assert small < large < small + rows * (8192 - 1024) * 4
    for each in (driver, wide):
        each.runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "deepseek2"])
def test_a_kernel_that_runs_twice_leaves_what_it_left_once_unless_it_adds(family: str) -> None:
    """E-37."""
    driver = fused_driver(family_model(family), triton_kernels(TUNED))
    driver.admit(1, PROMPT, most=2)
    driver.run()
    plan = driver.runner.plan
    driver.runner._shared.table["n_rows"].fill_(1)
    added = []
    for node in plan.nodes:
        written = [plan.buffer(name).tensor for name in node.writes]
        node.run()
        if "x" in node.reads and "x" in node.writes:
            added.append(node.kind)
            continue
        once = [tensor.clone() for tensor in written]
        node.run()
        assert all(torch.equal(a, b) for a, b in zip(once, written, strict=True)), node.name
    assert set(added) == {"out", "down"}
    driver.runner.close()


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT, *LATENT])
def test_every_family_binds_its_kernels_in_bfloat16(family: str) -> None:
    """E-1: the gate of launches refuses an operand of another type than its kernel reads."""
    fused_driver(family_model(family, dtype=torch.bfloat16), triton_kernels(TUNED)).runner.close()


def test_whoever_adds_to_the_residual_stream_leaves_what_the_next_norm_needs() -> None:
    """E-75: nothing that a product takes in is older than the stream it was made of."""
    for family in FAMILIES + LATENT:
        driver, is_old = fused_driver(family_model(family), twin_kernels()), False
        for node in driver.runner.plan.nodes:
            assert not ("stats" in node.reads and is_old), f"{family} {node.name}"
            if "x" in node.writes:
                is_old = "stats" not in node.writes
        driver.runner.close()


@pytest.mark.parametrize("step", ["twin", "loop", "fused"])
def test_poison_in_every_buffer_between_nodes_is_not_seen(step: str) -> None:
    """E-61: a node that were missing would leave it there."""
    model = family_model("llama")
    fused = step == "fused"
    driver = fused_driver(model, twin_kernels(), n_slots=4) if fused else open_loop(model=model, mode=step)
    for name in {name for node in driver.runner.plan.nodes for name in node.writes}:
        if name != "table" and not name.startswith("memory."):
            stray(driver.runner.plan.buffer(name).tensor).view(np.uint8).fill(255)  # no number, of any width
    generation = driver.admit(2, PROMPT, most=6)
    driver.run()
    driver.runner.close()
    assert driver.tokens(generation) == alone(PROMPT, model=model, most=6)


@pytest.mark.parametrize("step", ["torch", "fused"])
def test_a_bias_of_the_head_is_added_before_a_token_is_chosen(step: str) -> None:
    """E-24."""
    plain = family_model("llama")
    assert plain.head is not None
    model = replace(plain, head=replace(plain.head, bias=3 * torch.randn(plain.shape.vocab)))
    driver = open_loop(model=model) if step == "torch" else fused_driver(model, twin_kernels())
    generation = driver.admit(0, PROMPT, most=6)
    driver.run()
    driver.runner.close()
    assert driver.tokens(generation) == by_full_forwards(model, PROMPT, 6) != alone(PROMPT, model=plain, most=6)


@pytest.mark.parametrize("fusions", [Fusions(gated=False), Fusions(ahead=False), Fusions(gated=False, ahead=False)])
def test_a_fusion_can_be_switched_off_and_the_tokens_are_the_same(fusions: Fusions) -> None:
    """E-81: of a model with biases and bfloat16 between its nodes."""
    plain = family_model("llama")
    layers = []
    for number, layer in enumerate(plain.layers):
        assert isinstance(layer, Layer)
        assert isinstance(layer.mlp, GatedMLP)
        rows = plain.shape.widest_ff * 2
        bias = torch.randn(rows, generator=torch.Generator().manual_seed(number)) / 4
        layers.append(replace(layer, mlp=replace(layer.mlp, gate_up=replace(layer.mlp.gate_up, bias=bias))))
    model = moved(replace(plain, layers=layers), CPU, torch.bfloat16)
    found = []
    for chosen in (Fusions(), fusions):
        driver = fused_driver(model, twin_kernels(), fusions=chosen)
        generation = driver.admit(0, PROMPT, most=8)
        driver.run()
        found.append((driver.tokens(generation), len(driver.runner.plan.nodes)))
        driver.runner.close()
    assert found[0][0] == found[1][0]
    assert found[1][1] - found[0][1] == (0 if fusions.gated else len(layers))


@pytest.mark.parametrize("mode", ["eager", "loop"])
def test_the_lowest_id_of_equals_is_chosen_in_every_mode(mode: str) -> None:
    """E-68."""
    plain = random_model("kv")
    assert plain.head is not None
    model = replace(plain, head=replace(plain.head, weight=torch.zeros(128, 64)))
    assert alone(PROMPT, model=model, mode=mode, most=3) == [0, 0, 0]
    biased = replace(GREEDY, logit_bias={90: 1.0, 40: 1.0})
    assert alone(PROMPT, model=model, mode=mode, most=3, sampling=biased) == [40, 40, 40]


PROSE = """The lighthouse stood at the end of the point, where the land gave out and the water began. For thirty years
the keeper had climbed its stairs at dusk, carrying oil, and had come down at dawn with nothing. He knew the ships by
the sound of their horns and the weather by the smell of the stones. When the harbour board wrote that a machine would
do his work from the spring on, he read the letter twice, folded it, and went up to clean the glass."""


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("mode", ["loop", "eager"])
def test_keys_and_values_of_8_bits_predict_a_text_as_well_as_those_of_16(default_model: Path, mode: str) -> None:
    """E-47: within half a percent, in 0.53 of the bytes."""
    found = {}
    for kv_type in ("f16", "q8_0"):
        with LLM(default_model, device="cpu", mode=mode, kv_type=kv_type, context=256) as llm:
            assert (llm.mode, llm.kv_type) == (mode, kv_type)
            found[kv_type] = llm.score(PROSE).perplexity
    assert 2 < found["f16"] < 100  # it is prose, and the model has read some
    assert 0 < abs(found["q8_0"] / found["f16"] - 1) < 0.005
    shape = read_shape(open_checkpoint(default_model))
    assert 0.53 <= cell_bytes(shape.attention[0], "q8_0") / cell_bytes(shape.attention[0], "f16") <= 0.57


def test_so_they_do_token_by_token() -> None:
    """E-47, of decode steps; random weights predict a text so badly that less of it depends on what was seen."""
    model = random_model("kv", n_vocab=64, hidden=128)
    text = random.Random(1).choices(range(64), k=60)
    wide, narrow = (perplexity(model, kv_type, text) for kv_type in ("f16", "q8_0"))
    assert 0 < abs(narrow / wide - 1) < 0.001


# Many tokens, many requests


def test_tokens_leave_no_memory_behind() -> None:
    """E-29, of the nodes in torch; what torch takes for a moment is its own."""
    driver = open_loop(mode="eager", context=512, n_pages=80)
    driver.admit(0, PROMPT, most=20)
    driver.run()
    before = n_tensors()
    driver.admit(0, PROMPT, most=400)
    driver.run()
    assert n_tensors() == before
    driver.runner.plan.check()
    driver.runner.close()


def test_long_and_short_prompts_in_turns_leave_no_memory_behind() -> None:
    """E-30, in torch."""
    one = sampling(max_tokens=2)
    with open_engine(mode="eager", context=256) as engine:

        def ask(number: int) -> None:
            assert len(ids(engine.submit(prompt(number, 200 if number % 2 else 4), one))) == 2
            until(lambda: engine.stats().pages_leased == 0, "it has left")

        for number in range(2):
            ask(number)
        before = n_tensors()
        for number in range(2, 22):
            ask(number)
        assert n_tensors() <= before + 2  # a thread may still hold what it had in hand
        engine.runner.plan.check()


IN_ANOTHER_PROCESS = """
import ctypes, json, sys
from ostinato.backends.native.library import cpu_library
from tests.engine.rig import open_loop

driver = open_loop(context=1024, n_pages=80)
name = cpu_library()._name
maps = [line.split()[0].split("-") for line in open("/proc/self/maps") if name in line]
watched = ctypes.CDLL(None)
ends = [int(end, 16) for pair in maps for end in pair]
watched.allocations_of(ctypes.c_void_p(min(ends)), ctypes.c_void_p(max(ends)))
counts = []
for n_prompt, most in [(3, 1000), (600, 20), (4, 20), (600, 20)]:
    driver.admit(0, [i % 128 for i in range(n_prompt)], most=most, pages=range(64))
    driver.run()
    counts.append(watched.allocations())
n_allocations = watched.allocations()
driver.runner.close()
other = open_loop()  # opening asks for memory: calls are seen
other.runner.close()
seen = watched.allocations() > n_allocations
print(json.dumps({"tokens": len(driver.entries), "plan": driver.runner.plan.text, "counts": counts, "seen": seen}))
"""


@pytest.fixture(scope="module")
def another_process() -> dict[str, Any]:
    """What a native loop in a process of its own has made, and how often it asked for memory meanwhile."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("calls of the allocator are counted on systems with glibc")
    source = Path(__file__).with_name("allocations.cpp").read_text()
    preload = shared_object(source, "allocations.cpp", flags=("-std=c++17", "-O1"))
    more = {"PYTHONHASHSEED": "77", "LD_PRELOAD": str(preload)}
    ran = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        cwd=ROOT,
        env=os.environ | more,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    return {**json.loads(lines[-1]), "said": [*lines[:-1], *ran.stderr.splitlines()]}


def test_the_native_loop_asks_for_no_memory_while_it_decodes_or_takes_in_prompts(
    another_process: dict[str, Any],
) -> None:
    """E-29, E-30: a thousand tokens, and prompts of 600 and of 4 tokens in turns."""
    assert another_process["seen"]
    assert another_process["counts"] == [0, 0, 0, 0]


def test_a_thousand_tokens_say_nothing_and_a_plan_is_the_same_in_another_process(
    another_process: dict[str, Any],
) -> None:
    """E-13, E-66."""
    driver = open_loop(context=1024, n_pages=80)
    driver.runner.close()
    assert another_process["said"] == []
    assert another_process["tokens"] == 1060
    assert another_process["plan"] == driver.runner.plan.text


def test_one_launch_of_one_executable_makes_512_tokens() -> None:
    """E-25. E-54."""
    driver = open_loop(context=1024, n_pages=80)
    driver.admit(0, PROMPT, most=512)
    driver.run()
    assert len(driver.entries) == 512
    assert (driver.runner.start.n_launches, driver.runner.start.n_instantiations) == (1, 1)
    driver.runner.close()


def test_requests_one_after_the_other_share_one_executable() -> None:
    """E-65."""
    with open_engine(n_slots=2) as engine:
        for number in range(60):
            assert len(ids(engine.submit(prompt(number, 5), sampling(max_tokens=2, temperature=0.5, seed=number)))) == 2
        assert engine.stats().instantiations == 1


@pytest.mark.parametrize("n_sequences", [1, 8])
def test_a_look_at_the_outbox_is_one_whoever_spoke(n_sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-69: two words and one piece of the ring, for any number of entries."""
    driver = open_loop(n_slots=8, n_pages=64)
    for slot in range(n_sequences):
        driver.admit(slot, [slot, 2, 3], most=5)
    driver.runner.decode_mode.enter()
    driver.runner.decode_mode.trigger()
    assert driver.runner.start.wait(DEADLINE_S)
    host, asked = driver.runner.host, list[Word]()
    word = host.word

    def counted(which: Word) -> int:
        asked.append(which)
        return word(which)

    monkeypatch.setattr(host, "word", counted)
    assert len(host.drain()) == 5 * n_sequences
    assert asked == [Word.OUTBOX_TAIL, Word.OUTBOX_HEAD]
    driver.runner.close()


def test_whoever_comes_while_others_decode_is_in_within_two_steps() -> None:
    """E-72."""
    driver = open_loop(n_slots=8, context=4096, n_pages=1400)
    for slot in range(7):
        driver.admit(slot, [slot, 2, 3], most=3000)
    generation = driver.admit(7, [9, 8, 7], most=3, admit=False)
    driver.runner.decode_mode.enter()
    driver.runner.decode_mode.trigger()
    asked: list[int] = []

    def ask() -> None:
        assert driver.runner.host.admit(7, generation)
        asked.append(driver.word(Word.STEPS))

    driver.runner.beside(ask).result(DEADLINE_S)
    driver.wait()
    first = next(number for number, entry in enumerate(driver.entries) if entry.generation == generation)
    steps = sum(entry.slot == 0 for entry in driver.entries[:first]) - 1  # the first token was the prompt's
    assert steps - asked[0] <= 2
    assert driver.runner.decode_mode.n_triggers == 1
    driver.runner.plan.check()
    driver.runner.close()


def test_the_host_writes_nothing_of_what_a_step_advances() -> None:
    """E-64: a loop is held at a step boundary while its engine cancels, admits and listens; the slot table
    stays."""
    with open_engine(n_slots=3, context=LONG) as engine:
        running = [decoding(engine, seed) for seed in (1, 2)]
        host, table = engine.runner.host, engine.runner.tables.table.memory
        with held(engine.runner):
            before, said = table.copy(), host.word(Word.INBOX_HEAD)
            running[0].cancel()
            waiting = engine.submit(prompt(3, 40), sampling(max_tokens=3))
            until(lambda: waiting.prefill_began is not None, "the third is seated")
            until(lambda: host.word(Word.INBOX_HEAD) > said, "the loop was told of the cancellation")
            until(lambda: not host.waiting, "what the loop had said was heard")
            assert np.array_equal(table, before)
        assert len(ids(waiting)) == 3
        assert not np.array_equal(table, before)
        running[1].cancel()


def test_an_answer_may_fill_the_context_and_touches_nothing_beyond_it() -> None:
    """E-41."""
    model = random_model("kv")
    driver = open_loop(model=model, context=48)
    halves = [half for layer in driver.runner.memory.layers.values() for half in (layer.keys, layer.values)]
    others = [page for page in range(64) if page not in (7, 2, 11)]
    for half in halves:
        half[others] = np.nan
    generation = driver.admit(0, PROMPT, most=48 - len(PROMPT), pages=[7, 2, 11])
    driver.run()
    last = driver.entries[-1]
    assert (last.position, last.finish, len(driver.tokens(generation))) == (47, Finish.LENGTH, 43)
    assert all(np.isnan(half[others]).all() for half in halves)
    following = driver.admit(0, [4, 5, 6], most=8, pages=[7, 2])
    driver.run()
    driver.runner.close()
    assert driver.tokens(following) == alone([4, 5, 6], model=model)


def test_a_first_token_costs_its_prompt_and_one_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-85."""
    rows: list[int] = []
    logits = Model.logits

    def counted(model: Model, x: Tensor) -> Tensor:
        rows.append(len(x))
        return logits(model, x)

    monkeypatch.setattr(Model, "logits", counted)
    driver = open_loop(mode="twin")
    driver.admit(0, list(range(100)), most=1)
    driver.run()
    assert (rows, len(driver.entries), driver.word(Word.STEPS)) == ([1], 1, 0)
    driver.runner.close()


# Files


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["q_proj.bias", "k_proj.bias", "v_proj.bias"])
def test_a_bias_that_a_family_needs_is_missed_by_name(bias: str, tmp_path: Path, tiny_files: Path) -> None:
    """E-23."""
    name = f"model.layers.1.self_attn.{bias}"
    folder = spoiled_folder(tmp_path, tiny_files, name="qwen2", tensors=lambda tensors: tensors.pop(name))
    assert name in refusal(folder, BadFile)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_a_bias_of_the_head_in_a_file_is_added_in_loop(name: str, tmp_path: Path, tiny_files: Path) -> None:
    """E-24: with a head of its own and with a tied one."""

    def add(tensors: dict[str, Tensor]) -> None:
        rows = next(len(tensor) for key, tensor in tensors.items() if "embed" in key or "wte" in key)
        tensors["lm_head.bias"] = 3 * torch.randn(rows, generator=torch.Generator().manual_seed(4))

    def model_of(path: Path) -> Model:
        checkpoint = open_checkpoint(path)
        shape = read_shape(checkpoint)
        return build_model(checkpoint, shape, dtype=torch.float32, device=CPU, context=64)

    model = model_of(spoiled_folder(tmp_path, tiny_files, name=name, tensors=add))
    plain = replace(model, head=replace(model.head, bias=None)) if model.head is not None else model
    found = alone(PROMPT, model=model, mode="loop", most=6)
    assert found == by_full_forwards(model, PROMPT, 6) != alone(PROMPT, model=plain, mode="loop", most=6)


@pytest.mark.slow
def test_a_tensor_whose_name_only_looks_like_the_heads_is_refused_by_name(tmp_path: Path, tiny_files: Path) -> None:
    """E-27; and a bias of the head (E-24) that does not have its size."""
    for name in ("output.bias", "blk.0.attn_output.weight.old"):
        extra = {name: torch.ones(4, 32)}
        path = spoiled_gguf(tmp_path, tiny_files, tensors=partial(dict.update, **extra))
        assert name in refusal(path, BadFile)


@pytest.mark.slow
def test_weights_of_two_bytes_take_two_bytes(tmp_path: Path, tiny_files: Path) -> None:
    """E-22: norms and frequencies aside, which are kept in float32."""

    def narrow(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    checkpoint = open_checkpoint(spoiled_folder(tmp_path, tiny_files, tensors=narrow))
    shape = read_shape(checkpoint)
    model = build_model(checkpoint, shape, dtype=torch.bfloat16, device=CPU, context=64)
    matrices = {t.data_ptr(): t for name, t in tensors_of(model, "") if t.dim() > 1 and "frequencies" not in name}
    stated = [tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1]
    assert sum(t.numel() * t.element_size() for t in matrices.values()) == sum(tensor.n_bytes for tensor in stated)
    checkpoint.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "mamba"])
def test_the_weights_of_a_file_lie_in_one_aligned_piece_of_memory(
    name: str, tmp_path: Path, tiny_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E-16: as large as was planned before a byte of it was read; what is not weights (frequencies) aside."""
    made: list[BumpAllocator] = []

    class Watched(BumpAllocator):
        def __init__(self, n_bytes: int, device: torch.device) -> None:
            super().__init__(n_bytes, device)
            made.append(self)

    monkeypatch.setattr("ostinato.backends.torch.load.BumpAllocator", Watched)
    checkpoint = open_checkpoint(spoiled_folder(tmp_path, tiny_files, name=name))
    model = build_model(checkpoint, read_shape(checkpoint), dtype=torch.float32, device=CPU, context=64)
    weights = [tensor for label, tensor in tensors_of(model, "") if "frequencies" not in label]
    stated = sum(4 * tensor.n_elements for tensor in checkpoint.tensors.values())
    checkpoint.close()
    assert len({tensor.untyped_storage().data_ptr() for tensor in weights}) == 1
    assert all(tensor.data_ptr() % 256 == 0 for tensor in weights)
    assert len(made) == 1
    assert len(made[0]._free) == 0
    assert made[0].n_bytes >= sum({t.data_ptr(): t.numel() * t.element_size() for t in weights}.values()) > 0.8 * stated


# Read in the source
