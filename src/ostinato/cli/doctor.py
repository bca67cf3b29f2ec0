"""`ostinato doctor`: what this machine can run, and why not the rest.

It looks and reports; it changes nothing and refuses nothing.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from ostinato.cli import flags
from ostinato.cli.output import write_columns, write_json
from ostinato.files import store
from ostinato.files.fetch import megabytes

_CPU_FLAGS: Final = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx_vnni", "avx512_vnni", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)
_NOT_BUILT: Final = "not built yet in this version"
_PACKAGES: Final = ("torch", "numpy", "tokenizers", "safetensors", "huggingface_hub", "triton", "cuda-core")


def doctor(as_json: flags.Json = False, verbose: flags.Verbose = False) -> None:
    """Say what this machine can run, and why not the rest."""
    report = examine()
    if as_json:
        write_json(report)
    else:
        write_columns(_rows(report))


def examine() -> dict[str, Any]:
    """The findings as plain values."""
    cuda = _cuda()
    return {
        "ostinato": version("ostinato"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": {"name": _cpu_name(), "cores": _cores(), "flags": _cpu_flags()},
        "memory": {"total": _total_memory(), "free": _free_memory()},
        "cuda": cuda,
        "modes": _modes(cuda["reason"]),
        "store": _store(),
    }


def _modes(no_cuda: str | None) -> list[dict[str, Any]]:
    def mode(device: str, name: str, reason: str | None) -> dict[str, Any]:
        return {"device": device, "mode": name, "can_run": reason is None, "reason": reason}

    no_torch = None if _version("torch") else "torch is not installed"
    return [
        mode("cpu", "eager", no_torch),
        mode("cpu", "loop", _NOT_BUILT),
        mode("cuda", "eager", no_cuda),
        *(mode("cuda", name, _NOT_BUILT) for name in ("graph", "loop", "persistent")),
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cuda() -> dict[str, Any]:
    """The driver, the devices that torch can use, and else the reason why there are none."""
    driver = _driver()
    try:
        import torch
    except ImportError as error:
        return {"driver": driver, "devices": [], "reason": f"torch cannot be imported: {error}"}
    if not torch.cuda.is_available():
        from ostinato.engine.placement import why_no_cuda

        reason = why_no_cuda() if driver else f"no NVIDIA driver is installed, and {why_no_cuda()}"
        return {"driver": driver, "devices": [], "reason": reason}
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    listed = [{"name": device.name, "bytes": device.total_memory} for device in devices]
    return {"driver": driver, "devices": listed, "reason": None}


def _driver() -> str | None:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next((word for word in words if word[0].isdigit() and "." in word), "of unknown version")
    except OSError:
        return None


def _cpu_info(field: str) -> str | None:
    """A field of the first processor in /proc/cpuinfo, where there is such a file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field)
    return next(values, None)


def _cpu_name() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_flags() -> list[str]:
    present = set((_cpu_info("flags") or _cpu_info("Features") or "").split())
    return [flag for flag in _CPU_FLAGS if flag in present]


def _total_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return None


def _free_memory() -> int | None:
    try:
        from ostinato.engine.placement import free_host_bytes

        return free_host_bytes()
    except (ImportError, AttributeError, ValueError, OSError):  # no torch, or not a POSIX system
        return None


def _store() -> dict[str, Any]:
    home = store.home()
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    return {
        "home": str(home),
        "writable": place.is_dir() and os.access(place, os.W_OK | os.X_OK),
        "free": shutil.disk_usage(place).free,
        "models": [model.name for model in store.installed()],
    }


def _rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    cpu, memory, cuda, kept = report["cpu"], report["memory"], report["cuda"], report["store"]
    packages = ", ".join(f"{name} {found}" for name, found in report["packages"].items() if found)
    absent = ", ".join(name for name, found in report["packages"].items() if not found)
    rows: list[tuple[str, ...]] = [
        ("ostinato", report["ostinato"]),
        ("python", f"{report['python']} ({sys.executable})"),
        ("system", report["system"]),
        ("packages", packages + (f"; not installed: {absent}" if absent else "")),
        ("cpu", f"{cpu['name']}, {cpu['cores']} cores, {' '.join(cpu['flags']) or 'no known extensions'}"),
        ("memory", f"{_size(memory['free'])} free of {_size(memory['total'])}"),
        ("driver", f"NVIDIA {cuda['driver']}" if cuda["driver"] else "no NVIDIA driver"),
    ]
    rows += [("gpu", f"{device['name']}, {_size(device['bytes'])}") for device in cuda["devices"]]
    for mode in report["modes"]:
        answer = "can run" if mode["can_run"] else f"cannot: {mode['reason']}"
        rows.append((f"{mode['device']} {mode['mode']}", answer))
    writable = "" if kept["writable"] else ", NOT WRITABLE: set OSTINATO_HOME to another folder"
    rows.append(("store", f"{kept['home']}, {_size(kept['free'])} free{writable}"))
    return [*rows, ("models", ", ".join(kept["models"]) or "none; `ostinato pull smollm2` fetches one")]


def _size(n_bytes: int | None) -> str:
    return "unknown" if n_bytes is None else megabytes(n_bytes)
