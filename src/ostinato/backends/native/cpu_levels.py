"""The CPU levels that native code is compiled for: what each asks of a CPU, its compiler flags, and which sources.

Nothing but the standard library here, and nothing of the package: the build of a wheel reads this file alone, by its
path, so that a wheel's objects and those compiled at first use are made in one way.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

SOURCE: Final = "cpu.cpp"  # the translation unit that others are compiled beside
UNIT: Final = ".cpp"  # what the names of translation units end with
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


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions that an object may use."""

    name: str
    needs: frozenset[str]  # as /proc/cpuinfo spells them
    march: tuple[str, ...]
    words: str  # for people

    @property
    def flags(self) -> tuple[str, ...]:
        return (*COMMON_FLAGS, *self.march)


_V3: Final = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
_V4: Final = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"])
V4: Final = Level("v4", _V4, ("-march=x86-64-v4", "-mavx512vnni"), "AVX-512 with VNNI")
V3: Final = Level("v3", _V3, ("-march=x86-64-v3",), "AVX2")
PLAIN: Final = Level("plain", frozenset(), (), "plain C++")
LEVELS: Final = {level.name: level for level in (V4, V3, PLAIN)}  # the best first
IN_WHEELS: Final = (V4, V3)


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The features of this CPU as Linux reports them; empty on other systems."""
    try:
        for line in cpuinfo.read_text("utf-8", "replace").splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def best_level(found: Iterable[str]) -> Level:
    """The first level that has all it needs.

    >>> best_level(["sse2", "avx"]).name
    'plain'
    """
    here = frozenset(found)
    return next(level for level in LEVELS.values() if level.needs <= here)


def sources(*folders: Path) -> dict[str, str]:
    """Every translation unit and every header, by name."""
    paths = sorted(path for folder in folders for path in (*folder.glob(f"*{UNIT}"), *folder.glob("*.h")))
    return {path.name: path.read_text("utf-8") for path in paths}


def sum_of(texts: dict[str, str], flags: Sequence[str]) -> str:
    """What an object was made from: sources, and the flags that it was made with."""
    total = sha256()
    for piece in (*flags, "", *(text for pair in sorted(texts.items()) for text in pair)):
        encoded = piece.encode()
        total.update(len(encoded).to_bytes(8, "little"))  # or "a" and "bc" would be "ab" and "c"
        total.update(encoded)
    return total.hexdigest()
