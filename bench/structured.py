"""Do other slots keep their pace beside an answer that follows a schema, and what does such an answer cost?

    python -m bench.structured [--model smollm2] [--rounds 5] [--tokens 64]

Three free requests decode alone, beside a fourth free one, and beside one that follows a schema, round by round. The
gaps between tokens of the three are taken by the device's clock; of the fourth its pace, and the milliseconds that a
token of it waited for its mask. Then one request and four at once decode, free and under the schema in turn, with
their pace and the launches that they took.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
from collections.abc import Sequence

from bench.note import Series, as_json, ratio, versions
from ostinato import LLM, Sampling
from ostinato.llm import Completion

SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 24}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}
N_FREE = 3
WAYS = ("alone", "beside a free one", "beside a schema")


def gaps_ms(times: Sequence[int]) -> list[float]:
    return [(b - a) / 1e6 for a, b in itertools.pairwise(times)]


def one_round(llm: LLM, way: str, n_tokens: int) -> tuple[float, Completion | None]:
    """The median gap of the three free requests, and what the fourth answered."""
    engine = llm._engine
    free = llm._with_defaults(Sampling(max_tokens=n_tokens, temperature=0, ignore_eos=True))
    fourth: list[Completion] = []
    wanted = Sampling(max_tokens=2 * n_tokens, temperature=0, ignore_eos=True)
    if way == "beside a schema":
        wanted = Sampling(max_tokens=2 * n_tokens, temperature=0, schema=SCHEMA)
    beside = threading.Thread(target=lambda: fourth.append(llm.generate("People, as JSON:", wanted)))
    if way != "alone":
        beside.start()
    asked = [engine.submit(llm.tokenize(f"Story number {i}: once upon a time"), free) for i in range(N_FREE)]
    times: list[list[int]] = [[token.time_ns for token in request] for request in asked]
    if way != "alone":
        beside.join()
    # The first gaps of the earlier ones hold the prompts of the later: they are left out.
    return statistics.median(gap for one in times for gap in gaps_ms(one[8:])), fourth[0] if fourth else None


def pace_of(llm: LLM, n: int, n_tokens: int, schema: dict[str, object] | None) -> tuple[float, int, str | None]:
    """Tokens a second of n equal requests together, the launches they took, and who followed the schema."""
    wanted = Sampling(max_tokens=n_tokens, temperature=0, ignore_eos=True, schema=schema)
    start = llm._engine.runner.start
    before = start.n_launches
    answers: list[Completion] = []
    threads = [
        threading.Thread(target=lambda: answers.append(llm.generate("People, as JSON:", wanted))) for _ in range(n)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    each = statistics.median(answer.timings.decode_tok_s or 0.0 for answer in answers)
    return n * each, start.n_launches - before, answers[0].timings.grammar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    with LLM(given.model, context=512, slots=4) as llm:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        pace: list[float] = []
        waits: list[float] = []
        one_round(llm, "beside a schema", 16)  # compiles the grammar, and warms everything
        for _ in range(given.rounds):
            for way in WAYS:
                gap, fourth = one_round(llm, way, given.tokens)
                found[way].append(gap)
                if fourth is not None and way == "beside a schema":
                    pace.append(fourth.timings.decode_s * 1e3 / (len(fourth.token_ids) - 1))
                    waits.append(fourth.timings.mask_s * 1e3 / (len(fourth.token_ids) - 1))
        series = [Series("ostinato", f"gap of three free requests, {way}", "ms", tuple(found[way])) for way in WAYS]
        beside = ratio(series[2], series[0]), ratio(series[2], series[1])
        more = [
            Series("ostinato", "a token that follows a schema, among the three", "ms", tuple(pace)),
            Series("ostinato", "of which it waited for its mask", "ms", tuple(waits)),
        ]
        for n in (1, 4):
            free, under, launches, path = list[float](), list[float](), 0, None
            for _ in range(given.rounds):
                free.append(pace_of(llm, n, 2 * given.tokens, None)[0])
                tok_s, launches, path = pace_of(llm, n, 2 * given.tokens, SCHEMA)
                under.append(tok_s)
            more += [
                Series("ostinato", f"{n} free at once", "tok/s", tuple(free)),
                Series("ostinato", f"{n} under a schema at once", "tok/s", tuple(under)),
            ]
            middle, least, most = ratio(more[-1], more[-2])
            print(f"{n} under a schema / free: {middle:.3f} ({least:.3f} to {most:.3f}), {path}, {launches} launches")
        for one in [*series, *more]:
            print(f"{one.task:50} {one.median:8.3f} {one.unit}   {[round(run, 3) for run in one.runs]}")
        for name, (middle, least, most) in zip(WAYS, beside, strict=False):
            print(f"beside a schema / {name}: {middle:.3f} ({least:.3f} to {most:.3f})")
        print(
            as_json(
                "do other slots keep their pace beside an answer that follows a schema?",
                f"python -m bench.structured --model {given.model} --rounds {given.rounds} --tokens {given.tokens}",
                versions("torch", "llguidance"),
                mode=llm.mode,
                series=[*series, *more],
            )
        )


if __name__ == "__main__":
    main()
