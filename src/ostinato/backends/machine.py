"""The machine as backends are asked about it: a device, what it has free, and what its driver and packages can do.

Found out once (`engine/machine.py`), and handed from the chooser to every backend, so a test can hand over another.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from ostinato.backends.control_groups import memory_left, memory_limit
from ostinato.errors import HardwareCannot, listing

DeviceKind = Literal["cpu", "cuda"]
FREE_WHEN_NOT_TOLD: Final = 8 * 2**30
PROGRAMS_PER_MULTIPROCESSOR: Final = 4  # of a step's attention; their number changes its speed and no bit
Capability = tuple[int, int]
# What one block may have of shared memory when it asks for more than 48 kB, by compute capability.
SHARED_BYTES: Final[Mapping[Capability, int]] = MappingProxyType(
    {
        (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10,
        (10, 0): 227 << 10, (10, 3): 227 << 10, (12, 0): 99 << 10, (12, 1): 99 << 10,
    }
)  # fmt: skip
OLDEST: Final = (8, 0)  # whose tensor cores know bfloat16
WITH_BULK_COPIES: Final = (9, 0)  # from this one on
REGISTERS: Final = 65_536  # of a block, on all of these
PRETENDED: Final = "OSTINATO_CHIP"  # the variable that names a chip to be believed in: sm_80, sm_89


@dataclass(frozen=True, slots=True)
class Chip:
    """One GPU by its limits, from which the kernels' tiles, stages and warps follow (`backends/cuda/chip.py`)."""

    capability: Capability
    n_multiprocessors: int
    shared_bytes: int  # that one block may have
    # Of the GPU that runs it, where OSTINATO_CHIP names another one: kernels are made for `capability` and assembled
    # for this.
    device_capability: Capability | None = None
    has_ptx: bool = True  # NVIDIA's own instructions, written into kernels

    @property
    def arch(self) -> str:
        """What kernels are compiled for."""
        return arch_of(self.capability)

    @property
    def exact_arch(self) -> str:
        """The same with what only this very chip has, since 9.0: a binary for it runs on no later one."""
        return f"{self.arch}a" if self.capability >= WITH_BULK_COPIES else self.arch

    @property
    def is_pretended(self) -> bool:
        """Whether OSTINATO_CHIP named it: the GPU is another one."""
        return self.device_capability is not None

    @property
    def has_bulk_copies(self) -> bool:
        return self.capability >= WITH_BULK_COPIES

    @property
    def attention_programs(self) -> int:
        return PROGRAMS_PER_MULTIPROCESSOR * self.n_multiprocessors


# Where the tables of tiles were measured: what they say fits there as it stands.
TUNED: Final = Chip((9, 0), 132, SHARED_BYTES[9, 0])


def arch_of(capability: Capability) -> str:
    """
    >>> arch_of((12, 0))
    'sm_120'
    """
    return f"sm_{capability[0]}{capability[1]}"


def why_too_old(chip: Chip) -> str | None:
    """Why no kernel of ours can run on a chip; None where they can."""
    if chip.capability >= OLDEST:
        return None
    (major, minor), (since, _) = chip.capability, OLDEST
    return f"compute capability {major}.{minor} is too old: the kernels need {since}.0 (Ampere) or newer"


def pretended(chip: Chip, name: str) -> Chip:
    """The chip that OSTINATO_CHIP names, with its limits, on the GPU that is there; HardwareCannot where that GPU could
    not run what is compiled for the other."""
    known = {arch_of(capability): capability for capability in SHARED_BYTES if capability <= chip.capability}
    if name not in known:
        raise HardwareCannot(f"{PRETENDED} is {name!r}; this GPU ({chip.arch}) can run as {listing(name, known)}")
    shared = SHARED_BYTES[known[name]]
    if shared > chip.shared_bytes:
        raise HardwareCannot(
            f"{PRETENDED} is {name}, whose blocks have {shared} bytes of shared memory, and those of this GPU "
            f"({chip.arch}) have {chip.shared_bytes}"
        )
    return Chip(known[name], chip.n_multiprocessors, shared, chip.capability)


@dataclass(frozen=True, slots=True)
class Machine:
    """One device of a machine."""

    device: str  # cpu, or cuda:N
    free_bytes: int  # on the device
    host_bytes: int  # free in the host's memory
    chip: Chip | None = None  # of a GPU
    driver_cuda: int | None = None  # the newest CUDA that the driver knows, as it numbers them: 12040 is 12.4
    missing: tuple[str, ...] = ()  # packages that a GPU needs and that are not installed
    total_bytes: int | None = None  # of the device's memory, in use or not; None where that is not known
    # Modes that `ostinato verify` found right on this card, each with families that it ran (engine/verified.py).
    verified: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def kind(self) -> DeviceKind:
        return kind_of(self.device)


def kind_of(device: str) -> DeviceKind:
    return "cuda" if device.startswith("cuda") else "cpu"


def package_version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # slow to load, and seldom asked

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver_cuda() -> int | None:
    """The newest CUDA version that the driver supports, from the driver itself. None without a driver or an answer."""
    number = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else number.value


def cuda_version(number: int) -> str:
    """A version as people write it.

    >>> cuda_version(12_040)
    '12.4'
    """
    return f"{number // 1000}.{number % 1000 // 10}"


def free_host_bytes() -> int:
    """Memory that the system can give without swapping, or what the control group has left where that is less."""
    left = memory_left()
    return _available() if left is None else min(_available(), left)


def host_bytes() -> int:
    """The machine's memory in all, or what the control group may take where that is less."""
    limit = memory_limit()
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, AttributeError):
        whole = FREE_WHEN_NOT_TOLD
    return whole if limit is None else min(whole, limit)


def _available() -> int:
    free = FREE_WHEN_NOT_TOLD
    try:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, AttributeError, StopIteration):
        return free  # this system does not tell, or not all of it


def resident_bytes() -> int | None:
    """Memory that this process uses now, mapped files included; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, AttributeError):
        return None


def cpu_line(name: str) -> str:
    """What the system says of the first CPU; empty where it says nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def cpu_name() -> str:
    """The name of this machine's processor."""
    return cpu_line("model name") or platform.processor() or platform.machine()
