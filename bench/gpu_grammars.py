"""Answers under grammars on a GPU: the tokens of the host's masks, as many launches as a free answer, and as fast.

A vocabulary of random words with every byte stands in for a model's, whose weights are random too. The same requests
are answered by the loop, from automata in the device's memory, and by an engine without that memory, whose host
computes the masks. Each is a check for both modes in which the device goes from step to step by itself; tokens are
compared in the other modes too.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

from bench.gpu_calls import counters
from bench.gpu_frame import Check, Ended, Job, Outcome, Record, Setting
from bench.gpu_models import TAPE, kv_type_of, model_on, settled_for
from bench.gpu_stress import judge_stopped, proofs, run_stopped, stopped_request
from bench.structured import SCHEMA
from ostinato.backends.torch.model import Model
from ostinato.engine.constraint import Constraint
from ostinato.engine.engine import Engine
from ostinato.engine.request import Request
from ostinato.options import NEUTRAL, Sampling
from ostinato.text.automaton import AutomatonMatcher, GrammarMasks, Trie, of_rule

ALONE_SHARE, AMONG_SHARE = 0.95, 0.90  # of a free answer's pace: one, and eight of eight
N_AT_ONCE: Final = 8
RULES: Final[dict[str, dict[str, Any]]] = {
    "object": {"schema": SCHEMA["items"]},
    "array": {"schema": SCHEMA},
    "open object": {"schema": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 2000}}}},
    "regex": {"regex": "[a-z]{3,900}( [0-9]+)?"},
    "choice": {"choice": ("yes", "no", "perhaps")},
    "min_tokens": {"regex": "[a-z]*", "min_tokens": 20},
}


@cache
def trie_of(vocab: int) -> Trie:
    """Every byte, then random words of JSON and letters; the last token ends an answer."""
    chance = random.Random(0)
    pieces = [*'{}[]:,"', '":', '",', '{"', "true", "null", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", " "]
    tokens = [bytes([byte]) for byte in range(256)][: vocab - 1]
    tokens += ["".join(chance.choices(pieces, k=chance.randint(1, 8))).encode() for _ in range(vocab - 1 - len(tokens))]
    return Trie([*tokens, b"<end>"], [vocab - 1])


def constrain(vocab: int, asked: Sampling) -> Constraint | None:
    if asked.rule is None:
        return None
    masks = GrammarMasks(of_rule(asked.rule), trie_of(vocab), vocab)
    return AutomatonMatcher(masks, frozenset({vocab - 1}), asked)


def engine_of(model: Model, type: str, mode: str, *, by_host: bool = False, context: int = 2048) -> Engine:
    settled = settled_for(model, mode, n_slots=N_AT_ONCE, context=context, kv_type=kv_type_of(type))
    if by_host:
        settled = replace(settled, grammar_bytes=0)
    vocab = model.shape.vocab
    return Engine(model, settled, constrain=partial(constrain, vocab), eog_ids=(vocab - 1,))


def asked(n_tokens: int, **words: Any) -> Sampling:
    return Sampling(**{"max_tokens": n_tokens, "seed": 0, **words}).over(NEUTRAL)


def prompt_of(model: Model, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(model.shape.vocab) for _ in range(16)]


# The same tokens


def grammar_tokens(device: str, *, mode: str, name: str, type: str, n_tokens: int) -> Iterator[Record]:
    """Every rule, greedy and sampled, by the loop and under the host's masks; then all of them at once, by the loop."""
    model = model_on(name, type, device)
    samplings = [asked(n_tokens, temperature=t, **rule) for rule in RULES.values() for t in (0.0, 1.0)]
    with engine_of(model, type, mode) as engine, engine_of(model, type, mode, by_host=True) as other:
        ours, theirs = (
            [_told(where.submit(prompt_of(model, seed), sampling)) for seed, sampling in enumerate(samplings)]
            for where in (engine, other)
        )
        together = [engine.submit(prompt_of(model, seed), sampling) for seed, sampling in enumerate(samplings)]
        at_once = [_told(request) for request in together]
    yield {
        "what": "tokens",
        "n": len(samplings),
        "wrong": sum(one[1:] != two[1:] for one, two in zip(ours, theirs, strict=True)),
        "wrong_at_once": sum(one != two for one, two in zip(ours, at_once, strict=True)),
        "paths": dict(Counter(str(one[0]) for one in ours)),
        "tokens": sum(len(one) - 2 for one in ours),
    }


