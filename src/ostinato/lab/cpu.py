"""The laboratory on a CPU: the counterparts of a GPU's starts, so that the laboratory runs on any machine.

`op by op` calls numpy for every operation, as a host launches every kernel; `recorded` replays a list of calls that
were bound once, over memory that was allocated once, as a graph does; `native` is one call that runs all steps.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np

from ostinato.backends.machine import cpu_name, free_host_bytes
from ostinato.errors import HardwareCannot, InternalError, OstinatoError
from ostinato.lab.model import BODIES, BodyName, StartCost, Workload
from ostinato.lab.programs import host_library
from ostinato.lab.work import ERF_SERIES, ERF_SLOPE, Data, Timing, checked, error_of, factors_of, gelu

OP_BY_OP: Final = "op by op"
RECORDED: Final = "recorded"
NATIVE: Final = "native"
TINY: Final = Workload(n=1, steps=2000)
LONG: Final = Workload(n=1 << 16, steps=100)  # beside which the cost of a call is small


class CpuMachine:
    """One thread: the cost of starting work is measured, not its partition."""

    kind: Literal["gpu", "cpu"] = "cpu"
    sizes: tuple[str, ...] = ("n", "steps", "kernels")  # a grid is a GPU's
    persistent: str = NATIVE

    def __init__(self) -> None:
        self.name = cpu_name()
        self.why_not: dict[str, str] = {}
        self.spread = 0.0
        self._costs: dict[BodyName, dict[str, StartCost]] = {}
        starts = [OP_BY_OP, RECORDED]
        try:
            self._host = host_library()
            starts.append(NATIVE)
        except (HardwareCannot, InternalError) as error:
            self.why_not[NATIVE] = str(error)
        self.starts = tuple(starts)

    def settle(self, work: Workload) -> Workload:
        free = free_host_bytes()
        if 6 * 8 * work.n > free:
            raise HardwareCannot(
                f"--n {work.n} needs {48 * work.n / 1e9:.1f} GB with its check; {free / 1e9:.1f} are free"
            )
        return work

    def time(self, work: Workload, start: str, repeats: int) -> Timing:
        work = self.settle(work)
        data = Data.fresh(work.n)
        factors = factors_of(work, varied=False)
        expected = data.expected(work, factors)
        times, worst = [], 0.0
        for _ in range(repeats + 1):  # the first warms
            h = data.start[0].copy()
            run = self._bound(work, start, data.x, h, factors)
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e6 / work.steps)
            worst = max(worst, error_of(h, expected[0]))
        inside = np.empty((3, 1), np.float32)
        launches = 1 if start == NATIVE else work.passes * len(_pass_calls(work.body, data.x, data.x, 0.0, inside))
        return checked(Timing(start, work, tuple(times[1:]), worst, float(np.abs(expected).max()), launches))

    def body_us(self, work: Workload) -> float:
        """By the slope over the vector's length: what is not proportional to it is not the body's."""
        start = self.starts[-1]
        return max(1e-6, self.time(work, start, 3).kernel_us - self.costs(work)[start].kernel_us)

    def costs(self, work: Workload) -> dict[str, StartCost]:
        """By a vector of one number, which shows what a call costs, and by a long one."""
        if work.body not in self._costs:
            tiny, long = (
                {start: self.time(replace(size, body=work.body), start, 5) for start in self.starts}
                for size in (TINY, LONG)
            )
            self.spread = max(self.spread, *(timing.spread for timing in (*tiny.values(), *long.values())))
            bodies = {start: max(1e-6, long[start].kernel_us - tiny[start].kernel_us) for start in self.starts}
            plain = bodies[self.starts[-1]]
            self._costs[work.body] = {
                start: StartCost(tiny[start].kernel_us, body_times=bodies[start] / plain) for start in self.starts
            }
        return self._costs[work.body]

    def facts(self) -> dict[str, Any]:
        return {"kind": "cpu", "name": self.name, "python": platform.python_version(), "numpy": np.__version__}

    def _bound(
        self, work: Workload, start: str, x: np.ndarray, h: np.ndarray, factors: np.ndarray
    ) -> Callable[[], object]:
        if start == NATIVE:
            body = BODIES.index(work.body)
            given = (x.ctypes.data, h.ctypes.data, work.n, body, factors.ctypes.data, work.steps, work.kernels)
            return partial(self._host.run_all, *given)
        passes = np.repeat(factors, work.kernels).tolist()
        if start == OP_BY_OP:
            return partial(_op_by_op, work.body, x, h, passes)
        if start != RECORDED:
            raise OstinatoError(f"a CPU has no start {start!r}")
        inside = np.empty((3, work.n), np.float32)
        return partial(_in_order, [call for a in passes for call in _pass_calls(work.body, x, h, a, inside)])


def _op_by_op(body: str, x: np.ndarray, h: np.ndarray, factors: list[float]) -> None:
    for a in factors:
        if body == "axpy":
            h += a * x
        else:
            h += a * gelu(h + x)


def _pass_calls(body: str, x: np.ndarray, h: np.ndarray, a: float, inside: np.ndarray) -> list[Callable[[], object]]:
    """One pass over h as calls of numpy that allocate nothing."""
    if body == "axpy":
        v = inside[0]
        return [partial(np.multiply, x, a, v), partial(np.add, h, v, h)]
    v, t, rest = inside
    calls = [
        partial(np.add, h, x, v),
        partial(np.abs, v, t),
        partial(np.multiply, t, ERF_SLOPE, t),
        partial(np.add, t, 1, t),
        partial(np.reciprocal, t, t),
        partial(np.multiply, t, ERF_SERIES[-1], rest),
    ]
    for part in ERF_SERIES[-2:0:-1]:
        calls += [partial(np.add, rest, part, rest), partial(np.multiply, rest, t, rest)]
    return [
        *calls,
        partial(np.square, v, t),
        partial(np.multiply, t, -0.5, t),
        partial(np.exp, t, t),
        partial(np.multiply, rest, t, rest),
        partial(np.subtract, 1, rest, rest),
        partial(np.copysign, rest, v, rest),
        partial(np.add, rest, 1, rest),
        partial(np.multiply, rest, v, rest),
        partial(np.multiply, rest, 0.5 * a, rest),
        partial(np.add, h, rest, h),
    ]


def _in_order(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()
