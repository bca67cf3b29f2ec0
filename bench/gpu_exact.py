"""Exactness: the modes give the same bits, and a request's bits do not depend on who else is there.

The witness of a request's logits is the token, the float32 bits of its log-probability, and the five most likely
beside it. Modes are compared buffer by buffer (`ostinato verify`'s own check) and beside the twins.
"""

from __future__ import annotations

import random
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from bench.gpu_frame import Check, Ended, Job, Outcome, Record, Setting
from bench.gpu_models import (
    ON_CPU,
    SMALL,
    TAPE,
    kv_type_of,
    model_named,
    model_on,
    modes_of,
    place,
    settled_for,
)
from ostinato.backends import base
from ostinato.backends.base import CHUNK_ROWS
from ostinato.backends.torch.model import Model
from ostinato.cache.groups import one_group
from ostinato.engine.choose import why_not_model
from ostinato.engine.driver import GREEDY
from ostinato.engine.engine import Engine
from ostinato.engine.request import Request
from ostinato.engine.verify import Verifier
from ostinato.errors import HardwareCannot
from ostinato.files.checkpoint import open_checkpoint
from ostinato.lab.random_weights import DTYPES, MIXES
from ostinato.models.blocks import Attention
from ostinato.models.registry import read_shape
from ostinato.options import KVType, Sampling
from tests.built import build_model

Witness = tuple[int, str, tuple[tuple[int, str], ...], int, str | None]

N_TRIALS: Final = 1_000  # beside those of recurrent models
ROOM: Final = 2_048  # positions of a recurrent model's context: prompts are longer than a chunk, as snapshots need
WINDOW: Final = 70  # positions; more than a page, and no whole number of them
MOST_SHOWN: Final = 20
LARGE: Final = (("llama-1b", "bf16"), ("llama-1b", "q4_k_m"), ("llama-8b", "bf16"), ("llama-8b", "q4_k_m"))


# Verify


def verify(device: str, *, name: str, types: Sequence[str], kv_types: Sequence[KVType] = ()) -> Iterator[Record]:
    """A model in each type, or with each type of KV: modes against `eager`, and one token against the twins."""
    for type in types:
        for kv_type in kv_types or (kv_type_of(type),):
            started = time.perf_counter()
            model = model_on(name, type, device)
            fresh = (
                model_on(name, type, "cpu") if device == "cpu" else model_named(name, type) if name in ON_CPU else model
            )
            called = f"{name} {type}" + (f" kv {kv_type}" if kv_types else "")
            yield {"what": "verified", "model": called, **verified(model, fresh, kv_type), "s": _since(started)}
            del model, fresh
            _empty_cache(device)


def verify_file(device: str, *, path: str) -> Iterator[Record]:
    """The same for a model's file, dense and packed, beside the twins over a copy of it on the CPU."""
    checkpoint = open_checkpoint(Path(path))
    shape = read_shape(checkpoint)
    type = "f32" if device == "cpu" else "bf16"
    for packed in (False, True) if device != "cpu" else (False,):  # the CPU unpacks at every product
        started = time.perf_counter()
        loaded = [
            build_model(
                checkpoint,
                shape,
                dtype=getattr(torch, DTYPES[type]),
                device=there,
                context=min(2048, shape.context),
                packed=packed,
            )
            for there in (place(device), torch.device("cpu"))
        ]
        called = Path(path).name + (" packed" if packed else f" {type}")
        found = verified(loaded[0], loaded[1], kv_type_of(type))
        yield {"what": "verified", "model": called, **found, "s": _since(started)}
        yield from _same_tokens(loaded[0], device, called, kv_type_of(type))


def verified(model: Model, fresh: Model | None, kv_type: KVType, modes: Sequence[str] | None = None) -> Record:
    """`fresh` is what the twins compute with: a copy on the CPU, or the model itself where it is large."""
    reason = why_not_model(model)["eager"]
    if reason is not None:
        return {"skipped": reason}
    try:
        again = None if fresh is None else lambda: fresh
        report = Verifier(model, kv_type, model.shape.vocab, modes=None if modes is None else tuple(modes)).verify(
            again
        )
    except HardwareCannot as error:
        return {"skipped": str(error)}
    return {
        "checks": [
            {
                "name": f"{check.name} / {check.against}",
                "difference": None if check.difference is None else check.difference.text,
                "n": check.n_compared,
                "figures": {key: float(f"{value:.4g}") for key, value in check.figures.items()},
            }
            for check in report.checks
        ],
        "not_run": dict(report.not_run),
    }


