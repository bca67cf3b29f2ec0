"""A GPU that is none: it takes the calls that the laboratory makes to torch, cuda.core and the driver, on the CPU.

Launches are put into a stream, a thread that runs them in order, with the arguments that they had when they were made,
as a GPU does: so a kernel can run while the host feeds it. The kernels are numpy's. The loops of launches in
`programs/host.cpp` are the real ones, and call this driver through its function pointers.
"""

from __future__ import annotations

import ctypes
import operator
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.backends.cuda import gpu as cuda_gpu
from ostinato.lab import gpu as lab_gpu
from ostinato.lab.gpu import FAULT_WORD, PASSES, GpuMachine

N_CORES, BLOCKS_EACH, FREE_BYTES = 4, 2, 1 << 30
U64, I64, I32, F32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
# The arguments of each kernel, as kernels.h and while_condition.h have them.
WORDS: dict[str, tuple[Any, ...]] = {
    "short_axpy": (U64, U64, I64, F32),
    "short_tail": (U64, U64, I64, F32),
    "hold": (U64,),
    "persistent": (U64, U64, I64, U64, I64, I32, I32, U64, U64, U64, U64, I32),
    "count_down": (U64, U64),
}
ENTRY = np.dtype([("request", np.int32), ("a", np.float32)])
_handles = count(1)


def at(address: int, n: int, type: Any = np.float32) -> np.ndarray:
    """The memory at an address."""
    kind = np.dtype(type)
    return np.frombuffer((ctypes.c_char * (n * kind.itemsize)).from_address(address), kind)


@dataclass(slots=True)
class Kernel:
    name: str
    handle: int = field(default_factory=lambda: next(_handles))


@dataclass(slots=True)
class Node:
    """A launch in a graph. Mutable: its arguments can be set."""

    graph: Graph
    kernel: Kernel
    words: tuple[Any, ...]
    handle: int = field(default_factory=lambda: next(_handles))

    def launch(self, config: Any, kernel: Kernel, *words: Any) -> Any:
        return self.graph.launch(config, kernel, *words)


class Graph:
    """A definition, and also its executable: the nodes in order, or a loop around them."""

    def __init__(self, card: Card, loops: list[bool] | None = None) -> None:
        self._card, self.nodes = card, list[Node]()
        self._loops = loops
        self._body: Graph | None = None
        self.handle = next(_handles)
        card.graphs[self.handle] = self

    def launch(self, *given: Any) -> Any:
        if len(given) == 1:  # an executable, into a stream
            return self._card.submit(self.run)
        _, kernel, *words = given
        self.nodes.append(Node(self, kernel, tuple(map(_plain, words))))
        self._card.nodes[self.nodes[-1].handle] = self.nodes[-1]
        return self.nodes[-1]

    def create_condition(self, *, default_value: int) -> int:
        self._default = bool(default_value)
        self._card.conditions[handle := next(_handles)] = [self._default]
        return handle

    def while_loop(self, condition: int) -> Any:
        self._body = Graph(self._card, self._card.conditions[condition])
        return SimpleNamespace(body=self._body)

    def instantiate(self) -> Graph:
        self._card.instantiated.append(self)
        return self

    @property
    def body(self) -> Graph:
        assert self._body is not None
        return self._body

    def run(self) -> None:
        if self._body is not None:
            assert self._body._loops is not None
            self._body._loops[0] = self._default
            while self._body._loops[0]:
                self._body.run()
        for node in self.nodes:
            self._card.run(node.kernel.name, node.words)


class Event:
    def __init__(self, card: Card) -> None:
        self._card = card
        self._done: Future[float] = Future()

    def record(self, stream: Any) -> None:
        self._done = self._card.submit(time.perf_counter)

    def query(self) -> bool:
        return self._done.done()

    def elapsed_time(self, later: Event) -> float:
        return (later._done.result() - self._done.result()) * 1e3


