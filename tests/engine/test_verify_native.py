"""`verify` of the native loop by itself: what agrees is found to agree, and what does not is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.backends.compare import first_difference
from ostinato.backends.native import library
from ostinato.backends.native.cpu_levels import PLAIN, Level, architecture, levels_of
from ostinato.engine.choose import choose
from ostinato.engine.load import load_model
from ostinato.engine.verify_native import NativeVerifier, same_answers
from ostinato.errors import HardwareCannot
from ostinato.files.checkpoint import open_checkpoint
from ostinato.models.blocks import LoadedModel
from ostinato.models.registry import read_shape
from ostinato.options import LoadOptions

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tiny_gguf: Path) -> Iterator[tuple[NativeVerifier, Callable[[], LoadedModel]]]:
    with open_checkpoint(tiny_gguf) as checkpoint:
        shape = read_shape(checkpoint)
        settled = choose(checkpoint, shape, LoadOptions(device="cpu", threads=1), lambda _: None)

        def load() -> LoadedModel:
            return load_model(checkpoint, shape, settled)

        yield NativeVerifier(load(), settled, shape.vocab), load


def test_the_loop_agrees_with_its_plainest_code_other_threads_slots_and_cuts(made: Any) -> None:
    verifier, load = made
    report = verifier.verify(load, lambda _: None)
    assert report.passed
    against = {check.against for check in report.checks}
    assert {"the file", "2 threads", "3 threads", "each sequence alone", "before the runs"} <= against
    assert library.plainest_library()[0].words in against or library.chosen_level() == PLAIN
    assert all(check.comparison == "bits" and check.n_compared > 50 for check in report.checks if check.name == "loop")


def test_a_loop_that_answers_otherwise_is_named(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, load = made
    right = NativeVerifier.entries

    def wrong(self: NativeVerifier, cases: Any = None, **how: Any) -> Any:
        entries = right(self, cases, **how)
        return [replace_token(entry) for entry in entries] if how.get("chunk_rows") else entries

    def replace_token(entry: Any) -> Any:
        return entry._replace(token=entry.token + 1) if entry.position == 9 else entry

    monkeypatch.setattr(NativeVerifier, "entries", wrong)
    report = verifier.verify(load, lambda _: None)
    (failed,) = (check for check in report.checks if not check.passed)
    assert failed.against == "prompts cut at every 7 tokens"
    assert failed.difference is not None
    assert failed.difference.buffer == "outbox.token"


def test_without_a_compiler_the_plainest_object_of_the_wheel_is_compared(made: Any, monkeypatch: Any) -> None:
    verifier, load = made
    open_object = library.cpu_library

    def no_plain(*, level: Level) -> Any:
        if level is PLAIN:
            raise HardwareCannot("there is no compiler")
        return open_object(level=level)

    monkeypatch.setattr(library, "cpu_library", no_plain)
    report = verifier.verify(load, lambda _: None)
    assert report.passed
    next_plainest = levels_of(architecture())[-2]
    if next_plainest != library.chosen_level():
        assert ("loop", next_plainest.words) in [(check.name, check.against) for check in report.checks]


def test_answers_of_other_lengths_are_no_equals(made: Any) -> None:
    verifier, _ = made
    entries = verifier.entries()
    assert same_answers(entries, entries).difference is None
    assert same_answers(entries, entries[:-1]).difference is not None


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int8, np.uint16])
def test_the_first_bit_that_differs_between_two_arrays_is_found(kind: Any) -> None:
    one = np.arange(24).reshape(4, 6).astype(kind)
    two = one.copy()
    assert first_difference("node", "x", one, two) is None
    two.view(np.uint8).reshape(-1)[13 * one.itemsize] ^= 1
    found = first_difference("node", "x", one, two)
    assert found is not None
    assert (found.place, found.n_elements) == ((2, 1), 1)
    assert first_difference("node", "x", one, two[:3]) is not None
    same = np.array([1.0, np.nan], np.float32)
    other = same.copy()
    other.view(np.uint32)[1] ^= 1
    not_a_number = first_difference("node", "x", same, other)
    assert not_a_number is not None
    assert "bits" in not_a_number.found
