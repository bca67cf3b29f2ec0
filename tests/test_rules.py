"""Every code that is cited has a rule, every rule is cited, and docs/rules.md is what the table says."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from bench.gpu_check import _checks
from ostinato.backends.machine import DeviceKind
from ostinato.decode_session import DEVICE_PACED
from ostinato.engine.choose import modes_of
from ostinato.files.quants import BLOCKS
from ostinato.options import MODES
from tests.rules import (
    CODE,
    DECODE_MODE,
    DOCS,
    LAB,
    PAGE,
    ROOT,
    Group,
    Rule,
    citations,
    cited,
    main,
    page,
    read,
    rules,
    with_invariants,
)

RULES = rules()
LESSONS = {code: rule for code, rule in RULES.items() if rule.status is not None}
STATUSES = {"met", "open", "does not apply"}
VAGUE = re.compile(r"\b(whoever|nobody|somebody|anybody|what there is)\b", re.IGNORECASE)


def test_every_code_that_is_cited_has_a_rule() -> None:
    unknown = {code: str(line) for line in citations(*CODE, *DOCS) for code in line.codes - RULES.keys()}
    assert unknown == {}, "add them to tests/data/rules.toml, or to NAMES of tests/rules.py if they are no codes"


def test_a_rule_is_cited_or_says_why_not() -> None:
    cited = {code for line in citations(*CODE) for code in line.codes}
    excused = {code for code, rule in RULES.items() if rule.uncited}
    assert sorted(RULES.keys() - LESSONS.keys() - cited - excused) == []
    assert sorted(cited & excused) == [], "these are cited: remove the reason"


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read()), "run: python -m tests.rules --write"


def test_numbers_have_no_gap_and_no_code_comes_twice() -> None:
    codes = [rule.code for group in read() for rule in group.rules]
    count = Counter(code.partition("-")[0] for code in codes)
    assert sorted(codes) == sorted(f"{prefix}-{number + 1}" for prefix, n in count.items() for number in range(n))


def test_rules_are_plain_sentences_that_fit_a_line() -> None:
    for rule in RULES.values():
        assert re.fullmatch(r"[A-Z`][^|]*[^.]\.", rule.holds), rule
        assert not re.search(r"\. [A-Z]", rule.holds), rule
        assert len(rule.holds) <= 120, rule
        for text in (rule.holds, rule.note or "", rule.reason or "", rule.uncited or ""):
            assert not VAGUE.search(text), rule
            assert not re.search(r"\w\.(py|cu|cpp|h)\b", text), f"source files move; a rule names none: {rule}"


def test_a_lesson_is_met_and_names_what_shows_it_or_says_what_is_missing() -> None:
    """E-86."""
    checks = {f"{check.part} {check.name}" for check in _checks()}
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    tests = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}
    for code, rule in LESSONS.items():
        assert rule.status in STATUSES, code
        assert rule.note or rule.status == "met", f"{code}: what is missing, or why does it not apply?"
        assert rule.tests or rule.gpu or rule.status == "does not apply", f"{code}: which test or check shows it?"
        if rule.status == "open":
            assert re.search(r"\d", rule.note or ""), f"{code}: how far is it from being met?"
        assert (rule.reason is not None) == (rule.status == "open"), f"{code}: why is it open?"
        assert set(rule.tests) <= tests, code
        assert set(rule.gpu) <= checks, code


# Sizes and codes are no figures; a figure comes with its unit.
NO_FIGURE = re.compile(r"`[^`]*`|\b[A-Z]{1,3}-\d+\b|\d+ x \d+|\b[A-Z]+\d\w*|\b\d+B\b|(?<![\d.])\d+ bits?\b")
NUMBER = re.compile(r"(?<![\w.,])\d+(?:[.,]\d+)*(?!\w)(?: (?:%|[GT]B/s|ms|us|s)(?!\w))?")
HAS_FIGURE = re.compile(r"\d[.,]\d|\d %")


def figures_in(text: str) -> set[str]:
    return set(NUMBER.findall(NO_FIGURE.sub(" ", text)))


def test_a_figure_is_a_number_with_its_unit_and_no_size_or_code() -> None:
    text = "Q4_K reaches 19 and 25.5 % at 4096 x 4096, of 8 bits (E-8), and 1,024.5 GB/s on an H200"
    assert figures_in(text) == {"19", "25.5 %", "1,024.5 GB/s"}


def test_the_figures_of_a_lesson_are_those_of_its_note() -> None:
    for code, rule in LESSONS.items():
        if rule.figures is not None:
            assert figures_in(rule.note or ""), code
            known = set(NUMBER.findall((LAB / f"{rule.figures}.md").read_text(encoding="utf-8")))
            assert figures_in(rule.note or "") <= known, f"{code}: docs/lab/{rule.figures}.md has other figures"
        elif code != "E-17":
            assert not HAS_FIGURE.search(rule.note or ""), f"{code}: which note of the lab has these figures?"


def test_the_sizes_of_weights_that_become_larger_are_those_of_their_blocks() -> None:
    """E-17."""
    bits = {type: 8 * BLOCKS[type].n_bytes / BLOCKS[type].elements for type in ("Q2_K", "Q3_K", "Q8_0")}
    wider = [f"{wide / bits[type]:.1f}" for wide in (16, bits["Q8_0"]) for type in ("Q2_K", "Q3_K")]
    note = LESSONS["E-17"].note or ""
    named = [f"{type} ({bits[type] + 1e-9:.2f}" for type in ("Q2_K", "Q3_K")]
    assert all(
        text in note for text in (*named, f"{wider[0]} and {wider[1]} times", f"{wider[2]} and {wider[3]} times")
    )
    assert set(NUMBER.findall(NO_FIGURE.sub(" ", note))) == {one.partition("(")[2] for one in named} | set(wider)


def test_what_a_lesson_cites_cites_the_lesson() -> None:
    """A test is in a file that names the code, so that a change of it takes the lesson into account."""
    tests: dict[str, frozenset[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        codes = frozenset[str]().union(*map(cited, source.splitlines()))
        for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE):
            tests[name] = tests.get(name, frozenset()) | codes
    silent = [(code, name) for code, rule in LESSONS.items() for name in rule.tests if code not in tests[name]]
    assert silent == [], "name the code in the test's docstring, or cite another test"


def test_a_code_is_found_in_every_kind_of_source(tmp_path: Path) -> None:
    for place, suffix in enumerate((".py", ".md", ".json", ".cu", ".cpp", ".h"), start=1):
        (tmp_path / f"source{suffix}").write_text(f"one line\nand another, KV-{place}..{place + 1}\n")
    (tmp_path / "picture.png").write_bytes(b"KV-9 \xff")
    found = [(line.path.suffix, line.line, sorted(line.codes)) for line in citations(str(tmp_path))]
    assert found[0] == (".cpp", 2, ["KV-5", "KV-6"])
    assert len(found) == 6


def test_the_page_tells_what_is_open_and_what_is_not_cited() -> None:
    plain = Group("Plain", (Rule("I-1", "It holds."), Rule("I-2", "It too.", uncited="it cannot fail")), "About.")
    lesson = Rule("E-1", "It runs.", status="open", note="it does not", reason="it is new", gpu=("exact nothing",))
    text = page([plain, Group("Lessons", (lesson, Rule("E-2", "It ends.", status="met")))])
    assert (
        "## Plain\n\nAbout.\n\n| rule | what must hold |\n|---|---|\n| I-1 | It holds. |\n| I-2 | It too. |\n" in text
    )
    assert "- Neither code nor a test cites I-2: it cannot fail.\n" in text
    assert "| E-1 | It runs. | open: it does not; it is new | exact nothing (has not run yet) |\n" in text
    assert "| E-2 | It ends. | met |  |\n" in text
    assert text.endswith("## Open lessons\n\nE-1\n")


def test_the_command_prints_a_rule_with_its_tests_and_citations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["E-12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"E-12 {RULES['E-12'].holds}", *RULES["E-12"].tests]
    assert [line for line in lines[2:] if line.startswith("tests/")]


def members() -> dict[str, set[str]]:
    """The methods and properties of every class of the package, with those of its bases."""
    own: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for path in (ROOT / "src" / "ostinato").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                own.setdefault(node.name, set()).update(n.name for n in node.body if isinstance(n, ast.FunctionDef))
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]

    def of(name: str) -> set[str]:
        return own.get(name, set()).union(*map(of, bases.get(name, ())))

    return {name: of(name) for name in own}


def rows_of(first: str) -> list[list[str]]:
    """The rows of the page of decode mode whose first cell matches."""
    lines = DECODE_MODE.read_text(encoding="utf-8").splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if re.match(rf"\| {first} \|", line)
    ]


def test_the_page_of_decode_mode_has_the_sentences_of_the_table() -> None:
    text = DECODE_MODE.read_text(encoding="utf-8")
    assert [row[0] for row in rows_of(r"I-\d+")] == [code for code in RULES if code.startswith("I-")]
    assert text == with_invariants(text), "run: python -m tests.rules --write"
    assert with_invariants("| I-8 | Some of it. | `x` |\n") == f"| I-8 | {RULES['I-8'].holds} | `x` |\n"


@pytest.mark.slow
def test_what_enforces_an_invariant_is_there() -> None:
    """It is named as `folder/file.py`, as `Class`, or as `Class.method` of that very class."""
    known = members()
    assert "step" in known["Start"]
    assert "trigger" not in known["Start"]
    for code, _, enforced in rows_of(r"I-\d+"):
        names = re.findall(r"`([^`]+)`", enforced)
        assert names or "As for" in enforced, code
        for name in names:
            kind, _, method = name.partition(".")
            if name.endswith(".py"):
                assert (ROOT / "src" / "ostinato" / name).is_file(), f"{code} names {name}"
            else:
                assert kind in known, f"{code} names {name}"
                assert not method or method in known[kind], f"{code} names {name}"


def test_the_table_of_modes_has_those_that_each_device_has() -> None:
    rows = {row[0].strip("`"): row[1:] for row in rows_of(r"`\w+`") if row[0].strip("`") in MODES}
    assert tuple(rows) == MODES
    kinds: tuple[DeviceKind, ...] = ("cpu", "cuda")
    for column, kind in enumerate(kinds, start=1):
        assert tuple(mode for mode, cells in rows.items() if cells[column] != "-") == modes_of(kind), kind
    assert tuple(mode for mode, cells in rows.items() if cells[0] == "the device") == DEVICE_PACED


def test_every_invariant_is_attacked_by_a_test() -> None:
    """I-1 to I-10: tests/engine/test_mode.py cites each."""
    cited = {code for line in citations("tests/engine/test_mode.py") for code in line.codes}
    assert {f"I-{number}" for number in range(1, 11)} <= cited
