"""`ostinato lab` on a machine without a GPU."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ostinato.lab.cpu import CpuMachine
from ostinato.lab.model import Workload
from ostinato.lab.work import Timing
from tests.cli.conftest import RunCli

SMALL = ("--n", "64", "--steps", "10", "--repeats", "1", "--device", "cpu")


def test_predicting_needs_no_gpu(ostinato: RunCli) -> None:
    ran = ostinato("lab", "predict", "--kernels", "150", "--launch-us", "6", "--compute-ms", "18")
    assert (ran.code, ran.err) == (0, "")
    assert "overhead 4.8 %" in ran.out
    assert "overhead 13 %" in ostinato("lab", "predict", "--kernels=150", "--launch-us=6", "--compute-ms=6").out


def test_a_prediction_of_the_impossible_is_refused(ostinato: RunCli) -> None:
    ran = ostinato("lab", "predict", "--kernels", "0", "--launch-us", "6", "--compute-ms", "18")
    assert ran.code == 2
    assert "there must be a kernel at least" in ran.err


@pytest.mark.slow
def test_a_sweep_prints_tables_and_one_line_of_json(ostinato: RunCli) -> None:
    ran = ostinato("lab", "sweep", "--over", "kernels", "--values", "1,3", *SMALL)
    assert ran.code == 0, ran.err
    assert "a CPU" in ran.out
    found = json.loads(ran.out.splitlines()[-1])
    assert [row["kernels"] for row in found["rows"]] == [1, 3]
    assert found["machine"]["kind"] == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("late", [1.0, 1.5])
def test_a_busy_machine_is_said_to_be_busy(ostinato: RunCli, monkeypatch: pytest.MonkeyPatch, late: float) -> None:
    """Half of the runs take 1.5 times as long as the fastest."""
    timed = CpuMachine.time

    def time(machine: CpuMachine, work: Workload, start: str, repeats: int) -> Timing:
        found = timed(machine, work, start, repeats)
        return replace(found, step_us=(found.us, found.us * late, found.us * late))

    monkeypatch.setattr(CpuMachine, "time", time)
    ran = ostinato("lab", "sweep", "--over", "n", "--values", "4096", *SMALL)
    assert ran.code == 0, ran.err
    assert ("this machine is busy: the same work took 50% longer" in ran.err) == (late > 1)
    assert ("off by" in ran.out) == (late == 1)


@pytest.mark.slow
def test_everything_leaves_a_report_and_two_of_them_are_compared(
    ostinato: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb = importlib.import_module("ostinato.cli.lab")
    monkeypatch.setattr(verb, "DEFAULT_SHAPE", {"cpu": "tiny", "gpu": "tiny"})
    monkeypatch.setattr("ostinato.lab.experiment.LENGTHS", (16, 64))
    ran = ostinato("lab", *SMALL, "--out", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    kept = tmp_path / "out" / "result.json"
    assert json.loads(ran.out) == json.loads(kept.read_text())
    assert {row["mode"] for row in json.loads(ran.out)["decode"]} >= {"eager", "loop"}
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    for name in ("speedup.svg", "decode.svg"):
        assert (tmp_path / "out" / name).read_text().startswith("<svg")
    assert {one["asked"].split()[0] for one in json.loads(ran.out)["acceptance"]} == {"every", "native"}
    both = ostinato("lab", "compare", kept, kept)
    assert both.code == 0
    assert "second / first" in both.out


@pytest.mark.slow
def test_the_modes_are_drawn_and_the_others_have_their_reason(ostinato: RunCli, tmp_path: Path) -> None:
    few = ("--shape", "tiny", "--n-prompt", "4", "--n-gen", "4", "--device", "cpu", "--json")
    ran = ostinato("lab", "decode", *few, "--plot", tmp_path / "modes.svg")
    assert ran.code == 0, ran.err
    assert [row["mode"] for row in json.loads(ran.out)["decode"]] == ["eager", "loop"]
    assert json.loads(ran.out)["why_not"] == {}
    drawn = (tmp_path / "modes.svg").read_text()
    assert all(f">{mode}</text>" in drawn for mode in ("eager", "loop"))


@pytest.mark.parametrize("verb", ["decode", "tape"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_measured(
    verb: str, ostinato: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostinato.cli.lab._machine", lambda device: pytest.fail("it was measured"))
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "file").write_text("")
    for name, words in (
        ("x.png", "a file that ends in .svg"),
        ("x", "a file that ends in .svg"),
        ("folder.svg", "is a folder"),
        ("file/x.svg", "its folder cannot be made"),
    ):
        refused = ostinato("lab", verb, "--plot", tmp_path / name)
        assert (refused.code, words in refused.err, "--plot" in refused.err) == (2, True, True), refused.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.svg"]


@pytest.mark.slow
def test_a_picture_that_cannot_be_written_after_all_loses_no_figures(ostinato: RunCli, tmp_path: Path) -> None:
    few = ("--shape", "tiny", "--n-prompt", "4", "--n-gen", "4", "--device", "cpu", "--json")
    (tmp_path / "x.svg").symlink_to("/dev/full")
    ran = ostinato("lab", "decode", *few, "--plot", tmp_path / "x.svg")
    assert (ran.code, "cannot be written" in ran.err) == (2, True), ran.err
    assert json.loads(ran.out)["decode"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sweep", "--over", "speed", "--values", "1"), "--over is 'speed'; on this machine: n, steps, kernels"),
        (
            ("sweep", "--over", "threads", "--values", "64", "--device", "cpu"),
            "--over is 'threads'; on this machine: n",
        ),
        (("sweep", "--over", "n", "--values", "x"), "must be whole numbers"),
        (("profile", "--counters", "--device", "cpu"), "--counters are a GPU's"),
        (("one", "--start", "warp", "--device", "cpu"), "here there are: op by op"),
        (("--n", "0", "--device", "cpu"), "--n is 0"),
        (("compare", "none.json", "none.json"), "cannot be read"),
        (("decode", "--shape", "nano", "--device", "cpu"), "nano"),
        (("profile", "--trace", "x.json", "--device", "cpu"), "--trace is of one start"),
    ],
)
def test_bad_words_are_refused_with_what_is_known(ostinato: RunCli, arguments: tuple[str, ...], words: str) -> None:
    ran = ostinato("lab", *arguments)
    assert ran.code == 2, ran.err
    assert words in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.slow
def test_a_profile_counts_and_tells_the_commands(ostinato: RunCli, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    ran = ostinato(
        "lab", "profile", "--start", "recorded", "--n", "64", "--steps", "5", "--device", "cpu", "--trace", trace
    )
    assert ran.code == 0, ran.err
    assert "traceEvents" in json.loads(trace.read_text())
    assert "recorded: 10 launches by the host" in ran.out  # a product and a sum for each step
    for tool in ("nsys profile", "ncu --metrics", "rocprof --hip-trace", "omnitrace-sample", "nvcc -O3", "hipcc -O3"):
        assert tool in ran.out


def test_one_start_alone_is_one_line_of_json(ostinato: RunCli) -> None:
    ran = ostinato("lab", "one", "--start", "recorded", *SMALL)
    assert json.loads(ran.out)["max_abs_err"] < 1e-5


def test_the_tape_of_a_machine_without_a_gpu_is_refused_before_a_model_is_made(ostinato: RunCli) -> None:
    ran = ostinato("lab", "tape", "--device", "cpu", "--shape", "llama-8b")
    assert ran.code == 4
    assert "the persistent kernel needs CUDA" in ran.err


def test_the_tapes_marks_become_a_table_a_picture_and_one_line_of_json(
    ostinato: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is said to have a card: its blocks begin 2 us apart."""
    one = [0, 5000, 9000, 11000, 26000, 36000, 90000, 95000]
    machine = SimpleNamespace(kind="gpu", name="a card", why_not={})
    verb = importlib.import_module("ostinato.cli.lab")
    monkeypatch.setattr(verb, "_machine", lambda device: machine)
    monkeypatch.setattr(verb, "_model", lambda machine, shape: (None, shape))
    tape = importlib.import_module("ostinato.lab.tape")
    monkeypatch.setattr(tape, "recorded", lambda model, **how: [one, [mark + 2000 for mark in one]])
    ran = ostinato("lab", "tape", "--plot", tmp_path / "step.svg")
    assert ran.code == 0, ran.err
    table = {line.split("  ")[0]: line.split() for line in ran.out.splitlines()}
    assert table["norm, head"][-3:] == ["54.0", "57%", "2.0"]
    found = json.loads(ran.out.splitlines()[-1])
    assert (found["step_us"], found["n_blocks"]) == (95.0, 2)
    assert found["phases_us"]["choose"] == 5.0
    assert found["spreads_us"]["choose"] == 2.0
    assert "median of 2 blocks" in (tmp_path / "step.svg").read_text("utf-8")
