"""What the CUDA starts share: streams, the step boundary's kernel, warm-up, and work beside the loop.

One stream for everything in a step, one of lower priority for prompts; every edge between them is an event. The
step boundary is compiled for the tables at hand and loaded once. Only the engine's thread, and the pacer of a
host-paced start, call in here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import torch

from ostinato.backends.cuda import gpu
from ostinato.backends.cuda.launch import launches_in
from ostinato.backends.cuda.pool import Pool, pool_of
from ostinato.backends.cuda.ready import check_ready
from ostinato.backends.torch.start import torch_device
from ostinato.build import cubin
from ostinato.errors import EngineDead, HardwareCannot, first_line
from ostinato.loop.cpu_device import CpuDevice
from ostinato.loop.guard import Guard
from ostinato.loop.layout import Layout, Tables, Word
from ostinato.loop.plan import Plan
from ostinato.loop.start import STEP_DEADLINE_S, Launched, next_executable
from ostinato.loop.step_boundary import native_headers

BOUNDARY_THREADS: Final = 128
LOOP_PRIORITY, SIDE_PRIORITY = -1, 0  # a lower number goes first
LEAST_NAP_S: Final = 20e-6


def source(name: str) -> str:
    """A CUDA source of this backend, by its file name."""
    return Path(__file__).with_name(name).read_text("utf-8")


@dataclass(slots=True)
class EventWork:
    """A job beside the loop: over when the device has passed this event. Mutable: once passed, the event is lent to
    the next one (E-4)."""

    event: Any
    pool: Pool

    def done(self) -> bool:
        try:
            return self._is_over()
        except RuntimeError:  # the device has failed: `result` raises the cause
            return True

    def result(self, timeout: float | None = None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not self._is_over():
            if end is not None and time.monotonic() > end:
                raise TimeoutError("the job beside the loop has not ended")
            time.sleep(LEAST_NAP_S)

    def _is_over(self) -> bool:
        if self.event is not None and self.event.query():
            self.pool.take_back_event(self.event)
            self.event = None
        return self.event is None


_MODULES: Final[dict[tuple[str, bytes], Any]] = {}


def module_of(binary: bytes, device: torch.device) -> Any:
    """A cubin or PTX, loaded on a device, which is then current: once, and kept for the process (E-8). A module that
    is loaded again for every engine leaves 0.3 MB of the device's memory behind each time."""
    from cuda.core import Device, ObjectCode

    Device(device.index or 0).set_current()
    key = str(device), sha256(binary).digest()
    if key not in _MODULES:
        _MODULES[key] = ObjectCode.from_cubin(binary)
    return _MODULES[key]


def loaded(name: str, device: torch.device, headers: Mapping[str, str] = MappingProxyType({})) -> Any:
    """The module of a CUDA source of this backend, by its file name, compiled for a device."""
    chip = gpu.chip_of(device)
    return module_of(cubin(source(name), name, headers=headers, arch=chip.arch, as_ptx=chip.is_pretended), device)


def boundary_module(layout: Layout, page_tokens: int, device: torch.device) -> Any:
    """The step boundary, compiled for tables of this layout."""
    return loaded("step_boundary.cu", device, native_headers(layout, page_tokens=page_tokens))


