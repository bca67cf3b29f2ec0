"""How fast is the CPU's native loop beside llama.cpp on the default model, and how near to what its memory can give?

    python -m bench.cpu [--rounds 5] [--threads N] [--transformers]

Every round runs each engine once, one after the other, in a process of its own, so that both sides of a ratio saw the
same minute; ratios are taken round by round. Measured: a prompt of 512 tokens, 128 greedy tokens after a short prompt,
64 after 2,048 positions, four sequences at once; of ours also loading, and a plain loop that reads the same packed
weights and does nothing else. llama.cpp, compiled for the CPU (`bench/llama_cpp.py`), runs the same file, and that
model in Q4_0, for which it has its best kernels; it rounds activations to 8 bits, as our `int8` does, and keeps keys
and values in 16 bits, where ours are float32. Then, once a round: the time from `ostinato run` to its first character,
and what importing torch takes of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import llama_cpp
from bench.note import Series, as_json, ratio, versions
from bench.requantise import requantised

PROMPT_TOKENS: Final = 512
DEEP: Final = 2048
SHORT: Final = 16
NEW_TOKENS, NEW_TOKENS_DEEP = 128, 64
READ_PASSES: Final = 40
SLOTS: Final = 4

Figures = dict[str, float]


def ids(n: int, salt: int) -> list[int]:
    """n token ids that no other salt begins with, so that nothing is found in a cache."""
    return [(7919 * (i + 1) * (salt + 1) + salt) % 40_000 + 1_000 for i in range(n)]


def read_passes(model: Any, threads: int, passes: int) -> float:
    """How many times a second all weights of a model can be read."""
    from ostinato.lab.read_bandwidth import read_seconds
    from ostinato.loop.memory import memory_in
    from ostinato.loop.plan import Buffer, without_repeats

    weights = without_repeats([Buffer.of(name, memory) for name, memory in memory_in(model, "")])
    return passes / read_seconds(weights, threads, passes)


# Engines: each is one process that prints its figures


def ostinato(path: Path, threads: int, activations: Any) -> Figures:
    """Our native loop through the engine, by the engine's own clock; and the plain read loop beside it."""
    from ostinato.cli.bare import opened_bare
    from ostinato.lab.bench import Bench, Task
    from ostinato.options import LoadOptions

    options = LoadOptions(device="cpu", mode="loop", threads=threads, activations=activations)
    with opened_bare(str(path), options) as bare:
        started = time.perf_counter()
        model = bare.load()
        figures = {"load_s": time.perf_counter() - started}
        bench = Bench(model, "f32", 1.0, repeats=1, activations=bare.settled.activations, threads=threads)
        before = read_passes(model, threads, READ_PASSES)
        with bench.engine("loop", 1, DEEP + NEW_TOKENS_DEEP + PROMPT_TOKENS) as engine:
            figures["decode_tok_s"] = bench.generated(engine, Task("tg", NEW_TOKENS, SHORT, 1, "loop")).tok_s
            after = read_passes(model, threads, READ_PASSES)
            figures["read_tok_s"] = statistics.fmean((before, after))
            figures["prefill_tok_s"] = bench.prompt(engine, Task("pp", PROMPT_TOKENS, 0, 1, "loop")).tok_s
            deep = bench.generated(engine, Task("tg", NEW_TOKENS_DEEP, DEEP, 1, "loop"))
            figures["decode_2048_tok_s"] = deep.tok_s
        with bench.engine("loop", SLOTS, PROMPT_TOKENS) as engine:
            many = bench.generated(engine, Task("tg", NEW_TOKENS, SHORT, SLOTS, "loop"))
            figures["four_slots_tok_s"] = many.tok_s
    return figures


def theirs(path: Path, threads: int) -> Figures:
    programs, words = llama_cpp.built(), ("--threads", str(threads), "--repetitions", "1")

    def measured(*task: str) -> float:
        return float(llama_cpp.bench(programs, path, *task, *words)[0]["avg_ts"])

    return {
        "decode_tok_s": measured("--n-prompt", "0", "--n-gen", str(NEW_TOKENS), "--n-depth", str(SHORT)),
        "prefill_tok_s": measured("--n-prompt", str(PROMPT_TOKENS), "--n-gen", "0"),
        "decode_2048_tok_s": measured("--n-prompt", "0", "--n-gen", str(NEW_TOKENS_DEEP), "--n-depth", str(DEEP)),
        "four_slots_tok_s": llama_cpp.batched(programs, path, SLOTS, SHORT, NEW_TOKENS, threads),
    }


