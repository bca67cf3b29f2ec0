"""Every vector of the specification as a test named after its id, and the runner that prints them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rules import cited, rules
from tests.run_vectors import Vector, main, mismatches, read
from tests.vectors import component
from tests.vectors.compare import compare

FILE = Path(__file__).parent / "data" / "decoder_vectors.json"
VECTORS = read(FILE)
RULES = rules()


@pytest.mark.parametrize("vector", VECTORS, ids=[vector.id for vector in VECTORS])
def test_vector(vector: Vector) -> None:
    found = mismatches(vector)
    assert found is not None, f"no module tests/vectors/{vector.component}.py"
    told = [f"{code}: {RULES[code].holds}" for code in sorted(cited(vector.rule))]
    assert found == [], "\n".join([vector.id, *told, *map(str, found)])


def test_the_file_holds_every_vector_once() -> None:
    assert len(VECTORS) == len({vector.id for vector in VECTORS}) == 362


def test_a_module_that_only_helps_is_no_component() -> None:
    assert component("compare") is None
    assert component("no_such_component") is None
    assert component("../sanitizer") is None


@pytest.mark.parametrize(
    ("expect", "got", "keys"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, []),
        ({"a": 1}, {"a": 2}, ["a"]),
        ({"a": 1}, {}, ["a"]),
        ({"a": [1, 2]}, {"a": (1, 2)}, []),
        ({"a": [1, 2]}, {"a": [1, 2, 3]}, ["a"]),
        ({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 3}]}, ["a[1].b"]),
        ({"seqs": {"0": [0, 2]}}, {"seqs": {0: [0, 2]}}, []),
        ({"seqs": {"0": [0, 2]}}, {"seqs": {0: [0, 2], 1: [0, 0]}}, ["seqs"]),
        ({"seqs": {}}, {"seqs": {0: [0, 2]}}, ["seqs"]),
        ({"seqs": {}}, {"seqs": {}}, []),
        ({"a": ["any", "absent"]}, {"a": [[0.5], None]}, []),
        ({"a": ["any", "absent"]}, {"a": [None, 3]}, ["a[0]", "a[1]"]),
        ({"a": "absent"}, {}, []),
        ({"a": 0.3333}, {"a": 1 / 3}, []),
        ({"a": True}, {"a": 1}, ["a"]),
        ({"a": None}, {"a": 0}, ["a"]),
    ],
)
def test_comparison_follows_the_rules_of_the_file(expect: Any, got: Any, keys: list[str]) -> None:
    assert [mismatch.key for mismatch in compare(expect, got)] == keys


@pytest.mark.slow
def test_the_runner_needs_nothing_that_only_tests_install() -> None:
    hidden = ("accelerate", "gguf", "hypothesis", "mypy", "pytest", "transformers", "xdist", "xllamacpp")
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden})); from tests.run_vectors import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", script, str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FILE.parents[2])
    assert done.stdout.splitlines()[-1:] != [], done.stderr
    assert ", 0 do not, " in done.stdout.splitlines()[-1], done.stdout
    assert done.returncode == 0


def write(path: Path, vectors: list[dict[str, Any]]) -> str:
    path.write_text(json.dumps({"format": 1, "vectors": vectors}))
    return str(path)


def one(**changes: Any) -> dict[str, Any]:
    given = {"n_vocab": 128, "n_seq_max": 8, "output_all": False, "n_pos_per_embd": 1, "memory": None}
    made = {
        "id": "S-901",
        "component": "sanitizer",
        "rule": "S-9",
        "given": {**given, "batch": {"token": [5, 6]}},
        "op": "init",
        "expect": {"ok": True, "pos": [0, 1], "n_outputs": 1},
    }
    return {**made, **changes}


def test_the_runner_is_silent_about_vectors_that_match(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path / "good.json", [one()])]) == 0
    assert capsys.readouterr().out == "1 vectors: 1 match, 0 do not, 0 not run\n"


def test_the_runner_prints_one_line_per_mismatch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = one(expect={"ok": True, "pos": [0, 2], "n_outputs": 7})
    assert main([write(tmp_path / "wrong.json", [wrong, one(id="S-902")])]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "S-901 (S-9) pos: expected [0, 2], got [0, 1]",
        "S-901 (S-9) n_outputs: expected 7, got 1",
        "2 vectors: 1 match, 1 do not, 0 not run",
    ]


def test_an_exception_is_a_mismatch_and_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path / "odd.json", [one(given={}), one(id="S-902")])]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "KeyError" in lines[0]
    assert lines[1] == "2 vectors: 1 match, 1 do not, 0 not run"


def test_a_component_without_a_module_is_reported_and_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "foreign.json", [one(), one(id="Y-001", component="telepathy")])
    assert main([path]) == 1
    assert "not run: 1 of component 'telepathy'" in capsys.readouterr().out
    assert main([path, "--only", "sanitizer"]) == 0


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": 2, "vectors": []}',
        '{"format": 1}',
        '{"format": 1, "vectors": [{"id": "S-1"}]}',
        "[" * 99_999,
    ],
)
def test_a_file_that_holds_no_vectors_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    assert main([str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(path) in captured.err
    assert main([str(tmp_path / "absent.json")]) == 2
