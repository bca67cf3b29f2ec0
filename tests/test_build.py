"""Compiling at run time: once for each source, kept whole on disk, and a broken source is tried once."""

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from ostinato import build
from ostinato.backends.cuda.start import source
from ostinato.errors import HardwareCannot, InternalError
from ostinato.loop.layout import Layout
from ostinato.loop.step_boundary import native_headers

KERNEL = '#include "two.h"\nextern "C" __global__ void add(int* x) { x[0] += TWO + MORE; }\n'
HEADERS = {"two.h": "#define TWO 2\n"}
LIBRARY = '#include "two.h"\nextern "C" int two() { return TWO; }\n'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has compiled nothing."""
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    forget()
    return tmp_path


@pytest.fixture(autouse=True, scope="module")
def _leave_nothing() -> Iterator[None]:
    yield
    forget()


def forget() -> None:
    """Be like a new process."""
    build._cubins.clear()
    build._failed.clear()
    build._temporary.clear()


def counted(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what goes to a compiler from here on."""
    names: list[str] = []
    run: Callable[..., bytes] = getattr(build, name)
    place = 1 if name == "_run_cxx" else 0

    def listed(*args: Any) -> bytes:
        names.append(args[place + 1])
        return run(*args)

    monkeypatch.setattr(build, name, listed)
    return names


