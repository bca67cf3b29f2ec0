"""A tiny model, and two ways to call a verb: in this process, and as the program that a shell starts."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ostinato.cli import call, output
from tests.cli import tiny_model


@dataclass(frozen=True, slots=True)
class Ran:
    """How a verb ended, and what it wrote."""

    code: int
    out: str
    err: str


RunCli = Callable[..., Ran]


class Terminal(io.TextIOWrapper):
    """Standard input with a person in front of it."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file that holds only a vocabulary."""
    return tiny_model.write(tmp_path_factory.mktemp("tiny") / "vocabulary.gguf", vocabulary_only=True)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without a chat template."""
    return tiny_model.write(tmp_path_factory.mktemp("tiny") / "base.gguf", change=tiny_model.without_template)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store of the test's own."""
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def ostinato(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Call a verb in this process; `stdin` is what a pipe brings, `terminal` puts a person there instead."""

    def run(*arguments: str | Path, stdin: bytes = b"", terminal: bool = False) -> Ran:
        kind = Terminal if terminal else io.TextIOWrapper
        monkeypatch.setattr(sys, "stdin", kind(io.BytesIO(stdin), encoding="utf-8"))
        monkeypatch.setattr(output._Detail, "wanted", False)
        capsys.readouterr()
        code = call([str(argument) for argument in arguments])
        written = capsys.readouterr()
        return Ran(code, written.out, written.err)

    return run


def start(arguments: Sequence[str | Path], **settings: object) -> subprocess.Popen[bytes]:
    """The program as a shell starts it, with pipes on all sides."""
    return subprocess.Popen(
        [sys.executable, "-m", "ostinato", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # what one read leaves is still in the pipe for the next
        env={**os.environ, **{key: str(value) for key, value in settings.items()}},
    )
