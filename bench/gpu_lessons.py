"""GPU checks of lessons (E, docs/rules.md) that small models show in seconds, which tests show without a GPU too.

Launches that are refused, canaries behind products, nodes that run twice (E-1, E-20, E-35, E-37); a grid that does not
fit (E-83); attacks on decode mode while the loop runs, and drift (E-31, E-67); whole sequences by hand (E-24, E-41,
E-69, E-72, E-85); captures that fail (E-57, E-58); what the process shows of an engine (E-10, E-13, E-14); and the real
server (E-28, E-73, E-82).
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from bench.gpu_exact import first_difference, witnesses
from bench.gpu_executor import broken_node, by_hand
from bench.gpu_frame import ROOT, Check, Ended, Job, Outcome, Record, Setting
from bench.gpu_lab import session_model
from bench.gpu_models import TAPE, kv_type_of, model_on, place, settled_for
from ostinato.backends.base import PAGE_TOKENS
from ostinato.backends.machine import TUNED
from ostinato.backends.torch.model import Model
from ostinato.engine.driver import GREEDY, LoopDriver
from ostinato.engine.engine import Engine
from ostinato.errors import BadPointer, DecodeInvariantError, EngineDead, HardwareCannot, PlanStale
from ostinato.lab.random_weights import random_blocks
from ostinato.loop.layout import Fault, Finish, Word
from ostinato.loop.memory import memory_in

DEADLINE_S: Final = 60.0
CANARY: Final = 12_345.0  # behind an output, where nothing may be written
CONTEXT: Final = 2_048
LONGEST: Final = 8_192  # the context of attacks, where the model has it: the loop still runs when the last has come
WHOLE_SHARE: Final = 0.95  # of the pace of streams that complete answers have at least, by the median of rounds
SERVED_TOKENS, SERVED_ROUNDS, CLIENTS = 800, 20, 4  # a round takes a tenth of a second: some are slow by chance
_REFUSALS: Final = (DecodeInvariantError, ValueError)  # numpy's own for its arrays is a ValueError


def _lesson(code: str, right: bool, said: str) -> Record:
    return {"what": "lesson", "code": code, "right": bool(right), "said": said}


def _ids(n: int, seed: int = 1) -> list[int]:
    return [(7 * seed + 13 * i) % 997 for i in range(n)]


def _by_hand(model: Model, type: str, mode: str, *, context: int = CONTEXT, n_slots: int = 2) -> LoopDriver:
    return by_hand(model, type, mode=mode, context=context, n_slots=n_slots)


def _tokens(driver: LoopDriver, generation: int) -> list[int | None]:
    return [entry.token for entry in driver.entries if entry.generation == generation]


# Launches


def launches(device: str) -> Iterator[Record]:
    """Memory that a kernel must not touch is refused by name; products stay in their buffers; nodes may run twice."""
    from ostinato.backends.cuda.triton.norm import bind_norm

    where = place(device)
    x, y, weight = torch.randn(3, 64, device=where), torch.full((3, 64), torch.nan, device=where), torch.rand(64)
    gone = torch.rand(64, device=where)
    gone.untyped_storage().resize_(0)
    spoiled = {
        "empty": torch.empty(0, device=where),
        "freed": gone,
        "on the host": weight,
        "of another type": weight.to(where).half(),
        "with holes": torch.rand(128, device=where)[::2],
        "short": torch.rand(32, device=where),
    }
    let_through = []
    for what, wrong in spoiled.items():
        try:
            bind_norm(x, y, wrong, None, 1e-6)
            let_through.append(what)
        except BadPointer as error:
            let_through += [] if "weight" in str(error) else [f"{what}: {error}"]
    bind_norm(x, y, weight.to(where), None, 1e-6)()
    finite = bool(y.isfinite().all())
    value = f"a weight that is {', '.join(spoiled)}: {let_through or 'each refused by name'}; the next launch is right"
    yield _lesson("E-1", not let_through and finite, value)
    yield from _odd_products(where)
    yield from _twice(device)


def _odd_products(where: torch.device) -> Iterator[Record]:
    """Products of odd sizes, for steps and for prompts: NaN in rows not read, canaries behind those written."""
    from ostinato.backends.cuda.triton.gemm import bind_gemm
    from ostinato.backends.cuda.triton.matmul import bind_matmul
    from ostinato.backends.torch.ops.matmul import matmul_torch
    from tests.backends.cuda.packing import pack

    n_slots, outs, wrong, n = 17, 16 + 5, [], 0
    for type, width in ((None, 1000), ("Q8_0", 896), ("Q4_K", 1536)):
        if type is None:
            weight: Any = torch.randn(outs, width, device=where, dtype=torch.bfloat16) / 32
        else:
            blocks = random_blocks(type, outs, width, np.random.default_rng(1))
            weight = pack(type, torch.from_numpy(blocks), outs, width).to(where)
        for n_rows in (1, 3, 15, 17):
            x = torch.full((n_slots, width), torch.nan, device=where)
            x[:n_rows] = torch.randn(n_rows, width, device=where)
            count = torch.tensor([n_rows], dtype=torch.int32, device=where)
            expected = torch.zeros(n_slots, outs, device=where)
            matmul_torch(x, weight, expected, count)
            for name in ("matmul", "gemm"):
                room = torch.full((n_slots * outs + 256,), CANARY, device=where)
                out = room[: n_slots * outs].view(n_slots, outs)
                if name == "matmul":
                    bind_matmul(x, weight, out, count)()
                else:
                    bind_gemm(x[:n_rows], weight, out[:n_rows])()
                apart = float((out[:n_rows] - expected[:n_rows]).abs().max() / expected[:n_rows].abs().max())
                intact = bool((room[n_rows * outs :] == CANARY).all())
                n += 1
                if not (apart < 0.02 and intact):  # NaN is not below it
                    wrong.append(f"{name} {type or 'bfloat16'} {n_rows}: apart {apart:.3g}, canaries intact: {intact}")
    value = f"{n} products of 21 columns and 1 to 17 rows: {'; '.join(wrong) or 'right, and nothing beyond them'}"
    for code in ("E-20", "E-35"):
        yield _lesson(code, not wrong, value)


def _twice(device: str) -> Iterator[Record]:
    """Every node of a step, once and once more."""
    changed, added = [], set()
    with closing(_by_hand(model_on("llama", "bf16", device), "bf16", "eager", context=128)) as driver:
        driver.admit(1, _ids(5), most=2)
        driver.run()
        runner, plan = driver.runner, driver.runner.plan
        runner.decode_mode.exit()
        runner.tables.table["n_rows"].fill_(1)
        for node in plan.nodes:
            driver.synchronize()
            node.run()
            if "x" in node.reads and "x" in node.writes:
                added.add(node.kind)
                continue
            driver.synchronize()
            once = [plan.buffer(name).tensor.clone() for name in node.writes]
            node.run()
            driver.synchronize()
            again = [plan.buffer(name).tensor.clone() for name in node.writes]
            if not all(torch.equal(_bytes(a), _bytes(b)) for a, b in zip(once, again, strict=True)):
                changed.append(node.name)
        n = len(plan.nodes)
    value = f"{n} nodes: {changed or 'the output of one run'}; {', '.join(sorted(added))} add to the residual stream"
    yield _lesson("E-37", not changed and added == {"out", "down"}, value)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def grid(device: str, *, name: str, type: str) -> Iterator[Record]:
    """More blocks of the persistent kernel than fit on the card at once."""
    most = 64 * torch.cuda.get_device_properties(place(device)).multi_processor_count  # none holds 64 blocks
    with closing(_by_hand(model_on(name, type, device), type, TAPE)) as driver:
        yield _too_many(driver, most)


def _too_many(driver: LoopDriver, n_blocks: int) -> Record:
    """So many blocks, asked of the engine by a build and of the driver by a launch of the kernel that is built; then
    the sequence that waits meanwhile."""
    runner, prompt = driver.runner, _ids(20)
    expected = _few(driver, prompt)
    runner.decode_mode.exit()
    generation = driver.admit(0, prompt, most=6)
    before = runner.host.word(Word.STEPS)
    second, step = _second(driver), runner.start._step  # type: ignore[attr-defined]  # of this mode alone
    more = replace(step.sizes, grid=replace(step.sizes.grid, n_blocks=n_blocks))
    with patch.object(step, "sizes", more):
        built, launched = _refusal(second.build), _refusal(runner.decode_mode.step)
    second.close()
    driver.synchronize()
    ran = runner.host.word(Word.STEPS) != before or runner.host.all_taken
    driver.run()
    same = _tokens(driver, generation) == expected
    driver.forget()
    right = f"has {n_blocks} blocks that wait for each other" in built and "could not launch it" in launched
    value = f"{n_blocks} blocks: {built}; {launched}; {'SOMETHING' if ran else 'nothing'} ran; then "
    return _lesson("E-83", right and not ran and same, value + ("the same" if same else "OTHER") + " tokens")


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except HardwareCannot as error:
        return str(error)
    return "let through"


# Decode mode under attack


def _second(driver: LoopDriver) -> Any:
    """Another executable over the same plan and memory."""
    runner = driver.runner
    steps = (runner.start._step,) if runner.settled.mode == TAPE else ()  # type: ignore[attr-defined]
    return type(runner.start)(runner.plan, *steps, runner._shared, runner.guard)  # type: ignore[call-arg]


ATTACKS: Final[Mapping[str, tuple[str, Callable[[LoopDriver], object]]]] = {
    "the step is built again": ("I-1", lambda d: d.runner.start.build()),
    "a second executable is built": ("I-1", lambda d: _second(d).build()),
    "a second trigger": ("I-2", lambda d: d.runner.decode_mode.trigger()),
    "a step is submitted": ("I-2", lambda d: d.runner.start.step()),
    "a launch without a trigger": ("I-2", lambda d: d.runner.start.launch()),
    "a second executable is launched": ("I-2", lambda d: _second(d).launch()),
    "the executable is destroyed": ("I-3", lambda d: d.runner.start.close()),
    "keys and values are taken": ("I-5", lambda d: d.runner.memory),
    "the plan is placed anew": ("I-7", lambda d: d.runner.decode_mode.replace(d.runner.plan, d.runner.start)),
    "another plan": ("I-7", lambda d: setattr(d.runner, "plan", replace(d.runner.plan, constants="other"))),
    "other weights": ("I-7", lambda d: setattr(d.runner, "plain_model", replace(d.runner.plain_model))),
    "the host takes part": ("I-8", lambda d: d.runner.decode_mode.step()),
    "the host runs a node": ("I-8", lambda d: d.runner.plan.nodes[0].run()),
    "a buffer is zeroed": ("I-5", lambda d: d.runner.plan.buffer("logits").zero(d.runner.guard)),
    "decode mode is entered again": ("I-9", lambda d: d.runner.decode_mode.enter()),
}


def guard(device: str, *, mode: str, name: str, type: str) -> Iterator[Record]:
    """Attacks while the loop runs are refused, and its tokens are those of a loop left alone; then drift is fatal."""
    model = model_on(name, type, device)
    context = min(LONGEST, model.shape.context)
    most = context - 2 * len(prompt := _ids(16))
    with closing(_by_hand(model, type, mode, context=context)) as driver:
        decode_mode = driver.runner.decode_mode
        expected = _alone(driver, prompt, most)
        before = driver.runner.plan.hash, driver.runner.start.executable
        generation = driver.admit(0, prompt, most=most)
        decode_mode.enter()
        seen = list(_seen(driver))
        decode_mode.trigger()
        others = {what: found for what in ATTACKS if (found := _answer(driver, what)) != ATTACKS[what][0]}
        written = [part for part, memory in seen if not _refuses(memory)]
        ran_on = driver.runner.start.running
        driver.wait()
        decode_mode.exit()
        same = _tokens(driver, generation) == expected and len(expected) == most
        kept = (driver.runner.plan.hash, driver.runner.start.executable) == before
        driver.forget()
        moved = _moved(driver, prompt)
    value = (
        f"{mode}: {len(ATTACKS)} attacks and {len(seen)} writes while the loop {'ran' if ran_on else 'NO LONGER ran'}: "
        f"{others or written[:5] or 'each refused by its invariant'}; {'the same' if same else 'OTHER'} tokens"
    )
    drift = {word: _drifted(model, type, mode, word) for word in ("plan_hash", "epoch")} if device != "cpu" else {}
    unnoticed = {word: fault for word, fault in drift.items() if fault is not None}
    value += f"; planted drift {unnoticed or 'ends the loop with its fault'}" if drift else ""
    yield _lesson(
        "E-67", not others and not written and (ran_on or device == "cpu") and same and kept and not unnoticed, value
    )
    yield _lesson("E-31", moved is None, f"{mode}: {moved or 'a moved buffer is named at the next trigger, and fatal'}")


def _alone(driver: LoopDriver, prompt: Sequence[int], most: int) -> list[int | None]:
    generation = driver.admit(0, prompt, most=most)
    driver.run()
    driver.runner.decode_mode.exit()
    tokens = _tokens(driver, generation)
    driver.forget()
    return tokens


def _answer(driver: LoopDriver, what: str) -> str:
    """The invariant by which an attack is refused, or what came of it."""
    try:
        ATTACKS[what][1](driver)
    except DecodeInvariantError as error:
        return error.invariant
    except Exception as error:
        return repr(error)
    return "let through"


def _seen(driver: LoopDriver) -> Iterator[tuple[str, Any]]:
    """Everything that the host sees of what a step uses."""
    runner = driver.runner
    for arena, fields in (
        ("table", runner.tables.table),
        ("admissions", runner.tables.admissions),
        ("rings", runner.tables.rings),
    ):
        yield from ((f"{arena}.{name}", fields[name]) for name in fields.names)
        yield arena, fields.memory
    yield from ((buffer.name, buffer.tensor) for buffer in runner.plan.buffers)
    yield from memory_in(runner.model, "model")


def _refuses(memory: Any) -> bool:
    try:
        memory.reshape(-1)[:1] = 1
    except _REFUSALS:
        return True
    return not len(memory.reshape(-1))


def _moved(driver: LoopDriver, prompt: Sequence[int]) -> str | None:
    """Give a buffer of the plan other memory: what was wrong with how that was found."""
    driver.admit(0, prompt, most=4)
    driver.runner.decode_mode.enter()
    own = driver.runner.plan.buffer("logits")._memory
    if isinstance(own, np.ndarray):
        state: Any = np.zeros_like(own).__reduce__()[2]
        own.__setstate__(state)  # the same object over other memory
    else:
        own.set_(torch.zeros_like(own))
    before = driver.runner.start.n_launches
    for error, text in ((PlanStale, "the buffer logits was at"), (EngineDead, "restarted")):
        try:
            driver.runner.decode_mode.trigger()
        except error as refused:
            if text not in str(refused):
                return f"it was told so: {refused}"
        else:
            return "the loop was launched"
    return None if driver.runner.start.n_launches == before else "something was launched"


def _cuda() -> Any:
    """torch leaves its streams untyped."""
    return torch.cuda


def _drifted(model: Model, type: str, mode: str, word: str) -> str | None:
    """Plant drift while the loop runs, by the copy engine, which needs no multiprocessor; what went wrong then."""
    fault = {"plan_hash": Fault.PLAN, "epoch": Fault.EPOCH}[word]
    driver = _by_hand(model, type, mode)
    try:
        driver.admit(0, _ids(16), most=CONTEXT - 32)
        runner = driver.runner
        field = runner.tables.table[word].view(torch.int64)  # before decode mode, which makes it read-only
        runner.decode_mode.enter()
        other = (field.cpu() + 1).pin_memory()
        runner.decode_mode.trigger()
        with torch.cuda.stream(_cuda().Stream()):
            field.copy_(other, non_blocking=True)
        if not runner.start.wait(DEADLINE_S):
            return "it went on"
        entries = runner.host.drain()
        try:
            runner.decode_mode.trigger()
            return "it was triggered again"
        except EngineDead:
            pass
        ended = [entry.finish for entry in entries if entry.finish is not Finish.NONE]
        found = runner.host.word(Word.FAULT)
        return None if found == fault and not ended else f"fault {found} for {fault}, ends {ended}"
    finally:
        driver.close()


# Sequences


def sequences(device: str, *, mode: str, name: str, type: str) -> Iterator[Record]:
    """A head's bias, a full context, one look at the outbox, a late request, and a first token."""
    model = model_on(name, type, device)
    yield _biased(model, type, mode)
    yield _full(model, type, mode)
    with closing(_by_hand(model, type, mode, n_slots=8)) as driver:
        yield _one_look(driver, mode)
        yield _late(driver, mode)
        driver.admit(0, _ids(100), most=1)
        before = driver.runner.host.word(Word.STEPS)
        driver.run()
        steps, n = driver.runner.host.word(Word.STEPS) - before, len(driver.entries)
        yield _lesson("E-85", (n, steps) == (1, 0), f"{mode}: {n} token of a prompt of 100 in {steps} steps")