@pytest.fixture
def by_nvrtc(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    try:
        build._nvrtc_version()
    except HardwareCannot as error:
        pytest.skip(f"nothing was compiled for CUDA: {error}")
    return counted("_run_nvrtc", monkeypatch)


@pytest.fixture
def by_cxx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    try:
        build.cxx()
    except HardwareCannot as error:
        pytest.skip(f"nothing was compiled for the CPU: {error}")
    return counted("_run_cxx", monkeypatch)


def add(more: int = 1, arch: str = "sm_90", source: str = KERNEL) -> bytes:
    return build.cubin(source, "add.cu", arch=arch, headers=HEADERS, defines={"MORE": more})


# --- CUDA ---


@pytest.mark.slow
def test_the_boundary_compiles_for_hopper_without_a_gpu(by_nvrtc: list[str]) -> None:
    headers = native_headers(Layout(n_slots=8, max_pages=512, vocab=49_152), page_tokens=16)
    binary = build.cubin(source("step_boundary.cu"), "step_boundary.cu", arch="sm_90", headers=headers)
    assert binary[:4] == b"\x7fELF"
    assert b".text.step_boundary\0" in binary
    assert b".text.boundary_loop\0" in binary


def test_a_kernel_is_compiled_once_and_a_second_process_compiles_nothing(by_nvrtc: list[str], home: Path) -> None:
    """E-8."""
    first = add()
    assert add() == first
    forget()
    assert add() == first
    assert by_nvrtc == ["add.cu"]
    assert len(list((home / "kernels").iterdir())) == 1


def test_source_headers_options_and_arch_each_make_another_kernel(by_nvrtc: list[str]) -> None:
    add()
    add(more=2)
    add(arch="sm_80")
    add(source=KERNEL + "\n")
    build.cubin(KERNEL, "add.cu", arch="sm_90", headers={"two.h": "#define TWO 3\n"}, defines={"MORE": 1})
    assert len(by_nvrtc) == 5


def test_ptx_is_kept_beside_the_binary_and_ends_as_the_driver_needs_it(by_nvrtc: list[str]) -> None:
    binary = add(arch="sm_80")
    text = build.cubin(KERNEL, "add.cu", arch="sm_80", headers=HEADERS, defines={"MORE": 1}, as_ptx=True)
    assert b".target sm_80" in text
    assert text.endswith(b"\0")
    assert binary[:4] == b"\x7fELF"
    forget()
    assert build.cubin(KERNEL, "add.cu", arch="sm_80", headers=HEADERS, defines={"MORE": 1}, as_ptx=True) == text
    assert len(by_nvrtc) == 2


def test_another_compiler_makes_its_own(by_nvrtc: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    add()
    forget()
    monkeypatch.setattr(build, "_nvrtc_version", lambda: "nvrtc 99.0")
    add()
    assert len(by_nvrtc) == 2


def test_a_broken_kernel_is_tried_once_and_says_the_same_both_times(by_nvrtc: list[str], home: Path) -> None:
    """E-7."""
    said = []
    for _ in range(2):
        with pytest.raises(InternalError, match=r"add\.cu for sm_90 does not compile") as caught:
            add(source='extern "C" __global__ void add() { nonsense; }')
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert 'identifier "nonsense" is undefined' in said[0]
    assert by_nvrtc == ["add.cu"]
    assert not (home / "kernels").exists()
    assert add()[:4] == b"\x7fELF", "and the compiler is as well as before"


@pytest.mark.parametrize("damage", [b"", b"\x7fELF and then nonsense"])
def test_a_damaged_file_is_compiled_again(by_nvrtc: list[str], home: Path, damage: bytes) -> None:
    first = add()
    (kept,) = (home / "kernels").iterdir()
    kept.write_bytes(damage)
    forget()
    assert add() == first
    assert len(by_nvrtc) == 2
    assert [path.read_bytes() for path in (home / "kernels").iterdir()] == [first]


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(by_nvrtc: list[str], home: Path) -> None:
    (home / "kernels").write_text("a file where the folder should be")
    assert add() == add()
    assert len(by_nvrtc) == 1


def test_without_nvrtc_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    build._nvrtc_version.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(HardwareCannot, match=r"type: .*\[gpu\]'"):
        add()
    build._nvrtc_version.cache_clear()


# --- C++ ---


def test_a_library_is_compiled_once_and_can_be_called(by_cxx: list[str]) -> None:
    path = build.shared_object(LIBRARY, "two.cpp", headers=HEADERS)
    assert ctypes.CDLL(str(path)).two() == 2
    forget()
    assert build.shared_object(LIBRARY, "two.cpp", headers=HEADERS) == path
    assert by_cxx == ["two.cpp"]
    build.shared_object(LIBRARY, "two.cpp", headers=HEADERS, flags=("-O0",))
    assert len(by_cxx) == 2


def test_a_damaged_library_is_compiled_again(by_cxx: list[str]) -> None:
    path = build.shared_object(LIBRARY, "two.cpp", headers=HEADERS)
    path.write_bytes(path.read_bytes()[:-1])
    again = build.shared_object(LIBRARY, "two.cpp", headers=HEADERS)
    assert ctypes.CDLL(str(again)).two() == 2
    assert len(by_cxx) == 2


def test_a_broken_library_is_tried_once_and_says_the_same_both_times(by_cxx: list[str]) -> None:
    said = []
    for _ in range(2):
        with pytest.raises(InternalError, match=r"broken\.cpp with .* does not compile") as caught:
            build.shared_object("nonsense", "broken.cpp")
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "nonsense" in said[0].split("\n", 1)[1]
    assert by_cxx == ["broken.cpp"]


def test_a_library_that_cannot_be_kept_lasts_for_the_process_and_names_the_folder(
    by_cxx: list[str], home: Path
) -> None:
    (home / "kernels").write_text("a file where the folder should be")
    said: list[str] = []
    for _ in range(2):
        path = build.shared_object(LIBRARY, "two.cpp", headers=HEADERS, talk=said.append)
        assert ctypes.CDLL(str(path)).two() == 2
    assert by_cxx == ["two.cpp"]
    (sentence,) = said
    assert str(home / "kernels") in sentence
    assert "OSTINATO_HOME" in sentence


def test_the_variable_cxx_names_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = tmp_path / "my-compiler"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("CXX", str(mine))
    assert build.cxx() == build.Cxx((str(mine),))


ZIG = """#!{python}
import os, sys
said = open({log!r}, "a")
print(*sys.argv[1:], os.environ.get("ZIG_GLOBAL_CACHE_DIR"), file=said, flush=True)
os.execv({real!r}, [{real!r}, *(word for word in sys.argv[2:] if not word.startswith("-mcpu="))])
"""


def test_without_a_compiler_that_of_ziglang_is_used(
    by_cxx: list[str], home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (real,), package, log = build.cxx().command, tmp_path / "packages" / "ziglang", tmp_path / "log"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "zig").write_text(ZIG.format(python=sys.executable, log=str(log), real=real))
    (package / "zig").chmod(0o755)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setitem(sys.modules, "ziglang", None)
    del sys.modules["ziglang"]
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("ZIG_GLOBAL_CACHE_DIR", raising=False)
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))
    assert build.cxx() == build.Cxx((str(package / "zig"), "c++"), is_zig=True)
    zig_flags = ("-O1", "-mcpu=x86_64_v3")
    path = build.shared_object(LIBRARY, "two.cpp", headers=HEADERS, flags=("-O2",), zig_flags=zig_flags)
    assert ctypes.CDLL(str(path)).two() == 2
    _, compiled, linked = log.read_text().splitlines()
    cache = home / "kernels" / "zig"
    assert compiled == f"c++ -shared -fPIC -O1 -mcpu=x86_64_v3 -c two.cpp -o two.cpp.o {cache}"
    assert linked == f"c++ -shared -fPIC -O1 -mcpu=baseline two.cpp.o -o made {cache}"


