"""The C compiler of Triton's launcher, which Triton compiles once, at the first launch, and then keeps.

Triton takes $CC, gcc or clang. Where there is none of them, it gets the compiler of the package ziglang; without that
there is a sentence before weights are read, instead of Triton's error after it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from ostinato.build import zig_command, zig_environment
from ostinato.errors import HardwareCannot

_FLAGS = ("-O3", "-shared", "-fPIC", "-Wno-psabi")  # as Triton compiles it


def prepare_launcher() -> None:
    """See to it that Triton can compile its launcher; HardwareCannot, with what to install, where it cannot."""
    if (why := why_no_launcher()) is not None:
        if not _is_compiled():
            raise HardwareCannot(why)
    elif not _triton_finds_one():
        from triton import knobs

        knobs.build.impl = compile_with_zig


def why_no_launcher() -> str | None:
    """Why Triton could not compile its launcher here; None where it could."""
    what = "Triton compiles its launcher with a C compiler at the first use of a GPU"
    given = os.environ.get("CC")
    if given and shutil.which(given) is None:
        return f"{what}, and $CC is {given!r}, which is not there; unset it, or name another in it"
    if not _triton_finds_one() and zig_command("cc") is None:
        return (
            f"{what}, and there is none; install one (`{sys.executable} -m pip install ziglang`, `apt install gcc`, "
            "`dnf install gcc`), or name yours in the variable CC"
        )
    folder = _python_headers()
    if not (folder / "Python.h").is_file():
        return (
            f"{what}, and Python's headers are not at {folder}; install them (`apt install python3-dev`, `dnf install "
            "python3-devel`), or use a Python that has them"
        )
    return None


def compile_with_zig(
    name: str,
    source: str,
    folder: str,
    library_folders: Sequence[str],
    include_folders: Sequence[str],
    libraries: Sequence[str],
    *_: object,
) -> str:
    """Compile a C source of Triton's to an extension module in `folder`; the path of it."""
    from triton.runtime.build import _library_flag

    command = zig_command("cc")
    assert command is not None
    made = os.path.join(folder, f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}")
    include = [*include_folders, folder, str(_python_headers())]
    paths = [*(f"-L{one}" for one in library_folders), *(f"-I{one}" for one in include)]
    wanted = [*command, source, *_FLAGS, "-o", made, *map(_library_flag, libraries), *paths]
    subprocess.run(wanted, check=True, stdout=subprocess.DEVNULL, env=zig_environment(Path(folder)))
    return made


def _triton_finds_one() -> bool:
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


def _python_headers() -> Path:
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])  # Debian's own


def _is_compiled() -> bool:
    """Whether Triton has kept a launcher, of this version most likely: then it needs no compiler."""
    from triton import knobs

    name = f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"
    return any(Path(knobs.cache.dir).glob(f"*/{name}"))
