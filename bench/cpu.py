"""How fast is the CPU's native loop beside llama.cpp, and how near to what its memory can give?

    python -m bench.cpu [--rounds 5] [--threads N] [--shape llama-1b:q4_k_m] [--beside CHECKOUT] [--into FILE]

Every round runs each engine once, one after the other, in a process of its own, so that both sides of a ratio saw the
same minute; ratios are taken round by round. Measured: a prompt of 512 tokens, 128 greedy tokens after a short prompt,
64 after 2,048 positions and the last 64 of the model's 8,192, four and eight sequences at once; of ours also loading,
and a plain loop that reads the same packed weights and does nothing else. llama.cpp, compiled for the CPU
(`bench/llama_cpp.py`), runs the same file, and that model in Q4_0, for which it has its best kernels; it rounds
activations to 8 bits, as our `int8` does, and keeps keys and values in 16 bits, where ours are float32. How soon a
program answers after it was started is measured by `bench.start`.

`--shape` measures random weights of a named shape and type instead of the default model, without the rows at 2,048 and
8,192 positions. `--beside` measures another checkout of this project too, in turn with this one. `--into` appends what
each process measured to a file, and the table is that of the whole file: rounds may be run one by one.
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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench import llama_cpp
from bench.note import Series, as_json, command, commit, ratio, versions
from bench.random_gguf import random_gguf
from bench.requantise import requantised

PROMPT_TOKENS: Final = 512
SHORT: Final = 16
NEW_TOKENS, NEW_TOKENS_DEEP = 128, 64
DEEP: Final = {"decode_2048_tok_s": 2048, "decode_8192_tok_s": 8192 - NEW_TOKENS_DEEP - 2}  # ends with the context
SLOTS: Final = {"four_slots_tok_s": 4, "eight_slots_tok_s": 8}
READ_BYTES: Final = 4 << 30
ROOT: Final = Path(__file__).parents[1]

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: a file, with how many threads, and whether at many positions too."""

    path: Path
    threads: int
    deep: bool


def ids(n: int, salt: int) -> list[int]:
    """n token ids that no other salt begins with, so that nothing is found in a cache."""
    return [(7919 * (i + 1) * (salt + 1) + salt) % 40_000 + 1_000 for i in range(n)]


