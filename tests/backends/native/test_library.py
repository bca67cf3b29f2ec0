"""The native CPU library: which level a CPU gets, where its object comes from, and what is said where there is none."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from ostinato import build
from ostinato.backends.native import cpu_levels
from ostinato.backends.native import library as native_cpu
from ostinato.backends.native.cpu_levels import (
    AMX,
    DOTPROD,
    I8MM,
    LEVELS,
    NEON,
    PLAIN,
    V2,
    V3,
    V4,
    best_level,
    levels_of,
)
from ostinato.backends.native.library import compiler_of_object, cpu_library, native_status, why_no_native
from ostinato.errors import HardwareCannot
from ostinato.files import objects, store
from tests.counts import soaking

REAL = native_cpu.FOLDERS
KEPT = build._folder()
SMALL = """#include "two.h"
extern "C" int two() { return TWO; }
extern "C" const char* ostinato_compiler() { return "Abc 1.2"; }
"""


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Small sources in place of the real ones, an empty cache, and a process that has opened nothing."""
    native = tmp_path / "native"
    native.mkdir()
    (native / "cpu.cpp").write_text(SMALL)
    (native / "two.h").write_text("#define TWO 2\n")
    monkeypatch.setattr(native_cpu, "FOLDERS", (native,))
    monkeypatch.setattr(native_cpu, "BUILT", native / "built")
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OSTINATO_CPU_LEVEL", raising=False)
    monkeypatch.delenv("OSTINATO_CPU_FLAGS", raising=False)
    monkeypatch.setattr(native_cpu, "_opened", {})
    monkeypatch.setattr(native_cpu, "_failed", {})
    build._failed.clear()
    build._temporary.clear()
    yield native
    build._failed.clear()
    build._temporary.clear()


@pytest.fixture
def compiler() -> None:
    try:
        build.cxx()
    except HardwareCannot as error:
        pytest.skip(f"nothing was compiled for the CPU: {error}")


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "zig_command", lambda language: None)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that every CPU has."""
    monkeypatch.setenv("OSTINATO_CPU_LEVEL", "plain")


def prebuild(native: Path, level: cpu_levels.Level = PLAIN) -> Path:
    """What the wheel's build step does."""
    folder = native / "built"
    folder.mkdir(exist_ok=True)
    made = native_cpu.compile_sources((native,), level, "-DPREBUILT")
    path = folder / f"{level.name}.so"
    path.write_bytes(made.read_bytes())
    own = sha256(path.read_bytes()).hexdigest()
    (folder / f"{level.name}.sum").write_text(f"{objects.sum_of(objects.sources(native), level.flags)}\n{own}\n")
    return path


# --- levels ---


def test_a_cpu_gets_the_best_level_that_it_has_whole() -> None:
    assert best_level(AMX.needs | {"sse2"}) is AMX
    assert best_level(AMX.needs - {"amx_int8"}) is V4
    assert best_level(V4.needs - {"avx512_vnni"}) is V3
    assert best_level(V3.needs - {"fma"}) is V2
    assert best_level(V3.needs - {"sse4_2"}) is PLAIN
    assert best_level([]) is PLAIN
    assert best_level(["asimd", "atomics", "asimddp", "i8mm"], "aarch64") is I8MM
    assert best_level(["asimd", "atomics", "asimddp"], "aarch64") is DOTPROD
    assert best_level([], "aarch64") is NEON
    assert best_level(V4.needs, "any") is PLAIN


def test_the_levels_differ_in_instructions_alone() -> None:
    for level in LEVELS.values():
        assert level.flags[: len(cpu_levels.COMMON_FLAGS)] == cpu_levels.COMMON_FLAGS
        assert "-march=native" not in level.flags
    assert "-ffp-contract=off" in cpu_levels.COMMON_FLAGS, "the levels would round differently"


def test_features_are_read_as_linux_writes_them(tmp_path: Path) -> None:
    if cpu_levels.architecture() != "x86_64":
        pytest.skip("the features of x86-64 were not read: this CPU has others")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_levels.features(cpuinfo) == {"fpu", "avx2", "fma"}
    assert cpu_levels.features(tmp_path / "nothing") == frozenset()


