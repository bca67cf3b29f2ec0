"""`make soak` runs what carries the mark `soak`; a test whose count grows then must not be left out of it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def counts(tree: ast.Module) -> set[str]:
    """`soak` and `soaking` themselves, and the constants of the module that are made with them."""
    found = {"soak", "soaking"}
    for node in tree.body:
        if isinstance(node, ast.Assign) and names_in(node.value) & found:
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def unmarked(source: str) -> Iterator[str]:
    """What repeats `soak(...)` times and has no such mark: functions, classes, and settings of a class."""
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            is_marked = any(ast.unparse(mark) == "pytest.mark.soak" for mark in node.decorator_list)
            if node.name.lower().startswith("test") and names_in(node) & counts(tree) and not is_marked:
                yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            owner = ast.unparse(node.targets[0].value)
            if names_in(node.value) & counts(tree) and f"{owner} = pytest.mark.soak(" not in source:
                yield owner


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_what_grows_under_soak_runs_under_soak(path: Path) -> None:
    assert list(unmarked(path.read_text(encoding="utf-8"))) == []


def test_a_missing_mark_is_found() -> None:
    constant = "N = soak(10)\ndef test_one():\n    f(N)\n"
    marked = "@pytest.mark.soak\ndef test_two():\n    soak(3)\n"
    assert list(unmarked(f"{constant}{marked}T.settings = g(soak(2))")) == ["test_one", "T"]
