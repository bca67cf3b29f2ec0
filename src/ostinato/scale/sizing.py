"""How many replicas a load needs, by arithmetic; `simulate.py` checks it.

A replica computes one prompt at a time, in chunks, and after each chunk one decode step for all live requests. A
prompt of P tokens takes the device p = P / prompt_tok_s seconds; its O tokens are one with the prompt and O - 1 steps.

    capacity      1 / (p + (O - 1) * step(m) / m)                 requests per second, at most; m live are as many as
                  there are slots, or as one chunk to a step keeps alive: (O - 1) / chunks
    beside steps  q = p + chunks * step(live)                     time of a prompt while others decode
    k on it       of which m are live and the others are prompts: they leave at x(k) = m / (m * p + (O - 1) * step(m)),
                  and k = m + x(k) * (the time of a prompt and of those before it); solved for k = 1 ... slots
    no slot       the number of requests is a birth-death process with those x(k); beyond the slots they wait for one,
                  about half as long as with exponentially distributed lengths
    prompts       the wait for earlier prompts is that of a single server (M/G/1) with service q, computed on a grid
    first token = route + the longer of the two waits + the rest of the step that runs + the prompt itself

The first token's percentiles are those of this sum over the spread of lengths (evenly from half to one and a half times
their mean) and of the live.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ostinato.errors import BadInput, BadOption
from ostinato.scale.measured import Replica

CHUNK: Final = 512
MOST_REPLICAS: Final = 1_000_000
MOST_SLOTS: Final = 4096
MOST_TOKENS: Final = 10_000_000
_NEAR: Final = 1.25  # within this factor of what the work alone needs, the work is the limit
_LESS_VARIED: Final = (1 + 1 / 12) / 2  # a wait with lengths so spread, relative to exponential lengths
_LENGTHS: Final = 0.5 + (np.arange(32) + 0.5) / 32  # of a prompt or an answer, in times its mean
_LIVES: Final = (np.arange(10) + 0.5) / 10  # quantiles of the number of live requests
_POINTS: Final = 2048  # of the grid of waits

Doubles = NDArray[np.float64]
Limit = Literal["decoding", "prompts", "slots", "first token"]


@dataclass(frozen=True, slots=True)
class Demand:
    """The load on all replicas together. `route_s`: what the route to a replica adds to a first token."""

    rps: float
    prompt: int
    output: int
    p99_first_token_s: float
    route_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("--rps", self.rps), ("--p99-first-token", self.p99_first_token_s)):
            if not (math.isfinite(value) and value > 0):
                raise BadOption(f"{name} is {value:g}; it must be above 0")
        for name, count in (("--prompt", self.prompt), ("--output", self.output)):
            if not 1 <= count <= MOST_TOKENS:
                raise BadOption(f"{name} is {count}; it must be a whole number from 1 to {MOST_TOKENS}")
        if not (math.isfinite(self.route_s) and self.route_s >= 0):
            raise BadOption(f"--route-ms is {self.route_s * 1e3:g}; it must be 0 or more")


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """One replica under a rate of requests, by the formula. Infinite if it cannot keep up."""

    rate: float
    load: float  # share of its capacity
    live: float  # requests that decode at once, on average
    gap_s: float  # between two tokens of an answer, on average
    p50_first_token_s: float
    p99_first_token_s: float


@dataclass(frozen=True, slots=True)
class SizingResult:
    """The number of replicas, and what limits them."""

    replicas: int
    limit: Limit
    capacity: float  # requests per second of one replica, at most


def capacity(replica: Replica, demand: Demand, slots: int) -> float:
    """Requests per second that one replica can answer in the long run."""
    live = min(float(slots), _most_live(demand))
    return 1 / (demand.prompt / replica.prompt_tok_s + (demand.output - 1) * replica.step_s(live) / live)


def _chunks(demand: Demand) -> float:
    return float(np.ceil(demand.prompt * _LENGTHS / CHUNK).mean())


def _most_live(demand: Demand) -> float:
    """While prompts always wait, each step carries one chunk: this bounds the live requests for any number of slots."""
    return max(1.0, (demand.output - 1) / _chunks(demand))


def working(replica: Replica, demand: Demand, slots: int, rate: float) -> LoadEstimate:
    """One replica at this rate of requests."""
    load = rate / capacity(replica, demand, slots)
    crowd = crowd_of(replica, demand, slots, rate) if load < 1 else None
    first = None if crowd is None else _first_token(replica, demand, rate, crowd)
    if crowd is None or first is None:
        return LoadEstimate(rate, load, math.inf, math.inf, math.inf, math.inf)
    gap = crowd.live / (rate * max(1, demand.output - 1))
    return LoadEstimate(rate, load, crowd.live, gap, *(demand.route_s + first.at(share) for share in (0.5, 0.99)))


@lru_cache(maxsize=256)
def _leaving(replica: Replica, demand: Demand, slots: int) -> tuple[Doubles, Doubles]:
    """For 0 ... slots requests on a replica: how many leave per second, and how many of them are live."""
    p, steps = demand.prompt / replica.prompt_tok_s, demand.output - 1
    chunks, most = _chunks(demand), _most_live(demand)
    leave, live = [0.0], [0.0]
    before = 0.0  # prompts ahead of a new request; the one being computed is half done
    for k in range(1, slots + 1):
        low, high = 0.0, min(float(k), most)
        for _ in range(40):
            m = (low + high) / 2
            step = replica.step_s(max(1.0, m))
            x = m / (m * p + steps * step)
            with_steps = p + chunks * step * min(1.0, m)
            spent = x * (p + (chunks - 1) * step * min(1.0, m) + before * with_steps)
            low, high = (m, high) if m + spent < k else (low, m)
        before = max(0.0, k - m - min(1.0, x * with_steps) / 2)
        leave.append(x)
        live.append(m)
    return np.array(leave), np.array(live)


@dataclass(frozen=True, slots=True)
class LiveDistribution:
    """Requests on a replica: the mean, ten quantiles over time, and the share of arrivals that find no slot."""

    live: float
    lives: Doubles
    no_slot: float
    going: float  # departures per second, less arrivals, while requests wait for a slot

    def has_slot(self, wait: Doubles) -> Doubles:
        """The share of arrivals that have a slot within that wait."""
        return 1 - self.no_slot * np.exp(-np.maximum(wait, 0) * self.going / _LESS_VARIED)


def crowd_of(replica: Replica, demand: Demand, slots: int, rate: float) -> LiveDistribution | None:
    """The birth-death process; None if more requests arrive than leave."""
    leave, live = _leaving(replica, demand, slots)
    last = rate / leave[-1]
    if last >= 1:
        return None
    logs = np.concatenate([[0.0], np.cumsum(np.log(rate / leave[1:]))])
    weights = np.exp(logs - logs.max())
    weights[-1] /= 1 - last  # including requests beyond the slots
    weights /= weights.sum()
    at = np.searchsorted(np.cumsum(weights), _LIVES)
    return LiveDistribution(
        float(weights @ live), live[np.minimum(at, slots)], float(weights[-1]), float(leave[-1] - rate)
    )


@dataclass(frozen=True, slots=True)
class _FirstTokenWait:
    """The time to the first token: what it takes without waiting, as points with weights, and the waits."""

    alone: Doubles
    weights: Doubles
    grid: Doubles
    prompts: Doubles  # shares of requests that wait for earlier prompts no longer than each grid point
    crowd: LiveDistribution

    def at(self, share: float) -> float:
        """The share of requests that have their first token by then."""
        low = 0.0
        high = float(self.alone.max() + self.grid[-1] + 20 / self.crowd.going)
        for _ in range(50):
            middle = (low + high) / 2
            wait = middle - self.alone
            waited = np.interp(wait, self.grid, self.prompts, left=0.0, right=1.0) * self.crowd.has_slot(wait)
            low, high = (middle, high) if self.weights @ waited < share else (low, middle)
        return high


def _first_token(replica: Replica, demand: Demand, rate: float, crowd: LiveDistribution) -> _FirstTokenWait | None:
    """None if prompts, with the steps between them, already exceed the device's capacity."""
    steps = np.where(crowd.lives >= 0.5, replica.base_s + replica.each_s * np.maximum(crowd.lives, 1), 0.0)
    tokens = demand.prompt * _LENGTHS[:, None]
    chunks = np.ceil(tokens / CHUNK)
    alone = tokens / replica.prompt_tok_s + (chunks - 1) * steps
    service = alone + steps
    busy = rate * float(service.mean())
    if busy >= 1:
        return None
    grid, prompts = _prompt_waits(service.ravel(), busy)
    # A request that arrives while no prompt is computed waits for the rest of a step.
    rest = (alone[:, :, None] + steps[:, None] * (np.arange(4) + 0.5) / 4).ravel()
    points = np.concatenate([alone.ravel(), rest])
    weights = np.concatenate([np.full(alone.size, busy / alone.size), np.full(rest.size, (1 - busy) / rest.size)])
    return _FirstTokenWait(points, weights, grid, prompts, crowd)