def transformers(path: Path, threads: int) -> Figures:
    """In float32, with its own GGUF loader."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    figures = {"load_s": time.perf_counter() - started}
    with torch.inference_mode():
        model(torch.tensor([ids(SHORT, 0)]), use_cache=True, logits_to_keep=1)
        started = time.perf_counter()
        out = model(torch.tensor([ids(PROMPT_TOKENS, 1)]), use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        first = time.perf_counter()
        for _ in range(NEW_TOKENS_DEEP):
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        done = time.perf_counter()
    figures["prefill_tok_s"] = PROMPT_TOKENS / (first - started)
    figures["decode_tok_s"] = NEW_TOKENS_DEEP / (done - first)
    return figures


def first_token(path: Path, threads: int) -> Figures:
    """Seconds from the start of `ostinato run` to its first character, and of a process that only imports torch."""
    command = ["-m", "ostinato", "run", "--device", "cpu", "--model", str(path), "--threads", str(threads)]
    started = time.perf_counter()
    asked = [sys.executable, *command, "--max-tokens", "8", "Say hello."]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first_s = time.perf_counter() - started
        process.stdout.read()
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    import_s = time.perf_counter() - started
    return {"first_token_s": first_s, "import_torch_s": import_s, "without_torch_s": first_s - import_s}


OURS: Final = ("ostinato wide", "ostinato int8")
ENGINES: Final[dict[str, Callable[[Path, int], Figures]]] = {
    "ostinato wide": lambda path, threads: ostinato(path, threads, "wide"),
    "ostinato int8": lambda path, threads: ostinato(path, threads, "int8"),
    "llama.cpp": theirs,
    "llama.cpp Q4_0": lambda path, threads: theirs(requantised(path, Path(tempfile.gettempdir())), threads),
    "transformers": transformers,
    "ostinato run": first_token,
}


def in_its_own_process(engine: str, path: Path, threads: int) -> Figures:
    command = [sys.executable, "-m", "bench.cpu", "--engine", engine, "--model", str(path), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers:
        sys.exit(f"{engine} gave no figures (exit {done.returncode}):\n{done.stderr[-2000:]}")
    figures: Figures = json.loads(answers[-1])
    return figures


def compile_seconds() -> float:
    """What the first use of a checkout costs: the native code compiled into an empty cache."""
    script = (
        "from ostinato.backends.native.library import cpu_library; import time; t = time.perf_counter(); cpu_library()"
    )
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [sys.executable, "-c", f"{script}; print(time.perf_counter() - t)"],
            env={**os.environ, "OSTINATO_HOME": home},
            capture_output=True,
            text=True,
            check=True,
        )
    return float(done.stdout)


def measure(path: Path, rounds: int, threads: int, engines: Sequence[str]) -> list[Series]:
    figures: dict[str, list[Figures]] = {engine: [] for engine in engines}
    if any(engine.startswith("llama.cpp") for engine in engines):
        llama_cpp.built()
    if "llama.cpp Q4_0" in engines:
        requantised(path, Path(tempfile.gettempdir()))  # takes seconds, and none of them are measured
    for n in range(rounds):
        for engine, taken in figures.items():
            print(f"round {n + 1} of {rounds}: {engine}", file=sys.stderr)
            taken.append(in_its_own_process(engine, path, threads))
    return [
        Series(engine, task, "tok/s" if task.endswith("tok_s") else "s", tuple(f[task] for f in runs))
        for engine, runs in figures.items()
        for task in runs[0]
    ]


# Telling


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure of ours must reach: a multiple of another, or a number of seconds."""

    what: str
    ours: tuple[str, str]  # engine and task
    theirs: tuple[str, str] | None
    bar: float


