"""The tape on a card: is it right, does it lose nothing, and how fast is it, beside its bars.

Arg-max is compared step by step with `eager`, whose bits `loop` has, over the tokens that `eager` chose. With a model's
file, so are perplexity and divergence over a text, also of the kernel that rounds activations to int8. Figures are
through the engine: contexts 500, tokens by the device's own clock, medians of three runs; the kernels that they need
are compiled before, beside the checks that do not mind company.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from bench.gpu_exact import judge_trials, judge_verified, verified
from bench.gpu_executor import judge_sanitized, run_sanitized
from bench.gpu_frame import Check, Ended, Job, Outcome, Record, Setting, Verdict
from bench.gpu_models import TAPE, kv_type_of, model_of_file, model_on, moved, place, settled_for
from bench.gpu_speed import Meter
from bench.gpu_text import N_PIECES, N_PREDICTED, digest, heard, of_text, pieces_of
from bench.gpu_yield import judge_yield, tape_yield
from ostinato.backends.base import PAGE_TOKENS, Settled
from ostinato.backends.torch.model import Model
from ostinato.engine.choose import settle_model
from ostinato.engine.driver import GREEDY, LoopDriver
from ostinato.engine.engine import Engine
from ostinato.engine.open import open_runner
from ostinato.lab.bench import read_bandwidth
from ostinato.lab.random_weights import MIXES
from ostinato.options import Activations, KVType
from tests.backends.tape.models import EMULATED, FAMILIES, shape_of, small

N_PROMPTS, N_POSITIONS, LONGEST_PROMPT = 10, 256, 100
# Both round activations to 8 bits of mantissa, at other places: logits differ by a few such roundings.
TOLERANCE: Final = 0.02  # of the largest logit
MOST_TIES: Final = 0.01
# Mean divergence from `eager` over a text, in nats. `wide` rounds as much as `eager` does; int8 is for who accepts it.
MOST_KL: Final = {"wide": 1e-3, "int8": 0.02}
ADMISSIONS: Final = 10_000
# Shape, type, the least and the aim in tok/s, llama.cpp on the same card. Run in this order: small ones first.
BARS: Final = (
    ("llama-1b", "bf16", 1_400, 1_500, 763),
    ("llama-1b", "q4_k_m", 1_950, 2_400, 860),
    ("llama-8b", "q4_k_m", 430, 600, 261),
    ("llama-8b", "bf16", 255, 270, 207),
)
# A model of each family that has more than a llama. One that passes goes to PERSISTENT_KINDS (known_cards.py).
WITH_MORE: Final = ("granite-2b", "smollm3-3b", "ministral-3b", "gemma2-2b", "gemma3-1b", "tiny-glm4", "glm4-9b")
WITH_Q8_0: Final = ("tiny", "llama-1b", "gemma3-1b", "tiny-glm4")  # keys and values of that type
DEPTH, LONG_DEPTH, LONG_SHARE, BATCH, BATCH_GAIN = 500, 8_000, 0.8, 8, 6.0
# One kernel of each kind for all depths. `loop` has the context that part `speed` gives it.
CONTEXT, LOOP_CONTEXT = LONG_DEPTH + 1_500, 2_048


def tape_verified(device: str, *, name: str, types: Sequence[str], kv_type: KVType | None = None) -> Iterator[Record]:
    """A model in each type: the tape beside `eager`."""
    for type in types:
        model = model_on(name, type, device)
        found = verified(model, None, kv_type or kv_type_of(type), modes=(TAPE,))
        called = f"{name} {type}" if kv_type is None else f"{name} {type}, keys and values {kv_type}"
        yield {"what": "verified", "model": called, **found}


def tape_families(device: str, *, names: Sequence[str]) -> Iterator[Record]:
    """A small model of each family, with windows, caps and spans that a few tokens reach: the tape beside `eager`."""
    for name in names:
        shape = EMULATED[name]() if name in EMULATED else shape_of(name)
        model = moved(small(shape), place(device))
        yield {"what": "verified", "model": f"small {name}", **verified(model, None, "bf16", modes=(TAPE,))}


def tape_argmax(device: str, *, name: str, type: str, path: str | None = None) -> Iterator[Record]:
    """Fed the tokens of `eager`, whose are the largest logits, position by position? A file answers pieces of text."""
    model, prompts, called = _prompted(device, name, type, path)
    n_wrong = n_close = n = 0
    worst = 0.0
    with closing(_by_hand(model, "eager")) as plain, closing(_by_hand(model, TAPE)) as tape:
        for prompt in prompts:
            for driver in (plain, tape):
                driver.admit(0, prompt, most=N_POSITIONS + 2)
                driver.step()  # admits
            for _ in range(N_POSITIONS):
                tape.runner.tables.table["token"].copy_(plain.runner.tables.table["token"])
                tape.synchronize()
                rows = []
                for driver in (plain, tape):
                    driver.step()
                    rows.append(driver.runner.plan.buffer("logits").tensor[0].float())
                expected, found = rows
                first, second = expected.topk(2).values.tolist()
                scale = float(expected.abs().max())
                worst = max(worst, float((found - expected).abs().max()) / scale)
                differs = int(found.argmax()) != int(expected.argmax())
                close = first - second <= TOLERANCE * scale
                n, n_close, n_wrong = n + 1, n_close + (differs and close), n_wrong + (differs and not close)
            for driver in (plain, tape):
                driver.runner.host.cancel(0, driver.entries[-1].generation)
                while driver.step():
                    pass
                driver.forget()
    yield {"what": "argmax", "model": called, "n": n, "wrong": n_wrong, "ties": n_close, "worst": worst}


def _prompted(device: str, name: str, type: str, path: str | None) -> tuple[Model, list[list[int]], str]:
    """A model, prompts of all lengths for it, and what it is called."""
    chance = random.Random(3)
    lengths = [chance.randrange(4, LONGEST_PROMPT) for _ in range(N_PROMPTS)]
    if path is not None:
        model, tokenizer = model_of_file(path, device)
        pieces = pieces_of(tokenizer, N_PROMPTS, LONGEST_PROMPT)
        return model, [piece[:n] for piece, n in zip(pieces, lengths, strict=True)], Path(path).name
    model = model_on(name, type, device)
    return model, [[chance.randrange(model.shape.vocab) for _ in range(n)] for n in lengths], f"{name} {type}"


def tape_int8(device: str, *, path: str) -> Iterator[Record]:
    """A file's logits over a text: `eager`, the tape, and the tape with activations in int8. One loop at a time."""
    model, tokenizer = model_of_file(path, device)
    pieces = pieces_of(tokenizer, N_PIECES, N_PREDICTED + 2)
    n_tokens = min(model.shape.vocab, tokenizer.vocab_size)
    weight_types: tuple[tuple[str, str, Activations], ...]
    weight_types = (("eager", "eager", "wide"), ("wide", TAPE, "wide"), ("int8", TAPE, "int8"))
    expected, figures = None, {}
    for called, mode, activations in weight_types:
        with closing(_by_hand(model, mode, n_slots=N_PIECES, activations=activations)) as driver:
            said = heard(driver, pieces, n_tokens)
        figures[called] = of_text(said, pieces, expected)
        expected = said if expected is None else expected
    n = N_PIECES * N_PREDICTED
    yield {"what": "int8", "model": Path(path).name, "n": n, "text": digest(pieces), "figures": figures}


