"""What the checks of the tape measure and how they judge, tried without a GPU."""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import gpu_check, gpu_lessons, gpu_stress, gpu_tape, gpu_yield
from bench.gpu_calls import counters
from bench.gpu_frame import Ended, Job, Outcome, Record, Setting
from bench.gpu_text import apart, digest, divergences, heard, own_text, perplexity
from ostinato.backends.machine import Machine
from ostinato.backends.torch.backend import TWIN
from ostinato.engine.choose import settle_model
from ostinato.engine.engine import Engine
from ostinato.errors import HardwareCannot, InternalError
from tests.backends.tape.loop import CONTEXT, N_PAGES, OUTBOX, EmulatedLoop, EmulatedTape, tape_driver, widened
from tests.backends.tape.models import shape_of, small
from tests.engine.rig import open_loop
from tests.models.plain_memory import logits as forward
from tests.random_model import random_model


def setting(device: str = "cuda", model: str | None = None) -> Setting:
    return Setting(device, model, time.monotonic() + 60, lambda _: None)


def ended(*records: Record, error: str | None = None, **words: object) -> list[Ended]:
    return [Ended(Job("work", words), records, error, 1.0)]


def verdicts(outcomes: Sequence[Outcome]) -> dict[str, str]:
    return {outcome.name: outcome.verdict for outcome in outcomes}


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--only", "tape-int8"]])
def test_the_script_runs_without_a_gpu_and_says_what_it_skips(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--part", "tape", *more])
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    assert ended.value.code == 0
    assert "SKIP tape-int8" in capsys.readouterr().out


# Texts


ROWS = st.lists(st.lists(st.floats(-40, 40), min_size=5, max_size=5), min_size=2, max_size=2)


@given(ROWS)
def test_divergence_is_the_sum_of_p_log_p_over_q(rows: list[list[float]]) -> None:
    p, q = ([math.exp(x) / sum(map(math.exp, row)) for x in row] for row in rows)
    slow = sum(one * (math.log(one) - math.log(other)) for one, other in zip(p, q, strict=True))
    found = divergences(*(torch.tensor([row], dtype=torch.float64) for row in rows))
    assert float(found[0]) == pytest.approx(slow, rel=1e-6, abs=1e-9)


def test_a_text_that_is_predicted_evenly_has_the_perplexity_of_its_vocabulary() -> None:
    pieces = [[0, 1, 2, 3], [3, 2, 1, 0]]
    even = torch.zeros(2, 2, 7)
    assert perplexity(even, pieces) == pytest.approx(7)
    sure = even.clone()
    for step, row in ((0, 0), (0, 1), (1, 0), (1, 1)):
        sure[step, row, pieces[row][step + 2]] = 50.0
    assert perplexity(sure, pieces) == pytest.approx(1)
    assert apart(even, even) == {"kl": 0.0, "kl_most": 0.0, "differs": 0.0}
    assert apart(sure, sure.roll(1, 2))["differs"] == 1.0


def test_the_same_pieces_have_the_same_digest() -> None:
    assert digest([[1, 2], [3]]) == digest([(1, 2), [3]]) != digest([[1], [2, 3]])
    assert len(own_text()) > 20_000


PIECES = [[(7 * piece + 3 * at) % 90 for at in range(9)] for piece in range(4)]


def test_forced_tokens_give_the_logits_of_one_forward_over_the_text() -> None:
    model = random_model("kv")
    with closing(open_loop(model=model, mode="eager")) as driver:
        for _ in range(2):  # the slots are free again afterwards
            found = heard(driver, PIECES, model.shape.vocab - 3)
    for number, piece in enumerate(PIECES):
        expected = forward(model, piece[:-1])[1:, : model.shape.vocab - 3]
        assert torch.allclose(found[:, number], expected, atol=1e-4)


def test_pieces_that_cannot_be_fed_together_are_refused() -> None:
    with closing(open_loop(mode="eager")) as driver, pytest.raises(InternalError, match="of one length"):
        heard(driver, [[1, 2, 3], [1, 2, 3, 4]], 50)


@pytest.mark.slow
def test_the_tape_says_nearly_the_same_of_a_text_and_with_int8_activations_a_little_less_so() -> None:
    model = small(shape_of(), mix="q4_k_m")
    expected = torch.stack([forward(widened(model), piece[:-1])[1:] for piece in PIECES], 1)
    figures = {}
    for activations in ("wide", "int8"):
        with closing(tape_driver(model, activations=activations)) as driver:
            figures[activations] = apart(expected, heard(driver, PIECES, model.shape.vocab))
    assert 0 < figures["wide"]["kl"] < 1e-3
    assert figures["wide"]["kl"] < figures["int8"]["kl"] < 0.05


# Leaving, and gaps


@pytest.mark.parametrize("mode", [TWIN, "loop"])
def test_a_loop_that_is_asked_to_leave_goes_on_where_it_was(mode: str) -> None:
    model = random_model("kv", context=8192)
    with closing(open_loop(model=model, mode=mode, context=8192, n_pages=600)) as driver:
        found = gpu_yield.leavings(driver, 3, random.Random(1), (0.0, 0.0))
        assert len(found) == 3
        assert all(0 <= one.border_us <= one.left_us for one in found)
        assert gpu_yield.chunk_us(driver, [1, 2, 3, 4], repeats=2) > 0


@pytest.mark.slow
def test_the_tape_leaves_when_it_is_asked_to() -> None:
    with closing(tape_driver(small(shape_of()))) as driver:
        assert len(gpu_yield.leavings(driver, 2, random.Random(1), (0.0, 0.001))) == 2


def test_a_prompts_gap_is_the_longest_that_began_before_its_token_and_after_the_last_prompt() -> None:
    times = [0, 100, 200, 1200, 1300, 1400, 1500, 4500, 4600]
    # The first token of the second prompt is told in the very gap that it made.
    found = gpu_yield.waits_of([1000 * one for one in times], [1_250_000, 4_400_000], since=50_000, step_us=100.0)
    assert found == [gpu_yield.Wait(1000.0, 1), gpu_yield.Wait(3000.0, 1)]
    with pytest.raises(InternalError, match="no token"):
        gpu_yield.waits_of([0, 100], [500, 600], since=0, step_us=1.0)


@pytest.mark.slow
def test_gaps_are_told_for_every_prompt_through_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_yield, "BEFORE", 40)
    model = random_model("kv", context=4096)
    at = settle_model(model, "eager", context=4096, n_pages=600, n_slots=2)
    prompts = {n: [[(7 * n + i) % 50 for i in range(n)] for _ in range(3)] for n in (4, 40)}
    with Engine(model, at) as engine:
        step_us, waits = gpu_yield.gaps(engine, prompts)
    assert step_us > 0
    assert {n: len(own) for n, own in waits.items()} == {4: 3, 40: 3}


