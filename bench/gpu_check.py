"""Is the decode loop right, fast and sturdy on a GPU? For machines with one; CI has none.

    python -m bench.gpu_check --part exact|speed|stress|tape|lab|grammar|lessons [--only NAME] [--as sm_89]
                              [--model FILE] [--seconds 580] [--out FOLDER]

`exact`: the modes give the same bits, in every family and weight type, and 1,000 random trials show that a request's
bits do not depend on its neighbours, nor, of recurrent models, on the snapshots that prompts begin at. `speed`: decode,
prefill, first token and graph memory beside their bars.
`stress`: no host work per token, nothing allocated, a stopped process, busy cores, a fault, engines by the hundred; a
check for `loop` and one for `persistent` each (`--only calls-persistent`).
`tape`: exactness and speed of the persistent kernel (`bench/gpu_tape.py`), and prompts that read its tape
(`bench/gpu_prompts.py`). Where there is a model's file, its weights are taken for what random ones tell little of;
without it a shape's are, or the check is skipped.
`lab`: every start of the laboratory gives the closed form, and its persistent kernel what is asked of it; its programs,
the engine's own step in every mode, and a `DecodeSession` by hand (`bench/gpu_lab.py`).
`grammar`: answers under grammars have the tokens of the host's masks, as many launches as free ones, no gap while the
process is stopped, and nearly the pace of free ones (`bench/gpu_grammars.py`).
`lessons`: on a GPU, single lessons (E) that tests show without one: attacks on decode mode, captures that fail,
the real server (`bench/gpu_lessons.py`).
`--as sm_89` runs a part as if the GPU were a smaller one (OSTINATO_CHIP): tiles fit its memory, and kernels are made
for its instructions and assembled for the GPU that is there.
Checks of single lessons (E, docs/rules.md) are in the part nearest to them (`bench/gpu_executor.py`).
Each check prints a line as it ends, PASS, FAIL, MISS (a figure under its bar) or SKIP with the reason; then a note as
one line of JSON, and the summary. Ends with 1 where something FAILed. `--device cpu` runs the same code over tiny
models, to try the script itself. Needs torch, triton, numpy, tokenizers, cuda-core and cuda-bindings, for small models
gguf and transformers too, and for `server` what the server needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.gpu_frame import ROOT, Check, Outcome, Setting, run_checks, serve_child
from bench.note import as_json, commit, cpu_name, versions

CHIPS: Final = ("sm_80", "sm_86", "sm_87", "sm_89")  # whose code and memory a Hopper has
PARTS: Final = ("exact", "speed", "stress", "tape", "lab", "grammar", "lessons")
SECONDS: Final = 580.0
QUESTIONS: Final = {
    "exact": "does the decode loop give the same bits on a GPU, whatever the mode and the company?",
    "speed": "how fast is the decode loop on a GPU, beside its bars, llama.cpp and the memory's limit?",
    "tape": "is the persistent kernel right, does it lose nothing, and how fast is it beside its bars?",
    "grammar": "do answers under grammars need nothing of the host, and are they as fast as free ones?",
    "lessons": "does what tests show of single lessons without a GPU hold on one?",
    "lab": "does the laboratory measure right, and is its persistent kernel as fast as is asked of it?",
    "stress": "does the decode loop need nothing of the host per token, and does it stand what may happen to it?",
}


def main() -> None:
    if importlib.util.find_spec("ostinato") is None:
        sys.path.insert(0, str(ROOT / "src"))  # a checkout that was not installed
    if sys.argv[1:2] == ["--child"]:
        serve_child(_works(), sys.argv[2])
        return
    asked = _asked()
    if asked.chip is not None:
        from ostinato.backends.machine import PRETENDED

        os.environ[PRETENDED] = asked.chip  # which the children inherit
    checks = _chosen(_checks(), asked.part, asked.only)
    setting = Setting(
        device=asked.device,
        model=asked.model,
        deadline=time.monotonic() + asked.seconds,
        trace=lambda text: print(text, flush=True),
    )
    started = time.monotonic()
    outcomes = []
    for outcome in run_checks(checks, setting, asked.beside or _n_beside(asked.device)):
        outcomes.append(outcome)
        print(f"{time.monotonic() - started:6.1f} s  {outcome.line}", flush=True)
    seconds = time.monotonic() - started
    text = _note(asked, outcomes, seconds)
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        as_if = "" if asked.chip is None else f"-as-{asked.chip}"
        (asked.out / f"gpu_check-{asked.part}{as_if}.json").write_text(text + "\n")
    print(text)
    _summary(asked.part, outcomes, seconds)
    sys.exit(1 if any(outcome.verdict == "FAIL" for outcome in outcomes) else 0)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--only", metavar="NAME", action="append", help="one check of the part; may be given again")
    parser.add_argument("--as", dest="chip", choices=CHIPS, help="run as if the GPU were this chip")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", metavar="FILE", help="SmolLM2's file, for `exact` and `tape`")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no check starts after so many")
    parser.add_argument("--beside", metavar="N", type=int, help="children at a time; most of the cores unless given")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="also write the note there")
    asked = parser.parse_args()
    if asked.device == "cuda" and not _has_gpu():
        sys.exit("no CUDA device here; these checks are for machines with one (--device cpu tries the script itself)")
    if asked.model is not None and not Path(asked.model).exists():
        sys.exit(f"--model {asked.model}: there is no such file")
    asked.model = None if asked.model is None else str(Path(asked.model).resolve())
    return asked


def _has_gpu() -> bool:
    """Asked in a process of its own: this one keeps no device."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _n_beside(device: str) -> int:
    """How many children run side by side: most of the cores compile, the card has room for all."""
    cores = len(os.sched_getaffinity(0))
    return 1 if device == "cpu" else max(2, min(12, cores - 2))