class Card:
    """What the laboratory finds in place of a GPU. `skips`: a launch, by its number, that computes nothing."""

    def __init__(self) -> None:
        self._stream = ThreadPoolExecutor(1, "stand-in")
        self.kernels: dict[int, Kernel] = {}
        self.graphs: dict[int, Graph] = {}
        self.nodes: dict[int, Node] = {}
        self.conditions: dict[int, list[bool]] = {}
        self.instantiated: list[Graph] = []
        self.calls: Counter[str] = Counter()  # of the driver
        self.ran: Counter[str] = Counter()  # kernels
        self.refuses = 0  # the driver's error for a launch
        self.skips: int | None = None
        self.is_stuck = self._closed = False
        self._given: list[Any] = []  # callbacks of the driver live as long as this

    # The device

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        return self._stream.submit(work)

    def run(self, name: str, words: Sequence[Any]) -> None:
        self.ran[name] += 1
        while self.is_stuck and not self._closed:
            time.sleep(0.001)
        if self._closed:
            return  # its memory has been freed
        passes = self.ran["short_axpy"] + self.ran["short_tail"]
        if name.startswith("short_") and passes == self.skips:
            return
        getattr(self, f"_{name}")(*words)

    def _short_axpy(self, x: int, h: int, n: int, a: float) -> None:
        _pass("axpy", at(x, n), at(h, n), a)

    def _short_tail(self, x: int, h: int, n: int, a: float) -> None:
        _pass("tail", at(x, n), at(h, n), a)

    def _hold(self, nanoseconds: int) -> None:
        end = time.perf_counter_ns() + nanoseconds
        while time.perf_counter_ns() < end:
            pass

    def _count_down(self, left: int, condition: int) -> None:
        at(left, 1, np.int64)[0] -= 1
        self.conditions[condition][0] = bool(at(left, 1, np.int64)[0] > 0)

    def _persistent(
        self, x: int, h: int, n: int, queue: int, total: int, kernels: int, body: int, fed_queue: int, fed: int,
        control: int, deadline_ns: int, does: int,
    ) -> None:  # fmt: skip
        end = time.perf_counter_ns() + deadline_ns
        for step in range(total):
            while fed and at(fed, 1, np.uint64)[0] <= step:
                if time.perf_counter_ns() > end:
                    at(control, FAULT_WORD + 1, np.uint64)[FAULT_WORD] = 1
                    return
            entry = at(fed_queue if fed else queue, total, ENTRY)[step]
            state = at(h + 4 * n * int(entry["request"]), n)
            for _ in range(kernels if does & PASSES else 0):
                _pass(("axpy", "tail")[body], at(x, n), state, float(entry["a"]))

    # The driver

    def functions(self) -> SimpleNamespace:
        """libcuda's functions, by their names; each is a pointer that native code can call."""
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        kinds: dict[str, tuple[Callable[..., int], tuple[Any, ...]]] = {
            "cuLaunchKernel": (self._launch_kernel, (pointer, *(number,) * 7, pointer, pointer, pointer)),
            "cuGraphLaunch": (self._launch_graph, (pointer, pointer)),
            "cuGraphExecKernelNodeSetParams_v2": (self._set_node, (pointer, pointer, pointer)),
        }
        made = {name: ctypes.CFUNCTYPE(ctypes.c_int, *words)(work) for name, (work, words) in kinds.items()}
        self._given += made.values()
        return SimpleNamespace(**made)

    def _launch_kernel(self, handle: int, *given: Any) -> int:
        self.calls["cuLaunchKernel"] += 1
        name, params = self.kernels[handle].name, given[8]
        words = _words_at(name, params)
        return self._accept(lambda: self.run(name, words))

    def _launch_graph(self, handle: int, stream: int) -> int:
        self.calls["cuGraphLaunch"] += 1
        graph = self.graphs[handle]
        now = [(node.kernel.name, node.words) for node in graph.nodes]

        def replay() -> None:
            for name, words in now:
                self.run(name, words)

        return self._accept(replay)

    def _accept(self, launch: Callable[[], None]) -> int:
        """Put a launch into the stream, unless it is refused: a caller that is told so frees the memory of it."""
        if not self.refuses:
            self.submit(launch)
        return self.refuses

    def _set_node(self, graph: int, node: int, params: int) -> int:
        self.calls["cuGraphExecKernelNodeSetParams_v2"] += 1
        # CUDA_KERNEL_NODE_PARAMS_v2: a function, seven numbers, and then the pointer to the arguments.
        (arguments,) = at(params + 40, 1, np.uint64)
        (kernel,) = at(params + 56, 1, np.uint64)
        assert self.kernels[int(kernel)] is self.nodes[node].kernel
        self.nodes[node].words = _words_at(self.nodes[node].kernel.name, int(arguments))
        return 0

    # cuda.core

    def load(self, binary: str) -> SimpleNamespace:
        def get_kernel(name: str) -> Kernel:
            assert f"void {name}(" in binary, "the module has no such kernel"
            made = Kernel(name)
            self.kernels[made.handle] = made
            return made

        return SimpleNamespace(get_kernel=get_kernel)

    def launch(self, stream: Any, config: Any, kernel: Kernel, *words: Any) -> None:
        self.calls[f"launch of {kernel.name}"] += 1
        assert config.is_cooperative
        plain = tuple(map(_plain, words))
        assert len(plain) == len(WORDS[kernel.name])
        self.submit(lambda: self.run(kernel.name, plain))

    def close(self) -> None:
        self._closed = True
        self._stream.shutdown()


