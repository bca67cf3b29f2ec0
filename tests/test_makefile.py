"""The Makefile: what `make help` lists, and the words that it passes on."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.rules import ROOT


def made(*words: str, **environment: str) -> str:
    """What make prints; nothing is installed, and a make around this one is not heard."""
    own = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    ran = subprocess.run(
        ["make", "--no-print-directory", "--old-file", ".venv/installed", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True, env={**own, **environment},
    )  # fmt: skip
    return ran.stdout


def test_help_lists_every_target() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"^make ([\w-]+) +\S", made("help"), re.MULTILINE)) == set(targets.split())


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
