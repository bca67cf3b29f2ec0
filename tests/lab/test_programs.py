"""The laboratory's programs: whole ones compile for CUDA and HIP, kernels by NVRTC; nothing of AMD has been run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.nvcc import INSTALLED
from bench.nvcc import nvcc as find_nvcc
from ostinato.errors import HardwareCannot
from ostinato.lab.profile import COUNTERS, commands, counted, counters
from ostinato.lab.programs import FOLDER, source

WHOLE = ("graphs_axpy", "persistent_decode")

CSV = "\n".join(
    [
        "==PROF== Connected to process 1",
        '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"',
        '"0","short_axpy","gpu__time_duration.sum","ns","6,400"',
        '"0","short_axpy","sm__throughput.avg.pct_of_peak_sustained_active","%","30.00"',
        '"1","short_axpy","gpu__time_duration.sum","us","1.6"',
        '"1","short_axpy","sm__throughput.avg.pct_of_peak_sustained_active","%","32.00"',
    ]
)


CUDA_12 = INSTALLED / "cuda_runtime"  # its runtime is installed beside the compiler
CUDA_12_CARDS = ("75", "80", "86", "89", "90")


def nvcc() -> list[str]:
    found = find_nvcc()
    if found is None:
        pytest.skip("nvcc is not installed; `make test-compilers` installs it")
    return found


def compiled(command: list[str], **environment: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]


def installed(tool: str) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    return tool


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_program_compiles_with_nvcc(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    flags = ["-O3", "-std=c++17", "-arch=sm_90", "-lineinfo"]
    compiled([*nvcc(), *flags, str(FOLDER / f"{name}.cu"), "-o", str(out)])
    assert out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_program_compiles_with_the_runtime_of_cuda_12_for_its_cards(name: str, tmp_path: Path) -> None:
    if not CUDA_12.exists():
        pytest.skip("the runtime of CUDA 12 is not installed; `make test-compilers` installs it")
    unit, out = tmp_path / f"{name}.cu", tmp_path / name
    unit.write_text(f'#include "{FOLDER / name}.cu"\nstatic_assert(CUDART_VERSION / 1000 == 12, "another runtime");\n')
    cards = [f"-gencode=arch=compute_{card},code=sm_{card}" for card in CUDA_12_CARDS]
    # In front of the compiler's own, so that these are found first.
    runtime = [f"-I{CUDA_12 / 'include'}", f"-L{CUDA_12 / 'lib'}"]
    compiler, *libraries = nvcc()
    compiled([compiler, *runtime, *libraries, "-O3", "-std=c++17", "--threads=2", *cards, str(unit), "-o", str(out)])
    assert out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_program_compiles_with_hipcc(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    flags = ["-O3", "-std=c++17", "-x", "hip", "--offload-arch=gfx90a"]
    compiled([installed("hipcc"), *flags, str(FOLDER / f"{name}.cu"), "-o", str(out)], HIP_PLATFORM="amd")
    assert out.exists()


@pytest.mark.slow
def test_the_kernels_compile_for_a_newer_amd_card(tmp_path: Path) -> None:
    if not Path("/usr/include/hip/hip_runtime.h").exists():
        pytest.skip("HIP's headers are not installed")
    unit = tmp_path / "kernels.hip"
    unit.write_text('#include <hip/hip_runtime.h>\n#include "kernels.h"\n')
    flags = ["-x", "hip", "--offload-arch=gfx942", "--cuda-device-only", "-nogpulib", "-O3", "-S", "-I", str(FOLDER)]
    compiled([installed("clang-19"), *flags, "-o", str(tmp_path / "kernels.s"), str(unit)])
    assert "persistent" in (tmp_path / "kernels.s").read_text()


@pytest.mark.parametrize("name", ["kernels.h", "while_condition.h"])
def test_the_kernels_compile_at_run_time(name: str) -> None:
    from ostinato.build import cubin

    try:
        binary = cubin(source(name), name, arch="sm_90")
    except HardwareCannot as error:
        pytest.skip(str(error))
    assert binary[:4] == b"\x7fELF"


def test_the_commands_name_the_programs_and_the_counters() -> None:
    words = commands(Path("programs"), arch="sm_80")
    assert any("-arch=sm_80" in line for line in words["build"])
    assert all("-lineinfo" in line for line in words["build"] if line.startswith("nvcc"))
    assert all(counter in line for counter in COUNTERS for line in words["ncu"])
    assert {"nsys", "rocprof", "omnitrace"} <= words.keys()


def test_what_ncu_prints_is_read() -> None:
    assert counters(CSV) == {"kernels": 2.0, "throughput_pct": 31.0, "time_us": 8.0}


def test_counters_that_are_closed_are_told() -> None:
    with pytest.raises(HardwareCannot, match="ERR_NVGPUCTRPERM"):
        counters("==ERROR== ERR_NVGPUCTRPERM")


def test_a_profiler_that_fails_or_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)

    def hangs(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("ncu", 1.0)

    with pytest.raises(HardwareCannot, match="fewer --steps"):
        counted("x", [], run=hangs)
    asked: list[list[str]] = []

    def answers(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess([], 0, CSV, "")

    assert counted("x", ["--n", "1"], run=answers)["kernels"] == 2
    assert asked[0][asked[0].index("--kernel-name") + 1] == "regex:^short_"  # torch's own kernels are not meant
    failed = subprocess.CompletedProcess([], 9, "", "no permission")
    with pytest.raises(HardwareCannot, match="ended with 9 and said: no permission"):
        counted("x", [], run=lambda *_, **__: failed)
