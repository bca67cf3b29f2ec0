"""Measures how fast a model decodes here, beside the limit of this machine's memory; nothing is printed.

Every figure comes through an `Engine`, as any caller would use it: prompts of random ids, greedy tokens, the device's
own times. In the terms of llama-bench: *pp* is a prompt of so many tokens, *tg* so many generated tokens, *depth* how
many positions are in memory before. The limit beside a figure is what a step must read (every weight once, and keys
and values of the live sequences) over the read bandwidth, which is measured too. A prompt is limited by arithmetic, so
its limit says little.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from ostinato.backends.base import PAGE_TOKENS, Settled
from ostinato.backends.machine import DeviceKind, kind_of
from ostinato.backends.runner import Runner
from ostinato.cache.kv_bytes import cell_bytes
from ostinato.engine.choose import modes_of, settle_model, why_not_model
from ostinato.engine.cores import default_threads
from ostinato.engine.driver import GREEDY, LoopDriver
from ostinato.engine.engine import Engine
from ostinato.engine.machine import machine_at
from ostinato.engine.open import open_runner
from ostinato.engine.request import Token
from ostinato.errors import BadOption, HardwareCannot, InternalError
from ostinato.lab.read_bandwidth import cpu_bandwidth, weights_bandwidth
from ostinato.loop.plan import Node
from ostinato.models.shape import Shape
from ostinato.options import Activations, KVType

if TYPE_CHECKING:
    from ostinato.models.blocks import LoadedModel

DECODE_REPEATS: Final = 3
# Far more than any cache holds, little enough for a laptop.
READ_BYTES: Final = {"cpu": 256 << 20, "cuda": 4 << 30}
# Tokens that the first of several sequences may generate while the prompts of the others run.
HEAD_START: Final = 64
PROFILED_STEPS: Final = 16


@dataclass(frozen=True, slots=True)
class Task:
    """One line of the table: what is measured."""

    kind: Literal["pp", "tg"]
    n_tokens: int
    depth: int
    batch: int
    mode: str

    @property
    def name(self) -> str:
        """As llama-bench calls it.

        >>> Task("tg", 128, 500, 1, "eager").name
        'tg128 @ d500'
        """
        return f"{self.kind}{self.n_tokens}" + (f" @ d{self.depth}" if self.depth else "")


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One repeat: tokens of all sequences together, and their seconds by the device's clock and by the host's."""

    n_tokens: int
    device_s: float
    host_s: float


@dataclass(frozen=True, slots=True)
class Figure:
    """The result of a task. `bytes_per_token`: the least that must be read for one token."""

    task: Task
    runs: tuple[TimedRun, ...]
    bytes_per_token: float
    bandwidth: float  # bytes per second

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second of each repeat, by the device's clock."""
        return tuple(run.n_tokens / run.device_s for run in self.runs)

    @property
    def tok_s(self) -> float:
        return statistics.median(self.rates)

    @property
    def host_tok_s(self) -> float:
        return statistics.median(run.n_tokens / run.host_s for run in self.runs)

    @property
    def limit_tok_s(self) -> float:
        """Tokens per second if a step only read its bytes."""
        return self.bandwidth / self.bytes_per_token


