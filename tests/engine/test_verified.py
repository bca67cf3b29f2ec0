"""Results of `ostinato verify` that `auto` reads: kept for one card, driver and version, and never in the way."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.backends.compare import Difference
from ostinato.backends.machine import Chip, Machine
from ostinato.engine import verified
from ostinato.engine.checks import Check, VerifyReport
from ostinato.engine.choose import LoadCase, decide, why_unverified
from ostinato.engine.verified import VerifiedCard, forget, keep, verified_kinds, verified_modes
from ostinato.models.header import tensors_in
from ostinato.models.shape import Shape
from ostinato.options import KVType, LoadOptions
from tests.backends.tape.models import shape_of, small

BLACKWELL = Chip((10, 0), 148, 227 << 10)
CARD = VerifiedCard.of(BLACKWELL, "NVIDIA B200", "580.65.06")
OF_PARTS = shape_of("qwen3", n_heads=18, n_kv_heads=2)  # nine query heads per KV head
WRONG = Difference("a step", "logits", (0,), "1", "2")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def said() -> list[str]:
    return []


def report(**passed: bool) -> VerifyReport:
    """A report with one check of each name."""
    checks = (Check(name, "eager", "bits", 3, 0.1, None if good else WRONG, {}) for name, good in {**passed}.items())
    return VerifyReport(tuple(checks), {})


def test_a_mode_that_passed_is_verified_for_this_card_driver_and_version_alone(said: list[str]) -> None:
    keep(CARD, report(persistent=True, loop=True, weights=True), "model.gguf", said.append)
    assert verified_modes(CARD, said.append) == ("persistent",)
    for other in (
        replace(CARD, name="NVIDIA B100"),
        replace(CARD, capability="10.3"),
        replace(CARD, driver="590.1"),
        replace(CARD, ostinato="99"),
        replace(CARD, kind="llama"),
    ):
        assert verified_modes(other, said.append) == ()
        forget(other, ["persistent"], said.append)
    assert verified_modes(CARD, said.append) == ("persistent",)
    assert said == []


def test_results_of_several_families_are_kept_beside_each_other(said: list[str]) -> None:
    for family in ("llama", "granite", "gemma3"):
        keep(replace(CARD, kind=family), report(persistent=True), "model.gguf", said.append)
    keep(replace(CARD, kind="gemma3"), report(persistent=False), "model.gguf", said.append)
    assert verified_kinds(CARD, said.append) == {"persistent": ("llama", "granite")}
    assert verified_modes(replace(CARD, kind="granite"), said.append) == ("persistent",)
    assert verified_modes(replace(CARD, kind="gemma3"), said.append) == ()


@pytest.mark.parametrize("failed", [{"persistent": False}, {"persistent": True, "weights": False}])
def test_a_mode_that_fails_loses_its_result(failed: dict[str, bool], said: list[str]) -> None:
    keep(CARD, report(persistent=True), "model.gguf", said.append)
    other = replace(CARD, name="another card")
    keep(other, report(persistent=True), "model.gguf", said.append)
    keep(CARD, report(**failed), "model.gguf", said.append)
    assert verified_modes(CARD, said.append) == ()
    assert verified_modes(other, said.append) == ("persistent",)


def test_another_modes_failure_and_a_report_without_it_leave_its_result(said: list[str]) -> None:
    keep(CARD, report(persistent=True, graph=False), "model.gguf", said.append)
    assert verified_modes(CARD, said.append) == ("persistent",)
    keep(CARD, report(loop=True), "model.gguf", said.append)
    assert verified_modes(CARD, said.append) == ("persistent",)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"results": 3}', b'{"results": [{"mode": "persistent"}]}', b"[" * 200_000, b"\xff"]
)
def test_a_damaged_file_counts_as_absent_is_told_and_is_written_anew(
    content: bytes, home: Path, said: list[str]
) -> None:
    home.mkdir()
    (home / "verified.json").write_bytes(content)
    assert verified_modes(CARD, said.append) == ()
    assert len(said) == 1
    assert "verified.json cannot be read" in said[0]
    keep(CARD, report(persistent=True), "model.gguf", said.append)
    said.clear()
    assert (verified_modes(CARD, said.append), said) == (("persistent",), [])


def test_a_store_that_cannot_be_written_is_told_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "file" / "home"))
    keep(CARD, report(persistent=True), "model.gguf", said.append)
    assert len(said) == 1
    assert "the result for persistent cannot be written to" in said[0]
    assert "set OSTINATO_HOME" in said[0]


def test_a_result_that_cannot_be_removed_is_told(home: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    keep(CARD, report(persistent=True), "model.gguf", said.append)

    def refuse(*_: object) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr("ostinato.files.store.write_whole", refuse)
    keep(CARD, report(persistent=False), "model.gguf", said.append)
    assert said == [
        f"the result for persistent cannot be removed from {home}/verified.json (Read-only file system), so `auto` "
        "goes on to take it; remove that file"
    ]


def test_many_results_leave_the_newest(home: Path, said: list[str]) -> None:
    for number in range(verified.MOST_RESULTS + 3):
        keep(replace(CARD, driver=str(number)), report(persistent=True), "model.gguf", said.append)
    kept = json.loads((home / "verified.json").read_bytes())["results"]
    assert [one["driver"] for one in kept] == [str(number) for number in range(3, verified.MOST_RESULTS + 3)]
    assert set(os.listdir(home)) == {"verified.json", "locks"}  # and no file that was half written


def test_auto_takes_the_persistent_kernel_on_a_chip_where_it_ran_or_was_verified() -> None:
    model = small(shape_of())
    card = Machine("cuda:0", 1 << 40, 1 << 40, BLACKWELL, 13_000)

    def mode_and_reasons(machine: Machine, mode: str = "auto") -> tuple[str, tuple[str, ...]]:
        options = LoadOptions(context=64, slots=1, mode=mode)
        settled = decide(LoadCase(model.shape, tensors_in(model), options, machine))
        return settled.mode, settled.why_not

    reason = "not chosen by auto until `ostinato verify --mode persistent MODEL` has passed on this card"
    assert mode_and_reasons(card) == ("loop", (f"persistent: {reason}",))
    assert mode_and_reasons(card, "persistent") == ("persistent", ())
    assert mode_and_reasons(replace(card, verified={"persistent": ("llama",)})) == ("persistent", ())
    assert mode_and_reasons(replace(card, chip=Chip((9, 0), 132, 227 << 10))) == ("persistent", ())
    assert (why_unverified("loop", card), why_unverified("persistent", card)) == (None, reason)


@pytest.mark.parametrize(
    ("shape", "kv_type", "kind"),
    [
        (shape_of("qwen2"), "q8_0", "qwen2 --kv-type q8_0"),
        (OF_PARTS, "bf16", "qwen3 (query heads of a KV head in parts of 3)"),
        (OF_PARTS, "q8_0", "qwen3 (query heads of a KV head in parts of 3) --kv-type q8_0"),
    ],
)
def test_auto_takes_what_was_only_emulated_once_it_was_verified(shape: Shape, kv_type: KVType, kind: str) -> None:
    model = small(shape)
    hopper = Machine("cuda:0", 1 << 40, 1 << 40, Chip((9, 0), 132, 227 << 10), 13_000)
    case = LoadCase(model.shape, tensors_in(model), LoadOptions(context=64, slots=1, kv_type=kv_type), hopper)
    settled = decide(case)
    assert settled.mode == "loop"
    assert f"with {kind} yet" in settled.why_not[0]
    option = " --kv-type q8_0" if kv_type == "q8_0" else ""
    assert f"`ostinato verify --mode persistent{option} MODEL`" in settled.why_not[0]
    passed = replace(hopper, verified={"persistent": (kind,)})
    assert decide(replace(case, machine=passed)).mode == "persistent"


def test_auto_takes_the_persistent_kernel_for_families_with_which_it_ran_or_was_verified() -> None:
    hopper = Machine("cuda:0", 1 << 40, 1 << 40, Chip((9, 0), 132, 227 << 10), 13_000)
    assert all(why_unverified("persistent", hopper, ran) is None for ran in ("llama", "glm4", "llama --kv-type q8_0"))
    reason = why_unverified("persistent", hopper, "olmo2")
    assert reason is not None
    assert "run on no card with olmo2" in reason
    assert "`ostinato verify --mode persistent MODEL`" in reason
    verified_here = replace(hopper, verified={"persistent": ("olmo2",)})
    assert why_unverified("persistent", verified_here, "olmo2") is None
    assert why_unverified("persistent", verified_here, "olmo3") is not None
    elsewhere = replace(verified_here, chip=BLACKWELL)
    assert why_unverified("persistent", elsewhere, "olmo2") is None
    assert why_unverified("persistent", elsewhere, "llama") is not None