@pytest.mark.parametrize("allowed", [True, False])
def test_a_system_that_lists_amx_and_refuses_it_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    if cpu_levels.architecture() != "x86_64":
        pytest.skip("the features of x86-64 were not read: this CPU has others")
    monkeypatch.setattr(cpu_levels, "amx_allowed", lambda: allowed)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags\t\t: {' '.join(AMX.needs)}\n")
    assert best_level(cpu_levels.features(cpuinfo)) is (AMX if allowed else V4)


def test_a_cpu_without_amx_does_not_grant_it() -> None:
    if "amx_tile" in cpu_levels.features():
        pytest.skip("no refusal was seen: this CPU grants its tile registers")
    assert not cpu_levels.amx_allowed()


@pytest.mark.parametrize("name", ["v5", "native"])
def test_an_unknown_level_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("OSTINATO_CPU_LEVEL", name)
    with pytest.raises(HardwareCannot, match=f"'{name}'; levels of this CPU are .*plain"):
        cpu_library()
    assert "OSTINATO_CPU_LEVEL" in (why_no_native() or "")


def test_a_level_that_this_cpu_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_levels, "features", lambda: V3.needs)
    monkeypatch.setattr(cpu_levels, "architecture", lambda: "x86_64")
    monkeypatch.setenv("OSTINATO_CPU_LEVEL", "v4")
    with pytest.raises(HardwareCannot, match="this CPU lacks avx512_vnni, avx512bw"):
        cpu_library()
    monkeypatch.delenv("OSTINATO_CPU_LEVEL")
    assert native_cpu.chosen_level() is V3


# --- compiled at first use ---


def test_it_is_compiled_once_and_says_so_once(compiler: None, plain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert native_status().origin == "compiled at first use, and kept"
    assert compiler_of_object() is None
    library = cpu_library(said.append)
    assert library.two() == 2
    assert cpu_library(said.append) is library
    monkeypatch.setattr(native_cpu, "_opened", {})  # another process
    assert cpu_library(said.append).two() == 2
    assert said == [f"compiling the CPU loop, once: about {native_cpu.COMPILE_S} s"]
    assert native_status().line == "native loop for plain C++ (level plain), compiled"
    assert compiler_of_object() == "Abc 1.2"
    monkeypatch.setattr(native_cpu, "_opened", {})
    assert compiler_of_object() == "Abc 1.2", "of what is kept"
    assert why_no_native() is None


@pytest.mark.parametrize("home", ["a file", "read-only"])
def test_where_nothing_can_be_kept_it_is_compiled_for_this_process(
    compiler: None, plain: None, home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    if home == "a file":
        (folder / "kernels").write_text("where the folder should be")
    else:
        folder.chmod(0o500)

        def refuse(path: Path, content: bytes) -> None:
            raise PermissionError(13, "Permission denied")  # root may write everywhere

        monkeypatch.setattr(store, "write_whole", refuse)
    said: list[str] = []
    assert cpu_library(said.append).two() == 2
    monkeypatch.setattr(native_cpu, "_opened", {})
    assert cpu_library(said.append).two() == 2, "of the first time"
    assert len(said) == 2
    assert re.fullmatch(r"the compiled cpu\.cpp cannot be kept in .*kernels \(.*\), so every start .*", said[1])


def test_another_header_makes_another_object(compiler: None, plain: None, sources: Path) -> None:
    assert cpu_library().two() == 2
    (sources / "two.h").write_text("#define TWO 22\n")
    native_cpu._opened.clear()
    assert cpu_library().two() == 22


def test_all_translation_units_go_into_one_object(compiler: None, plain: None, sources: Path) -> None:
    (sources / "two.h").write_text("#define TWO three()\nint three();\n")
    (sources / "three.cpp").write_text("int three() { return 3; }\n")
    assert cpu_library().two() == 3
    (sources / "three.cpp").write_text("int three() { return 33; }\n")
    native_cpu._opened.clear()
    assert cpu_library().two() == 33


def test_every_level_of_this_cpu_has_its_own(compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    for level in levels_of(cpu_levels.architecture()):
        if level.needs <= cpu_levels.features():
            monkeypatch.setenv("OSTINATO_CPU_LEVEL", level.name)
            opened.append(cpu_library())
            assert opened[-1].two() == 2
    assert len({id(library) for library in opened}) == len(opened)


def test_flags_can_be_added(compiler: None, plain: None, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / "two.h").write_text("#ifdef MORE\n#define TWO 3\n#else\n#define TWO 2\n#endif\n")
    prebuild(sources)
    monkeypatch.setenv("OSTINATO_CPU_FLAGS", "-DMORE -g")
    assert cpu_library().two() == 3
    assert native_status().origin == "compiled"


def test_sources_that_do_not_compile_are_tried_once_and_the_reason_stays(
    compiler: None, plain: None, sources: Path
) -> None:
    (sources / "two.h").write_text("nonsense\n")
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(HardwareCannot, match=r"cannot be compiled here: cpu\.cpp with .* error: .*nonsense"):
            cpu_library(said.append)
    assert len(said) == 1
    assert "cannot be compiled here" in (why_no_native() or "")
    assert native_status().line.startswith("no native loop on this CPU: ")


# --- of the wheel ---


def test_the_wheels_object_is_used_and_nothing_is_compiled(
    compiler: None, plain: None, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuild(sources)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "zig_command", lambda language: None)
    said: list[str] = []
    assert native_status().origin == "of the wheel"
    assert isinstance(cpu_library(said.append), ctypes.CDLL)
    assert said == []
    assert native_status().line == "native loop for plain C++ (level plain), of the wheel"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda native: (native / "two.h").write_text("#define TWO 2 \n"), "made from other sources"),
        (lambda native: (native / "built" / "plain.so").write_bytes(b"\x7fELF"), "damaged"),
        (lambda native: (native / "built" / "plain.sum").unlink(), "cannot be read"),
        (lambda native: (native / "built" / "plain.sum").write_text("half"), "cannot be read"),
    ],
    ids=["stale", "damaged", "no sum", "half a sum"],
)
def test_an_object_that_cannot_be_trusted_is_compiled_again_and_noted(
    compiler: None, plain: None, sources: Path, spoil: object, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuild(sources)
    assert callable(spoil)
    spoil(sources)
    status = native_status()
    assert status.origin == "compiled at first use, and kept"
    assert why in (status.note or "")
    assert cpu_library().two() == 2
    monkeypatch.setattr(native_cpu, "_opened", {})
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "zig_command", lambda language: None)
    with pytest.raises(HardwareCannot, match=f"{why}.*, and no C\\+\\+ compiler"):
        cpu_library()


