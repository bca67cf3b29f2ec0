"""The interface of every way to run a plan: build once, launch, and run jobs beside the loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Final, Literal, Protocol

STEP_DEADLINE_S: Final = 600.0  # for one step that the host waits for; a large model on a slow machine takes seconds
_EXECUTABLES: Final = count(1)


def next_executable() -> int:
    """A number that no other executable of this process has."""
    return next(_EXECUTABLES)


class PendingWork(Protocol):
    """A job that runs beside the loop, on the same device."""

    def done(self) -> bool:
        """Whether it has ended, with success or failure."""

    def result(self, timeout: float | None = None) -> None:
        """Wait for its end; raises what it raised."""


class Helper(Protocol):
    """Lets a caller that waits for tokens on the main thread run part of the device's work meanwhile."""

    def lend(self) -> None:
        """The caller, on the main thread, is about to wait, and will `help`."""

    def help(self) -> bool:
        """Do a part of the work on the calling thread; False where there is none."""


class Launched:
    """The last launch, for starts that run it on a thread of this process."""

    alone = False
    _launched: Future[None] | None = None

    def synchronize(self) -> None:
        """Nothing to wait for: the device's memory is host memory."""

    @property
    def running(self) -> bool:
        return self._launched is not None and not self._launched.done()

    def wait(self, seconds: float) -> bool:
        if self._launched is None:
            return True
        try:
            self._launched.exception(seconds)
        except TimeoutError:
            return False
        return True

    def failure(self) -> BaseException | None:
        launched = self._launched
        return launched.exception() if launched is not None and launched.done() else None


class Start(Protocol):
    """One way to run a plan. `device_paced`: the device goes from step to step by itself."""

    name: str
    device_paced: bool
    alone: bool  # whether a loop must yield before a job can run
    comparison: Literal["bits", "tolerance"]  # with `eager`: whether it shares its arithmetic
    executable: int  # the number of the executable that it runs, new for every build; 0 before the first
    n_launches: int  # launches by the host to decode: one per loop, per step or per node
    n_instantiations: int

    @property
    def helper(self) -> Helper | None:
        """None where the device needs no help from the main thread."""

    def build(self) -> None:
        """Make the executable."""

    def synchronize(self) -> None:
        """Wait until earlier writes to the device's memory have arrived; a launch does not wait for them."""

    def launch(self) -> None:
        """Start the loop: a step boundary, then steps while its GO word is set. Returns at once."""

    @property
    def running(self) -> bool:
        """Whether what was launched has not ended yet."""

    def wait(self, seconds: float) -> bool:
        """Wait until what was launched has ended; False when it has not within this time."""

    def step(self) -> None:
        """One step, paced by the host, to its end: for comparisons."""

    def beside(self, job: Callable[[], None]) -> PendingWork:
        """Run a job on the device beside the loop, or after it where it runs `alone`; at most one between two steps."""

    def failure(self) -> BaseException | None:
        """The exception that ended the last launch; None if there was none."""

    def health(self) -> None:
        """EngineDead where the device no longer answers (E-2)."""

    def close(self) -> None:
        """Release all memory and threads; nothing may be running."""
