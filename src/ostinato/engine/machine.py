"""Finds out what the backends are asked about: which device is meant, and what it has. GPUs are the cuda backend's.

Where a GPU cannot be used, the reason is a sentence that says what to do. Systems of all kinds are tested with stubs
(tests/engine/test_machine.py).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ostinato.backends.machine import (
    Capability,
    Machine,
    arch_of,
    cuda_version,
    driver_cuda,
    free_host_bytes,
    kind_of,
)
from ostinato.engine.verified import VerifiedCard, verified_kinds
from ostinato.errors import HardwareCannot, first_line
from ostinato.extras import gpu_install_command, install_command, missing, why_missing
from ostinato.options import Talk

KERNEL_MODULE: Final = Path("/proc/driver/nvidia/version")
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
NO_DEVICE: Final = 100
# What the driver answers when it cannot start, by its number, and what to do.
_FAILURES: Final[Mapping[int, str]] = MappingProxyType(
    {
        NO_DEVICE: "the NVIDIA driver finds no GPU: `nvidia-smi` must list one; start a container with --gpus all",
        2: "the NVIDIA driver could not start for want of memory: end other processes, which `nvidia-smi` lists",
        46: "the GPU is held by another process alone (compute mode exclusive): end it, or use another GPU",
        802: "the GPUs are not ready yet: start NVIDIA's fabric manager (`systemctl start nvidia-fabricmanager`)",
        803: "the driver's library and its kernel module are of different versions: restart the machine after the "
        "driver was updated; in a container, remove its own libcuda",
        804: "a CUDA compatibility library is loaded that this GPU's driver does not allow: take cuda-compat out of "
        "LD_LIBRARY_PATH",
        999: "the NVIDIA driver fails with an unknown error: load its module (`modprobe nvidia_uvm`), or restart the "
        "machine",
    }
)


def machine_at(device: str, talk: Talk = lambda _: None) -> Machine:
    """What there is to know about a device that is there; `talk` gets a sentence where some of it cannot be read."""
    if kind_of(device) == "cpu":
        free = free_host_bytes()
        return Machine(device, free, free)
    from ostinato.backends.cuda import gpu

    try:
        (free, total), chip = gpu.memory_of(device), gpu.chip_of(device)
    except RuntimeError as error:  # torch's own kinds, such as that of a GPU without memory for a context
        cause = first_line(error)
        raise HardwareCannot(
            f"{device} cannot be used ({cause}): another process may fill it or hold it, which `nvidia-smi` lists; end "
            "that, or use another --device"
        ) from error
    if (why := why_no_kernels(chip.device_capability or chip.capability, gpu.archs())) is not None:
        raise HardwareCannot(f"{device}: {why}")
    verified = verified_kinds(verified_card(device), talk)
    return Machine(device, free, free_host_bytes(), chip, driver_cuda(), missing("gpu"), total, verified)


def why_no_kernels(capability: Capability, archs: Sequence[str]) -> str | None:
    """Why a build of torch with kernels for these architectures cannot run on a chip; None where it can, or does not
    tell. A binary runs on chips of its major number from its own minor on, and PTX on all later chips."""
    for kind, _, digits in (arch.rstrip("af").partition("_") for arch in archs if arch.startswith(("sm_", "compute_"))):
        since = int(digits[:-1]), int(digits[-1])
        if since <= capability and (kind == "compute" or since[0] == capability[0]):
            return None
    if not archs:
        return None
    has = f"this build of torch has no kernels for {arch_of(capability)}, only for {', '.join(archs)}"
    return f"{has}; install one that has: {gpu_install_command()}"


def verified_card(device: str, kind: str = "") -> VerifiedCard:
    """What results of `ostinato verify` hold for on a GPU, with a kind of kernel (`kind_of_kernel`)."""
    from ostinato.backends.cuda import gpu

    card = VerifiedCard.of(gpu.chip_of(device), gpu.name_of(device), driver_version() or "unknown")
    return replace(card, kind=kind)


def driver_version() -> str | None:
    """The version of the NVIDIA driver, by the kernel's module or, on WSL, which has none, by NVML. None without it."""
    try:
        words = KERNEL_MODULE.read_text().split()
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
        visible = os.environ.get(VISIBLE)
        of = "" if visible is None else f" of those that {VISIBLE}={visible!r} leaves"
        raise HardwareCannot(f"device {wanted}: this machine has {gpu.count()} GPU(s){of}, numbered from 0")
    return f"cuda:{index}"


def why_gpu_unused() -> str | None:
    """Why `auto` takes the CPU where there is an NVIDIA driver, and what to do; None where it was told to."""
    if driver_cuda() is None or os.environ.get(VISIBLE) in ("", "-1"):
        return None
    why = why_missing("gpu", "the NVIDIA GPU of this machine") or why_no_cuda()
    return None if why is None else f"the CPU runs: {why}"


def why_no_cuda() -> str | None:
    """Why no CUDA device can be used here; None where one can."""
    if (driver := driver_cuda()) is None:
        return "there is no NVIDIA driver"  # known without torch, which takes seconds to load
    if (why := why_missing("gpu", "an NVIDIA GPU")) is not None:
        return why
    try:
        from ostinato.backends.cuda import gpu
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if not gpu.is_usable():
        return why_not_usable(gpu.built_for(), driver, _cu_init(), os.environ.get(VISIBLE))
    return why_not_importable()


def why_not_usable(built_for: str | None, driver: int, failure: int, visible: str | None) -> str:
    """Why torch, built for that CUDA, can use no GPU, by what the driver knows and answers, and by what the user has
    made visible of its GPUs."""
    if built_for is None:
        return f"this build of torch has no CUDA; install one that has: {gpu_install_command()}"
    if visible is not None and failure in (0, NO_DEVICE):
        return (
            f"{VISIBLE} is {visible!r}, and names no GPU of this machine: unset it, or name one that `nvidia-smi` lists"
        )
    if failure in _FAILURES:
        return _FAILURES[failure]
    if int(built_for.partition(".")[0]) > driver // 1000:
        return (
            f"the NVIDIA driver knows CUDA {cuda_version(driver)}, and this build of torch is for CUDA {built_for}: "
            f"update the driver, or install a build that it can run: {gpu_install_command()}"
        )
    if failure:
        return f"the NVIDIA driver cannot start (error {failure}): `nvidia-smi` may tell more"
    return "torch finds no GPU that it can use: `nvidia-smi` must list one"


def why_not_importable() -> str | None:
    """Why the packages that kernels are compiled and launched with cannot be imported, though they are installed: of
    versions that do not go together, say. None where they can."""
    try:
        import cuda.bindings.driver
        import cuda.bindings.nvrtc
        import cuda.core  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return f"cuda-core and cuda-bindings cannot be imported ({error}); type: {install_command('gpu')}"
    return None


def _cu_init() -> int:
    """The driver's answer when it is asked to start: 0 where it can. Asked only once torch has failed to."""
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0))
    except (OSError, AttributeError):
        return NO_DEVICE