def read_passes(model: Any, threads: int) -> float:
    """How many times a second all weights of a model can be read."""
    from ostinato.lab.read_bandwidth import read_seconds
    from ostinato.loop.memory import memory_in
    from ostinato.loop.plan import Buffer, without_repeats

    weights = without_repeats([Buffer.of(name, memory) for name, memory in memory_in(model, "")])
    passes = max(1, READ_BYTES // sum(one.n_bytes for one in weights))
    return passes / read_seconds(weights, threads, passes)


# Engines: each is one process that prints its figures


def ostinato(subject: Subject, activations: Any) -> Figures:
    """Our native loop through the engine, by the engine's own clock; and the plain read loop beside it."""
    from ostinato.cli.bare import opened_bare
    from ostinato.lab.bench import Bench, Task
    from ostinato.options import LoadOptions

    threads = subject.threads
    options = LoadOptions(device="cpu", mode="loop", threads=threads, activations=activations)
    with opened_bare(str(subject.path), options) as bare:
        started = time.perf_counter()
        model = bare.load()
        figures = {"load_s": time.perf_counter() - started}
        bench = Bench(model, "f32", 1.0, repeats=1, activations=bare.settled.activations, threads=threads)
        before = read_passes(model, threads)
        with bench.engine("loop", 1, 2 * PROMPT_TOKENS) as engine:
            figures["decode_tok_s"] = bench.generated(engine, Task("tg", NEW_TOKENS, SHORT, 1, "loop")).tok_s
            figures["read_tok_s"] = statistics.fmean((before, read_passes(model, threads)))
            figures["prefill_tok_s"] = bench.prompt(engine, Task("pp", PROMPT_TOKENS, 0, 1, "loop")).tok_s
        for task, n_slots in SLOTS.items():
            with bench.engine("loop", n_slots, PROMPT_TOKENS) as engine:
                figures[task] = bench.generated(engine, Task("tg", NEW_TOKENS, SHORT, n_slots, "loop")).tok_s
        for task, depth in DEEP.items() if subject.deep else ():
            with bench.engine("loop", 1, depth + NEW_TOKENS_DEEP + 2) as engine:
                figures[task] = bench.generated(engine, Task("tg", NEW_TOKENS_DEEP, depth, 1, "loop")).tok_s
    return figures


def theirs(subject: Subject) -> Figures:
    programs, words = llama_cpp.built(), ("--threads", str(subject.threads), "--repetitions", "1")

    def measured(n_prompt: int, n_new: int, depth: int) -> float:
        sizes = ("--n-prompt", str(n_prompt), "--n-gen", str(n_new), "--n-depth", str(depth))
        return float(llama_cpp.bench(programs, subject.path, *sizes, *words)[0]["avg_ts"])

    figures = {
        "decode_tok_s": measured(0, NEW_TOKENS, SHORT),
        "prefill_tok_s": measured(PROMPT_TOKENS, 0, 0),
    }
    for task, n_slots in SLOTS.items():
        figures[task] = llama_cpp.batched(programs, subject.path, n_slots, SHORT, NEW_TOKENS, subject.threads)
    for task, depth in DEEP.items() if subject.deep else ():
        figures[task] = measured(0, NEW_TOKENS_DEEP, depth)
    return figures


def transformers(subject: Subject) -> Figures:
    """In float32, with its own GGUF loader."""
    import torch
    from transformers import AutoModelForCausalLM

    path, threads = subject.path, subject.threads
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


OURS: Final = ("ostinato wide", "ostinato int8")
THEIRS: Final = ("llama.cpp", "llama.cpp Q4_0")
ENGINES: Final[dict[str, Callable[[Subject], Figures]]] = {
    "ostinato wide": lambda subject: ostinato(subject, "wide"),
    "ostinato int8": lambda subject: ostinato(subject, "int8"),
    "llama.cpp": theirs,
    "llama.cpp Q4_0": theirs,  # of another file
    "transformers": transformers,
}
BESIDE: Final = "beside: "  # begins the name of an engine of the other checkout


def in_its_own_process(engine: str, subject: Subject, checkout: Path | None) -> Figures:
    words = ["--engine", engine.removeprefix(BESIDE), "--model", str(subject.path), "--threads", str(subject.threads)]
    words += [] if subject.deep else ["--shallow"]
    # The other checkout's package, measured by this program.
    here = {"PYTHONPATH": f"{checkout}/src{os.pathsep}{ROOT}"} if checkout and engine.startswith(BESIDE) else {}
    done = subprocess.run(
        [sys.executable, "-m", "bench.cpu", *words],
        env={**os.environ, **here},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
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


def measure(subjects: dict[str, Subject], rounds: int, checkout: Path | None, into: Path | None) -> list[Series]:
    """Each engine's figures, round by round, behind those that the file `into` has already."""
    figures: dict[str, list[Figures]] = {engine: [] for engine in subjects}
    if any(engine in THEIRS for engine in subjects):
        llama_cpp.built()
    for line in into.read_text(encoding="utf-8").splitlines() if into and into.exists() else ():
        engine, found = json.loads(line)
        figures.setdefault(engine, []).append(found)
    for n in range(rounds):
        for engine, subject in subjects.items():
            print(f"round {n + 1} of {rounds}: {engine}", file=sys.stderr)
            found = in_its_own_process(engine, subject, checkout)
            figures[engine].append(found)
            if into:
                with into.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([engine, found]) + "\n")
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


TASKS: Final = {
    "decode_tok_s": "decode",
    "decode_2048_tok_s": "decode at 2,048",
    "decode_8192_tok_s": "decode to 8,192",
    "prefill_tok_s": "prefill 512",
    "four_slots_tok_s": "four slots",
    "eight_slots_tok_s": "eight slots",
}
ROWS: Final = {**TASKS, "read_tok_s": "read loop"}
BARS: Final = (
    *(Bar(f"{row}, wide", (OURS[0], task), (THEIRS[1], task), 1.0) for task, row in TASKS.items()),
    *(Bar(f"{row}, wide, the same file", (OURS[0], task), (THEIRS[0], task), 1.0) for task, row in TASKS.items()),
    Bar("decode, int8", (OURS[1], "decode_tok_s"), (THEIRS[1], "decode_tok_s"), 1.3),
    Bar("prefill 512, int8", (OURS[1], "prefill_tok_s"), (THEIRS[1], "prefill_tok_s"), 2.0),
    Bar("decode, wide, of a plain read loop", (OURS[0], "decode_tok_s"), (OURS[0], "read_tok_s"), 0.8),
    *(
        Bar(f"{row}, {ours.split()[1]}, of the other checkout", (ours, task), (BESIDE + ours, task), bar)
        for ours in OURS
        for task, row in TASKS.items()
        for bar in (1.2 if task in SLOTS else 1.0,)
    ),
    Bar("loading and packing, seconds", (OURS[0], "load_s"), None, 0.5),
)


def show(series: list[Series], compile_s: float | None) -> None:
    by = {(s.engine, s.task): s for s in series}
    engines = list(dict.fromkeys(s.engine for s in series))
    print(f"{'medians, tok/s':18}" + "".join(f"{engine:>24}" for engine in engines))
    for task, row in ROWS.items():
        cells = [by.get((engine, task)) for engine in engines]
        if any(cells):
            print(f"{row:18}" + "".join(f"{s.median:24.1f}" if s else f"{'-':>24}" for s in cells))
    print(f"\n{'bar':48}{'wanted':>10}{'median':>10}   least - largest")
    for bar in BARS:
        if bar.ours in by and (bar.theirs is None or bar.theirs in by):
            print(line(bar, by))
    if compile_s is not None:
        kept = "" if compile_s < 10 else "   MISSED"
        print(f"{'the first compile, seconds':48}{'< 10':>10}{compile_s:10.2f}{kept}")


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

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", help="random weights of a named shape and type, as llama-1b:q4_k_m")
    parser.add_argument("--folder", type=Path, default=tempfile.gettempdir(), help="for the files of llama.cpp")
    parser.add_argument("--shallow", action="store_true", help="leave out the rows at 2,048 and 8,192 positions")
    parser.add_argument("--beside", type=Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--into", type=Path, help="append what is measured to this file, and show all it has")
    parser.add_argument("--transformers", action="store_true", help="measure transformers in float32 too")
    parser.add_argument("--engines", help="only these, by comma: " + ", ".join(ENGINES))
    parser.add_argument("--engine", choices=ENGINES, help="measure one engine once and print its figures as JSON")
    asked = parser.parse_args()
    subject = Subject(file_of(asked), asked.threads, not (asked.shallow or asked.shape))
    if asked.engine:
        print(json.dumps(ENGINES[asked.engine](subject)), flush=True)
        os._exit(0)  # llama.cpp's own shutdown may wait for ever
    chosen = [word.strip() for word in asked.engines.split(",")] if asked.engines else list(ENGINES)
    engines = [name for name in chosen if name != "transformers" or asked.transformers or asked.engines]
    subjects = dict.fromkeys(engines, subject)
    if THEIRS[1] in subjects:
        subjects[THEIRS[1]] = replace(subject, path=q4_0_of(asked, subject.path))
    if asked.beside:  # each engine of ours, then the other checkout's
        subjects = {
            turn: one for name, one in subjects.items() for turn in ((name, BESIDE + name) if name in OURS else (name,))
        }
    compile_s = None if asked.engines or asked.into else compile_seconds()
    series = measure(subjects, asked.rounds, asked.beside, asked.into)
    show(series, compile_s)
    found = llama_cpp.system_info(llama_cpp.built()) if any(name in THEIRS for name in subjects) else None
    if found:
        print(f"llama.cpp: {found}")
    facts = {"threads": asked.threads, "model": subject.path.name, "compile_s": compile_s, "llama_cpp": found}
    print(
        as_json(
            "how fast is the CPU's native loop beside llama.cpp?",
            command("bench.cpu"),
            {**versions("torch", "transformers"), "llama.cpp": f"xllamacpp {llama_cpp.VERSION}"},
            **facts,
            beside=commit(asked.beside) if asked.beside else None,
            series=series,
        )
    )


def file_of(asked: argparse.Namespace) -> Path:
    from ostinato.files import store

    if asked.shape:
        shape, _, type = asked.shape.partition(":")
        return random_gguf(shape, type, Path(asked.folder))
    return asked.model or store.resolve("smollm2", talk=lambda said: print(said, file=sys.stderr))


def q4_0_of(asked: argparse.Namespace, path: Path) -> Path:
    """The same model in Q4_0; making it takes seconds, and none of them are measured."""
    if asked.shape:
        return random_gguf(asked.shape.partition(":")[0], "q4_0", Path(asked.folder))
    return requantised(path, Path(asked.folder))


if __name__ == "__main__":
    main()
