"""The tape's own source on the CPU: compiled with `machine_cpu.h` in place of the card, and run with ctypes.

The machine itself (`machine_cpu.cpp`) is one library, which every program finds its names in.

A test of a part of the tape writes a source that includes its headers and ends in a KERNEL; `compiled` makes a library
of it, and `Program.run` runs the whole grid in fibers, in an order that follows from a seed. Nothing here needs a GPU,
and ctypes lets go of the interpreter while the grid runs, so that another thread can play the host.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pytest

from ostinato import build
from ostinato.backends.tape.start import SOURCES
from ostinato.errors import HardwareCannot
from ostinato.loop import sources
from ostinato.text import walk

HERE: Final = Path(__file__).parent
FOLDERS: Final = (SOURCES, sources.FOLDER, walk.FOLDER, HERE)

# A kernel reads its memory as whatever type it likes, as on the card; but what the card would not do, or would do
# otherwise, is trapped: words that are not aligned, shifts by more than a word, places out of an array.
_CHECKED: Final = (
    *("-std=c++17", "-g1", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing"),
    *("-fsanitize=alignment,bounds,shift-exponent", "-fsanitize-undefined-trap-on-error"),
)
FLAGS: Final = ("-Og", *_CHECKED)
MACHINE_FLAGS: Final = ("-O2", *_CHECKED)  # compiled once
# Every access is told to the machine (races_cpu.h), which is there in place of the sanitizer's own library.
WATCHED_FLAGS: Final = (*FLAGS, "-fsanitize=thread", "-Wno-tsan", "-DWATCH_RACES=1", "-nodefaultlibs")

_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_INCLUDE: Final = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
_RACE: Final = re.compile(r"code \+(0x[0-9a-f]+)\), then thread \d+ \(code \+(0x[0-9a-f]+)")
_RACED: Final = 4
# Functions whose accesses may be in no order, since what is read is not used. Attention loads a whole tile of keys and
# values before the row's own arrive, which another block may be storing there, and takes the row's own in their place;
# a lane that has no id reads the first logit and drops it.
_UNUSED: Final = (
    ("load_kept", "lay_line"),
    ("load_kept", "keep(char*"),
    ("load_kept", "keep_quantised"),
    ("load_fresh(unsigned short const*", "keep_quantised"),  # a scale
    ("for_own_ids", "store_output"),
    ("for_own_ids<warp_weight", "own_part"),
)
_ENDS: Final = {1: "deadlock", 2: "took too long", 3: "misused the machine", _RACED: "threads race"}


class DidNotEnd(Exception):
    """A run that came to no good end; the text says who waits where."""


def constants(**values: int | float | str) -> str:
    """A `shape.h` of these constants; what every part of the tape needs has defaults here."""
    of_llama: dict[str, int | str] = {
        **dict.fromkeys(("EMBEDDING_SCALE", "OUT_SCALE", "DOWN_SCALE", "HEAD_SCALE"), "1.0f"),
        **dict.fromkeys(("QUERY_TEMPERATURE", "SCORE_CAP", "LOGIT_CAP"), "0.0f"),
        **{"QUERY_SPAN": 1, "ROPE_KINDS": 1, "ROPE_BY_LAYER": 0, "ACTIVATION": 0, "KEPT_Q8": 0},
        **{"HAS_AFTER_NORMS": 0, "AFTER_NORM_EPS": "1e-5f"},
    }
    chip = {"BULK_COPIES": 1, "MOVE_REGISTERS": 1, "LIFT_WEIGHTS": 0}
    given = {
        **of_llama,
        **chip,
        "N_COMPUTE_WARPS": 8,
        "DEADLINE_NS": "10000000000LL",
        "ATTENTION_PLAN_BYTES": 8,
        **values,
    }
    return "#pragma once\n" + "".join(f"#define {name} {value}\n" for name, value in given.items())


def words(*values: int | np.ndarray) -> ctypes.Array[ctypes.c_uint64]:
    """A kernel's struct of 8-byte words: an array as a pointer to it, an int as itself."""
    numbers = [value.ctypes.data if isinstance(value, np.ndarray) else value for value in values]
    made = (ctypes.c_uint64 * len(numbers))(*numbers)
    made.arrays = values  # type: ignore[attr-defined]  # kept while a kernel may follow the pointers
    return made


