"""Decode mode: enter, trigger, exit, and what may not happen between (I-1 to I-10).

Entering builds the executable, or takes the existing one, and locks it; a trigger is one launch; exit waits for the
loop's end and unlocks. Executable, plan and addresses are compared at every trigger and at exit, and the loop itself
compares the plan's hash and the epoch at every step: a difference is fatal. docs/decode-mode.md describes each rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ostinato.errors import DecodeInvariantError, EngineDead, PlanStale
from ostinato.loop.guard import Guard
from ostinato.loop.layout import Fault, Tables, Word
from ostinato.loop.plan import Buffer, Plan
from ostinato.loop.start import Start

EXIT_DEADLINE_S: Final = 600.0  # without a step
MUST_RESTART: Final = "this engine is dead and the process must be restarted"


class Entered(NamedTuple):
    """What may not change before exit (I-10)."""

    executable: int
    plan: Plan
    versions: tuple[int | None, ...]  # of the plan's weights


class DecodeMode:
    """The lock around one plan and one start."""

    def __init__(self, plan: Plan, start: Start, tables: Tables, guard: Guard, beside: Sequence[Buffer] = ()) -> None:
        """`beside`: what launches beside the loop are bound to, where they are captured too."""
        self._plan, self._start, self._tables, self._guard = plan, start, tables, guard
        self._beside = tuple(beside)
        self._entered: Entered | None = None
        self._dead: str | None = None
        self.n_triggers = 0

    # Enter, trigger, exit

    def enter(self) -> None:
        """Build the executable, or take the existing one; check the plan's buffers; lock."""
        self._check_alive()
        self._guard.allow("I-9", "entering decode mode again")
        if self._start.executable == 0:
            self._start.build()
        self._plan.check()
        # At every step the loop compares these two with the values that its step boundary was built with.
        self._tables.table["plan_hash"][0] = self._plan.hash
        self._tables.table["epoch"][0] = self._start.executable
        self._start.synchronize()
        self._entered = Entered(self._start.executable, self._plan, self._versions())
        self._guard.lock()

    def trigger(self) -> None:
        """Launch the loop once; it runs until there are no live slots. Refused while it runs (I-2)."""
        self._check_alive()
        if self._entered is None:
            raise DecodeInvariantError("I-9", "a trigger needs decode mode; enter it first")
        if self._start.running:
            raise DecodeInvariantError("I-2", "the loop runs already: tokens are not submitted one by one")
        self.check()
        self.n_triggers += 1
        with self._guard.launching():
            self._start.launch()

    def exit(self, seconds: float = EXIT_DEADLINE_S) -> None:
        """Wait for the loop to end, check that nothing has changed and that the device still answers, and unlock.
        A loop that ran no step for so many seconds is dead. Outside decode mode, do nothing."""
        if self._entered is None:
            return
        ended, entered = self._wait(seconds), self._entered
        self._entered = None  # also after a time-out: a second exit must not wait again
        if not ended:
            self.die(f"the loop ran no step for {seconds:.0f} s; {MUST_RESTART}")
            raise EngineDead(self._dead)
        self._guard.unlock()
        if self._dead is None:
            self._compare(entered)
            self._ask_health()

    @property
    def on(self) -> bool:
        return self._entered is not None

    @property
    def running(self) -> bool:
        return self._start.running

    # Checks

    def check(self) -> None:
        """Compare executable, plan and addresses with those at entry; a difference is fatal (I-10)."""
        if self._entered is not None:
            self._compare(self._entered)

    def fault(self) -> str | None:
        """Why this engine is dead: the fault that the loop or a check found. None while there is no fault."""
        if self._dead is None:
            found = int(self._tables.rings.host("words")[Word.FAULT, 0])
            failure = self._start.failure()
            if found != Fault.NONE:
                self.die(f"the loop found a fault ({Fault(found).name.lower()}); {MUST_RESTART}")  # I-10
            elif failure is not None:
                first, *_advice = str(failure).splitlines() or [
                    type(failure).__name__
                ]  # torch adds lines for its developers
                self.die(f"the step failed: {first}; {MUST_RESTART}")
        return self._dead

    def die(self, why: str) -> None:
        """Mark this engine as dead: nothing runs on it any more. The first reason is kept."""
        self._dead = self._dead or why

    # What may be changed, outside decode mode only

    def replace(self, plan: Plan, start: Start) -> None:
        """Run another plan, with a start of its own, from now on (I-7, I-9)."""
        self._guard.allow("I-7", "placing the plan anew")
        self._start.close()
        self._plan, self._start = plan, start

    def step(self) -> None:
        """Run one step paced by the host: forward, sampling and commit (I-2, I-8)."""
        self._guard.allow("I-8", "a step in which the host takes part")
        self._start.step()

    # Inside

    def _wait(self, seconds: float) -> bool:
        """Wait for the loop's end; False where it runs no step for so long."""
        n_steps = self._n_steps()
        while not self._start.wait(seconds):
            before, n_steps = n_steps, self._n_steps()
            if n_steps == before:
                return False
        return True

    def _n_steps(self) -> int:
        return int(self._tables.rings.host("words")[Word.STEPS, 0])

    def _check_alive(self) -> None:
        dead = self.fault()
        if dead is not None:
            raise EngineDead(dead)

    def _ask_health(self) -> None:
        """Check the device: a kernel's failure may show only now, and then its results must not be used (E-2)."""
        try:
            self._start.health()
        except EngineDead as dead:
            self.die(str(dead))
            raise

    def _versions(self) -> tuple[int | None, ...]:
        return tuple(buffer.version for buffer in self._plan.weights)

    def _compare(self, entered: Entered) -> None:
        try:
            if self._plan is not entered.plan:
                raise PlanStale("I-10", "the plan is not the one that decode mode was entered with")
            self._plan.check()
            for buffer in self._beside:
                buffer.check()
            if self._start.executable != entered.executable:
                raise PlanStale(
                    "I-10", f"executable {entered.executable} was entered with, and it is {self._start.executable} now"
                )
            for buffer, before, now in zip(self._plan.weights, entered.versions, self._versions(), strict=True):
                if before != now:
                    raise PlanStale("I-5", f"the host has written to {buffer.name} while decode mode is on")
        except PlanStale as drift:
            self.die(f"{drift}; {MUST_RESTART}")
            raise
