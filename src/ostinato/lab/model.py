"""The work of the laboratory, and the arithmetic of launch overhead: what a step of short kernels takes, by its start.

A step is K kernels of c microseconds each. Each way to start it adds time to every kernel (a launch, a graph's node, a
barrier) and to every step (a replay, a turn of a WHILE graph), and a host that submits ahead of the device
adds nothing as long as it keeps ahead. Pure arithmetic: no device, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ostinato.errors import BadOption

PAYS: Final = 1.05  # a start that wins less than this is said not to pay
LONGEST_US: Final = 1e5  # of a body, up to which this is looked for
BodyName = Literal["axpy", "tail"]
BODIES: Final[tuple[BodyName, ...]] = ("axpy", "tail")
MOST_PASSES: Final = 2_000_000  # of one measurement: kernels of all its steps


@dataclass(frozen=True, slots=True)
class Workload:
    """So many token steps of so many passes over a vector. `blocks` 0: as many as the device has multiprocessors."""

    n: int = 1 << 20
    steps: int = 500
    kernels: int = 1
    blocks: int = 0
    threads: int = 512  # fills a multiprocessor without making its own barrier long
    a: float = 0.001
    body: BodyName = "axpy"

    def __post_init__(self) -> None:
        for name, least, most in (
            ("n", 1, 1 << 31),
            ("steps", 1, 1_000_000),
            ("kernels", 1, 10_000),
            ("blocks", 0, 1_000_000),
            ("threads", 32, 1024),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise BadOption(f"--{name} is {value}; it must be from {least} to {most}")
        if self.threads % 32:
            raise BadOption(f"--threads is {self.threads}; it must be a multiple of 32")
        if not abs(self.a) <= 1:
            raise BadOption(f"--a is {self.a}; it must be from -1 to 1")
        if self.body not in BODIES:
            raise BadOption(f"--body is {self.body!r}; known: {', '.join(BODIES)}")
        if self.steps * self.kernels > MOST_PASSES:
            raise BadOption(
                f"{self.steps} steps of {self.kernels} kernels are {self.steps * self.kernels} launches; at most "
                f"{MOST_PASSES} are measured at once: lower --steps or --kernels"
            )

    @property
    def passes(self) -> int:
        return self.steps * self.kernels


@dataclass(frozen=True, slots=True)
class Overhead:
    """K launches of t_L each beside T_comp of computing, as if none were hidden."""

    kernels: int
    launch_us: float
    compute_us: float

    def __post_init__(self) -> None:
        if self.kernels < 1 or self.launch_us < 0 or self.compute_us <= 0:
            raise BadOption(
                f"{self.kernels} kernels, {self.launch_us} us a launch, {self.compute_us / 1e3} ms of computing: there "
                "must be a kernel at least, computing takes some time and a launch none or some"
            )

    @property
    def total_us(self) -> float:
        """What all launches of a token cost: K t_L.

        >>> Overhead(150, 6.0, 18_000.0).total_us
        900.0
        """
        return self.kernels * self.launch_us

    @property
    def share(self) -> float:
        """The part f of a token's time that is launches: K t_L / (T_comp + K t_L).

        >>> [round(Overhead(150, 6.0, ms * 1e3).share, 3) for ms in (18, 6)]
        [0.048, 0.13]
        """
        return self.total_us / (self.compute_us + self.total_us)

    def speedup(self, residual_us: float = 0.0) -> float:
        """What a token gains where all its launches become one that costs `residual_us`."""
        return (self.compute_us + self.total_us) / (self.compute_us + residual_us)


@dataclass(frozen=True, slots=True)
class StartCost:
    """What one way to start a step adds, in microseconds: on the device, and on the host that submits.

    `body_times`: how long its kernel computes, in times of the body by itself. On a GPU every start runs the same
    kernel; on a CPU numpy goes over the memory more than once.
    """

    kernel_us: float
    step_us: float = 0.0
    submit_kernel_us: float = 0.0
    submit_step_us: float = 0.0
    body_times: float = 1.0

    def step(self, kernels: int, body_us: float) -> float:
        """The time of a step: the device's, or the host's where it cannot keep ahead.

        >>> StartCost(1.0, submit_kernel_us=3.0).step(10, 1.0), StartCost(1.0, submit_kernel_us=3.0).step(10, 9.0)
        (30.0, 100.0)
        """
        device = kernels * (self.body_times * body_us + self.kernel_us) + self.step_us
        return max(device, kernels * self.submit_kernel_us + self.submit_step_us)


def stops_paying_us(baseline: StartCost, other: StartCost, kernels: int) -> float | None:
    """The body length from which `other` wins less than PAYS over the baseline; None where it never pays, LONGEST_US
    where it always does.

    The gain falls with the length of a body, so that halving finds the place.
    """

    def pays(body_us: float) -> bool:
        return baseline.step(kernels, body_us) > PAYS * other.step(kernels, body_us)

    low, high = 0.0, LONGEST_US
    if not pays(low):
        return None
    if pays(high):
        return high
    while high - low > 1e-3 * max(1.0, low):
        middle = (low + high) / 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
