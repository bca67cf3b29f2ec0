"""How many replicas a load needs, by arithmetic; `simulate.py` checks it.

A replica computes one prompt at a time, in chunks, and between two chunks one decode step for all that live. With
`rate` requests per second on each replica, prompts of P tokens and answers of O:

    prompt      p = P / prompt_tok_s                            seconds of the device for a prompt
    capacity    1 / (p + O * step(slots) / slots)               requests per second, at most
    k live      leave at (1 - rate * p) * k / (O * step(k))     per second: what prompts leave of the device's time
    with steps  q = p + chunks * step(live)                     a prompt takes so long beside the others' steps
    first token = route + q + wait for earlier prompts + wait for a slot

How many live follows from the third line as a birth and death process, whose tail beyond the slots is the wait for one;
the wait for earlier prompts is that of a single server (M/G/1, exponential tail). Their 99th percentiles are added up.
Lengths are spread evenly from half to one and a half times their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from ostinato.errors import BadInput, BadOption
from ostinato.scale.measured import Replica

CHUNK: Final = 512
MOST_REPLICAS: Final = 1_000_000
_NEAR: Final = 1.25  # so near to what the work alone needs, the work is what limits
_VARIATION: Final = 1 / 12  # squared, of lengths from half to one and a half times their mean

Limit = Literal["decoding", "prompts", "slots", "first token"]


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of all replicas together. `route_s`: what the way to a replica adds to a first token."""

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
            if count < 1:
                raise BadOption(f"{name} is {count}; it must be a whole number from 1")


@dataclass(frozen=True, slots=True)
class Working:
    """One replica under a rate of requests, by the formula. Infinite where it cannot keep up."""

    rate: float
    load: float  # share of its capacity
    live: float  # requests that decode at once, on average
    gap_s: float  # between two tokens of an answer, on average
    p50_first_token_s: float
    p99_first_token_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """How many replicas, why so many, and how each will work."""

    replicas: int
    limit: Limit
    capacity: float  # requests per second of one replica, at most
    working: Working


def capacity(replica: Replica, demand: Demand, slots: int) -> float:
    """Requests per second that one replica can answer in the long run."""
    return 1 / (demand.prompt / replica.prompt_tok_s + demand.output * replica.step_s(slots) / slots)


def working(replica: Replica, demand: Demand, slots: int, rate: float) -> Working:
    """One replica that is asked so often."""
    load = rate / capacity(replica, demand, slots)
    p = demand.prompt / replica.prompt_tok_s
    if load >= 1:
        return Working(rate, load, math.inf, math.inf, math.inf, math.inf)
    crowd = crowd_of(replica, demand, slots, rate)
    if crowd is None:
        return Working(rate, load, math.inf, math.inf, math.inf, math.inf)
    q = p + math.ceil(demand.prompt / CHUNK) * (replica.step_s(crowd.live) if crowd.live >= 0.5 else 0.0)

    def first_token(share: float) -> float:
        waits = _prompt_wait(rate, q, share) + crowd.wait(share)
        return demand.route_s + q * _longer(share) + waits

    return Working(rate, load, crowd.live, crowd.live / (rate * demand.output), first_token(0.5), first_token(0.99))


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many live on a replica: on average, the share of those who come and find no slot, and how fast those go."""

    live: float
    no_slot: float
    going: float  # per second, more than come

    def wait(self, share: float) -> float:
        """So many of those who come wait no longer for a slot."""
        return math.log(self.no_slot / (1 - share)) / self.going if self.no_slot > 1 - share else 0.0


def crowd_of(replica: Replica, demand: Demand, slots: int, rate: float) -> Crowd | None:
    """The birth and death process; None where more come than go."""
    free = 1 - rate * demand.prompt / replica.prompt_tok_s

    def busier(live: int) -> float:
        """How much likelier so many live than one fewer."""
        return rate * demand.output * replica.step_s(live) / (free * live)

    last = busier(slots)
    if free <= 0 or last >= 1:
        return None
    weight, total, living = 1.0, 1.0, 0.0
    for live in range(1, slots + 1):
        weight *= busier(live)
        total += weight
        living += live * weight
        if total > 1e200:
            weight, total, living = weight / total, 1.0, living / total
    beyond = weight * last / (1 - last)
    whole = total + beyond
    return Crowd((living + slots * beyond) / whole, (weight + beyond) / whole, rate / last - rate)


def _longer(share: float) -> float:
    """How much longer than the mean the prompt is that so many are shorter than."""
    return 0.5 + share


def _prompt_wait(rate: float, service: float, share: float) -> float:
    busy = rate * service
    if busy >= 1:
        return math.inf
    scale = service * (1 + _VARIATION) / (2 * (1 - busy))
    return scale * math.log(busy / (1 - share)) if busy > 1 - share else 0.0


def size(replica: Replica, demand: Demand, slots: int) -> Answer:
    """The smallest number of replicas that the formula allows."""
    most = capacity(replica, demand, slots)

    def at(n: int) -> Working:
        return working(replica, demand, slots, demand.rps / n)

    def enough(n: int) -> bool:
        return at(n).p99_first_token_s <= demand.p99_first_token_s

    alone = working(replica, demand, slots, 1e-9).p99_first_token_s
    if alone > demand.p99_first_token_s:
        raise BadInput(
            f"a long prompt takes {alone:.3f} s to its first token with nobody else there; no number of replicas "
            f"keeps --p99-first-token {demand.p99_first_token_s:g}; give more time, or shorter prompts"
        )
    least = max(1, math.ceil(demand.rps / most))
    n = smallest(enough, least)
    if n is None:
        raise BadInput(f"more than {MOST_REPLICAS} replicas would be needed; is {replica.source} of the right model?")
    return Answer(n, _limit(replica, demand, slots, n, least), most, at(n))


def smallest(enough: Callable[[int], bool], least: int) -> int | None:
    """The smallest number from `least` up that is enough, where more never is less; None beyond all reason."""
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
    """What most of the replicas are there for: the work itself, or room so that nobody waits long."""
    if n <= _NEAR * least:
        prompts = demand.prompt / replica.prompt_tok_s
        return "prompts" if prompts > demand.output * replica.step_s(slots) / slots else "decoding"
    roomier = working(replica, demand, 4 * slots, demand.rps / (n - 1))
    return "slots" if roomier.p99_first_token_s <= demand.p99_first_token_s else "first token"
