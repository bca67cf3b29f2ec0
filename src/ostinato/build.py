"""Compiles at run time: CUDA by NVRTC, C++ by the machine's compiler or by zig; results are cached on disk.

The name of a cached file holds the hash of all its inputs and its own checksum, so that a change of source, option or
compiler misses the cache, and a damaged file is compiled again. A source that failed is not tried twice in a process
(E-7). Nothing here needs a GPU: a cubin is compiled outside of any context, and the backends load it.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import MappingProxyType
from typing import Any, Final

from ostinato.errors import HardwareCannot, InternalError
from ostinato.extras import gpu_install_command, install_command
from ostinato.files import store

COMPILE_LOCK_S: Final = 300.0  # zig needs a minute on two cores
CXX_FLAGS: Final = ("-std=c++17", "-O2", "-Wall", "-Wextra")

_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_COMPILERS: Final = ("c++", "g++", "clang++")
_INSTALL: Final = (
    f"`{sys.executable} -m pip install ziglang`, `apt install g++`, `dnf install gcc-c++`, `apk add g++`, "
    "or `xcode-select --install` on macOS"
)

# One lock per process: compilers take seconds and a core, and compiling the same source twice gains nothing.
_lock: Final = threading.Lock()
_cubins: Final[dict[str, bytes]] = {}
_failed: Final[dict[str, str]] = {}
_temporary: Final[dict[str, Path]] = {}  # objects that could not be cached, by their key; removed when the process ends


@dataclass(frozen=True, slots=True)
class Cxx:
    """A C++ compiler: the command that runs it, and whether that is zig, which has names of its own for processors."""

    command: tuple[str, ...]
    is_zig: bool = False

    @property
    def name(self) -> str:
        return " ".join(self.command)


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
    as_ptx: bool = False,
) -> bytes:
    """CUDA source as a binary for `arch`, such as "sm_90"; `headers` are what it includes, by name. `fused`:
    the compiler may fuse a product and a sum into one rounding; otherwise only where the source says so. `as_ptx`: as
    PTX instead, which the driver loads as it does a binary, and assembles for whatever GPU is there.

    Raises InternalError with the compiler's log, the same each time, and HardwareCannot if there is no NVRTC.
    """
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{key}={value}" for key, value in defines.items())]
    options += [] if fused else ["--fmad=false"]
    kind = "ptx" if as_ptx else "cubin"
    key = _key(kind, source, name, headers, options, _nvrtc_version())
    with _lock:
        if key not in _cubins:
            kept = _find(key, kind)
            if kept is not None:
                _cubins[key] = kept.read_bytes()
            else:
                compiled = partial(_run_nvrtc, source, name, headers, options, as_ptx)
                _cubins[key] = _once(key, f"{name} for {arch}", compiled)
                with suppress(OSError):  # without a cache the next process only compiles again
                    _keep(_cubins[key], key, kind)
        return _cubins[key]


def shared_object(
    source: str,
    name: str,
    *,
    headers: Mapping[str, str] = _NONE,
    beside: Mapping[str, str] = _NONE,
    flags: Sequence[str] = CXX_FLAGS,
    zig_flags: Sequence[str] | None = None,
    before_compiling: Callable[[Cxx], None] = lambda _: None,
    talk: Callable[[str], None] = lambda _: None,
) -> Path:
    """C++ source as a library to be opened with ctypes, by $CXX, the first of c++, g++ and clang++, or zig.

    `beside` are further translation units by name, compiled at the same time; `zig_flags` are for zig, where it needs
    others. `before_compiling` is called if nothing is cached and the caller must wait. Of several processes one
    compiles, and `talk` tells the others that they wait. Where the cache cannot be written, `talk` gets a sentence, and
    the library lasts as long as this process. Raises InternalError with the compiler's log, the same each time, and
    HardwareCannot if there is no compiler.
    """
    compiler = cxx()
    options = _options(compiler, flags, zig_flags)
    key = _object_key(compiler, source, name, headers, beside, options)
    with _lock:
        kept = _find(key, "so") or _temporary.get(key)
        if kept is not None:
            return kept
        with _one_process(key, lambda: talk(f"waiting for another process that compiles {name}")):
            if (kept := _find(key, "so")) is not None:
                return kept
            what = f"{name} with {compiler.name}"
            if key not in _failed:
                before_compiling(compiler)
            binary = _once(key, what, lambda: _run_cxx(compiler, source, name, headers, options, beside))
            try:
                return _keep(binary, key, "so")
            except OSError as error:
                talk(
                    f"the compiled {name} cannot be kept in {_folder()} ({error.strerror or error}), so every start "
                    "compiles it again; set OSTINATO_HOME to another folder"
                )
                return _keep_for_now(binary, key, name)


def kept_object(
    source: str,
    name: str,
    *,
    headers: Mapping[str, str] = _NONE,
    beside: Mapping[str, str] = _NONE,
    flags: Sequence[str] = CXX_FLAGS,
    zig_flags: Sequence[str] | None = None,
) -> Path | None:
    """What `shared_object` would return without compiling, if it is cached; raises HardwareCannot as that does."""
    compiler = cxx()
    options = _options(compiler, flags, zig_flags)
    key = _object_key(compiler, source, name, headers, beside, options)
    return _find(key, "so") or _temporary.get(key)


def cxx() -> Cxx:
    """The C++ compiler: $CXX, the machine's, or that of the package ziglang; raises HardwareCannot if there is none."""
    given = os.environ.get("CXX")
    for candidate in (given,) if given else _COMPILERS:
        if candidate and (found := shutil.which(candidate)):
            return Cxx((found,))
    if given:
        raise HardwareCannot(f"no C++ compiler: $CXX is {given!r}, which is not there; unset it, or name another in it")
    if zig := zig_command("c++"):
        return Cxx(zig, is_zig=True)
    tried = f"none of {', '.join(_COMPILERS)} is there, nor the package ziglang"
    raise HardwareCannot(f"no C++ compiler: {tried}; install one ({_INSTALL}), or name yours in the variable CXX")


