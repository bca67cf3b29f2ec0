"""Compiles at run time: CUDA by NVRTC, C++ by the machine's compiler; results are cached on disk.

The name of a cached file holds the hash of all its inputs and its own checksum, so that a change of source, option or
compiler misses the cache, and a damaged file is compiled again. A source that failed is not tried twice in a process
(E-7). Nothing here needs a GPU: a cubin is compiled outside of any context, and the backends load it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import MappingProxyType
from typing import Any, Final

from ostinato.errors import HardwareCannot, InternalError
from ostinato.extras import install_command
from ostinato.files import store

CXX_FLAGS: Final = ("-std=c++17", "-O2", "-Wall", "-Wextra")

_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_COMPILERS: Final = ("c++", "g++", "clang++")
_INSTALL: Final = "`apt install g++`, `dnf install gcc-c++`, `apk add g++`, or `xcode-select --install` on macOS"

# One lock per process: compilers take seconds and a core, and compiling the same source twice gains nothing.
_lock: Final = threading.Lock()
_cubins: Final[dict[str, bytes]] = {}
_failed: Final[dict[str, str]] = {}


class _Refused(Exception):
    """The compiler's log for a source that it refused."""


def cubin(
    source: str,
    name: str,
    *,
    arch: str,
    headers: Mapping[str, str] = _NONE,
    defines: Mapping[str, str | int] = _NONE,
    fused: bool = True,
) -> bytes:
    """CUDA source as a binary for `arch`, such as "sm_90"; `headers` are what it includes, by name. `fused`:
    the compiler may fuse a product and a sum into one rounding; otherwise only where the source says so.

    Raises InternalError with the compiler's log, the same each time, and HardwareCannot if there is no NVRTC.
    """
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{key}={value}" for key, value in defines.items())]
    options += [] if fused else ["--fmad=false"]
    key = _key("cubin", source, name, headers, options, _nvrtc_version())
    with _lock:
        if key not in _cubins:
            kept = _find(key, "cubin")
            if kept is not None:
                _cubins[key] = kept.read_bytes()
            else:
                _cubins[key] = _once(key, f"{name} for {arch}", lambda: _run_nvrtc(source, name, headers, options))
                with suppress(OSError):  # without a cache the next process only compiles again
                    _keep(_cubins[key], key, "cubin")
        return _cubins[key]


def shared_object(
    source: str,
    name: str,
    *,
    headers: Mapping[str, str] = _NONE,
    beside: Mapping[str, str] = _NONE,
    flags: Sequence[str] = CXX_FLAGS,
    before_compiling: Callable[[], None] = lambda: None,
) -> Path:
    """C++ source as a library to be opened with ctypes, by $CXX or the first of c++, g++ and clang++.

    `beside` are further translation units by name, compiled at the same time. `before_compiling` is called if
    nothing is cached and the caller must wait. Raises InternalError with the compiler's log, the same each time, and
    HardwareCannot if there is no compiler.
    """
    compiler = cxx()
    options = ["-shared", "-fPIC", *flags]
    key = _key("shared object", source, name, {**headers, **beside}, options, _cxx_version(compiler))
    with _lock:
        kept = _find(key, "so")
        if kept is not None:
            return kept
        what = f"{name} with {compiler}"
        if key not in _failed:
            before_compiling()
        binary = _once(key, what, lambda: _run_cxx(compiler, source, name, headers, options, beside))
        try:
            return _keep(binary, key, "so")
        except OSError as error:
            raise HardwareCannot(
                f"cannot keep the compiled {name} in {_folder()}: {error.strerror or error}; "
                "OSTINATO_HOME names another folder"
            ) from error


def cxx() -> str:
    """The machine's C++ compiler; raises HardwareCannot if there is none."""
    given = os.environ.get("CXX")
    for candidate in (given,) if given else _COMPILERS:
        if candidate and (found := shutil.which(candidate)):
            return found
    tried = f"$CXX is {given!r}, which is not there" if given else f"none of {', '.join(_COMPILERS)} is there"
    raise HardwareCannot(f"no C++ compiler: {tried}; install one ({_INSTALL}), or name yours in the variable CXX")


# --- once, and on disk ---


