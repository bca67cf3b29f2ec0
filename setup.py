"""The wheel's one build step: the native CPU loop, compiled for the levels of CPU that a wheel carries.

All else is in pyproject.toml. Where there is no compiler, on other machines than Linux on x86-64, and for an editable
install there is nothing to do: the package then compiles the loop at first use, or runs without it.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PACKAGE = Path(__file__).parent / "src" / "ostinato"
NATIVE = PACKAGE / "backends" / "native"
FOLDERS = NATIVE / "src", PACKAGE / "loop"  # the second for the headers that all backends share


def cpu_levels() -> ModuleType:
    """`backends/native/cpu_levels.py` by its path: the package itself needs more than a build has."""
    spec = importlib.util.spec_from_file_location("cpu_levels", NATIVE / "cpu_levels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cpu_levels"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def compiler() -> str | None:
    """The C++ compiler of this machine, if the wheel is to carry objects."""
    if os.environ.get("OSTINATO_WHEEL_OBJECTS") == "0":
        return None
    if not (sys.platform.startswith("linux") and cpu_levels().is_x86()):
        return None
    given = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, (given,) if given else ("c++", "g++", "clang++"))), None)


class BuildWithObjects(build_py):
    """Packs the package, then puts an object for each level beside the sources, with the sum of what made it."""

    def run(self) -> None:
        super().run()
        found = compiler()
        if self.editable_mode or found is None:
            return
        levels = cpu_levels()
        folder = Path(self.build_lib) / "ostinato" / "backends" / "native" / "built"
        folder.mkdir(parents=True, exist_ok=True)
        units = sorted(FOLDERS[0].glob(f"*{levels.UNIT}"))
        for level in levels.IN_WHEELS:
            made = folder / f"{level.name}.so"
            # The C++ library goes in: a wheel must not need the one of the machine that built it.
            linked = ("-static-libstdc++", "-static-libgcc", "-Wl,--strip-all")
            subprocess.run(
                [found, "-shared", "-fPIC", *level.flags, f"-I{FOLDERS[1]}", *linked, *units, "-o", made], check=True
            )
            sums = levels.sum_of(levels.sources(*FOLDERS), level.flags), sha256(made.read_bytes()).hexdigest()
            (folder / f"{level.name}.sum").write_text("\n".join(sums) + "\n", "utf-8")


class Wheel(bdist_wheel):
    """Any Python 3, for the platform if there are objects: they know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class Package(Distribution):
    """Not the same on every platform where objects are in it."""

    def has_ext_modules(self) -> bool:
        return compiler() is not None


setup(distclass=Package, cmdclass={"build_py": BuildWithObjects, "bdist_wheel": Wheel})
