"""The machine as backends are asked about it: a device, what it has free, and what its driver and packages can do.

Found out once (`engine/machine.py`), and handed from the chooser to every backend, so a test can hand over another.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ostinato.backends.control_groups import memory_left

DeviceKind = Literal["cpu", "cuda"]
FREE_WHEN_NOT_TOLD: Final = 8 * 2**30
PROGRAMS_PER_MULTIPROCESSOR: Final = 4  # of a step's attention; their number changes its speed and no bit
TUNED_SHARED_BYTES: Final = 227 << 10  # what tiles of products may take of a block's shared memory


@dataclass(frozen=True, slots=True)
class Chip:
    """One GPU."""

    capability: tuple[int, int]
    n_multiprocessors: int
    shared_bytes: int  # that one block may have

    @property
    def arch(self) -> str:
        """What NVRTC compiles for."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def exact_arch(self) -> str:
        """The same with what only this very chip has: a binary for it runs on no later one."""
        return f"{self.arch}a"

    @property
    def attention_programs(self) -> int:
        return PROGRAMS_PER_MULTIPROCESSOR * self.n_multiprocessors


@dataclass(frozen=True, slots=True)
class Machine:
    """One device of a machine."""

    device: str  # cpu, or cuda:N
    free_bytes: int  # on the device
    host_bytes: int  # free in the host's memory
    chip: Chip | None = None  # of a GPU
    driver_cuda: int | None = None  # the newest CUDA that the driver knows, as it numbers them: 12040 is 12.4
    missing: tuple[str, ...] = ()  # packages that a GPU needs and that are not installed

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
