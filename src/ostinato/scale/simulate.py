"""A small simulation that checks the arithmetic: no engine, no Ray, only who waits for whom.

`replica` simulates one replica of `sizing.py` request by request.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Final

from ostinato.scale.measured import Replica
from ostinato.scale.sizing import CHUNK, Demand
from ostinato.serve.load import quantile

N_REQUESTS: Final = 20_000
_FEWEST: Final = 1000
_MOST_CHUNKS: Final = 1_000_000  # in all: with very long prompts fewer requests are simulated
_WARM: Final = 0.1  # share of requests before counting begins


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """The result of a simulation."""

    p50_first_token_s: float
    p99_first_token_s: float
    gap_s: float
    live: float  # requests that decode at once, on average


@dataclass(slots=True)
class _Request:
    came: float
    prompt_left: int
    output_left: int
    first: float = 0.0


def replica(
    one: Replica, demand: Demand, slots: int, rate: float, *, n: int = N_REQUESTS, seed: int = 0
) -> SimulatedLoad:
    """One replica with random arrivals at that rate."""
    n = min(n, max(_FEWEST, _MOST_CHUNKS * CHUNK // demand.prompt))
    chance = random.Random(seed)
    coming = deque(_arrivals(demand, rate, n, chance))
    line: deque[_Request] = deque()
    prompts: deque[_Request] = deque()
    live: list[_Request] = []
    ended: list[_Request] = []
    now, gap_time = 0.0, 0.0
    n_gaps = 0
    while len(ended) < n:
        if not (line or prompts or live):
            now = max(now, coming[0].came)
        while coming and coming[0].came <= now:
            line.append(coming.popleft())
        while line and len(prompts) + len(live) < slots:
            prompts.append(line.popleft())
        if prompts:
            n_waiting = len(live)
            seconds = _chunk(prompts, live, ended, one, now)
            now, gap_time = now + seconds, gap_time + seconds * n_waiting
        if not live:
            continue
        # While no prompt waits, steps follow each other until a request ends or arrives.
        step = one.step_s(len(live))
        k = 1
        if not prompts:
            k = min(request.output_left for request in live)
            if coming and len(live) < slots:
                k = max(1, min(k, math.ceil((coming[0].came - now) / step)))
        now += k * step
        n_gaps += k * len(live)
        gap_time += k * step * len(live)
        for request in live:
            request.output_left -= k
        ended += [request for request in live if request.output_left <= 0]
        live = [request for request in live if request.output_left > 0]
    waits = sorted(one.first - one.came for one in sorted(ended, key=lambda each: each.came)[int(_WARM * n) :])
    p50, p99 = (demand.route_s + quantile(waits, share) for share in (0.5, 0.99))
    return SimulatedLoad(p50, p99, gap_time / max(1, n_gaps), gap_time / now)


def _arrivals(demand: Demand, rate: float, n: int, chance: random.Random) -> list[_Request]:
    now, made = 0.0, []
    for _ in range(n):
        now += chance.expovariate(rate)
        sizes = (max(1, round(mean * chance.uniform(0.5, 1.5))) for mean in (demand.prompt, demand.output))
        made.append(_Request(now, *sizes))
    return made


def _chunk(prompts: deque[_Request], live: list[_Request], ended: list[_Request], one: Replica, now: float) -> float:
    """Run the next chunk of the first prompt; after the last chunk the request is live, with its first token. Returns
    the seconds it took."""
    first = prompts[0]
    n = min(CHUNK, first.prompt_left)
    first.prompt_left -= n
    seconds = n / one.prompt_tok_s
    if first.prompt_left == 0:
        prompts.popleft()
        first.first = now + seconds
        first.output_left -= 1
        (live if first.output_left else ended).append(first)
    return seconds
