"""The wheel: it carries objects for every level of CPU, and an environment without a compiler decodes with them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from ostinato.backends.native.cpu_levels import IN_WHEELS, architecture, features
from ostinato.build import cxx
from ostinato.errors import HardwareCannot

ROOT = Path(__file__).parents[1]
LEVELS = IN_WHEELS.get(architecture(), ())
NATIVE = Path("ostinato") / "backends" / "native"
TEXT = Path("ostinato") / "text"
TAPE = Path("ostinato") / "backends" / "tape" / "src"
SERVE = Path("ostinato") / "serve"
# Opens a model and decodes with it; says where the object came from and what was generated.
PROGRAM = """
import sys
from pathlib import Path
import ostinato
from ostinato import LLM, Sampling
from ostinato.backends.native.library import native_status
with LLM(Path(sys.argv[1]), device="cpu", context=64) as llm:
    ids = llm.generate("hello", Sampling(max_tokens=5, temperature=0.0)).token_ids
    print(Path(ostinato.__file__).parent, llm.mode, len(ids), native_status().line, sep="\\n")
"""

# The machine's compiler, which does nothing twice: what it made is kept with the package's own objects, by the hash of
# its version, its flags and all that it could read.
COMPILER = """#!{python}
import shutil
import subprocess
import sys
from pathlib import Path
from ostinato import build
if "-c" not in sys.argv:  # it links, which is quick
    sys.exit(subprocess.run(["{real}", *sys.argv[1:]]).returncode)
flags = [word for word in sys.argv[1:] if "/" not in word]
made = Path(sys.argv[-1])
folders = {{Path(word.removeprefix("-I")) for word in sys.argv[1:-1] if "/" in word}}
folders = {{path if path.is_dir() else path.parent for path in folders}}
texts = {{path.name: path.read_text() for folder in folders for path in folder.iterdir() if path.is_file()}}
key = build._key("of the wheel", "", made.name, texts, flags, build._cxx_version(build.Cxx(("{real}",))))
kept = build._find(key, "o")
if kept is None:
    subprocess.run(["{real}", *sys.argv[1:]], check=True)
    kept = build._keep(made.read_bytes(), key, "o")
shutil.copy(kept, made)
"""


def needs_setuptools() -> None:
    """Skips where a wheel cannot be built. The version is read and setuptools is not imported: it puts a distutils of
    its own in place of Python's, which can fail after what other tests imported. Only the building child needs it."""
    try:
        found = version("setuptools")
    except PackageNotFoundError:
        pytest.skip("no wheel was built: there is no setuptools")
    if int(found.partition(".")[0]) < 77:
        pytest.skip(f"no wheel was built: setuptools is {found}, and 77 is the least that will do")


