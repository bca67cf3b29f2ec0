"""Prompts on a card from the tape and from a plain copy: the same tokens, keys and values, the bytes, and the speed.

The same model is opened twice in one process, each time as a loader would have it: all of it on the card, or its
matrices in the host's memory, so that the tape is the only copy. Bytes are what the driver says is taken.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from bench.gpu_frame import Check, Ended, Job, Outcome, Record, Setting, Verdict
from bench.gpu_models import kv_type_of, model_on, place
from ostinato.backends.base import PAGE_TOKENS
from ostinato.backends.cuda.scratch import scratch_elements
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.plan import tensors_of
from ostinato.backends.weights import Stack
from ostinato.engine.choose import settle_model
from ostinato.engine.driver import LoopDriver
from ostinato.engine.open import open_runner
from ostinato.models.blocks import with_leaves

LENGTHS: Final = (5, 64, 300, 1_100)  # of one chunk, of a whole bucket, and of several chunks
LONG, REPEATS = 4_096, 5
# Packed weights are rounded to bfloat16 either way, from scales of the file or of the tape: a few such roundings.
TOLERANCE: Final = 0.05  # of the largest key or value
LEAST_SAVED: Final = 0.9  # of the plain matrices, less the scratch
MODELS: Final = (("llama-1b", "bf16"), ("llama-1b", "q4_k_m"))


def prompts_read(device: str, *, name: str, type: str) -> Iterator[Record]:
    """Open the model both ways, and compare what prompts leave."""
    tokens, kept = [], []
    for on_tape in (False, True):
        model = _hosted(model_on(name, type, device)) if on_tape else model_on(name, type, device)
        sizes = {"matrices": _bytes(model) - _bytes(model.embedding), "scratch": scratch_elements(model) * 2}
        before, context = _taken(device), LONG + PAGE_TOKENS[device]
        n_pages = (sum(LENGTHS) + LONG) // PAGE_TOKENS[device] + 2 * len(LENGTHS)
        settled = settle_model(
            model,
            "persistent",
            context=context,
            n_pages=n_pages,
            n_slots=len(LENGTHS),
            kv_type=kv_type_of(type),
            prompts="tape" if on_tape else "plain",
        )
        with closing(LoopDriver(open_runner(model, settled))) as driver:
            del model
            after = _taken(device)
            tokens.append(_first_tokens(driver))
            driver.runner.decode_mode.exit()
            assert driver.runner.memory.kv is not None
            kept.append([half.values.float().cpu() for half in driver.runner.memory.kv.halves])
            rates = _rates(driver)
            tape = driver.runner.plan.weight_bytes
        yield {
            "what": "prompts",
            "way": "tape" if on_tape else "plain",
            "before": before,
            "after": after,
            "tape": tape,
            "tok_s": statistics.median(rates),
            "runs": [round(rate) for rate in rates],
            **sizes,
        }
        del driver
    worst = max(_distance(one, other) for one, other in zip(*kept, strict=True))
    same_bits = all(torch.equal(one, other) for one, other in zip(*kept, strict=True))
    same_tokens = tokens[0] == tokens[1] and len(tokens[0]) == len(LENGTHS)
    yield {"what": "compared", "same_tokens": same_tokens, "same_bits": same_bits, "worst": worst}


def _hosted(model: Model) -> Model:
    """As the loader leaves it for the tape: matrices in the host's memory, all the rest on the card."""

    def there(weight: Any) -> Any:
        if weight is model.embedding or (isinstance(weight, Tensor) and weight.dim() == 1):
            return weight.clone()  # all weights lie in one piece of memory, which is then freed
        return Stack(tuple(map(there, weight.parts))) if isinstance(weight, Stack) else weight.to("cpu")

    frequencies = {rope: sets.clone() for rope, sets in model.frequencies.items()}
    return replace(with_leaves(model, cache(there)), frequencies=frequencies)


def _bytes(part: Any) -> int:
    """Of all tensors in it, a tied head counted once."""
    own = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for _, tensor in tensors_of(part, "")}
    return sum(own.values())


def _taken(device: str) -> int:
    """Bytes of the card that are taken, without what torch only keeps for later."""
    gc.collect()
    torch.cuda.synchronize(place(device))
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(place(device))
    return total - free


def _first_tokens(driver: LoopDriver) -> list[int]:
    chance = random.Random(5)
    for slot, n in enumerate(LENGTHS):
        driver.admit(slot, [chance.randrange(driver.runner.model.shape.vocab) for _ in range(n)], most=1)
    driver.run()
    entries = sorted(driver.entries, key=lambda entry: entry.generation)
    return [entry.token for entry in entries if entry.token is not None]


def _rates(driver: LoopDriver) -> list[float]:
    """Tokens of a long prompt a second, by the host's clock, the first run left out."""
    chance, rates = random.Random(6), []
    prompt = [chance.randrange(driver.runner.model.shape.vocab) for _ in range(LONG)]
    pages = range(-(-LONG // driver.runner.page_tokens))
    for _ in range(REPEATS + 1):
        driver.synchronize()
        began = time.perf_counter()
        driver.prefill(0, prompt, pages)
        driver.synchronize()
        rates.append(LONG / (time.perf_counter() - began))
    return rates[1:]


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max()) / max(float(other.abs().max()), 1e-9)


# What it comes to


def judge_prompts(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    outcomes = []
    for one in ended:
        shape, type = one.job.words["name"], one.job.words["type"]
        name = f"tape-prompts-{shape.removeprefix('llama-')}-{type}"
        ways = {record["way"]: record for record in one.of("prompts")}
        if one.error is not None or len(ways) < 2:
            outcomes.append(Outcome("FAIL", name, f"{one.error}"))
            continue
        for compared in one.of("compared"):
            near = compared["same_bits"] if type == "bf16" else compared["worst"] <= TOLERANCE
            good = near and (compared["same_tokens"] or type != "bf16")
            value = f"first tokens {'the same' if compared['same_tokens'] else 'differ'}, keys and values " + (
                "the same bits" if compared["same_bits"] else f"within {compared['worst']:.4f} of the largest"
            )
            bar = "the same bits" if type == "bf16" else f"{TOLERANCE}"
            outcomes.append(Outcome("PASS" if good else "FAIL", name, value, bar, compared))
        plain, tape = ways["plain"], ways["tape"]
        saved, possible = plain["after"] - tape["after"], plain["matrices"] - plain["scratch"]
        value = (
            f"{_gb(plain['after'])} taken with a plain copy, {_gb(tape['after'])} without ({_gb(plain['before'])} and "
            f"{_gb(tape['before'])} before they were opened; a tape of {_gb(tape['tape'])}): {_gb(saved)} saved"
        )
        verdict: Verdict = "PASS" if saved >= LEAST_SAVED * possible else "MISS"
        outcomes.append(Outcome(verdict, f"{name}-bytes", value, f"{LEAST_SAVED} of {_gb(possible)}", tape))
        value = f"{plain['tok_s']:.0f} tok/s plain, {tape['tok_s']:.0f} from the tape"
        outcomes.append(Outcome("PASS", f"{name}-speed", value, "stated", {"plain": plain, "tape": tape}))
    return outcomes


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"


# The checks


def _jobs(name: str, type: str) -> Any:
    return lambda setting: [Job("prompts_read", {"name": name, "type": type}, 200)] if setting.on_gpu else []


WORKS: Final = {"prompts_read": prompts_read}

CHECKS: Final = tuple(
    Check("tape", f"tape-prompts-{name}-{type}", _jobs(name, type), judge_prompts, alone=True) for name, type in MODELS
)