def zig_command(language: str) -> tuple[str, ...] | None:
    """The compiler of the package ziglang for `cc` or `c++`; None where that is not installed."""
    package = importlib.util.find_spec("ziglang")
    for folder in package.submodule_search_locations or () if package else ():
        if found := shutil.which("zig", path=folder):
            return found, language
    return None


def zig_environment(folder: Path) -> dict[str, str]:
    """This process's variables, and where zig keeps what it compiles for itself (`folder` is a temporary one)."""
    return {**_zig_caches(folder), **os.environ}


def _options(compiler: Cxx, flags: Sequence[str], zig_flags: Sequence[str] | None) -> list[str]:
    chosen = zig_flags if compiler.is_zig and zig_flags is not None else flags
    return ["-shared", "-fPIC", *chosen]


def _object_key(
    compiler: Cxx,
    source: str,
    name: str,
    headers: Mapping[str, str],
    beside: Mapping[str, str],
    options: Sequence[str],
) -> str:
    return _key("shared object", source, name, {**headers, **beside}, options, _cxx_version(compiler))


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


@contextmanager
def _one_process(key: str, waiting: Callable[[], None]) -> Iterator[None]:
    """One process compiles a source while others wait for its result. The lock ends with its process; where there can
    be none, and after COMPILE_LOCK_S, each process compiles for itself."""
    from filelock import FileLock, Timeout

    lock = FileLock(store.home() / "locks" / f"compile-{key[:16]}.lock")
    with suppress(OSError, NotImplementedError):  # a folder that cannot be written, a deadline, a system without locks
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting()
            lock.acquire(timeout=COMPILE_LOCK_S)
    try:
        yield
    finally:
        lock.release()


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


def _keep_for_now(binary: bytes, key: str, name: str) -> Path:
    """In a temporary folder, which this process removes when it ends."""
    folder = _temporary_folder()
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    path = _temporary[key] = Path(folder) / f"{name}.so"
    path.write_bytes(binary)
    return path


def _temporary_folder() -> str:
    try:
        return tempfile.mkdtemp(prefix="ostinato-")
    except OSError as error:
        raise HardwareCannot(f"nothing can be compiled: {error.strerror or error}; TMPDIR names a folder") from error


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


