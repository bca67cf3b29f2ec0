"""`ostinato doctor`: an honest report on whatever machine the tests run on."""

from __future__ import annotations

import json
import os
import platform
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.backends.cuda.chip import Chip
from ostinato.backends.native.cpu_levels import LEVELS
from ostinato.cli.output import InstallHints
from ostinato.files import store
from ostinato.options import MODES
from tests.cli.conftest import RunCli

doctor = import_module("ostinato.cli.doctor")  # the room has the verb under this name


def report(ostinato: RunCli) -> dict[str, Any]:
    ran = ostinato("doctor", "--json")
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_it_says_what_can_run_and_why_not_the_rest(ostinato: RunCli) -> None:
    import torch

    found = report(ostinato)
    modes = {(mode["device"], mode["mode"]): mode for mode in found["modes"]}
    assert set(modes) == {("cpu", "eager"), ("cpu", "loop"), *(("cuda", name) for name in MODES)}
    assert modes["cpu", "eager"]["can_run"]
    assert modes["cpu", "loop"]["can_run"]
    if not torch.cuda.is_available():
        said = ostinato("doctor").out
        assert "persistent" not in said
        assert said.count(found["cuda"]["reason"]) == 1
        assert not any(modes["cuda", name]["can_run"] for name in MODES)
    assert all(mode["can_run"] or mode["reason"] for mode in found["modes"])