def _prompt_waits(service: Doubles, busy: float) -> tuple[Doubles, Doubles]:
    """M/G/1: a wait is the rest of one service, and again of one with the chance that the server is busy, and so on."""
    mean = float(service.mean())
    tail = mean * (1 + float(service.var()) / mean**2) / 2 / (1 - busy)
    width = (float(service.max()) + tail * math.log(1e5)) / _POINTS
    grid: Doubles = np.arange(_POINTS, dtype=np.float64) * width
    if width > mean / 4:  # hardly ever idle: the grid is too coarse, and waits are nearly exponential
        return grid, 1 - busy * np.exp(-grid / tail)
    rest = 1 - np.searchsorted(np.sort(service), grid + width / 2, side="right") / service.size
    n = 4 * _POINTS  # so that the tail, which wraps around at the end, is negligible
    half = np.exp(-1j * np.pi * np.arange(n // 2 + 1) / n)  # each point stands for the width that follows it
    once = np.fft.rfft(rest / rest.sum(), n) * half
    waits = np.fft.irfft((1 - busy) / (1 - busy * once), n)[:_POINTS]
    return grid, np.cumsum(waits)


def size(replica: Replica, demand: Demand, slots: int) -> SizingResult:
    """The smallest number of replicas that the formula allows."""
    most = capacity(replica, demand, slots)

    def enough(n: int) -> bool:
        return working(replica, demand, slots, demand.rps / n).p99_first_token_s <= demand.p99_first_token_s

    alone = working(replica, demand, slots, 1e-9).p99_first_token_s
    if alone > demand.p99_first_token_s:
        raise BadInput(
            f"a long prompt takes {alone:.3f} s to its first token on an idle replica; no number of replicas "
            f"keeps --p99-first-token {demand.p99_first_token_s:g}; give more time, or shorter prompts"
        )
    least = max(1, math.ceil(demand.rps / most))
    n = smallest(enough, least)
    if n is None:
        raise BadInput(f"more than {MOST_REPLICAS} replicas would be needed; is {replica.source} of the right model?")
    return SizingResult(n, _limit(replica, demand, slots, n, least), most)


def smallest(enough: Callable[[int], bool], least: int) -> int | None:
    """The smallest sufficient number from `least` up, for a monotonic predicate; None beyond a fixed limit."""
    if least > MOST_REPLICAS:
        return None
    if enough(least):
        return least
    low, high = least, least + 1
    while not enough(high):
        low, high = high, high * 2
        if high > MOST_REPLICAS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _limit(replica: Replica, demand: Demand, slots: int, n: int, least: int) -> Limit:
    """What determines the number of replicas: the work itself, or headroom that keeps waits short."""
    if n <= _NEAR * least:
        prompts = demand.prompt / replica.prompt_tok_s
        return "prompts" if prompts > 1 / capacity(replica, demand, slots) - prompts else "decoding"
    roomier = working(replica, demand, 4 * slots, demand.rps / (n - 1))
    return "slots" if roomier.p99_first_token_s <= demand.p99_first_token_s else "first token"