BARS: Final = (
    Bar("decode, wide", (OURS[0], "decode_tok_s"), ("llama.cpp", "decode_tok_s"), 2.0),
    Bar("decode, int8", (OURS[1], "decode_tok_s"), ("llama.cpp", "decode_tok_s"), 2.0),
    Bar("decode at 2,048 positions, wide", (OURS[0], "decode_2048_tok_s"), ("llama.cpp", "decode_2048_tok_s"), 2.0),
    Bar("prefill 512, wide", (OURS[0], "prefill_tok_s"), ("llama.cpp", "prefill_tok_s"), 2.8),
    Bar("prefill 512, int8", (OURS[1], "prefill_tok_s"), ("llama.cpp", "prefill_tok_s"), 4.0),
    Bar("decode, wide, of a plain read loop", (OURS[0], "decode_tok_s"), (OURS[0], "read_tok_s"), 0.75),
    Bar("four slots, int8, of one slot", (OURS[1], "four_slots_tok_s"), (OURS[1], "decode_tok_s"), 2.5),
    Bar("loading and packing, seconds", (OURS[0], "load_s"), None, 0.5),
    Bar("`ostinato run` to the first character, seconds", ("ostinato run", "first_token_s"), None, 3.5),
    Bar("the same without the import of torch", ("ostinato run", "without_torch_s"), None, 1.5),
)
TASKS: Final = ("load_s", "prefill_tok_s", "decode_tok_s", "decode_2048_tok_s", "four_slots_tok_s", "read_tok_s")


def show(series: list[Series], compile_s: float | None) -> None:
    by = {(s.engine, s.task): s for s in series}
    heads = ("load s", "prefill 512", "decode", "at 2,048", "four slots", "read loop")
    print(f"{'medians, tok/s':16}" + "".join(f"{head:>13}" for head in heads))
    for engine in dict.fromkeys(s.engine for s in series):
        if engine != "ostinato run":
            cells = [by.get((engine, task)) for task in TASKS]
            print(f"{engine:16}" + "".join(f"{s.median:13.2f}" if s else f"{'-':>13}" for s in cells))
    print(f"\n{'bar':48}{'wanted':>10}{'median':>10}   least - largest")
    for bar in BARS:
        if bar.ours in by and (bar.theirs is None or bar.theirs in by):
            print(line(bar, by))
    if compile_s is not None:
        kept = "" if compile_s < 10 else "   MISSED"
        print(f"{'the first compile, seconds':48}{'< 10':>10}{compile_s:10.2f}{kept}")
    for task, what in (("decode_tok_s", "decode"), ("prefill_tok_s", "prefill 512")):
        for ours in OURS:
            if (ours, task) in by and ("llama.cpp Q4_0", task) in by:
                middle, least, most = ratio(by[ours, task], by["llama.cpp Q4_0", task])
                print(f"{what}, {ours.split()[1]}, beside llama.cpp Q4_0: {middle:.2f} ({least:.2f} - {most:.2f})")


def line(bar: Bar, by: dict[tuple[str, str], Series]) -> str:
    if bar.theirs is None:
        runs = by[bar.ours].runs
        middle, least, most = statistics.median(runs), min(runs), max(runs)
        kept, wanted = middle < bar.bar, f"< {bar.bar:g}"
    else:
        middle, least, most = ratio(by[bar.ours], by[bar.theirs])
        kept, wanted = middle >= bar.bar, f">= {bar.bar:g}"
    missed = "" if kept else "   MISSED"
    return f"{bar.what:48}{wanted:>10}{middle:10.2f}   {least:.2f} - {most:.2f}{missed}"


def main() -> None:
    from ostinato.engine.cores import default_threads
    from ostinato.files import store

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--model", type=Path)
    parser.add_argument("--transformers", action="store_true", help="measure transformers in float32 too")
    parser.add_argument("--engines", help="only these, by comma: " + ", ".join(ENGINES))
    parser.add_argument("--engine", choices=ENGINES, help="measure one engine once and print its figures as JSON")
    asked = parser.parse_args()
    path = asked.model or store.resolve("smollm2", talk=lambda said: print(said, file=sys.stderr))
    if asked.engine:
        print(json.dumps(ENGINES[asked.engine](path, asked.threads)), flush=True)
        os._exit(0)  # llama.cpp's own shutdown may wait for ever
    chosen = [word.strip() for word in asked.engines.split(",")] if asked.engines else list(ENGINES)
    engines = [name for name in chosen if name != "transformers" or asked.transformers or asked.engines]
    compile_s = None if asked.engines else compile_seconds()
    series = measure(path, asked.rounds, asked.threads, engines)
    show(series, compile_s)
    question = "how fast is the CPU's native loop beside llama.cpp on the default model?"
    command = f"python -m bench.cpu --rounds {asked.rounds} --threads {asked.threads}"
    facts = {"threads": asked.threads, "model": path.name, "compile_s": compile_s, "series": series}
    print(
        as_json(
            question,
            command,
            {**versions("torch", "transformers"), "llama.cpp": f"xllamacpp {llama_cpp.VERSION}"},
            **facts,
        )
    )


if __name__ == "__main__":
    main()
