"""`ostinato doctor`: what this machine can run, and why not the rest.

It only reports; it changes nothing and refuses nothing.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import asdict
from itertools import chain
from typing import Annotated, Any, Final

from ostinato import __version__
from ostinato.backends.cuda.backend import WHILE_NODES_SINCE
from ostinato.backends.machine import (
    PRETENDED,
    SHARED_BYTES,
    Chip,
    Machine,
    arch_of,
    cpu_line,
    cpu_name,
    cuda_version,
    driver_cuda,
    free_host_bytes,
    package_version,
)
from ostinato.backends.native.library import compiler_of_object, native_status
from ostinato.cli import flags
from ostinato.cli.output import InstallHints, talk, write_columns, write_json, write_line
from ostinato.engine.cores import allowed_processors, default_threads
from ostinato.engine.machine import driver_version, machine_at, why_no_cuda
from ostinato.errors import OstinatoError, UnknownName
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
def doctor(
    *,
    model: Annotated[str | None, flags.ModelFlags()] = None,
    cards: Annotated[bool, flags.Flag("Print what is known about NVIDIA GPUs, by architecture.")] = False,
    as_json: flags.Json = False,
) -> None:
    """Report what this machine can run, and why it cannot run the rest.

    With a model, also what of it fits here: contexts, slots, or which quantisation would.
    """
    if cards:
        rows = card_rows()
        if as_json:
            write_json({"cards": [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]})
        else:
            write_columns(rows)
        return
    report = examine(model)
    if as_json:
        write_json(report)
    else:
        hints = InstallHints()
        write_columns(_rows(report, hints))
        for hint in hints.lines:
            write_line(f"to install {hint}")


def card_rows() -> list[tuple[str, ...]]:
    """The cards that we know, with the modes that run there: the table of README.md."""
    from ostinato.engine.choose import modes_of, why_not_here
    from ostinato.engine.known_cards import KNOWN, REFUSED, has_run
    from ostinato.engine.verified import NEED_VERIFICATION

    rows: list[tuple[str, ...]] = [("cards", "arch", "modes", "state", "date")]
    for capability, known in KNOWN.items():
        chip = Chip(capability, 1, SHARED_BYTES[capability])
        reasons = why_not_here(Machine("cuda:0", 0, 0, chip, WHILE_NODES_SINCE))
        can = [mode for mode in modes_of("cuda") if reasons[mode] is None]
        unasked = [mode for mode in can if mode not in NEED_VERIFICATION or has_run(capability)]
        verified = [f"{mode} once verified" for mode in can if mode not in unasked]
        rows.append((known.examples, chip.arch, "; ".join([", ".join(unasked), *verified]), known.state, known.date))
    return [*rows, REFUSED]


def examine(model: str | None = None) -> dict[str, Any]:
    """The findings as plain values; with the memory plan of a model, or of the default model where it is installed."""
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
        **_plan(model),
    }


def _modes(cuda: dict[str, Any]) -> list[dict[str, Any]]:
    """The modes of each device, as far as they depend on the machine; loading reports models that lack kernels."""
    from ostinato.engine.choose import modes_of, why_not_here, why_unverified

    def modes(machine: Machine, name: str, why_none: str | None = None) -> list[dict[str, Any]]:
        found = why_not_here(machine)
        reasons = {mode: why_none or found[mode] for mode in modes_of(machine.kind)}
        return [
            {
                "device": name,
                "mode": mode,
                "can_run": why is None,
                "reason": why,
                "not_chosen": why_unverified(mode, machine) if why is None else None,
            }
            for mode, why in reasons.items()
        ]

    gpus = cuda["devices"] or [None]
    names = [f"cuda:{number}" if len(gpus) > 1 else "cuda" for number in range(len(gpus))]
    found = [modes(_gpu_machine(cuda, gpu), name, cuda["reason"]) for gpu, name in zip(gpus, names, strict=True)]
    return [*modes(Machine("cpu", 0, 0), "cpu"), *chain.from_iterable(found)]


def _gpu_machine(cuda: dict[str, Any], gpu: dict[str, Any] | None) -> Machine:
    """A GPU as the record that backends check."""
    chip = None
    if gpu is not None:
        major, _, minor = gpu["capability"].partition(".")
        chip = Chip((int(major), int(minor)), gpu["multiprocessors"], gpu["shared_bytes"])
    verified = {} if gpu is None else {mode: ("",) for mode in gpu["verified"]}  # no matter of which family
    return Machine("cuda:0", 0, 0, chip, cuda["driver_cuda"], missing("gpu"), verified=verified)


def _cuda() -> dict[str, Any]:
    """The driver and the devices that torch can use, or the reason why there are none."""
    found: dict[str, Any] = {"driver": driver_version(), "driver_cuda": driver_cuda(), "devices": [], "reason": None}
    reason = why_no_cuda()
    if reason is not None:
        return {**found, "reason": reason}
    from ostinato.backends.cuda import gpu

    try:
        return {**found, "devices": [_gpu(number) for number in range(gpu.count())]}
    except OstinatoError as error:
        return {**found, "reason": str(error)}


def _gpu(index: int) -> dict[str, Any]:
    from ostinato.backends.cuda import gpu

    machine = machine_at(f"cuda:{index}", talk)
    assert machine.chip is not None
    chip = machine.chip
    return {
        "name": gpu.name_of(index),
        "bytes": machine.total_bytes,
        "free": machine.free_bytes,
        "capability": f"{chip.capability[0]}.{chip.capability[1]}",
        "multiprocessors": chip.n_multiprocessors,
        "shared_bytes": chip.shared_bytes,
        "pretended": _pretended(chip),
        "verified": list(machine.verified),
        "kernels": kernel_choices(chip),
    }


def _pretended(chip: Chip) -> str | None:
    """That OSTINATO_CHIP names another chip than the one that is there; None where it does not."""
    if chip.device_capability is None:
        return None
    there = arch_of(chip.device_capability)
    return f"{PRETENDED} pretends {chip.arch}: kernels are made as for it, and this GPU is {there}"


def kernel_choices(chip: Chip) -> list[dict[str, str]]:
    """What is chosen for a chip, each with its reason."""
    from ostinato.backends.cuda.chip import choices

    return [asdict(choice) for choice in choices(chip)]


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


def _plan(model: str | None) -> dict[str, Any]:
    """The memory plan of a model, else of the default one, and why there is none. Nothing is told of a default model
    that is not in the store or cannot be read."""
    name = model or store.DEFAULT
    none = {"model": model, "plan": None, "plan_reason": None}
    if model is None and name not in {stored.name for stored in store.installed()}:
        return none
    from ostinato.cli.inspect import plan_facts, planned

    try:
        from ostinato.files.checkpoint import open_checkpoint
        from ostinato.models.registry import read_shape

        with open_checkpoint(store.resolve(name, talk=talk if model else lambda _: None)) as checkpoint:
            return {
                **none,
                "model": name,
                "plan": plan_facts(planned(checkpoint, read_shape(checkpoint), LoadOptions())),
            }
    except UnknownName:  # no such model or file: nothing of it can be told
        raise
    except (OstinatoError, ImportError) as error:  # whatever else is wrong with it is a finding
        return none if model is None else {**none, "plan_reason": str(error)}


def _rows(report: dict[str, Any], hints: InstallHints) -> list[tuple[str, ...]]:
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
        rows += [("gpu", device["pretended"])] if device["pretended"] else []
        rows += [(one["what"], f"{one['choice']} ({one['reason']})") for one in device["kernels"]]
    if cuda["reason"] is not None:
        rows.append(("cuda", f"cannot: {hints.cell(cuda['reason'])}"))
    for mode in report["modes"]:
        if mode["device"] != "cpu" and cuda["reason"] is not None:
            continue
        answer = "can run" if mode["can_run"] else f"cannot: {hints.cell(mode['reason'])}"
        answer += f"; {mode['not_chosen']}" if mode["not_chosen"] else ""
        rows.append((f"{mode['device']} {mode['mode']}", answer))
    writable = "" if kept["writable"] else ", NOT WRITABLE: set OSTINATO_HOME to another folder"
    rows.append(("store", f"{kept['home']}, {_size(kept['free'])} free{writable}"))
    rows.append(("models", ", ".join(kept["models"]) or "none; `ostinato pull smollm2` fetches one"))
    if report["plan_reason"] is not None:
        rows.append(("memory plan", f"of {report['model']}: {report['plan_reason']}"))
    if report["plan"] is not None:
        rows += [("memory plan", f"of {report['model']}"), *plan_rows(report["plan"])]
    return rows


def _native_line(native: dict[str, Any]) -> str:
    return f"{native['line']}; made by {native['compiler']}" if native["compiler"] else str(native["line"])


def _driver_line(cuda: dict[str, Any]) -> str:
    if not cuda["driver"] and cuda["driver_cuda"] is None:
        return "no NVIDIA driver"
    knows = "of an unknown CUDA" if cuda["driver_cuda"] is None else f"for CUDA {cuda_version(cuda['driver_cuda'])}"
    return f"NVIDIA {cuda['driver'] or 'of unknown version'} {knows} (mode loop needs 12.4)"


def _gpu_line(device: dict[str, Any]) -> str:
    return (
        f"{device['name']}, {_size(device['free'])} free of {_size(device['bytes'])}, compute capability "
        f"{device['capability']}, {device['multiprocessors']} multiprocessors"
    )


def _size(n_bytes: int | None) -> str:
    return "unknown" if n_bytes is None else megabytes(n_bytes)