def judge_verified(
    setting: Setting, ended: Sequence[Ended], name: str, modes: Sequence[str] | None = None
) -> list[Outcome]:
    """`modes`: those that must have been compared with `eager`; all but the tape unless told."""
    records = [record for one in ended for record in one.of("verified")]
    wrong = [f"{one.job.words.get('name', one.job.work)}: {one.error}" for one in ended if one.error is not None]
    skipped = [f"{record['model']}: {record['skipped']}" for record in records if "skipped" in record]
    done = [record for record in records if "skipped" not in record]
    for record in done:
        wrong += [f"{record['model']}, {c['name']}: {c['difference']}" for c in record["checks"] if c["difference"]]
        missing = {f"{mode} / eager" for mode in modes or modes_of(setting.device)[1:]} - {
            c["name"] for c in record["checks"]
        }
        wrong += [f"{record['model']}: not compared: {one} ({record['not_run']})" for one in sorted(missing)]
    outcomes = []
    if done or wrong:
        n = sum(len(record["checks"]) for record in done)
        worst = max((c["figures"].get("relative", 0.0) for r in done for c in r["checks"]), default=0.0)
        value = f"{len(done)} models, {n} comparisons equal; logits within {worst:.2g} of the twins'"
        if wrong:
            value = f"{len(wrong)} wrong: " + " || ".join(wrong[:MOST_SHOWN])
        outcomes.append(Outcome("FAIL" if wrong else "PASS", name, value, "modes equal to the bit", _facts(records)))
    outcomes += [Outcome("SKIP", name, text) for text in skipped]
    return outcomes


def _facts(records: Sequence[Record]) -> Record:
    return {
        "models": [record["model"] for record in records if "skipped" not in record],
        "seconds": round(sum(record.get("s", 0.0) for record in records), 1),
    }


# Tokens through the engine, mode by mode


def tokens(device: str, *, name: str, type: str) -> Iterator[Record]:
    yield from _same_tokens(model_on(name, type, device), device, f"{name} {type}", kv_type_of(type))


def _same_tokens(model: Model, device: str, called: str, kv_type: KVType) -> Iterator[Record]:
    """The same eight requests together in each mode: greedy and drawn, short and long."""
    chance = random.Random(5)
    small = device == "cpu"
    n_tokens = 12 if small else 96
    cases = [
        Case(_ids(chance, length, model.shape.vocab), replace(sampling, max_tokens=n_tokens, logprobs=5))
        for length in ((1, 20, 70, 130) if small else (1, 40, 200, 700))
        for sampling in (GREEDY, replace(GREEDY, temperature=0.8, top_k=40, top_p=0.95, seed=chance.getrandbits(40)))
    ]
    heard: dict[str, list[list[Witness]]] = {}
    for mode in modes_of(device):
        settled = settled_for(model, mode, n_slots=4, context=1024, kv_type=kv_type)
        with Engine(model, settled) as engine:
            requests = [engine.submit(case.prompt, case.sampling, wait=True) for case in cases]
            heard[mode] = [witnesses(request) for request in requests]
    base = heard["eager"]
    wrong = [
        f"{mode}: request {number}: {difference}"
        for mode, answers in heard.items()
        for number, (expected, found) in enumerate(zip(base, answers, strict=True))
        if (difference := first_difference(expected, found)) is not None
    ]
    n_heard = sum(len(answer) for answer in base)
    yield {"what": "tokens", "model": called, "modes": list(heard), "n_tokens": n_heard, "wrong": wrong}


