"""Triton's launcher needs a C compiler: another is found for it, or what to install is told before weights are read."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato import build
from ostinato.backends.cuda import launcher
from ostinato.backends.cuda.backend import CUDA
from ostinato.backends.machine import Chip, Machine
from ostinato.backends.tape.backend import TAPE
from ostinato.engine.choose import LoadCase, prepared
from ostinato.errors import HardwareCannot
from ostinato.models.header import tensors_in
from ostinato.options import LoadOptions
from tests.backends.tape.models import shape_of, small

triton = pytest.importorskip("triton")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A system without any compiler, on which Triton has kept nothing."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(launcher, "zig_command", lambda language: None)
    monkeypatch.setattr(triton.knobs.build, "impl", None)
    return tmp_path


def program(folder: Path, name: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)
    return str(folder)


def test_without_a_compiler_every_mode_of_a_gpu_is_refused_with_what_to_install(bare: Path) -> None:
    model = small(shape_of())
    machine = Machine("cuda:0", 1 << 40, 1 << 40, Chip((9, 0), 132, 227 << 10), 13_000)
    case = LoadCase(model.shape, tensors_in(model), LoadOptions(context=64), machine)
    with pytest.raises(HardwareCannot) as refused:
        prepared(case, lambda _: None)
    said = str(refused.value)
    assert said.startswith("no mode can run this model here: Triton compiles its launcher with a C compiler")
    assert said.count("pip install ziglang") == 1
    for backend in (CUDA, TAPE):
        settled: Any = SimpleNamespace()
        with pytest.raises(HardwareCannot, match="`apt install gcc`"):
            backend.prepare(settled, lambda _: None)


def test_a_compiler_that_triton_finds_is_left_to_it(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gcc", "clang"):
        monkeypatch.setenv("PATH", program(bare / name, name))
        launcher.prepare_launcher()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", f"{bare}/gcc/gcc")
    launcher.prepare_launcher()
    assert triton.knobs.build.impl is None


def test_a_compiler_that_was_named_and_is_not_there_is_told(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "none-such")
    with pytest.raises(HardwareCannot, match=r"\$CC is 'none-such', which is not there; unset it"):
        launcher.prepare_launcher()


def test_pythons_headers_are_needed_too(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", program(bare / "gcc", "gcc"))
    monkeypatch.setattr(launcher, "_python_headers", lambda: bare / "include")
    with pytest.raises(
        HardwareCannot, match=r"Python's headers are not at .*include; install them \(`apt install python3"
    ):
        launcher.prepare_launcher()


def test_a_launcher_that_triton_has_kept_needs_no_compiler(bare: Path) -> None:
    kept = bare / "cache" / "key"
    kept.mkdir(parents=True)
    (kept / f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    launcher.prepare_launcher()


def test_zig_compiles_for_triton_where_there_is_no_other(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for zig that passes on to the system's compiler, so that Triton's own way is gone through."""
    compiler = shutil.which("cc", path="/usr/bin:/usr/local/bin:/bin")
    if compiler is None or not (launcher._python_headers() / "Python.h").is_file():
        pytest.skip("there is no C compiler, or there are no headers of Python, to stand in for zig")
    zig = bare / "zig"
    zig.write_text(f'#!/bin/sh\nshift\nPATH=/usr/bin:/bin exec {compiler} "$@"\n')
    zig.chmod(0o755)
    monkeypatch.setattr(launcher, "zig_command", lambda language: (str(zig), language))
    launcher.prepare_launcher()
    assert triton.knobs.build.impl is launcher.compile_with_zig
    from triton.runtime.build import compile_module_from_src

    source = (
        '#include <Python.h>\nstatic struct PyModuleDef made = {PyModuleDef_HEAD_INIT, "made", 0, -1, 0};\n'
        "PyMODINIT_FUNC PyInit_made(void) { return PyModule_Create(&made); }\n"
    )
    assert compile_module_from_src(source, "made").__name__ == "made"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="the package ziglang is not installed")
def test_zig_compiles_tritons_launcher(tmp_path: Path) -> None:
    nvidia = Path(triton.__file__).parent / "backends" / "nvidia"
    (tmp_path / "libcuda.c").write_text("int cuInit(unsigned flags) { return 100; }\n")
    zig = build.zig_command("cc")
    assert zig is not None
    stub = [*zig, "-shared", "-o", str(tmp_path / "libcuda.so.1"), str(tmp_path / "libcuda.c")]
    subprocess.run(stub, check=True, env=build.zig_environment(tmp_path))
    given: Any = ([str(tmp_path)], [str(nvidia / "include")], ["libcuda.so.1"])
    made = launcher.compile_with_zig("cuda_utils", str(nvidia / "driver.c"), str(tmp_path), *given)
    assert Path(made).read_bytes().startswith(b"\x7fELF")