def test_a_kernel_that_stays_for_more_than_two_steps_is_a_miss() -> None:
    prompt = {"n": 32, "alone_us": 400.0, "gap_us": 1900.0, "gap_most_us": 2000.0, "stops": 1}
    record = {"what": "yield", "step_us": 700.0, "border_us": 350.0, "left_us": 400.0, "left_most_us": 800.0}
    found = gpu_yield.judge_yield(setting(), ended({**record, "prompts": [prompt, {**prompt, "n": 512}]}))
    assert verdicts(found) == {"tape-leaves": "PASS", "tape-yield-32": "PASS", "tape-yield-512": "PASS"}
    assert "a step 700, leaving 400, the prompt alone 400, the rest 400" in found[1].value
    late = gpu_yield.judge_yield(setting(), ended({**record, "left_us": 1500.0, "prompts": []}))
    assert verdicts(late) == {"tape-leaves": "MISS"}
    assert verdicts(gpu_yield.judge_yield(setting(), ended(error="exit 1"))) == {"tape-yield": "FAIL"}


# Whole children, with another mode in the tape's place


@pytest.mark.slow
def test_a_file_is_compared_over_a_text(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tape, "TAPE", "eager")
    monkeypatch.setattr(gpu_tape, "N_PREDICTED", 12)
    monkeypatch.setattr(gpu_tape, "N_POSITIONS", 20)
    monkeypatch.setattr(gpu_tape, "LONGEST_PROMPT", 12)
    (found,) = gpu_tape.tape_int8("cpu", path=str(tiny_gguf))
    assert verdicts(gpu_tape.judge_int8(setting(), ended(found))) == {"tape-int8": "PASS"}
    assert found["n"] == 96
    assert found["figures"]["wide"]["perplexity"] == found["figures"]["eager"]["perplexity"] > 1
    assert found["figures"]["int8"]["kl"] == 0
    (found,) = gpu_tape.tape_argmax("cpu", name="", type="", path=str(tiny_gguf))
    assert (found["model"], found["n"], found["wrong"], found["worst"]) == (tiny_gguf.name, 200, 0, 0.0)
    (found,) = gpu_tape.tape_argmax("cpu", name="tiny", type="f32")
    assert (found["model"], found["n"], found["wrong"]) == ("tiny f32", 200, 0)


