"""The Makefile: what `make help` lists, and the words that it passes on."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rules import ROOT


def made(*words: str, old: Sequence[str] = (".venv/installed",), **environment: str) -> str:
    """What make prints; nothing is installed, and a make around this one is not heard."""
    own = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    ran = subprocess.run(
        ["make", "--no-print-directory", *(f"--old-file={name}" for name in old), *words],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True, env={**own, **environment},
    )  # fmt: skip
    return ran.stdout


def test_help_lists_every_target() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"^make ([\w-]+) +\S", made("help"), re.MULTILINE)) == set(targets.split())


def test_zig_is_installed_where_there_is_no_compiler(tmp_path: Path) -> None:
    for name in ("sh", "make"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    words = ("--dry-run", "--new-file", "pyproject.toml", "--old-file", ".venv/python", ".venv/installed")
    zig = "constraints.txt ziglang"
    assert zig in made(*words, old=(), PATH=str(tmp_path), CXX="")
    (tmp_path / "g++").symlink_to("/bin/sh")
    assert zig not in made(*words, old=(), PATH=str(tmp_path), CXX="")


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
    assert made(f"BIN={tmp_path}", *words, PORT="3000") == called
