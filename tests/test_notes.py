"""The lab's notes: lines of docs/lab/data, pages of docs/lab, and the index that lists them, newest first."""

import json
import re
from pathlib import Path

import pytest

from bench.note import DATA, FIELDS, Series, append, as_json, value

LAB = DATA.parent
PAGES = sorted(path for path in LAB.glob("*.md") if path.name != "index.md")
LINES = {
    f"{path.name}:{number}": line
    for path in sorted(DATA.glob("*.jsonl"))
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
}
# Lines of the first days that lack a field: a program that did not print the commit, and lines written from notes.
LACKING = {
    "cuda-cpu.jsonl:1": {"commit"},
    "make-run.jsonl:1": {"commit"},
    "make-run.jsonl:2": {"commit"},
    "make-run.jsonl:3": {"commit"},
    "torch-download.jsonl:1": {"commit"},
}


@pytest.mark.parametrize("place", LINES)
def test_a_line_of_data_tells_when_what_and_where_was_run(place: str) -> None:
    note = json.loads(LINES[place])
    assert {field for field in FIELDS if not note.get(field)} == LACKING.get(place, set())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", note["date"])
    assert "python" in note["versions"]


def test_every_page_is_in_the_index_under_its_date_with_its_question() -> None:
    index = _text(LAB / "index.md").replace("\n  ", " ")
    days = re.findall(r"^## (\d{4}-\d\d-\d\d)\n(.*?)(?=^## )", index, re.M | re.S)
    entries = [(day, re.findall(r"^- \[(.+?)\]\((\S+\.md)\): ", text, re.M)) for day, text in days]
    listed = [(day, question, page) for day, links in entries for question, page in links]
    assert sorted(listed) == sorted((*_head(page), page.name) for page in PAGES)
    assert [day for day, _, _ in listed] == sorted((day for day, _, _ in listed), reverse=True)


def _head(page: Path) -> tuple[str, str]:
    """The date and the question of a page."""
    match = re.match(r"# (.+\?)\n\n(\d{4}-\d\d-\d\d)", _text(page))
    assert match, f"{page.name} begins with '# Question?' and the date"
    return match[2], match[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_its_setting_results_and_what_follows(page: Path) -> None:
    heads = [head.split()[0] for head in re.findall(r"^## (.+)$", _text(page), re.M)]
    assert list(dict.fromkeys(heads)) == ["Setting", "Results", "What"]
    assert [line for line in _text(page).splitlines() if len(line) > 110] == []
    assert re.search(r"^\|---", _text(page), re.M), "a note has a table"


def test_pages_link_to_what_exists_and_to_every_file_of_data() -> None:
    links = {
        (page.parent / link).resolve()
        for page in LAB.glob("*.md")
        for link in re.findall(r"\]\(([^)#:]+)\)", _text(page))
    }
    assert sorted(str(link) for link in links if not link.exists()) == []
    assert sorted(path.name for path in DATA.iterdir() if path.resolve() not in links) == []


def test_a_note_is_appended_and_read_again(tmp_path: Path) -> None:
    series = [Series("ours", "decode", "tok/s", (1.0, 3.0, 2.5)), Series("theirs", "decode", "tok/s", (1.0,))]
    printed = as_json("how fast?", "python -m bench.x", {"python": "3.11"}, series=series)
    assert append(["a table\n", printed + "\n", "{a summary}\n"], "new", tmp_path) == "new.jsonl:1"
    assert append([printed], "new", tmp_path) == "new.jsonl:2"
    assert value("new.jsonl:2/series/ours+decode/runs", tmp_path) == 2.5
    with pytest.raises(LookupError, match="2 items are called 'decode'"):
        value("new.jsonl:2/series/decode/runs", tmp_path)


def test_a_note_that_lacks_a_field_is_not_appended(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no command and no device"):
        append([json.dumps(dict.fromkeys(set(FIELDS) - {"command", "device"}, "x"))], "new", tmp_path)
    with pytest.raises(SystemExit, match="no line is a JSON object"):
        append(["words"], "new", tmp_path)
    assert list(tmp_path.iterdir()) == []


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