@pytest.mark.slow
def test_a_model_is_measured_and_made_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu_tape, gpu_yield):
        monkeypatch.setattr(module, "TAPE", "loop")
    for name, value in {"DEPTH": 20, "LONG_DEPTH": 60, "BATCH": 2, "CONTEXT": 1024, "LOOP_CONTEXT": 512}.items():
        monkeypatch.setattr(gpu_tape, name, value)
    records = [
        *gpu_tape.tape_warm("cpu", shape="tiny", type="f32"),
        *gpu_tape.tape_speed("cpu", shape="tiny", type="f32"),
    ]
    assert [(r.get("depth"), r.get("batch"), r.get("activations")) for r in records[1:-1]] == [
        (20, 1, "wide"),
        (20, 2, "wide"),
        (60, 1, "wide"),
        (20, 1, "wide"),
    ]
    monkeypatch.setattr(gpu_yield, "N_PROMPTS", 2)
    monkeypatch.setattr(gpu_yield, "LENGTHS", (8, 30))
    monkeypatch.setattr(gpu_yield, "BEFORE", 20)
    (found,) = gpu_yield.tape_yield("cpu", name="tiny", type="f32", n_slots=2, context=8192)
    assert [prompt["n"] for prompt in found["prompts"]] == [8, 30]
    assert len(gpu_yield.judge_yield(setting(), ended(found))) == 3