def built(to: Path, *, objects: bool) -> Path:
    """The wheel of a copy of this tree: a build leaves things where it runs. A child builds it, with setuptools' own
    distutils whatever the environment says."""
    tree = to / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    told = {"OSTINATO_WHEEL_OBJECTS": "1" if objects else "0", "SETUPTOOLS_USE_DISTUTILS": "local"}
    if objects:
        compiler = to / "c++"
        compiler.write_text(COMPILER.format(python=sys.executable, real=cxx().name))
        compiler.chmod(0o755)
        told |= {"CXX": str(compiler), "PYTHONPATH": str(ROOT / "src")}
    environment = {**os.environ, **told}
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(to / "dist"), str(tree)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    (wheel,) = (to / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_setuptools()
    if not (sys.platform.startswith("linux") and LEVELS):
        pytest.skip("no wheel with objects was built: they are made for Linux on x86-64 and AArch64")
    try:
        cxx()
    except HardwareCannot as error:
        pytest.skip(f"no wheel with objects was built: {error}")
    return built(tmp_path_factory.mktemp("wheel"), objects=True)


class Installed:
    """An environment with this wheel, the other packages of ours, no compiler and a home of its own."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        variables = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
        self.packages = Path(sysconfig.get_path("platlib", "venv", variables))
        options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", *options, str(wheel)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
        # A path alone: what is installed there for editing is not followed.
        (self.packages / "others.pth").write_text(sysconfig.get_path("platlib") + "\n")
        self.home = folder / "home"
        (folder / "nothing").mkdir()
        kept = {key: value for key, value in os.environ.items() if key not in ("CXX", "PYTHONPATH", "LD_PRELOAD")}
        kept = {key: value for key, value in kept.items() if not key.startswith("OSTINATO_CPU_")}
        self._environment = {**kept, "PATH": str(folder / "nothing"), "CXX": "none", "OSTINATO_HOME": str(self.home)}

    def run(self, program: str, *arguments: str, **environment: str) -> list[str]:
        ran = subprocess.run(
            [str(self.python), "-c", program, *arguments],
            env={**self._environment, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.splitlines()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


@pytest.mark.slow
def test_the_wheel_is_for_any_python_of_this_platform_and_carries_every_level(wheel: Path) -> None:
    assert wheel.name.endswith(f"-py3-none-linux_{architecture()}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for level in LEVELS:
        assert f"{NATIVE}/built/{level.name}.so" in names
        assert f"{NATIVE}/built/{level.name}.sum" in names
    assert f"{NATIVE}/src/cpu.cpp" in names
    if LEVELS:
        assert {f"{TEXT}/built/automaton.so", f"{TEXT}/built/automaton.sum"} <= set(names)
    assert {f"{TEXT}/src/automaton.cpp", f"{TEXT}/walk/grammar_walk.h"} <= set(names)
    sources = [path.name for path in (ROOT / "src" / TAPE).iterdir() if path.suffix in (".h", ".cu")]
    assert "tape.cu" in sources
    assert {f"{TAPE}/{name}" for name in sources} <= set(names)
    assert "native" not in " ".join(flag for level in LEVELS for flag in level.march)


@pytest.mark.slow
@pytest.mark.parametrize("level", [level.name for level in LEVELS])
def test_a_model_decodes_with_the_wheels_object_where_there_is_no_compiler(
    installed: Installed, tiny_gguf: Path, level: str
) -> None:
    needed = next(known.needs for known in LEVELS if known.name == level)
    if missing := needed - features():
        pytest.skip(f"the object for {level} was not run: this CPU lacks {', '.join(sorted(missing))}")
    where, mode, n_tokens, line = installed.run(PROGRAM, str(tiny_gguf), OSTINATO_CPU_LEVEL=level)
    assert Path(where).is_relative_to(installed.packages)
    assert (mode, n_tokens) == ("loop", "5")
    assert f"(level {level}), of the wheel" in line
    assert not (installed.home / "kernels").exists(), "nothing was compiled"


@pytest.mark.slow
def test_an_object_of_other_sources_is_left_aside_and_said(installed: Installed, tiny_gguf: Path) -> None:
    header = installed.packages / NATIVE / "src" / "read.h"
    before = header.read_text()
    try:
        header.write_text(before + "// newer\n")
        _, mode, n_tokens, line = installed.run(PROGRAM, str(tiny_gguf))
    finally:
        header.write_text(before)
    assert (mode, n_tokens) == ("eager", "5")
    assert "was made from other sources, and no C++ compiler" in line


@pytest.mark.slow
def test_a_wheel_without_objects_is_for_every_platform_and_runs_without_them(tmp_path: Path, tiny_gguf: Path) -> None:
    needs_setuptools()
    wheel = built(tmp_path, objects=False)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if "/built/" in name]
    page = [path for path in (ROOT / "src" / SERVE / "vendor").rglob("*") if path.is_file()]
    assert {path.relative_to(ROOT / "src").as_posix() for path in page} | {f"{SERVE}/page.html"} <= set(names)
    licences = [name for name in names if ".dist-info/licenses/" in name]
    assert len(licences) == 1 + len({path.parent for path in page if path.name == "LICENSE"})
    _, mode, n_tokens, line = Installed(tmp_path, wheel).run(PROGRAM, str(tiny_gguf))
    assert (mode, n_tokens) == ("eager", "5")
    assert "no prebuilt object is installed, and no C++ compiler" in line
