"""Sturdiness: the host does nothing per token, nothing grows, and what breaks ends with one error each.

Calls into CUDA for 100 and for 2,000 tokens, the host's time for draining and text, a process that is stopped in the
middle, busy cores, allocations, an injected fault, and engines opened and closed by the hundred. Each is a check for
every mode in which the device goes from step to step by itself: `calls-loop`, `calls-persistent`.
"""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

from bench.gpu_calls import CannotCount, counters
from bench.gpu_frame import Check, Ended, Job, Outcome, Record, Setting, run_child, say
from bench.gpu_models import TAPE, kv_type_of, model_on, modes_of, random_ids, settled_for
from ostinato.backends.base import PAGE_TOKENS
from ostinato.backends.cuda.pool import pool_of
from ostinato.backends.torch.model import Model
from ostinato.engine.choose import settle_model
from ostinato.engine.driver import GREEDY, LoopDriver
from ostinato.engine.engine import Engine
from ostinato.engine.open import open_runner
from ostinato.engine.request import Request, RequestSpec, Token
from ostinato.errors import EngineDead, OstinatoError
from ostinato.loop.host import OutEntry
from ostinato.options import Sampling
from ostinato.text.stream import TextStream
from ostinato.text.tokenizer import Tokenizer

MODES: Final = ("loop", TAPE)  # in which the host does nothing per token
FEW, MANY = 100, 2_000  # tokens that must cost the same number of calls
HOST_US: Final = 20.0
STOPPED_S: Final = 2.0
SETTLE_S: Final = 0.5  # after a child is ready, before it is stopped
BUSY_SHARE: Final = 1.05
GAP_SHARE: Final = 3.0
N_ENGINES: Final = 1_000
ENGINES_S: Final = 80.0
CLOSED_S: Final = 30.0
WARM_ENGINES: Final = 20
WILD_PAGE: Final = (1 << 30) - 1
WILD_ADDRESS: Final = 1 << 46  # neither host nor device memory is mapped there
GATE_UP, N_TILES = 4, 1  # the segment of layer 0 and the field of it that are falsified (backends/tape/src/parts.h)
MOST_STREAMS: Final = 8  # that engines by the hundred may have made
MB: Final = 1 << 20
# Calls that start, order or own something; what is left are questions, which an engine's thread asks by time.
WORKING: Final = re.compile("Launch|Memcpy|Memset|lloc|Free|Record|Create|Destroy|Instantiate|Synchronize|Wait|Upload")


def _engine(model: Model, type: str, *, mode: str, n_slots: int = 8, context: int = 2048, **more: Any) -> Engine:
    settled = settled_for(model, mode, n_slots=n_slots, context=context, kv_type=kv_type_of(type))
    return Engine(model, settled, **more)


