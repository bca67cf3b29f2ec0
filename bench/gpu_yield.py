"""How long a running request waits because another request's prompt comes in, in the mode that leaves the card for it.

Three parts of that wait are told apart. *Leaving*: from the host's word to the last step boundary, and to the kernel's
end; measured by hand, since an engine's thread sleeps and would be measured with it. The *chunk*: the prompt with
no other request there, by hand too. The *gap*: between two tokens of the running request, through an engine, by the
device's own clock; what it has beyond a step, leaving and the chunk is the host, which must see that the kernel left.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Final

from bench.gpu_frame import Ended, Outcome, Record, Setting, Verdict
from bench.gpu_models import TAPE, kv_type_of, model_on, settled_for
from ostinato.backends.torch.model import Model
from ostinato.engine.driver import GREEDY, LoopDriver
from ostinato.engine.engine import Engine
from ostinato.engine.open import open_runner
from ostinato.errors import InternalError
from ostinato.loop.layout import End, Word

LENGTHS: Final = (32, 512)  # of the prompts that come in
N_PROMPTS: Final = 40  # of each length
BEFORE: Final = 300  # tokens of the running request with no other request beside it
# It is asked at some moment of a step and leaves at its end: one step at most, and what leaving takes.
STEPS_TO_LEAVE: Final = 2.0
DEADLINE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Left:
    """One leaving, in microseconds since the loop was asked: its last step boundary was passed, and nothing of it
    runs."""

    border_us: float
    left_us: float


@dataclass(frozen=True, slots=True)
class Wait:
    """What a prompt cost a running request: its longest gap, and how many gaps stood out."""

    longest_us: float
    n_stops: int


def tape_yield(device: str, *, name: str, type: str, n_slots: int, context: int) -> Iterator[Record]:
    """Leaving, chunks alone and gaps of one model."""
    model, chance = model_on(name, type, device), random.Random(4)
    at = settled_for(model, TAPE, n_slots=n_slots, context=context, kv_type=kv_type_of(type))
    with closing(LoopDriver(open_runner(model, at))) as driver:
        left = leavings(driver, N_PROMPTS, chance)
        alone = {n: chunk_us(driver, _ids(model, n, chance)) for n in LENGTHS}
    with Engine(model, at) as engine:
        step_us, waits = gaps(engine, {n: [_ids(model, n, chance) for _ in range(N_PROMPTS)] for n in LENGTHS})
    yield {
        "what": "yield",
        "step_us": step_us,
        "border_us": median(one.border_us for one in left),
        "left_us": median(one.left_us for one in left),
        "left_most_us": max(one.left_us for one in left),
        "prompts": [
            {
                "n": n,
                "alone_us": alone[n],
                "gap_us": median(wait.longest_us for wait in waits[n]),
                "gap_most_us": max(wait.longest_us for wait in waits[n]),
                "stops": median(wait.n_stops for wait in waits[n]),
            }
            for n in LENGTHS
        ],
    }


def leavings(
    driver: LoopDriver, n: int, chance: random.Random, pause_s: tuple[float, float] = (0.003, 0.006)
) -> list[Left]:
    """Let a sequence run, and ask it so often, at some moment, to leave. The host does nothing but look meanwhile."""
    runner, host = driver.runner, driver.runner.host
    generation = driver.admit(0, [1, 2, 3], most=runner.settled.context - 4)
    found: list[Left] = []
    while True:
        ends = host.word(Word.ENDS)
        driver.begin()
        if len(found) == n:
            break
        time.sleep(chance.uniform(*pause_s))
        asked = time.perf_counter_ns()
        host.set_yield(True)
        step_boundary = _when(lambda ends=ends: host.word(Word.ENDS) != ends)  # type: ignore[misc]  # a default of its own
        left = _when(lambda: not runner.start.running)
        found.append(Left((step_boundary - asked) / 1e3, (left - asked) / 1e3))
        driver.wait()
        host.set_yield(False)
        if host.word(Word.WHY) != End.YIELD:
            raise InternalError(f"the loop ended by itself ({End(host.word(Word.WHY)).name}); it needs more context")
    host.cancel(0, generation)
    driver.wait()
    driver.forget()
    return found


def chunk_us(driver: LoopDriver, prompt: Sequence[int], repeats: int = 10) -> float:
    """A prompt and its first token with no other request there, by the host's clock: the median."""
    runner, times = driver.runner, []
    pages = range(-(-(len(prompt) + 2) // runner.page_tokens))
    driver.admit(0, prompt, most=2, pages=pages, admit=False)
    for _ in range(repeats):
        began = time.perf_counter_ns()
        driver.prefill(0, prompt, pages)
        runner.beside(lambda: runner.chunks.first(0)).result(DEADLINE_S)
        times.append((time.perf_counter_ns() - began) / 1e3)
    return median(times)


def gaps(
    engine: Engine, prompts: dict[int, list[list[int]]], pause_s: float = 0.004
) -> tuple[float, dict[int, list[Wait]]]:
    """The step of a request that runs alone, and what each prompt that comes in then costs it."""
    endless = replace(GREEDY, max_tokens=engine.context - 4, ignore_eos=True)
    running = engine.submit([1, 2, 3], endless)
    heard = [next(running).time_ns for _ in range(BEFORE)]
    step_us = median((after - before) / 1e3 for before, after in pairwise(heard[BEFORE // 4 :]))
    came: dict[int, list[int]] = {n: [] for n in prompts}
    for n, some in prompts.items():
        for prompt in some:
            time.sleep(pause_s)
            beside = list(engine.submit(prompt, replace(GREEDY, max_tokens=1, ignore_eos=True)))
            came[n].append(beside[0].time_ns)
    if running.ended:
        raise InternalError("the running request ended before all prompts had come; it needs more context")
    running.cancel()
    heard += [token.time_ns for token in running]
    since, waits = heard[BEFORE - 1], {}
    for n, firsts in came.items():
        waits[n] = waits_of(heard, firsts, since=since, step_us=step_us)
        since = firsts[-1]
    return step_us, waits


def waits_of(times: Sequence[int], firsts: Sequence[int], *, since: int, step_us: float) -> list[Wait]:
    """For each prompt, by its first token's time, the gaps that began after the one before it had answered.

    Its own gap began before its token was made, and may end after that: the token may be told at the very step boundary
    with which the loop goes on.
    """
    found = []
    for begin, end in pairwise([since, *firsts]):
        own = [(after - before) / 1e3 for before, after in pairwise(times) if begin <= before < end]
        if not own:
            raise InternalError("the running request made no token between two prompts")
        found.append(Wait(max(own), sum(gap > 2 * step_us for gap in own)))
    return found


def judge_yield(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    outcomes = [
        Outcome("FAIL", "tape-yield", f"{one.job.words}: {one.error}") for one in ended if one.error is not None
    ]
    for one in (record for done in ended for record in done.of("yield")):
        step, left = one["step_us"], one["left_us"]
        value = (
            f"a step {step:.0f} us; asked to leave, the last step boundary after {one['border_us']:.0f} us, gone after "
            f"{left:.0f} (longest {one['left_most_us']:.0f})"
        )
        verdict: Verdict = "PASS" if left <= STEPS_TO_LEAVE * step else "MISS"
        outcomes.append(Outcome(verdict, "tape-leaves", value, f"gone within {STEPS_TO_LEAVE:.0f} steps", one))
        for prompt in one["prompts"]:
            outcomes.append(Outcome("PASS", f"tape-yield-{prompt['n']}", _said(prompt, step, left), "stated", prompt))
    return outcomes


def _said(prompt: Record, step: float, left: float) -> str:
    rest = prompt["gap_us"] - step - left - prompt["alone_us"]
    return (
        f"a prompt of {prompt['n']} tokens holds a running request up for {prompt['gap_us']:.0f} us (longest "
        f"{prompt['gap_most_us']:.0f}) between two tokens, {prompt['stops']:.0f} times: a step {step:.0f}, leaving "
        f"{left:.0f}, the prompt alone {prompt['alone_us']:.0f}, the rest {rest:.0f}"
    )


def _when(happened: Callable[[], bool]) -> int:
    """The host's clock as soon as something has happened."""
    end = time.monotonic() + DEADLINE_S
    while not happened():
        if time.monotonic() > end:
            raise InternalError(f"the loop was asked to leave and has not within {DEADLINE_S:.0f} s")
    return time.perf_counter_ns()


def _ids(model: Model, n: int, chance: random.Random) -> list[int]:
    return [chance.randrange(model.shape.vocab) for _ in range(n)]