def headers_of(source: str, given: Mapping[str, str]) -> dict[str, str]:
    """What a source includes, and what that includes: from `given` first, else from the tape's folders and ours."""
    found: dict[str, str] = {}
    unread = [source]
    while unread:
        for name in _INCLUDE.findall(unread.pop()):
            if name in found:
                continue
            text = given.get(name)
            for folder in FOLDERS:
                if text is None and (folder / name).is_file():
                    text = (folder / name).read_text("utf-8")
            if text is not None:  # else the compiler says so, in its own words
                found[name] = text
                unread.append(text)
    return found


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled source; its kernels by name."""

    library: ctypes.CDLL

    def run(
        self,
        kernel: str,
        argument: Any,
        *,
        n_blocks: int = 1,
        shared_bytes: int = 0,
        seed: int = 0,
        limit_s: float = 60,
    ) -> None:
        """Run the whole grid; `argument` is the kernel's struct, as `words`, a ctypes.Structure or bytes.

        Raises DidNotEnd when no thread can go on, when `limit_s` has passed, or when the machine was misused.
        """
        if isinstance(argument, bytes | bytearray):
            argument = (ctypes.c_char * len(argument)).from_buffer_copy(argument)
        function = getattr(self.library, f"{kernel}_on_cpu")
        function.restype = ctypes.c_int
        _machine().emulator_limit(ctypes.c_double(limit_s))
        ended = function(ctypes.byref(argument), n_blocks, shared_bytes, ctypes.c_uint64(seed))
        if ended != 0:
            report = _machine().emulator_report().decode("utf-8", "replace")
            if ended == _RACED and all(map(self._reads_unused, report.strip().split("\n"))):
                return
            raise DidNotEnd(f"{kernel}, seed {seed}: {_ENDS.get(ended, ended)}: {self._with_lines(report)}")

    def _reads_unused(self, race: str) -> bool:
        found = _RACE.search(race)
        assert found is not None, race
        one, two = ("\n".join(_lines_of(self.library._name, code)) for code in found.groups())
        return any((a in one and b in two) or (b in one and a in two) for a, b in _UNUSED)

    def _with_lines(self, report: str) -> str:
        """Code that faulted or raced, by file and line, where there is a tool that knows."""
        codes = dict.fromkeys(re.findall(r"code \+(0x[0-9a-f]+)", report))
        return "\n".join([report, *(line for code in codes for line in _lines_of(self.library._name, code))])


@cache
def _lines_of(library: str, code: str) -> tuple[str, ...]:
    tool = shutil.which("addr2line")
    if tool is None:
        return ()
    asked = [tool, "-e", library, "-i", "-f", "-C", "-s", code]
    lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")
    return tuple(f"  {code} in {name} ({place})" for name, place in zip(lines[::2], lines[1::2], strict=False))


def compiled(
    source: str, name: str = "test.cpp", *, headers: Mapping[str, str] = _NONE, watched: bool = False
) -> Program:
    """A source that includes the tape's headers, for the CPU; `headers` are the generated ones, such as shape.h. A run
    of one that is `watched` does not end well if accesses of two threads are in no order.

    The test that asks is skipped where there is no compiler.
    """
    if "shape.h" not in headers:
        headers = {**headers, "shape.h": constants()}
    return _compiled(
        source, name, tuple(sorted(headers_of(source, headers).items())), WATCHED_FLAGS if watched else FLAGS
    )


@cache
def _machine() -> ctypes.CDLL:
    source = (HERE / "machine_cpu.cpp").read_text("utf-8")
    headers = headers_of(source, {"shape.h": constants()})
    path = build.shared_object(source, "machine_cpu.cpp", headers=headers, flags=MACHINE_FLAGS)
    library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    library.emulator_report.restype = ctypes.c_char_p
    return library


@cache
def _compiled(source: str, name: str, headers: tuple[tuple[str, str], ...], flags: tuple[str, ...]) -> Program:
    if not sys.platform.startswith("linux"):
        pytest.skip("the tape was not emulated: its fibers are made as Linux does")
    try:
        _machine()
        path = build.shared_object(source, name, headers=dict(headers), flags=flags)
    except HardwareCannot as error:
        pytest.skip(f"the tape was not emulated: {error}")
    return Program(ctypes.CDLL(str(path)))
