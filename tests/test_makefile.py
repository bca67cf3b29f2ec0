"""The Makefile: what `make help` lists, the words that it passes on, and what it installs for which target."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.rules import ROOT

# Installs nothing: it says what it was called with, and makes an environment whose programs are itself.
STAND_IN = """#!/bin/sh
printf '%s ' "${0##*/}" "$@" >> "$LOG"; echo >> "$LOG"
[ "$2" != venv ] || { mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/ostinato; }
"""


def made(*words: str, at: Path = ROOT, **environment: str) -> str:
    """What make prints; a make around this one is not heard."""
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    ran = subprocess.run(
        ["make", "--no-print-directory", *words],
        cwd=at, capture_output=True, text=True, timeout=60, check=True, env={**own, **environment},
    )  # fmt: skip
    return ran.stdout


def test_help_lists_every_target() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"^make ([\w-]+) +\S", made("help"), re.MULTILINE)) == set(targets.split())


def test_zig_is_installed_where_there_is_no_compiler(tmp_path: Path) -> None:
    for name in ("sh", "make"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    words = ("--dry-run", "--new-file", "pyproject.toml", "--old-file", ".venv/python", "NVIDIA=", ".venv/installed")
    zig = "constraints.txt ziglang"
    assert zig in made(*words, PATH=str(tmp_path), CXX="")
    (tmp_path / "g++").symlink_to("/bin/sh")
    assert zig not in made(*words, PATH=str(tmp_path), CXX="")


@pytest.mark.parametrize(
    ("words", "called"),
    [
        (["run", "MODEL=a b.gguf", "PROMPT=hi there"], "run|--model|a b.gguf|--max-tokens|256|hi there|"),
        (["serve"], "serve|"),
        (["serve", "MODEL=smollm2", "PORT=8001"], "serve|--model|smollm2|--port|8001|"),
    ],
)
def test_the_model_and_the_port_are_passed_on(words: list[str], called: str, tmp_path: Path) -> None:
    program = tmp_path / "ostinato"
    program.write_text("#!/bin/sh\nprintf '%s|' \"$@\"\n")
    program.chmod(0o755)
    installed = [word for name in ("", "-serve") for word in ("--old-file", f".venv/installed{name}")]
    options = [*installed, "--old-file", ".venv/compiled", "NVIDIA=", f"BIN={tmp_path}"]
    assert made(*options, *words, PORT="3000") == called


class Checkout:
    """A folder with this Makefile, where nothing is really installed, and a log of what would be."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._log, self._python = folder, folder / "log", folder / "stand-in"
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        self._python.write_text(STAND_IN)
        self._python.chmod(0o755)

    def make(self, *words: str) -> list[str]:
        """What make installs or runs for these words, in order."""
        self._log.write_text("")
        made(f"PYTHON={self._python}", *words, at=self.folder, LOG=str(self._log))
        lines = self._log.read_text().splitlines()
        extras = (re.search(r"--editable \.(\S*)|^ostinato (\w+)|(-m venv)", line) for line in lines)
        return [next(word for word in found.groups() if word is not None) for found in extras if found]


def test_each_target_installs_what_it_needs_once_and_none_takes_packages_away(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    assert checkout.make("run", "NVIDIA=") == ["-m venv", "", "run"]
    assert checkout.make("run", "NVIDIA=") == ["run"]
    assert checkout.make("serve", "NVIDIA=") == ["[serve]", "serve"]
    assert checkout.make("run", "NVIDIA=") == ["run"]
    assert checkout.make("docs", "NVIDIA=") == ["[torch,scale,dev]"]
    assert checkout.make("serve", "NVIDIA=") == ["serve"]
    assert checkout.make("run", "NVIDIA=/usr/bin/nvidia-smi") == ["[gpu]", "run"], "a driver came later"
    assert checkout.make("serve", "NVIDIA=/usr/bin/nvidia-smi") == ["[serve]", "serve"]
    assert checkout.make("clean", "run", "NVIDIA=") == ["-m venv", "", "run"]


def test_requirements_that_changed_are_installed_again(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    assert checkout.make("serve", "NVIDIA=") == ["-m venv", "", "[serve]", "serve"]
    for stamp in (tmp_path / ".venv").glob("installed*"):
        os.utime(stamp, (1e9, 1e9))
    assert checkout.make("serve", "NVIDIA=") == ["", "[serve]", "serve"]
    assert checkout.make("run", "NVIDIA=") == ["run"]