def _biased(model: Model, type: str, mode: str) -> Record:
    """A bias that one token's logit gains far more from than any other's."""
    assert model.head is not None
    bias = torch.zeros(model.shape.vocab, device=model.device, dtype=model.dtype)
    bias[77] = 1e4
    try:
        with closing(_by_hand(replace(model, head=replace(model.head, bias=bias)), type, mode)) as driver:
            driver.admit(0, _ids(5), most=6)
            driver.run()
            tokens = [entry.token for entry in driver.entries]
    except HardwareCannot as error:
        return _lesson("E-24", mode == TAPE, f"{mode} refuses it: {error}")
    return _lesson("E-24", tokens == [77] * 6, f"{mode}: a bias of one token alone gives {tokens}")


def _full(model: Model, type: str, mode: str) -> Record:
    """An answer to the end of its context, with keys and values of no number in every page that is not its own."""
    context, page, n_prompt = 128, PAGE_TOKENS[model.device.type], 5
    own = [5, 2, 9, 7, 11, 3, 13, 1][: -(-context // page)]
    with closing(_by_hand(model, type, mode, context=context, n_slots=8)) as driver:
        halves = _halves(driver, page)
        others = [number for number in range(len(halves[0])) if number not in own]
        for half in halves:
            half[others] = float("nan")
        driver.synchronize()
        driver.admit(0, _ids(n_prompt), most=context - n_prompt, pages=own)
        driver.run()
        driver.runner.decode_mode.exit()
        driver.synchronize()
        last, n = driver.entries[-1], len(driver.entries)
        clean = all(bool((half[others] != half[others]).all()) for half in halves)
    right = (last.position, last.finish, n) == (context - 1, Finish.LENGTH, context - n_prompt)
    text = f"{mode}: {n} tokens, the last at {last.position} by {last.finish.name.lower()}; other pages "
    return _lesson("E-41", right and clean, text + ("untouched" if clean else "WRITTEN TO"))


def _halves(driver: LoopDriver, page: int) -> list[Any]:
    """Keys and values of each layer by page."""
    memory = driver.runner.memory
    if driver.runner.settled.mode == "loop" and driver.runner.settled.kind == "cpu":
        return [half for layer in memory.layers.values() for half in (layer.keys, layer.values)]
    stores = [half for halves in (memory.kv.keys, memory.kv.values) for half in halves.values()]
    return [store.values[0].view(-1, page, *store.values.shape[2:]) for store in stores]


def _one_look(driver: LoopDriver, mode: str) -> Record:
    """Words of the ring that are read for the entries of eight sequences."""
    for slot in range(8):
        driver.admit(slot, _ids(4, slot), most=5)
    driver.begin()
    driver.runner.start.wait(DEADLINE_S)
    host, asked = driver.runner.host, list[Word]()
    word = host.word

    def counted(which: Word) -> int:
        asked.append(which)
        return word(which)

    with patch.object(host, "word", counted):
        n = len(host.drain())
    driver.forget()
    right = n == 40 and asked == [Word.OUTBOX_TAIL, Word.OUTBOX_HEAD]
    return _lesson("E-69", right, f"{mode}: {n} entries of 8 sequences by {len(asked)} words")


def _late(driver: LoopDriver, mode: str) -> Record:
    """Steps that the others make between a request and its first token. The entry is published by this thread."""
    for slot in range(7):
        driver.admit(slot, _ids(4, slot), most=1_000)
    late = driver.admit(7, _ids(4, 9), most=3, admit=False)
    before = driver.runner.host.word(Word.STEPS)
    driver.begin()
    time.sleep(0.05)
    admitted = driver.runner.host.admit(7, late)
    asked = driver.runner.host.word(Word.STEPS) - before
    driver.wait()
    first = next(number for number, entry in enumerate(driver.entries) if entry.generation == late)
    steps = sum(entry.slot == 0 for entry in driver.entries[:first]) - 1  # the first token was the prompt's
    triggers = driver.runner.decode_mode.n_triggers
    driver.forget()
    value = f"{mode}: asked for at step {asked}, in at step {steps}; {triggers} triggers so far"
    return _lesson("E-72", admitted and asked > 0 and steps - asked <= 2, value)


# Captures that fail


def fallbacks(device: str, *, name: str, type: str) -> Iterator[Record]:
    """A loop that cannot be captured, asked for and by `auto`; and a bucket of prompts that cannot."""
    import ostinato.backends.cuda.chunks as untyped_chunks
    from ostinato.backends.cuda.while_graph import WhileGraph

    chunks: Any = untyped_chunks
    model, tried = model_on(name, type, device), list[str]()
    make = WhileGraph._make

    def spoiled(start: Any) -> None:
        tried.append(start.name)
        plan = start._plan
        start._plan = broken_node(plan, "asks")
        try:
            make(start)
        finally:
            start._plan = plan

    prompt = _ids(20)
    with closing(_by_hand(model, type, "eager")) as driver:
        expected = _few(driver, prompt)
    with patch.object(WhileGraph, "_make", spoiled):
        try:
            _by_hand(model, type, "loop").close()
            asked = "it was opened"
        except HardwareCannot as error:
            asked = str(error)
        with closing(_by_hand(model, type, "auto")) as driver:
            settled, found = driver.runner.settled, _few(driver, prompt)
    fell = settled.fell_back or ""
    right = settled.mode == "graph" and fell.startswith("loop: ") and found == expected and tried == ["loop", "loop"]
    right = right and "could not be captured" in asked
    yield _lesson("E-57", right, f"asked for: {asked}; auto: {fell or settled.mode}; tried {tried}")

    play, captures = chunks.play, list[int]()

    def once_broken(launched: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            captures.append(len(captures))
            if len(captures) == 2:
                torch.cuda.current_stream().synchronize()  # which the driver refuses, and the capture is spoiled
        play(launched)

    lengths = range(1, 300, 23)
    with closing(_by_hand(model, type, "loop")) as driver:
        expected = [token for n in lengths for token in _few(driver, _ids(n))]
    with patch.object(chunks, "play", once_broken), closing(_by_hand(model, type, "loop")) as driver:
        failures, said = dict(driver.runner.chunks.failures), driver.runner.fallen_back
        found = [token for n in lengths for token in _few(driver, _ids(n))]
    right = len(failures) == len(said) == 1 and len(captures) > 2 and found == expected
    value = f"{len(captures)} buckets, of which {said or 'none'}; tokens {'the same' if found == expected else 'OTHER'}"
    yield _lesson("E-58", right, value)


def _few(driver: LoopDriver, prompt: Sequence[int]) -> list[int | None]:
    generation = driver.admit(0, prompt, most=6)
    driver.run()
    tokens = _tokens(driver, generation)
    driver.forget()
    return tokens


# What the process shows of an engine

FORGETS: Final = """
import sys
from ostinato import LLM, Sampling
from ostinato.options import LoadOptions
llm = LLM(sys.argv[1], load=LoadOptions(device=sys.argv[2], mode=sys.argv[3], slots=2, context=4096))
answer = llm.stream("hello", Sampling(max_tokens=4000, ignore_eos=True))
next(answer)
print(llm.stats().live, flush=True)
"""


def process(device: str, *, mode: str, name: str, type: str) -> Iterator[Record]:
    """Requests of many threads; what is written to the terminal; closing twice, and a program that forgets to."""
    model = model_on(name, type, device)
    settled = settled_for(model, mode, n_slots=4, context=1_536, kv_type=kv_type_of(type))
    with Engine(model, settled) as engine:
        yield _by_many_threads(engine, mode)
        with _terminal() as written:
            n = len(list(engine.submit(_ids(16), replace(GREEDY, max_tokens=1_000, ignore_eos=True))))
        said = written()
        yield _lesson("E-13", n == 1_000 and not said, f"{mode}: {n} tokens, {said or 'nothing'} written")
        left = [engine.submit(_ids(9, seed), replace(GREEDY, max_tokens=1_000)) for seed in range(6)]
        engine.close()
        engine.close()
        ends = [(sum(token.finish_reason is not None for token in one), one.finish_reason) for one in left]
    right = all(n <= 1 and reason in ("cancelled", "length") for n, reason in ends)
    with tempfile.TemporaryDirectory() as folder:
        path = session_model(Path(folder))
        words = [sys.executable, "-c", FORGETS, str(path), device, mode]
        ran = subprocess.run(words, timeout=DEADLINE_S, capture_output=True, text=True, check=False)
    forgot = ran.returncode, ran.stdout, ran.stderr
    value = f"{mode}: closed twice, its requests end by {sorted({str(one) for _, one in ends})}; forgotten: {forgot}"
    yield _lesson("E-14", right and forgot == (0, "1\n", ""), value)


def _by_many_threads(engine: Engine, mode: str) -> Record:
    """Nine threads ask and cancel; each answer is a beginning of the one that it has alone."""
    most = replace(GREEDY, max_tokens=40, ignore_eos=True, logprobs=0)
    alone = {
        (seed, turn): witnesses(engine.submit(_ids(5 + 7 * turn, seed), most)) for seed in range(9) for turn in range(4)
    }
    wrong = list[str]()
    n_ends = list[int]()

    def ask(seed: int) -> None:
        for turn in range(4):
            request = engine.submit(_ids(5 + 7 * turn, seed), most, wait=True)
            if (seed + turn) % 3 == 0:
                next(request)
                request.cancel()
                list(request)
            else:
                difference = first_difference(alone[seed, turn], witnesses(request))
                wrong.extend([] if difference is None else [difference])
            n_ends.append(request.finish_reason is not None)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    right = not wrong and n_ends == [True] * 36
    return _lesson(
        "E-10", right, f"{mode}: {sum(n_ends)} of 36 requests of 9 threads ended; {wrong[:3] or 'bits as alone'}"
    )


@contextmanager
def _terminal() -> Iterator[Callable[[], str]]:
    """What is written to standard output and error meanwhile, by any library."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        saved = os.dup(1), os.dup(2)
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            text: list[str] = []
            yield lambda: text[0]
        finally:
            for number, before in zip((1, 2), saved, strict=True):
                os.dup2(before, number)
                os.close(before)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


# The real server


def server(device: str, *, mode: str) -> Iterator[Record]:
    """`ostinato serve --verify` compares before its port opens; streams and complete answers; what `doctor` says."""
    with tempfile.TemporaryDirectory() as folder:
        path = session_model(Path(folder))
        home = Path(folder) / "home"
        home.mkdir()
        words = ["serve", str(path), "--port", "0", "--device", device, "--mode", mode, "--verify", "--context", "1024"]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ostinato", *words],
            cwd=ROOT,
            env={**os.environ, "OSTINATO_HOME": str(home)},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            lines = _until_ready(process)
            url = next((line.split()[2].rstrip(";") for line in lines if line.startswith("listening at ")), None)
            compared = next((n for n, line in enumerate(lines) if f"{mode} agrees with " in line), None)
            opened = next((n for n, line in enumerate(lines) if line.startswith("listening at ")), None)
            kept = [one["mode"] for file in home.rglob("*.json") for one in _results(file)]
            right = None not in (compared, opened) and (compared or 0) < (opened or 0)
            right = right and (device == "cpu" or mode in kept)
            said = lines[compared] if right and compared is not None else lines[-5:]
            yield _lesson("E-28", right, f"{mode}: {said}; kept for {kept}")
            paces = _paces(url) if url else [(0.0, 0.0)]
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(DEADLINE_S)
    streams, whole = (statistics.median(column) for column in zip(*paces, strict=True))
    share = statistics.median(whole / streams if streams else 0.0 for streams, whole in paces)
    value = f"{mode}: {CLIENTS} at once, streams {streams:,.0f} tok/s, complete answers {whole:,.0f}, "
    value += f"{share:.2f} of it by the median of {len(paces)} rounds; exit {code}"
    yield _lesson("E-73", code == 0 and share >= WHOLE_SHARE, value)
    yield _choices(device)


def _choices(device: str) -> Record:
    """What `doctor` says of the card, or of one that is not here."""
    from ostinato.cli import doctor

    if device == "cpu":
        choices = doctor.kernel_choices(TUNED)
    else:
        choices = [one for card in doctor.examine()["cuda"]["devices"] for one in card["kernels"]]
    missing = [one["what"] for one in choices if not (one["choice"] and one["reason"])]
    boundary = next((one["choice"] for one in choices if one["what"] == "step boundary"), "no step boundary")
    return _lesson(
        "E-82", len(choices) > 3 and not missing, f"{len(choices)} choices, each with its reason; {boundary}"
    )


def _until_ready(process: subprocess.Popen[str]) -> list[str]:
    lines = list[str]()
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line.rstrip())
        if line.startswith("ready: "):
            threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
            break
    return lines


def _results(file: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except ValueError:
        return []
    return [one for one in found.get("results", ()) if "mode" in one] if isinstance(found, dict) else []


def _paces(url: str) -> list[tuple[float, float]]:
    """Tokens a second of some clients at once, by streams and by complete answers, in every round; one more warms."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        rounds = [
            (_pace(clients, url, stream=True), _pace(clients, url, stream=False)) for _ in range(1 + SERVED_ROUNDS)
        ]
    return rounds[1:]


def _pace(clients: ThreadPoolExecutor, url: str, *, stream: bool) -> float:
    message = {"role": "user", "content": "hello"}
    asked = {"messages": [message], "max_tokens": SERVED_TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
    asked |= {"stream_options": {"include_usage": True}} if stream else {}

    def ask(_: int) -> int:
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return int(re.findall(rb'"completion_tokens": ?(\d+)', answer.read())[-1])

    started = time.perf_counter()
    n_tokens = sum(clients.map(ask, range(CLIENTS)))
    return n_tokens / (time.perf_counter() - started)


# The checks


def judge(ended: Sequence[Ended], name: str, codes: Sequence[str]) -> list[Outcome]:
    """Of each lesson: right in every mode that was asked."""
    if not ended:
        return [Outcome("SKIP", f"{name} {code}", "runs on a GPU only") for code in codes]
    outcomes, broken = [], [f"{one.job.words}: {one.error}" for one in ended if one.error]
    for code in codes:
        records = [record for one in ended for record in one.of("lesson") if record["code"] == code]
        right = bool(records) and all(record["right"] for record in records)
        value = " || ".join(record["said"] for record in records if record["right"] == right) or "nothing was said"
        outcomes.append(Outcome("PASS" if right else "FAIL", f"{name} {code}", value))
    return [*outcomes, *(Outcome("FAIL", name, text) for text in broken)]


def _modes(setting: Setting) -> tuple[str, ...]:
    return ("loop", TAPE) if setting.on_gpu else ("loop",)


def _jobs(work: str, setting: Setting, **words: Any) -> list[Job]:
    return [Job(work, words, 200)] if setting.on_gpu else []


def _small(setting: Setting) -> dict[str, str]:
    return {"name": "smollm2-135m", "type": "bf16"} if setting.on_gpu else {"name": "tiny", "type": "f32"}


def _in_modes(work: str, setting: Setting, **words: Any) -> list[Job]:
    return [Job(work, {"mode": mode, **words}, 200) for mode in _modes(setting)]


def _check(name: str, codes: Sequence[str], jobs: Callable[[Setting], Sequence[Job]], *, alone: bool = False) -> Check:
    return Check("lessons", name, jobs, lambda _, ended: judge(ended, name, codes), alone=alone)


WORKS: Final = {
    "launches": launches,
    "grid": grid,
    "guard": guard,
    "sequences": sequences,
    "fallbacks": fallbacks,
    "process": process,
    "server": server,
}
CHECKS: Final = (
    _check("launches", ("E-1", "E-20", "E-35", "E-37"), lambda s: _jobs("launches", s)),
    _check("grid", ("E-83",), lambda s: _jobs("grid", s, **_small(s))),
    _check("guard", ("E-31", "E-67"), lambda s: _in_modes("guard", s, **_small(s))),
    _check("sequences", ("E-24", "E-41", "E-69", "E-72", "E-85"), lambda s: _in_modes("sequences", s, **_small(s))),
    _check(
        "fallbacks",
        ("E-57", "E-58"),
        lambda s: _jobs("fallbacks", s, name="tiny-mixtral", type="bf16"),
    ),
    _check("process", ("E-10", "E-13", "E-14"), lambda s: _in_modes("process", s, **_small(s))),
    _check("server", ("E-28", "E-73", "E-82"), lambda s: _in_modes("server", s), alone=True),
)
