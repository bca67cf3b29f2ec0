"""What every way to run a plan offers: build once, launch, and work beside the loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Final, Literal, Protocol

STEP_DEADLINE_S: Final = 600.0  # for one step that the host waits for; a large model on a slow machine needs seconds
_EXECUTABLES: Final = count(1)


def next_executable() -> int:
    """A number that no executable of this process has had."""
    return next(_EXECUTABLES)


class PendingWork(Protocol):
    """Something that runs beside the loop, on the same device."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""

    def result(self, timeout: float | None = None) -> None:
        """Wait for its end; raises what it raised."""


class Helper(Protocol):
    """Lets whoever waits for tokens on the main thread do a part of the device's work meanwhile."""

    def lend(self) -> None:
        """The caller, on the main thread, is about to wait, and will `help`."""

    def help(self) -> bool:
        """Do a part of the work on the calling thread; False where there is none."""


class Launched:
    """What was launched last, where a thread of ours plays it."""

    alone = False
    _launched: Future[None] | None = None

    def synchronize(self) -> None:
        """The host's own memory: what was written is there."""

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
    executable: int  # which one it runs: a number of its own for every build; 0 before the first
    n_launches: int  # of anything the host launched to decode: one a loop, one a step, or one a node
    n_instantiations: int

    @property
    def helper(self) -> Helper | None:
        """None where the device works alone."""

    def build(self) -> None:
        """Make the executable."""

    def synchronize(self) -> None:
        """Wait until the device has what was written to its memory: a launch does not wait for who wrote it."""

    def launch(self) -> None:
        """Begin: a step boundary, then steps while it says go. Returns at once."""

    @property
    def running(self) -> bool:
        """Whether what was launched has not ended yet."""

    def wait(self, seconds: float) -> bool:
        """Wait until what was launched has ended; False when it has not within this time."""

    def step(self) -> None:
        """One step, paced by the host, to its end: for comparisons."""

    def beside(self, job: Callable[[], None]) -> PendingWork:
        """Run a job on the device beside the loop, or behind it where it plays alone; one between two steps at most."""

    def failure(self) -> BaseException | None:
        """What a launch died of, if it did."""

    def health(self) -> None:
        """EngineDead where the device no longer answers (E-2)."""

    def close(self) -> None:
        """Give everything back; nothing may be running."""
