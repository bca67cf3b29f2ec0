"""How fast is the CPU backend beside transformers and llama.cpp, on the default model, in one run?

    python -m bench.cpu [--rounds 5] [--threads N]

Every round runs each engine once, one after the other, in a process of its own: load the GGUF file, prefill 512
tokens, decode 64 greedily after them. transformers reads the same file with its own GGUF loader and computes in
float32 as we do; llama.cpp computes on the packed weights with activations rounded to 8 bits, a lighter task. The
ceiling of a float32 decode is reading all weights once per token, measured here as a plain sum over as many bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.note import Series, as_json, ratio, versions

PROMPT_TOKENS, NEW_TOKENS = 512, 64
PROMPT = [(7919 * i) % 40_000 + 1_000 for i in range(PROMPT_TOKENS)]


def ostinato(path: Path, threads: int) -> dict[str, float]:
    from ostinato import LLM, Sampling

    with LLM(path, device="cpu", threads=threads) as llm:
        sampling = Sampling(max_tokens=NEW_TOKENS + 1, temperature=0, ignore_eos=True)
        llm.generate(PROMPT[:16], Sampling(max_tokens=2))
        timings = llm.generate(PROMPT, sampling).timings
        assert timings.decode_tok_s is not None
        return {
            "load_s": llm.load_s,
            "prefill_tok_s": PROMPT_TOKENS / timings.prefill_s,
            "decode_tok_s": timings.decode_tok_s,
        }


def transformers(path: Path, threads: int) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    load_s = time.perf_counter() - started
    with torch.inference_mode():
        model(torch.tensor([PROMPT[:16]]), use_cache=True, logits_to_keep=1)
        started = time.perf_counter()
        out = model(torch.tensor([PROMPT]), use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        first = time.perf_counter()
        for _ in range(NEW_TOKENS):
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        done = time.perf_counter()
    return {
        "load_s": load_s,
        "prefill_tok_s": PROMPT_TOKENS / (first - started),
        "decode_tok_s": NEW_TOKENS / (done - first),
    }


def llama_cpp(path: Path, threads: int) -> dict[str, float]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.warmup, params.n_parallel, params.n_ctx, params.verbosity = False, 1, 1024, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    started = time.perf_counter()
    server = xllamacpp.Server(params)
    load_s = time.perf_counter() - started
    asked = {"temperature": 0, "cache_prompt": False, "ignore_eos": True}
    server.handle_completions({"prompt": PROMPT[:16], "n_predict": 2, **asked})
    answer = server.handle_completions({"prompt": PROMPT, "n_predict": NEW_TOKENS, **asked})
    timings = answer["timings"]
    return {
        "load_s": load_s,
        "prefill_tok_s": timings["prompt_per_second"],
        "decode_tok_s": timings["predicted_per_second"],
    }


def read_ceiling(path: Path, threads: int) -> dict[str, float]:
    """Tokens per second if a token cost one read of all float32 weights and nothing else."""
    import torch

    from ostinato.files.checkpoint import open_checkpoint

    torch.set_num_threads(threads)
    weights = torch.ones(sum(t.n_elements for t in open_checkpoint(path).tensors.values()))
    weights.sum()
    started = time.perf_counter()
    for _ in range(5):
        weights.sum()
    return {"decode_tok_s": 5 / (time.perf_counter() - started)}


ENGINES: dict[str, Callable[[Path, int], dict[str, float]]] = {
    "ostinato": ostinato,
    "transformers": transformers,
    "llama.cpp": llama_cpp,
    "read ceiling": read_ceiling,
}


def in_its_own_process(engine: str, path: Path, threads: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.cpu", "--engine", engine, "--model", str(path), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers:
        sys.exit(f"{engine} gave no figures (exit {done.returncode}):\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(answers[-1])
    return figures


def measure(path: Path, rounds: int, threads: int) -> list[Series]:
    figures: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    for n in range(rounds):
        for engine, taken in figures.items():
            print(f"round {n + 1} of {rounds}: {engine}", file=sys.stderr)
            taken.append(in_its_own_process(engine, path, threads))
    return [
        Series(
            engine, task, "s" if task.endswith("_s") and "tok" not in task else "tok/s", tuple(f[task] for f in runs)
        )
        for engine, runs in figures.items()
        for task in runs[0]
    ]


def show(series: list[Series]) -> None:
    by = {(s.engine, s.task): s for s in series}
    print(
        f"{'':14} {'load s':>10} {'prefill tok/s':>14} {'decode tok/s':>14}   ours / theirs (median, least - largest)"
    )
    for engine in ENGINES:
        mine = [by.get((engine, task)) for task in ("load_s", "prefill_tok_s", "decode_tok_s")]
        cells = [f"{s.median:.2f}" if s else "-" for s in mine]
        ratios = []
        for s in mine if engine != "ostinato" else ():
            if s is not None:
                middle, least, most = ratio(by["ostinato", s.task], s)
                ratios.append(f"{s.task.split('_')[0]} {middle:.2f} ({least:.2f} - {most:.2f})")
        print(f"{engine:14} {cells[0]:>10} {cells[1]:>14} {cells[2]:>14}   {', '.join(ratios)}")


def main() -> None:
    from ostinato.files import store

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--model", type=Path)
    parser.add_argument("--engine", choices=ENGINES, help="measure one engine once and print its figures as JSON")
    asked = parser.parse_args()
    path = asked.model or store.resolve("smollm2", talk=lambda line: print(line, file=sys.stderr))
    if asked.engine:
        print(json.dumps(ENGINES[asked.engine](path, asked.threads)), flush=True)
        os._exit(0)  # llama.cpp's own shutdown may wait for ever
    series = measure(path, asked.rounds, asked.threads)
    show(series)
    facts = {"threads": asked.threads, "model": path.name, "versions": versions("torch", "transformers", "xllamacpp")}
    question = "how fast is the CPU backend beside transformers and llama.cpp on the default model?"
    print(as_json(question, f"python -m bench.cpu --rounds {asked.rounds} --threads {asked.threads}", series, **facts))


if __name__ == "__main__":
    main()