def _run_nvrtc(source: str, name: str, headers: Mapping[str, str], options: Sequence[str], as_ptx: bool) -> bytes:
    """Compile, in memory; raises _Refused with the log."""
    from cuda.bindings import nvrtc

    _check_known(options)
    names = [header.encode() for header in headers]
    texts = [text.encode() for text in headers.values()]
    program = _asked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(names), texts, names))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_asked(nvrtc.nvrtcGetProgramLogSize(program)))
            _asked(nvrtc.nvrtcGetProgramLog(program, log))
            raise _Refused(log.rstrip(b"\0\n ").decode("utf-8", "replace") or result.name)
        size_of, get = (
            (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX) if as_ptx else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        )
        binary = bytearray(_asked(size_of(program)))
        _asked(get(program, binary))
        return bytes(binary)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _check_known(options: Sequence[str]) -> None:
    """Refuse a chip that is newer than this NVRTC."""
    from cuda.bindings import nvrtc

    arch = next(option.partition("=")[2] for option in options if option.startswith("--gpu-architecture="))
    known = _asked(nvrtc.nvrtcGetSupportedArchs())
    if int(re.sub(r"\D", "", arch)) not in known:
        raise HardwareCannot(
            f"{_nvrtc_version()} knows no {arch}, which this GPU needs: install torch for a newer CUDA, which brings "
            f"its own: {gpu_install_command()}"
        )


def _asked(answer: tuple[Any, ...]) -> Any:
    """The value of an NVRTC call; all return values begin with a status."""
    result, *values = answer
    if result.value != 0:
        raise InternalError(f"NVRTC failed: {result.name}")
    return values[0] if values else None


@cache
def _cxx_version(compiler: Cxx) -> str:
    said = subprocess.run([*compiler.command, "--version"], capture_output=True, text=True, check=False)
    return f"{compiler.name}\n{said.stdout}"


def _run_cxx(
    compiler: Cxx,
    source: str,
    name: str,
    headers: Mapping[str, str],
    options: Sequence[str],
    beside: Mapping[str, str] = _NONE,
) -> bytes:
    """Compile in a folder of its own, every translation unit at once, and link; raises _Refused with the log."""
    folder = Path(_temporary_folder())
    try:
        for file, text in {**headers, **beside, name: source}.items():
            (folder / file).write_text(text, "utf-8")
        units = (name, *beside)
        _run_all(
            [[*compiler.command, *options, "-c", unit, "-o", f"{unit}.o"] for unit in units], folder, compiler.is_zig
        )
        linked = [*compiler.command, *(_for_linking(options) if compiler.is_zig else options)]
        _run_all([[*linked, *(f"{unit}.o" for unit in units), "-o", "made"]], folder, compiler.is_zig)
        return (folder / "made").read_bytes()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _zig_caches(folder: Path) -> dict[str, str]:
    """Where zig keeps the C++ library that it compiles for itself, 65 MB: with the objects, or in `folder` where that
    cannot be."""
    kept = _folder() / "zig"
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError:
        kept = folder / "zig"
    return {"ZIG_GLOBAL_CACHE_DIR": str(kept), "ZIG_LOCAL_CACHE_DIR": str(folder / "zig")}


def _for_linking(options: Sequence[str]) -> list[str]:
    """zig compiles its C++ library when it links, once for each processor: one serves all levels."""
    return [*(option for option in options if not option.startswith("-mcpu=")), "-mcpu=baseline"]


def _run_all(commands: Sequence[Sequence[str]], folder: Path, is_zig: bool) -> None:
    """Run commands in parallel; raises _Refused with the output of the first that failed."""
    with ExitStack() as running:
        environment = zig_environment(folder) if is_zig else dict(os.environ)
        start = partial(subprocess.Popen, cwd=folder, stdout=DEVNULL, stderr=PIPE, text=True, env=environment)
        started = [running.enter_context(start(command)) for command in commands]
        said = [one.communicate()[1] for one in started]
    for command, one, log in zip(commands, started, said, strict=True):
        if one.returncode != 0:
            raise _Refused(log.strip() or f"{' '.join(command)} ended with {one.returncode}")