class CudaStart(Launched):
    """`eager`, where the host launches every node of every step, and the base of the other CUDA starts."""

    name = "eager"
    device_paced = False
    n_nodes: int | None = None  # of the captured step, where there is one
    comparison: Literal["bits", "tolerance"] = "bits"
    helper: None = None  # a GPU works alone

    def __init__(self, plan: Plan, tables: Tables, guard: Guard, wake: Callable[[], None] = lambda: None) -> None:
        self._plan, self._tables, self._guard, self._wake = plan, tables, guard, wake
        self._words = tables.rings.host("words")
        self.device = torch.device(plan.device)
        self.executable = 0
        self.n_launches = 0
        self.n_instantiations = 0
        self._pool = pool_of(self.device)
        self.stream = self._pool.stream(LOOP_PRIORITY)
        self.side = self._pool.stream(SIDE_PRIORITY)
        self._passed = self._pool.event()  # of the last step, or the last loop
        self._lent = True
        self._pacer: CpuDevice | None = None

    # The step boundary

    @property
    def _boundary_arguments(self) -> tuple[Any, ...]:
        tables = self._tables
        hashes = np.uint64(self._plan.hash), np.uint64(self.executable)
        return *tables.addresses, tables.grammar_address, *hashes

    def _run_boundary(self) -> None:
        """Launch the step boundary on the loop's stream."""
        from cuda.core import LaunchConfig, Stream, launch

        stream = Stream.from_handle(self.stream.cuda_stream)
        launch(stream, LaunchConfig(grid=1, block=BOUNDARY_THREADS), self._boundary, *self._boundary_arguments)

    # Building

    def build(self) -> None:
        self._guard.allow("I-1", "building the step again")
        self.executable = next_executable()
        check_ready(launches_in([node.run for node in self._plan.nodes]), self.device)
        module = boundary_module(self._tables.layout, self._plan.page_tokens, self.device)
        self._boundary = module.get_kernel("step_boundary")
        self._boundary_in_loop = module.get_kernel("boundary_loop")  # which sets a WHILE graph's condition as well
        self._warm()
        self._make()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _warm(self) -> None:
        """Run every node once with no live row, before any is captured: it changes nothing (E-9)."""
        self._tables.table["n_rows"].zero_()
        self.synchronize()
        with torch.cuda.stream(self.stream):
            for node in self._plan.nodes:
                node.run()
        self.stream.synchronize()

    def _make(self) -> None:
        """What a start builds beyond the step boundary: nothing here."""

    def _check_captured(self, n_nodes: int) -> None:
        """HardwareCannot where a captured step has other launches than the plan and its step boundary (E-61).

        A missing launch would leave its output unchanged, and no error would report it.
        """
        self.n_nodes = n_nodes
        planned = self._plan.n_launches
        if planned is not None and n_nodes != planned + 1:
            raise HardwareCannot(
                f"the captured step has {n_nodes} nodes, and the plan has {planned} launches and a step boundary; "
                "use --mode eager"
            )

    # Running: host-paced, on a thread of its own

    def launch(self) -> None:
        self._guard.allow_launch()
        if self._pacer is None:
            self._pacer = torch_device()
        self._launched = self._pacer.submit(self._pace)

    def step(self) -> None:
        with torch.cuda.stream(self.stream):
            self._enqueue_step()
        self._await_device()

    def _pace(self) -> None:
        with torch.cuda.stream(self.stream):
            self._run_boundary()
            self._await_device()
            while self._words[Word.GO, 0]:
                self._enqueue_step()
                self._await_device()

    def _enqueue_step(self) -> None:
        """One step onto the stream."""
        self.n_launches += len(self._plan.nodes) + 1
        for node in self._plan.nodes:
            node.run()
        self._run_boundary()

    def _await_device(self) -> None:
        """Wait for the step boundary by polling its event: no thread blocks in the driver (E-6)."""
        event = self._passed
        event.record(self.stream)
        end = time.monotonic() + STEP_DEADLINE_S
        while not event.query():
            if time.monotonic() > end:
                raise EngineDead(f"a step has not ended within {STEP_DEADLINE_S:.0f} s; the process must be restarted")
            time.sleep(0)
        self._wake()

    # Beside

    def beside(self, job: Callable[[], None]) -> EventWork:
        return self._on(self.side, job)

    def _on(self, stream: torch.cuda.Stream, job: Callable[[], None]) -> EventWork:
        with torch.inference_mode(), torch.cuda.stream(stream):
            if self._tables.grammars is not None:
                self._tables.grammars.flush()  # the admission that names a new one comes after this job
            job()
            event = self._pool.event()
            event.record(stream)
        return EventWork(event, self._pool)

    def health(self) -> None:
        """EngineDead where the device no longer answers (E-2). Asked on this start's own streams: another engine of the
        process may be in the middle of its loop."""
        try:
            self.stream.synchronize()
            with torch.cuda.stream(self.side):
                total = int(torch.ones(1, device=self.device).sum())
            if total != 1:
                raise EngineDead("the GPU no longer adds; the process must be restarted")
        except RuntimeError as error:
            raise EngineDead(
                f"the GPU no longer answers: {first_line(error)}; the process must be restarted"
            ) from error

    def close(self) -> None:
        self._guard.allow("I-3", "destroying the executable")
        if self._pacer is not None:
            self._pacer.close()
        if self._lent:
            self._lent = False
            self._pool.take_back(self.stream, LOOP_PRIORITY)
            self._pool.take_back(self.side, SIDE_PRIORITY)
            self._pool.take_back_event(self._passed)


class DevicePaced(CudaStart):
    """What is launched once and goes from step to step by itself: over when the device has passed its event."""

    device_paced = True

    @property
    def running(self) -> bool:
        try:
            return not self._passed.query()
        except RuntimeError:  # the device has failed, and the loop with it: `failure` gives the cause
            return False

    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.running:
            if time.monotonic() > end:
                return False
            time.sleep(LEAST_NAP_S)
        return True

    def failure(self) -> BaseException | None:
        try:
            self._passed.query()
        except RuntimeError as error:
            return error
        return None
