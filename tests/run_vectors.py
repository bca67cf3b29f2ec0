"""Run a file of decoder vectors and say where the result differs: the check that needs no test runner.

    python -m tests.run_vectors FILE [--only COMPONENT]

One line per mismatch (id, rules, key, expected, got), then the counts. Exit status: 0 when every vector matched, 1
when one did not or had no module to run it, 2 when the file cannot be read as vectors.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vectors import component
from tests.vectors.compare import Mismatch, compare

FORMAT = 1


class Unreadable(Exception):
    """A file that holds no vectors of the format known here."""


@dataclass(frozen=True, slots=True)
class Vector:
    """One example: do `op` on `given`, and `expect` must come out."""

    id: str
    component: str
    rule: str
    given: dict[str, Any]
    op: Any
    expect: dict[str, Any]


def read(path: Path) -> list[Vector]:
    """The vectors of a file, in its order."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Unreadable(f"{path}: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("vectors"), list):
        raise Unreadable(f'{path}: not of the shape {{"format": {FORMAT}, "vectors": [...]}}')
    return [_vector(path, place, entry) for place, entry in enumerate(content["vectors"])]


def _vector(path: Path, place: int, entry: Any) -> Vector:
    kinds = {"id": str, "component": str, "rule": str, "given": dict, "expect": dict}
    if not isinstance(entry, dict):
        raise Unreadable(f"{path}: vector {place} is not a map")
    for key, kind in kinds.items():
        if not isinstance(entry.get(key), kind):
            raise Unreadable(f"{path}: vector {place} has no {key!r} of type {kind.__name__}")
    if "op" not in entry:
        raise Unreadable(f"{path}: vector {place} has no 'op'")
    return Vector(*(entry[key] for key in ("id", "component", "rule", "given", "op", "expect")))


def mismatches(vector: Vector) -> list[Mismatch] | None:
    """Where the vector's result differs from what it expects; None when its component has no module."""
    try:
        module = component(vector.component)
        if module is None:
            return None
        got = module.run(vector.given, vector.op)
    except Exception as error:  # whatever a component raises, the vectors after this one are still run
        return [Mismatch("", vector.expect, f"{type(error).__name__}: {error}")]
    return compare(vector.expect, got)


def report(vectors: Sequence[Vector]) -> Iterator[tuple[str, bool]]:
    """The lines to print, and with each whether it tells of something wrong; the counts come last."""
    n_wrong, not_run = 0, dict[str, int]()
    for vector in vectors:
        found = mismatches(vector)
        if found is None:
            not_run[vector.component] = not_run.get(vector.component, 0) + 1
        elif found:
            n_wrong += 1
            yield from ((f"{vector.id} ({vector.rule}) {mismatch}", True) for mismatch in found)
    for name, count in not_run.items():
        yield f"not run: {count} of component {name!r}, which tests/vectors has no module for", True
    n_run = len(vectors) - sum(not_run.values())
    yield f"{len(vectors)} vectors: {n_run - n_wrong} match, {n_wrong} do not, {len(vectors) - n_run} not run", False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.run_vectors", description="Run a file of decoder vectors.")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--only", metavar="COMPONENT", help="run the vectors of one component")
    asked = parser.parse_args(arguments)
    try:
        vectors = read(asked.file)
        if asked.only is not None and asked.only not in {vector.component for vector in vectors}:
            raise Unreadable(f"{asked.file}: no vector of component {asked.only!r}")
    except Unreadable as error:
        print(error, file=sys.stderr)
        return 2
    wrong = False
    for line, is_wrong in report([v for v in vectors if asked.only in (None, v.component)]):
        print(line)
        wrong = wrong or is_wrong
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
