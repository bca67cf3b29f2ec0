"""The native CPU library: the object that runs the loop, from the wheel or compiled once, for this CPU's level.

`cpu_library` opens it, `why_no_native` says why it could not, and `native_status` reports both. A prebuilt object from
the wheel is used only if it was built from exactly the sources installed beside it; otherwise the machine's compiler
builds one, which is cached. If neither works, the engine runs `eager` where torch is installed, and reports that.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

from ostinato import build
from ostinato.backends.native import cpu_levels
from ostinato.backends.native.cpu_levels import Level
from ostinato.errors import HardwareCannot, InternalError, listing
from ostinato.extras import missing
from ostinato.files.objects import UNIT, prebuilt, sources, sum_of
from ostinato.loop.sources import FOLDER as LOOP_SOURCES
from ostinato.options import Talk
from ostinato.text.walk import FOLDER as WALK

# The backend's own sources, and the headers that all backends share.
FOLDERS: Final = (Path(__file__).parent / "src", LOOP_SOURCES, WALK)
BUILT: Final = Path(__file__).parent / "built"  # a wheel's objects
# What compiling takes on two cores at the first use of a checkout, for the message; zig makes its C++ library first.
COMPILE_S: Final = 6
ZIG_COMPILE_S: Final = 60


# Of this process: a library is opened once and never closed, and a level that failed stays so (E-7).
_lock: Final = threading.Lock()
_opened: Final[dict[tuple[str, str], tuple[ctypes.CDLL, str]]] = {}
_failed: Final[dict[tuple[str, str], str]] = {}


@dataclass(frozen=True, slots=True)
class NativeStatus:
    """What `doctor` reports: which level this CPU runs, where its object comes from, and why there is none."""

    level: str
    words: str  # the level for people
    origin: str | None  # "of the wheel", "compiled" or "compiled at first use, and kept"; None where there is none
    why_not: str | None
    note: str | None  # why the wheel's object is not used, where it has one

    @property
    def line(self) -> str:
        if self.why_not is not None:
            slower = "" if missing("torch") else "; eager, which runs instead, is many times slower"
            return f"no native loop on this CPU: {self.why_not}{slower}"
        noted = f" ({self.note})" if self.note else ""
        return f"native loop for {self.words} (level {self.level}), {self.origin}{noted}"


def cpu_library(talk: Talk | None = None, *, level: Level | None = None) -> ctypes.CDLL:
    """The object for this CPU, opened; the same each time. `talk` gets a message if it must be compiled first. `level`:
    another one than this CPU's best.

    OSTINATO_CPU_LEVEL forces a level: amx, v4, v3 or v2, i8mm, dotprod or neon, or plain. OSTINATO_CPU_FLAGS adds
    flags of the compiler, and then the wheel's objects are left aside. Raises HardwareCannot with the reason where
    there is no object to be had.
    """
    level, extra = level or chosen_level(), _extra_flags()
    key = level.name, " ".join(extra)
    with _lock:
        if key not in _opened and key not in _failed:
            try:
                _opened[key] = _open(level, extra, talk)
            except HardwareCannot as error:
                _failed[key] = str(error)
        if key in _failed:
            raise HardwareCannot(_failed[key])
        return _opened[key][0]


def source(name: str) -> str:
    """A source or header of the library, by its file name."""
    return sources(*FOLDERS)[name]


def compile_object(talk: Talk | None = None) -> Path:
    """Compile what `cpu_library` would compile here, unless it is kept already, and open nothing: its path."""
    return _compiled(chosen_level(), _extra_flags(), talk)


def why_no_native() -> str | None:
    """Why `cpu_library` cannot give an object here; None where it has one, or a compiler to make it with."""
    return native_status().why_not


def native_status() -> NativeStatus:
    """What is to be had, found out without compiling anything."""
    try:
        level = chosen_level()
    except HardwareCannot as error:
        return NativeStatus("none", "", None, str(error), None)
    extra = _extra_flags()
    key = level.name, " ".join(extra)
    origin, why_not, note = None, _failed.get(key), None
    if key in _opened:
        origin = _opened[key][1]
    elif why_not is None:
        found, note = (None, None) if extra else wheel_object(level)
        if found is not None:
            origin = "of the wheel"
        else:
            try:
                build.cxx()
                origin = "compiled at first use, and kept"
            except HardwareCannot as error:
                why_not = f"{note or 'no prebuilt object is installed'}, and {error}"
    return NativeStatus(level.name, level.words, origin, why_not, note)


def compiler_of_object() -> str | None:
    """The compiler that made this CPU's object, as the object says it; None while there is no object."""
    try:
        level, extra = chosen_level(), _extra_flags()
        key = level.name, " ".join(extra)
        if key in _opened:
            return _said_compiler(_opened[key][0])
        found = None if extra else wheel_object(level)[0]
        found = found or build.kept_object(**_inputs(FOLDERS, level, extra))
        return _said_compiler(ctypes.CDLL(str(found))) if found else None
    except (HardwareCannot, OSError):  # `native_status` says why
        return None