def test_it_says_whether_the_native_loop_can_run_and_why_not(ostinato: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report(ostinato)
    native = found["native"]
    assert native["level"] in LEVELS
    assert found["cpu"]["threads"] >= 1
    assert native["line"] in ostinato("doctor").out
    monkeypatch.setenv("OSTINATO_CPU_LEVEL", "v9")
    without = report(ostinato)
    loop = next(mode for mode in without["modes"] if (mode["device"], mode["mode"]) == ("cpu", "loop"))
    assert not loop["can_run"]
    assert "OSTINATO_CPU_LEVEL is 'v9'" in loop["reason"]


def modes_of(monkeypatch: pytest.MonkeyPatch, capability: str, driver_cuda: int | None) -> dict[str, str | None]:
    """What is said of each mode on a machine with such a card and driver, and all packages."""
    monkeypatch.setattr(doctor, "missing", lambda _: ())
    found = {
        "devices": [{"capability": capability, "multiprocessors": 132, "shared_bytes": 227 << 10, "verified": []}],
        "driver_cuda": driver_cuda,
        "reason": None,
    }
    return {mode["mode"]: mode["reason"] for mode in doctor._modes(found) if mode["device"] == "cuda"}


@pytest.mark.parametrize(
    ("driver_cuda", "words"), [(None, "does not tell"), (12030, "knows CUDA 12.3"), (12040, None), (13000, None)]
)
def test_an_old_driver_is_told_what_the_loop_needs(
    driver_cuda: int | None, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = modes_of(monkeypatch, "9.0", driver_cuda)
    assert (reasons["eager"], reasons["graph"]) == (None, None)
    reason = reasons["loop"]
    assert (reason is None) == (words is None)
    assert reason is None or (words is not None and words in reason and "12.4 or newer" in reason)


@pytest.mark.parametrize(("capability", "can"), [("7.5", False), ("8.0", True), ("8.9", True), ("9.0", True)])
def test_an_old_card_is_told_what_the_persistent_kernel_needs(
    capability: str, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = modes_of(monkeypatch, capability, 13000)
    for reason in (reasons["loop"], reasons["persistent"]):
        assert (reason is None) == can
        assert reason is None or reason.startswith(f"compute capability {capability} is too old")


def test_a_gpu_is_described_by_what_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of a machine with a GPU, as far as plain values go."""
    device: dict[str, Any] = {
        "name": "a GPU",
        "bytes": 80 << 30,
        "free": 70 << 30,
        "capability": "9.0",
        "multiprocessors": 132,
        "shared_bytes": 227 << 10,
        "pretended": None,
        "verified": [],
    }
    device["kernels"] = doctor.kernel_choices(Chip((9, 0), 132, 227 << 10))
    monkeypatch.setattr(
        doctor, "_cuda", lambda: {"driver": "580.1", "driver_cuda": 13000, "devices": [device], "reason": None}
    )
    found = doctor.examine()
    modes = {(mode["device"], mode["mode"]): mode["can_run"] for mode in found["modes"]}
    assert modes["cuda", "graph"]
    assert modes["cuda", "loop"]
    assert modes["cuda", "persistent"]
    rows = dict(row for row in doctor._rows(found, InstallHints()) if len(row) == 2)
    assert rows["driver"] == "NVIDIA 580.1 for CUDA 13.0 (mode loop needs 12.4)"
    assert rows["gpu"] == "a GPU, 75.2 GB free of 85.9 GB, compute capability 9.0, 132 multiprocessors"
    assert rows["attention in a step"].startswith("528 programs (4 for each of 132 multiprocessors")


def test_every_choice_for_a_chip_has_its_reason_and_capabilities_are_numbers() -> None:
    """E-82."""
    for capability, n, shared in (((7, 5), 40, 64), ((8, 9), 128, 99), ((9, 0), 132, 227), ((10, 0), 148, 227)):
        found = {one["what"]: one for one in doctor.kernel_choices(Chip(capability, n, shared << 10))}
        assert all(one["choice"] and one["reason"] for one in found.values())
        assert found["step boundary"]["choice"] == f"compiled for sm_{capability[0]}{capability[1]}"
        assert found["attention in a step"]["choice"] == f"{4 * n} programs"
        # As text "10.0" would come before "8.0".
        assert found["products of bfloat16"]["choice"] == ("float32 units" if capability[0] == 7 else "tensor cores")
        assert ("fewer stages" in found["shared memory of a block"]["choice"]) == (shared < 227)
        assert found["tiles of products"]["choice"].startswith("by type and shape")


def test_no_chip_changes_how_products_are_cut_and_the_report_says_where_that_was_tuned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """E-82: whatever card torch finds, a weight's tile is the same."""
    import torch

    from ostinato.backends.cuda.packed_types import PACKED_TYPES
    from ostinato.backends.cuda.triton.matmul import bind_matmul
    from ostinato.backends.cuda.triton.tiles import tile_for
    from ostinato.files.quants import BLOCKS
    from tests.backends.cuda.packing import pack

    def packed(type: str, k: int) -> Any:
        row_bytes = k // BLOCKS[type].elements * BLOCKS[type].n_bytes
        return pack(type, torch.zeros(512, row_bytes, dtype=torch.uint8), 512, k)

    short, long = ([torch.zeros(512, k), *(packed(type, k) for type in PACKED_TYPES)] for k in (256, 6400))

    def cuts(chip: Chip) -> list[dict[str, Any]]:
        card = SimpleNamespace(
            major=chip.capability[0],
            minor=chip.capability[1],
            multi_processor_count=chip.n_multiprocessors,
            shared_memory_per_block_optin=chip.shared_bytes,
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: card)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: chip.capability)
        count = torch.ones(1, dtype=torch.int32)
        launches: list[Any] = [
            bind_matmul(torch.zeros(2, k), weight, torch.zeros(2, 512), count)
            for k, group in ((256, short), (6400, long))
            for weight in group
        ]
        return [dict(launch.constants) for launch in launches]

    chips = {one: Chip(one, 132, 227 << 10) for one in ((7, 5), (8, 9), (9, 0), (10, 0))}
    found = {one: cuts(chip) for one, chip in chips.items()}
    assert all(cut == found[9, 0] for cut in found.values())
    tiles = [[tile_for(weight) for weight in group] for group in (short, long)]
    assert len(set(tiles[0])) > 3
    assert tiles[0] != tiles[1]
    said = {one: {row["what"]: row["choice"] for row in doctor.kernel_choices(chip)} for one, chip in chips.items()}
    assert {one: rows["tiles of products"] for one, rows in said.items()} == {
        (7, 5): "by type and shape, as tuned for capability 9.0",
        (8, 9): "by type and shape, as tuned for capability 9.0",
        (9, 0): "by type and shape",
        (10, 0): "by type and shape, as tuned for capability 9.0",
    }


def test_without_the_default_model_there_is_no_memory_plan(ostinato: RunCli) -> None:
    assert report(ostinato)["plan"] is None
    assert "plan:" not in ostinato("doctor").out


def test_the_default_models_memory_plan_is_told_where_it_is_here(
    ostinato: RunCli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "installed", lambda: [store.StoredModel(store.DEFAULT, tiny, tiny.stat().st_size)])
    monkeypatch.setattr(store, "resolve", lambda name, talk: tiny)
    plan = report(ostinato)["plan"]
    assert plan["rows"][0]["name"] == "weights"
    assert plan["fits"]
    shown = ostinato("doctor").out
    assert "plan: KV pages" in shown
    assert "plan: rows of output (at first use)" in shown


def test_it_knows_the_machine(ostinato: RunCli) -> None:
    import torch

    found = report(ostinato)
    assert found["python"] == platform.python_version()
    assert found["packages"]["torch"] == torch.__version__
    assert 1 <= found["cpu"]["cores"] <= (os.cpu_count() or 1)
    assert 0 < found["memory"]["free"] <= found["memory"]["total"]


def test_it_knows_the_store(ostinato: RunCli, home: Path) -> None:
    kept = report(ostinato)["store"]
    assert (kept["home"], kept["writable"], kept["models"]) == (str(home), True, [])
    assert kept["free"] > 0
    assert not home.exists()


def test_a_store_that_cannot_be_written_is_pointed_out(
    ostinato: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "file" / "home"))
    ran = ostinato("doctor")
    assert ran.code == 0
    assert "NOT WRITABLE: set OSTINATO_HOME" in ran.out


def test_plain_output_fits_people(ostinato: RunCli) -> None:
    ran = ostinato("doctor")
    assert ran.code == 0
    for words in ("python", "torch", "memory", "cpu eager", "can run", "cuda", "store"):
        assert words in ran.out


def test_the_cards_are_those_of_the_readme_and_of_the_chips_whose_limits_are_known(ostinato: RunCli) -> None:
    from ostinato.backends.machine import SHARED_BYTES, arch_of
    from ostinato.engine.known_cards import KNOWN

    assert list(KNOWN) == sorted(SHARED_BYTES)
    head, *rows = doctor.card_rows()
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    section = readme.partition("## Which GPUs")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("|") and "---" not in line]
    written = [tuple(cell.strip() for cell in line) for line in lines]
    assert [(*row, "")[:5] for row in written] == [head, *rows]
    assert {row[1] for row in rows[:-1]} == {arch_of(capability) for capability in SHARED_BYTES}
    ran = ostinato("doctor", "--cards")
    assert ran.code == 0
    assert [line.split()[0] for line in ran.out.splitlines()] == [row[0].split()[0] for row in (head, *rows)]
    found = json.loads(ostinato("doctor", "--cards", "--json").out)["cards"]
    assert [tuple(one.values()) for one in found] == rows


