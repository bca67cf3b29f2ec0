"""The rules that code, tests and docs cite: the table tests/data/rules.toml, its page, and the lines that cite a rule.

python -m tests.rules KV-12      what the rule says, the tests of a lesson, and every line that cites it
python -m tests.rules --write    write docs/rules.md from the table, and its sentences into docs/decode-mode.md
"""

import argparse
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ran import last_run

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "data" / "rules.toml"
PAGE = ROOT / "docs" / "rules.md"
DECODE_MODE = ROOT / "docs" / "decode-mode.md"
LAB = ROOT / "docs" / "lab"
CODE = ("src/ostinato", "tests", "bench")
DOCS = ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
SUFFIXES = frozenset({".py", ".md", ".json", ".cu", ".cpp", ".h"})
# Names that look like codes.
NAMES = frozenset({"BSD-3", "GLM-4", "GPT-2", "UTF-8", "XS-2"})

# A code with the letter of its part, or a range of codes. A number of three digits is the id of a vector.
_CITED = re.compile(r"\b([A-Z]{1,3})-(\d{1,2})(?:(?:\.\.(?:\1-)?| to \1-)(\d{1,2})|[ab])?\b")


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table; rules.toml describes the fields."""

    code: str
    holds: str
    uncited: str | None = None
    status: str | None = None
    note: str | None = None
    reason: str | None = None
    tests: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    figures: str | None = None

    @property
    def state(self) -> str:
        said = "; ".join(filter(None, (self.note, self.reason)))
        return f"{self.status}: {said}" if said else f"{self.status}"


@dataclass(frozen=True, slots=True)
class Group:
    title: str
    rules: tuple[Rule, ...]
    about: str = ""


@dataclass(frozen=True, slots=True)
class Citation:
    """A line that names rules."""

    path: Path
    line: int
    codes: frozenset[str]

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def read(path: Path = TABLE) -> tuple[Group, ...]:
    """The groups of the table, in its order."""
    groups = tomllib.loads(path.read_text(encoding="utf-8"))["group"]
    return tuple(
        Group(group["title"], tuple(_rule(*item) for item in group.get("rules", {}).items()), group.get("about", ""))
        for group in groups
    )


def _rule(code: str, entry: str | dict[str, Any]) -> Rule:
    if isinstance(entry, str):
        return Rule(code, entry)
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Rule(code, **given)


def rules() -> dict[str, Rule]:
    return {rule.code: rule for group in read() for rule in group.rules}


# Citations


def cited(text: str) -> frozenset[str]:
    """The codes that a text names, one by one or by a range.

    >>> sorted(cited("S-13a and KV-2..4; S-031 is a vector, UTF-8 a name"))
    ['KV-2', 'KV-3', 'KV-4', 'S-13']
    """
    found = set[str]()
    for prefix, first, last in _CITED.findall(text):
        found.update(f"{prefix}-{number}" for number in range(int(first), int(last or first) + 1))
    return frozenset(found - NAMES)


def citations(*places: str) -> Iterator[Citation]:
    """Every line that names a rule in these files and below these folders, except the page."""
    for place in places:
        top = ROOT / place
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.suffix in SUFFIXES and path != PAGE:
                for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                    if codes := cited(line):
                        yield Citation(path, number, codes)


# The page

WIDTH = 110  # of prose
HEAD = """\
# Rules

For contributors: what the rules say that code, tests and docs cite by code (`KV-12`), and how the CUDA
executor works that the lessons (E) are about.

The table is `tests/data/rules.toml`, and `python -m tests.rules --write` writes this page from it. The
command `python -m tests.rules KV-12` prints a rule and every line that cites it. `tests/test_rules.py` fails
if a cited code has no rule, if neither code nor a test cites a rule, or if this page differs from the table.

| codes | rules of |
|---|---|
| I | [decode mode](decode-mode.md) |
| G to EN | [the decoder](decoder.md), with executable examples in `tests/data/decoder_vectors.json` |
| E | [the CUDA executor](#the-executor): lessons, each with its status |

The number of a vector has three digits (`S-031`), the number of a rule one or two.
"""


def page(groups: Sequence[Group]) -> str:
    """docs/rules.md: a table for each group, then the lessons that are open."""
    opened = [rule.code for group in groups for rule in group.rules if rule.status == "open"]
    parts = [HEAD, *map(_section, groups), "## Open lessons\n\n" + _filled(", ".join(opened)) + "\n"]
    return "\n".join(parts)


def _section(group: Group) -> str:
    lines = [f"## {group.title}", ""]
    for paragraph in group.about.split("\n\n") if group.about else ():
        lines += [_filled(paragraph), ""]
    if not group.rules:
        return "\n".join(lines)
    if group.rules[0].status is None:
        lines += ["| rule | what must hold |", "|---|---|"]
        lines += [f"| {rule.code} | {rule.holds} |" for rule in group.rules]
    else:
        lines += ["| lesson | what must hold | status | GPU check |", "|---|---|---|---|"]
        lines += [
            f"| {rule.code} | {rule.holds} | {rule.state} | {', '.join(map(_checked, rule.gpu))} |"
            for rule in group.rules
        ]
    reasons = [f"Neither code nor a test cites {rule.code}: {rule.uncited}." for rule in group.rules if rule.uncited]
    return "\n".join([*lines, *([""] if reasons else []), *(_filled(reason, "- ") for reason in reasons), ""])


def _checked(check: str) -> str:
    return f"{check} ({last_run(check) or 'has not run yet'})"


def _filled(text: str, item: str = "") -> str:
    after = " " * len(item)
    return textwrap.fill(text, WIDTH, initial_indent=item, subsequent_indent=after, break_on_hyphens=False)


# The invariants on the page of decode mode

_INVARIANT = re.compile(r"^\| (I-\d+) \| [^|]* \|", re.MULTILINE)


def with_invariants(text: str) -> str:
    """The page with the table's sentence in the row of each invariant."""
    known = rules()
    return _INVARIANT.sub(lambda row: f"| {row[1]} | {known[row[1]].holds} |", text)


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rules", description="The rules that the code cites.")
    parser.add_argument("code", nargs="?", choices=rules(), metavar="CODE", help="print a rule and what cites it")
    parser.add_argument("--write", action="store_true", help="write the pages from the table")
    asked = parser.parse_args(arguments)
    if asked.write:
        PAGE.write_text(page(read()), encoding="utf-8")
        DECODE_MODE.write_text(with_invariants(DECODE_MODE.read_text(encoding="utf-8")), encoding="utf-8")
    if asked.code is not None:
        rule = rules()[asked.code]
        places = [str(place) for place in citations(*CODE, *DOCS) if rule.code in place.codes]
        print(f"{rule.code} {rule.holds}", *rule.tests, *places, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
