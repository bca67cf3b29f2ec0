"""The tape on a card: is it right, does it lose nothing, and how fast is it, beside its bars.

Arg-max is compared step by step with `eager`, whose bits `loop` has, over the tokens that `eager` chose. Figures are
through the engine: contexts 500, tokens by the device's own clock, medians of three runs.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

from bench.gpu_exact import judge_trials, judge_verified, verified
from bench.gpu_executor import judge_sanitized, run_sanitized
from bench.gpu_frame import Check, Ended, Job, Outcome, Record, Setting, Verdict
from bench.gpu_models import kv_type_of, model_on, place, placement_of
from bench.gpu_speed import Meter
from ostinato.engine.bench import read_bandwidth
from ostinato.engine.engine import Engine
from ostinato.loop.by_hand import GREEDY, ByHand
from ostinato.loop.open import Loop, LoopOptions
from ostinato.memory.paged import PAGE_TOKENS
from ostinato.models.blocks import Model

TAPE: Final = "persistent"
N_PROMPTS, N_POSITIONS = 10, 256
# Both round activations to 8 bits of mantissa, at other places: logits differ by a few such roundings.
TOLERANCE: Final = 0.02  # of the largest logit
MOST_TIES: Final = 0.01
ADMISSIONS: Final = 10_000
# Shape, type, the least and the aim in tok/s, llama.cpp on the same card.
BARS: Final = (
    ("llama-1b", "bf16", 1_400, 1_500, 763),
    ("llama-8b", "bf16", 255, 270, 207),
    ("llama-1b", "q4_k_m", 1_950, 2_400, 860),
    ("llama-8b", "q4_k_m", 430, 600, 261),
)
LONG_CONTEXT, LONG_SHARE, BATCH, BATCH_GAIN = 8_000, 0.8, 8, 6.0


def tape_verified(device: str, *, name: str, types: Sequence[str]) -> Iterator[Record]:
    """A model in each type: the tape beside `eager`."""
    for type in types:
        model = model_on(name, type, device)
        found = verified(model, None, kv_type_of(type), modes=(TAPE,))
        yield {"what": "verified", "model": f"{name} {type}", **found}


def tape_argmax(device: str, *, name: str, type: str) -> Iterator[Record]:
    """Fed the tokens of `eager`, whose are the largest logits, position by position?"""
    model, chance = model_on(name, type, device), random.Random(3)
    n_wrong = n_close = n = 0
    worst = 0.0
    with closing(_by_hand(model, "eager", type)) as plain, closing(_by_hand(model, TAPE, type)) as tape:
        for _ in range(N_PROMPTS):
            prompt = [chance.randrange(model.shape.vocab) for _ in range(chance.randrange(4, 100))]
            for hand in (plain, tape):
                hand.seat(0, prompt, most=N_POSITIONS + 2)
                hand.step()  # admits
            for _ in range(N_POSITIONS):
                tape.loop.tables.table["token"].copy_(plain.loop.tables.table["token"])
                tape.synchronize()
                rows = []
                for hand in (plain, tape):
                    hand.step()
                    rows.append(hand.loop.plan.buffer("logits").tensor[0].float())
                expected, found = rows
                first, second = expected.topk(2).values.tolist()
                scale = float(expected.abs().max())
                worst = max(worst, float((found - expected).abs().max()) / scale)
                differs = int(found.argmax()) != int(expected.argmax())
                close = first - second <= TOLERANCE * scale
                n, n_close, n_wrong = n + 1, n_close + (differs and close), n_wrong + (differs and not close)
            for hand in (plain, tape):
                hand.loop.host.cancel(0, hand.entries[-1].generation)
                while hand.step():
                    pass
                hand.forget()
    yield {"what": "argmax", "model": f"{name} {type}", "n": n, "wrong": n_wrong, "ties": n_close, "worst": worst}


def _by_hand(model: Model, mode: str, type: str) -> ByHand:
    context = 2 * N_POSITIONS
    n_pages = 2 * -(-context // PAGE_TOKENS[model.device.type])
    return ByHand(Loop(model, LoopOptions(mode, 1, context, n_pages, kv_type_of(type), model.shape.vocab)))


def tape_admissions(device: str, *, name: str, type: str, n: int, seconds: float) -> Iterator[Record]:
    """Requests that come and go at random: every one ends once, with all its tokens or with those before its end."""
    model, chance, began = model_on(name, type, device), random.Random(9), time.monotonic()
    wrong, done, n_cancelled = [], 0, 0
    with Engine(model, placement_of(model, TAPE, n_slots=8, context=512, kv_type=kv_type_of(type))) as engine:
        while done < n and time.monotonic() - began < seconds:
            asked = []
            for _ in range(min(64, n - done)):
                most = chance.randrange(1, 24)
                prompt = [chance.randrange(model.shape.vocab) for _ in range(chance.randrange(1, 40))]
                sampling = replace(GREEDY, max_tokens=most, ignore_eos=True)
                asked.append((engine.submit(prompt, sampling, wait=True), most, chance.random() < 0.2))
            for request, _, doomed in asked:
                if doomed:
                    request.cancel()
            for request, most, doomed in asked:
                got = len(list(request))
                n_cancelled += request.finish_reason == "cancelled"
                if request.finish_reason != "length" and not (doomed and request.finish_reason == "cancelled"):
                    wrong.append(f"ended by {request.finish_reason}")
                if request.finish_reason == "length" and got != most:
                    wrong.append(f"{got} tokens of {most}")
            done += len(asked)
        fault = engine.stats().fault
    wrong += [fault] if fault else []
    yield {"what": "admissions", "n": done, "cancelled": n_cancelled, "wrong": wrong[:5], "wanted": n}


def tape_speed(device: str, *, shape: str, type: str) -> Iterator[Record]:
    """Decode at 500 positions alone and with eight, and at 8,000; `loop` beside it in the same run."""
    bandwidth, model = read_bandwidth(place(device)), model_on(shape, type, device)
    for depth, batches in ((500, (1, BATCH)), (LONG_CONTEXT, (1,))):
        meter = Meter(model, type, bandwidth, depth)
        for mode in (TAPE, "loop"):
            at = placement_of(model, mode, n_slots=8, context=depth + 1_500, kv_type=kv_type_of(type))
            with Engine(model, at) as engine:
                for batch in batches:
                    yield {**meter.decode(engine, batch, 256), "depth": depth}
    yield {"what": "done"}


def tape_yield(device: str, *, name: str, type: str, n: int = 40) -> Iterator[Record]:
    """How long a running request waits for somebody else's prompt: gaps with one beside those without."""
    model, chance = model_on(name, type, device), random.Random(4)
    with Engine(model, placement_of(model, TAPE, n_slots=4, context=4096, kv_type=kv_type_of(type))) as engine:
        running = engine.submit([1, 2, 3], replace(GREEDY, max_tokens=3_000, ignore_eos=True))
        heard = [next(running) for _ in range(500)]
        for _ in range(n):
            short = engine.submit([chance.randrange(100) for _ in range(32)], replace(GREEDY, max_tokens=1))
            list(short)
            heard.append(next(running))
        running.cancel()
        heard += list(running)
    gaps = [(b.time_ns - a.time_ns) / 1e3 for a, b in itertools.pairwise(heard)]
    plain = sorted(gaps[100:490])
    yield {"what": "yield", "step_us": plain[len(plain) // 2], "longest_us": sorted(gaps[500:])[-n:][n // 2]}


# What it comes to


def judge_argmax(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    outcomes = _errors(ended, "tape-argmax")
    for one in (record for done in ended for record in done.of("argmax")):
        value = (
            f"{one['model']}: {one['n']} positions, {one['wrong']} wrong, {one['ties']} near ties that fell the other "
            f"way; logits within {one['worst']:.4f} of the largest"
        )
        good = not one["wrong"] and one["ties"] < MOST_TIES * one["n"]
        outcomes.append(Outcome("PASS" if good else "FAIL", "tape-argmax", value, "ties under 1 %", one))
    return outcomes


def judge_admissions(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    outcomes = _errors(ended, "tape-admissions")
    for one in (record for done in ended for record in done.of("admissions")):
        verdict: Verdict = "FAIL" if one["wrong"] else "PASS" if one["n"] >= one["wanted"] else "MISS"
        value = f"{one['n']} requests, {one['cancelled']} cancelled; wrong: {one['wrong'] or 'none'}"
        outcomes.append(Outcome(verdict, "tape-admissions", value, f"{one['wanted']}, nothing lost", one))
    return outcomes


def judge_yield(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    outcomes = _errors(ended, "tape-yield")
    for one in (record for done in ended for record in done.of("yield")):
        value = (
            f"a step {one['step_us']:.0f} us; with somebody's prompt of 32 tokens between {one['longest_us']:.0f} us"
        )
        outcomes.append(Outcome("PASS", "tape-yield", value, "stated", one))
    return outcomes


def judge_tape_speed(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    outcomes = _errors(ended, "tape-speed")
    for one in ended:
        shape, type = one.job.words["shape"], one.job.words["type"]
        least, aim, peer = next(bar[2:] for bar in BARS if bar[:2] == (shape, type))
        found = {(r["mode"], r["batch"], r["depth"]): r for r in one.of("decode")}
        name = f"tape-{shape.removeprefix('llama-')}-{type}"
        base = found.get((TAPE, 1, 500))
        if base is None:
            continue
        loop = found.get(("loop", 1, 500))
        beside = "" if loop is None else f", {base['tok_s'] / loop['tok_s']:.2f} x loop"
        value = f"{base['tok_s']:.0f} tok/s, {base['tok_s'] / peer:.2f} x llama.cpp{beside}, limit {base['limit']:.0f}"
        outcomes.append(_bar(name, base["tok_s"], least, value, f"{least:,}, aim {aim:,}"))
        eight, far = found.get((TAPE, BATCH, 500)), found.get((TAPE, 1, LONG_CONTEXT))
        if eight is not None and type == "bf16":
            gain = eight["tok_s"] / base["tok_s"]
            outcomes.append(
                _bar(f"{name}-batch", gain, BATCH_GAIN, f"{gain:.2f} x one with {BATCH}", f"{BATCH_GAIN} x")
            )
        if far is not None:
            allowed = base["tok_s"] * base["bytes_per_token"] / far["bytes_per_token"]
            share = far["tok_s"] / allowed
            value = f"{far['tok_s']:.0f} tok/s at {LONG_CONTEXT}, {share:.2f} of what the bytes allow"
            outcomes.append(_bar(f"{name}-far", share, LONG_SHARE, value, f"{LONG_SHARE}"))
    return outcomes


def _bar(name: str, found: float, least: float, value: str, bar: str) -> Outcome:
    return Outcome("PASS" if found >= least else "MISS", name, value, bar)


def _errors(ended: Sequence[Ended], name: str) -> list[Outcome]:
    return [Outcome("FAIL", name, f"{one.job.words}: {one.error}") for one in ended if one.error is not None]


# The checks


def _verify_jobs(setting: Setting) -> list[Job]:
    types = ["bf16", "f16", "q4_k_m", "q4_0", "q4_1", "q5_k", "q6_k", "q8_0"]
    small = [Job("tape_verified", {"name": "tiny", "types": types[n::4]}, 200) for n in range(4)]
    large = [("smollm2-135m", "bf16"), ("llama-1b", "bf16"), ("llama-1b", "q4_k_m"), ("llama-8b", "q4_k_m")]
    return [*small, *(Job("tape_verified", {"name": name, "types": [type]}, 200) for name, type in large)]


def _trial_jobs(setting: Setting) -> list[Job]:
    words: dict[str, Any] = {"seed": 2, "seconds": 60.0, "kv_type": None, "mode": TAPE}
    wanted = (("tiny", "bf16", 100), ("tiny", "q4_k_m", 60), ("llama-1b", "bf16", 20))
    return [Job("trials", {"name": name, "type": type, "n": n, **words}, 200) for name, type, n in wanted]


def _sanitizer_jobs(setting: Setting) -> list[Job]:
    words = {"mode": TAPE, "name": "tiny"}
    return [Job("sanitized", {**words, "tool": tool}, 60) for tool in ("memcheck", "racecheck")]


def _only_on_gpu(jobs: Any) -> Any:
    return lambda setting: jobs(setting) if setting.on_gpu else []


def _one(work: str, seconds: float = 200, **words: Any) -> Any:
    return _only_on_gpu(lambda setting: [Job(work, words, seconds)])


WORKS: Final = {
    "tape_verified": tape_verified,
    "tape_argmax": tape_argmax,
    "tape_admissions": tape_admissions,
    "tape_speed": tape_speed,
    "tape_yield": tape_yield,
}

_ADMISSIONS: Final[dict[str, Any]] = {"name": "tiny", "type": "bf16", "n": ADMISSIONS, "seconds": 60.0}
CHECKS: Final = (
    Check("tape", "tape-verify", _only_on_gpu(_verify_jobs), lambda s, e: judge_verified(s, e, "tape-verify", (TAPE,))),
    Check("tape", "tape-argmax", _one("tape_argmax", name="smollm2-135m", type="bf16"), judge_argmax),
    Check("tape", "tape-trials", _only_on_gpu(_trial_jobs), lambda s, e: judge_trials(s, e, "tape-trials")),
    Check("tape", "tape-admissions", _one("tape_admissions", **_ADMISSIONS), judge_admissions),
    Check("tape", "tape-sanitizer", _only_on_gpu(_sanitizer_jobs), judge_sanitized, run=run_sanitized),
    Check("tape", "tape-yield", _one("tape_yield", name="llama-1b", type="bf16"), judge_yield, alone=True),
    *(
        Check(
            "tape",
            f"tape-speed-{shape}-{type}",
            _one("tape_speed", 120, shape=shape, type=type),
            judge_tape_speed,
            alone=True,
        )
        for shape, type, *_ in BARS
    ),
)
