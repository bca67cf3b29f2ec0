"""The CPU's starts in torch: one thread is the device, and plays the plan's nodes in order.

What `eager` runs, and the twin of the native loop (`native.py`), paced by Python, which only tests run. All arithmetic
of an engine runs on that thread, or on the main one while that waits for tokens: never on two, so that torch's workers
serve one caller and a prompt's chunk does not fight a step. `CpuLoop` plays until nobody lives, once called; `CpuEager`
is called for every step. The native loop has its two threads from here as well.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final, Literal

import torch

from ostinato.loop.guard import Guard
from ostinato.loop.layout import Tables, Word
from ostinato.loop.plan import Plan
from ostinato.loop.start import STEP_DEADLINE_S, Helper, Launched, next_executable
from ostinato.loop.step_boundary import StepBoundary

LENT_S: Final = 0.005  # how long a helper may be away between two turns
LOOK_AGAIN_S: Final = 0.1  # how long somebody joins a thread before asking whether it was killed
TASKS: Final = "/proc/self/task"  # a folder for each thread, where the system is Linux


Job = Callable[[], "Iterator[None] | None"]  # a loop gives an iterator over its steps


class CpuDevice:
    """A thread that runs what it is given, in order of arrival, a turn at a time; jobs beside a loop at its step
    boundaries.

    Whoever waits for tokens on the main thread may do the turns in its place (`help`): OpenMP's workers serve the main
    thread faster than any other, and its waiting costs nothing.
    """

    def __init__(self, name: str = "ostinato-cpu") -> None:
        self._changed = threading.Condition()
        self._main: deque[tuple[Job, Future[None]]] = deque()
        self._beside: deque[tuple[Job, Future[None]]] = deque()
        self._playing: tuple[Iterator[None], Future[None]] | None = None
        self._at_boundary = False  # whether a job beside the loop may have its turn
        self._baton = threading.Lock()  # who has it does the turns
        self._lent_until = 0.0
        self._closed = False
        self._n_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its thread has neither ended nor been killed: of that the system knows, and Python does not."""
        killed = os.path.isdir(TASKS) and not os.path.exists(f"{TASKS}/{self._thread.native_id}")
        return self._thread.is_alive() and not killed

    def submit(self, job: Job) -> Future[None]:
        """Run a job: a step, or a loop, which is an iterator over its steps."""
        return self._put(self._main, job)

    def beside(self, job: Callable[[], None]) -> Future[None]:
        """Run a job between two steps of whatever runs, or now."""
        return self._put(self._beside, job)

    def lend(self, seconds: float = LENT_S) -> None:
        """Somebody on the main thread is about to wait: the turns are left to it for so long."""
        self._lent_until = time.monotonic() + seconds

    def help(self) -> bool:
        """Do one turn on the calling thread, if it is the main one; False where there was none to do."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self.lend()
        if not self._baton.acquire(blocking=False):
            return False
        self.lend(math.inf)  # for as long as the turn takes
        try:
            with torch.inference_mode(), interrupts_later():
                return self._turn()
        finally:
            self._baton.release()
            self.lend()

    def close(self) -> None:
        """End the thread; what waits is run first."""
        with self._changed:
            self._closed = True
            self._lent_until = 0.0
            self._changed.notify()
        while threading.current_thread() is not self._thread and self.alive:
            self._thread.join(LOOK_AGAIN_S)

    def _put(self, line: deque[tuple[Job, Future[None]]], job: Job) -> Future[None]:
        future: Future[None] = Future()
        with self._changed:
            line.append((job, future))
            self._changed.notify()
        return future

    @property
    def _has_work(self) -> bool:
        return bool(self._playing or self._main or self._beside)

    def _serve(self) -> None:
        torch.set_num_threads(self._n_threads)
        with torch.inference_mode():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._has_work or self._closed)
                    if not self._has_work:
                        return
                    lent_s = self._lent_until - time.monotonic()
                    if lent_s > 0:
                        self._changed.wait(min(lent_s, LENT_S))
                        continue
                with self._baton:
                    self._turn()

    def _turn(self) -> bool:
        """A job that waits, or a step of what plays, turn and turn about."""
        with self._changed:
            taken = None
            if self._beside and (self._playing is None or self._at_boundary):
                taken = self._beside.popleft()
            elif self._playing is None and self._main:
                taken = self._main.popleft()
        if taken is not None:
            self._at_boundary = False
            self._begin(*taken)
            return True
        if self._playing is None:
            return False
        self._at_boundary = True
        steps, future = self._playing
        try:
            next(steps)
        except StopIteration:
            self._playing = None
            future.set_result(None)
        except BaseException as error:  # whoever waits for the job is told
            self._playing = None
            future.set_exception(error)
        return True

    def _begin(self, job: Job, future: Future[None]) -> None:
        try:
            steps = job()
        except BaseException as error:  # whoever waits for the job is told
            future.set_exception(error)
            return
        if isinstance(steps, Iterator):
            self._playing = steps, future
        else:
            future.set_result(None)


@contextmanager
def interrupts_later() -> Iterator[None]:
    """A key that would interrupt the main thread waits for the end of what it is in: half a step would be no step."""
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *what: pressed.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)


class CpuStart(Launched):
    """What the two have in common: the thread, the plan, and what was launched last."""

    name = "loop"
    device_paced = True
    comparison: Literal["bits", "tolerance"] = "bits"

    def __init__(self, plan: Plan, tables: Tables, guard: Guard, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is rung on the device's thread after every step boundary: somebody may want to look at the outbox."""
        self._plan, self._tables, self._guard, self._wake = plan, tables, guard, wake
        self._words = tables.rings.host("words")
        self._device = CpuDevice()
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
        self.n_launches += 1
        self._launched = self._device.submit(self._play)

    @property
    def helper(self) -> Helper:
        return self._device

    def step(self) -> None:
        self._guard.allow("I-2", "submitting a single step from the host")
        self._device.submit(self._one_step).result(STEP_DEADLINE_S)

    def beside(self, job: Callable[[], None]) -> Future[None]:
        return self._device.beside(job)

    def health(self) -> None:
        """A CPU that did not answer could not say so."""

    def close(self) -> None:
        self._guard.allow("I-3", "destroying the executable")
        self._device.close()

    def _play(self) -> Iterator[None]:
        """The loop: a step boundary, then steps as long as it says go."""
        try:
            self._pass_boundary()
            while self._words[Word.GO, 0]:
                yield
                self._one_step()
        except BaseException:
            self._wake()  # whoever listens will ask what it died of
            raise

    def _pass_boundary(self) -> None:
        """Commit, take the inbox, say whether to go on; whoever listens is told."""
        assert self._boundary is not None
        self._boundary()
        self._wake()

    def _one_step(self) -> None:
        for node in self._plan.nodes:
            node.run()
        self._pass_boundary()


class CpuLoop(CpuStart):
    """The twin of `loop`: one call plays until nobody lives."""


class CpuEager(CpuStart):
    """`eager`: the host asks for every step, and waits for it."""

    name = "eager"
    device_paced = False

    def __init__(self, plan: Plan, tables: Tables, guard: Guard, wake: Callable[[], None] = lambda: None) -> None:
        super().__init__(plan, tables, guard, wake)
        self._pacer = CpuDevice()  # the host's side: it computes nothing, it only asks

    def launch(self) -> None:
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
