"""The CPU levels that native code is compiled for: what each asks of a CPU, its compiler flags, and the main source.

Nothing but the standard library here, and nothing of the package: the build of a wheel reads this file alone, by its
path, so that a wheel's objects and those compiled at first use are made in one way.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

SOURCE: Final = "cpu.cpp"  # the translation unit that others are compiled beside
# -ffp-contract=off: the levels and the compilers must round alike, so a multiply and an add are fused where the source
# says fma and nowhere else. -fno-math-errno: a square root is one instruction. -fpeel-loops: short loops over arrays
# are unrolled, so that these stay in registers; with it -O2 gives code as fast as -O3's in two thirds of the time.
COMMON_FLAGS: Final = (
    "-std=c++17",
    "-O2",
    "-fpeel-loops",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-pthread",
    "-Wall",
    "-Wextra",
)
_GCC_ALONE: Final = frozenset(["-fpeel-loops"])


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions that an object may use."""

    name: str
    architecture: str  # as `architecture` names them; "any" where there is nothing to ask for
    needs: frozenset[str]  # as Linux spells them
    march: tuple[str, ...]  # for GCC and Clang
    zig_cpu: str  # for zig, which has its own names for processors
    words: str  # for people

    @property
    def flags(self) -> tuple[str, ...]:
        return (*COMMON_FLAGS, *self.march)

    @property
    def zig_flags(self) -> tuple[str, ...]:
        """The same for zig: without a CPU it would take this machine's own."""
        common = [flag for flag in COMMON_FLAGS if flag not in _GCC_ALONE]
        defines = [flag for flag in self.march if flag.startswith("-D")]
        return (*common, *defines, "-DMADE_BY_ZIG", f"-mcpu={self.zig_cpu}")


X86_64: Final = "x86_64"
AARCH64: Final = "aarch64"

_V2: Final = frozenset(["pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "cx16", "lahf_lm"])
_V3: Final = _V2 | frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
_V4: Final = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"])
_DOTPROD: Final = frozenset(["atomics", "asimddp"])

_AMX: Final = frozenset(["amx_tile", "amx_int8"])

V4: Final = Level("v4", X86_64, _V4, ("-march=x86-64-v4", "-mavx512vnni"), "x86_64_v4+avx512vnni", "AVX-512 with VNNI")
# The compiler need not know these instructions: they are written as assembly (`products_amx.h`).
AMX: Final = Level("amx", X86_64, _V4 | _AMX, (*V4.march, "-DOSTINATO_AMX"), V4.zig_cpu, "AVX-512 with VNNI and AMX")
V3: Final = Level("v3", X86_64, _V3, ("-march=x86-64-v3",), "x86_64_v3", "AVX2")
V2: Final = Level("v2", X86_64, _V2, ("-march=x86-64-v2",), "x86_64_v2", "SSE4.2")
I8MM: Final = Level(
    "i8mm",
    AARCH64,
    _DOTPROD | {"i8mm"},
    ("-march=armv8.2-a+dotprod+i8mm",),
    "generic+v8_2a+dotprod+i8mm",
    "NEON with i8mm",
)
DOTPROD: Final = Level(
    "dotprod", AARCH64, _DOTPROD, ("-march=armv8.2-a+dotprod",), "generic+v8_2a+dotprod", "NEON with dot product"
)
NEON: Final = Level("neon", AARCH64, frozenset(), ("-march=armv8-a",), "generic", "NEON")
PLAIN: Final = Level("plain", "any", frozenset(), ("-DOSTINATO_PLAIN",), "baseline", "plain C++")
LEVELS: Final = {level.name: level for level in (AMX, V4, V3, V2, I8MM, DOTPROD, NEON, PLAIN)}  # the best first
# What a wheel carries. No `plain` object: CPUs below v2 are too rare for its size; there the loop is compiled at first
# use.
IN_WHEELS: Final = {X86_64: (AMX, V4, V3, V2), AARCH64: (I8MM, DOTPROD, NEON)}

# Features of AArch64 by their bits in the auxiliary vector's words 16 and 26 (AT_HWCAP and AT_HWCAP2).
_ARM_BITS: Final = {"atomics": (16, 8), "asimddp": (16, 20), "i8mm": (26, 13)}

# How x86-64 Linux is asked for the tile registers: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_ARCH_PRCTL: Final = 158
_REQUEST_PERMISSION: Final = 0x1023
_TILE_DATA: Final = 18


def architecture() -> str:
    """The processor's architecture by one name on every system, or "any" where there is no level of its own."""
    found = platform.machine().lower()
    return {"amd64": X86_64, "arm64": AARCH64}.get(found, found if found in IN_WHEELS else "any")


def features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The features of this CPU that a process may use, by the names that Linux has for them; empty on other systems."""
    return _arm_features() if architecture() == AARCH64 else _x86_features(cpuinfo)


@cache  # it is asked for every matrix that is loaded
def _x86_features(cpuinfo: Path) -> frozenset[str]:
    found = frozenset[str]()
    try:
        lines = cpuinfo.read_text("utf-8", "replace").splitlines()
        found = next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), found)
    except OSError:
        pass
    return found if not found & _AMX or amx_allowed() else found - _AMX


def amx_allowed() -> bool:
    """Ask the system for the tile registers, for all threads of this process; False where it refuses.

    Linux saves 8 kB more for a thread that uses them, so a process must ask first (since 5.16). A virtual machine may
    list the feature and refuse it.
    """
    try:
        syscall = ctypes.CDLL(None).syscall
    except (OSError, AttributeError):
        return False
    syscall.restype = ctypes.c_long
    arguments = (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return bool(syscall(*map(ctypes.c_long, arguments)) == 0)


def _arm_features() -> frozenset[str]:
    """By the C library and not by /proc, which an emulator shows of the machine below it."""
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):  # not Linux
        return frozenset()
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return frozenset(name for name, (word, bit) in _ARM_BITS.items() if getauxval(word) >> bit & 1)


def levels_of(machine: str) -> list[Level]:
    """The levels of an architecture, the best first.

    >>> [level.name for level in levels_of("aarch64")]
    ['i8mm', 'dotprod', 'neon', 'plain']
    """
    return [level for level in LEVELS.values() if level.architecture in (machine, "any")]


def best_level(found: Iterable[str], machine: str = X86_64) -> Level:
    """The first level of an architecture that has all it needs.

    >>> best_level(["sse2", "avx"]).name
    'plain'
    """
    here = frozenset(found)
    return next(level for level in levels_of(machine) if level.needs <= here)