def judge_tokens(setting: Setting, ended: Sequence[Ended], name: str) -> list[Outcome]:
    records = [record for one in ended for record in one.of("tokens")]
    wrong = [f"{one.job.work}: {one.error}" for one in ended if one.error is not None]
    wrong += [f"{record['model']}: {text}" for record in records for text in record["wrong"]]
    if not records and not wrong:
        return []
    said = ", ".join(f"{r['model']} ({r['n_tokens']} tokens in {', '.join(r['modes'])})" for r in records)
    value = f"{len(wrong)} wrong: " + " || ".join(wrong[:MOST_SHOWN]) if wrong else said
    return [Outcome("FAIL" if wrong else "PASS", name, value, "tokens and log-probabilities equal to the bit")]


# Trials


@dataclass(frozen=True, slots=True)
class Case:
    """One request of a trial: when it arrives after the one before it, and when it is cancelled, if it is."""

    prompt: list[int]
    sampling: Sampling
    delay_s: float = 0.0
    cancel_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """What trials are drawn from: lengths of prompts, tokens of an answer, requests of a group, and the engine."""

    lengths: tuple[tuple[int, int], ...]
    most: int
    group: int
    context: int
    n_slots: int
    n_pages: int


def sizes_of(model: Model, device: str) -> Sizes:
    context = min(1024, model.shape.context)
    page = 64 if device != "cpu" else 16
    # Below one page, around its end, around the second's, some way on; and longer than one chunk where there is room.
    lengths: tuple[tuple[int, int], ...]
    lengths = ((1, 8), (page - 3, page + 3), (2 * page - 2, 2 * page + 9), (page, 3 * page))
    if context >= 1024 and device != "cpu":
        lengths = (*lengths, (500, 700))
    elif model.shape.recurrent:
        lengths = (*lengths, (CHUNK_ROWS["cpu"] + 1, CHUNK_ROWS["cpu"] + 80))
    # Fewer pages than all of them would like: some wait, some are topped up, what was kept of prompts is given away.
    one = -(-context // page)
    return Sizes(lengths, 24 if device != "cpu" else 6, 10, context, 8, 3 * one)


def trials(
    device: str,
    *,
    name: str,
    type: str,
    n: int,
    seed: int,
    seconds: float,
    kv_type: KVType | None = None,
    mode: str = "loop",
    windows: str | None = None,
) -> Iterator[Record]:
    """Groups of requests that arrive at random, each compared with its run alone.

    A recurrent model's prompts share their beginnings with others, and some are an earlier prompt and what follows it:
    both begin at snapshots of its states.
    `windows`: the layers that see a window, "every second" or "all"; answers are then as long as several windows.
    """
    model = model_on(name, type, device)
    if recurs := bool(model.shape.recurrent):
        model = replace(model, shape=replace(model.shape, context=ROOM))
    chance, sizes, earlier = random.Random(seed), sizes_of(model, device), deque[list[int]](maxlen=8)
    if windows is not None:
        model, sizes = windowed(model, every=1 if windows == "all" else 2), replace(sizes, most=300)
    kv: KVType = kv_type or kv_type_of(type)
    bases = [_ids(chance, 700, model.shape.vocab) for _ in range(6)]
    counts = {"trials": 0, "requests": 0, "cached": 0, "cancelled": 0, "tokens": 0}
    wrong: list[str] = []
    # Alone: one slot, no reuse, another context, every position of every layer kept; nothing of this may be seen in the
    # bits.
    alone_at = settled_for(model, mode, n_slots=1, context=min(model.shape.context, 2 * sizes.context), kv_type=kv)
    crowd_at = settled_for(model, mode, n_slots=sizes.n_slots, context=sizes.context, kv_type=kv, n_pages=sizes.n_pages)
    started = time.perf_counter()
    with every_position_kept():
        keeps_all = Engine(model, alone_at, share_prefixes=False)
    with keeps_all as alone, Engine(model, crowd_at) as crowd:
        opened_s = _since(started)
        began = time.perf_counter()
        while counts["trials"] < n and time.perf_counter() - began < seconds and len(wrong) < MOST_SHOWN:
            cases = [_case(chance, bases, model.shape.vocab, sizes) for _ in range(chance.randint(1, sizes.group))]
            if recurs:
                cases = [_next_turn(chance, case, earlier, sizes) for case in cases]
                earlier += [case.prompt for case in cases]
            requests, answers = _together(crowd, cases)
            for number, (case, request, found) in enumerate(zip(cases, requests, answers, strict=True)):
                expected = witnesses(alone.submit(case.prompt, case.sampling))
                cancelled = request.finish_reason == "cancelled"
                difference = first_difference(expected[: len(found)] if cancelled else expected, found)
                if difference is not None:
                    again = _diagnosis(alone, crowd, case, expected)
                    wrong.append(
                        f"trial {counts['trials']} request {number} (prompt {len(case.prompt)}, cached "
                        f"{request.cached_tokens}, {_said(case.sampling)}): {difference}; {again}"
                    )
                counts["requests"] += 1
                counts["cached"] += request.cached_tokens > 0
                counts["cancelled"] += cancelled
                counts["tokens"] += len(found)
            counts["trials"] += 1
        faults = [engine.stats().fault for engine in (alone, crowd)]
    wrong += [fault for fault in faults if fault]
    yield {
        "what": "trials",
        "model": f"{name} {type}" + (f" kv {kv_type}" if kv_type else "") + (f" windows {windows}" if windows else ""),
        "recurs": recurs,
        "wanted": n,
        **counts,
        "wrong": wrong,
        "open_s": opened_s,
        "s": _since(began),
    }


def windowed(model: Model, *, every: int) -> Model:
    """The same with a window in every so many layers."""
    windows = tuple(None if layer % every else WINDOW for layer in range(model.shape.n_layers))
    shape = model.shape.with_attention(window=windows)
    layers = []
    for number, layer in enumerate(model.layers):
        assert isinstance(layer.attention, Attention)
        layers.append(replace(layer, attention=replace(layer.attention, shape=shape.attention[number])))
    return replace(model, shape=shape, layers=layers)


@contextmanager
def every_position_kept() -> Iterator[None]:
    """Engines that are opened inside keep the pages of every position in every layer, whatever it sees."""
    with patch.object(base, "page_groups", lambda shape, *, n_pages, **_: one_group(shape.attention, n_pages)):
        yield


def _together(engine: Engine, cases: Sequence[Case]) -> tuple[list[Request], list[list[Witness]]]:
    requests = []
    for case in cases:
        if case.delay_s:
            time.sleep(case.delay_s)
        requests.append(engine.submit(case.prompt, case.sampling, wait=True))
    for case, request in zip(cases, requests, strict=True):
        if case.cancel_s is not None:
            time.sleep(case.cancel_s)
            request.cancel()
    return requests, [witnesses(request) for request in requests]


def _case(chance: random.Random, bases: Sequence[list[int]], vocab: int, sizes: Sizes) -> Case:
    length = min(chance.randint(*chance.choice(sizes.lengths)), sizes.context - sizes.most - 1)
    own = chance.choice((0, 1, length // 3, length)) if chance.random() < 0.8 else length
    prompt = [*chance.choice(bases)[: length - own], *_ids(chance, own, vocab)] or [1]
    most = chance.randint(1, sizes.most)
    sampling = replace(GREEDY, max_tokens=most, logprobs=5, ignore_eos=True)
    if chance.random() < 0.6:
        sampling = replace(
            sampling,
            temperature=chance.choice((0.5, 0.8, 1.3)),
            top_k=chance.choice((0, 0, 5, 40)),
            top_p=chance.choice((1.0, 0.95, 0.7)),
            min_p=chance.choice((0.0, 0.0, 0.05)),
            seed=chance.getrandbits(40),
        )
    if chance.random() < 0.3:
        sampling = replace(sampling, repetition_penalty=1.2, presence_penalty=0.2, frequency_penalty=0.1)
    if chance.random() < 0.2:
        sampling = replace(sampling, logit_bias={chance.randrange(vocab): chance.uniform(-5, 5) for _ in range(4)})
    if chance.random() < 0.2:
        sampling = replace(sampling, stop_token_ids=tuple(_ids(chance, 5, vocab)), min_tokens=min(2, most))
    cancel = chance.uniform(0, 0.004) if chance.random() < 0.1 else None
    return Case(prompt, sampling, chance.choice((0.0, 0.0, chance.uniform(0, 0.003))), cancel)


def _next_turn(chance: random.Random, case: Case, earlier: Sequence[list[int]], sizes: Sizes) -> Case:
    """The case, or the same with an earlier prompt before the beginning of its own."""
    if not earlier or chance.random() < 0.7:
        return case
    prompt = [*chance.choice(earlier), *case.prompt[: chance.randint(1, 20)]]
    return replace(case, prompt=prompt) if len(prompt) + sizes.most < sizes.context else case


def _diagnosis(alone: Engine, crowd: Engine, case: Case, expected: list[Witness]) -> str:
    """Which of the things that differ between the two runs it takes to be different."""
    twice = first_difference(expected, witnesses(alone.submit(case.prompt, case.sampling))) is None
    idle = first_difference(expected, witnesses(crowd.submit(case.prompt, case.sampling))) is None
    same = {True: "the same", False: "different"}
    return f"alone a second time: {same[twice]}; in the large engine with no other request: {same[idle]}"


def judge_trials(setting: Setting, ended: Sequence[Ended], name: str) -> list[Outcome]:
    records = [record for one in ended for record in one.of("trials")]
    wrong = [f"{one.job.words['name']} {one.job.words['type']}: {one.error}" for one in ended if one.error is not None]
    wrong += [f"{record['model']}: {text}" for record in records for text in record["wrong"]]
    recurrent = [record for record in records if record["recurs"]]
    wrong += [f"{r['model']}: no request began at a snapshot of its states" for r in recurrent if not r["cached"]]
    total = {key: sum(r[key] for r in records) for key in ("trials", "requests", "cached", "cancelled", "tokens")}
    snapshots = f", {sum(r['cached'] for r in recurrent)} of them of recurrent models" if recurrent else ""
    value = (
        f"{total['trials']} trials, {total['requests']} requests ({total['cached']} with a prefix hit{snapshots}, "
        f"{total['cancelled']} cancelled), {total['tokens']} tokens: {len(wrong)} wrong"
    )
    if wrong:
        value += ": " + " || ".join(wrong[:5])
    wanted = sum(int(one.job.words["n"]) for one in ended)
    verdict: Any = "FAIL" if wrong else "MISS" if total["trials"] < wanted else "PASS"
    facts = {"of": {record["model"]: [record["trials"], round(record["s"], 1)] for record in records}}
    return [Outcome(verdict, name, value, f"{wanted} trials, no mismatch", facts)]


# Kernels alone: checks that live beside their timings


def kernels(device: str, *, bench: str) -> Iterator[Record]:
    """The checks of one of the kernel benches; they say what is wrong."""
    try:
        module = import_module(f"bench.{bench}")
    except ModuleNotFoundError as error:
        yield {"what": "kernels", "bench": bench, "skipped": f"it cannot be imported ({error})"}
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    run = _KERNEL_CHECKS.get(bench)
    if run is not None:
        faults = run(module, place(device))
    else:
        yield {"what": "kernels", "bench": bench, "skipped": "it offers no check()"}
        return
    yield {"what": "kernels", "bench": bench, "wrong": [str(fault) for fault in faults]}


def _product_faults(module: Any, device: torch.device) -> list[str]:
    """The products of a few types at both shapes, as far as the time goes."""
    rows = [(type, row) for type in ("bf16", "q4_k", "q6_k") for row in module.check(type, module.Clock(25), True)]
    return [f"{type} {row}" for type, row in rows if row.get("ok") is False or row.get("same_bits") is False]


def _attention_faults(module: Any, device: torch.device) -> list[str]:
    faults = list(module.check_rest(device))
    for size in module.SIZES:
        for store in module.STORES:
            faults += module.check_step(size, store, device)
        for store in ("bf16", "q8_0"):
            faults += module.check_prompt(size, store, device)
        torch.cuda.empty_cache()
    return faults


def _sampling_faults(module: Any, device: torch.device) -> list[str]:
    faults = [fault for case in module.CASES for fault in module.check_tokens(case)]
    drawn = [case for case in module.CASES if case.settings.get("temperature", 0) and not case.flat]
    return faults + [fault for case in drawn if len(case.settings) <= 3 for fault in module.check_draws(case)]


_KERNEL_CHECKS: Final[dict[str, Callable[[Any, torch.device], list[str]]]] = {
    "attention": _attention_faults,
    "sampling": _sampling_faults,
    "kernels": _product_faults,
}


def judge_kernels(setting: Setting, ended: Sequence[Ended], name: str) -> list[Outcome]:
    outcomes = []
    for one in ended:
        called = f"{name}-{one.job.words['bench']}"
        records = one.of("kernels")
        skipped = [record["skipped"] for record in records if "skipped" in record]
        wrong = [text for record in records for text in record.get("wrong", ())] + ([one.error] if one.error else [])
        if skipped:
            outcomes.append(Outcome("SKIP", called, skipped[0]))
        elif wrong or not records:
            text = " || ".join(wrong[:5]) or "it said nothing"
            outcomes.append(Outcome("FAIL", called, f"{len(wrong)} wrong: {text}"))
        else:
            outcomes.append(Outcome("PASS", called, f"its own checks, {one.seconds:.0f} s"))
    return outcomes


# Small things


def witnesses(request: Request) -> list[Witness]:
    """What a request was given, to the bit."""
    return [
        (t.token, _bits(t.logprob), tuple((i, _bits(v)) for i, v in t.top), t.position, t.finish_reason)
        for t in request
    ]


def first_difference(expected: Sequence[Witness], found: Sequence[Witness]) -> str | None:
    for number, (one, two) in enumerate(zip(expected, found, strict=False)):
        for field, a, b in zip(("token", "logprob", "top", "position", "finish"), one, two, strict=True):
            if a != b:
                return f"token {number}: {field} is {_shown(b)}, alone {_shown(a)}"
    if len(expected) != len(found):
        return f"{len(found)} tokens, alone {len(expected)}"
    return None


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return str([(i, _number(bits)) for i, bits in value[:3]])
    return f"{_number(value)} ({value})" if isinstance(value, str) and len(value) == 8 else str(value)


def _bits(value: float) -> str:
    return struct.pack(">f", value).hex()


def _number(bits: str) -> float:
    number: float = struct.unpack(">f", bytes.fromhex(bits))[0]
    return number


def _ids(chance: random.Random, n: int, vocab: int) -> list[int]:
    return [chance.randrange(vocab) for _ in range(n)]


def _said(sampling: Sampling) -> str:
    words = {key: value for key, value in asdict(sampling).items() if value != getattr(GREEDY, key)}
    return ", ".join(f"{key} {value}" for key, value in words.items())


def _since(started: float) -> float:
    return round(time.perf_counter() - started, 2)


def _empty_cache(device: str) -> None:
    if device != "cpu":
        torch.cuda.empty_cache()


# The checks


def _family_jobs(setting: Setting) -> list[Job]:
    types = ["f32", "bf16"] if setting.on_gpu else ["f32"]
    return [Job("verify", {"name": name, "types": types}, 200) for name in SMALL]


def _type_jobs(setting: Setting) -> list[Job]:
    types = ["f16", *MIXES] if setting.on_gpu else ["q4_k_m", "q8_0"]
    return [Job("verify", {"name": "tiny", "types": types[n::4]}, 200) for n in range(min(4, len(types)))]


def _expert_jobs(setting: Setting) -> list[Job]:
    """Routed experts, and latent attention beside them, packed: small ones in every type, and of published sizes."""
    if not setting.on_gpu:
        return [Job("verify", {"name": "tiny-mixtral", "types": ["q4_k_m"]}, 200)]
    small = [
        Job("verify", {"name": name, "types": MIXES[n::3]}, 200)
        for name in ("tiny-mixtral", "tiny-qwen3moe", "tiny-deepseek2")
        for n in range(3)
    ]
    large = ("qwen3-30b-a3b", "mixtral-8x7b", "glm-4.7-flash")
    return [*(Job("verify", {"name": name, "types": ["q4_k_m"]}, 240) for name in large), *small]


def _kv_jobs(setting: Setting) -> list[Job]:
    types = ["bf16"] if setting.on_gpu else ["f32"]
    kinds = ["f32", "bf16", "f16", "q8_0"]
    names = ("tiny", "tiny-deepseek2")
    return [Job("verify", {"name": name, "types": types, "kv_types": kinds}, 200) for name in names]


def _shape_jobs(setting: Setting) -> list[Job]:
    if not setting.on_gpu:
        return []
    return [Job("verify", {"name": name, "types": [type]}, 240) for name, type in LARGE]


def _model_jobs(setting: Setting) -> list[Job]:
    if setting.model is not None:
        return [Job("verify_file", {"path": setting.model}, 240)]
    shape, type = ("smollm2-135m", "bf16") if setting.on_gpu else ("tiny", "f32")
    return [
        Job("verify", {"name": shape, "types": [type]}, 200),
        Job("tokens", {"name": shape, "type": type}, 200),
    ]


def _judge_model(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    called = "smollm2"
    outcomes = [*judge_verified(setting, ended, f"{called}-modes"), *judge_tokens(setting, ended, f"{called}-tokens")]
    if setting.model is None:
        note = "no model file was given (--model); its shape with random weights was checked instead"
        outcomes.append(Outcome("SKIP", f"{called}-file", note))
    return outcomes


def _trial_jobs(setting: Setting) -> list[Job]:
    if not setting.on_gpu:
        small = (("tiny", "f32", 12), ("gemma2", "f32", 8), ("falcon-h1", "f32", 8))
        return [
            Job("trials", {"name": name, "type": type, "n": n, "seed": 1, "seconds": 60.0}) for name, type, n in small
        ]
    wanted: tuple[tuple[str, str, int, str | None], ...] = (
        ("tiny", "bf16", 300, None),
        ("tiny", "q4_k_m", 200, None),
        ("gemma2", "bf16", 150, None),
        ("qwen3moe", "f32", 150, None),
        ("qwen3", "bf16", 140, "q8_0"),
        ("llama-1b", "bf16", 30, None),
        ("llama-1b", "q4_k_m", 30, None),
    )
    assert sum(n for _, _, n, _ in wanted) == N_TRIALS
    wanted += tuple((name, "bf16", 50, None) for name in ("mamba2", "falcon-h1", "qwen35", "lfm2", "qwen35-moe"))
    return [
        Job("trials", {"name": name, "type": type, "n": n, "seed": 1, "seconds": 120.0, "kv_type": kv}, 240)
        for name, type, n, kv in wanted
    ]


def _window_jobs(setting: Setting) -> list[Job]:
    type, n, modes = ("bf16", 40, ("loop", TAPE)) if setting.on_gpu else ("f32", 6, ("loop",))
    given = {"name": "tiny", "type": type, "n": n, "seed": 2, "seconds": 60.0}
    return [
        *(
            Job("trials", {**given, "mode": mode, "windows": windows}, 240)
            for mode in modes
            for windows in ("every second", "all")
        ),
        Job("trials", {**given, "name": "falcon-h1", "windows": "every second"}, 240),
    ]


def _kernel_jobs(setting: Setting) -> list[Job]:
    benches = ("kernels", "attention", "sampling") if setting.on_gpu else ()
    return [Job("kernels", {"bench": bench}, 240) for bench in benches]


WORKS: Final = {
    "verify": verify,
    "verify_file": verify_file,
    "tokens": tokens,
    "trials": trials,
    "kernels": kernels,
}

# In the order in which their children start: the longest first.
CHECKS: Final = (
    Check("exact", "trials", _trial_jobs, lambda s, e: judge_trials(s, e, "trials")),
    Check("exact", "windows", _window_jobs, lambda s, e: judge_trials(s, e, "windows")),
    Check("exact", "shapes", _shape_jobs, lambda s, e: judge_verified(s, e, "shapes")),
    Check("exact", "smollm2", _model_jobs, _judge_model),
    Check("exact", "families", _family_jobs, lambda s, e: judge_verified(s, e, "families")),
    Check("exact", "types", _type_jobs, lambda s, e: judge_verified(s, e, "types")),
    Check("exact", "expert-types", _expert_jobs, lambda s, e: judge_verified(s, e, "expert-types")),
    Check("exact", "kv-types", _kv_jobs, lambda s, e: judge_verified(s, e, "kv-types")),
    Check("exact", "kernels", _kernel_jobs, lambda s, e: judge_kernels(s, e, "kernels")),
)
