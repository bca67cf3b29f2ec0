"""The figures of README.md and where they come from: the table docs/lab/data/readme.toml, which describes itself.

python -m tests.figures    print every figure that has no source or differs from it
"""

import re
import string
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import chart
from bench.note import DATA, value

ROOT = Path(__file__).parents[1]
README = "README.md"
TABLE = DATA / "readme.toml"

# No part of a word such as Q4_1, H200 or Apache-2.0.
_NUMBER = r"(?<![\w.])(?<![A-Za-z]-)\d++(?:,\d{3})*+(?:\.\d+)?+(?:e-?\d+)?+"
_UNIT = (
    r"(?:[x×]|\s?%|k?[\s-]?(?:(?:tok|tokens?|requests?)(?:/s| per second| a second)|[kKMGT]i?B(?:/s)?"
    r"|[nuµm]?s|min|(?:milli|micro)?seconds?|minutes?|hours?)|\stimes)(?!\w)"
)
_FIGURES = re.compile(rf"{_NUMBER}(?:(?:,| to| and| or| -|;| /)?\s{_NUMBER})*{_UNIT}")
_DRAWN = re.compile(rf"{_NUMBER}(?![^\Wkx])")  # "1B" names a model
_NUMBERS_ALONE = re.compile(rf"\W*{_NUMBER}[\d\W]*")
_SVG = re.compile(r"\bdocs/[\w./-]+\.svg\b")

Span = tuple[int, int]


def problems(texts: dict[str, str], table: dict[str, Any], folder: Path = DATA) -> list[str]:
    """What is wrong with the figures of the texts, by name: the README, and the SVGs that it shows."""
    found: list[str] = []
    covered: dict[str, set[Span]] = {name: set() for name in texts}
    for entry in table.get("figure", ()):
        name = entry.get("in", README)
        values = [value(address, folder) for address in entry["from"]]
        pattern = _pattern(entry["text"], values)
        spans = [match.span(n + 1) for match in re.finditer(pattern, texts.get(name, "")) for n in range(len(values))]
        if not spans:
            found.append(f"{name} does not have what the notes say: {entry['text'].format(*values)}")
        covered.setdefault(name, set()).update(spans)
    for entry in table.get("stated", ()):
        name = entry.get("in", README)
        matches = list(re.finditer(_whole(_loose(entry["text"])), texts.get(name, "")))
        if not matches or not entry["why"]:
            found.append(f"{name} does not have what is called stated: {entry['text']}")
        covered.setdefault(name, set()).update(
            span for match in matches for span in _numbers(texts[name], match.span())
        )
    for name, text in texts.items():
        for start, end in sorted(set(figures(text, drawn=name != README)) - covered[name]):
            line = text.count("\n", 0, start) + 1
            found.append(f"{name}:{line}: {text[start:end]} has no source in {TABLE.relative_to(ROOT)}")
    return found


def figures(text: str, drawn: bool = False) -> Iterator[Span]:
    """Where the text has a figure; in the text of a drawing every number is one."""
    if drawn:
        yield from (match.span() for match in _DRAWN.finditer(text))
        return
    for match in _FIGURES.finditer(text):
        yield from _numbers(text, match.span())
    for table in re.finditer(r"^\|.*\n((?:\|.*\n?)+)", text, re.MULTILINE):  # the header's numbers are settings
        cells = list(_cells(text, table.span(1)))
        if any(_NUMBERS_ALONE.fullmatch(text[start:end]) for start, end in cells):
            yield from (span for cell in cells for span in _numbers(text, cell))


def _cells(text: str, rows: Span) -> Iterator[Span]:
    """The cells of the rows, without the first of each."""
    for row in re.compile(r"^\|.*$", re.MULTILINE).finditer(text, *rows):
        bars = [row.start() + match.start() for match in re.finditer(r"\|", row[0])]
        yield from zip((bar + 1 for bar in bars[1:-1]), bars[2:], strict=True)


def _numbers(text: str, span: Span) -> Iterator[Span]:
    return (match.span() for match in re.compile(_NUMBER).finditer(text, *span))


def _pattern(template: str, values: Sequence[float]) -> str:
    """A pattern of the template with the values in it, each in a group of its own; lines may break anywhere."""
    left, parts = list(values), []
    for literal, field, spec, _ in string.Formatter().parse(template):
        parts.append(_loose(literal))
        if field is not None:
            parts.append(f"({re.escape(format(left.pop(0), spec or ''))})")
    return _whole("".join(parts))


def _whole(pattern: str) -> str:
    """The pattern where it cuts no number."""
    return rf"(?<![\d,.]){pattern}(?!\d|[,.]\d)"


def _loose(text: str) -> str:
    return r"\s+".join(re.escape(word) for word in re.split(r"\s+", text))


def drawn_text(svg: str) -> str:
    """The texts of a drawing, one to a line, without those of its ticks."""
    texts = (element for element in ElementTree.fromstring(svg).iter() if element.tag.rpartition("}")[2] == "text")
    return "\n".join("".join(text.itertext()) for text in texts if "tick" not in text.get("class", "").split())


def shown() -> dict[str, str]:
    """The README, and the text of every SVG that it shows, except the chart: its program reads the notes itself."""
    readme = (ROOT / README).read_text(encoding="utf-8")
    names = set(_SVG.findall(readme)) - {str(chart.OUT.relative_to(ROOT))}
    return {README: readme} | {name: drawn_text((ROOT / name).read_text(encoding="utf-8")) for name in names}


def main() -> None:
    found = problems(shown(), tomllib.loads(TABLE.read_text(encoding="utf-8")))
    for problem in found:
        print(problem)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
