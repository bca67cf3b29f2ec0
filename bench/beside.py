"""How fast do we decode beside llama.cpp, on the same card or CPU, in one run?

    python -m bench.beside --models llama-1b:bf16,llama-8b:q4_k_m [--cuda] [--rounds 2] [--source FILE.tar.gz]

Random weights of named shapes; llama.cpp (`bench/llama_cpp.py`) gets them as a file. Both take turns, round by round: a
prompt of 512 tokens, and 128 tokens after 500 positions, alone and eight at once (ours). The limit is what the memory
could give: its bandwidth, measured by a plain read, over the bytes that a step reads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bench import llama_cpp
from bench.note import Series, as_json, command, versions
from bench.random_gguf import random_gguf
from ostinato.processes import python_command

PROMPT, NEW, DEPTH, EIGHT = 512, 128, 500, 8
_SECONDS: Final = 500


def ours(shape: str, type: str, *, cuda: bool, modes: str) -> Mapping[str, float]:
    """Tokens per second by task and mode, and the memory's limit for one sequence."""
    words = ["bench", "decode", "--shape", shape, "--type", type, "--mode", modes, "--batch", f"1,{EIGHT}"]
    words += ["--depth", f"0,{DEPTH}", "--n-gen", str(NEW), "--n-prompt", str(PROMPT), "--repeats", "2", "--json"]
    words += ["--device", "cuda" if cuda else "cpu"]
    done = subprocess.run(
        python_command("-m", "ostinato", *words), capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode:
        sys.exit(f"ostinato bench decode failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = {}
    for row in json.loads(done.stdout)["figures"]:
        if row["kind"] == "pp" and row["batch"] == 1 and row["depth"] == 0:
            found[f"prefill, {row['mode']}"] = row["tok_s"]
        if row["kind"] == "tg" and row["depth"] == DEPTH:
            found[f"decode of {row['batch']}, {row['mode']}"] = row["tok_s"]
            if row["batch"] == 1:
                found["limit"] = row["limit_tok_s"]
    return found


def theirs(programs: Path, model: Path, *, cuda: bool) -> tuple[Mapping[str, float], dict[str, str]]:
    """llama.cpp's tokens per second, with its flash attention, all layers on the card or none; and what it found."""
    layers = ("--n-gpu-layers", "999" if cuda else "0", "--flash-attn", "on", "--repetitions", "2")
    prompt = llama_cpp.bench(programs, model, "--n-prompt", str(PROMPT), "--n-gen", "0", *layers)
    new = llama_cpp.bench(programs, model, "--n-prompt", "0", "--n-gen", str(NEW), "--n-depth", str(DEPTH), *layers)
    facts = {name: str(new[0][name]) for name in ("build_commit", "backends", "cpu_info", "gpu_info")}
    return {"prefill": prompt[0]["avg_ts"], "decode of 1": new[0]["avg_ts"]}, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-1b:bf16,llama-1b:q4_k_m", help="shapes and types, by comma")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--modes", help="of ours, by comma")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--source", type=Path, help="the source distribution of xllamacpp")
    parser.add_argument("--folder", type=Path, default=tempfile.gettempdir(), help="for the files of llama.cpp")
    asked = parser.parse_args()
    modes = asked.modes or ("loop,persistent" if asked.cuda else "loop")
    programs = llama_cpp.built(cuda=asked.cuda, source=asked.source)
    found: dict[tuple[str, str], list[float]] = {}
    facts: dict[str, str] = {}
    for model in asked.models.split(","):
        shape, _, type = model.partition(":")
        file = random_gguf(shape, type, asked.folder)
        for _ in range(asked.rounds):
            measured, facts = theirs(programs, file, cuda=asked.cuda)
            for engine, figures in (
                ("llama.cpp", measured),
                ("ostinato", ours(shape, type, cuda=asked.cuda, modes=modes)),
            ):
                for task, value in figures.items():
                    found.setdefault((engine, f"{model}, {task}"), []).append(value)
    series = [Series(engine, task, "tok/s", tuple(runs)) for (engine, task), runs in found.items()]
    for one in series:
        print(f"{one.engine:12}{one.task:44}{one.median:12.1f}   {' '.join(f'{run:.1f}' for run in one.runs)}")
    about = {**versions("torch", "triton"), "llama.cpp": f"xllamacpp {llama_cpp.VERSION}"}
    device = facts["gpu_info"] if asked.cuda else facts["cpu_info"]
    question = "how fast do we decode beside llama.cpp, built here?"
    print(as_json(question, command("bench.beside"), about, device, found=facts, series=series))


if __name__ == "__main__":
    main()
