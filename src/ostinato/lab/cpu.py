"""The laboratory on a CPU: the counterparts of a GPU's starts, so that the laboratory runs on any machine.

`op by op` calls torch for every operation, as a host launches every kernel; `recorded` replays a list of calls that
were bound once, over memory that was allocated once, as a graph does; `native` is one call that runs all steps.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.machine import cpu_name, free_host_bytes
from ostinato.errors import HardwareCannot, InternalError, OstinatoError
from ostinato.lab.model import BODIES, StartCost, Workload
from ostinato.lab.programs import host_library
from ostinato.lab.work import Data, Timing, checked, error_of, factors_of

OP_BY_OP: Final = "op by op"
RECORDED: Final = "recorded"
NATIVE: Final = "native"
TINY: Final = Workload(n=1, steps=2000)


class CpuMachine:
    """One thread: the cost of starting work is measured, not its partition."""

    kind: Literal["gpu", "cpu"] = "cpu"
    sizes: tuple[str, ...] = ("n", "steps", "kernels")  # a grid is a GPU's

    def __init__(self) -> None:
        self.name = cpu_name()
        self.why_not: dict[str, str] = {}
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
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for _ in range(repeats + 1):  # the first warms
                x, h = torch.from_numpy(data.x), torch.full((work.n,), float("nan"))
                h.copy_(torch.from_numpy(data.start[0]))
                run = self._bound(work, start, x, h, factors)
                began = time.perf_counter()
                run()
                times.append((time.perf_counter() - began) * 1e6 / work.steps)
                worst = max(worst, error_of(h.numpy(), expected[0]))
        finally:
            torch.set_num_threads(threads)
        launches = 1 if start == NATIVE else work.passes * (1 if work.body == "axpy" else 3)
        return checked(Timing(start, work, tuple(times[1:]), worst, float(np.abs(expected).max()), launches))

    def body_us(self, work: Workload) -> float:
        """By the slope over the vector's length: what is not proportional to it is not the body's."""
        start = NATIVE if NATIVE in self.starts else RECORDED
        return max(1e-6, self.time(work, start, 3).kernel_us - self.costs(work)[start].kernel_us)

    def costs(self, work: Workload) -> dict[str, StartCost]:
        return self._costs

    @cached_property
    def _costs(self) -> dict[str, StartCost]:
        return {start: StartCost(self.time(TINY, start, 5).kernel_us) for start in self.starts}

    def facts(self) -> dict[str, Any]:
        return {"kind": "cpu", "name": self.name, "python": platform.python_version(), "torch": torch.__version__}

    def _bound(self, work: Workload, start: str, x: Tensor, h: Tensor, factors: np.ndarray) -> Callable[[], object]:
        if start == NATIVE:
            body = BODIES.index(work.body)
            given = (_address(x), _address(h), work.n, body, factors.ctypes.data, work.steps, work.kernels)
            return partial(self._host.run_all, *given)
        passes = np.repeat(factors, work.kernels).tolist()
        if start == OP_BY_OP:
            return partial(_op_by_op, work.body, x, h, passes)
        if start != RECORDED:
            raise OstinatoError(f"a CPU has no start {start!r}")
        inside = torch.empty_like(h)
        gelu: Any = torch._C._nn.gelu  # the form that takes its memory
        calls: list[Callable[[], object]] = []
        for a in passes:
            if work.body == "axpy":
                calls.append(partial(h.add_, x, alpha=a))
            else:
                calls += [
                    partial(torch.add, h, x, out=inside),
                    partial(gelu, inside, out=inside),
                    partial(h.add_, inside, alpha=a),
                ]
        return partial(_in_order, calls)


def _op_by_op(body: str, x: Tensor, h: Tensor, factors: list[float]) -> None:
    for a in factors:
        if body == "axpy":
            h += a * x
        else:
            h += a * torch.nn.functional.gelu(h + x)


def _in_order(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
