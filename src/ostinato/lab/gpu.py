"""The laboratory on an NVIDIA GPU: short kernels one by one, as graphs, as a WHILE graph, and as a persistent kernel.

Graphs are built node by node here; the stand-alone programs capture theirs from a stream. Kernels are compiled here for
the card at hand; loops of launches are native (`programs/host.cpp`). Times are those of the device, by events around
everything. Every wait has a deadline: on the device by its timer, on the host here.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.cuda import gpu
from ostinato.backends.cuda.backend import CUDA
from ostinato.backends.machine import cuda_version, driver_cuda
from ostinato.build import cubin
from ostinato.engine.machine import machine_at
from ostinato.errors import BadOption, EngineDead, HardwareCannot, InternalError
from ostinato.extras import check_extra
from ostinato.lab.gpu_time import timing_event
from ostinato.lab.model import BODIES, StartCost, Workload
from ostinato.lab.programs import host_library, source
from ostinato.lab.work import REQUESTS, Data, Timing, checked, error_of, factors_of, run_twin

BASELINE: Final = "baseline"
GRAPH: Final = "graph"
UPDATED: Final = "graph, updated"
WHILE: Final = "while graph"
PERSISTENT: Final = "persistent"
FED: Final = "persistent, fed"
STARTS: Final = (BASELINE, GRAPH, UPDATED, WHILE, PERSISTENT, FED)

DEADLINE_S: Final = 30.0
MOST_NODES: Final = 20_000  # of one graph: instantiating more takes longer than what is measured
FEW, MANY = 4, 20  # kernels of a step, to tell what each adds from what a step does
CONTROL_WORDS: Final = 48  # of `Control` in kernels.h
FAULT_WORD: Final = 32
LOADED: Final = Workload(1 << 22, 50, 8, 0, 1024)  # blocks that are busy when they meet at a barrier
HELD_US: Final = 10  # a body that is longer than any launch
PASSES, BARRIERS = 1, 2  # parts of a persistent kernel, as in kernels.h


@dataclass(frozen=True, slots=True)
class LaunchSequence:
    """What is timed, and what is done before it, outside of the time; `launches`: how often the host launches."""

    run: Callable[[], None]
    launches: int
    prepare: Callable[[], None] = lambda: None


class GpuMachine:
    """The card that torch calls `device`."""

    kind: Literal["gpu", "cpu"] = "gpu"
    sizes: tuple[str, ...] = ("n", "steps", "kernels", "blocks", "threads")
    persistent: str = PERSISTENT

    def __init__(self, name: str) -> None:
        check_extra("gpu", "the laboratory on a GPU")
        from cuda.core import Device, ObjectCode, Stream

        self._device = device = torch.device(name)
        index = device.index or 0  # "cuda" is the first card
        torch.cuda.set_device(index)
        self.name = torch.cuda.get_device_name(device)
        Device(index).set_current()
        torch.zeros(1, device=device)  # torch's context is the one that everything below lives in
        chip = gpu.chip_of(device)
        self.n_cores = chip.n_multiprocessors

        def loaded(name: str) -> ObjectCode:
            return ObjectCode.from_cubin(cubin(source(name), name, arch=chip.arch, as_ptx=chip.is_pretended))

        module = loaded("kernels.h")
        self._kernels = {name: module.get_kernel(name) for name in ("short_axpy", "short_tail", "hold", "persistent")}
        self.why_not: dict[str, str] = {}
        reason = CUDA.why_not_here("loop", machine_at(str(device)))
        if reason is None:
            self._kernels["count_down"] = loaded("while_condition.h").get_kernel("count_down")
        else:
            self.why_not[WHILE] = reason
        self.starts = tuple(start for start in STARTS if start not in self.why_not)
        self._host = host_library()
        self._driver = ctypes.CDLL("libcuda.so.1")
        stream: Any = torch.cuda.Stream
        self._stream = stream(device)
        self._own = Stream.from_handle(self._stream.cuda_stream)
        self._costs: dict[tuple[int, int], dict[str, StartCost]] = {}
        self.spread = 0.0  # the device's own clock, in medians: what disturbs it is seen in the rows

    # What may run

    def settle(self, work: Workload) -> Workload:
        work = replace(work, blocks=work.blocks or self.n_cores)
        needed, free = (
            4 * work.n * (1 + REQUESTS) + 8 * work.n * (2 + REQUESTS),
            torch.cuda.mem_get_info(self._device)[0],
        )
        if needed > free:
            raise HardwareCannot(f"--n {work.n} needs {needed / 1e9:.1f} GB with its check; {free / 1e9:.1f} are free")
        return work

    def check_resident(self, work: Workload) -> None:
        """Refuse a grid whose blocks cannot all be resident at once: a grid barrier would never end."""
        from cuda.bindings import driver

        kernel = self._kernels["persistent"]
        function = driver.CUfunction(int(kernel.handle))
        error, fits = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, work.threads, 0)
        if int(error):
            raise HardwareCannot(f"the driver could not ask how many blocks fit: {error}")
        if work.blocks > fits * self.n_cores:
            raise BadOption(
                f"--blocks {work.blocks}: with {work.threads} threads at most {fits * self.n_cores} blocks run at once "
                f"on {self.name} ({fits} on each of {self.n_cores} multiprocessors), and a barrier over the "
                "grid waits for all of them"
            )

    # Measuring

    def time(self, work: Workload, start: str, repeats: int) -> Timing:
        work = self.settle(work)
        requests = REQUESTS if start == FED else 1
        data = Data.fresh(work.n, requests)
        factors = factors_of(work, varied=start in (UPDATED, FED))
        expected = self._expected(work, data, factors, requests)
        x = torch.from_numpy(data.x).to(self._device)
        h = torch.full((requests, work.n), float("nan"), device=self._device)
        fresh = torch.from_numpy(data.start).to(self._device)
        sequence = self._bound(work, start, x, h, factors)
        times, worst = [], 0.0
        for _ in range(repeats + 1):  # the first warms and uploads
            h.fill_(float("nan"))
            h.copy_(fresh)
            times.append(self._ms(sequence) * 1e3 / work.steps)
            worst = max(worst, error_of(h.cpu().numpy(), expected))
        return checked(Timing(start, work, tuple(times[1:]), worst, float(np.abs(expected).max()), sequence.launches))

    def _expected(self, work: Workload, data: Data, factors: np.ndarray, requests: int) -> np.ndarray:
        """As `Data.expected` has it, on the device."""
        x, out = (torch.from_numpy(one).to(self._device).double() for one in (data.x, data.start))
        run_twin(work, factors, x, out, requests, torch.nn.functional.gelu)
        return out.cpu().numpy()

    def _ms(self, sequence: LaunchSequence) -> float:
        """Milliseconds on the device; EngineDead where it does not end."""
        sequence.prepare()
        torch.cuda.synchronize(self._device)
        began, ended = timing_event(), timing_event()
        began.record(self._stream)
        sequence.run()
        ended.record(self._stream)
        latest = time.monotonic() + 2 * DEADLINE_S
        while not ended.query():
            if time.monotonic() > latest:
                raise EngineDead(
                    f"the device did not end within {2 * DEADLINE_S:.0f} s; this process must be restarted"
                )
            time.sleep(20e-6)
        return float(began.elapsed_time(ended))

    def body_us(self, work: Workload) -> float:
        """A pass inside a persistent kernel, less the barrier after it, so without any launch."""
        one = replace(self.settle(work), steps=100, kernels=8)
        staying = self.costs(one)[PERSISTENT]
        return max(1e-3, (self.time(one, PERSISTENT, 3).us - staying.step_us) / 8 - staying.kernel_us)

    # What each start adds

    def costs(self, work: Workload) -> dict[str, StartCost]:
        """By bodies of known length in the grid of this work: long ones show what the device adds, empty ones what the
        host takes."""
        work = self.settle(work)
        grid = work.blocks, work.threads
        if grid not in self._costs:
            self._costs[grid] = {start: self._cost(start, *grid) for start in self.starts}
        return self._costs[grid]

    def _cost(self, start: str, blocks: int, threads: int) -> StartCost:
        if start in (PERSISTENT, FED):
            kernel, step = _line(
                lambda kernels: self._staying_us(start, Workload(1, 200, kernels, blocks, threads), BARRIERS)
            )
            return StartCost(kernel, max(0.0, step))
        held, step = _line(lambda kernels: self._held_us(start, kernels, HELD_US, blocks, threads))
        submit, submit_step = _line(lambda kernels: self._held_us(start, kernels, 0, blocks, threads))
        added = held - HELD_US
        if start == BASELINE:
            return StartCost(added, 0.0, submit)
        return StartCost(added, max(0.0, step), 0.0, max(0.0, submit_step) if start == UPDATED else 0.0)

    def _held_us(self, start: str, kernels: int, length_us: int, blocks: int, threads: int, steps: int = 50) -> float:
        """A step of kernels that only take time."""
        kernel, words = self._kernels["hold"], (np.uint64(length_us * 1000),)
        sequence = self._started(start, Workload(1, steps, kernels, blocks, threads), kernel, words, None)
        return self._median_ms(sequence) * 1e3 / steps

    def _staying_us(self, start: str, work: Workload, does: int) -> float:
        """A step of a persistent kernel that runs only a part of it; there is no result to check."""
        data = Data.fresh(work.n, REQUESTS)
        x, h = torch.from_numpy(data.x).to(self._device), torch.from_numpy(data.start).to(self._device)
        bound = self._fed if start == FED else self._persistent
        sequence = bound(work, x, h, factors_of(work, varied=False), does=does)
        return self._median_ms(sequence) * 1e3 / work.steps

    def _median_ms(self, sequence: LaunchSequence) -> float:
        return float(np.median([self._ms(sequence) for _ in range(6)][1:]))

    def facts(self) -> dict[str, Any]:
        loaded = self.settle(LOADED)
        passes, both = (self._staying_us(PERSISTENT, loaded, does) / 8 for does in (PASSES, PASSES | BARRIERS))
        return {
            "kind": "gpu",
            "name": self.name,
            "multiprocessors": self.n_cores,
            "driver": f"CUDA {cuda_version(driver_cuda() or 0)}",
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "barrier_idle_us": self.costs(loaded)[PERSISTENT].kernel_us,
            "barrier_loaded_us": max(0.0, both - passes),
        }

    # The starts

    def _bound(self, work: Workload, start: str, x: Tensor, h: Tensor, factors: np.ndarray) -> LaunchSequence:
        if start in (PERSISTENT, FED):
            return (self._fed if start == FED else self._persistent)(work, x, h, factors)
        words = (np.uint64(x.data_ptr()), np.uint64(h.data_ptr()), np.int64(work.n), np.float32(work.a))
        return self._started(start, work, self._kernels[f"short_{work.body}"], words, factors)

    def _started(
        self, start: str, work: Workload, kernel: Any, words: tuple[Any, ...], factors: np.ndarray | None
    ) -> LaunchSequence:
        """Steps of short kernels."""
        from cuda.core import LaunchConfig

        config = LaunchConfig(grid=work.blocks, block=work.threads)
        given = _KernelWords(words)
        handle, stream = int(kernel.handle), self._stream.cuda_stream
        if start == BASELINE:
            launch = self._pointer("cuLaunchKernel")
            all_of_it = (launch, handle, work.blocks, work.threads, stream, given.pointers, work.passes)
            return LaunchSequence(lambda: _called(self._host.launch_many(*all_of_it), given), work.passes)
        if start == WHILE:
            return self._while(work, kernel, config, words)
        per_graph = work.kernels * (1 if start == UPDATED else max(1, min(work.steps, MOST_NODES // work.kernels)))
        while work.passes % per_graph:
            per_graph -= work.kernels
        graph, nodes = self._built(kernel, config, words, per_graph)
        executable = int(graph[0].handle)
        replays = work.passes // per_graph
        if start == GRAPH or factors is None:
            many = (self._pointer("cuGraphLaunch"), executable, stream, replays)
            return LaunchSequence(lambda: _called(self._host.replay_many(*many), graph), replays)
        each = np.ascontiguousarray(factors)
        handles = (ctypes.c_void_p * len(nodes))(*nodes)
        everything = (
            self._pointer("cuGraphExecKernelNodeSetParams_v2"), self._pointer("cuGraphLaunch"), executable,
            ctypes.addressof(handles), len(nodes), handle, work.blocks, work.threads, stream, given.pointers,
            each.ctypes.data, work.steps,
        )  # fmt: skip
        kept = graph, handles, each, given
        return LaunchSequence(lambda: _called(self._host.update_and_replay(*everything), *kept), work.steps)

    def _built(self, kernel: Any, config: Any, words: tuple[Any, ...], n: int) -> tuple[Any, list[int]]:
        """A graph of n launches in a row, built node by node: instantiated and as it was defined, and its nodes."""
        from cuda.core.graph import GraphDefinition

        graph = GraphDefinition()
        node: Any = graph
        nodes = []
        for _ in range(n):
            node = node.launch(config, kernel, *words)
            nodes.append(int(node.handle))
        return (graph.instantiate(), graph), nodes  # the definition owns the nodes

    def _while(self, work: Workload, kernel: Any, config: Any, words: tuple[Any, ...]) -> LaunchSequence:
        from cuda.core import LaunchConfig
        from cuda.core.graph import GraphDefinition

        left = torch.zeros(1, dtype=torch.int64, device=self._device)
        graph = GraphDefinition()
        again = graph.create_condition(default_value=1)
        node: Any = graph.while_loop(again).body
        for _ in range(work.kernels):
            node = node.launch(config, kernel, *words)
        node.launch(LaunchConfig(grid=1, block=1), self._kernels["count_down"], np.uint64(left.data_ptr()), again)
        made = graph.instantiate()

        def prepare() -> None:
            left.fill_(work.steps)

        return LaunchSequence(lambda: made.launch(self._own), 1, prepare)

    def _persistent(
        self, work: Workload, x: Tensor, h: Tensor, factors: np.ndarray, *, does: int = PASSES | BARRIERS
    ) -> LaunchSequence:
        queue = torch.from_numpy(_entries(factors, 1)).to(self._device)
        return self._staying(work, x, h, queue, 0, 0, does)

    def _fed(
        self, work: Workload, x: Tensor, h: Tensor, factors: np.ndarray, *, does: int = PASSES | BARRIERS
    ) -> LaunchSequence:
        queue = torch.zeros(8 * work.steps, dtype=torch.uint8, pin_memory=True)
        count = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        own = torch.zeros(8 * work.steps, dtype=torch.uint8, device=self._device)
        staying = self._staying(work, x, h, own, queue.data_ptr(), count.data_ptr(), does)
        each = np.ascontiguousarray(factors)

        def prepare() -> None:
            staying.prepare()
            count.zero_()

        def run() -> None:
            staying.run()
            self._host.feed(queue.data_ptr(), count.data_ptr(), REQUESTS, each.ctypes.data, work.steps)

        return LaunchSequence(run, 1, prepare)

    def _staying(
        self, work: Workload, x: Tensor, h: Tensor, queue: Tensor, fed_queue: int, fed: int, does: int
    ) -> LaunchSequence:
        from cuda.core import LaunchConfig, launch

        self.check_resident(work)
        control = torch.zeros(CONTROL_WORDS, dtype=torch.int64, device=self._device)
        config = LaunchConfig(grid=work.blocks, block=work.threads, is_cooperative=True)
        words = (
            *(np.uint64(x.data_ptr()), np.uint64(h.data_ptr()), np.int64(work.n), np.uint64(queue.data_ptr())),
            *(np.int64(work.steps), np.int32(work.kernels), np.int32(BODIES.index(work.body))),
            *(np.uint64(fed_queue), np.uint64(fed), np.uint64(control.data_ptr())),
            *(np.uint64(DEADLINE_S * 1e9), np.int32(does)),
        )

        def prepare() -> None:
            if bool(control[FAULT_WORD]):
                raise EngineDead(f"a wait on the device passed its deadline of {DEADLINE_S:.0f} s")
            control.zero_()

        kept = queue, control  # they live as long as this

        def run() -> None:
            assert kept
            launch(self._own, config, self._kernels["persistent"], *words)

        return LaunchSequence(run, 1, prepare)

    def _pointer(self, name: str) -> int:
        return ctypes.cast(getattr(self._driver, name), ctypes.c_void_p).value or 0


class _KernelWords:
    """Arguments of a kernel as the driver wants them: pointers to each."""

    def __init__(self, words: tuple[Any, ...]) -> None:
        self._kept = [np.array([word]) for word in words]
        self._table = (ctypes.c_void_p * len(words))(*(word.ctypes.data for word in self._kept))
        self.pointers = ctypes.addressof(self._table)


def _line(step_us: Callable[[int], float]) -> tuple[float, float]:
    """What each further kernel of a step adds to its time, and what the step takes beside them."""
    few, many = step_us(FEW), step_us(MANY)
    slope = (many - few) / (MANY - FEW)
    return slope, few - FEW * slope


def _entries(factors: np.ndarray, requests: int) -> np.ndarray:
    """A queue as bytes: the request and the factor of each step."""
    entries = np.zeros(len(factors), [("request", np.int32), ("a", np.float32)])
    entries["request"] = np.arange(len(factors)) % requests
    entries["a"] = factors
    return entries.view(np.uint8)


def _called(error: int, *kept: object) -> None:
    """What a loop of driver calls came to; `kept` lives at least until then."""
    if error:
        raise InternalError(f"the driver refused a launch: error {error}")