# The proofs of part `stress`, over the kernel in the emulator


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models and engines of the proofs are a small model in the emulator, whose waits are short."""
    model = small(shape_of())

    def runner(*given: Any, **more: Any) -> EmulatedLoop:
        return EmulatedLoop(*given, **more, deadline_ns=200_000_000)

    def engine(_: object, type: str, *, mode: str, n_slots: int = 4, **more: Any) -> Engine:
        assert mode == "persistent"
        at = settle_model(model, TWIN, context=CONTEXT, n_pages=N_PAGES, n_slots=n_slots, kv_type="f32")
        return Engine(model, at, outbox_entries=OUTBOX)

    monkeypatch.setattr("ostinato.engine.engine.open_runner", runner)
    monkeypatch.setattr(gpu_stress, "model_on", lambda *_: model)
    monkeypatch.setattr(gpu_stress, "_engine", engine)
    monkeypatch.setattr(gpu_stress, "_by_hand", lambda *_, mode, context: tape_driver(model))
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # which the fault's child replaces


WORDS: dict[str, Any] = {"mode": "persistent", "name": "small", "type": "bf16"}


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("how", ["stuck", "drift"])
def test_a_fault_of_the_persistent_kernel_ends_every_request_with_one_error(how: str) -> None:
    """E-2."""
    (found,) = gpu_stress.fault("cpu", how=how, **WORDS, n_tokens=200, context=CONTEXT)
    (outcome,) = gpu_stress.judge_fault(setting(), ended(found, how=how), "fault-persistent")
    assert (outcome.verdict, outcome.name) == ("PASS", f"fault-persistent-{how}"), outcome.value
    assert f"({'epoch' if how == 'drift' else how})" in found["said"]


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_a_fault_is_put_where_a_step_takes_its_addresses_from_and_not_before_it_is_asked_for() -> None:
    with gpu_stress._engine(small(shape_of()), "bf16", mode="persistent") as engine:  # nothing runs in it
        caches = engine.runner.plan.buffer("caches").tensor
        before = caches.clone()
        inject = gpu_stress.injection(engine, "step")
        assert torch.equal(caches, before)
        inject()
        assert (caches == gpu_stress.WILD_ADDRESS).all()


def test_a_fault_of_the_other_modes_is_put_into_the_page_table() -> None:
    model = random_model("kv")
    with Engine(model, settle_model(model, "eager", context=256, n_pages=8, n_slots=2)) as engine:
        gpu_stress.injection(engine, "step")()
        assert (torch.as_tensor(engine.runner.tables.table["pages"]) == gpu_stress.WILD_PAGE).all()


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_the_persistent_kernel_is_launched_once_for_any_number_of_tokens() -> None:
    """E-54."""
    counter = len(counters())  # the loop's own count
    (found,) = gpu_stress.calls("cpu", counter=counter, **WORDS, few=3, many=12)
    assert found["by_hand"] == {"3": {"launches": 1}, "12": {"launches": 1}}
    (outcome,) = gpu_stress.judge_calls(setting(), ended(found), "calls-persistent")
    assert (outcome.verdict, outcome.name) == ("PASS", "calls-persistent")


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_engines_of_the_persistent_kernel_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-3."""
    monkeypatch.setattr(gpu_stress, "WARM_ENGINES", 2)
    (found,) = gpu_stress.engines("cpu", **WORDS, n=4, seconds=60.0)
    (outcome,) = gpu_stress.judge_engines(setting(), ended(found), "engines-persistent")
    assert (found["n"], outcome.verdict) == (4, "PASS"), outcome.value


FITS: Final = 3  # blocks


class FullTape(EmulatedTape):
    """A card on which so many blocks fit: more are refused by the engine, by the driver, or both."""

    walls: frozenset[str] = frozenset({"built", "launched"})

    def build(self) -> None:
        if (n := self._step.sizes.grid.n_blocks) > FITS and "built" in self.walls:
            raise HardwareCannot(f"the persistent kernel has {n} blocks that wait for each other, and {FITS} fit")
        super().build()

    def _run(self, *, single: bool) -> None:
        if self._step.sizes.grid.n_blocks <= FITS:
            super()._run(single=single)
        elif "launched" in self.walls:
            raise HardwareCannot("the driver could not launch it")


