"""What every way to run a plan offers: build once, launch, and work beside the loop."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Final, Literal, Protocol

_EXECUTABLES: Final = count(1)


def next_executable() -> int:
    """A number that no executable of this process has had."""
    return next(_EXECUTABLES)


class Work(Protocol):
    """Something that runs beside the loop, on the same device."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""

    def result(self, timeout: float | None = None) -> None:
        """Wait for its end; raises what it raised."""


class Start(Protocol):
    """One way to run a plan. `device_paced`: the device goes from step to step by itself."""

    name: str
    device_paced: bool
    comparison: Literal["bits", "tolerance"]  # with `eager`: whether it shares its arithmetic
    executable: int  # which one it runs: a number of its own for every build; 0 before the first
    n_launches: int  # of anything the host launched to decode: one a loop, one a step, or one a node
    n_instantiations: int

    def build(self) -> None:
        """Make the executable."""

    def launch(self) -> None:
        """Begin: a border, then steps while it says go. Returns at once."""

    @property
    def running(self) -> bool:
        """Whether what was launched has not ended yet."""

    def wait(self, seconds: float) -> bool:
        """Wait until what was launched has ended; False when it has not within this time."""

    def step(self) -> None:
        """One step, paced by the host, to its end: for comparisons."""

    def beside(self, job: Callable[[], None]) -> Work:
        """Run a job on the device beside the loop; no more than one between two steps."""

    def failure(self) -> BaseException | None:
        """What a launch died of, if it did."""

    def lend(self) -> None:
        """The caller, on the main thread, is about to wait for tokens, and will `help`."""

    def help(self) -> bool:
        """Do a part of the device's work in place of waiting for it; False where there is none, or it has its own."""

    def health(self) -> None:
        """EngineDead where the device no longer answers (E-2)."""

    def close(self) -> None:
        """Give everything back; nothing may be running."""
