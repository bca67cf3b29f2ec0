"""The laboratory where there is no GPU: every start computes every element of every step."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ostinato.errors import BadInput, BadOption, HardwareCannot, InternalError
from ostinato.lab.cpu import NATIVE, OP_BY_OP, RECORDED, CpuMachine
from ostinato.lab.experiment import FORMAT, ExperimentRow, compared, measured, read_result, result, swept
from ostinato.lab.model import BODIES, BodyName, Workload
from ostinato.lab.work import Data, Timing, checked, factors_of

WORK = Workload(n=37, steps=20, kernels=3)


@pytest.fixture(scope="module")
def machine() -> CpuMachine:
    return CpuMachine()


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("start", [OP_BY_OP, RECORDED, NATIVE])
def test_every_start_gives_what_the_float64_twin_gives(machine: CpuMachine, body: BodyName, start: str) -> None:
    if start not in machine.starts:
        pytest.skip(machine.why_not[start])
    timing = machine.time(replace(WORK, body=body), start, 2)
    assert timing.max_abs_err < 1e-5
    assert timing.us > 0
    assert len(timing.step_us) == 2


def test_the_twin_is_the_closed_form_for_axpy_and_a_loop_for_the_tail() -> None:
    data, factors = Data.fresh(5, 2), factors_of(WORK, varied=True)
    axpy = data.expected(WORK, factors, 2)
    for request in range(2):
        sum_of = 3 * factors[request::2].astype(np.float64).sum()
        assert np.allclose(axpy[request], data.start[request] + sum_of * data.x, rtol=0, atol=1e-12)
    one = replace(WORK, steps=1, kernels=1, body="tail")
    after = Data(np.array([0.5], np.float32), np.array([[1.0]], np.float32)).expected(one, np.array([1.0], np.float32))
    assert after[0, 0] == pytest.approx(1.0 + 0.5 * 1.5 * (1 + 0.8663855974622838))  # erf(1.5 / sqrt 2)


def test_a_step_left_out_is_a_wrong_result(machine: CpuMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = machine._bound
    monkeypatch.setattr(
        machine, "_bound", lambda work, start, x, h, factors: bound(work, start, x, h, factors[:-1].copy())
    )
    with pytest.raises(InternalError, match="computed a wrong result"):
        machine.time(Workload(n=64, steps=50), RECORDED, 1)


def test_what_is_not_a_number_is_a_wrong_result() -> None:
    with pytest.raises(InternalError, match="max_abs_err nan"):
        checked(Timing("graph", WORK, (1.0,), float("nan"), 0.5, 1))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"n": 0}, "--n is 0; it must be from 1"),
        ({"threads": 100}, "a multiple of 32"),
        ({"threads": 2048}, "--threads is 2048"),
        ({"steps": 1_000_000, "kernels": 10_000}, "lower --steps or --kernels"),
        ({"body": "gemm"}, "known: axpy, tail"),
        ({"a": 2.0}, "--a is 2.0"),
    ],
)
def test_impossible_sizes_name_their_limit(sizes: dict[str, object], words: str) -> None:
    with pytest.raises(BadOption, match=words):
        Workload(**sizes)  # type: ignore[arg-type]


def test_more_than_memory_holds_is_refused_before_it_is_taken(machine: CpuMachine) -> None:
    with pytest.raises(HardwareCannot, match="are free"):
        machine.time(Workload(n=1 << 31, steps=1), OP_BY_OP, 1)


@pytest.mark.slow
def test_a_row_sets_predictions_beside_figures_and_two_results_beside_each_other(
    machine: CpuMachine,
) -> None:
    rows = [row for row in swept(machine, WORK, "n", [16, 64], 2) if isinstance(row, ExperimentRow)]
    assert [row.work.n for row in rows] == [16, 64]
    assert all(row.speedup(row.baseline) == 1.0 for row in rows)
    predicted, found = rows[0].overhead
    assert 0 < predicted < 1
    assert 0 < found < 1
    kept = result(machine, WORK, rows)
    lines = compared(kept, kept)
    assert {line[3] for line in lines if line[1] != "-"} <= {"1.00", "-"}
    assert any("overhead of the baseline" in line[0] for line in lines)


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, words in (
        ("{", "not JSON"),
        ("{}", "not a result"),
        ("[1]", "not a result"),
        (json.dumps({"format": FORMAT, "rows": []}), "not a whole one"),
    ):
        path.write_text(text)
        with pytest.raises(BadInput, match=words):
            read_result(path)
    with pytest.raises(BadInput, match="cannot be read"):
        read_result(path.with_name("none.json"))


def test_one_measurement_names_every_start(machine: CpuMachine) -> None:
    row = measured(machine, WORK, 2)
    assert tuple(t.start for t in row.timings) == machine.starts
    assert set(row.record()["starts"]) == set(machine.starts)


class Timed(CpuMachine):
    """A CPU whose calls take 1.5 us and whose numpy goes over memory twice; `late`: what other programs add to runs."""

    late = (1.0, 1.0, 1.0)

    def time(self, work: Workload, start: str, repeats: int) -> Timing:
        times, call_us = (1.0, 0.01) if start == self.starts[-1] else (2.0, 1.5)
        us = work.kernels * (times * work.n * 1e-4 + call_us)
        return Timing(start, work, tuple(us * late for late in self.late), 0.0, 0.0, 1)


@pytest.mark.parametrize("n", [1 << 8, 1 << 20])
def test_predictions_know_that_numpy_goes_over_memory_more_than_once(n: int) -> None:
    row = measured(Timed(), Workload(n=n))
    predicted, found = row.overhead
    assert predicted == pytest.approx(found, abs=1e-3)
    assert [row.predicted_speedup(t.start) for t in row.timings] == pytest.approx([row.speedup(t) for t in row.timings])
    assert not row.is_busy


@pytest.mark.parametrize(("late", "spread"), [((1.0, 1.0, 9.0), 0.0), ((1.0, 1.5, 1.6), 0.5)])
def test_a_machine_is_busy_where_half_of_the_runs_are_late(late: tuple[float, ...], spread: float) -> None:
    machine = Timed()
    machine.late = late  # type: ignore[assignment]  # as many as there are
    row = measured(machine, WORK)
    assert row.spread == row.record()["spread"] == pytest.approx(spread)
    assert row.is_busy == (spread > 0)
