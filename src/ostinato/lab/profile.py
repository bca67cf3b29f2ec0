"""Where a step's time goes, by profilers: torch's own here, and the right commands for the others."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ostinato.backends.cuda import gpu
from ostinato.errors import BadInput, HardwareCannot
from ostinato.lab.model import Workload
from ostinato.lab.work import LabMachine
from ostinato.processes import python_command

COUNTERS: Final = ("sm__throughput.avg.pct_of_peak_sustained_active", "gpu__time_duration.sum")
NCU_S: Final = 120.0


def profiled(machine: LabMachine, work: Workload, start: str, trace: Path | None) -> dict[str, Any]:
    """A start under torch's profiler: what the host launches for all steps by our own count, since the profiler does
    not see replays through the driver; the calls and kernels that it saw; and a trace for a browser."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if machine.kind == "gpu":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        timing = machine.time(work, start, 1)
    events: Sequence[Any] = found.key_averages()
    if trace is not None:
        try:
            found.export_chrome_trace(str(trace))
        except (OSError, RuntimeError) as error:
            raise BadInput(f"{trace}: the trace cannot be written: {error}") from error
    calls = {event.key: event.count for event in events if "Launch" in event.key}
    longest = sorted(events, key=_own_time, reverse=True)[:8]
    return {
        "start": start,
        "launches": timing.launches,
        "calls": calls,  # of the whole measurement: two runs, and what prepares and checks them
        "longest": [{"name": e.key, "count": e.count, "us": round(_own_time(e), 1)} for e in longest],
    }


def _own_time(event: Any) -> float:
    return float(getattr(event, "self_device_time_total", 0.0) or event.self_cpu_time_total)


def commands(programs: Path, *, arch: str = "sm_90", gfx: str = "gfx90a") -> dict[str, list[str]]:
    """What to type for each profiler, over the stand-alone programs; the folder is where they are built."""
    both = ("persistent_decode", "graphs_axpy")
    return {
        "build": [
            *(f"nvcc -O3 -std=c++17 -arch={arch} -lineinfo {programs}/{name}.cu -o {name}" for name in both),
            *(f"hipcc -O3 -std=c++17 -x hip --offload-arch={gfx} {programs}/{name}.cu -o {name}_hip" for name in both),
        ],
        "nsys": [f"nsys profile --stats=true -o nsys_{name} ./{name} --steps=500" for name in both],
        "ncu": [f"ncu --metrics {','.join(COUNTERS)} --target-processes all ./{name} --steps=20" for name in both],
        "rocprof": [
            f"rocprof --hip-trace --hsa-trace --timestamp on --stats ./{name}_hip --steps=500" for name in both
        ],
        "omnitrace": [f"omnitrace-sample --trace -- ./{name}_hip --steps=500" for name in both],
    }


def counted(program: str, options: Sequence[str], run: Callable[..., Any] = subprocess.run) -> dict[str, float]:
    """The two counters of a program's short kernels, by ncu: the mean throughput, and the sum of their time in us."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise HardwareCannot("ncu is not installed; it comes with the CUDA toolkit")
    # Only what is measured: torch's own kernels, which fill and check, are not meant.
    which = ["--kernel-name", "regex:^short_", "--target-processes", "all"]
    command = [ncu, "--csv", "--metrics", ",".join(COUNTERS), *which, program, *options]
    try:
        ran = run(command, capture_output=True, text=True, timeout=NCU_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise HardwareCannot(f"ncu did not end within {NCU_S:.0f} s; fewer --steps help") from error
    if ran.returncode != 0:
        said = (ran.stderr.strip() or ran.stdout.strip()).splitlines()[-1:] or ["nothing"]
        raise HardwareCannot(f"ncu ended with {ran.returncode} and said: {said[0]}")
    return counters(ran.stdout)


def counters(text: str) -> dict[str, float]:
    """The counters in what ncu prints as CSV: throughput in per cent, time in microseconds, and the kernels."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows: list[Mapping[str, str]] = list(csv.DictReader(io.StringIO("\n".join(lines))))
    found: dict[str, list[float]] = {name: [] for name in COUNTERS}
    scale = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3}
    for row in rows:
        name = row.get("Metric Name", "")
        if name in found:
            value = float(row["Metric Value"].replace(",", ""))
            found[name].append(value * scale.get(row.get("Metric Unit", ""), 1.0))
    throughput, durations = (found[name] for name in COUNTERS)
    if not durations:
        raise HardwareCannot("ncu printed no counters: they may be closed to users here (ERR_NVGPUCTRPERM)")
    return {
        "kernels": float(len(durations)),
        "throughput_pct": sum(throughput) / max(1, len(throughput)),
        "time_us": sum(durations),
    }


def profiled_command(start: str, work: Workload) -> list[str]:
    """This laboratory again, one start, for a profiler to look at."""
    sizes = ("n", "steps", "kernels", "blocks", "threads")
    options = [word for size in sizes for word in (f"--{size}", str(getattr(work, size)))]
    return python_command("-m", "ostinato", "lab", "one", "--start", start, "--body", work.body, *options)


def architecture(machine: LabMachine) -> str:
    """What nvcc calls this card; the one we know where there is none."""
    return "sm_90" if machine.kind == "cpu" else gpu.chip_of("cuda").arch
