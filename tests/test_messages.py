"""What is read is plain: no message, help text or page cites a rule by its code, and no sentence hides its subject."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command

import ostinato
from ostinato import cli
from tests.rules import CODE, DOCS, ROOT, SUFFIXES, cited

PACKAGE = Path(ostinato.__file__).parent
# Words for a subject that has a name, such as the scheduler or a request; also within a longer name.
HIDING = re.compile("whoever|nobody|somebody|anybody", re.IGNORECASE)
# Files that name these words, or quote a story. Notes of the lab stay as they were written.
NAMING = {"tests/test_messages.py", "tests/test_rules.py", "tests/models/test_default_model.py"}


def texts(source: str) -> Iterator[str]:
    """The texts in a module that may be printed: all but docstrings, and codes alone, which are data.

    >>> list(texts("'S-1 in a docstring'; allow('I-2', f'token {n} (S-4)'); 'S-3 too'"))
    ['token ', ' (S-4)']
    """
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings and cited(text) != {text}:
                yield text


@pytest.mark.slow
def test_no_message_cites_a_rule() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    assert [(name, text) for name, source in sources.items() for text in texts(source) if cited(text)] == []


def test_no_page_cites_a_rule() -> None:
    assert [path.name for path in PACKAGE.rglob("*.html") if cited(path.read_text("utf-8"))] == []


def helps(command: Any, words: tuple[str, ...] = ("ostinato",)) -> Iterator[tuple[str, str]]:
    """Each verb and the text of its help, of the docstring and of the options."""
    yield " ".join(words), "\n".join([command.help or "", *(one.help or "" for one in command.params)])
    if isinstance(command, TyperGroup):
        for name, verb in command.commands.items():
            yield from helps(verb, (*words, name))


def test_no_help_cites_a_rule() -> None:
    found = dict(helps(get_command(cli.app())))
    assert "ostinato bench decode" in found
    assert [verb for verb, text in found.items() if cited(text)] == []


@pytest.mark.slow
def test_no_sentence_or_name_hides_its_subject() -> None:
    below = (path for place in (*CODE, *DOCS) for path in [ROOT / place, *(ROOT / place).rglob("*")])
    files = {path.relative_to(ROOT).as_posix(): path for path in below if path.suffix in SUFFIXES}
    sources = {name: path.read_text("utf-8") for name, path in files.items() if not name.startswith("docs/lab/")}
    assert len(sources) > 900
    assert {name for name, text in sources.items() if HIDING.search(text)} == NAMING
