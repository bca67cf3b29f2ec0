"""The pages under docs/: each can be found, its links lead somewhere, its lines are short, its code names exist."""

import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from ostinato.models.registry import FAMILIES
from tests.rules import ROOT
from tests.test_layers import PACKAGES

DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
OUTSIDE = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md")
PAGES = sorted(DOCS.rglob("*.md"))
# Notes of measurements have a form of their own.
PROSE = [page for page in PAGES if DOCS / "lab" not in page.parents]
DRAWN = {"walk": "walk", "ring": "ring", "decode-mode": "decode-mode", "tape": "tape", "decoder": "decoder"}
DRAWN |= {"rules": "executor", "structured": "structured"}
WIDTH = 110
MOST_WORDS = 25

LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
SOURCE = re.compile(r"`([\w/.-]+\.(?:py|h|cu|cpp))`")
DEFINED = re.compile(r"`([\w/]+\.py)` `(\w+)`(?: and `(\w+)`)?")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def lines_of(page: Path) -> tuple[str, ...]:
    """The lines of a page that are not code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return tuple(text.splitlines())


def links_of(page: Path) -> Iterator[tuple[Path, str]]:
    """Every file that a page links to, itself too, and the anchor in it."""
    for target in LINK.findall("\n".join(lines_of(page))):
        if not re.match(r"\w+:", target):
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


def anchors_of(page: Path) -> set[str]:
    """What can stand behind the # of a link: the headings, as GitHub spells them."""
    titles = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in lines_of(page) if re.match("#+ ", line))
    return {re.sub(r"[^\w\- ]", "", title.lstrip("# ").lower()).replace(" ", "-") for title in titles}


@cache
def sources() -> dict[str, list[Path]]:
    """Every source file of the repository, by its name."""
    found: dict[str, list[Path]] = {}
    for path in chain.from_iterable((ROOT / top).rglob("*.*") for top in ("src", "tests", "bench")):
        found.setdefault(path.name, []).append(path)
    return found


def source_at(name: str) -> Path | None:
    """The source file whose path ends like this."""
    ends = f"/{name}"
    return next((path for path in sources().get(Path(name).name, ()) if path.as_posix().endswith(ends)), None)


def test_every_page_can_be_reached_from_the_index() -> None:
    seen, ahead = {INDEX}, [INDEX]
    while ahead:
        new = {target for target, _ in links_of(ahead.pop()) if target.suffix == ".md" and target not in seen}
        seen |= new
        ahead += [page for page in new if page in PAGES]
    assert [name_of(page) for page in PAGES if page not in seen] == []


@pytest.mark.parametrize("page", [*OUTSIDE, *PAGES], ids=name_of)
def test_links_lead_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    lost = [str(target) for target, _ in links_of(page) if not target.exists()]
    assert lost == []
    pages = [(target, anchor) for target, anchor in links_of(page) if anchor and target.suffix == ".md"]
    assert [(name_of(target), anchor) for target, anchor in pages if anchor not in anchors_of(target)] == []


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_a_page_says_first_what_it_answers_and_for_whom(page: Path) -> None:
    title, empty, first = lines_of(page)[:3]
    assert title.startswith("# ")
    assert empty == ""
    assert re.match(r"For (users|operators|contributors|readers)\b", first), first


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_lines_are_short_except_in_tables_and_code(page: Path) -> None:
    assert [line for line in lines_of(page) if len(line) > WIDTH and not line.startswith("|")] == []


def test_the_readme_is_short() -> None:
    lines = lines_of(ROOT / "README.md")
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > WIDTH] == []


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    named = {name for line in lines_of(page) for name in SOURCE.findall(line) if "NAME" not in name}
    assert sorted(name for name in named if source_at(name) is None) == []


def test_the_walk_names_functions_that_are_in_their_files_and_lists_all_packages() -> None:
    text = "\n".join(lines_of(DOCS / "walk.md"))
    pairs = [(file, name) for file, *names in DEFINED.findall(re.sub(r"\s+", " ", text)) for name in names if name]
    assert len(pairs) > 20
    for file, name in pairs:
        source = (ROOT / "src" / "ostinato" / file).read_text(encoding="utf-8")
        assert re.search(rf"^ *(def|class) {name}\b", source, re.MULTILINE), f"{file} has no {name}"
    table = "".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    assert tuple(name.removesuffix(".py").rstrip("/") for name in re.findall(r"`([^`]+)`", table)) == PACKAGES
    assert 60 <= len(lines_of(DOCS / "walk.md")) <= 75, "a page and a half"


def test_the_glossary_is_short_and_in_order() -> None:
    _, glossary = "\n".join(lines_of(INDEX)).split("\n## Glossary\n")
    cells = [line.split(" | ")[0].removeprefix("| ") for line in glossary.splitlines() if line.startswith("| ")][1:]
    words = [word for cell in cells for word in cell.split(", ")]
    assert 0 < len(words) <= MOST_WORDS
    assert cells == sorted(cells)


@pytest.mark.parametrize(("page", "drawing"), DRAWN.items())
def test_a_page_has_a_drawing_with_colours_for_light_and_dark(page: str, drawing: str) -> None:
    assert f"]({drawing}.svg)" in "\n".join(lines_of(DOCS / f"{page}.md"))
    text = (DOCS / f"{drawing}.svg").read_text(encoding="utf-8")
    style, shapes = re.fullmatch(r".*<style>(.*)</style>(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    named = [dict(re.findall(r"(--[\w-]+): (#\w+)", part)) for part in (light, dark)]
    assert named[0].keys() == named[1].keys() > set()
    assert named[0]["--paper"] != named[1]["--paper"]
    assert set(re.findall(r"var\((--[\w-]+)\)", style)) == named[0].keys()
    assert "#" not in re.sub(r"url\(#\w+\)", "", shapes), "a shape has a class, not a colour"
    assert set(re.findall(r'class="(\w+)"', shapes)) <= set(re.findall(r"\.(\w+) {", style))


def test_the_families_of_the_readme_exist_and_are_as_many_as_it_says() -> None:
    """All of them are in docs/families.md, which tests/test_families.py keeps current."""
    readme, compared = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/compare.md"))
    rows = re.findall(r"^\| \| (.*) \|$", readme.split("| models |")[1].split("| CPU |")[0], re.MULTILINE)
    listed = re.sub(r"[a-z ]+:", "", "; ".join(rows))
    assert set() < set(re.findall(r"[\w-]+", listed)) <= {family.name for family in FAMILIES}
    assert f"| models | {len(FAMILIES)} families" in readme
    assert f"| model families | {len(FAMILIES)} |" in compared
