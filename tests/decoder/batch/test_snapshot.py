"""What the batch bench counts is what is written down, and the sanitizer's work is not done token by token."""

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from bench.batch import CASES, SEQUENCES, Case, clean, counts

SNAPSHOT = Path(__file__).parent / "snapshot.json"


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_counts_of_the_bench_are_those_of_the_snapshot(case: Case) -> None:
    """After a change that is meant: python -m bench.batch --snapshot tests/decoder/batch/snapshot.json"""
    assert counts(case) == json.loads(SNAPSHOT.read_text())[case.name]


def test_the_snapshot_has_every_case() -> None:
    assert list(json.loads(SNAPSHOT.read_text())) == [case.name for case in CASES]


def lines_run(case: Case) -> int:
    """How many lines of Python the sanitizer runs for a batch of arrays."""
    batch, n_lines = case.arrays(), 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal n_lines
        n_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        clean(batch)
    finally:
        sys.settrace(before)
    return n_lines


@pytest.mark.parametrize("n_seqs", SEQUENCES)
def test_sixteen_times_the_tokens_run_no_more_lines_of_python(n_seqs: int) -> None:
    assert lines_run(Case(8_192, n_seqs)) == lines_run(Case(512, n_seqs))