def _by_hand(model: Model, type: str, *, mode: str, context: int) -> LoopDriver:
    n_pages = 2 * -(-context // PAGE_TOKENS[model.device.type])
    settled = settle_model(model, mode, context=context, n_pages=n_pages, n_slots=8, kv_type=kv_type_of(type))
    return LoopDriver(open_runner(model, settled))


# Calls per token


def calls(
    device: str, *, counter: int, mode: str, name: str, type: str, few: int = FEW, many: int = MANY
) -> Iterator[Record]:
    """Calls into CUDA from trigger to end for few and for many tokens, with no thread asking in between; and through
    an engine, whose thread does ask."""
    model = model_on(name, type, device)
    known = counters()
    called, count = known[counter] if counter < len(known) else ("Start.n_launches, the loop's own count", None)
    with closing(_by_hand(model, type, mode=mode, context=min(model.shape.context, many + 48))) as driver:
        seconds = _lap(driver, model, many)  # warms, too
        by_tokens = {n: _calls_by_hand(driver, model, n, 1.5 * seconds + 0.2, count) for n in (few, many)}
    through: dict[int, Counter[str]] = {}
    if count is not None:
        with _engine(model, type, mode=mode, context=min(model.shape.context, many + 48)) as engine:
            for n in (few, few, many):  # the first warms
                through[n] = count(_generation(engine, model, n))
    yield {
        "what": "calls",
        "counter": called,
        "seconds": seconds,
        "by_hand": {str(n): dict(found) for n, found in by_tokens.items()},
        "engine": {str(n): dict(found) for n, found in through.items()},
    }


def _lap(driver: LoopDriver, model: Model, n_tokens: int) -> float:
    """Seconds of a generation, warm."""
    for _ in range(2):
        driver.forget()
        driver.admit(0, random_ids(model, 16), most=n_tokens)
        started = time.perf_counter()
        driver.run()
    return time.perf_counter() - started


def _calls_by_hand(
    driver: LoopDriver,
    model: Model,
    n_tokens: int,
    seconds: float,
    count: Callable[[Callable[[], None]], Counter[str]] | None,
) -> Counter[str]:
    driver.forget()
    driver.admit(0, random_ids(model, 16), most=n_tokens)
    driver.synchronize()
    before = driver.runner.start.n_launches

    def work() -> None:
        driver.begin()
        time.sleep(seconds)
        if driver.runner.start.running:
            raise CannotCount(f"{n_tokens} tokens took more than {seconds:.1f} s")

    if count is None:
        work()
        found = Counter({"launches": driver.runner.start.n_launches - before})
    else:
        found = count(work)
    driver.wait()
    if len(driver.entries) != n_tokens:
        raise RuntimeError(f"{len(driver.entries)} tokens of {n_tokens} came")
    return found


def _generation(engine: Engine, model: Model, n_tokens: int) -> Callable[[], None]:
    sampling = replace(GREEDY, max_tokens=n_tokens, ignore_eos=True)

    def work() -> None:
        n = sum(1 for _ in engine.submit(random_ids(model, 16), sampling))
        if n != n_tokens:
            raise RuntimeError(f"{n} tokens of {n_tokens} came")

    return work


def run_calls(setting: Setting, job: Job) -> Ended:
    """The best counter that works here, each tried in a process of its own."""
    first = 0 if setting.on_gpu else len(counters())
    for counter in range(first, len(counters()) + 1):
        ended = run_child(setting, replace(job, words={**job.words, "counter": counter}))
        if ended.error is None or ended.cut:
            break
    return ended


def judge_calls(setting: Setting, ended: Sequence[Ended], name: str) -> list[Outcome]:
    found = ended[0].of("calls")[0]
    by_hand: dict[str, dict[str, int]] = found["by_hand"]
    few, many = by_hand
    same = by_hand[few] == by_hand[many]
    differ = _differences(by_hand[few], by_hand[many])
    totals = [sum(by_hand[n].values()) for n in (few, many)]
    value = f"{totals[0]} calls for {few} tokens, {totals[1]} for {many}, by {found['counter']}"
    detail = f"; differ: {differ}" if differ else f": {_named(by_hand[many])}"
    outcomes = [
        Outcome("PASS" if same else "FAIL", name, value + detail, "equal", {"calls": by_hand[many]}),
    ]
    if found["engine"]:
        engine: dict[str, dict[str, int]] = found["engine"]
        working = {n: {k: v for k, v in engine[n].items() if WORKING.search(k)} for n in (few, many)}
        asking = {n: sum(engine[n].values()) - sum(working[n].values()) for n in (few, many)}
        differ = _differences(working[few], working[many])
        value = (
            f"{sum(working[few].values())} calls for {few} tokens, {sum(working[many].values())} for {many}, beside "
            f"questions by time ({asking[few]} and {asking[many]})" + (f"; differ: {differ}" if differ else "")
        )
        outcomes.append(Outcome("FAIL" if differ else "PASS", f"{name}-engine", value, "equal"))
    return outcomes


def _differences(one: dict[str, int], two: dict[str, int]) -> str:
    names = sorted(name for name in {*one, *two} if one.get(name, 0) != two.get(name, 0))
    return ", ".join(f"{name} {one.get(name, 0)} and {two.get(name, 0)}" for name in names)


def _named(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items(), key=lambda one: -one[1])[:8])


# The host's time per token


