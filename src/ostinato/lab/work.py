"""The data that the laboratory works on, the float64 twin that checks a result, and the record of one."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np

from ostinato.errors import InternalError
from ostinato.lab.model import StartCost, Workload

REQUESTS: Final = 4  # of a queue that the host feeds
ERROR_BAR: Final = 1e-5  # of 500 passes over states below SMALL; of more, or larger ones, in proportion
SMALL: Final = 0.5
# The error function of v / sqrt(2): 1 - P(t) exp(-v^2 / 2) with t = 1 / (1 + slope |v|), P from its lowest power on.
ERF_SLOPE: Final = 0.3275911 * 0.5**0.5
ERF_SERIES: Final = (0.0, 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def factors_of(work: Workload, *, varied: bool) -> np.ndarray:
    """The factor of each step, float32: one for all, or one that changes from step to step."""
    steps = np.arange(work.steps)
    return (work.a * np.where(steps % 2, 0.5, 1.5) if varied else np.full(work.steps, work.a)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Data:
    """Fresh numbers for one measurement: the vector, and the state of each request before it."""

    x: np.ndarray  # float32 [n]
    start: np.ndarray  # float32 [requests, n]

    @staticmethod
    def fresh(n: int, requests: int = 1) -> Data:
        # Small, so that no sum of 500 rounded steps can be off by ERROR_BAR: each is by 2^-26 at most below SMALL.
        chance, reach = np.random.default_rng(), SMALL / 2
        return Data(
            chance.uniform(-reach, reach, n).astype(np.float32),
            chance.uniform(-reach, reach, (requests, n)).astype(np.float32),
        )

    def expected(self, work: Workload, factors: np.ndarray, requests: int = 1) -> np.ndarray:
        """What every element must be after every step, in float64; steps go to the requests in turn."""
        out = self.start.astype(np.float64)
        run_twin(work, factors, self.x.astype(np.float64), out, requests, gelu)
        return out


def run_twin(work: Workload, factors: np.ndarray, x: Any, out: Any, requests: int, gelu: Callable[[Any], Any]) -> None:
    """All steps over the states `out` [requests, n], in place; x and out are arrays of any library, float64."""
    for request in range(requests):
        own = factors[request::requests].astype(np.float64)
        if work.body == "axpy":
            out[request] += work.kernels * float(own.sum()) * x
            continue
        for a in np.repeat(own, work.kernels).tolist():
            out[request] += a * gelu(out[request] + x)


def gelu(v: np.ndarray) -> np.ndarray:
    """v times the normal distribution's share below v, to 1e-7 of it (Abramowitz and Stegun, 7.1.26)."""
    t = 1 / (1 + ERF_SLOPE * np.abs(v))
    rest = np.polynomial.polynomial.polyval(t, ERF_SERIES) * np.exp(-0.5 * v * v)
    found: np.ndarray = 0.5 * v * (1 + np.copysign(1 - rest, v))
    return found


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one start took for some work, by the clock of the device that did it."""

    start: str
    work: Workload
    step_us: tuple[float, ...]  # of each repeat
    max_abs_err: float
    largest: float  # of what should come out
    launches: int  # that the host made for all steps

    @property
    def us(self) -> float:
        return statistics.median(self.step_us)

    @property
    def tokens_s(self) -> float:
        return 1e6 / self.us

    @property
    def spread(self) -> float:
        """How far the median is above the least: much where other programs disturbed most of the runs."""
        return self.us / min(self.step_us) - 1

    @property
    def kernel_us(self) -> float:
        return self.us / self.work.kernels

    @property
    def error_bar(self) -> float:
        """How far rounding may take a result from the closed form."""
        return ERROR_BAR * max(1.0, self.work.passes / 500) * max(1.0, self.largest / SMALL)

    def record(self) -> dict[str, Any]:
        return {
            **asdict(self.work),
            "start": self.start,
            "us_per_step": self.us,
            "least_us": min(self.step_us),
            "most_us": max(self.step_us),
            "max_abs_err": self.max_abs_err,
            "launches": self.launches,
        }


class LabMachine(Protocol):
    """A machine that runs work in several ways. The first of its starts is the baseline."""

    name: str
    kind: Literal["gpu", "cpu"]
    starts: tuple[str, ...]
    sizes: tuple[str, ...]  # of a work, that make a difference here
    persistent: str  # the start that runs all steps after one launch
    why_not: dict[str, str]  # starts that cannot run here, and why
    spread: float  # the largest of the timings that `costs` was computed from

    def settle(self, work: Workload) -> Workload:
        """The work with its open sizes filled in; refuses what cannot run here, naming the limit."""

    def time(self, work: Workload, start: str, repeats: int) -> Timing:
        """Run and check it; raises if the result is wrong."""

    def body_us(self, work: Workload) -> float:
        """The time of one pass by itself, without its start."""

    def costs(self, work: Workload) -> dict[str, StartCost]:
        """What each start adds to work of this grid, measured once with bodies of known length."""

    def facts(self) -> dict[str, Any]:
        """What this machine is, and single costs that the formulas name."""


def checked(timing: Timing) -> Timing:
    """The timing, if its result is right: the time of a wrong result is not reported."""
    if not timing.max_abs_err < timing.error_bar:  # also where it is not a number
        raise InternalError(
            f"{timing.start} computed a wrong result: max_abs_err {timing.max_abs_err:.3e}, at most "
            f"{timing.error_bar:.1e} allowed ({timing.work})"
        )
    return timing


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference; NaN where anything is."""
    return float(np.abs(found.astype(np.float64) - expected).max())
