"""`ostinato doctor`: what this machine can run, and why not the rest.

It only reports; it changes nothing and refuses nothing.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ostinato import __version__
from ostinato.backends.machine import (
    Chip,
    Machine,
    cpu_line,
    cpu_name,
    cuda_version,
    driver_cuda,
    free_host_bytes,
    package_version,
)
from ostinato.backends.native.library import compiler_of_object, native_status
from ostinato.cli import flags
from ostinato.cli.output import write_columns, write_json
from ostinato.engine.cores import allowed_processors, default_threads
from ostinato.engine.machine import why_no_cuda
from ostinato.errors import OstinatoError
from ostinato.extras import PACKAGES, missing
from ostinato.files import store
from ostinato.files.fetch import megabytes
from ostinato.options import LoadOptions

_CPU_FLAGS: Final = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx_vnni", "avx512_vnni", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)
_PACKAGES: Final = tuple(
    dict.fromkeys(("torch", "numpy", "tokenizers", "safetensors", "huggingface_hub", *PACKAGES["gpu"]))
)


@flags.verb
def doctor(as_json: flags.Json = False) -> None:
    """Say what this machine can run, and why not the rest."""
    report = examine()
    if as_json:
        write_json(report)
    else:
        write_columns(_rows(report))


def examine() -> dict[str, Any]:
    """The findings as plain values."""
    cuda, native = _cuda(), native_status()
    return {
        "ostinato": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: package_version(name) for name in _PACKAGES},
        "cpu": _cpu(),
        "native": {
            **{name: getattr(native, name) for name in ("level", "origin", "why_not", "line")},
            "compiler": compiler_of_object(),
        },
        "memory": _memory(),
        "cuda": cuda,
        "modes": _modes(cuda),
        "store": _store(),
        "plan": _plan(),
    }


def _modes(cuda: dict[str, Any]) -> list[dict[str, Any]]:
    """The modes of either device, as far as they depend on the machine; loading reports models that lack kernels."""
    from ostinato.engine.choose import modes_of, why_not_here

    def modes(machine: Machine, why_none: str | None = None) -> list[dict[str, Any]]:
        found, kind = why_not_here(machine), machine.kind
        reasons = {mode: why_none or found[mode] for mode in modes_of(kind)}
        return [{"device": kind, "mode": mode, "can_run": why is None, "reason": why} for mode, why in reasons.items()]

    return [*modes(Machine("cpu", 0, 0)), *modes(_gpu_machine(cuda), cuda["reason"])]


def _gpu_machine(cuda: dict[str, Any]) -> Machine:
    """The first GPU, as the record that backends check."""
    chip = None
    if cuda["devices"]:
        major, _, minor = cuda["devices"][0]["capability"].partition(".")
        chip = Chip((int(major), int(minor)), cuda["devices"][0]["multiprocessors"], 0)
    return Machine("cuda:0", 0, 0, chip, cuda["driver_cuda"], missing("gpu"))


def _cuda() -> dict[str, Any]:
    """The driver and the devices that torch can use, or the reason why there are none."""
    found: dict[str, Any] = {"driver": _driver(), "driver_cuda": driver_cuda(), "devices": [], "reason": None}
    reason = why_no_cuda()
    if reason is not None:
        return {**found, "reason": reason}
    from ostinato.backends.cuda import gpu

    return {**found, "devices": [_gpu(i) for i in range(gpu.count())]}


def _gpu(index: int) -> dict[str, Any]:
    from ostinato.backends.cuda import gpu

    chip, (free, total) = gpu.chip_of(index), gpu.memory_of(index)
    return {
        "name": gpu.name_of(index),
        "bytes": total,
        "free": free,
        "capability": f"{chip.capability[0]}.{chip.capability[1]}",
        "multiprocessors": chip.n_multiprocessors,
        "kernels": kernel_choices(chip),
    }


def kernel_choices(chip: Chip) -> list[dict[str, str]]:
    """What is chosen for a chip, each with its reason."""
    from ostinato.backends.cuda.chip import choices

    return [asdict(choice) for choice in choices(chip)]


def _driver() -> str | None:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next((word for word in words if word[0].isdigit() and "." in word), "of unknown version")
    except OSError:
        return None


def _cpu() -> dict[str, Any]:
    present = (cpu_line("flags") or cpu_line("Features")).split()
    flags = [flag for flag in _CPU_FLAGS if flag in present]
    return {"name": cpu_name(), "cores": len(allowed_processors()), "threads": default_threads(), "flags": flags}


def _memory() -> dict[str, int | None]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"total": total, "free": free_host_bytes()}
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return {"total": None, "free": None}


def _store() -> dict[str, Any]:
    home = store.home()
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    return {
        "home": str(home),
        "writable": place.is_dir() and os.access(place, os.W_OK | os.X_OK),
        "free": shutil.disk_usage(place).free,
        "models": [model.name for model in store.installed()],
    }


def _plan() -> dict[str, Any] | None:
    """The memory plan of the default model; None if it is not in the store, or cannot be read."""
    if store.DEFAULT not in {model.name for model in store.installed()}:
        return None
    from ostinato.cli.inspect import plan_facts, planned

    try:
        from ostinato.files.checkpoint import open_checkpoint
        from ostinato.models.registry import read_shape

        with open_checkpoint(store.resolve(store.DEFAULT, talk=lambda _: None)) as checkpoint:
            return plan_facts(planned(checkpoint, read_shape(checkpoint), LoadOptions()))
    except (OstinatoError, ImportError):  # doctor reports and refuses nothing; `inspect` says what is wrong with it
        return None


def _rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    from ostinato.cli.inspect import plan_rows

    cpu, memory, cuda, kept = report["cpu"], report["memory"], report["cuda"], report["store"]
    packages = ", ".join(f"{name} {found}" for name, found in report["packages"].items() if found)
    absent = ", ".join(name for name, found in report["packages"].items() if not found)
    rows: list[tuple[str, ...]] = [
        ("ostinato", report["ostinato"]),
        ("python", f"{report['python']} ({sys.executable})"),
        ("system", report["system"]),
        ("packages", packages + (f"; not installed: {absent}" if absent else "")),
        ("cpu", f"{cpu['name']}, {cpu['cores']} cores, {' '.join(cpu['flags']) or 'no known extensions'}"),
        ("threads", f"{cpu['threads']} by default, one for each physical core (--threads)"),
        ("native code", _native_line(report["native"])),
        ("memory", f"{_size(memory['free'])} free of {_size(memory['total'])}"),
        ("driver", _driver_line(cuda)),
    ]
    for device in cuda["devices"]:
        rows.append(("gpu", _gpu_line(device)))
        rows += [(one["what"], f"{one['choice']} ({one['reason']})") for one in device["kernels"]]
    if cuda["reason"] is not None:
        rows.append(("cuda", f"cannot: {cuda['reason']}"))
    for mode in report["modes"]:
        if mode["device"] == "cuda" and cuda["reason"] is not None:
            continue
        answer = "can run" if mode["can_run"] else f"cannot: {mode['reason']}"
        rows.append((f"{mode['device']} {mode['mode']}", answer))
    writable = "" if kept["writable"] else ", NOT WRITABLE: set OSTINATO_HOME to another folder"
    rows.append(("store", f"{kept['home']}, {_size(kept['free'])} free{writable}"))
    rows.append(("models", ", ".join(kept["models"]) or "none; `ostinato pull smollm2` fetches one"))
    return (
        rows if report["plan"] is None else [*rows, ("memory plan", f"of {store.DEFAULT}"), *plan_rows(report["plan"])]
    )


def _native_line(native: dict[str, Any]) -> str:
    return f"{native['line']}; made by {native['compiler']}" if native["compiler"] else str(native["line"])


def _driver_line(cuda: dict[str, Any]) -> str:
    if not cuda["driver"]:
        return "no NVIDIA driver"
    knows = "of an unknown CUDA" if cuda["driver_cuda"] is None else f"for CUDA {cuda_version(cuda['driver_cuda'])}"
    return f"NVIDIA {cuda['driver']} {knows} (mode loop needs 12.4)"


def _gpu_line(device: dict[str, Any]) -> str:
    return (
        f"{device['name']}, {_size(device['free'])} free of {_size(device['bytes'])}, compute capability "
        f"{device['capability']}, {device['multiprocessors']} multiprocessors"
    )


def _size(n_bytes: int | None) -> str:
    return "unknown" if n_bytes is None else megabytes(n_bytes)