def host_time(device: str, *, mode: str, name: str, type: str, n_tokens: int = MANY) -> Iterator[Record]:
    """Microseconds a token for draining, for handing over to a reader and for text; and what an engine's process takes.

    Draining is timed for all tokens at once, as after a pause, and for one at a time, as when each is waited for.
    """
    model = model_on(name, type, device)
    context = min(model.shape.context, n_tokens + 48)
    spent: dict[str, list[float]] = {what: [] for what in ("drain", "drain at once", "hand over", "text")}
    with closing(_by_hand(model, type, mode=mode, context=context)) as driver:
        host = driver.runner.host

        def generate() -> None:
            driver.forget()
            driver.admit(0, random_ids(model, 16), most=n_tokens)
            driver.begin()
            if not driver.runner.start.wait(120.0):
                raise RuntimeError("the loop did not end")

        for _ in range(3):
            generate()
            spent["drain"].append(_us(lambda: [host.drain(1) for _ in range(n_tokens)]))
            generate()
            entries: list[OutEntry] = []
            spent["drain at once"].append(_us(lambda: entries.extend(host.drain(1 << 20))))  # noqa: B023 - now
            spent["hand over"].append(_us(lambda: _hand_over(entries)))  # noqa: B023 - now
            stream = TextStream(_tokenizer(model.shape.vocab), ("</stop>",))
            spent["text"].append(_us(lambda: [stream.push(e.token or 0) for e in entries]))  # noqa: B023 - now
    with _engine(model, type, mode=mode, context=context) as engine:
        run = _generation(engine, model, n_tokens)
        run()
        before = time.process_time()
        run()
        whole = (time.process_time() - before) * 1e6 / n_tokens
    figures = {what: round(statistics.median(runs) / n_tokens, 2) for what, runs in spent.items()}
    yield {"what": "host", "us": figures, "process_us": round(whole, 2), "n_tokens": n_tokens}


def _hand_over(entries: Sequence[OutEntry]) -> None:
    """What an engine's thread does with entries, and what their reader does."""
    request = Request(1, RequestSpec([1], GREEDY, (), len(entries)), lambda _: None)
    for e in entries:
        reason = "length" if e is entries[-1] else None
        request.put(Token(e.token or 0, e.logprob, e.top, e.position, e.time_ns, reason))  # type: ignore[arg-type]  # a literal
    if sum(1 for _ in request) != len(entries):
        raise RuntimeError("tokens were lost on the way to their reader")


