"""What `ostinato verify` runs and reports: its sequences, and a comparison as a record. Nothing here prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final, Literal

from ostinato.backends.compare import Difference
from ostinato.engine.driver import GREEDY
from ostinato.errors import EngineDead
from ostinato.loop.host import OutEntry
from ostinato.models.shape import Shape
from ostinato.options import Sampling

Comparison = Literal["bits", "tolerance"]

N_SLOTS: Final = 5
N_TOKENS: Final = 12  # of the longest answer
N_LOGPROBS: Final = 5  # most likely tokens that a comparison asks for


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: what was compared with what, how, and the result. `figures` are the distances measured."""

    name: str
    against: str
    comparison: Comparison
    n_compared: int
    seconds: float
    difference: Difference | None
    figures: Mapping[str, float]

    @property
    def passed(self) -> bool:
        return self.difference is None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All checks, and the modes that cannot run here, with the reasons."""

    checks: tuple[Check, ...]
    not_run: Mapping[str, str]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def __add__(self, more: VerifyReport) -> VerifyReport:
        """Both. A check of both is listed once, from the second, unless it failed in the first."""
        again = {(check.name, check.against) for check in more.checks}
        kept = [check for check in self.checks if not check.passed or (check.name, check.against) not in again]
        return VerifyReport((*kept, *more.checks), {**self.not_run, **more.not_run})


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of a comparison, before it becomes a check."""

    n_compared: int
    difference: Difference | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    def check(self, name: str, against: str, comparison: Comparison, started: float) -> Check:
        seconds = time.perf_counter() - started
        return Check(name, against, comparison, self.n_compared, seconds, self.difference, self.figures)


@dataclass(frozen=True, slots=True)
class Case:
    """A sequence to run, and its slot."""

    slot: int
    prompt: Sequence[int]
    most: int
    sampling: Sampling


def cases_of(shape: Shape, n_tokens: int, page: int) -> list[Case]:
    """Short and long, greedy and sampled, penalised; two cross a page while they decode, and they end one by one.

    A slot in the middle stays free, so that row numbers differ from slot numbers.
    """
    warm = replace(GREEDY, temperature=0.8, top_k=40, top_p=0.95, seed=7)
    strict = replace(warm, repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1, logprobs=3, seed=8)
    wanted = [
        (0, 5, N_TOKENS, GREEDY),
        (1, page - 3, 10, warm),
        (3, 2 * page - 2, 8, GREEDY),
        (4, 1, 6, strict),
    ]
    cases = []
    for slot, length, most, sampling in wanted:
        most = max(1, min(most, shape.context - 1))
        length = max(1, min(length, shape.context - most))
        prompt = [(7919 * (i + 1) + 31 * slot) % n_tokens for i in range(length)]
        cases.append(Case(slot, prompt, most, sampling))
    return cases


def timed(name: str, against: str, comparison: Comparison, run: Callable[[], Compared]) -> Check:
    started = time.perf_counter()
    return survived(run).check(name, against, comparison, started)


def survived(run: Callable[[], Compared]) -> Compared:
    """Run a comparison; a loop that dies in it counts as a difference."""
    try:
        return run()
    except EngineDead as error:
        return Compared(0, Difference("a step", "loop", (), "alive until its end", f"dead ({error})"))


def unequal_entries(expected: Sequence[OutEntry], found: Sequence[OutEntry]) -> Difference | None:
    """Compare outbox entries, except for their times."""
    values = (
        (f"outbox.{name}", (number,), getattr(one, name), getattr(two, name))
        for number, (one, two) in enumerate(zip(expected, found, strict=False))
        for name in OutEntry._fields
        if name != "time_ns"
    )
    lengths = ("outbox", (), f"{len(expected)} entries", f"{len(found)} entries")
    return unequal("step boundary", chain(values, [lengths]))


def unequal(node: str, pairs: Iterable[tuple[str, tuple[int, ...], object, object]]) -> Difference | None:
    """The first of (name, place, expected, found) in which expected and found differ."""
    differences = (Difference(node, name, at, str(one), str(two)) for name, at, one, two in pairs if one != two)
    return next(differences, None)