def _by_hand(model: Model, mode: str, *, n_slots: int = 1, activations: Activations = "wide") -> LoopDriver:
    context = 2 * N_POSITIONS
    n_pages = (n_slots + 1) * -(-context // PAGE_TOKENS[model.device.type])
    kv_type: KVType = "f32" if model.dtype == torch.float32 else "bf16"
    return LoopDriver(
        open_runner(
            model,
            settle_model(
                model,
                mode,
                context=context,
                n_pages=n_pages,
                n_slots=n_slots,
                kv_type=kv_type,
                activations=activations,
            ),
        )
    )


def tape_admissions(device: str, *, name: str, type: str, n: int, seconds: float) -> Iterator[Record]:
    """Requests that come and go at random: every one ends once, with all its tokens or with those before its end."""
    model, chance, began = model_on(name, type, device), random.Random(9), time.monotonic()
    wrong, done, n_cancelled = [], 0, 0
    with Engine(model, settled_for(model, TAPE, n_slots=8, context=512, kv_type=kv_type_of(type))) as engine:
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


class Measured(NamedTuple):
    """An engine to be opened, and what is measured with it: sequences at a time, at depths."""

    settled: Settled
    at: tuple[tuple[int, int], ...]


def measured(model: Model, type: str) -> list[Measured]:
    """What is measured of a model: the tape, `loop` beside it, and where weights are packed int8 activations."""
    wide = settled_for(model, TAPE, n_slots=8, context=CONTEXT, kv_type=kv_type_of(type))
    loop = settled_for(model, "loop", n_slots=8, context=LOOP_CONTEXT, kv_type=kv_type_of(type))
    found = [Measured(wide, ((DEPTH, 1), (DEPTH, BATCH), (LONG_DEPTH, 1)))]
    if type in MIXES:
        found.append(Measured(replace(wide, activations="int8"), ((DEPTH, 1), (DEPTH, BATCH))))
    return [*found, Measured(loop, ((DEPTH, 1),))]


def tape_warm(device: str, *, shape: str, type: str) -> Iterator[Record]:
    """Compile and keep every kernel that the measurements will need: a few tokens in each engine."""
    started = time.perf_counter()
    model = model_on(shape, type, device)
    for settled, _ in measured(model, type):
        with Engine(model, settled) as engine:
            list(engine.submit(list(range(100)), replace(GREEDY, max_tokens=4, ignore_eos=True)))
        _tidy()
    yield {"what": "warm", "model": f"{shape} {type}", "s": round(time.perf_counter() - started, 1)}


def tape_speed(device: str, *, shape: str, type: str) -> Iterator[Record]:
    """Decode at 500 positions alone and with eight, and at 8,000; int8 activations and `loop` in the same run."""
    bandwidth, model = read_bandwidth(device), model_on(shape, type, device)
    for settled, wanted in measured(model, type):
        with Engine(model, settled) as engine:
            for depth, batch in wanted:
                figure = Meter(model, type, bandwidth, depth).decode(engine, batch, 256)
                yield {**figure, "depth": depth, "activations": settled.activations}
        _tidy()
    yield {"what": "done"}


def _tidy() -> None:
    """An engine that was closed gives its memory back before the next one asks for as much."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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


def judge_int8(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    if not ended:
        reason = "no model's file was given (--model): random weights tell nothing of this"
        return [Outcome("SKIP", "tape-int8", reason if setting.on_gpu else "the persistent kernel is CUDA's")]
    outcomes = _errors(ended, "tape-int8")
    for one in (record for done in ended for record in done.of("int8")):
        figures = one["figures"]
        parts = [f"{one['model']}, {one['n']} positions: perplexity {figures['eager']['perplexity']:.4f} in eager"]
        for called in MOST_KL:
            own = figures[called]
            parts.append(
                f"{called} {own['perplexity']:.4f}, KL {own['kl']:.2e} (largest {own['kl_most']:.2e}), "
                f"another arg-max in {own['differs']:.2%}"
            )
        finite = all(math.isfinite(number) for own in figures.values() for number in own.values())
        good = finite and all(figures[called]["kl"] < most for called, most in MOST_KL.items())
        bar = ", ".join(f"KL of {called} under {most:g}" for called, most in MOST_KL.items())
        outcomes.append(Outcome("PASS" if good else "FAIL", "tape-int8", "; ".join(parts), bar, one))
    return outcomes


def judge_warm(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    done = ", ".join(f"{record['model']} {record['s']:.0f} s" for one in ended for record in one.of("warm"))
    value = f"{done or 'none'}: to make a model, compile and answer"
    return [*_errors(ended, "tape-warm"), *([Outcome("PASS", "tape-warm", value, "reported")] if done else [])]


def judge_tape_speed(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    outcomes = _errors(ended, "tape-speed")
    for one in ended:
        shape, type = one.job.words["shape"], one.job.words["type"]
        least, aim, peer = next(bar[2:] for bar in BARS if bar[:2] == (shape, type))
        found = {(r["mode"], r["activations"], r["batch"], r["depth"]): r for r in one.of("decode")}
        name = f"tape-{shape.removeprefix('llama-')}-{type}"
        base = found.get((TAPE, "wide", 1, DEPTH))
        if base is None:
            continue
        loop, int8 = found.get(("loop", "wide", 1, DEPTH)), found.get((TAPE, "int8", 1, DEPTH))
        value = f"{base['tok_s']:.0f} tok/s, {base['tok_s'] / peer:.2f} x llama.cpp"
        value += "" if loop is None else f", {base['tok_s'] / loop['tok_s']:.2f} x loop"
        value += f", limit {base['limit']:.0f}"
        value += (
            "" if int8 is None else f"; int8 activations {int8['tok_s']:.0f}, {int8['tok_s'] / peer:.2f} x llama.cpp"
        )
        outcomes.append(_bar(name, base["tok_s"], least, value, f"{least:,}, aim {aim:,}"))
        eight, far = found.get((TAPE, "wide", BATCH, DEPTH)), found.get((TAPE, "wide", 1, LONG_DEPTH))
        if eight is not None:
            gain, of_eight = eight["tok_s"] / base["tok_s"], found.get((TAPE, "int8", BATCH, DEPTH))
            value = f"{eight['tok_s']:.0f} tok/s with {BATCH}, {gain:.2f} x one"
            value += "" if of_eight is None else f"; int8 activations {of_eight['tok_s']:.0f}"
            if type == "bf16":
                outcomes.append(_bar(f"{name}-batch", gain, BATCH_GAIN, value, f"{BATCH_GAIN} x"))
            else:
                outcomes.append(Outcome("PASS", f"{name}-batch", value, "reported"))
        if far is not None:
            allowed = base["tok_s"] * base["bytes_per_token"] / far["bytes_per_token"]
            share = far["tok_s"] / allowed
            value = f"{far['tok_s']:.0f} tok/s at {LONG_DEPTH}, {share:.2f} of what the bytes allow"
            outcomes.append(_bar(f"{name}-far", share, LONG_SHARE, value, f"{LONG_SHARE}"))
    return outcomes


def _bar(name: str, found: float, least: float, value: str, bar: str) -> Outcome:
    return Outcome("PASS" if found >= least else "MISS", name, value, bar)


def _errors(ended: Sequence[Ended], name: str) -> list[Outcome]:
    return [Outcome("FAIL", name, f"{one.job.words}: {one.error}") for one in ended if one.error is not None]


# The checks


def _verify_jobs(setting: Setting) -> list[Job]:
    types = ["bf16", "f16", "q4_k_m", "q4_0", "q4_1", "q5_k", "q6_k", "q8_0"]
    tiny = [Job("tape_verified", {"name": "tiny", "types": types[n::4]}, 200) for n in range(4)]
    large = [("smollm2-135m", "bf16"), ("llama-1b", "bf16"), ("llama-1b", "q4_k_m"), ("llama-8b", "q4_k_m")]
    large += [(name, type) for name in WITH_MORE for type in ("bf16", "q4_k_m")]
    bytes_kept = [Job("tape_verified", {"name": name, "types": ["bf16"], "kv_type": "q8_0"}, 200) for name in WITH_Q8_0]
    families = [Job("tape_families", {"names": sorted(FAMILIES)[n::4]}, 200) for n in range(4)]
    verify = [Job("tape_verified", {"name": name, "types": [type]}, 200) for name, type in large]
    return [*tiny, *families, *verify, *bytes_kept]


def _trial_jobs(setting: Setting) -> list[Job]:
    words: dict[str, Any] = {"seed": 2, "seconds": 60.0, "kv_type": None, "mode": TAPE}
    wanted = (("tiny", "bf16", 100), ("tiny", "q4_k_m", 60), ("llama-1b", "bf16", 20), ("tiny-glm4", "bf16", 60))
    return [Job("trials", {"name": name, "type": type, "n": n, **words}, 200) for name, type, n in wanted]


def _sanitizer_jobs(setting: Setting) -> list[Job]:
    words = {"mode": TAPE, "name": "tiny"}
    return [Job("sanitized", {**words, "tool": tool}, 60) for tool in ("memcheck", "racecheck")]


def _argmax_jobs(setting: Setting) -> list[Job]:
    return [Job("tape_argmax", {"name": "smollm2-135m", "type": "bf16", "path": setting.model}, 200)]


def _int8_jobs(setting: Setting) -> list[Job]:
    return [] if setting.model is None else [Job("tape_int8", {"path": setting.model}, 150)]


def _admission_jobs(setting: Setting) -> list[Job]:
    return [Job("tape_admissions", {"name": "tiny", "type": "bf16", "n": ADMISSIONS, "seconds": 60.0}, 90)]


def _warm_jobs(setting: Setting) -> list[Job]:
    return [Job("tape_warm", {"shape": shape, "type": type}, 150) for shape, type, *_ in BARS]


def _only_on_gpu(jobs: Any) -> Any:
    return lambda setting: jobs(setting) if setting.on_gpu else []


def _one(work: str, seconds: float = 200, **words: Any) -> Any:
    return _only_on_gpu(lambda setting: [Job(work, words, seconds)])


WORKS: Final = {
    "tape_verified": tape_verified,
    "tape_families": tape_families,
    "tape_argmax": tape_argmax,
    "tape_int8": tape_int8,
    "tape_admissions": tape_admissions,
    "tape_warm": tape_warm,
    "tape_speed": tape_speed,
    "tape_yield": tape_yield,
}

# The same kernel as one of those measured: it is compiled when its turn comes.
_YIELD: Final[dict[str, Any]] = {"name": "llama-1b", "type": "bf16", "n_slots": 8, "context": CONTEXT}
# Children start in this order: checks of results, then measurements of speed, each of which runs alone.
CHECKS: Final = (
    Check("tape", "tape-verify", _only_on_gpu(_verify_jobs), lambda s, e: judge_verified(s, e, "tape-verify", (TAPE,))),
    Check("tape", "tape-argmax", _only_on_gpu(_argmax_jobs), judge_argmax),
    Check("tape", "tape-int8", _only_on_gpu(_int8_jobs), judge_int8),
    Check("tape", "tape-trials", _only_on_gpu(_trial_jobs), lambda s, e: judge_trials(s, e, "tape-trials")),
    Check("tape", "tape-warm", _only_on_gpu(_warm_jobs), judge_warm, alone=True),
    Check("tape", "tape-sanitizer", _only_on_gpu(_sanitizer_jobs), judge_sanitized, run=run_sanitized),
    Check("tape", "tape-admissions", _only_on_gpu(_admission_jobs), judge_admissions, alone=True),
    Check("tape", "tape-yield", _one("tape_yield", 90, **_YIELD), judge_yield, alone=True),
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