def _us(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e6


def _tokenizer(vocab: int) -> Tokenizer:
    """A vocabulary of words of one to eight letters, and some halves of characters."""
    chance = random.Random(3)
    letters = "etaoinshrdlu bcdfgé世"
    pieces = ["".join(chance.choices(letters, k=chance.randint(1, 8))).encode() for _ in range(vocab)]
    pieces[::50] = ["é".encode()[:1]] * len(pieces[::50])
    return Tokenizer(
        vocab_size=vocab,
        bos_id=None,
        eos_id=None,
        eog_ids=frozenset(),
        add_bos=False,
        add_eos=False,
        encoder=lambda text, special: [],
        texts=["?"] * vocab,
        shown=pieces,
        hidden=frozenset(),
    )


def judge_host(setting: Setting, ended: Sequence[Ended], name: str) -> list[Outcome]:
    found = ended[0].of("host")[0]
    us = found["us"]
    total = us["drain"] + us["hand over"] + us["text"]
    parts = ", ".join(f"{what} {value:.1f}" for what, value in us.items())
    value = (
        f"{total:.1f} us a token ({parts}); the whole process {found['process_us']:.0f} us of CPU time, naps included"
    )
    verdict: Any = "PASS" if total < HOST_US else "MISS"
    return [Outcome(verdict, name, value, f"drain, hand over and text under {HOST_US:.0f} us", found)]


# Stopped


@dataclass(slots=True)
class Heart:
    """A thread that notices when its process stood still. Mutable: it beats."""

    longest_s: float = 0.0
    stopped_at: float = 0.0
    going: bool = True

    def beat(self) -> None:
        last = time.perf_counter()
        while self.going:
            time.sleep(0.005)
            now = time.perf_counter()
            if now - last > self.longest_s:
                self.longest_s, self.stopped_at = now - last, last
            last = now


def stopped(device: str, *, mode: str, name: str, type: str, n_tokens: int, context: int) -> Iterator[Record]:
    """A generation during which the parent process stops this one."""
    model = model_on(name, type, device)
    with _engine(model, type, mode=mode, context=context) as engine:
        _generation(engine, model, 8)()
        yield stopped_request(engine, random_ids(model, 16), replace(GREEDY, max_tokens=n_tokens, ignore_eos=True))


def stopped_request(engine: Engine, prompt: Sequence[int], sampling: Sampling) -> Record:
    """A request, warm, during which the parent process stops this one once it has said that it is ready."""
    heart = Heart()
    beating = threading.Thread(target=heart.beat, daemon=True)
    request = engine.submit(prompt, sampling)
    tokens: list[Token] = []
    arrived: list[float] = []
    for token in request:
        tokens.append(token)
        arrived.append(time.perf_counter())
        if len(tokens) == 4:
            beating.start()
            say("ready")
    heart.going = False
    beating.join()
    # By when the soonest was heard of, the device's clock in the host's.
    offset = min(at - token.time_ns / 1e9 for at, token in zip(arrived, tokens, strict=True))
    begin, end = heart.stopped_at, heart.stopped_at + heart.longest_s
    within = sum(begin < token.time_ns / 1e9 + offset < end for token in tokens)
    return {
        "what": "stopped",
        "wanted": sampling.max_tokens,
        "n": len(tokens),
        "in_order": all(b.position == a.position + 1 for a, b in pairwise(tokens)),
        "finish": request.finish_reason,
        "stood_still_s": round(heart.longest_s, 3),
        "made_meanwhile": within,
        **_gaps(tokens),
    }


def _gaps(tokens: Sequence[Token], skip: int = 1) -> Record:
    """Microseconds between tokens by the device's clock."""
    gaps = sorted((b.time_ns - a.time_ns) / 1e3 for a, b in pairwise(tokens[skip:]))
    return {
        "median_us": round(statistics.median(gaps), 2),
        "p99_us": round(gaps[min(len(gaps) - 1, len(gaps) * 99 // 100)], 2),
        "longest_us": round(gaps[-1], 2),
    }


def run_stopped(setting: Setting, job: Job) -> Ended:
    """Stop the child for two seconds, once it says that it is in the middle."""

    def heard(process: subprocess.Popen[str], line: str) -> None:
        if line != "ready":
            return
        time.sleep(SETTLE_S)
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP)
            try:
                time.sleep(STOPPED_S)
            finally:
                os.kill(process.pid, signal.SIGCONT)

    return run_child(setting, job, heard)


def judge_stopped(setting: Setting, ended: Sequence[Ended], name: str) -> list[Outcome]:
    found = ended[0].of("stopped")[0]
    complete = found["n"] == found["wanted"] and found["in_order"] and found["finish"] == "length"
    spanned = found["stood_still_s"] >= 0.9 * STOPPED_S
    value = (
        f"{found['n']} tokens of {found['wanted']}; stood still for {found['stood_still_s']:.2f} s, in which the "
        f"device made {found['made_meanwhile']}; gaps: median {found['median_us']:.0f} us, longest "
        f"{found['longest_us']:.0f} us"
    )
    bar = f"none lost, longest gap under {GAP_SHARE:.0f} medians"
    good = complete and (
        not setting.on_gpu or (found["made_meanwhile"] > 0 and found["longest_us"] < GAP_SHARE * found["median_us"])
    )
    if good and not spanned:
        return [Outcome("SKIP", name, f"the generation was over before it could be stopped: {value}", bar, found)]
    return [Outcome("PASS" if good else "FAIL", name, value, bar, found)]


# Busy cores


@contextmanager
def busy_cores() -> Iterator[int]:
    """Every core has a process that only counts; they end with this block, or with this process."""
    n = len(os.sched_getaffinity(0))
    code = f"import os\nwhile os.getppid() == {os.getpid()}:\n    sum(range(100000))\n"
    others = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(n)]
    try:
        time.sleep(0.5)
        yield n
    finally:
        for other in others:
            other.kill()
            other.wait()


def busy(device: str, *, mode: str, name: str, type: str, n_tokens: int) -> Iterator[Record]:
    """Gaps between tokens on an idle machine, and with every core busy."""
    model = model_on(name, type, device)
    n_prompt = 500 if device != "cpu" else 32
    sampling = replace(GREEDY, max_tokens=n_tokens, ignore_eos=True)

    def gaps(engine: Engine) -> Record:
        return _gaps(list(engine.submit(random_ids(model, n_prompt), sampling)), skip=8)

    with _engine(model, type, mode=mode, context=n_prompt + n_tokens + 64) as engine:
        gaps(engine)
        idle = gaps(engine)
        with busy_cores() as n_busy:
            crowded = [gaps(engine) for _ in range(2)]
    yield {"what": "busy", "idle": idle, "busy": crowded, "n_busy": n_busy}


def judge_busy(setting: Setting, ended: Sequence[Ended], name: str) -> list[Outcome]:
    found = ended[0].of("busy")[0]

    def share(one: Record) -> float:
        return float(one["p99_us"] / one["median_us"])

    idle, crowded = share(found["idle"]), max(share(one) for one in found["busy"])
    worst = max(found["busy"], key=share)
    value = (
        f"p99 / median {crowded:.3f} with {found['n_busy']} busy processes (median {worst['median_us']:.1f} us, p99 "
        f"{worst['p99_us']:.1f}, longest {worst['longest_us']:.1f}); idle {idle:.3f}"
    )
    if crowded <= BUSY_SHARE:
        verdict: Any = "PASS"
    else:  # a device that is not steady by itself is a figure; one that the host unsettles is a fault
        verdict = "MISS" if idle > BUSY_SHARE or not setting.on_gpu else "FAIL"
    return [Outcome(verdict, name, value, f"at most {BUSY_SHARE}", found)]


# Allocations


def allocations(device: str, *, name: str, type: str, n_tokens: int = 1_000) -> Iterator[Record]:
    """What is allocated and compiled between the first token of an answer and its last, in each mode."""
    model = model_on(name, type, device)
    compiled = _compilations(device)
    for mode in _all_modes(device):
        with _engine(model, type, mode=mode, context=min(model.shape.context, n_tokens + 48)) as engine:
            _generation(engine, model, 8)()
            request = engine.submit(
                random_ids(model, 16, seed=2), replace(GREEDY, max_tokens=n_tokens, ignore_eos=True)
            )
            next(request)
            before = _allocated(engine, device, compiled)
            n = 1 + sum(1 for _ in request)
            after = _allocated(engine, device, compiled)
        grown = {key: after[key] - before[key] for key in before if after[key] != before[key]}
        yield {"what": "allocations", "mode": mode, "n": n, "grown": grown, "counted": sorted(before)}


def _all_modes(device: str) -> tuple[str, ...]:
    return modes_of(device) if device == "cpu" else (*modes_of(device), TAPE)


def _compilations(device: str) -> Callable[[], dict[str, int]]:
    """How many kernels this process has compiled or loaded so far."""
    from ostinato import build

    counted = {"triton": 0}
    if device != "cpu":
        from triton import knobs

        def told(*_: Any, **__: Any) -> None:
            counted["triton"] += 1

        knobs.compilation.listener = told  # the hook after a compilation would write our constants as JSON, and fails
    cubins: Any = getattr(build, "_cubins", {})
    return lambda: {"compiled by Triton": counted["triton"], "compiled by NVRTC": len(cubins)}


def _allocated(engine: Engine, device: str, compiled: Callable[[], dict[str, int]]) -> dict[str, int]:
    counts = {"graphs": engine.stats().instantiations, **compiled()}
    if device == "cpu":
        return counts
    stats: dict[str, Any] = dict(torch.cuda.memory_stats())
    pinned: dict[str, Any] = dict(getattr(torch.cuda, "host_memory_stats", dict)())
    return counts | {
        "device allocations": int(stats["allocation.all.allocated"]),
        "device segments": int(stats["segment.all.allocated"]),
        "device bytes": int(stats["allocated_bytes.all.current"]),
        "pinned allocations": int(pinned.get("num_host_alloc", 0)),
    }


def judge_allocations(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    records = ended[0].of("allocations")
    bad = {record["mode"]: record["grown"] for record in records if record["grown"]}
    short = [record["mode"] for record in records if record["n"] < 1_000 and setting.on_gpu]
    counted = ", ".join(records[0]["counted"])
    modes = ", ".join(record["mode"] for record in records)
    value = f"grew: {bad}" if bad else f"none over {records[-1]['n']} tokens in {modes} (counted: {counted})"
    missing = len(records) < len(_all_modes(setting.device)) or ended[0].error is not None
    wrong = bool(bad or short or missing)
    return [Outcome("FAIL" if wrong else "PASS", "allocations", value + (f"; {ended[0].error}" if missing else ""))]


# A fault


def fault(device: str, *, mode: str, how: str, name: str, type: str, n_tokens: int, context: int) -> Iterator[Record]:
    """Break the device under five requests, three of them running: what each is told, and whether the engine ends."""
    model = model_on(name, type, device)
    engine = _engine(model, type, mode=mode, n_slots=3, context=context)
    inject = injection(engine, how)
    complaints: list[str] = []
    threading.excepthook = lambda what: complaints.append(f"{what.exc_type.__name__}: {what.exc_value}")
    sampling = replace(GREEDY, max_tokens=n_tokens, ignore_eos=True)
    requests = [engine.submit(random_ids(model, 16, seed), sampling) for seed in range(5)]
    for request in requests[:3]:
        for _ in range(3):
            next(request)
    with torch.inference_mode(), suppress(RuntimeError):  # what was broken may be told here already
        inject()
        if engine.runner.start.alone:  # it fills the card: another kernel runs once it has left
            engine.runner.host.set_yield(True)
    ends: dict[int, list[str]] = {}

    def read(number: int, request: Request) -> None:
        told: list[str] = []
        ends[number] = told
        for _ in range(2):  # a second time: the end comes once
            try:
                n = sum(1 for _ in request)
                told.append(f"ended ({request.finish_reason}, {n} more tokens)" if not told else "nothing more")
            except Exception as error:
                told.append(f"{type_of(error)}: {error}")

    readers = [threading.Thread(target=read, args=one, daemon=True) for one in enumerate(requests)]
    for reader in readers:
        reader.start()
    latest = time.monotonic() + 20.0
    for reader in readers:
        reader.join(max(0.0, latest - time.monotonic()))
    unread = [number for number, reader in enumerate(readers) if reader.is_alive()]
    try:
        engine.submit([1, 2, 3], sampling)
        refused = "accepted"
    except OstinatoError as error:
        refused = f"{type_of(error)}: {error}"
    closing_thread = threading.Thread(target=engine.close, daemon=True)
    started = time.perf_counter()
    closing_thread.start()
    closing_thread.join(CLOSED_S)
    yield {
        "what": "fault",
        "mode": mode,
        "how": how,
        "ends": {str(number): told for number, told in sorted(ends.items())},
        "unread": unread,
        "said": engine.stats().fault,
        "refused": refused,
        "closed_s": None if closing_thread.is_alive() else round(time.perf_counter() - started, 2),
        "complaints": complaints,
    }


def injection(engine: Engine, how: str) -> Callable[[], object]:
    """What breaks a running engine, made before its requests: nothing is allocated or loaded when it is called.

    - `step`: the next step reads keys and values at addresses outside of all memory. In the persistent kernel those are
      the caches' own: its page numbers become offsets of 32 bits, of which a wild one may still lie in memory.
    - `beside`: a kernel of another library in the same process indexes a tensor beyond its end.
    - `stuck`: a matrix of the first layer has fewer tiles than blocks wait for, so that their waits pass the deadline.
    - `drift`: the loop finds another epoch than it was built with (I-10). It needs no GPU.
    """
    # The device's own memory: what the host is shown of it cannot be written.
    tables, plan, start = engine.runner._shared, engine.runner.plan, engine.runner.start
    if how == "beside":
        four = torch.zeros(4, device=plan.device)
        far = torch.tensor([1 << 20], device=plan.device)
        # Once before the loop runs: the driver loads a kernel when it is first used, and may wait for the device then.
        four[far * 0]
        return lambda: four[far]
    if how == "stuck":
        place = plan.buffer("segments")._memory
        values = place.clone().cpu()
        values[GATE_UP, N_TILES] -= 3
    elif how == "drift":
        place = torch.as_tensor(tables.table["epoch"])
        values = torch.zeros_like(place, device="cpu")  # no executable has this number
    elif start.name == TAPE:
        place = plan.buffer("caches")._memory
        values = torch.full_like(place, WILD_ADDRESS, device="cpu")
    else:
        place = torch.as_tensor(tables.table["pages"])
        values = torch.full_like(place, WILD_PAGE, device="cpu")
    source = values.pin_memory() if place.is_cuda else values
    # A copy from pinned memory needs no multiprocessor, so it arrives while a kernel fills the card. Torch counts no
    # write to `data`: a trigger that compares the counts would report the host, not what a kernel then does.
    return lambda: place.data.copy_(source, non_blocking=True)


def type_of(error: BaseException) -> str:
    return type(error).__name__


def judge_fault(setting: Setting, ended: Sequence[Ended], name: str) -> list[Outcome]:
    outcomes = []
    for one in ended:
        called = f"{name}-{one.job.words['how']}"
        records = one.of("fault")
        if not records:
            outcomes.append(Outcome("FAIL", called, one.error or "it said nothing"))
            continue
        found, wrong = records[0], []
        dead = EngineDead.__name__
        for number, told in found["ends"].items():
            if not told or not told[0].startswith(dead):
                wrong.append(f"request {number} was told {told[:1]}")
            elif told[1:] != ["nothing more"]:
                wrong.append(f"request {number} was told twice: {told[1:]}")
        wrong += [f"request {number} was told nothing" for number in found["unread"]]
        if "restart" not in (found["said"] or ""):
            wrong.append(f"the engine does not say that the process must restart: {found['said']}")
        if not found["refused"].startswith(dead):
            wrong.append(f"a new request: {found['refused'][:200]}")
        if found["closed_s"] is None:
            wrong.append(f"it did not close within {CLOSED_S:.0f} s")
        wrong += [f"a thread died of {text[:200]}" for text in found["complaints"]]
        value = f"{len(found['ends'])} requests, one error each; it says: {(found['said'] or '')[:160]}"
        outcomes.append(Outcome("FAIL" if wrong else "PASS", called, " || ".join(wrong) or value, "", found))
    return outcomes


# Engines by the hundred


def engines(device: str, *, mode: str, name: str, type: str, n: int, seconds: float) -> Iterator[Record]:
    """Open, ask, close, again and again; what the process and the card hold, now and then."""
    model = model_on(name, type, device)
    held: list[Record] = []
    started, done = time.perf_counter(), 0
    while done < n and time.perf_counter() - started < seconds:
        with _engine(model, type, mode=mode, n_slots=2, context=128, outbox_entries=256) as engine:
            _generation(engine, model, 4)()
        del engine
        done += 1
        if done == WARM_ENGINES or (done > WARM_ENGINES and done % 20 == 0):
            held.append({"n": done, **_held(device)})
    held.append({"n": done, **_held(device)})
    yield {"what": "engines", "n": done, "wanted": n, "s": round(time.perf_counter() - started, 1), "held": held}


def _held(device: str) -> Record:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held: Record = {
        "handles": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
    }
    if device != "cpu":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        pool = pool_of(torch.device("cuda", 0))
        held |= {"device": total - free, "torch": torch.cuda.memory_allocated()}
        held |= {"streams": pool.n_streams, "events": pool.n_events}
    return held


def judge_engines(setting: Setting, ended: Sequence[Ended], name: str) -> list[Outcome]:
    found = ended[0].of("engines")[0]
    held, said = found["held"], f"{found['n']} engines of {found['wanted']} in {found['s']:.0f} s"
    if len(held) < 2:
        return [Outcome("MISS", name, f"only {said}; {WARM_ENGINES} are opened before counting")]
    first, last = held[0], held[-1]
    middle = held[len(held) // 2]
    # What torch's and the driver's own caches take they take early: memory is judged from the middle on.
    allowed = {"handles": (first, 0), "threads": (first, 0), "torch": (first, 0), "device": (middle, 2 * MB)}
    allowed["rss"] = (middle, 16 * MB)  # it breathes
    allowed |= {"streams": (first, 0), "events": (first, 0)}  # ever made (E-4)
    grown = {
        key: last[key] - since[key]
        for key, (since, slack) in allowed.items()
        if key in last and last[key] - since[key] > slack
    }
    if last.get("streams", 0) > MOST_STREAMS:
        grown["streams"] = last["streams"]
    change = ", ".join(f"{key} {first[key]} to {last[key]}" for key in last if key != "n")
    value = f"{said}; after the first {first['n']}: {change}"
    bar, facts = "handles and threads as they were, memory no longer growing", {"held": [first, middle, last]}
    if grown:
        return [Outcome("FAIL", name, f"grew: {grown}; {value}", bar, facts)]
    return [Outcome("PASS" if found["n"] >= found["wanted"] else "MISS", name, value, bar, facts)]


# The checks


def _model_words(setting: Setting, large: str = "llama-1b") -> dict[str, str]:
    return {"name": large, "type": "bf16"} if setting.on_gpu else {"name": "tiny", "type": "f32"}


def _calls_jobs(setting: Setting, mode: str) -> list[Job]:
    few_many = {} if setting.on_gpu else {"few": 10, "many": 60}
    return [Job("calls", {"counter": 0, "mode": mode, **_model_words(setting, "tiny"), **few_many}, 100)]


def _host_jobs(setting: Setting, mode: str) -> list[Job]:
    more = {} if setting.on_gpu else {"n_tokens": 60}
    return [Job("host_time", {"mode": mode, **_model_words(setting, "tiny"), **more}, 90)]


def _stopped_jobs(setting: Setting, mode: str) -> list[Job]:
    sizes = {"n_tokens": 7_000, "context": 8192} if setting.on_gpu else {"n_tokens": 1_500, "context": 2048}
    return [Job("stopped", {"mode": mode, **_model_words(setting), **sizes}, 120)]


def _busy_jobs(setting: Setting, mode: str) -> list[Job]:
    n_tokens = 1_000 if setting.on_gpu else 100
    return [Job("busy", {"mode": mode, **_model_words(setting), "n_tokens": n_tokens}, 90)]


def _allocation_jobs(setting: Setting) -> list[Job]:
    more = {} if setting.on_gpu else {"n_tokens": 40}
    return [Job("allocations", {**_model_words(setting, "smollm2-135m"), **more}, 90)]


def _fault_jobs(setting: Setting, mode: str) -> list[Job]:
    sizes = {"n_tokens": 7_500, "context": 8192} if setting.on_gpu else {"n_tokens": 1_500, "context": 2048}
    words = {"mode": mode, **_model_words(setting, "smollm2-135m"), **sizes}
    on_gpu = ("step", "beside", "stuck") if mode == TAPE else ("step", "beside")
    return [Job("fault", {"how": how, **words}, 120) for how in (on_gpu if setting.on_gpu else ("drift",))]


def _engine_jobs(setting: Setting, mode: str) -> list[Job]:
    n, seconds = (N_ENGINES, ENGINES_S) if setting.on_gpu else (60, 20.0)
    return [Job("engines", {"mode": mode, **_model_words(setting, "tiny"), "n": n, "seconds": seconds}, 120)]


def proofs(
    name: str,
    jobs: Callable[[Setting, str], Sequence[Job]],
    judge: Callable[[Setting, Sequence[Ended], str], Sequence[Outcome]],
    run: Callable[[Setting, Job], Ended] | None = None,
    part: str = "stress",
) -> dict[str, Check]:
    """A check for each mode, by mode. Where there is no GPU, the persistent kernel is skipped."""

    def check(mode: str) -> Check:
        called = f"{name}-{mode}"

        def mine(setting: Setting) -> Sequence[Job]:
            return jobs(setting, mode) if setting.on_gpu or mode != TAPE else []

        def judged(setting: Setting, ended: Sequence[Ended]) -> Sequence[Outcome]:
            if not ended:
                return [Outcome("SKIP", called, "the persistent kernel is CUDA's")]
            return judge(setting, ended, called)

        return Check(part, called, mine, judged, alone=True, run=run)

    return {mode: check(mode) for mode in MODES}


WORKS: Final = {
    "calls": calls,
    "host_time": host_time,
    "stopped": stopped,
    "busy": busy,
    "allocations": allocations,
    "fault": fault,
    "engines": engines,
}

_PROOFS: Final = (
    proofs("calls", _calls_jobs, judge_calls, run_calls),
    proofs("host-time", _host_jobs, judge_host),
    proofs("stopped", _stopped_jobs, judge_stopped, run_stopped),
    proofs("busy-cores", _busy_jobs, judge_busy),
    proofs("fault", _fault_jobs, judge_fault),
    proofs("engines", _engine_jobs, judge_engines),
)

CHECKS: Final = (
    Check("stress", "allocations", _allocation_jobs, judge_allocations, alone=True),
    *(proof[mode] for mode in MODES for proof in _PROOFS),
)
