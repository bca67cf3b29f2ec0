"""Random admissions and cancels through the native loop: every request ends once, with the tokens it has alone.

Threads submit random requests to one engine for each kind of memory, and cancel some in the queue, in their prompt or
in their answer. There are fewer pages than the slots can hold, so that requests wait for memory and the prefix cache is
evicted. Every message of every request is compared with the answer of an engine that has nothing else to do.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.chaos_held import Held, growth, held
from ostinato.engine.engine import Engine
from ostinato.engine.request import Request, RequestMessage, Token
from ostinato.errors import QueueFull
from ostinato.options import Sampling
from tests.engine.opened import bits, open_engine, prompt, sampling
from tests.random_model import MemoryKind

KINDS: Final[tuple[MemoryKind, ...]] = ("kv", "swa", "recurrent", "hybrid")
N_SLOTS, CONTEXT, PAGE = 8, 1024, 16
N_PAGES: Final = N_SLOTS * CONTEXT // PAGE // 4
QUEUE: Final = 16
N_THREADS: Final = 2
N_SHORT, N_LONG = 96, 24  # different requests; only long ones are cancelled while they run
CANCELLED: Final = 0.25  # share of the requests
N_SAMPLES: Final = 20  # looks at what the process holds
QUIET_S: Final = 60.0  # for the last requests to end

Bits = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and the tokens of its answer when nothing else runs."""

    prompt: tuple[int, ...]
    sampling: Sampling
    answer: tuple[Bits, ...]


ShortAndLong = tuple[Sequence[Asked], Sequence[Asked]]


@dataclass(slots=True)
class LoopReport:
    """What was done, and what was wrong. Mutable: it is filled while the loop runs."""

    kind: str
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    samples: list[Held] = field(default_factory=list)


