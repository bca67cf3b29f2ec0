"""The answer depends on the model, the request and its seed: never on neighbours, slot, arrival, pages or cache."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from ostinato.engine.engine import Engine
from ostinato.engine.request import Request
from ostinato.options import Sampling
from tests.counts import soak
from tests.engine.opened import bits, line_held, open_engine, sampling
from tests.random_model import MemoryKind

N_TRIALS = soak(1000, part=20)
CONTEXT = 96
KINDS: tuple[MemoryKind, ...] = ("kv", "swa", "all swa", "recurrent", "hybrid")


def any_sampling(chance: random.Random) -> Sampling:
    words: dict[str, Any] = {"max_tokens": chance.randrange(1, 12), "seed": chance.randrange(2**63)}
    if chance.random() < 0.6:
        words |= {
            "temperature": chance.choice([0.3, 1.0, 2.5]),
            "top_k": chance.choice([0, 1, 5, 40]),
            "top_p": chance.choice([1.0, 0.9, 0.3]),
            "min_p": chance.choice([0.0, 0.1]),
        }
    if chance.random() < 0.4:
        words |= {
            "repetition_penalty": chance.choice([1.0, 1.3]),
            "presence_penalty": chance.choice([0.0, 0.5]),
            "frequency_penalty": chance.choice([0.0, 0.7]),
        }
    if chance.random() < 0.3:
        words |= {
            "stop_token_ids": tuple(chance.sample(range(128), 8)),
            "min_tokens": chance.randrange(words["max_tokens"]),
        }
    if chance.random() < 0.3:
        words["logit_bias"] = {chance.randrange(128): chance.uniform(-5, 5) for _ in range(6)}
    if chance.random() < 0.3:
        words["logprobs"] = chance.choice([0, 3, 20])
    return sampling(**words)


def any_prompts(chance: random.Random) -> list[list[int]]:
    """Some begin alike, some are the same, some are alone."""
    starts = [[chance.randrange(128) for _ in range(chance.choice([0, 16, 30, 48]))] for _ in range(2)]
    prompts = [
        [*chance.choice(starts), *(chance.randrange(128) for _ in range(chance.choice([1, 2, 15, 16, 30])))]
        for _ in range(chance.randrange(2, 6))
    ]
    return [*prompts, chance.choice(prompts)]


def ask_for_all(engine: Engine, asked: list[tuple[list[int], Sampling]], chance: random.Random) -> list[Request]:
    """All of them at once, one after the other, or from as many threads; in any order, and some are cancelled."""
    requests: dict[int, Request] = {}
    order = list(range(len(asked)))
    chance.shuffle(order)

    def ask(number: int) -> None:
        requests[number] = engine.submit(*asked[number], wait=True)

    manner = chance.randrange(3)
    if manner == 0:
        with line_held(engine):
            for number in order:
                ask(number)
    elif manner == 1:
        for number in order:
            ask(number)
            time.sleep(chance.choice([0.0, 0.0, 0.003]))
    else:
        threads = [threading.Thread(target=ask, args=(number,)) for number in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if chance.random() < 0.3:
        requests[chance.choice(order)].cancel()
    return [requests[number] for number in range(len(asked))]


@pytest.mark.soak
@pytest.mark.slow
def test_every_answer_is_that_of_the_request_alone() -> None:
    """E-32, E-71."""
    by_itself = {
        (kind, mode): open_engine(kind, mode=mode, n_slots=1, context=CONTEXT, share_prefixes=False)
        for kind in set(KINDS)
        for mode in ("loop", "eager")
    }
    for trial in range(N_TRIALS):
        chance = random.Random(trial)
        kind = chance.choice(KINDS)
        mode = chance.choice(["loop", "loop", "eager"])  # each has its own arithmetic on a CPU
        n_slots = chance.choice([1, 2, 3, 5, 8])
        engine = open_engine(
            kind,
            mode=mode,
            n_slots=n_slots,
            context=CONTEXT,
            n_pages=chance.choice([6, 8, 13, 48]),
            outbox_entries=chance.choice([None, 64, 16 if n_slots <= 8 else 64]),
            share_prefixes=chance.random() < 0.8,
        )
        with engine:
            asked = [(prompt, any_sampling(chance)) for prompt in any_prompts(chance)]
            for (prompt, wanted), request in zip(asked, ask_for_all(engine, asked, chance), strict=True):
                found = bits(request)
                expected = bits(by_itself[kind, mode].submit(prompt, wanted))
                if request.finish_reason == "cancelled":
                    expected = expected[: len(found)]
                what = f"trial {trial}, {kind}, {mode}, {n_slots} slots, {len(prompt)} tokens, {wanted}"
                assert found == expected, what
    for engine in by_itself.values():
        engine.close()
