"""Finds out what the backends are asked about: which device is meant, and what it has. GPUs are the cuda backend's."""

from __future__ import annotations

from ostinato.backends.machine import Machine, driver_cuda, free_host_bytes, kind_of
from ostinato.errors import HardwareCannot
from ostinato.extras import missing, why_missing


def machine_at(device: str) -> Machine:
    """What there is to know about a device that is there."""
    if kind_of(device) == "cpu":
        free = free_host_bytes()
        return Machine(device, free, free)
    from ostinato.backends.cuda import gpu

    free, _ = gpu.memory_of(device)
    return Machine(device, free, free_host_bytes(), gpu.chip_of(device), driver_cuda(), missing("gpu"))


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