def _key(kind: str, source: str, name: str, headers: Mapping[str, str], options: Sequence[str], version: str) -> str:
    """The hash of all inputs of a compiled file."""
    pieces = [kind, version, name, source, *options, "", *(text for pair in sorted(headers.items()) for text in pair)]
    total = sha256()
    for piece in pieces:
        encoded = piece.encode()
        total.update(len(encoded).to_bytes(8, "little"))  # or "a" and "bc" would be "ab" and "c"
        total.update(encoded)
    return total.hexdigest()


def _once(key: str, what: str, compiled: Callable[[], bytes]) -> bytes:
    """Compile, unless it failed already: a broken source is refused at once, with the same message (E-7)."""
    if key not in _failed:
        try:
            return compiled()
        except _Refused as refused:
            _failed[key] = f"{what} does not compile:\n{refused}"
    raise InternalError(_failed[key])


def _folder() -> Path:
    return store.home() / "kernels"


def _find(key: str, suffix: str) -> Path | None:
    """The cached file, if it is undamaged."""
    for path in sorted(_folder().glob(f"{key}-*.{suffix}")):
        try:
            if path.stem.removeprefix(f"{key}-") == sha256(path.read_bytes()).hexdigest():
                return path
            path.unlink()
        except OSError:
            continue  # not readable, or just removed: treat as absent
    return None


def _keep(binary: bytes, key: str, suffix: str) -> Path:
    path = _folder() / f"{key}-{sha256(binary).hexdigest()}.{suffix}"
    store.write_whole(path, binary)
    return path


# --- the compilers ---


@cache
def _nvrtc_version() -> str:
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the bindings, or the library that they open at the first call
        raise HardwareCannot(
            f"kernels for NVIDIA GPUs are compiled by NVRTC, which is not installed ({error}); type: "
            f"{install_command('gpu')}"
        ) from error
    return f"nvrtc {major}.{minor}"


def _run_nvrtc(source: str, name: str, headers: Mapping[str, str], options: Sequence[str]) -> bytes:
    """Compile, in memory; raises _Refused with the log."""
    from cuda.bindings import nvrtc

    names = [header.encode() for header in headers]
    texts = [text.encode() for text in headers.values()]
    program = _asked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(names), texts, names))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_asked(nvrtc.nvrtcGetProgramLogSize(program)))
            _asked(nvrtc.nvrtcGetProgramLog(program, log))
            raise _Refused(log.rstrip(b"\0\n ").decode("utf-8", "replace") or result.name)
        binary = bytearray(_asked(nvrtc.nvrtcGetCUBINSize(program)))
        _asked(nvrtc.nvrtcGetCUBIN(program, binary))
        return bytes(binary)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _asked(answer: tuple[Any, ...]) -> Any:
    """The value of an NVRTC call; all return values begin with a status."""
    result, *values = answer
    if result.value != 0:
        raise InternalError(f"NVRTC failed: {result.name}")
    return values[0] if values else None


@cache
def _cxx_version(compiler: str) -> str:
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return f"{compiler}\n{said.stdout}"


def _run_cxx(
    compiler: str,
    source: str,
    name: str,
    headers: Mapping[str, str],
    options: Sequence[str],
    beside: Mapping[str, str] = _NONE,
) -> bytes:
    """Compile in a folder of its own, every translation unit at once, and link; raises _Refused with the log."""
    with tempfile.TemporaryDirectory(prefix="ostinato-") as given:
        folder = Path(given)
        for file, text in {**headers, **beside, name: source}.items():
            (folder / file).write_text(text, "utf-8")
        units = (name, *beside)
        _run_all([[compiler, *options, "-c", unit, "-o", f"{unit}.o"] for unit in units], folder)
        _run_all([[compiler, *options, *(f"{unit}.o" for unit in units), "-o", "made"]], folder)
        return (folder / "made").read_bytes()


def _run_all(commands: Sequence[Sequence[str]], folder: Path) -> None:
    """Run commands in parallel; raises _Refused with the output of the first that failed."""
    with ExitStack() as running:
        start = partial(subprocess.Popen, cwd=folder, stdout=DEVNULL, stderr=PIPE, text=True)
        started = [running.enter_context(start(command)) for command in commands]
        said = [one.communicate()[1] for one in started]
    for command, one, log in zip(commands, started, said, strict=True):
        if one.returncode != 0:
            raise _Refused(log.strip() or f"{' '.join(command)} ended with {one.returncode}")
