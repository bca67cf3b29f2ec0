"""Every example in README, SECURITY and docs: Python and commands run, and what a page quotes is what is printed.

An example is a fenced block. Blocks of Python run page by page, one after the other, as a reader would paste them; so
do blocks of `pycon`, in which a raised error is quoted after its statement. In other blocks, lines that begin with a
program of `PROGRAMS` are commands; after `$ ` their output follows, in which `...` stands for anything. An HTML
comment before a block says why it cannot run here, and its options are then only parsed: `<!-- example: needs gpu
-->`. `<!-- example: with NAME=VALUE -->` runs it with these variables.
"""

from __future__ import annotations

import gc
import inspect
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from doctest import DocTestParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from ostinato import LLM, Sampling, cli
from ostinato.engine.machine import why_no_cuda
from ostinato.errors import OstinatoError
from ostinato.serve.settings import DEFAULT_PORT
from tests.serve.running import Running, serving

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])
NEEDS = ("gpu", "network", "ray", "a large model", "another server", "a reranker", "minutes")
HERE = ("no gpu", "a used port")  # needs that a test can meet
PROGRAMS = ("ostinato", "make", "curl", "pip", "python")
ADDRESS = f"http://127.0.0.1:{DEFAULT_PORT}"  # where a server of the examples listens
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!-- example: (needs|with) (.+?) -->\s*$")


@dataclass(frozen=True)
class Command:
    """A command of a page and what it prints there, if the page says so."""

    words: tuple[str, ...]
    output: str | None


@dataclass(frozen=True)
class Block:
    """A fenced block: where it is, its language, its text, what it needs and its variables."""

    page: Path
    line: int
    language: str
    text: str
    needs: str | None
    variables: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[Command]:
        """The commands among its lines; a `\\` at the end continues a line."""
        text = self.text.replace("\\\n", " ")
        if not re.search(r"^\$ ", text, re.MULTILINE):
            lines = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith(PROGRAMS)]
            return [Command(tuple(words), None) for words in lines if words[0] in PROGRAMS]
        parts = (part.partition("\n") for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:])
        return [Command(tuple(shlex.split(line, comments=True)), output.strip()) for line, _, output in parts]


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        before = text[: found.start()]
        mark = MARK.search(before)
        needs = mark[2] if mark and mark[1] == "needs" else None
        variables = tuple(mark[2].split()) if mark and mark[1] == "with" else ()
        inner = re.sub(f"^{found[1]}", "", found[3], flags=re.MULTILINE)
        yield Block(page, before.count("\n") + 1, found[2], inner, needs, variables)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
WITH_COMMANDS = [block for block in BLOCKS if block.language not in ("python", "pycon") and block.commands()]
WITH_PYTHON = sorted({block.page for block in BLOCKS if block.language == "python"})
WITH_ERRORS = [block for block in BLOCKS if block.language == "pycon"]
TO_RUN = [block for block in WITH_COMMANDS if block.needs in (None, *HERE)]


def by_name(block: Block) -> str:
    return block.name


def test_there_are_examples() -> None:
    assert len(WITH_PYTHON) > 3
    assert len(WITH_COMMANDS) > 10


def test_a_mark_says_a_known_need() -> None:
    marked = [match[0] for page in PAGES for match in re.finditer(r"(?m)^ *<!-- example.*", page.read_text("utf-8"))]
    assert [mark for mark in marked if not MARK.fullmatch(mark.strip())] == []
    assert {block.needs for block in BLOCKS if block.needs} <= {*NEEDS, *HERE}
    assert len(marked) == sum(bool(block.needs or block.variables) for block in BLOCKS)


# Parsed


@pytest.mark.parametrize("block", WITH_COMMANDS, ids=by_name)
def test_the_options_of_a_command_are_known(block: Block) -> None:
    for command in block.commands():
        match command.words:
            case "ostinato", *words:
                parse(words)
            case "make", *words:
                subprocess.run(["make", "--dry-run", *words], cwd=ROOT, check=True, capture_output=True)
            case "python", "-m", module, *_:
                assert find_spec(module) is not None
            case "pip", "install", *words:
                extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
                named = re.findall(r"ostinato\[(.*?)\]", " ".join(words))
                assert {extra for names in named for extra in names.split(",")} <= set(extras)


def parse(words: list[str]) -> None:
    """Refuse what the command line would refuse before it runs a verb."""
    words = words[: next((place for place, word in enumerate(words) if word in (">", "|")), len(words))]
    command: Any = get_command(cli.app())
    context = command.make_context("ostinato", words)
    while isinstance(command, TyperGroup) and (rest := [*context._protected_args, *context.args]):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


