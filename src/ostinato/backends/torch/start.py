"""The CPU's starts in torch: one thread is the device, and runs the plan's nodes in order.

What `eager` runs, and the twin of the native loop (`native/start.py`), paced by Python, which only tests run. An
engine computes on that thread, or on the main one while that waits for tokens: never on two, so that torch's workers
serve one caller and a prompt's chunk does not compete with a step. `CpuLoop`, once called, runs until no slot is live;
`CpuEager` is called for every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Literal

import torch

from ostinato.loop.cpu_device import CpuDevice
from ostinato.loop.guard import Guard
from ostinato.loop.layout import Tables, Word
from ostinato.loop.plan import Plan
from ostinato.loop.start import STEP_DEADLINE_S, Helper, Launched, next_executable
from ostinato.loop.step_boundary import StepBoundary


def torch_device(name: str = "ostinato-cpu") -> CpuDevice:
    """A thread for torch's arithmetic, with as many workers as the caller has; nothing is kept for gradients."""
    n_threads = torch.get_num_threads()

    @contextmanager
    def around() -> Iterator[None]:
        if torch.get_num_threads() != n_threads:  # it is each thread's own
            torch.set_num_threads(n_threads)
        with torch.inference_mode():
            yield

    return CpuDevice(name, around)


class CpuLoop(Launched):
    """The twin of `loop`: one call runs until no slot is live."""

    name = "loop"
    device_paced = True
    comparison: Literal["bits", "tolerance"] = "bits"

    def __init__(self, plan: Plan, tables: Tables, guard: Guard, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called on the device's thread after every step boundary: the outbox may have new entries."""
        self._plan, self._tables, self._guard, self._wake = plan, tables, guard, wake
        self._words = tables.rings.host("words")
        self._device = torch_device()
        self._boundary: StepBoundary | None = None
        self.executable = 0
        self.n_launches = 0
        self.n_instantiations = 0

    def build(self) -> None:
        self._guard.allow("I-1", "building the step again")
        self.executable = next_executable()
        self.n_instantiations += 1
        plan = self._plan
        self._boundary = StepBoundary(
            self._tables, plan_hash=plan.hash, epoch=self.executable, page_tokens=plan.page_tokens
        )

    def launch(self) -> None:
        self._guard.allow_launch()
        self.n_launches += 1
        self._launched = self._device.submit(self._steps)

    @property
    def helper(self) -> Helper:
        return self._device

    def step(self) -> None:
        self._guard.allow("I-2", "submitting a single step from the host")
        self._device.submit(self._one_step).result(STEP_DEADLINE_S)

    def beside(self, job: Callable[[], None]) -> Future[None]:
        return self._device.beside(job)

    def health(self) -> None:
        """Nothing to check: this code runs on the device itself."""

    def close(self) -> None:
        self._guard.allow("I-3", "destroying the executable")
        self._device.close()

    def _steps(self) -> Iterator[None]:
        """The loop: a step boundary, then steps as long as it says go."""
        try:
            self._pass_boundary()
            while self._words[Word.GO, 0]:
                yield
                self._one_step()
        except BaseException:
            self._wake()  # the host then calls `failure` for the cause
            raise

    def _pass_boundary(self) -> None:
        """Commit, take the inbox, decide whether to continue; then wake the host."""
        assert self._boundary is not None
        self._boundary()
        self._wake()

    def _one_step(self) -> None:
        for node in self._plan.nodes:
            node.run()
        self._pass_boundary()


class CpuEager(CpuLoop):
    """`eager`: the host asks for every step, and waits for it."""

    name = "eager"
    device_paced = False

    def __init__(self, plan: Plan, tables: Tables, guard: Guard, wake: Callable[[], None] = lambda: None) -> None:
        super().__init__(plan, tables, guard, wake)
        self._pacer = torch_device()  # the host's side: it computes nothing, it only asks

    def launch(self) -> None:
        self._guard.allow_launch()
        self._launched = self._pacer.submit(self._pace)

    def close(self) -> None:
        super().close()
        self._pacer.close()

    def step(self) -> None:
        self._device.submit(self._one_step).result(STEP_DEADLINE_S)

    def beside(self, job: Callable[[], None]) -> Future[None]:
        return self._device.submit(job)

    def _pace(self) -> None:
        self._device.submit(self._pass_boundary).result(STEP_DEADLINE_S)
        while self._words[Word.GO, 0]:
            self.n_launches += 1
            self._device.submit(self._one_step).result(STEP_DEADLINE_S)
