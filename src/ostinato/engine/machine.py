"""Finds out what the backends are asked about: which device is meant, and what it has. GPUs are the cuda backend's."""

from __future__ import annotations

import ctypes
from pathlib import Path

from ostinato.backends.machine import Machine, driver_cuda, free_host_bytes, kind_of
from ostinato.engine.verified import VerifiedCard, verified_modes
from ostinato.errors import HardwareCannot
from ostinato.extras import missing, why_missing
from ostinato.options import Talk


def machine_at(device: str, talk: Talk = lambda _: None) -> Machine:
    """What there is to know about a device that is there; `talk` gets a sentence where some of it cannot be read."""
    if kind_of(device) == "cpu":
        free = free_host_bytes()
        return Machine(device, free, free)
    from ostinato.backends.cuda import gpu

    (free, _), chip = gpu.memory_of(device), gpu.chip_of(device)
    verified = verified_modes(verified_card(device), talk)
    return Machine(device, free, free_host_bytes(), chip, driver_cuda(), missing("gpu"), verified)


def verified_card(device: str) -> VerifiedCard:
    """What results of `ostinato verify` hold for on a GPU."""
    from ostinato.backends.cuda import gpu

    return VerifiedCard.of(gpu.chip_of(device), gpu.name_of(device), driver_version() or "unknown")


def driver_version() -> str | None:
    """The version of the NVIDIA driver, by the kernel's module or, on WSL, which has none, by NVML. None without it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
        found = next((word for word in words if word[0].isdigit() and "." in word), None)
    except OSError:
        found = None
    return found or _nvml_driver_version()


def _nvml_driver_version() -> str | None:
    said = ctypes.create_string_buffer(96)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        failed = nvml.nvmlSystemGetDriverVersion(said, len(said))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return None if failed else said.value.decode("ascii", "replace")


def choose_device(wanted: str) -> str:
    """The device of that name; `auto` is the first GPU where there is one, else the CPU."""
    if wanted == "cpu":
        return "cpu"
    reason = why_no_cuda()
    if reason is not None and wanted == "auto":
        return "cpu"
    if reason is not None:
        raise HardwareCannot(f"device {wanted}: {reason}; use the device cpu")
    from ostinato.backends.cuda import gpu

    index = gpu.index_of("cuda" if wanted == "auto" else wanted)
    if index >= gpu.count():
        raise HardwareCannot(f"device {wanted}: this machine has {gpu.count()} GPU(s), numbered from 0")
    return f"cuda:{index}"


def why_gpu_unused() -> str | None:
    """What to install where there is an NVIDIA driver and `auto` takes the CPU for want of packages."""
    why = why_missing("gpu", "the NVIDIA GPU of this machine") if driver_cuda() is not None else None
    return None if why is None else f"the CPU runs: {why}"


def why_no_cuda() -> str | None:
    """Why no CUDA device can be used here; None where one can."""
    if driver_cuda() is None:
        return "there is no NVIDIA driver"  # known without torch, which takes seconds to load
    if (why := why_missing("gpu", "an NVIDIA GPU")) is not None:
        return why
    try:
        from ostinato.backends.cuda import gpu
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    return gpu.why_none()