def _told(request: Request) -> list[object]:
    tokens: list[object] = [token.token for token in request]
    return [request.grammar, request.finish_reason, *tokens]


def judge_tokens(setting: Setting, ended: Sequence[Ended], name: str) -> list[Outcome]:
    if not ended:
        return [Outcome("SKIP", name, "this mode is CUDA's")]
    found = ended[0].of("tokens")[0]
    good = found["wrong"] == found["wrong_at_once"] == 0 and "host" not in found["paths"]
    value = (
        f"{found['n']} answers ({found['tokens']} tokens) by {found['paths']}: {found['wrong']} unlike the host's "
        f"masks, {found['wrong_at_once']} unlike themselves alone"
    )
    return [Outcome("PASS" if good else "FAIL", name, value, "0 and 0, none by the host", found)]


# As many launches


def grammar_launches(device: str, *, mode: str, name: str, type: str, n_tokens: int) -> Iterator[Record]:
    """Triggers, launches, and the calls that start work, of a free answer and a constrained one of the same length; and
    of one whose masks the host computes."""
    model, found = model_on(name, type, device), dict[str, Record]()
    known = counters() if device == "cuda" else []
    ways = {"free": ({}, False), "schema": ({"schema": SCHEMA}, False), "host": ({"schema": SCHEMA}, True)}
    for way, (rule, by_host) in ways.items():
        with engine_of(model, type, mode, by_host=by_host) as engine:

            def answer(engine: Engine = engine, rule: dict[str, Any] = rule) -> None:
                n = sum(1 for _ in engine.submit(prompt_of(model, 1), asked(n_tokens, ignore_eos=True, **rule)))
                if n != n_tokens:
                    raise RuntimeError(f"{n} tokens of {n_tokens} came")

            answer()
            runner = engine.runner
            before = runner.start.n_launches, runner.decode_mode.n_triggers
            calls = known[0][1](answer) if known else Counter[str]()
            if not known:
                answer()
            found[way] = {
                "launches": runner.start.n_launches - before[0],
                "triggers": runner.decode_mode.n_triggers - before[1],
                "calls": sum(count for call, count in calls.items() if "Launch" in call),
            }
    yield {"what": "launches", "counter": known[0][0] if known else "the loop's own count", "ways": found}


def judge_launches(setting: Setting, ended: Sequence[Ended], name: str) -> list[Outcome]:
    found = ended[0].of("launches")[0]
    ways = found["ways"]
    same = ways["schema"] == ways["free"] and ways["schema"]["launches"] == 1 == ways["schema"]["triggers"]
    told = "; ".join(
        f"{way}: {one['launches']} launches, {one['triggers']} triggers, {one['calls']} calls that launch"
        for way, one in ways.items()
    )
    outcome = Outcome("PASS" if same else "FAIL", name, f"{told}, by {found['counter']}", "a schema's as a free one's")
    waits = ways["host"]["launches"] == 1
    bar = "1 unless the host takes longer than a quarter of a second for a mask"
    host = Outcome("PASS" if waits else "MISS", f"{name}-host", f"{ways['host']['launches']} launches", bar)
    return [outcome, host]


# A host that stands still


def grammar_stopped(device: str, *, mode: str, name: str, type: str, n_tokens: int, context: int) -> Iterator[Record]:
    model = model_on(name, type, device)
    long = {**SCHEMA, "minItems": n_tokens}
    with engine_of(model, type, mode, context=context) as engine:
        list(engine.submit(prompt_of(model, 2), asked(32, schema=long, ignore_eos=True)))
        yield stopped_request(engine, prompt_of(model, 1), asked(n_tokens, schema=long, ignore_eos=True))


# As fast


def grammar_speed(device: str, *, mode: str, name: str, type: str, n_tokens: int, rounds: int = 5) -> Iterator[Record]:
    """Pace of one and of eight answers, free and constrained in turn."""
    model = model_on(name, type, device)
    with engine_of(model, type, mode) as engine:
        for n in (1, N_AT_ONCE):
            paces: dict[str, list[float]] = {"free": [], "schema": []}
            for number in range(rounds + 1):
                for way, rule in (("free", {}), ("schema", {"schema": SCHEMA})):
                    pace = _pace(engine, model, n, asked(n_tokens, ignore_eos=True, **rule))
                    if number:  # the first warms
                        paces[way].append(pace)
            shares = [under / free for under, free in zip(paces["schema"], paces["free"], strict=True)]
            yield {"what": "pace", "n": n, "share": statistics.median(shares), "shares": shares, **paces}


