"""The laboratory's own acceptance figures: met or not, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_check, gpu_lab
from bench.gpu_frame import Ended, Job, Outcome
from ostinato.backends.machine import Chip, Machine
from ostinato.engine.choose import LoadCase, why_not
from ostinato.files.checkpoint import open_checkpoint
from ostinato.lab.experiment import SMALL_N, ExperimentRow, accepted
from ostinato.lab.model import StartCost, Workload
from ostinato.lab.work import LabMachine, Timing
from ostinato.models.header import tensors_of
from ostinato.models.registry import read_shape
from ostinato.options import LoadOptions
from tests.lab.stand_in import stand_in
from tests.test_gpu_check import setting

COSTS = {"plain": StartCost(1.3, submit_kernel_us=3.7), "staying": StartCost(1.0)}


class PlayedMachine:
    """A machine of which only the costs are known."""

    persistent, spread = "staying", 0.0

    def __init__(self, why_not: str | None = None) -> None:
        self.why_not = {} if why_not is None else {"staying": why_not}
        self.starts = tuple(start for start in COSTS if start not in self.why_not)

    def costs(self, work: Workload) -> dict[str, StartCost]:
        return COSTS


def row(plain_us: float, staying_us: float, *, body_us: float = 0.8, n: int = 256, slowest: float = 1.0) -> Any:
    work = Workload(n=n)
    timings = (
        Timing("plain", work, (plain_us, plain_us * slowest, plain_us * slowest), 1e-6, 0.5, 500),
        Timing("staying", work, (staying_us,), 2e-6, 0.5, 1),
    )
    predicted = {start: cost.step(1, body_us) for start, cost in COSTS.items()}
    return ExperimentRow(work, body_us, timings, predicted)


def judged(*rows: ExperimentRow, why_not: str | None = None) -> list[tuple[bool, str]]:
    machine: Any = PlayedMachine(why_not)
    found: LabMachine = machine
    return [(one.is_met, one.says) for one in accepted(found, rows)]


def test_a_gain_that_is_asked_for_and_right_results_are_met() -> None:
    right, gain = judged(row(3.8, 1.9))
    assert right == (True, "2 results, at most 20% of what rounding may add")
    assert gain == (True, "n=256, 1 kernels a step, axpy: 2.00 times")


def test_a_gain_that_the_arithmetic_does_not_promise_is_told_with_it() -> None:
    _, (is_met, why) = judged(row(4.1, 3.7, body_us=2.3))
    assert not is_met
    assert why.startswith("n=256, 1 kernels a step, axpy: 1.11 times, because a kernel takes 2.30 us by itself")
    assert "its launch adds 1.40 us, and staying adds 1.00 us in its place" in why
    assert why.endswith("no more than 1.12 times is predicted")


def test_a_gain_that_is_predicted_and_not_reached_is_told_with_what_a_step_took() -> None:
    _, (is_met, why) = judged(row(3.8, 3.6))
    assert not is_met
    assert why.endswith("so that 2.06 times is predicted, and a step took 3.60 us where 1.80 us are predicted")


def test_on_a_busy_machine_it_is_the_machine() -> None:
    _, (is_met, why) = judged(row(3.0, 4.4, slowest=1.4))
    assert not is_met
    assert why.endswith("the machine is busy: the same work took 40% longer in half of its runs than in the fastest")


def test_a_start_that_cannot_run_and_sizes_that_were_not_measured_are_not_met() -> None:
    without = row(3.8, 1.9)
    alone = replace(without, timings=without.timings[:1])
    assert judged(alone, why_not="the driver is old")[1] == (False, "staying cannot run here: the driver is old")
    assert judged(row(3.8, 1.9, n=SMALL_N + 1))[1] == (False, f"no vector up to n={SMALL_N} was measured")
    assert judged() == [(False, "0 results"), (False, f"no vector up to n={SMALL_N} was measured")]


# The part of the GPU checks


def ended(*records: dict[str, Any], error: str | None = None, **words: Any) -> Ended:
    return Ended(Job("lab", words), records, error, 1.0)


def verdicts(outcomes: Sequence[Outcome]) -> dict[str, str]:
    return {outcome.name: outcome.verdict for outcome in outcomes}


@pytest.mark.slow
def test_the_part_measures_and_judges_over_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(monkeypatch) as (machine, _):
        monkeypatch.setattr(gpu_lab, "_machine", lambda _: machine)
        records = list(gpu_lab.starts("cuda", sizes=[(64, 20, 1), (64, 5, 3)], repeats=1))
    outcomes = gpu_lab.judge_starts(setting(), [ended(*records)])
    assert verdicts(outcomes)["lab-right"] == "PASS"
    assert "24 results" in outcomes[0].value
    assert "persistent, fed" in outcomes[0].value


def test_a_wrong_result_fails_the_part_and_a_missing_gain_is_a_miss() -> None:
    found = gpu_lab.judge_starts(setting(), [ended(error="exit 1: persistent computed a wrong result")])
    assert (verdicts(found), found[0].value) == ({"lab-right": "FAIL"}, "exit 1: persistent computed a wrong result")
    figures = [
        {"asked": "right", "is_met": True, "says": "2 results"},
        {"asked": "gain", "is_met": True, "says": "1.7 times"},
        {"asked": "gain", "is_met": False, "says": "1.1 times, because a kernel is long"},
    ]
    told = {"what": "acceptance", "starts": ["baseline"], "why_not": {"while graph": "old"}, "figures": figures}
    right, gain = gpu_lab.judge_starts(setting(), [ended(told)])
    assert (right.verdict, right.value) == ("PASS", "2 results; starts: baseline; not while graph: old")
    assert (gain.verdict, gain.value) == ("MISS", "1.1 times, because a kernel is long")


def test_the_engines_step_is_asked_of_every_mode_and_a_mode_without_a_figure_is_told() -> None:
    figure = {"what": "decode", "tokens_s": 9.0, "launches_per_token": 1.0}
    refused = {"what": "refused", "mode": "persistent", "why": "no room"}
    rows = [{**figure, "mode": mode} for mode in ("eager", "graph")]
    found = gpu_lab.judge_decode(setting(), [ended(*rows, refused, error="died")])
    assert {name.removeprefix("lab-decode-"): verdict for name, verdict in verdicts(found).items()} == {
        "eager": "PASS",
        "graph": "PASS",
        "loop": "FAIL",
        "persistent": "MISS",
    }
    assert gpu_lab.judge_decode(setting(device="cpu"), [ended()])[-1].verdict == "SKIP"


@pytest.mark.slow
def test_the_engines_step_runs_in_every_mode_of_a_cpu() -> None:
    records = list(gpu_lab.decode("cpu", name="tiny", type="f32", n_prompt=8, n_gen=8))
    found = gpu_lab.judge_decode(setting(device="cpu"), [ended(*records)])
    assert [outcome.verdict for outcome in found] == ["PASS", "PASS", "SKIP"]
    assert {check.name for check in gpu_check._checks() if check.part == "lab"} == {
        "lab-starts",
        "lab-decode",
        "lab-programs",
        "session",
    }


@pytest.mark.slow
def test_a_session_by_hand_gives_an_llms_tokens_by_one_launch_and_refuses_what_it_should() -> None:
    done = ended(*gpu_lab.session("cpu", mode="loop"), mode="loop")
    assert verdicts(gpu_lab.judge_session(setting(device="cpu"), [done])) == {
        "session-loop": "PASS",
        "session-persistent": "SKIP",
    }


def test_a_card_can_run_the_sessions_model_in_both_modes_that_the_device_paces(tmp_path: Path) -> None:
    card = Machine("cuda:0", 1 << 40, 1 << 40, Chip((9, 0), 132, 227 << 10), 13_000)
    with open_checkpoint(gpu_lab.session_model(tmp_path)) as checkpoint:
        shape, tensors = read_shape(checkpoint), tensors_of(checkpoint)
    reasons = why_not(LoadCase(shape, tensors, LoadOptions(slots=2, context=gpu_lab.LONG + 64), card))
    assert {mode: reasons[mode] for mode in ("loop", "persistent")} == {"loop": None, "persistent": None}


SESSION: dict[str, dict[str, Any]] = {
    "opened": {"mode": "loop"},
    "example": {"same": True, "tokens": 32, "triggers": 1, "launches": 1, "built": 0, "steps": 15, "live": 0},
    "refused": {
        "by": {invariant: invariant for invariant in gpu_lab.REFUSED},
        "ran_on": True,
        "tokens": gpu_lab.LONG,
        "same_plan": True,
    },
}


@pytest.mark.parametrize(
    ("what", "changes", "verdict"),
    [
        ("opened", {}, "PASS"),
        ("opened", {"mode": "graph"}, "FAIL"),
        ("example", {"same": False}, "FAIL"),
        ("example", {"launches": 2}, "FAIL"),
        ("example", {"steps": 14}, "FAIL"),
        ("refused", {"by": {"I-2": None}}, "FAIL"),
        ("refused", {"ran_on": False}, "FAIL"),
        ("refused", {"tokens": 7}, "FAIL"),
    ],
)
def test_a_session_that_differs_in_one_point_fails(what: str, changes: dict[str, Any], verdict: str) -> None:
    records = [{"what": name, **said, **(changes if name == what else {})} for name, said in SESSION.items()]
    assert gpu_lab.judge_session(setting(), [ended(*records, mode="loop")])[0].verdict == verdict


def test_a_program_that_finds_a_wrong_result_fails() -> None:
    right, wrong, none = (
        gpu_lab.judge_programs(setting(), [ended(record, name="graphs_axpy")])[0]
        for record in (
            {"what": "program", "code": 0, "said": ["baseline loop 1.0 ms"]},
            {"what": "program", "code": 1, "said": ["WRONG"]},
            {"what": "program", "skipped": "nvcc is not installed"},
        )
    )
    assert [one.verdict for one in (right, wrong, none)] == ["PASS", "FAIL", "SKIP"]
    assert gpu_lab.judge_programs(setting(device="cpu"), [])[0].verdict == "SKIP"
