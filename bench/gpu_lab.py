"""The laboratory on a GPU: every start gives the closed form, the persistent kernel gains what is asked of it, the
stand-alone programs are right, and the engine's own step runs in every mode.

Without a GPU the same checks run over the laboratory of the CPU, whose starts are the counterparts.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.gpu_frame import Check, Ended, Job, Outcome, Record, Setting
from bench.gpu_models import TAPE, model_on
from ostinato.engine.choose import modes_of
from ostinato.lab.bench import decoded_by_mode
from ostinato.lab.experiment import ASKED_GAIN, SMALL_N, accepted, measured
from ostinato.lab.model import BODIES, Workload
from ostinato.lab.programs import FOLDER
from ostinato.lab.work import LabMachine

PROGRAMS: Final = ("graphs_axpy", "persistent_decode")
# Small sizes, where what is asked holds, one of many kernels a step, and a large one, whose result is compared alone.
SIZES: Final = ((1 << 8, 500, 1), (1 << 12, 500, 1), (1 << 16, 500, 1), (SMALL_N, 500, 1), (1 << 14, 20, 150))
LARGE: Final = (1 << 20, 500, 1)


def _machine(device: str) -> LabMachine:
    if device == "cpu":
        from ostinato.lab.cpu import CpuMachine

        return CpuMachine()
    from ostinato.lab.gpu import GpuMachine

    return GpuMachine(device)


def starts(device: str, *, sizes: Sequence[Sequence[int]], repeats: int = 5) -> Iterator[Record]:
    """Works of these sizes in every start, each result compared, and the laboratory's own acceptance figures."""
    machine = _machine(device)
    rows = []
    for n, steps, kernels in sizes:
        for body in BODIES:
            rows.append(measured(machine, Workload(n, steps, kernels, body=body), repeats))
            yield {"what": "row", **rows[-1].record()}
    yield {
        "what": "acceptance",
        "starts": list(machine.starts),
        "why_not": machine.why_not,
        "figures": [asdict(one) for one in accepted(machine, rows)],
    }


def judge_starts(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    """A wrong result ends its child, so it is a failure of the first outcome; a gain that is not reached is a MISS."""
    found = ended[0].of("acceptance")
    if not found:
        return [Outcome("FAIL", "lab-right", ended[0].error or "it said nothing")]
    right, *gains = found[0]["figures"]
    missed = [one["says"] for one in gains if not one["is_met"]]
    value = f"{right['says']}; starts: {', '.join(found[0]['starts'])}"
    value += "".join(f"; not {start}: {why}" for start, why in found[0]["why_not"].items())
    rows = {f"{row['body']} {row['n']} {row['kernels']}": row["starts"] for row in ended[0].of("row")}
    return [
        Outcome("PASS" if right["is_met"] else "FAIL", "lab-right", value, right["asked"]),
        Outcome(
            "MISS" if missed else "PASS",
            "lab-persistent",
            " || ".join(missed or [one["says"] for one in gains]),
            f"at least {ASKED_GAIN} times the plain loop up to n={SMALL_N}",
            {"rows": rows},
        ),
    ]


def decode(device: str, *, name: str, type: str, n_prompt: int, n_gen: int) -> Iterator[Record]:
    """The engine's own step in every mode, as `ostinato lab decode` has it."""
    for mode, found in decoded_by_mode(model_on(name, type, device), n_prompt=n_prompt, n_gen=n_gen):
        if isinstance(found, str):
            yield {"what": "refused", "mode": mode, "why": found}
        else:
            yield {"what": "decode", "model": name, **found}


def judge_decode(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    """Every mode of this kind of device has its figure; the persistent kernel is CUDA's."""
    rows = {row["mode"]: row for row in ended[0].of("decode")}
    refused = {one["mode"]: one["why"] for one in ended[0].of("refused")}
    outcomes = []
    for mode in modes_of("cuda" if setting.on_gpu else "cpu"):
        name = f"lab-decode-{mode}"
        if mode in rows:
            row = rows[mode]
            value = f"{row['tokens_s']:,.0f} tok/s, {row['launches_per_token']:.3g} launches a token"
            outcomes.append(Outcome("PASS", name, value, "", row))
        elif mode in refused:
            outcomes.append(Outcome("MISS", name, f"cannot run: {refused[mode]}", "every mode runs"))
        else:
            outcomes.append(Outcome("FAIL", name, ended[0].error or "it said nothing"))
    if not setting.on_gpu:
        outcomes.append(Outcome("SKIP", f"lab-decode-{TAPE}", "the persistent kernel is CUDA's"))
    return outcomes


def program(device: str, *, name: str, arch: str = "native") -> Iterator[Record]:
    """A stand-alone program, built by nvcc and run; it exits with 1 if a result is wrong."""
    if shutil.which("nvcc") is None:
        yield {"what": "program", "skipped": "nvcc is not installed"}
        return
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / name
        build = ["nvcc", "-O3", "-std=c++17", f"-arch={arch}", str(FOLDER / f"{name}.cu"), "-o", str(built)]
        subprocess.run(build, check=True)
        ran = subprocess.run([built], capture_output=True, text=True, check=False, timeout=100)
    yield {"what": "program", "code": ran.returncode, "said": (ran.stdout + ran.stderr).splitlines()}


def judge_programs(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    if not ended:
        return [Outcome("SKIP", "lab-programs", "they are a GPU's")]
    outcomes = []
    for one in ended:
        name = f"lab-program-{one.job.words['name']}"
        records: Any = one.of("program")
        if not records:
            outcomes.append(Outcome("FAIL", name, one.error or "it said nothing"))
        elif "skipped" in records[0]:
            outcomes.append(Outcome("SKIP", name, records[0]["skipped"]))
        else:
            said = " | ".join(records[0]["said"])
            outcomes.append(Outcome("FAIL" if records[0]["code"] else "PASS", name, said, "every result right"))
    return outcomes


def _starts_jobs(setting: Setting) -> list[Job]:
    # The large size would take a CPU seconds, and is compared on a GPU alone.
    words: dict[str, Any] = {"sizes": [*SIZES, LARGE]} if setting.on_gpu else {"sizes": SIZES[:2], "repeats": 3}
    return [Job("lab_starts", words, 300)]


def _decode_jobs(setting: Setting) -> list[Job]:
    words: dict[str, Any] = {"name": "llama-1b", "type": "bf16", "n_prompt": 512, "n_gen": 256}
    if not setting.on_gpu:
        words = {"name": "tiny", "type": "f32", "n_prompt": 16, "n_gen": 16}
    return [Job("lab_decode", words, 300)]


def _program_jobs(setting: Setting) -> list[Job]:
    return [Job("lab_program", {"name": name}, 200) for name in PROGRAMS] if setting.on_gpu else []


WORKS: Final = {"lab_starts": starts, "lab_decode": decode, "lab_program": program}
CHECKS: Final = (
    Check("lab", "lab-starts", _starts_jobs, judge_starts, alone=True),
    Check("lab", "lab-decode", _decode_jobs, judge_decode, alone=True),
    Check("lab", "lab-programs", _program_jobs, judge_programs, alone=True),
)