def _plain(word: Any) -> Any:
    return word.item() if isinstance(word, np.generic) else word


def _words_at(name: str, params: int) -> tuple[Any, ...]:
    """The arguments of a kernel, from the pointers to each, copied as a launch copies them."""
    kinds = WORDS[name]
    pointers = at(params, len(kinds), np.uint64)
    return tuple(kind.from_address(int(p)).value for kind, p in zip(kinds, pointers, strict=True))


def _pass(body: str, x: np.ndarray, h: np.ndarray, a: float) -> None:
    if body == "axpy":
        h += np.float32(a) * x
    else:
        h += np.float32(a) * torch.nn.functional.gelu(torch.from_numpy(h + x)).numpy()


@contextmanager
def stand_in(patch: pytest.MonkeyPatch, *, why_no_while: str | None = None) -> Iterator[tuple[GpuMachine, Card]]:
    """The laboratory over a card that is none. `why_no_while`: why it has no WHILE graphs."""
    card = Card()
    cuda: dict[str, Any] = {
        "set_device": operator.index,  # as torch, which refuses a device without an index
        "get_device_name": lambda _: "a stand-in",
        "synchronize": lambda _: card.submit(lambda: None).result(),
        "mem_get_info": lambda _: (FREE_BYTES, FREE_BYTES),
        "Stream": lambda _: SimpleNamespace(cuda_stream=1),
        "Event": lambda enable_timing: Event(card),
    }
    for name, value in cuda.items():
        patch.setattr(torch.cuda, name, value)
    zeros = torch.zeros
    patch.setattr(torch, "zeros", lambda *sizes, pin_memory=False, **words: zeros(*sizes, **words))
    core, graph, bindings = ModuleType("cuda.core"), ModuleType("cuda.core.graph"), ModuleType("cuda.bindings")
    core.__dict__.update(
        Device=lambda _: SimpleNamespace(set_current=lambda: None),
        ObjectCode=SimpleNamespace(from_cubin=card.load),
        Stream=SimpleNamespace(from_handle=lambda handle: handle),
        LaunchConfig=lambda **words: SimpleNamespace(**words),
        launch=card.launch,
    )
    graph.__dict__["GraphDefinition"] = lambda: Graph(card)
    bindings.__dict__["driver"] = SimpleNamespace(
        CUfunction=lambda handle: handle,
        cuOccupancyMaxActiveBlocksPerMultiprocessor=lambda *_: (0, BLOCKS_EACH),
    )
    for module in (core, graph, bindings):
        patch.setitem(sys.modules, module.__name__, module)
    chip = SimpleNamespace(n_multiprocessors=N_CORES, arch="sm_90", is_pretended=False)
    patch.setattr(lab_gpu, "check_extra", lambda *_: None)
    patch.setattr(cuda_gpu, "chip_of", lambda _: chip)
    patch.setattr(lab_gpu, "cubin", lambda text, *_, **__: text)
    patch.setattr(lab_gpu, "machine_at", lambda _: None)
    patch.setattr(lab_gpu, "CUDA", SimpleNamespace(why_not_here=lambda *_: why_no_while))
    libraries = ctypes.CDLL
    functions = card.functions()
    patch.setattr(ctypes, "CDLL", lambda name: functions if name == "libcuda.so.1" else libraries(name))
    try:
        yield GpuMachine("cpu"), card
    finally:
        card.close()