def _pace(engine: Engine, model: Model, n: int, sampling: Sampling) -> float:
    """Tokens a second of all of them, by the device's clock: the median of their paces, times how many there are."""
    requests = [engine.submit(prompt_of(model, seed), sampling) for seed in range(n)]
    times = [[token.time_ns for token in request] for request in requests]
    return n * statistics.median((len(one) - 2) / ((one[-1] - one[1]) / 1e9) for one in times)


def judge_speed(setting: Setting, ended: Sequence[Ended], name: str) -> list[Outcome]:
    outcomes = []
    for job in ended:
        for found in job.of("pace"):
            bar = ALONE_SHARE if found["n"] == 1 else AMONG_SHARE
            spread = f"{min(found['shares']):.3f} to {max(found['shares']):.3f}"
            value = (
                f"{job.job.words['name']}: {found['n']} under a schema {found['share']:.3f} ({spread}) of free, "
                f"{statistics.median(found['schema']):.0f} and {statistics.median(found['free']):.0f} tok/s"
            )
            enough = found["share"] >= bar or not setting.on_gpu
            outcomes.append(Outcome("PASS" if enough else "MISS", f"{name}-{found['n']}", value, f"{bar:.2f}", found))
    return outcomes


# The checks


def _words(setting: Setting, mode: str, large: str, **sizes: int) -> dict[str, Any]:
    made = {"name": large, "type": "bf16"} if setting.on_gpu else {"name": "tiny", "type": "f32"}
    return {"mode": mode, **made, **sizes}


def _tokens_jobs(setting: Setting, mode: str) -> list[Job]:
    return [Job("grammar_tokens", _words(setting, mode, "smollm2-135m", n_tokens=200 if setting.on_gpu else 40), 150)]


def _host_paced_jobs(mode: str, setting: Setting) -> list[Job]:
    return _tokens_jobs(setting, mode) if setting.on_gpu or mode == "eager" else []  # graphs are CUDA's


def _launches_jobs(setting: Setting, mode: str) -> list[Job]:
    n_tokens = 500 if setting.on_gpu else 40
    return [Job("grammar_launches", _words(setting, mode, "smollm2-135m", n_tokens=n_tokens), 120)]


def _stopped_jobs(setting: Setting, mode: str) -> list[Job]:
    sizes = {"n_tokens": 7_000, "context": 8192} if setting.on_gpu else {"n_tokens": 1_500, "context": 2048}
    return [Job("grammar_stopped", _words(setting, mode, "llama-1b", **sizes), 120)]


def _speed_jobs(setting: Setting, mode: str) -> list[Job]:
    """Vocabularies of 128k and of 49k."""
    n_tokens = 400 if setting.on_gpu else 30
    names = ("llama-1b", "smollm2-1.7b") if setting.on_gpu else ("tiny",)
    return [Job("grammar_speed", _words(setting, mode, name, n_tokens=n_tokens), 150) for name in names]


WORKS: Final = {
    "grammar_tokens": grammar_tokens,
    "grammar_launches": grammar_launches,
    "grammar_stopped": grammar_stopped,
    "grammar_speed": grammar_speed,
}

_PROOFS: Final = (
    proofs("tokens", _tokens_jobs, judge_tokens, part="grammar"),
    proofs("launches", _launches_jobs, judge_launches, part="grammar"),
    proofs("stopped", _stopped_jobs, judge_stopped, run_stopped, part="grammar"),
    proofs("pace", _speed_jobs, judge_speed, part="grammar"),
)

# The modes that the host paces are compared once: they launch the kernels of `loop`.
_HOST_PACED: Final = tuple(
    Check("grammar", f"tokens-{mode}", partial(_host_paced_jobs, mode), partial(judge_tokens, name=f"tokens-{mode}"))
    for mode in ("eager", "graph")
)
CHECKS: Final = (*(proof[mode] for mode in ("loop", TAPE) for proof in _PROOFS), *_HOST_PACED)
