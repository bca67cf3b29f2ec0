"""`ostinato bench decode`: a table, one line of JSON, and clear words for what cannot be measured."""

from __future__ import annotations

import json
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ostinato.engine import machine
from tests.cli.conftest import RunCli

bench = import_module("ostinato.cli.bench")
QUICK = ("--device", "cpu", "--n-gen", "4", "--n-prompt", "8", "--repeats", "1")
TINY = ("bench", "decode", "--shape", "tiny", *QUICK)


@pytest.fixture(autouse=True)
def quick_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a few bytes is enough here."""
    from ostinato.lab import bench as measuring

    monkeypatch.setattr(measuring, "READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr("ostinato.lab.read_bandwidth.cache_bytes", lambda: 0)


@pytest.mark.slow
def test_lists_cross_and_every_figure_has_its_limit(ostinato: RunCli) -> None:
    ran = ostinato(*TINY, "--mode", "eager,loop", "--batch", "1,2", "--depth", "0,20")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0].startswith("tiny f32, 6 MB of weights, activations wide, KV f32, on ")
    assert re.fullmatch(r"limit: a step reads all weights once, at \S+ GB/s in eager, \S+ GB/s in loop", lines[-2])
    table = [line.split() for line in lines[2:-2]]
    tests = [(row[0], row[1], " ".join(row[2:5] if row[3] == "@" else row[2:3])) for row in table]
    assert tests == [
        (mode, batch, test)
        for mode in ("eager", "loop")
        for batch, names in (("1", ("pp8", "tg4", "pp8 @ d20", "tg4 @ d20")), ("2", ("tg4", "tg4 @ d20")))
        for test in names
    ]
    assert all(row[-1] == ("%" if row[2] == "tg4" else "-") for row in table)  # arithmetic limits a prompt


def test_a_model_that_fits_the_cache_has_no_limit_of_memory(ostinato: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.lab.read_bandwidth.cache_bytes", lambda: 32 << 20)
    ran = ostinato(*TINY, "--mode", "loop")
    *_, prompt, generated, said, note = ran.out.splitlines()
    assert (prompt[-1], generated[-1]) == ("-", "-")
    assert said == "no limit: memory is not read, as 6 MB fit the CPU's cache, 34 MB"
    assert json.loads(note)["figures"][-1]["limit_tok_s"] > 0


def test_the_last_line_is_json_with_every_run(ostinato: RunCli) -> None:
    note = json.loads(ostinato(*TINY, "--mode", "loop", "--repeats", "2").out.splitlines()[-1])
    assert (note["model"], note["type"], note["device"], note["repeats"]) == ("tiny", "f32", "cpu", 2)
    assert note["read_bytes_s"] > 0
    assert [figure["test"] for figure in note["figures"]] == ["pp8", "tg4"]
    for figure in note["figures"]:
        assert len(figure["runs"]) == 2
        assert figure["tok_s"] > 0
        assert figure["limit_tok_s"] == pytest.approx(note["read_bytes_s"] / figure["bytes_per_token"])


def test_json_alone_is_one_object(ostinato: RunCli) -> None:
    ran = ostinato(*TINY, "--n-prompt", "0", "--mode", "loop", "--json")
    assert len(ran.out.splitlines()) == 1
    assert [figure["test"] for figure in json.loads(ran.out)["figures"]] == ["tg4"]


def test_all_modes_of_the_device_are_measured(ostinato: RunCli) -> None:
    ran = ostinato(*TINY, "--n-prompt", "0", "--json")
    assert [figure["mode"] for figure in json.loads(ran.out)["figures"]] == ["eager", "loop"]
    assert "graph" not in ran.err  # which a CPU does not have


def test_a_profile_tells_the_time_of_each_kind_of_node(ostinato: RunCli) -> None:
    ran = ostinato(*TINY, "--n-prompt", "0", "--mode", "eager", "--profile")
    assert "a step of batch 1 at depth 0 in eager" in ran.out
    assert "no profile" not in ran.err
    (profile,) = json.loads(ran.out.splitlines()[-1])["profiles"]
    assert [kind["kind"] for kind in profile["kinds"]] == ["embed", "layer", "head", "masks", "sample"]
    assert [kind["n_nodes"] for kind in profile["kinds"]] == [1, 2, 1, 1, 1]
    assert all(kind["microseconds"] > 0 for kind in profile["kinds"])


@pytest.mark.parametrize(("modes", "profiled"), [("eager,loop", ["eager"]), ("loop", [])])
def test_the_native_loop_is_left_out_of_a_profile_with_the_reason(
    ostinato: RunCli, modes: str, profiled: list[str]
) -> None:
    """E-63."""
    ran = ostinato(*TINY, "--n-prompt", "0", "--mode", modes, "--profile", "--json")
    assert ran.code == 0, ran.err
    assert "no profile of loop: the native loop is one call: its nodes are not timed; eager's are\n" in ran.err
    note = json.loads(ran.out)
    assert [figure["mode"] for figure in note["figures"]] == modes.split(",")
    assert [profile["mode"] for profile in note["profiles"]] == profiled


@pytest.mark.slow
def test_a_file_is_measured_too(ostinato: RunCli, tiny: Path) -> None:
    ran = ostinato("bench", "decode", "--model", tiny, *QUICK, "--mode", "loop", "--json")
    note = json.loads(ran.out)
    assert (note["model"], note["type"], note["activations"]) == (str(tiny), "F32", "wide")


def test_eager_has_dense_weights_and_the_native_loop_packed_ones(ostinato: RunCli) -> None:
    words = ("--type", "q8_0", "--n-prompt", "0", "--activations", "int8", "--json")
    note = json.loads(ostinato(*TINY, "--mode", "eager,loop", *words).out)
    eager, loop = note["figures"]
    assert (note["activations"], eager["mode"], loop["mode"]) == ("int8", "eager", "loop")
    assert loop["bytes_per_token"] < 2_000_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch", "0,x"), "--batch is '0,x'; it must be whole numbers from 1 to 64, as in 1,4,16"),
        (("--batch", "65"), "--batch is '65'"),
        (("--n-gen", ""), "--n-gen is ''"),
        (("--depth", "-1"), "--depth is '-1'"),
        (("--depth", "1.5"), "--depth is '1.5'"),
        (("--depth", "2000"), "do not fit the model's context of 2048"),
        (("--mode", "eager,lop"), "'lop' is none of loop (the nearest)"),
        (("--type", "q9"), "--type is 'q9'; known:"),
        (("--model", "x"), "--model x and --shape tiny are two models"),
        (("--n-gen", "0", "--n-prompt", "0"), "leave nothing to measure"),
        (("--repeats", "0"), "Invalid value for '--repeats'"),
        (("--plot", "no/such/folder/x.png"), "there is no folder no/such/folder"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_words_to_use(
    ostinato: RunCli, words: tuple[str, ...], message: str
) -> None:
    ran = ostinato(*TINY, "--n-gen", "100", *words)
    assert (ran.code, ran.out.count("{")) == (2, 0)
    assert message in ran.err


def test_an_unknown_shape_lists_the_known_ones(ostinato: RunCli) -> None:
    ran = ostinato("bench", "decode", "--shape", "lama-1b")
    assert ran.code == 2
    assert "known: llama-1b (the nearest), " in ran.err
    assert ", llama-8b, " in ran.err


def test_a_type_without_a_shape_is_refused(ostinato: RunCli) -> None:
    assert "give --shape too" in ostinato("bench", "decode", "--type", "bf16").err


def test_a_mode_that_cannot_run_exits_with_4_and_the_reason(ostinato: RunCli) -> None:
    ran = ostinato(*TINY, "--mode", "persistent")
    assert ran.code == 4
    assert "mode 'persistent' cannot run here" in ran.err


def test_a_shape_that_does_not_fit_exits_with_4_before_it_is_made(
    ostinato: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_host_bytes", lambda: 1 << 30)
    ran = ostinato("bench", "decode", "--shape", "llama-8b", "--type", "f32", "--device", "cpu")
    assert ran.code == 4
    assert "1.1 GB that are free" in ran.err
    assert "the weights alone are 32.1 GB" in ran.err


@pytest.mark.skipif(find_spec("matplotlib") is not None, reason="matplotlib is here")
def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(ostinato: RunCli, tmp_path: Path) -> None:
    ran = ostinato(*TINY, "--plot", tmp_path / "ladder.png")
    assert (ran.code, ran.out) == (2, "")
    assert "--plot needs matplotlib" in ran.err
    assert "pip install 'ostinato[lab]'" in ran.err


@pytest.mark.slow
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib, the extra `lab`")
def test_the_ladder_is_drawn(ostinato: RunCli, tmp_path: Path) -> None:
    ran = ostinato(*TINY, "--batch", "1,2", "--plot", tmp_path / "ladder.png")
    assert ran.code == 0, ran.err
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_the_ladder_groups_by_batch_and_marks_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is handed to matplotlib, with a stand-in for it."""
    from ostinato.lab.bench import Figure, Task, TimedRun

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    class Anything:
        def __init__(self, *given: Any, **words: Any) -> None:
            calls.append(("figure", given, words))

        def __getattr__(self, name: str) -> Any:
            def call(*given: Any, **words: Any) -> Any:
                calls.append((name, given, words))
                return self

            return call

    monkeypatch.setattr(bench, "figure_kind", lambda plot: Anything)
    figures = [
        Figure(Task("tg", 8, 0, batch, mode), (TimedRun(8, 1.0, 1.0),), 100.0, 1e4)
        for mode in ("eager", "loop")
        for batch in (1, 4)
    ]
    bench.draw(figures, "a title", tmp_path / "x.png")
    bars = [(given[0], given[1], words["label"]) for name, given, words in calls if name == "bar"]
    assert [(heights, label) for _, heights, label in bars] == [([8.0, 8.0], "eager"), ([8.0, 8.0], "loop")]
    assert [given[0] for name, given, _ in calls if name == "hlines"] == [100.0, 100.0]
    assert calls[-1][0] == "savefig"


@pytest.mark.slow
@pytest.mark.parametrize(("type", "kv_type"), [("bf16", "f32"), ("q4_k_m", "f32"), ("q8_0", "f32")])
def test_random_weights_of_other_types_are_measured(ostinato: RunCli, type: str, kv_type: str) -> None:
    note = json.loads(ostinato(*TINY, "--type", type, "--mode", "loop", "--json").out)
    assert (note["type"], note["kv_type"]) == (type, kv_type)
    assert note["figures"][-1]["bytes_per_token"] < 3_000_000  # float32 would be 5.8 million