def _said_compiler(library: ctypes.CDLL) -> str:
    library.ostinato_compiler.restype = ctypes.c_char_p
    said: bytes = library.ostinato_compiler()
    return said.decode().strip()


def chosen_level() -> Level:
    """The level that OSTINATO_CPU_LEVEL names, if this CPU has it, or the best it has."""
    found, machine = cpu_levels.features(), cpu_levels.architecture()
    name = os.environ.get("OSTINATO_CPU_LEVEL")
    if not name:
        return cpu_levels.best_level(found, machine)
    known = {level.name: level for level in cpu_levels.levels_of(machine)}
    if name not in known:
        raise HardwareCannot(f"OSTINATO_CPU_LEVEL is {name!r}; levels of this CPU are {listing(name, known)}")
    level = known[name]
    if missing := level.needs - found:
        raise HardwareCannot(f"OSTINATO_CPU_LEVEL is {name}, and this CPU lacks {', '.join(sorted(missing))}")
    return level


def plainest_library() -> tuple[Level, ctypes.CDLL]:
    """The plainest object that can be had here, and its level: plain C++ where there is a compiler, else a wheel's."""
    here, why = cpu_levels.features(), list[str]()
    for level in reversed(cpu_levels.levels_of(cpu_levels.architecture())):
        if level.needs <= here:
            try:
                return level, cpu_library(level=level)
            except HardwareCannot as error:
                why.append(str(error))
    raise HardwareCannot(why[0])


def wheel_object(level: Level) -> tuple[Path | None, str | None]:
    """The wheel's object of this level, if it is whole and made from these sources; else why not, if there is one."""
    return prebuilt(BUILT / f"{level.name}.so", sum_of(sources(*FOLDERS), level.flags))


def _extra_flags() -> tuple[str, ...]:
    return tuple(os.environ.get("OSTINATO_CPU_FLAGS", "").split())


def _open(level: Level, extra: tuple[str, ...], talk: Talk | None) -> tuple[ctypes.CDLL, str]:
    found, note = (None, None) if extra else wheel_object(level)
    if found is not None:
        try:
            return ctypes.CDLL(str(found)), "of the wheel"
        except OSError as error:  # made for a newer system than this
            note = f"the prebuilt object {found.name} cannot be opened: {error}"
    try:
        path = _compiled(level, extra, talk)
    except HardwareCannot as error:
        raise HardwareCannot(f"{note or 'no prebuilt object is installed'}, and {error}") from error
    except InternalError as error:  # a compiler that is older than, or different from, those tested
        lines = str(error).splitlines()
        wrong = next((line for line in lines[1:] if "error" in line), lines[-1])  # of a log that may be long
        raise HardwareCannot(f"the native CPU loop cannot be compiled here: {lines[0]} {wrong.strip()}") from error
    try:
        return ctypes.CDLL(str(path)), "compiled"
    except OSError as error:
        raise HardwareCannot(f"the compiled CPU loop cannot be opened: {error}") from error


def _compiled(level: Level, extra: tuple[str, ...], talk: Talk | None) -> Path:
    said: Talk = talk or (lambda _: None)

    def report(compiler: build.Cxx) -> None:
        said(f"compiling the CPU loop, once: about {ZIG_COMPILE_S if compiler.is_zig else COMPILE_S} s")

    return build.shared_object(**_inputs(FOLDERS, level, extra), before_compiling=report, talk=said)


class _Inputs(TypedDict):
    """What an object is compiled from, as `build` takes it."""

    source: str
    name: str
    headers: dict[str, str]
    beside: dict[str, str]
    flags: Sequence[str]
    zig_flags: Sequence[str]


def _inputs(folders: Sequence[Path], level: Level, extra: Sequence[str]) -> _Inputs:
    texts = sources(*folders)
    source = texts.pop(cpu_levels.SOURCE)
    units = {name: text for name, text in texts.items() if name.endswith(UNIT)}
    headers = {name: text for name, text in texts.items() if name not in units}
    flags, zig_flags = (*level.flags, *extra), (*level.zig_flags, *extra)
    return _Inputs(
        source=source, name=cpu_levels.SOURCE, headers=headers, beside=units, flags=flags, zig_flags=zig_flags
    )


def compile_sources(folders: Sequence[Path], level: Level, *extra: str) -> Path:
    """The sources of some folders compiled for a level with some flags more, unless that is kept already; its path."""
    return build.shared_object(**_inputs(folders, level, extra))
