"""Every code that is cited has a rule, every rule is cited, and docs/rules.md is what the table says."""

import re
from collections import Counter
from pathlib import Path

import pytest

from bench.gpu_check import _checks
from tests.rules import CODE, DOCS, PAGE, ROOT, Group, Rule, citations, main, page, read, rules

RULES = rules()
LESSONS = {code: rule for code, rule in RULES.items() if rule.status is not None}
STATUSES = {"met", "met on the CPU", "open", "does not apply"}
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
        assert rule.note or rule.status.startswith("met"), f"{code}: what is missing, or why does it not apply?"
        assert rule.tests or rule.gpu or rule.status == "does not apply", f"{code}: which test or check shows it?"
        if rule.status == "open":
            assert re.search(r"\d", rule.note or ""), f"{code}: how far is it from being met?"
        assert (rule.reason is not None) == (rule.status == "open"), f"{code}: why is it open?"
        assert set(rule.tests) <= tests, code
        assert set(rule.gpu) <= checks, code


def test_a_code_is_found_in_every_kind_of_source(tmp_path: Path) -> None:
    for place, suffix in enumerate((".py", ".md", ".json", ".cu", ".cpp", ".h"), start=1):
        (tmp_path / f"source{suffix}").write_text(f"one line\nand another, KV-{place}..{place + 1}\n")
    (tmp_path / "picture.png").write_bytes(b"KV-9 \xff")
    found = [(line.path.suffix, line.line, sorted(line.codes)) for line in citations(str(tmp_path))]
    assert found[0] == (".cpp", 2, ["KV-5", "KV-6"])
    assert len(found) == 6


def test_the_page_tells_what_is_open_and_what_is_not_cited() -> None:
    plain = Group("Plain", (Rule("I-1", "It holds."), Rule("I-2", "It too.", uncited="it cannot fail")), "About.")
    lesson = Rule("E-1", "It runs.", status="open", note="it does not", reason="it is new", gpu=("exact trials",))
    text = page([plain, Group("Lessons", (lesson, Rule("E-2", "It ends.", status="met")))])
    assert (
        "## Plain\n\nAbout.\n\n| rule | what must hold |\n|---|---|\n| I-1 | It holds. |\n| I-2 | It too. |\n" in text
    )
    assert "- Neither code nor a test cites I-2: it cannot fail.\n" in text
    assert "| E-1 | It runs. | open: it does not; it is new | exact trials |\n| E-2 | It ends. | met |  |\n" in text
    assert text.endswith("## Open lessons\n\nE-1\n")


def test_the_command_prints_a_rule_with_its_tests_and_citations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["E-12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"E-12 {RULES['E-12'].holds}", *RULES["E-12"].tests]
    assert [line for line in lines[2:] if line.startswith("tests/")]


DECODE_MODE = ROOT / "docs" / "decode-mode.md"


def test_the_page_of_decode_mode_has_every_invariant_and_names_what_exists() -> None:
    """What enforces an invariant is named as `file.py` or as `Class.method`: both must be there."""
    text = DECODE_MODE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (I-\d+) \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    assert [code for code, _, _ in rows] == [code for code in RULES if code.startswith("I-")]
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "src" / "ostinato").rglob("*.py")}
    every = "\n".join(sources.values())
    for code, _, enforced in rows:
        for name in re.findall(r"`([\w./]+)`", enforced):
            if name.endswith(".py"):
                assert (ROOT / "src" / "ostinato" / name).is_file(), f"{code} names {name}"
            else:
                kind, _, method = name.rpartition(".")
                assert not kind or re.search(rf"^class {kind}\b", every, re.MULTILINE), f"{code} names {name}"
                assert re.search(rf"\b(def|class) {method}\b", every), f"{code} names {name}"


def test_every_invariant_is_attacked_by_a_test() -> None:
    """I-1 to I-10: tests/engine/test_mode.py cites each."""
    cited = {code for line in citations("tests/engine/test_mode.py") for code in line.codes}
    assert {f"I-{number}" for number in range(1, 11)} <= cited
