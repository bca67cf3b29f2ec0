"""A CPU as a device: a thread that runs submitted jobs in order, and jobs beside a loop between two of its steps.

The torch starts do all their arithmetic on one such thread; the native loop uses two, which wait in native code.
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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

LENT_S: Final = 0.005  # how long the device thread leaves the next turn to a helper
LOOK_AGAIN_S: Final = 0.1  # how long `close` joins the thread before it checks for a kill
CLOSE_S: Final = 60.0  # the longest wait for a thread's last job
TASKS: Final = "/proc/self/task"  # on Linux, one folder per thread


Job = Callable[[], "Iterator[None] | None"]  # a loop returns an iterator over its steps


class CpuDevice:
    """A thread that runs jobs in order of arrival, one turn at a time; jobs beside a loop run at its step boundaries.

    A caller that waits for tokens on the main thread may run turns in place of this thread (`help`): OpenMP's workers
    serve the main thread faster than any other, and that thread would otherwise be idle.
    """

    def __init__(
        self, name: str = "ostinato-cpu", around: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Every thread that runs turns enters `around` first."""
        self._changed = threading.Condition()
        self._main: deque[tuple[Job, Future[None]]] = deque()
        self._beside: deque[tuple[Job, Future[None]]] = deque()
        self._loop_job: tuple[Iterator[None], Future[None]] | None = None
        self._at_boundary = False  # whether a job beside the loop may run next
        self._turn_lock = threading.Lock()  # held by the thread that runs a turn
        self._lent_until = 0.0
        self._close_by: float | None = None  # set by the first `close`, so that a second one does not wait again
        self._around = around
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread has neither ended nor been killed. Python does not notice a kill; the system does."""
        killed = os.path.isdir(TASKS) and not os.path.exists(f"{TASKS}/{self._thread.native_id}")
        return self._thread.is_alive() and not killed

    def submit(self, job: Job) -> Future[None]:
        """Run a job: a step, or a loop, which is an iterator over its steps."""
        return self._put(self._main, job)

    def beside(self, job: Callable[[], None]) -> Future[None]:
        """Run a job between two steps of the running loop, or at once where none runs."""
        return self._put(self._beside, job)

    def lend(self, seconds: float = LENT_S) -> None:
        """Leave the turns to the main thread, which is about to wait, for this many seconds."""
        self._lent_until = time.monotonic() + seconds

    def help(self) -> bool:
        """If the caller is the main thread, run one turn on it; False where no turn was run."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self.lend()
        if not self._turn_lock.acquire(blocking=False):
            return False
        self.lend(math.inf)  # for as long as the turn takes
        try:
            with self._around(), interrupts_later():
                return self._turn()
        finally:
            self._turn_lock.release()
            self.lend()

    def close(self) -> bool:
        """End the thread, after all waiting jobs have run; False where they take longer than its deadline."""
        with self._changed:
            self._close_by = end = self._close_by or time.monotonic() + CLOSE_S
            self._lent_until = 0.0
            self._changed.notify()
        while threading.current_thread() is not self._thread and self.alive:
            if time.monotonic() > end:
                return False
            self._thread.join(LOOK_AGAIN_S)
        return True

    def _put(self, queue: deque[tuple[Job, Future[None]]], job: Job) -> Future[None]:
        future: Future[None] = Future()
        with self._changed:
            queue.append((job, future))
            self._changed.notify()
        return future

    @property
    def _has_work(self) -> bool:
        return bool(self._loop_job or self._main or self._beside)

    def _serve(self) -> None:
        with self._around():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._has_work or self._close_by)
                    if not self._has_work:
                        return
                    lent_s = self._lent_until - time.monotonic()
                    if lent_s > 0:
                        self._changed.wait(min(lent_s, LENT_S))
                        continue
                with self._turn_lock:
                    self._turn()

    def _turn(self) -> bool:
        """Run a waiting job or one step of the running loop, alternately; False where there is neither."""
        with self._changed:
            taken = None
            if self._beside and (self._loop_job is None or self._at_boundary):
                taken = self._beside.popleft()
            elif self._loop_job is None and self._main:
                taken = self._main.popleft()
        if taken is not None:
            self._at_boundary = False
            self._begin(*taken)
            return True
        if self._loop_job is None:
            return False
        self._at_boundary = True
        steps, future = self._loop_job
        try:
            next(steps)
        except StopIteration:
            self._loop_job = None
            future.set_result(None)
        except BaseException as error:  # raised to the caller that waits for the future
            self._loop_job = None
            future.set_exception(error)
        return True

    def _begin(self, job: Job, future: Future[None]) -> None:
        try:
            steps = job()
        except BaseException as error:  # raised to the caller that waits for the future
            future.set_exception(error)
            return
        if isinstance(steps, Iterator):
            self._loop_job = steps, future
        else:
            future.set_result(None)


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Delay SIGINT until the block has ended, so that it cannot interrupt a step half-way."""
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *what: pressed.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)
