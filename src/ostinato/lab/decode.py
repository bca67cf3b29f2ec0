"""The end-to-end harness: the engine's own plan for a real shape, in every start that the engine has here.

Nothing is copied from the engine: it gets requests and returns tokens, as for any caller.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ostinato.backends.base import PAGE_TOKENS
from ostinato.engine.choose import settle_model
from ostinato.engine.driver import GREEDY
from ostinato.engine.engine import Engine
from ostinato.options import KVType

if TYPE_CHECKING:
    from ostinato.backends.torch.model import Model


def decoded(model: Model, mode: str, *, n_prompt: int, n_gen: int, kv_type: KVType, repeats: int = 3) -> dict[str, Any]:
    """One mode: time to the first token, tokens a second by the device's clock, launches and host time per token."""
    context = n_prompt + n_gen + 2
    n_pages = 2 * -(-context // PAGE_TOKENS[model.device.type])
    settled = settle_model(model, mode, context=context, n_pages=n_pages, kv_type=kv_type)
    runs = []
    with Engine(model, settled, share_prefixes=False) as engine:
        for number in range(repeats + 1):  # the first warms
            runs.append(_run(engine, _prompt(model, n_prompt, number), n_gen))
    middle = sorted(runs[1:], key=lambda run: run["tokens_s"])[repeats // 2]
    return {"mode": mode, "n_prompt": n_prompt, "n_gen": n_gen, **middle}


def _run(engine: Engine, prompt: list[int], n_gen: int) -> dict[str, float]:
    before = engine.stats()
    request = engine.submit(prompt, replace(GREEDY, max_tokens=n_gen, ignore_eos=True))
    first = next(request)
    cpu = time.process_time()
    tokens = [first, *request]
    spent = time.process_time() - cpu
    after = engine.stats()
    n = len(tokens) - 1
    device_s = (tokens[-1].time_ns - first.time_ns) / 1e9
    return {
        "first_token_ms": request.first_token_s * 1e3,
        "tokens_s": n / device_s,
        "launches_per_token": (after.launches - before.launches) / n,
        "host_us_per_token": spent * 1e6 / n,
    }


def _prompt(model: Model, n: int, salt: int) -> list[int]:
    chance = random.Random(salt)
    return [chance.randrange(model.shape.vocab) for _ in range(n)]