# Run


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[Running]:
    with serving("smollm2", llm={"context": 1024, "slots": 2}) as running:
        yield running


@pytest.fixture
def folder(default_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader may be: a model of one's own, a file of requests, and the docs."""
    (tmp_path / "model.gguf").symlink_to(default_model)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (line,) = (block.text for block in BLOCKS if block.text.startswith('{"custom_id"'))
    (tmp_path / "requests.jsonl").write_text(line, encoding="utf-8")
    # Closed: with other members an answer would go on until the context is full.
    person = {"properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}
    (tmp_path / "person.json").write_text(json.dumps(person), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Name a river.\n")))  # what `chat` is told
    return tmp_path


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, request: pytest.FixtureRequest) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.language == "python" and not block.needs:
            text = block.text
            if ADDRESS in text:
                text = text.replace(ADDRESS, request.getfixturevalue("server").url)
            exec(compile("\n" * block.line + text, str(page), "exec"), names)
    names.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # an example does not close its client
        gc.collect()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("default_model")
@pytest.mark.parametrize("block", WITH_ERRORS, ids=by_name)
def test_the_errors_of_a_block_are_raised(block: Block) -> None:
    names: dict[str, Any] = {}
    for example in DocTestParser().get_examples(block.text):
        code = compile(example.source, block.name, "single")
        if not example.want:
            exec(code, names)
            continue
        with pytest.raises(OstinatoError) as raised:
            exec(code, names)
        said = f"{raised.type.__module__}.{raised.type.__name__}: {raised.value}"
        assert said.split() == example.want.split()
    names["llm"].close()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("folder")
def test_the_examples_of_an_llm_run(default_model: Path) -> None:
    with LLM("smollm2", context=256, slots=1) as llm:
        llm.generate("Once", Sampling(max_tokens=4))  # the answer whose state is saved
        names: dict[str, Any] = {"llm": llm, "LLM": LLM, "Sampling": Sampling}
        for method in (name for name in vars(LLM) if name[0] != "_" and not name.startswith("rank")):
            for example in DocTestParser().get_examples(inspect.getdoc(getattr(LLM, method)) or ""):
                exec(compile(example.source, f"LLM.{method}", "single"), names)


@pytest.fixture
def used_port() -> Iterator[None]:
    """The server's usual port, used by us where it is free."""
    with ExitStack() as taken:
        with suppress(OSError):
            taken.enter_context(socket.create_server(("127.0.0.1", DEFAULT_PORT)))
        yield


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("folder", "used_port")
@pytest.mark.parametrize("block", TO_RUN, ids=by_name)
def test_the_commands_of_a_block_run(
    block: Block, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    if block.needs == "no gpu" and why_no_cuda() is None:
        pytest.skip("there is a GPU here")
    code = 0
    for command in block.commands():
        match command.words:
            case "ostinato", "serve", *_ if command.output is None:
                continue  # `server` is one; it would never end
            case "ostinato", *words:
                code, printed = ostinato(words, block.variables, capfd)
            case "curl", *words:
                code, printed = curl(words, request.getfixturevalue("server").url)
            case "echo", "$?":
                printed, code = str(code), 0
            case _:
                continue
        if command.output is None:
            assert code == 0, printed
        else:
            assert fits(printed, command.output), (
                f"{block.name} says\n{command.output}\nand this was printed\n{printed}"
            )


def ostinato(words: list[str], variables: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a verb: in this process, or in one of its own where variables are set."""
    if variables:
        environment = os.environ | dict(variable.split("=", 1) for variable in variables)
        call = [sys.executable, "-m", "ostinato", *words]
        ran = subprocess.run(call, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return ran.returncode, ran.stderr + ran.stdout
    target = words[words.index(">") + 1] if ">" in words else None
    capfd.readouterr()
    code = cli.call(words[: words.index(">")] if target else words)
    printed = capfd.readouterr()
    if target:
        Path(target).write_text(printed.out, encoding="utf-8")
    return code, printed.err + printed.out


def curl(words: list[str], url: str) -> tuple[int, str]:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    call = ["curl", "--silent", "--show-error", "--fail", *(word.replace(ADDRESS, url) for word in words)]
    ran = subprocess.run(call, capture_output=True, text=True, timeout=60)
    return ran.returncode, ran.stderr + ran.stdout


def fits(printed: str, said: str) -> bool:
    """Whether a page says what was printed, whatever the line ends; `...` in the page stands for anything.

    >>> fits("error: no\\nnode at /tmp", "error: no node at ..."), fits("error: none", "error: no")
    (True, False)
    """
    pattern = ".*".join(re.escape(" ".join(part.split())) for part in said.split("..."))
    return re.fullmatch(pattern, " ".join(printed.split())) is not None