def test_a_card_ran_only_where_a_lab_note_says_so() -> None:
    """The date of a run is that of a note about the card."""
    from ostinato.engine.known_cards import KNOWN

    notes = [path.read_text() for path in (Path(__file__).parents[2] / "docs" / "lab").glob("*.md")]
    for known in KNOWN.values():
        assert (known.ran is None) == (known.ran_on is None)
        if known.ran is not None:
            assert any(known.ran in note and f"NVIDIA {known.ran_on}" in note for note in notes)


def cuda_of(*devices: dict[str, Any]) -> dict[str, Any]:
    """What the report has of these GPUs."""
    kinds = {"multiprocessors": 100, "shared_bytes": 99 << 10, "verified": [], "pretended": None, "kernels": []}
    made = [{"name": "a GPU", "bytes": 24 << 30, "free": 23 << 30, **kinds, **device} for device in devices]
    return {"driver": "580.1", "driver_cuda": 13000, "devices": made, "reason": None}


def test_several_gpus_are_each_judged_by_their_own_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "missing", lambda _: ())
    monkeypatch.setattr(doctor, "_cuda", lambda: cuda_of({"capability": "7.5"}, {"capability": "9.0"}))
    rows = dict(row for row in doctor._rows(doctor.examine(), InstallHints()) if len(row) == 2)
    assert rows["cuda:0 graph"].startswith("cannot: compute capability 7.5 is too old")
    assert rows["cuda:1 graph"] == rows["cuda:1 persistent"] == "can run"
    assert "cuda graph" not in rows


@pytest.mark.parametrize("verified", [[], ["persistent"]])
def test_a_mode_that_auto_does_not_choose_yet_is_told_with_what_to_do(
    verified: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "missing", lambda _: ())
    monkeypatch.setattr(doctor, "_cuda", lambda: cuda_of({"capability": "12.0", "verified": verified}))
    rows = dict(row for row in doctor._rows(doctor.examine(), InstallHints()) if len(row) == 2)
    until = "; not chosen by auto until `ostinato verify --mode persistent MODEL` has passed on this card"
    assert rows["cuda persistent"] == "can run" + ("" if verified else until)
    assert rows["cuda loop"] == "can run"


def test_a_pretended_chip_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pretended = doctor._pretended(Chip((8, 9), 132, 99 << 10, (9, 0)))
    assert pretended == "OSTINATO_CHIP pretends sm_89: kernels are made as for it, and this GPU is sm_90"
    assert doctor._pretended(Chip((9, 0), 132, 227 << 10)) is None
    monkeypatch.setattr(doctor, "_cuda", lambda: cuda_of({"capability": "8.9", "pretended": pretended}))
    assert ("gpu", pretended) in doctor._rows(doctor.examine(), InstallHints())


def test_what_of_a_file_fits_is_told(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    ran = ostinato("doctor", tiny)
    assert ran.code == 0
    assert f"of {tiny}" in ran.out
    assert "whole contexts at once: 8 slots with a context of" in ran.out
    found = json.loads(ostinato("doctor", tiny, "--json").out)
    assert found["plan"]["fitting"][0]["slots"] == 8
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    ran = ostinato("doctor", tmp_path / "broken.gguf")
    assert ran.code == 0
    assert "broken.gguf: " in ran.out


def test_a_file_that_is_not_there_is_an_error_and_no_finding(ostinato: RunCli) -> None:
    for words in ((), ("--json",)):
        ran = ostinato("doctor", "nope.gguf", *words)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("error: there is no file or folder 'nope.gguf'")
        assert ran.err.count("\n") == 1
