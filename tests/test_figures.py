"""Every figure of README.md is read from a note of docs/lab/data, as docs/lab/data/readme.toml says."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bench import chart
from tests.figures import README, TABLE, drawn_text, figures, problems, shown

DOCS = Path(__file__).parents[1] / "docs"
LINE = '{"rows": [{"name": "a", "value": "1234 tok/s"}, {"name": "b", "runs": [0.5, 0.262, 0.1]}]}\n'
A, B = "x.jsonl:1/rows/a/value ~ ([\\d,]+) tok/s", "x.jsonl:1/rows/b/runs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "x.jsonl").write_text(LINE)
    return tmp_path


def figure(text: str, *sources: str, **more: str) -> dict[str, Any]:
    return {"figure": [{"text": text, "from": list(sources)} | more]}


def found(text: str) -> list[str]:
    return [text[start:end] for start, end in figures(text)]


def test_every_figure_of_the_readme_is_what_its_note_says() -> None:
    assert problems(shown(), tomllib.loads(TABLE.read_text(encoding="utf-8"))) == []


def test_the_charts_are_what_their_program_draws_from_the_notes() -> None:
    assert chart.OUT.read_text(encoding="utf-8") == chart.picture()
    assert chart.DECODE_OUT.read_text(encoding="utf-8") == chart.decode_modes()


def test_no_figure_of_the_readme_can_change_alone() -> None:
    texts, table = shown(), tomllib.loads(TABLE.read_text(encoding="utf-8"))
    unnoticed = []
    for name, text in texts.items():
        for start, end in figures(text, drawn=name != README):
            changed = text[: end - 1] + str((int(text[end - 1]) + 1) % 10) + text[end:]
            if not problems(texts | {name: changed}, table):
                unnoticed.append(text[start:end])
    assert unnoticed == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it decodes 1,376 tok/s", ["1,376"]),
        ("between 1.15 and 2.26 times, or 1.8x", ["1.15", "2.26", "1.8"]),
        ("3.0 GB, 98MB, 0.14 s and 12 %", ["3.0", "98", "0.14", "12"]),
        ("12.3k tok/s in 20-minute runs", ["12.3", "20"]),
        ("Q4_1 on 2 cores of an H200, context 500, a 7B, Apache-2.0", []),
        ("| | a 512 |\n|---|---|\n| row 4 | 7 / 8 |\n", ["7", "8"]),
        ("| | a |\n|---|---|\n| row | 7 |\n| other | 9 with a word |\n", ["7", "9"]),
        ("| | |\n|---|---|\n| slots | up to 64, default 8 |\n", []),
    ],
)
def test_a_figure_is_a_number_with_a_unit_or_in_a_table_of_numbers(text: str, expected: list[str]) -> None:
    assert found(text) == expected


def test_a_figure_follows_its_note_and_the_format_rounds_it(folder: Path) -> None:
    table = figure("at {:,.0f} tok/s after {:.2f} s", A, B)
    assert problems({README: "runs at 1,234 tok/s\nafter 0.26 s."}, table, folder) == []
    [differs, *others] = problems({README: "runs at 1,235 tok/s after 0.26 s."}, table, folder)
    assert differs == "README.md does not have what the notes say: at 1,234 tok/s after 0.26 s"
    assert [problem.split()[1] for problem in others] == ["1,235", "0.26"]


def test_a_figure_without_a_source_is_named_with_its_line(folder: Path) -> None:
    assert problems({README: "words\n5 GB"}, {}, folder) == [
        "README.md:2: 5 has no source in docs/lab/data/readme.toml"
    ]


def test_the_words_of_an_entry_are_no_source(folder: Path) -> None:
    table = figure("5 GB at {:,.0f} tok/s", A)
    [problem] = problems({README: "5 GB at 1,234 tok/s"}, table, folder)
    assert ": 5 has no source" in problem


def test_what_is_stated_needs_no_note_and_must_be_there(folder: Path) -> None:
    table = {"stated": [{"text": "5 GB", "why": "a limit"}]}
    assert problems({README: "at most 5 GB"}, table, folder) == []
    assert len(problems({README: "at most 15 GB"}, table, folder)) == 2
    assert problems({README: ""}, table, folder) == ["README.md does not have what is called stated: 5 GB"]


def test_an_address_that_names_no_single_figure_is_refused(folder: Path) -> None:
    for address in ("x.jsonl:1/rows/c/runs", "x.jsonl:1/rows/a/value ~ ([0-9]+) GB"):
        with pytest.raises(LookupError, match=r"x\.jsonl:1/rows"):
            problems({README: ""}, figure("{}", address), folder)


def test_every_number_in_the_text_of_a_drawing_is_a_figure_but_for_ticks(folder: Path) -> None:
    bar = '<text class="tick">500</text><text>1B <tspan>1,234</tspan></text>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg">{bar}</svg>'
    texts = {README: "", "docs/chart.svg": drawn_text(svg)}
    assert problems(texts, figure("1B {:,.0f}", A, **{"in": "docs/chart.svg"}), folder) == []
    assert problems(texts, {}, folder) == ["docs/chart.svg:1: 1,234 has no source in docs/lab/data/readme.toml"]


def test_the_figures_of_the_comparison_are_in_the_notes_that_it_links_to() -> None:
    text = (DOCS / "compare.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|") and "](lab/" in line]
    assert len(rows) > 3
    for row in rows:
        notes = "".join((DOCS / note).read_text("utf-8") for note in re.findall(r"\]\((lab/\S+?)\)", row))
        _, _, ours, theirs, *_ = row.split("|")
        for figure in re.findall(r"\d[\d,]*\d", re.sub(r"`.*?`", "", ours + theirs)):
            assert re.search(rf"(?<![\d,]){figure}(?![\d,])", notes), f"{figure} of {row}"