def test_an_object_that_cannot_be_opened_is_compiled_again(compiler: None, plain: None, sources: Path) -> None:
    path = prebuild(sources)
    path.write_bytes(b"for another system")
    own = sha256(path.read_bytes()).hexdigest()
    sums = path.with_suffix(".sum")
    sums.write_text(f"{sums.read_text().split()[0]}\n{own}\n")
    assert cpu_library().two() == 2
    assert native_status().origin == "compiled"


# --- neither ---


def test_with_neither_object_nor_compiler_everything_says_why(no_compiler: None) -> None:
    why = why_no_native()
    assert why is not None
    assert "no prebuilt object is installed, and no C++ compiler" in why
    assert all(
        way in why
        for way in (
            "-m pip install ziglang`",
            "`apt install g++",
            "`dnf install gcc-c++",
            "`apk add g++",
            "`xcode-select",
        )
    )
    assert native_status().line == f"no native loop on this CPU: {why}; eager, which runs instead, is many times slower"
    for _ in range(2):
        with pytest.raises(HardwareCannot, match=r"no prebuilt object.*no C\+\+ compiler.*CXX"):
            cpu_library()
    assert "no C++ compiler" in (why_no_native() or "")


# --- the real sources ---


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", [level.name for level in levels_of(cpu_levels.architecture())])
def test_the_real_sources_compile_without_a_warning(compiler: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if not soaking() and name != best_level(cpu_levels.features(), cpu_levels.architecture()).name:
        pytest.skip(f"the sources were not compiled for {name}: without OSTINATO_SOAK=1 only this CPU's own level is")
    monkeypatch.setattr(build, "_folder", lambda: KEPT)  # sources that have compiled so are not compiled again
    # Vectors that are "maybe uninitialised" are the compiler's own headers': they are so on purpose.
    made = native_cpu.compile_sources(REAL, LEVELS[name], "-Werror", "-Wno-maybe-uninitialized")
    library = ctypes.CDLL(str(made))
    assert library.ostinato_run