@pytest.mark.slow
@pytest.mark.parametrize("walls", [("built", "launched"), ("built",)])
def test_a_grid_that_does_not_fit_must_be_refused_by_the_engine_and_by_the_driver(
    walls: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """E-83."""
    monkeypatch.setattr(FullTape, "walls", frozenset(walls))
    monkeypatch.setattr("tests.backends.tape.loop.EmulatedTape", FullTape)
    monkeypatch.setattr(gpu_lessons, "_ids", lambda n: list(range(n)))
    with closing(tape_driver(small(shape_of()))) as driver:
        runner: Any = driver.runner
        step, program = runner.start._step, runner.start._program
        monkeypatch.setattr(gpu_lessons, "_second", lambda _: FullTape(runner.plan, step, program, runner.guard, 1))
        record = gpu_lessons._too_many(driver, FITS + 1)
    assert record["right"] == (len(walls) == 2), record
    assert "nothing ran; then the same tokens" in record["said"]


# Judging


def test_int8_is_skipped_without_a_file_and_judged_by_its_divergence() -> None:
    assert "--model" in gpu_tape.judge_int8(setting(), [])[0].value
    assert "CUDA" in gpu_tape.judge_int8(setting("cpu"), [])[0].value

    def judged(wide: float, int8: float, perplexity: float = 20.5) -> str:
        own = {"perplexity": perplexity, "kl_most": 0.3, "differs": 0.012}
        figures = {"eager": {"perplexity": 20.0}, "wide": {**own, "kl": wide}, "int8": {**own, "kl": int8}}
        record = {"what": "int8", "model": "a.gguf", "n": 1024, "text": "abc", "figures": figures}
        found = gpu_tape.judge_int8(setting(model="a.gguf"), ended(record))
        assert "another arg-max in 1.20%" in found[0].value
        return found[0].verdict

    assert judged(2e-4, 4e-3) == "PASS"
    assert judged(2e-3, 4e-3) == "FAIL"
    assert judged(2e-4, 0.07) == "FAIL"
    assert judged(2e-4, math.nan) == "FAIL"
    assert judged(2e-4, 4e-3, math.inf) == "FAIL"


def test_a_file_is_what_arg_max_is_compared_with_where_there_is_one() -> None:
    words = [gpu_tape._argmax_jobs(setting(model=model))[0].words["path"] for model in (None, "/a/file.gguf")]
    assert words == [None, "/a/file.gguf"]
    assert gpu_tape._int8_jobs(setting()) == []


def test_int8_activations_are_measured_where_weights_are_packed_and_told_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Machine("cuda:0", 1 << 40, 1 << 40, driver_cuda=13_000)
    monkeypatch.setattr("ostinato.engine.choose.machine_at", lambda device: card)
    model = small(shape_of())
    assert [one.settled.activations for one in gpu_tape.measured(model, "q4_k_m")] == ["wide", "int8", "wide"]
    assert [one.settled.mode for one in gpu_tape.measured(model, "bf16")] == ["persistent", "loop"]

    def figure(mode: str, activations: str, batch: int, depth: int, rate: float) -> Record:
        own = {"what": "decode", "limit": 900.0, "bytes_per_token": 1000 + depth}
        return {**own, "mode": mode, "activations": activations, "batch": batch, "depth": depth, "tok_s": rate}

    records = [
        figure("persistent", "wide", 1, 500, 440.0),
        figure("persistent", "wide", 8, 500, 2000.0),
        figure("persistent", "wide", 1, 8000, 70.0),
        figure("persistent", "int8", 1, 500, 522.0),
        figure("persistent", "int8", 8, 500, 3000.0),
        figure("loop", "wide", 1, 500, 220.0),
    ]
    found = {o.name: o for o in gpu_tape.judge_tape_speed(setting(), ended(*records, shape="llama-8b", type="q4_k_m"))}
    assert verdicts(list(found.values())) == {
        "tape-8b-q4_k_m": "PASS",
        "tape-8b-q4_k_m-batch": "PASS",
        "tape-8b-q4_k_m-far": "PASS",
    }
    assert "2.00 x loop" in found["tape-8b-q4_k_m"].value
    assert "int8 activations 522, 2.00 x llama.cpp" in found["tape-8b-q4_k_m"].value
    assert "int8 activations 3000" in found["tape-8b-q4_k_m-batch"].value
    only = gpu_tape.judge_tape_speed(setting(), ended(records[0], error="exit 1", shape="llama-8b", type="q4_k_m"))
    assert verdicts(only) == {"tape-speed": "FAIL", "tape-8b-q4_k_m": "PASS"}


def test_a_model_that_could_not_be_warmed_is_told() -> None:
    done = {"what": "warm", "model": "llama-1b bf16", "s": 41.0}
    assert verdicts(gpu_tape.judge_warm(setting(), ended(done))) == {"tape-warm": "PASS"}
    assert verdicts(gpu_tape.judge_warm(setting(), ended(error="exit 1"))) == {"tape-warm": "FAIL"}
    assert gpu_tape.judge_warm(setting("cpu"), []) == []
