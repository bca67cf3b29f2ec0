"""A thread that stands for a CPU as a device: it runs what it is given, in order, and jobs beside a loop between steps.

The starts in torch do all their arithmetic on one, and the native loop waits inside native code on two.
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

    def __init__(
        self, name: str = "ostinato-cpu", around: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """`around` is entered by whoever does the turns, before the first of them."""
        self._changed = threading.Condition()
        self._main: deque[tuple[Job, Future[None]]] = deque()
        self._beside: deque[tuple[Job, Future[None]]] = deque()
        self._playing: tuple[Iterator[None], Future[None]] | None = None
        self._at_boundary = False  # whether a job beside the loop may have its turn
        self._baton = threading.Lock()  # who has it does the turns
        self._lent_until = 0.0
        self._closed = False
        self._around = around
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
            with self._around(), interrupts_later():
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
        with self._around():
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