@pytest.mark.parametrize("variable", [None, "no-such-compiler"])
def test_a_machine_without_a_compiler_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str | None
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "zig_command", lambda language: None)
    if variable:
        monkeypatch.setenv("CXX", variable)
    with pytest.raises(HardwareCannot, match=r"no C\+\+ compiler.*CXX"):
        build.shared_object(LIBRARY, "two.cpp")


SLOW_CXX = """#!/bin/sh
case " $* " in *" -c "*) echo >> {log}; sleep {seconds};; esac
exec {real} "$@"
"""
PROGRAM = f"""
from ostinato import build
said = []
path = build.shared_object({LIBRARY!r}, "two.cpp", headers={HEADERS!r}, talk=said.append)
print(path, said)
"""


@pytest.fixture
def slow_cxx(by_cxx: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[float], Path]:
    """A compiler that takes its time, and writes a line to a file for each translation unit."""

    (real,), log, slow = build.cxx().command, tmp_path / "log", tmp_path / "slow-cxx"

    def make(seconds: float) -> Path:
        slow.write_text(SLOW_CXX.format(log=log, seconds=seconds, real=real))
        slow.chmod(0o755)
        monkeypatch.setenv("CXX", str(slow))
        return log

    return make


def started() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_of_two_processes_at_once_one_compiles_and_the_other_waits(
    slow_cxx: Callable[[float], Path], home: Path
) -> None:
    log = slow_cxx(1)
    with started() as one, started() as other:
        outputs = [process.communicate(timeout=60)[0] for process in (one, other)]
    assert log.read_text() == "\n"
    assert [ctypes.CDLL(text.split()[0]).two() for text in outputs] == [2, 2]
    assert sum("waiting for another process that compiles two.cpp" in text for text in outputs) == 1
    assert {path.suffix for path in (home / "kernels").iterdir()} == {".so"}


@pytest.mark.slow
def test_a_process_that_was_killed_while_it_compiled_blocks_no_other(slow_cxx: Callable[[float], Path]) -> None:
    log = slow_cxx(30)
    with started() as killed:
        while not log.exists():
            time.sleep(0.01)
        killed.kill()
    slow_cxx(0)
    began = time.monotonic()
    with started() as process:
        path = process.communicate(timeout=60)[0].split()[0]
    assert ctypes.CDLL(path).two() == 2
    assert time.monotonic() - began < 20


def test_after_its_deadline_a_process_compiles_for_itself(
    by_cxx: list[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILE_LOCK_S", 0.1)
    locked: list[FileLock] = []
    acquire = FileLock.acquire

    def held(self: FileLock, *args: Any, **words: Any) -> Any:  # as if another process were compiling
        if not locked:
            locked.append(FileLock(self.lock_file))
            acquire(locked[0])
        return acquire(self, *args, **words)

    monkeypatch.setattr(FileLock, "acquire", held)
    said: list[str] = []
    path = build.shared_object(LIBRARY, "two.cpp", headers=HEADERS, talk=said.append)
    locked[0].release()
    assert ctypes.CDLL(str(path)).two() == 2
    assert said == ["waiting for another process that compiles two.cpp"]


def test_a_chip_that_is_newer_than_nvrtc_is_refused_with_what_to_install(by_nvrtc: list[str]) -> None:
    with pytest.raises(
        HardwareCannot, match=r"^nvrtc \d+\.\d+ knows no sm_999, which this GPU needs: install torch for a"
    ):
        build.cubin('extern "C" __global__ void f() {}', "f.cu", arch="sm_999")