# What there is


def _modules() -> tuple[Any, ...]:
    from bench import (
        gpu_exact,
        gpu_executor,
        gpu_grammars,
        gpu_lab,
        gpu_lessons,
        gpu_prompts,
        gpu_speed,
        gpu_stress,
        gpu_tape,
    )

    return gpu_exact, gpu_speed, gpu_stress, gpu_executor, gpu_tape, gpu_prompts, gpu_lab, gpu_grammars, gpu_lessons


def _checks() -> tuple[Check, ...]:
    return tuple(check for module in _modules() for check in module.CHECKS)


def _works() -> dict[str, Any]:
    return {name: work for module in _modules() for name, work in module.WORKS.items()}


def _chosen(checks: Sequence[Check], part: str, only: Sequence[str] | None) -> list[Check]:
    mine = [check for check in checks if check.part == part]
    unknown = set(only or ()) - {check.name for check in mine}
    if unknown:
        sys.exit(f"no check of {part} is called {sorted(unknown)[0]}; known: {', '.join(c.name for c in mine)}")
    return [check for check in mine if only is None or check.name in only]


# What came of it


def _note(asked: argparse.Namespace, outcomes: Sequence[Outcome], seconds: float) -> str:
    words = [f"--part {asked.part}", *(f"--only {name}" for name in asked.only or ())]
    words += [] if asked.chip is None else [f"--as {asked.chip}"]
    words += ["--device cpu"] if asked.device == "cpu" else []
    words += [] if asked.model is None else [f"--model {Path(asked.model).name}"]
    return as_json(
        QUESTIONS[asked.part],
        " ".join(["python -m bench.gpu_check", *words]),
        versions("torch", "triton", "numpy", "tokenizers", "cuda-core", "cuda-bindings", "transformers"),
        _gpu_name() if asked.device == "cuda" else cpu_name(),
        commit=commit() if asked.device == "cuda" else "a dry run",
        host=f"{cpu_name()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        **({} if asked.chip is None else {"as_if": asked.chip}),
        seconds=round(seconds, 1),
        outcomes=[asdict(outcome) for outcome in outcomes],
    )


def _gpu_name() -> str:
    words = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return said.stdout.strip().splitlines()[0] if said.stdout.strip() else "unknown"


def _summary(part: str, outcomes: Sequence[Outcome], seconds: float) -> None:
    print(f"\n{part}, {seconds:.0f} s")
    width = max((len(outcome.name) for outcome in outcomes), default=0)
    for outcome in outcomes:
        bar = f"  [{outcome.bar}]" if outcome.bar else ""
        print(f"{outcome.verdict} {outcome.name:{width}}  {outcome.value[:400]}{bar}")
    counts = Counter(outcome.verdict for outcome in outcomes)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("PASS", "FAIL", "MISS", "SKIP")))


if __name__ == "__main__":
    main()
