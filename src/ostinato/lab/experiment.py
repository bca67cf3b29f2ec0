"""Experiments: the starts of a machine side by side, sweeps over one size, and the arithmetic beside the figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ostinato.errors import BadInput, BadOption, HardwareCannot
from ostinato.lab.model import Workload, stops_paying_us
from ostinato.lab.work import LabMachine, Timing

REPEATS: Final = 5
BUSY_SPREAD: Final = 0.2  # of runs of the same work
LENGTHS: Final = tuple(1 << power for power in range(8, 25, 2))  # of the vector, for the picture
ASKED_GAIN: Final = 1.2  # of the persistent start over the plain loop, at small sizes
SMALL_N: Final = 1 << 18  # up to which a pass is short beside a launch
FORMAT: Final = "ostinato lab 1"
_PARTS: Final = frozenset({"date", "machine", "costs", "stops_paying_us", "rows"})  # of a result, that are compared


@dataclass(frozen=True, slots=True)
class ExperimentRow:
    """One work in all starts, with the formulas' prediction for each."""

    work: Workload
    body_us: float
    timings: tuple[Timing, ...]  # the first is the baseline
    predicted_us: dict[str, float]  # of a step
    calibration_spread: float = 0.0

    @property
    def baseline(self) -> Timing:
        return self.timings[0]

    def speedup(self, timing: Timing) -> float:
        return self.baseline.us / timing.us

    def predicted_speedup(self, start: str) -> float:
        return self.predicted_us[self.baseline.start] / self.predicted_us[start]

    @property
    def overhead(self) -> tuple[float, float]:
        """The part of the baseline's step that is not its bodies: predicted and measured."""
        bodies = self.work.kernels * self.body_us
        predicted = self.predicted_us[self.baseline.start]
        return 1 - bodies / predicted, 1 - bodies / self.baseline.us

    @property
    def spread(self) -> float:
        """How far the medians are above the least, at most: of the calibration, and of this work."""
        return max(self.calibration_spread, *(timing.spread for timing in self.timings))

    @property
    def is_busy(self) -> bool:
        """Whether other programs disturbed the figures so much that a prediction cannot be compared with them."""
        return self.spread > BUSY_SPREAD

    def record(self) -> dict[str, Any]:
        predicted, measured = self.overhead
        return {
            **asdict(self.work),
            "body_us": self.body_us,
            "overhead_predicted": predicted,
            "overhead_measured": measured,
            "spread": self.spread,
            "starts": {
                timing.start: {
                    "us_per_step": timing.us,
                    "tokens_s": timing.tokens_s,
                    "speedup": self.speedup(timing),
                    "predicted_us": self.predicted_us[timing.start],
                    "predicted_speedup": self.predicted_speedup(timing.start),
                    "launches": timing.launches,
                    "max_abs_err": timing.max_abs_err,
                    "least_us": min(timing.step_us),
                    "most_us": max(timing.step_us),
                }
                for timing in self.timings
            },
        }


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A figure that the laboratory asks of itself; `says`: what was found, and why it is not met, where it is not."""

    asked: str
    is_met: bool
    says: str


def accepted(machine: LabMachine, rows: Sequence[ExperimentRow]) -> list[Acceptance]:
    """The laboratory's own acceptance figures over these rows."""
    return [_right(rows), *_gains(machine, rows)]


def _right(rows: Sequence[ExperimentRow]) -> Acceptance:
    """A wrong result ends a measurement, so what is in the rows was right."""
    timings = [timing for row in rows for timing in row.timings]
    worst = max(timings, key=lambda timing: timing.max_abs_err / timing.error_bar, default=None)
    found = "" if worst is None else f", at most {worst.max_abs_err / worst.error_bar:.0%} of what rounding may add"
    return Acceptance("every result equals the closed form", bool(timings), f"{len(timings)} results{found}")


def _gains(machine: LabMachine, rows: Sequence[ExperimentRow]) -> Iterator[Acceptance]:
    start, baseline = machine.persistent, machine.starts[0]
    asked = f"{start} at least {ASKED_GAIN} times {baseline} up to n={SMALL_N}"
    small = [row for row in rows if row.work.n <= SMALL_N]
    if start in machine.why_not:
        yield Acceptance(asked, False, f"{start} cannot run here: {machine.why_not[start]}")
    elif not small:
        yield Acceptance(asked, False, f"no vector up to n={SMALL_N} was measured")
    for row in small if start in machine.starts else ():
        (timing,) = (one for one in row.timings if one.start == start)
        gain = row.speedup(timing)
        work = f"n={row.work.n}, {row.work.kernels} kernels a step, {row.work.body}: {gain:.2f} times"
        is_met = gain >= ASKED_GAIN
        yield Acceptance(asked, is_met, work if is_met else f"{work}, because {_why_no_gain(machine, row, timing)}")


