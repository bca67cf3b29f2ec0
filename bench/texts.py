"""How fast texts are embedded and scored, beside prompts of the same engine, and how long a score waits for a decode.

    python -m bench.texts                                    # the default model on the CPU
    python -m bench.texts --device cuda --shape llama-1b     # random weights of a shape on a GPU

64 texts of 100 tokens each go through `engine/texts.py`; the prompts are of 512 tokens and share nothing. The last
figure is the time from asking for the score of one text until it is there, while another request decodes alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from bench.note import as_json, command, cpu_name, versions
from ostinato import LLM
from ostinato.engine.engine import Engine
from ostinato.engine.texts import logprobs_of, vectors_of
from ostinato.options import NEUTRAL, Sampling

N_TEXTS: Final = 64
TEXT_TOKENS: Final = 100
PROMPT_TOKENS: Final = 512
ROUNDS: Final = 5
CONTEXT: Final = 2048
ONE: Final = Sampling(max_tokens=1, temperature=0.0, seed=1, ignore_eos=True).over(NEUTRAL)
LONG: Final = Sampling(max_tokens=1400, temperature=0.0, seed=1, ignore_eos=True).over(NEUTRAL)


@contextmanager
def opened(asked: argparse.Namespace) -> Iterator[Engine]:
    """The engine of the default model, or of a shape on a GPU."""
    if asked.shape is None:
        with LLM(asked.model, device=asked.device, context=CONTEXT, mode=asked.mode) as llm:
            yield llm._engine
        return
    from bench.gpu_models import kv_type_of, model_on, settled_for

    model = model_on(asked.shape, asked.type, asked.device)
    kv_type = kv_type_of(asked.type)
    settled = settled_for(model, asked.mode, n_slots=8, context=CONTEXT, kv_type=kv_type)
    with Engine(model, settled) as engine:
        yield engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape")
    parser.add_argument("--type", default="bf16")
    parser.add_argument("--mode", default="auto")
    asked = parser.parse_args()
    chance = random.Random(1)
    with opened(asked) as engine:
        vocab = engine.runner.model.shape.vocab

        def text(n: int) -> list[int]:
            return [chance.randrange(vocab) for _ in range(n)]

        texts = [text(TEXT_TOKENS) for _ in range(N_TEXTS)]
        n_tokens = N_TEXTS * TEXT_TOKENS

        def prompt_rate() -> float:
            request = engine.submit(text(PROMPT_TOKENS), ONE)
            list(request)
            return PROMPT_TOKENS / request.prefill_s

        def rate(work: Callable[[], object]) -> float:
            began = time.perf_counter()
            work()
            return n_tokens / (time.perf_counter() - began)

        works: dict[str, Callable[[], float]] = {
            "prompt": prompt_rate,
            "embed": lambda: rate(lambda: vectors_of(engine, texts, "mean")),
            "score": lambda: rate(lambda: logprobs_of(engine, texts)),
        }
        runs: dict[str, list[float]] = {name: [] for name in works}
        for number in range(ROUNDS + 1):
            for name, work in works.items():
                found = work()
                if number:  # the first round allocates
                    runs[name].append(found)
        waits = _waits(engine, text)
        mode = engine.mode
    medians = {name: statistics.median(rates) for name, rates in runs.items()}
    ratios = {name: medians[name] / medians["prompt"] for name in ("embed", "score")}
    for name, median in medians.items():
        share = f", {ratios[name]:.2f} of the prompts" if name in ratios else ""
        print(f"{name}: {median:,.0f} tok/s ({min(runs[name]):,.0f} - {max(runs[name]):,.0f}){share}")
    print(f"a score beside a decoding request ({mode}): {statistics.median(waits):.1f} ms (longest {max(waits):.1f})")
    question = "how fast are texts embedded and scored, and how long does a score wait for a decode?"
    facts = {"asked": vars(asked), "mode": mode, "runs": runs, "ratios": ratios, "waits_ms": waits}
    device = cpu_name() if asked.device == "cpu" else torch.cuda.get_device_name()
    print(as_json(question, command("bench.texts"), versions("torch", "triton"), device, **facts))


def _waits(engine: Engine, text: Callable[[int], list[int]]) -> list[float]:
    """Milliseconds until the score of one text is there, while a request decodes."""
    request = engine.submit(text(16), LONG)
    tokens = iter(request)
    next(tokens)
    waits = []
    for _ in range(8):
        time.sleep(0.02)
        began = time.perf_counter()
        logprobs_of(engine, [text(TEXT_TOKENS)])
        waits.append((time.perf_counter() - began) * 1e3)
    request.cancel()
    list(tokens)
    return waits


if __name__ == "__main__":
    main()
