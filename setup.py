"""The wheel's one build step: the native CPU loop, compiled for the levels of CPU that a wheel carries, and the
compiler of grammars.

All else is in pyproject.toml. With the package ziglang beside setuptools, objects need nothing newer than glibc 2.28,
and OSTINATO_WHEEL_ARCH may name another architecture: `make wheel` builds both so. Otherwise the machine's compiler
makes them for this machine. Where there is no compiler, on other machines than Linux on x86-64 or AArch64, and for an
editable install there is nothing to do: the package then compiles the loop at first use.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PACKAGE = Path(__file__).parent / "src" / "ostinato"
NATIVE = PACKAGE / "backends" / "native"
TEXT = PACKAGE / "text"
WALK = TEXT / "walk"  # headers that the compiler of grammars and the loops share
FOLDERS = NATIVE / "src", PACKAGE / "loop", WALK  # the second for the headers that all backends share
GLIBC = 2, 28


def module_of(path: Path) -> ModuleType:
    """A module by its path: the package itself needs more than a build has."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


LEVELS, OBJECTS = module_of(NATIVE / "cpu_levels.py"), module_of(PACKAGE / "files" / "objects.py")
ARCHITECTURE = os.environ.get("OSTINATO_WHEEL_ARCH") or LEVELS.architecture()


@dataclass(frozen=True)
class Compiler:
    """The C++ compiler of the objects."""

    command: list[str]
    is_zig: bool

    def flags(self, level) -> list[str]:  # type: ignore[no-untyped-def]  # a Level of a module that is loaded by its path
        if not self.is_zig:
            return list(level.flags)
        return [*level.zig_flags, "-target", f"{ARCHITECTURE}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"]

    def link_flags(self, level) -> list[str]:  # type: ignore[no-untyped-def]
        # The C++ library goes in: a wheel must not need the one of the machine that built it. zig has no other way, and
        # compiles that library once for each CPU, so one CPU serves all levels.
        if self.is_zig:
            return [*(flag for flag in self.flags(level) if not flag.startswith("-mcpu=")), "-mcpu=baseline"]
        return [*self.flags(level), "-static-libstdc++", "-static-libgcc"]


def compiler() -> Compiler | None:
    """The compiler of the objects; None if the wheel is to carry none."""
    if os.environ.get("OSTINATO_WHEEL_OBJECTS") == "0":
        return None
    if ARCHITECTURE not in LEVELS.IN_WHEELS:
        if "OSTINATO_WHEEL_ARCH" in os.environ:
            sys.exit(f"OSTINATO_WHEEL_ARCH is {ARCHITECTURE!r}; wheels are for {', '.join(LEVELS.IN_WHEELS)}")
        return None
    if not (sys.platform.startswith("linux") or "OSTINATO_WHEEL_ARCH" in os.environ):
        return None  # compiled at first use
    given, package = os.environ.get("CXX"), importlib.util.find_spec("ziglang")
    if not given and package is not None and package.submodule_search_locations:
        return Compiler([str(Path(package.submodule_search_locations[0]) / "zig"), "c++"], is_zig=True)
    if LEVELS.architecture() != ARCHITECTURE:
        sys.exit(f"a wheel for {ARCHITECTURE} is compiled by zig: unset CXX, and pip install ziglang")
    found = next(filter(None, map(shutil.which, (given,) if given else ("c++", "g++", "clang++"))), None)
    return Compiler([found], is_zig=False) if found else None


class BuildWithObjects(build_py):
    """Packs the package, then puts an object for each level beside the sources, with the sum of what made it."""

    def run(self) -> None:
        super().run()
        found = compiler()
        if self.editable_mode or found is None:
            return
        package = Path(self.build_lib) / "ostinato"
        native, text = package / "backends" / "native" / "built", package / "text" / "built"
        for folder in (native, text):
            shutil.rmtree(folder, ignore_errors=True)  # of another architecture
            folder.mkdir(parents=True)
        for level in LEVELS.IN_WHEELS[ARCHITECTURE]:
            self.make(found, level, native / f"{level.name}.so", FOLDERS, level.flags)
        plainest = LEVELS.IN_WHEELS[ARCHITECTURE][-1]  # grammars are compiled by integers and branches alone
        self.make(found, plainest, text / "automaton.so", (TEXT / "src", WALK), ())

    def make(  # type: ignore[no-untyped-def]  # a Level of a module that is loaded by its path
        self, found: Compiler, level, made: Path, folders: tuple[Path, ...], flags: tuple[str, ...]
    ) -> None:
        """One object, and beside it what it was made from; `flags` are those that its results depend on."""
        with tempfile.TemporaryDirectory() as objects:
            units = []
            for unit in sorted(folders[0].glob(f"*{OBJECTS.UNIT}")):
                units.append(f"{objects}/{unit.stem}.o")
                options = ["-fPIC", *found.flags(level), *(f"-I{folder}" for folder in folders[1:])]
                subprocess.run([*found.command, *options, "-c", str(unit), "-o", units[-1]], check=True)
            options = ["-shared", "-fPIC", *found.link_flags(level), "-Wl,--strip-all"]
            subprocess.run([*found.command, *options, *units, "-o", str(made)], check=True)
        OBJECTS.write_sums(made, OBJECTS.sum_of(OBJECTS.sources(*folders), flags))


class Wheel(bdist_wheel):
    """Any Python 3, for the platform if there are objects: they know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        found = compiler()
        if found is not None and found.is_zig:
            platform = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{ARCHITECTURE}"
        return "py3", "none", platform


class Package(Distribution):
    """Not the same on every platform where objects are in it."""

    def has_ext_modules(self) -> bool:
        return compiler() is not None


setup(distclass=Package, cmdclass={"build_py": BuildWithObjects, "bdist_wheel": Wheel})