def _why_no_gain(machine: LabMachine, row: ExperimentRow, timing: Timing) -> str:
    if row.is_busy:
        return (
            f"the machine is busy: the same work took {row.spread:.0%} longer in half of its runs than in the fastest"
        )
    start, predicted = machine.persistent, row.predicted_speedup(machine.persistent)
    costs = machine.costs(row.work)
    plain, staying = costs[machine.starts[0]], costs[start]
    a_launch = max(plain.kernel_us, plain.submit_kernel_us - row.body_us)
    parts = (
        f"a kernel takes {row.body_us:.2f} us by itself, its launch adds {a_launch:.2f} us, and {start} adds "
        f"{staying.kernel_us:.2f} us in its place"
    )
    if predicted < ASKED_GAIN:
        return f"{parts}: no more than {predicted:.2f} times is predicted"
    took = f"a step took {timing.us:.2f} us where {row.predicted_us[start]:.2f} us are predicted"
    return f"{parts}, so that {predicted:.2f} times is predicted, and {took}"


def measured(machine: LabMachine, work: Workload, repeats: int = REPEATS) -> ExperimentRow:
    """One work in every start of a machine, baseline first, each checked; predictions are computed first."""
    work = machine.settle(work)
    costs, body_us = machine.costs(work), machine.body_us(work)
    predicted = {start: cost.step(work.kernels, body_us) for start, cost in costs.items()}
    timings = tuple(machine.time(work, start, repeats) for start in machine.starts)
    return ExperimentRow(work, body_us, timings, predicted, machine.spread)


def swept(
    machine: LabMachine, work: Workload, what: str, values: Sequence[int], repeats: int = REPEATS
) -> Iterator[ExperimentRow | tuple[Workload, str]]:
    """A row for each value of one size; for a work that this machine refuses, the message instead of the row."""
    if what not in machine.sizes:
        raise BadOption(f"--over is {what!r}; on this machine: {', '.join(machine.sizes)}")
    for value in values:
        one = replace(work, **{what: value})  # type: ignore[arg-type]  # a size, by its name
        try:
            yield measured(machine, one if what == "steps" else _shortened(one), repeats)
        except (BadInput, HardwareCannot) as error:
            yield one, str(error)


def _shortened(work: Workload) -> Workload:
    """Long vectors need no more steps to be measured well than what takes a second or so."""
    return replace(work, steps=max(20, min(work.steps, (1 << 31) // (work.n * work.kernels))))


def result(
    machine: LabMachine,
    work: Workload,
    rows: Sequence[ExperimentRow],
    *,
    decode: Sequence[dict[str, Any]] = (),
    refused_modes: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Everything that an experiment found, as one value that can be kept and compared; costs are those of `work`.
    `decode`: the engine's own step in each mode; `refused_modes`: why it could not run in others."""
    costs = machine.costs(work)
    baseline = machine.starts[0]
    return {
        "format": FORMAT,
        "date": date.today().isoformat(),
        "question": "how much of a step is launch overhead here, and what takes it away?",
        "machine": machine.facts(),
        "why_not": machine.why_not | {f"the engine's own step, {mode}": why for mode, why in refused_modes.items()},
        "costs": {start: asdict(cost) for start, cost in costs.items()},
        "stops_paying_us": {
            start: stops_paying_us(costs[baseline], cost, work.kernels)
            for start, cost in costs.items()
            if start != baseline
        },
        "rows": [row.record() for row in rows],
        "acceptance": [asdict(one) for one in accepted(machine, rows)],
        "decode": list(decode),
    }


def read_result(path: Path) -> dict[str, Any]:
    """A result that was kept; refused where it is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or not found.keys() >= _PARTS:
        raise BadInput(f"{path}: not a result of `ostinato lab`, or not a whole one")
    return found


def compared(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, ...]]:
    """Two results side by side: what, the first, the second, and the second over the first."""
    out: list[tuple[str, ...]] = []

    def add(what: str, a: float | None, b: float | None, unit: str) -> None:
        shown = ["-" if v is None else f"{v:.3g} {unit}".strip() for v in (a, b)]
        out.append((what, *shown, f"{b / a:.2f}" if a and b else "-"))

    for start in dict.fromkeys([*first["costs"], *second["costs"]]):
        for key, name in (
            ("kernel_us", "a kernel"),
            ("step_us", "a step"),
            ("submit_kernel_us", "submitting a kernel"),
        ):
            a, b = (r["costs"].get(start, {}).get(key) for r in (first, second))
            if a or b:
                add(f"{start}: {name} adds", a, b, "us")
    for start in dict.fromkeys([*first["stops_paying_us"], *second["stops_paying_us"]]):
        a, b = (r["stops_paying_us"].get(start) for r in (first, second))
        add(f"{start}: pays for kernels up to", a, b, "us")
    keys = ("n", "steps", "kernels", "threads", "body")
    by_work = {tuple(row[key] for key in keys): row for row in second["rows"]}
    for row in first["rows"]:
        other = by_work.get(tuple(row[key] for key in keys))
        if other is None:
            continue
        label = f"n={row['n']} kernels={row['kernels']} {row['body']}"
        add(f"{label}: overhead of the baseline", row["overhead_measured"], other["overhead_measured"], "")
        for start in row["starts"]:
            if start in other["starts"]:
                a, b = (r["starts"][start]["us_per_step"] for r in (row, other))
                add(f"{label}: {start}", a, b, "us a step")
    return out