@dataclass(frozen=True, slots=True)
class KindTime:
    """Nodes of one kind in a step: how many, their time together, and what they read of the weights."""

    kind: str
    n_nodes: int
    microseconds: float
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of a step goes, the mean of several, in the order of the plan; without the step boundary.

    `between_us`: from the last node of a step to the first of the next, if the device's own marks show it.
    """

    batch: int
    depth: int
    kinds: tuple[KindTime, ...]
    mode: str = "eager"
    between_us: float | None = None

    @property
    def microseconds(self) -> float:
        return sum(kind.microseconds for kind in self.kinds)


def read_bandwidth(device: str, repeats: int = 5, threads: int | None = None) -> float:
    """Bytes per second that a plain read of much memory reaches: the best of several passes over it."""
    machine = machine_at(device)
    n_bytes = min(READ_BYTES[machine.kind], machine.free_bytes // 4)
    if machine.kind == "cpu":
        return cpu_bandwidth(n_bytes, threads or default_threads(), repeats)
    from ostinato.lab.gpu_time import gpu_bandwidth

    return gpu_bandwidth(device, n_bytes, repeats)


def weights_read_bandwidth(model: LoadedModel, repeats: int = 5, threads: int | None = None) -> float:
    """Bytes per second at which the weights of a model can be read: on a CPU measured with these weights, on a GPU the
    bandwidth of its memory."""
    if kind_of(str(model.device)) == "cuda":
        return read_bandwidth(str(model.device), repeats)
    return weights_bandwidth(model, threads or default_threads(), repeats, READ_BYTES["cpu"])


def kv_read_bytes(shape: Shape, kv_type: KVType, position: int) -> int:
    """Bytes of its sequence that a step at this position reads: keys and values, or states."""
    kept = sum(
        min(position + 1, one.window or position + 1) * cell_bytes(one, kv_type) for one in shape.attention.values()
    )
    return kept + 4 * shape.state_numbers


def decoded_by_mode(model: LoadedModel, *, n_prompt: int, n_gen: int) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """The engine's own step in every mode that there is on this kind of device, as `Bench.decoded` has it; for a mode
    that cannot run, the reason instead."""
    kind = kind_of(str(model.device))
    bench = Bench(model, "bf16" if kind == "cuda" else "f32", repeats=DECODE_REPEATS)
    reasons = why_not_model(model)
    for mode in modes_of(kind):
        reason = reasons[mode]
        yield mode, bench.decoded(mode, n_prompt=n_prompt, n_gen=n_gen) if reason is None else reason


@dataclass(frozen=True, slots=True)
class Bench:
    """One model to be measured, and how."""

    model: LoadedModel
    kv_type: KVType
    bandwidth: float = math.nan  # for the limits beside figures
    repeats: int = 5
    activations: Activations = "wide"  # of weights in tiles
    threads: int | None = None

    def figures(
        self,
        *,
        modes: Sequence[str],
        batches: Sequence[int],
        n_prompts: Sequence[int],
        n_gens: Sequence[int],
        depths: Sequence[int],
    ) -> Iterator[Figure]:
        """All combinations, each as soon as it is measured. A prompt is one sequence's: pp is measured once a mode."""
        longest = max((*n_prompts, *(n + HEAD_START * max(batches) for n in n_gens)), default=0)
        self._check_room(max((*n_prompts, *n_gens), default=0), max(depths, default=0))
        context = min(self.model.shape.context, max(depths, default=0) + longest + 2)
        for mode in modes:
            for batch in batches:
                with self.engine(mode, batch, context) as engine:
                    for depth in depths:
                        if batch == batches[0]:
                            for n in filter(None, n_prompts):
                                yield self.prompt(engine, Task("pp", n, depth, 1, mode))
                        for n in filter(None, n_gens):
                            yield self.generated(engine, Task("tg", n, depth, batch, mode))

    def prompt(self, engine: Engine, task: Task) -> Figure:
        """How fast a prompt is computed after `depth` positions that are in memory already, in whole pages."""
        page = engine.runner.page_tokens
        before = self._ids(task.depth // page * page, "before")
        sampling = replace(GREEDY, max_tokens=1, ignore_eos=True)
        if before:
            list(engine.submit(before, sampling))  # to its end
        runs = []
        for number in range(self.repeats + 1):
            request = engine.submit([*before, *self._ids(task.n_tokens, task.name, number)], sampling)
            list(request)
            n = len(request.spec.prompt) - request.cached_tokens
            runs.append(TimedRun(n, request.prefill_s, request.prefill_s))
        rows = engine.runner.chunks.rows
        weights = engine.runner.plan.read_bytes(rows)
        starts = range(len(before), len(before) + task.n_tokens, rows)
        kept = sum(kv_read_bytes(self.model.shape, self.kv_type, start + rows - 1) for start in starts)
        return Figure(task, tuple(runs[1:]), (len(starts) * weights + kept) / task.n_tokens, self.bandwidth)

    def generated(self, engine: Engine, task: Task) -> Figure:
        """How fast all sequences of a batch decode, from the moment that the last of them has begun."""
        prompts = [self._ids(max(1, task.depth), "sequence", number) for number in range(task.batch)]
        # The first run is not counted: it warms, and leaves the prompts in memory for those after it.
        _watch(engine, prompts, task.n_tokens)
        windows: list[_Window] = []
        for spare in range(2 * self.repeats, -1, -1):
            window = _watch(engine, prompts, task.n_tokens)
            # A run in which a sequence ended early is used only if there is no other.
            if len(window.tokens) == task.batch * task.n_tokens or spare < self.repeats - len(windows):
                windows.append(window)
            if len(windows) == self.repeats:
                break
        runs = tuple(TimedRun(len(window.tokens), window.device_s, window.host_s) for window in windows)
        positions = [token.position for window in windows for token in window.tokens]
        weights = engine.runner.plan.read_bytes(task.batch)
        # A token at position p came of a step that took in the one before it.
        kept = statistics.fmean(kv_read_bytes(self.model.shape, self.kv_type, position - 1) for position in positions)
        return Figure(task, runs, weights / task.batch + kept, self.bandwidth)

    def profile(self, *, batch: int, depth: int, n_steps: int = PROFILED_STEPS, mode: str = "eager") -> Profile:
        """The time of each kind of node: in `eager` by the host's clock around every node; in a GPU's other
        modes by marks of the device between the nodes. Refused if there are none."""
        if (reason := why_not_profiled(mode, self._kind)) is not None:
            raise HardwareCannot(f"mode {mode!r} cannot be profiled here: {reason}")
        n_prompt, most = max(1, depth), n_steps + 2
        page = PAGE_TOKENS[self._kind]
        n_pages = batch * -(-(n_prompt + most) // page)
        with closing(
            LoopDriver(open_runner(self.model, self._settled(mode, batch, n_prompt + most, n_pages)))
        ) as driver:
            timer = _timed_nodes(driver.runner)
            if mode == "eager":
                self._run_steps(driver, timer, batch, n_prompt, n_steps)
            else:
                self._run_loop(driver, timer, batch, n_prompt, n_steps)
            spent, nodes = timer.microseconds(), driver.runner.plan.nodes
            between = getattr(timer, "between", lambda n: None)(n_steps)  # which marks of the device show
        kinds = dict.fromkeys(node.kind for node in nodes)
        times = tuple(_kind_time(kind, nodes, spent, n_steps, batch) for kind in kinds)
        return Profile(batch, depth, times, mode, between)

    def decoded(self, mode: str, *, n_prompt: int, n_gen: int) -> dict[str, Any]:
        """One mode end to end, without memory of earlier prompts: time to the first token, tokens a second by the
        device's clock, launches and host time per token."""
        context = n_prompt + n_gen + 2
        settled = self._settled(mode, 1, context, 2 * -(-context // PAGE_TOKENS[self._kind]))
        with Engine(self.model, settled, share_prefixes=False) as engine:
            prompts = [self._ids(n_prompt, "decode", number) for number in range(self.repeats + 1)]  # the first warms
            runs = [_decode(engine, prompt, n_gen) for prompt in prompts]
        middle = sorted(runs[1:], key=lambda run: run["tokens_s"])[self.repeats // 2]
        return {"mode": mode, "n_prompt": n_prompt, "n_gen": n_gen, **middle}

    def _run_steps(self, driver: LoopDriver, timer: _Timer, batch: int, n_prompt: int, n_steps: int) -> None:
        """Steps that the host drives."""
        for slot in range(batch):
            driver.admit(slot, self._ids(n_prompt, "sequence", slot), most=n_steps + 2)
        driver.step()  # admits
        driver.step()  # warms
        timer.forget()
        for _ in range(n_steps):
            driver.step()

    def _run_loop(self, driver: LoopDriver, timer: _Timer, batch: int, n_prompt: int, n_steps: int) -> None:
        """Two runs to their end, of which the first warms; the first token of each is its prompt's."""
        for _ in range(2):
            driver.forget()
            for slot in range(batch):
                driver.admit(slot, self._ids(n_prompt, "sequence", slot), most=n_steps + 1)
            timer.forget()
            driver.run()

    def engine(self, mode: str, batch: int, context: int) -> Engine:
        """An engine of so many slots, to be closed by the caller."""
        # One more than are live, since earlier runs leave prefixes in memory.
        n_pages = (batch + 1) * -(-context // PAGE_TOKENS[self._kind])
        return Engine(self.model, self._settled(mode, batch, context, n_pages))

    @property
    def _kind(self) -> DeviceKind:
        return kind_of(str(self.model.device))

    def _settled(self, mode: str, batch: int, context: int, n_pages: int) -> Settled:
        return settle_model(
            self.model,
            mode,
            context=context,
            n_pages=n_pages,
            n_slots=batch,
            kv_type=self.kv_type,
            activations=self.activations,
            threads=self.threads,
        )

    def _check_room(self, n_tokens: int, depth: int) -> None:
        context = self.model.shape.context
        if depth + n_tokens + 2 > context:
            raise BadOption(
                f"{n_tokens} tokens after a depth of {depth} do not fit the model's context of {context}; lower "
                "--depth, --n-prompt or --n-gen"
            )

    def _ids(self, n: int, *salt: object) -> list[int]:
        """Random ids: the same for the same salt, and nothing in common for two."""
        chance = random.Random(repr(salt))
        return [chance.randrange(self.model.shape.vocab) for _ in range(n)]


# Generating


@dataclass(frozen=True, slots=True)
class _Window:
    """An interval in which all sequences were live: its tokens, and its length by either clock."""

    tokens: tuple[Token, ...]
    device_s: float
    host_s: float


def _watch(engine: Engine, prompts: Sequence[Sequence[int]], n_tokens: int) -> _Window:
    """Submit all prompts at once; measure from the last one's first token for `n_tokens` more of it, then cancel."""
    everything = replace(GREEDY, ignore_eos=True)
    requests = [engine.submit(prompt, everything, wait=True) for prompt in prompts]
    last, heard = requests[-1], []
    came = [0.0, 0.0]
    for token in last:
        heard.append(token)
        came[len(heard) > 1] = time.perf_counter()
        if len(heard) == n_tokens + 1:
            break
    for request in requests:
        request.cancel()
    list(last)
    begin, end = heard[0].time_ns, heard[-1].time_ns
    of_all = [token for request in requests[:-1] for token in request] + heard
    within = tuple(token for token in of_all if begin < token.time_ns <= end)
    if not within or end <= begin:
        raise InternalError("no token was made between the first and the last: the device's clock stands still")
    return _Window(within, (end - begin) / 1e9, came[1] - came[0])


def _decode(engine: Engine, prompt: list[int], n_gen: int) -> dict[str, float]:
    before = engine.stats()
    request = engine.submit(prompt, replace(GREEDY, max_tokens=n_gen, ignore_eos=True))
    first = next(request)
    cpu = time.process_time()
    tokens = [first, *request]
    spent = time.process_time() - cpu
    after, n = engine.stats(), len(tokens) - 1
    return {
        "first_token_ms": request.first_token_s * 1e3,
        "tokens_s": n / ((tokens[-1].time_ns - first.time_ns) / 1e9),
        "launches_per_token": (after.launches - before.launches) / n,
        "host_us_per_token": spent * 1e6 / n,
    }


# Profiling


def why_not_profiled(mode: str, kind: DeviceKind) -> str | None:
    """Why the nodes of a mode cannot be timed on such a device; None if they can."""
    if mode == "loop" and kind == "cpu":
        return "the native loop is one call: its nodes are not timed; eager's are"
    return None


class _Timer(Protocol):
    """Wraps nodes so that each adds up its own time."""

    def timed(self, node: Node) -> Node: ...
    def forget(self) -> None: ...

    def microseconds(self) -> dict[str, float]:
        """By the node's name, all steps together."""


class _CpuTimer:
    """By the host's clock."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def timed(self, node: Node) -> Node:
        def run() -> None:
            started = time.perf_counter()
            node.run()
            self._spent[node.name] = self._spent.get(node.name, 0.0) + time.perf_counter() - started

        return replace(node, run=run)

    def forget(self) -> None:
        self._spent = {}

    def microseconds(self) -> dict[str, float]:
        return {name: seconds * 1e6 for name, seconds in self._spent.items()}


def _timed_nodes(runner: Runner) -> _Timer:
    """Put clocks around the nodes of a loop that has not begun."""
    timer = _timer_for(runner)
    plan = replace(runner.plan, nodes=tuple(timer.timed(node) for node in runner.plan.nodes))
    kind: Any = type(runner.start)
    start = kind(plan, runner.tables, runner.guard, runner.changed.set)
    runner.decode_mode.replace(plan, start)
    runner.plan, runner.start = plan, start
    return timer


def _timer_for(runner: Runner) -> _Timer:
    device, nodes = runner.model.device, runner.plan.nodes
    if runner.settled.kind == "cpu":
        return _CpuTimer()
    if runner.settled.mode == "eager":
        from ostinato.lab.gpu_time import EventTimer

        return EventTimer(nodes[0].name, device)
    from ostinato.backends.cuda.stamps import Stamps

    return Stamps(nodes, device)


def _kind_time(kind: str, nodes: Sequence[Node], spent: dict[str, float], n_steps: int, batch: int) -> KindTime:
    mine = [node for node in nodes if node.kind == kind]
    microseconds = sum(spent.get(node.name, 0.0) for node in mine) / n_steps
    return KindTime(kind, len(mine), microseconds, round(sum(node.read_bytes(batch) for node in mine)))
