"""`make test-arm`: wheels for both architectures, compiled by zig, and the same bits from every level of each.

Levels of x86-64 run on this machine. Those of AArch64 run under qemu-user, in Debian's arm64 Python with PyPI's wheels:
both are unpacked into .venv/arm64, and nothing is installed into the system. What is missing here is skipped, and said.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from ostinato.backends.native.cpu_levels import IN_WHEELS, architecture, features
from tests.rules import ROOT

BITS = Path(__file__).with_name("bits.py")
CACHE = ROOT / ".venv" / "arm64"
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
CPUS = {
    "i8mm": "max",
    "dotprod": "neoverse-n1",
    "neon": "cortex-a53",
}  # of qemu: the last have no more than their level


def done(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env={**os.environ, **environment}
    )


# --- the wheels ---


@pytest.fixture(scope="module", params=IN_WHEELS)
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel for each architecture, of a copy of this tree: a build leaves things where it runs."""
    pytest.importorskip("ziglang", reason="no wheels were built: the package ziglang is not installed")
    to = tmp_path_factory.mktemp("wheels")
    shutil.copytree(ROOT / "src", to / "tree" / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / "tree" / name)
    made = {}
    for arch in IN_WHEELS:
        options = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(to / arch), str(to / "tree")]
        ran = done(command, OSTINATO_WHEEL_ARCH=arch, SETUPTOOLS_USE_DISTUTILS="local", CXX="")
        assert ran.returncode == 0, ran.stderr
        (made[arch],) = (to / arch).glob("*.whl")
    return made


def test_a_wheel_is_for_glibc_2_28_and_needs_no_more(wheels: dict[str, Path], machine: str) -> None:
    wheel = wheels[machine]
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{machine}.whl")
    assert wheel.stat().st_size < 4 << 20
    with zipfile.ZipFile(wheel) as file:
        objects = {name: file.read(name) for name in file.namelist() if name.endswith(".so")}
    assert {Path(name).stem for name in objects} == {level.name for level in IN_WHEELS[machine]}
    for name, content in objects.items():
        versions = [tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_([0-9.]+)", content)]
        assert versions, name
        assert max(versions) <= (2, 28), name
        needed = set(re.findall(rb"[\w.+-]+\.so\.\d+", content))
        assert needed <= {b"libc.so.6", b"libm.so.6", b"libpthread.so.0", b"libdl.so.2"} | set(
            re.findall(rb"ld-linux-[\w.-]+", content)
        ), name


# --- the same bits ---


@pytest.fixture(scope="module")
def expected(default_model: Path) -> str:
    """What this checkout prints here, compiled by the machine's compiler."""
    ran = done([sys.executable, str(BITS), str(default_model)], PYTHONPATH=str(ROOT / "src"))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("\n") > 20
    return ran.stdout


@pytest.fixture(scope="module")
def unpacked(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for arch, wheel in wheels.items():
        folders[arch] = tmp_path_factory.mktemp(arch)
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folders[arch])
    return folders


@pytest.mark.parametrize("level", [level.name for level in IN_WHEELS["x86_64"]])
def test_the_wheel_for_x86_64_computes_the_same(
    unpacked: dict[str, Path], expected: str, default_model: Path, level: str
) -> None:
    needs = next(known.needs for known in IN_WHEELS["x86_64"] if known.name == level)
    if architecture() != "x86_64" or needs - features():
        pytest.skip(f"the object for {level} was not run: this CPU has not what it needs")
    command = [sys.executable, str(BITS), str(default_model)]
    ran = done(command, PYTHONPATH=str(unpacked["x86_64"]), OSTINATO_CPU_LEVEL=level)
    assert f"(level {level}), of the wheel" in ran.stderr
    assert ran.stdout == expected


@pytest.fixture(scope="module")
def arm_python() -> list[str]:
    """qemu's command and Debian's Python for arm64, fetched once; the CPU goes between the first word and the rest."""
    for tool in ("qemu-aarch64", "apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            pytest.skip(f"nothing was run on AArch64: {tool} is not installed (Debian: apt install qemu-user)")
    root = CACHE / "root"
    if not root.exists():
        unpack_debian(root)
    (python,) = (found for found in (root / "usr" / "bin").glob("python3.*") if found.suffix[1:].isdigit())
    return ["qemu-aarch64", "-L", str(root), str(python)]


def unpack_debian(root: Path) -> None:
    """Debian's Python for arm64 and all that it needs, by an apt with folders of its own."""
    apt = CACHE / "apt"
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    settings = {
        "Dir::State": apt / "state",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": 1,
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    wanted = ["--yes", "--download-only", "--no-install-recommends", "install", "python3", "libstdc++6"]
    for words in (["update"], wanted):
        ran = done(["apt-get", *options, "--quiet", *words])
        if ran.returncode != 0:
            pytest.skip(f"nothing was run on AArch64: Debian's packages cannot be fetched: {ran.stderr.strip()}")
    half = root.with_name("root.new")
    shutil.rmtree(half, ignore_errors=True)
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(half)], check=True)
    half.rename(root)


@pytest.fixture(scope="module")
def arm_packages(arm_python: list[str]) -> Path:
    """What the wheel asks for, from PyPI, for that Python."""
    version = Path(arm_python[-1]).name.removeprefix("python")
    folder = CACHE / f"packages-{version}"
    if not folder.exists():
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        tag = "cp" + version.replace(".", "")
        which = ["--only-binary=:all:", "--python-version", version, "--implementation", "cp"]
        which += [word for abi in (tag, "abi3", "none") for word in ("--abi", abi)]
        which += [word for platform in PLATFORMS for word in ("--platform", platform)]
        half = folder.with_suffix(".new")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
        ran = done([*command, "--target", str(half), *which, *project["dependencies"]])
        if ran.returncode != 0:
            pytest.skip(f"nothing was run on AArch64: its packages cannot be fetched: {ran.stderr.strip()}")
        half.rename(folder)
    return folder


@pytest.mark.parametrize("level", [level.name for level in IN_WHEELS["aarch64"]])
def test_aarch64_computes_the_same_as_x86_64(
    unpacked: dict[str, Path],
    expected: str,
    default_model: Path,
    arm_python: list[str],
    arm_packages: Path,
    level: str,
    tmp_path: Path,
) -> None:
    command = [arm_python[0], "-cpu", CPUS[level], *arm_python[1:], str(BITS), str(default_model)]
    ran = done(command, PYTHONPATH=f"{unpacked['aarch64']}:{arm_packages}", OSTINATO_HOME=str(tmp_path))
    assert f"(level {level}), of the wheel" in ran.stderr, ran.stderr  # chosen by what this CPU says it has
    assert ran.stdout == expected
    assert not (tmp_path / "kernels").exists(), "nothing was compiled"
