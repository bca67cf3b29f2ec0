"""`loop` on the CPU: one call into native code runs until no slot is live, and Python takes no part in any step.

Two threads of this process call it and wait inside it, without the interpreter's lock: one runs the loop, the other
runs jobs beside it. Both use the same thread team, which the loop hands over between two steps (team.h).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

from ostinato.backends.native.plan import NativeStep
from ostinato.errors import EngineDead
from ostinato.loop.cpu_device import LOOK_AGAIN_S, CpuDevice
from ostinato.loop.guard import Guard
from ostinato.loop.plan import Plan
from ostinato.loop.start import STEP_DEADLINE_S, Launched, next_executable


class NativeLoop(Launched):
    """The native loop over one plan."""

    name = "loop"
    device_paced = True
    comparison: Literal["bits", "tolerance"] = "tolerance"
    helper: None = None  # the team works alone

    def __init__(self, plan: Plan, native: NativeStep, guard: Guard) -> None:
        self._plan, self._native, self._guard = plan, native, guard
        self._loop_device, self._side_device = CpuDevice("ostinato-loop"), CpuDevice("ostinato-prompts")
        self.executable = 0
        self.n_launches = 0
        self.n_instantiations = 0

    def build(self) -> None:
        self._guard.allow("I-1", "building the step again")
        self.executable = next_executable()
        self.n_instantiations += 1
        self._native.built(self._plan.hash, self.executable)

    def launch(self) -> None:
        self._guard.allow_launch()
        self.n_launches += 1
        self._launched = self._loop_device.submit(self._native.run_loop)

    @property
    def running(self) -> bool:
        return super().running and self._loop_device.alive

    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self._loop_device.alive:  # checked repeatedly: a thread that is killed reports nothing
            left = end - time.monotonic()
            if super().wait(max(0.0, min(left, LOOK_AGAIN_S))):
                return True
            if left <= 0:
                return False
        return True

    def failure(self) -> BaseException | None:
        if self._launched is not None and not self._launched.done() and not self._loop_device.alive:
            return EngineDead("the thread that ran the loop was killed")
        return super().failure()

    def step(self) -> None:
        self._guard.allow("I-2", "submitting a single step from the host")
        self._loop_device.submit(self._native.step).result(STEP_DEADLINE_S)

    def beside(self, job: Callable[[], None]) -> Future[None]:
        return self._side_device.submit(job)  # the job acquires the team by itself

    def health(self) -> None:
        """Nothing to check: this code runs on the device itself."""

    def close(self) -> None:
        self._guard.allow("I-3", "destroying the executable")
        ended = [device.close() for device in (self._loop_device, self._side_device)]
        if all(ended):  # else a thread may still be inside it
            self._native.close()