def made(kind: MemoryKind, chance: random.Random) -> ShortAndLong:
    """Short and long requests with their answers: greedy and sampled, ended by a stop id or by length."""
    wanted = []
    for seed in range(N_SHORT + N_LONG):
        is_long = seed >= N_SHORT
        n_prompt = chance.choice((1, 2, PAGE - 1, PAGE, PAGE + 1, chance.randint(3, 300 if is_long else 60)))
        ids = prompt(chance.randrange(12), n_prompt)  # few beginnings: most are shared
        most = chance.randint(300, 600) if is_long else chance.choice((1, 1, 2, 3, chance.randint(4, 24)))
        words: dict[str, Any] = {"max_tokens": most}
        if chance.random() < 0.5:
            words |= {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": seed}
        if chance.random() < 0.2:
            words |= {"logprobs": 3}
        if chance.random() < 0.2 and not is_long:
            words |= {"stop_token_ids": tuple(chance.sample(range(128), 16))}
        wanted.append((ids, sampling(**words)))
    with open_engine(kind, mode="loop", n_slots=1, context=CONTEXT, share_prefixes=False) as engine:
        asked = [Asked(tuple(ids), how, tuple(bits(engine.submit(ids, how)))) for ids, how in wanted]
    return asked[:N_SHORT], asked[N_SHORT:]


class Reader:
    """Checks one request's messages, on the engine's thread: in order, as alone, and one end."""

    __slots__ = ("_asked", "_ended", "_n", "_tell", "cancel_after", "is_cancelled")

    def __init__(
        self, asked: Asked, cancel_after: int | None, tell: Callable[[Reader, Request, str | None], None]
    ) -> None:
        """`cancel_after`: after so many tokens it is cancelled from within."""
        self._asked, self._tell, self.cancel_after = asked, tell, cancel_after
        self._n, self._ended, self.is_cancelled = 0, 0, False

    def __call__(self, request: Request, message: RequestMessage) -> None:
        if self._ended:
            self._tell(self, request, f"{type(message).__name__} after its end")
            return
        if isinstance(message, Token):
            if self._n >= len(self._asked.answer) or bits([message])[0] != self._asked.answer[self._n]:
                self._tell(self, request, f"token {self._n} is {message}, which it is not alone")
            self._n += 1
            if message.finish_reason is not None:
                self._end(request, None)
            elif self.cancel_after is not None and self._n >= self.cancel_after:
                self.is_cancelled = True
                request.cancel()
        elif isinstance(message, Exception):
            self._end(request, f"{type(message).__name__}: {message}")
        else:
            self._end(request, None if self.is_cancelled else "it ended as cancelled, and cancel() had not been called")

    def _end(self, request: Request, wrong: str | None) -> None:
        self._ended += 1
        self._tell(self, request, wrong)


class Storm:
    """Threads that submit and cancel until so many requests have been admitted."""

    def __init__(
        self, engine: Engine, asked: tuple[Sequence[Asked], Sequence[Asked]], n: int, seed: int, report: LoopReport
    ) -> None:
        (self._short, self._long) = asked
        self._engine, self._n, self._seed, self._report = engine, n, seed, report
        self._lock = threading.Lock()
        self.n_admitted = 0

    def run(self) -> None:
        every = max(1, self._n // N_SAMPLES)
        threads = [threading.Thread(target=self._submit, args=(number,)) for number in range(N_THREADS)]
        for thread in threads:
            thread.start()
        next_sample = 0
        while any(thread.is_alive() for thread in threads):
            if self.n_admitted >= next_sample and (sample := held(os.getpid())) is not None:
                self._report.samples.append(sample)
                next_sample += every
            time.sleep(0.05)
        for thread in threads:
            thread.join()

    def _submit(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        mine: list[tuple[Request, Reader]] = []
        while self.n_admitted < self._n and len(self._report.wrong) < 20 and self._engine.fault is None:
            cancels = chance.random() < CANCELLED
            asked = chance.choice(self._long if cancels else self._short)
            cancel_after = (
                chance.choice((1, 2, 8, chance.randint(9, 290))) if cancels and chance.random() < 0.5 else None
            )
            reader = Reader(asked, cancel_after, self._told)
            try:
                request = self._engine.submit(asked.prompt, asked.sampling, sink=reader, wait=chance.random() < 0.9)
            except QueueFull:
                self._count("refused, the queue was full")
                continue
            self._count("accepted")
            if cancels and cancel_after is None:
                mine.append((request, reader))
            # Others are cancelled later, so that some are in the queue, some in a slot, and some have ended.
            while mine and (len(mine) > 6 or chance.random() < 0.4):
                _cancel(*mine.pop(chance.randrange(len(mine))))
        for one in mine:
            _cancel(*one)

    def _count(self, what: str) -> None:
        with self._lock:
            self._report.counts[what] += 1

    def _told(self, reader: Reader, request: Request, wrong: str | None) -> None:
        with self._lock:
            counts = self._report.counts
            if wrong is not None:
                self._report.wrong.append(f"request {request.id}: {wrong}")
            if not request.ended:
                return
            admitted = request.prefill_ended is not None
            self.n_admitted += admitted
            counts["admitted"] += admitted
            counts["ended"] += 1
            if request.finish_reason == "cancelled":
                where = "its answer" if admitted else "its prompt" if request.prefill_began is not None else "the queue"
                counts[f"cancelled in {where}"] += 1
            else:
                counts[f"ended by {request.finish_reason or 'an error'}"] += 1


def _cancel(request: Request, reader: Reader) -> None:
    reader.is_cancelled = True
    request.cancel()


def run(kind: MemoryKind, n: int, seed: int) -> LoopReport:
    """At least `n` admissions through one engine."""
    report = LoopReport(kind)
    asked = made(kind, random.Random(f"{seed} {kind}"))
    with open_engine(kind, mode="loop", n_slots=N_SLOTS, context=CONTEXT, n_pages=N_PAGES, queue=QUEUE) as engine:
        began = time.perf_counter()
        Storm(engine, asked, n, seed, report).run()
        report.seconds = time.perf_counter() - began
        _quiet(engine, report)
        gc.collect()
        if (sample := held(os.getpid())) is not None:
            report.samples.append(sample)
    report.wrong += growth(report.samples)
    return report


def _quiet(engine: Engine, report: LoopReport) -> None:
    """Nothing is left: every accepted request has ended, and its slot and pages are free."""
    end = time.monotonic() + QUIET_S
    while report.counts["ended"] < report.counts["accepted"] and time.monotonic() < end:
        time.sleep(0.01)
    # The last slot is released right after its request's end.
    while any(slot.state != "free" for slot in engine.slots()) and time.monotonic() < end:
        time.sleep(0.01)
    stats, counts = engine.stats(), report.counts
    report.counts |= Counter({"steps": stats.steps, "tokens": stats.tokens, "launches of the loop": stats.triggers})
    if stats.fault is not None:
        report.wrong.append(f"the engine died: {stats.fault}")
    if counts["ended"] != counts["accepted"]:
        report.wrong.append(f"{counts['accepted']} were accepted and {counts['ended']} have ended")
    if sum(stats.ended.values()) != stats.submitted:
        report.wrong.append(f"the engine counts {stats.submitted} requests and the ends {stats.ended}")
    if busy := [slot for slot in engine.slots() if slot.state != "free"]:
        report.wrong.append(f"slots that are not free: {busy}")
    if stats.pages_leased or stats.waiting or stats.prefilling:
        left = {"pages": stats.pages_leased, "waiting": stats.waiting, "in their prompt": stats.prefilling}
        report.wrong.append(f"still held: {left}")


def shares(n: int) -> dict[MemoryKind, int]:
    """So many admissions over all kinds of memory."""
    return {kind: n // len(KINDS) + (index < n % len(KINDS)) for index, kind in enumerate(KINDS)}
