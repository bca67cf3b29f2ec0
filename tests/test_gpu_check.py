"""The GPU checks' own logic, tried without a GPU: what they compare, and how they judge."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from bench import gpu_check, gpu_exact, gpu_executor, gpu_frame, gpu_lessons, gpu_prompts, gpu_speed, gpu_stress
from bench.gpu_frame import Check, Ended, Job, Outcome, Setting
from bench.gpu_models import model_named, moved
from ostinato.backends.cuda.backend import why_not_blocks
from ostinato.lab.random_weights import RandomFile
from ostinato.models.named_shapes import named_shape

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def setting(seconds: float = 60.0, device: str = "cuda") -> Setting:
    return Setting(device, None, time.monotonic() + seconds, lambda _: None)


def ended(work: str, *records: gpu_frame.Record, error: str | None = None, **words: object) -> Ended:
    return Ended(Job(work, words), records, error, 1.0)


# The script


@pytest.mark.slow
def test_the_script_runs_a_check_in_a_child_and_ends_with_a_summary() -> None:
    words = ["-m", "bench.gpu_check", "--device", "cpu", "--part", "exact", "--only", "kv-types", "--as", "sm_89"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS kv-types" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 PASS, 0 FAIL, 0 MISS, 0 SKIP"
    notes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [outcome["verdict"] for outcome in notes[0]["outcomes"]] == ["PASS"]
    assert notes[0]["as_if"] == "sm_89"
    assert "--as sm_89" in notes[0]["command"]


@pytest.mark.slow
def test_an_unknown_check_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--part", "stress", "--only", "speed"])
    with pytest.raises(SystemExit, match="known: allocations, calls-loop"):
        gpu_check.main()


def test_the_commands_for_the_first_minutes_on_a_card_name_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "cards.md").read_text("utf-8")
    commands = [line.split() for line in page.split("```text\n")[1].split("```")[0].splitlines()]
    checks = [words[3:] for words in commands if words[:3] == ["python", "-m", "bench.gpu_check"]]
    decodes = [words[3:] for words in commands if words[:3] == ["ostinato", "bench", "decode"]]
    assert len(checks) + len(decodes) == len(commands) == 8
    for words in checks:
        monkeypatch.setattr(sys, "argv", ["gpu_check", *words, "--device", "cpu"])
        asked = gpu_check._asked()
        assert gpu_check._chosen(gpu_check._checks(), asked.part, asked.only)
    for words in decodes:
        assert words.pop() == "--profile"
        said = dict(zip(words[::2], words[1::2], strict=True))
        assert set(said) == {"--shape", "--type", "--mode", "--batch", "--depth"}
        assert why_not_blocks(named_shape(said["--shape"])) is None
        assert RandomFile(named_shape(said["--shape"]), said["--type"]).tensors


def test_every_proof_of_no_host_work_runs_for_both_modes_that_pace_themselves() -> None:
    names = {check.name for check in gpu_stress.CHECKS}
    proofs = ("calls", "host-time", "stopped", "busy-cores", "fault", "engines")
    assert names == {"allocations"} | {f"{proof}-{mode}" for proof in proofs for mode in ("loop", "persistent")}
    for check in gpu_stress.CHECKS:
        jobs, mode = check.jobs(setting()), check.name.rpartition("-")[2]
        assert {job.words.get("mode", mode) for job in jobs} == {mode}
        if mode == "persistent":
            assert check.jobs(setting(device="cpu")) == []
            assert [outcome.verdict for outcome in check.judge(setting(device="cpu"), [])] == ["SKIP"]


@pytest.mark.slow
def test_a_fault_in_a_running_loop_is_injected_and_told_without_a_gpu() -> None:
    """E-2."""
    job = gpu_stress._fault_jobs(setting(device="cpu"), "loop")[0]
    found = gpu_frame.run_child(setting(device="cpu"), job)
    (outcome,) = gpu_stress.judge_fault(setting(), [found], "fault-loop")
    assert (outcome.verdict, outcome.name) == ("PASS", "fault-loop-drift"), outcome.value


# The frame


def checks(*judged: Sequence[Outcome] | Exception, alone: bool) -> list[Check]:
    """Checks that come to this, without a child."""

    def check(number: int, found: Sequence[Outcome] | Exception) -> Check:
        def judge(_: Setting, __: Sequence[Ended]) -> Sequence[Outcome]:
            if isinstance(found, Exception):
                raise found
            return found

        run = lambda setting, job: ended(job.work)  # noqa: E731 - a child that says nothing
        return Check("exact", f"check-{number}", lambda _: [Job("none")], judge, alone=alone, run=run)

    return [check(number, found) for number, found in enumerate(judged)]


@pytest.mark.parametrize("alone", [True, False])
def test_a_check_that_breaks_fails_and_the_others_go_on(alone: bool) -> None:
    good = [Outcome("PASS", "good", "as it should be")]
    found = list(gpu_frame.run_checks(checks(good, KeyError("records"), good, alone=alone), setting(), 2))
    assert [outcome.verdict for outcome in found] == ["PASS", "FAIL", "PASS"]
    assert "KeyError" in found[1].value


def test_a_check_whose_turn_comes_after_the_parts_time_is_skipped() -> None:
    good = [Outcome("PASS", "good", "as it should be")]
    found = list(gpu_frame.run_checks(checks(good, alone=True), setting(seconds=0.5), 1))
    assert [outcome.verdict for outcome in found] == ["SKIP"]
    assert "--seconds" in found[0].value


@pytest.mark.slow
@pytest.mark.parametrize(("part_s", "job_s", "cut"), [(60.0, 1.5, False), (1.5, 60.0, True)])
def test_a_child_that_runs_too_long_ends_with_the_processes_that_it_started(
    part_s: float, job_s: float, cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have its output, which its parent reads to the end."""
    child = tmp_path / "child"
    child.write_text("#!/bin/sh\nsleep 60 &\nsleep 60\n")
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))
    started = time.monotonic()
    found = gpu_frame.run_child(setting(part_s), Job("none", seconds=job_s))
    assert time.monotonic() - started < 30
    assert (found.error is not None, found.cut) == (True, cut)


@pytest.mark.parametrize("alone", [True, False])
def test_of_a_check_that_the_parts_time_cuts_off_only_failures_count(alone: bool) -> None:
    def judge(_: Setting, ended: Sequence[Ended]) -> Sequence[Outcome]:
        assert not any(one.cut for one in ended)
        return [Outcome("PASS", "first", "as it should be"), Outcome("FAIL", "second", "not so")]

    def found(*cut: bool) -> list[str]:
        jobs = [Job("none", {"cut": one}) for one in cut]
        run = lambda setting, job: Ended(job, (), None, 1.0, cut=job.words["cut"])  # noqa: E731 - no child
        check = Check("exact", "check", lambda _: jobs, judge, alone=alone, run=run)
        return [outcome.verdict for outcome in gpu_frame.run_checks([check], setting(), 2)]

    assert found(False, False) == ["PASS", "FAIL"]
    assert found(False, True) == ["FAIL", "SKIP"]
    assert found(True, True) == ["SKIP"]


@pytest.mark.slow
def test_an_interrupt_ends_the_children_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child"
    child.write_text("#!/bin/sh\nexec sleep 60\n")
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))
    asked = setting()

    def interrupt(_: Setting, __: Sequence[Ended]) -> Sequence[Outcome]:
        while not asked.running:
            time.sleep(0.01)
        raise KeyboardInterrupt

    nothing = lambda setting, job: ended(job.work)  # noqa: E731 - no child
    first = Check("exact", "first", lambda _: [Job("none")], interrupt, run=nothing)
    second = Check("exact", "second", lambda _: [Job("none")], lambda _, __: [])
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(gpu_frame.run_checks([first, second], asked, 2))
    assert time.monotonic() - started < 30
    assert not asked.running


@pytest.mark.slow
def test_a_child_that_fails_gives_what_it_said_before_and_why_it_failed() -> None:
    job = Job("trials", {"name": "no such model", "type": "f32", "n": 1, "seed": 1, "seconds": 1.0})
    found = gpu_frame.run_child(setting(device="cpu"), job)
    assert found.records == ()
    assert found.error is not None
    assert "no such model" in found.error


# Exactness


def test_two_answers_that_differ_in_one_bit_of_a_logprob_are_told_apart() -> None:
    one: list[gpu_exact.Witness] = [(5, "bf800000", ((5, "bf800000"),), 3, None)]
    assert gpu_exact.first_difference(one, one) is None
    two: list[gpu_exact.Witness] = [(5, "bf800001", ((5, "bf800000"),), 3, None)]
    assert "logprob" in str(gpu_exact.first_difference(one, two))
    assert gpu_exact.first_difference(one, []) == "0 tokens, alone 1"


@pytest.mark.slow
def test_trials_find_a_request_whose_bits_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"name": "tiny", "type": "f32", "seed": 1, "seconds": 30.0}
    right = next(gpu_exact.trials("cpu", n=3, **words))  # type: ignore[arg-type]  # words of several kinds
    assert (right["trials"], right["wrong"]) == (3, [])
    together = gpu_exact._together

    def spoiled(*given: object) -> object:
        requests, answers = together(*given)  # type: ignore[arg-type]  # passed on
        token, bits, *rest = answers[-1][0]
        answers[-1][0] = (token, f"{int(bits, 16) ^ 1:08x}", *rest)  # type: ignore[assignment]  # one bit of the last request
        return requests, answers

    monkeypatch.setattr(gpu_exact, "_together", spoiled)
    wrong = next(gpu_exact.trials("cpu", n=2, **words))["wrong"]  # type: ignore[arg-type]  # words of several kinds
    assert len(wrong) == 2
    assert "logprob" in wrong[0]
    assert "with no other request: the same" in wrong[0]


def test_fewer_trials_than_wanted_are_a_miss_and_a_mismatch_is_a_failure() -> None:
    for n, wrong, verdict in ((7, [], "PASS"), (9, [], "MISS"), (7, ["token 3"], "FAIL")):
        assert judged_trials(n=n, wrong=wrong).verdict == verdict


def judged_trials(*, n: int = 7, **found: object) -> Outcome:
    record = {"what": "trials", "model": "tiny", "recurs": False, "trials": 7, "requests": 30, "cached": 5}
    record |= {"cancelled": 1, "tokens": 90, "s": 1.0, "wrong": [], **found}
    return gpu_exact.judge_trials(setting(), [ended("trials", record, name="tiny", type="f32", n=n)], "trials")[0]


def test_trials_of_a_recurrent_model_in_which_no_request_begins_at_a_snapshot_fail() -> None:
    assert judged_trials(recurs=True).verdict == "PASS"
    assert "5 of them of recurrent models" in judged_trials(recurs=True).value
    assert judged_trials(cached=0).verdict == "PASS"
    missed = judged_trials(recurs=True, cached=0)
    assert (missed.verdict, "tiny: no request began at a snapshot" in missed.value) == ("FAIL", True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "qwen35-moe"])
def test_trials_of_recurrent_models_begin_at_snapshots(name: str) -> None:
    found = next(gpu_exact.trials("cpu", name=name, type="f32", n=5, seed=1, seconds=30.0))
    assert (found["trials"], found["wrong"], found["recurs"]) == (5, [], True)
    assert found["cached"] > 0


@pytest.mark.slow
def test_a_model_with_recurrent_layers_and_experts_is_verified_as_any_family_is() -> None:
    (record,) = gpu_exact.verify("cpu", name="qwen35-moe", types=["f32"])
    (outcome,) = gpu_exact.judge_verified(setting(device="cpu"), [ended("verify", record)], "families")
    assert outcome.verdict == "PASS", outcome.value


def test_a_mode_that_was_not_compared_is_a_failure() -> None:
    check: gpu_frame.Record = {"name": "graph / eager", "difference": None, "n": 3, "figures": {}}
    record = {"what": "verified", "model": "tiny bf16", "checks": [check], "not_run": {"loop": "an old driver"}}
    found = gpu_exact.judge_verified(setting(), [ended("verify", record, name="tiny")], "types")
    assert found[0].verdict == "FAIL"
    assert "loop / eager" in found[0].value
    assert "an old driver" in found[0].value


def test_a_moved_model_keeps_its_tied_head_and_its_norms_in_float32() -> None:
    model = moved(model_named("tiny", "f32"), torch.device("cpu"), torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert isinstance(model.embedding, torch.Tensor)
    assert model.embedding.dtype == torch.bfloat16
    assert model.head is not None
    assert model.head.weight is model.embedding
    assert model.norm is not None
    assert model.norm.weight.dtype == torch.float32


# Speed


def test_a_figure_under_its_bar_is_a_miss_and_says_what_limits_it() -> None:
    bars = gpu_speed.MODELS[0]
    figure = {"what": "decode", "runs": [790.0, 800.0], "limit": 1600.0, "host_tok_s": 799.0, "slots": 8}
    kind = {"kind": "head", "n_nodes": 1, "microseconds": 200.0, "weight_bytes": 480_000_000}
    records = [
        {"what": "machine", "read_bytes_s": 4e12},
        {**figure, "mode": "loop", "batch": 1, "tok_s": 800.0},
        {**figure, "mode": "eager", "batch": 1, "tok_s": 100.0},
        {**figure, "mode": "graph", "batch": 1, "tok_s": 820.0},
        {"what": "profile", "batch": 1, "us": 900.0, "kinds": [kind]},
    ]
    found = {outcome.name: outcome for outcome in gpu_speed._judge(bars, setting(), [ended("speed", *records)])}
    assert found["decode-1b-bf16"].verdict == "MISS"
    assert "50 % of it" in found["decode-1b-bf16"].value
    assert found["decode-1b-bf16-eager"].verdict == "PASS"
    assert found["decode-1b-bf16-graph"].verdict == "MISS"
    assert "head 200 us in 1 nodes, 60 % of 4.00 TB/s" in found["time-1b-bf16-batch-1"].value


def test_graph_memory_that_grows_with_the_slots_is_a_miss() -> None:
    def judged(*steps: int) -> str:
        records = [
            {"what": "graph_memory", "slots": n, "step": step << 20, "prompts": 0} for n, step in enumerate(steps)
        ]
        return gpu_speed.judge_graph_memory(setting(), [ended("graph_memory", *records)])[0].verdict

    assert judged(10, 12, 10) == "PASS"
    assert judged(10, 12, 30) == "MISS"
    assert judged(70, 70, 70) == "MISS"


# Stress


def test_calls_that_grow_with_the_tokens_fail_and_questions_by_time_do_not() -> None:
    def judged(by_hand: int, launches: int) -> list[str]:
        one = {"cudaGraphLaunch": 1, "cudaEventQuery": 3}
        record = {
            "what": "calls",
            "counter": "CUPTI",
            "by_hand": {"100": one, "2000": {**one, "cudaGraphLaunch": by_hand}},
            "engine": {"100": one, "2000": {"cudaGraphLaunch": launches, "cudaEventQuery": 90, "cudaGetLastError": 80}},
        }
        return [outcome.verdict for outcome in gpu_stress.judge_calls(setting(), [ended("calls", record)], "calls")]

    assert judged(1, 1) == ["PASS", "PASS"]
    assert judged(2000, 2000) == ["FAIL", "FAIL"]


def test_a_request_without_an_error_and_an_engine_that_asks_for_no_restart_fail_the_fault_check() -> None:
    record = {
        "what": "fault",
        "ends": {"0": ["EngineDead: the step failed; restart", "nothing more"], "1": ["ended (length, 5 more tokens)"]},
        "unread": [],
        "said": "the engine's thread failed; open the model again",
        "refused": "EngineDead: dead",
        "closed_s": 0.1,
        "complaints": [],
    }
    found = gpu_stress.judge_fault(setting(), [ended("fault", record, how="step")], "fault-loop")[0]
    assert found.name == "fault-loop-step"
    assert found.verdict == "FAIL"
    assert "request 1" in found.value
    assert "must restart" in found.value
    assert "request 0" not in found.value


def test_busy_cores_that_unsettle_a_steady_device_fail_and_an_unsteady_device_misses() -> None:
    def judged(idle: float, busy: float) -> str:
        gaps = {"median_us": 100.0, "longest_us": 500.0}
        record = {"what": "busy", "idle": {**gaps, "p99_us": idle}, "busy": [{**gaps, "p99_us": busy}], "n_busy": 16}
        return gpu_stress.judge_busy(setting(), [ended("busy", record)], "busy-cores")[0].verdict

    assert judged(101, 104) == "PASS"
    assert judged(101, 120) == "FAIL"
    assert judged(120, 121) == "MISS"


def test_handles_that_engines_leave_behind_fail_the_check() -> None:
    def judged(handles: int) -> str:
        held = [{"n": n, "handles": 10, "threads": 4, "rss": 1 << 30} for n in (20, 40, 60)]
        held[-1]["handles"] = handles
        record = {"what": "engines", "n": 60, "wanted": 60, "s": 30.0, "held": held}
        return gpu_stress.judge_engines(setting(), [ended("engines", record)], "engines")[0].verdict

    assert judged(10) == "PASS"
    assert judged(11) == "FAIL"


def test_fewer_engines_than_wanted_are_a_miss() -> None:
    held = [{"n": n, "handles": 10} for n in (20, 40, 60)]
    record = {"what": "engines", "n": 60, "wanted": 1_000, "s": 60.0, "held": held}
    assert gpu_stress.judge_engines(setting(), [ended("engines", record)], "engines")[0].verdict == "MISS"


def test_streams_that_are_made_anew_for_every_engine_fail_the_check() -> None:
    """E-4."""

    def judged(*streams: int) -> str:
        held = [{"n": n, "streams": made, "events": 4, "rss": 1 << 30} for n, made in enumerate(streams)]
        record = {"what": "engines", "n": 60, "wanted": 60, "s": 30.0, "held": held}
        return gpu_stress.judge_engines(setting(), [ended("engines", record)], "engines")[0].verdict

    assert judged(2, 2, 2) == "PASS"
    assert judged(2, 2, 4) == "FAIL"
    assert judged(40, 40, 40) == "FAIL"


# Prompts from the tape


def test_prompts_from_the_tape_are_held_to_bits_or_a_tolerance_and_to_what_they_save() -> None:
    def judged(type: str, after: int, **found: object) -> list[str]:
        one = {"what": "prompts", "way": "plain", "before": 3 << 30, "after": 6 << 30, "tape": 2 << 30, "tok_s": 9e4}
        one |= {"matrices": 2 << 30, "scratch": 1 << 27}
        two = {**one, "way": "tape", "before": 1 << 30, "after": after}
        compared = {"what": "compared", "same_tokens": True, "same_bits": True, "worst": 0.0, **found}
        done = ended("prompts_read", one, two, compared, name="llama-1b", type=type)
        return [outcome.verdict for outcome in gpu_prompts.judge_prompts(setting(), [done])]

    assert judged("bf16", 4 << 30) == ["PASS", "PASS", "PASS"]
    assert judged("bf16", 6 << 30, same_bits=False, worst=0.01) == ["FAIL", "MISS", "PASS"]
    assert judged("q4_k_m", 4 << 30, same_bits=False, worst=0.01, same_tokens=False) == ["PASS", "PASS", "PASS"]
    assert judged("q4_k_m", 4 << 30, same_bits=False, worst=0.1) == ["FAIL", "PASS", "PASS"]
    broken = gpu_frame.Ended(gpu_frame.Job("prompts_read", {"name": "llama-1b", "type": "bf16"}), (), "it died", 1.0)
    assert [outcome.verdict for outcome in gpu_prompts.judge_prompts(setting(), [broken])] == ["FAIL"]


# Checks of single lessons (E, docs/rules.md)


def verdicts(outcomes: Sequence[Outcome]) -> dict[str, str]:
    return {outcome.name: outcome.verdict for outcome in outcomes}


def test_a_lesson_passes_where_every_mode_shows_it_and_none_broke() -> None:
    def of(code: str, mode: str, right: bool) -> gpu_frame.Record:
        return {"what": "lesson", "code": code, "right": right, "said": mode}

    def judged(*found: Ended) -> list[Outcome]:
        return gpu_lessons.judge(found, "guard", ("E-31", "E-67"))

    loop = ended("guard", of("E-31", "loop", True), of("E-67", "loop", True))
    found = judged(loop, ended("guard", of("E-31", "persistent", True), of("E-67", "persistent", False)))
    assert verdicts(found) == {"guard E-31": "PASS", "guard E-67": "FAIL"}
    assert [outcome.value for outcome in found] == ["loop || persistent", "persistent"]
    assert verdicts(judged(loop, ended("guard", error="it died")))["guard"] == "FAIL"
    assert verdicts(judged(ended("guard", of("E-31", "loop", True))))["guard E-67"] == "FAIL"
    assert verdicts(judged()) == {"guard E-31": "SKIP", "guard E-67": "SKIP"}


def test_an_engine_that_compiles_after_its_weights_are_read_fails() -> None:
    """E-9."""

    def judged(*late: int) -> dict[str, str]:
        records = [{"what": "ahead", "mode": f"m{n}", "late": n, "s": 1.0, "bytes": 0} for n in late]
        return verdicts(gpu_executor.judge_ahead(setting(), [ended("ahead", *records)]))

    assert judged(0, 3) == {"ahead-m0": "PASS", "ahead-m3": "FAIL"}
    assert judged() == {"ahead": "FAIL"}


def test_a_captured_step_that_lacks_a_node_fails_and_a_capture_that_slows_what_follows_misses() -> None:
    """E-59, E-61."""

    def judged(n_nodes: int, after: float, said: str = "HardwareCannot: broken on purpose") -> dict[str, str]:
        nodes = {"what": "nodes", "mode": "loop", "n_nodes": n_nodes, "n_launches": 92}
        errors = [{"how": how, "graph": said, "loop": said} for how in ("raises", "asks")]
        pace = {"what": "captures", "errors": errors, "before": [100.0], "after": [after]}
        return verdicts(gpu_executor.judge_captures(setting(), [ended("captures", nodes, pace)]))

    assert judged(93, 99.0) == {"nodes": "PASS", "captures": "PASS"}
    assert judged(92, 95.0) == {"nodes": "FAIL", "captures": "MISS"}
    assert judged(93, 9.0) == {"nodes": "PASS", "captures": "FAIL"}
    assert judged(93, 99.0, "nothing was wrong")["captures"] == "FAIL"


def test_a_sanitizer_that_complains_fails_and_one_that_is_not_there_is_skipped() -> None:
    """E-34."""

    def judged(**words: object) -> str:
        said = {"tool": "memcheck", "mode": "loop", "there": True, "code": 0, "first": [], "n_tokens": 18, "tail": ""}
        record = {"what": "sanitized", **said, "summary": "ERROR SUMMARY: 0 errors", **words}
        return gpu_executor.judge_sanitized(setting(), [ended("small_job", record)])[0].verdict

    assert judged() == "PASS"
    assert judged(summary="ERROR SUMMARY: 10 errors") == "FAIL"
    races = {"tool": "racecheck", "mode": "persistent"}
    assert judged(**races, summary="RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)") == "PASS"
    assert judged(**races, summary="RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)") == "FAIL"
    assert judged(**races, summary="RACECHECK SUMMARY: 1 hazards displayed (0 errors, 1 warning)") == "FAIL"
    assert judged(n_tokens=0, mode="graph") == "FAIL"
    assert judged(n_tokens=0) == "MISS"  # a launch of the WHILE graph that fails under the tool alone
    assert judged(n_tokens=0, summary="ERROR SUMMARY: 1 errors") == "FAIL"
    assert judged(there=False, summary=None) == "SKIP"
    assert judged(code=124) == "MISS"


def test_memory_that_grows_with_a_prompt_fails_unless_it_is_its_keys_and_values() -> None:
    """E-36."""

    def judged(scratch: int) -> str:
        long = {"what": "long_prompt", "n": 32_768, "kv": 8 << 30, "opened": 10 << 30, "peak": (10 << 30) + scratch}
        short = {"what": "long_prompt", "n": 4096, "kv": 1 << 30, "opened": 3 << 30, "peak": 3 << 30}
        return gpu_executor.judge_long_prompt(setting(), [ended("long_prompt", short, long)])[0].verdict

    assert judged(32 << 20) == "PASS"
    assert judged(512 << 20) == "FAIL"


HOST: dict[str, object] = {"threads": 8, "host_bytes_s": 60e9, "windows_s": 0.01}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [({}, "PASS"), ({"pieces": 2}, "FAIL"), ({"aligned": False}, "FAIL"), ({"bytes": 2000}, "FAIL")],
)
def test_weights_in_several_pieces_or_wider_than_in_the_file_fail(changes: dict[str, object], verdict: str) -> None:
    """E-16, E-22."""
    rates = {"what": "upload", "bytes": 1000, "bytes_s": [40e9], "pinned_bytes_s": 50e9, **HOST}
    laid = {"what": "loaded", "file_bytes": 1000, "pieces": 1, "aligned": True, "bytes": 1001, **changes}
    found = gpu_executor.judge_upload(setting(), [ended("upload", laid, rates)])
    assert [(one.name, one.verdict) for one in found] == [("upload", "PASS"), ("upload-laid", verdict)]


def test_figures_of_the_executor_are_held_to_their_bars() -> None:
    """E-33, E-47, E-48, E-60, E-63, E-65, E-74, E-81."""

    def judged(judge: Callable[[Setting, Sequence[Ended]], list[Outcome]], *records: gpu_frame.Record) -> list[str]:
        return [outcome.verdict for outcome in judge(setting(), [ended("work", *records)])]

    for rate, verdict in ((40e9, "PASS"), (10e9, "MISS")):
        record = {"what": "upload", "bytes": 1, "bytes_s": [rate], "pinned_bytes_s": 50e9, **HOST}
        assert judged(gpu_executor.judge_upload, record) == [verdict]
    for narrow, verdict in ((10.04, "PASS"), (10.06, "FAIL")):
        found = {"perplexity": {"f16": 10.0, "q8_0": narrow}, "bytes": {"f16": 64, "q8_0": 34}, "n_tokens": 9}
        assert judged(gpu_executor.judge_kv_error, {"what": "kv_error", **found}) == [verdict]
    plain = {"what": "plain", "bytes_s": 4e12}
    for share, busy, verdict in ((0.7, 1.0, "PASS"), (0.5, 1.0, "MISS"), (0.7, 0.2, "MISS")):
        one = {"what": "attention", "name": "8B", "us": 1.0, "bytes_s": share * 4e12, "busy_sms": busy}
        assert judged(gpu_executor.judge_bandwidth, plain, one) == [verdict]
    for graph, verdict in ((4.0, "PASS"), (5.0, "MISS")):
        one = {"what": "prompt_graphs", "ms": {"graph": graph, "launches": 4.0}, "failures": {}}
        two = {"what": "recurrent", "tok_s": {"eager": 100.0, "graph": 400.0}}
        assert judged(gpu_executor.judge_prompt_graphs, one, two) == [verdict, "PASS"]
    for late, made, verdict in ((6.0, 0, "PASS"), (9.0, 0, "MISS"), (6.0, 1, "FAIL")):
        one = {"what": "first_tokens", "ms": [*([5.0] * 97), late, late, late], "instantiations": made}
        assert judged(gpu_executor.judge_first_tokens, one) == [verdict]
    for us, verdict in ((960.0, "PASS"), (700.0, "MISS")):
        one = {"what": "phases", "mode": "loop", "us": us, "between_us": 20.0, "wall_us": 1000.0, "kinds": {}}
        assert judged(gpu_executor.judge_phases, one) == [verdict]
    for without, verdict in ((1100.0, "PASS"), (900.0, "MISS")):
        on = {"what": "fusions", "off": None, "us": [1000.0, 1001.0], "n_nodes": 80}
        off = {"what": "fusions", "off": "gated", "us": [without, without + 1], "n_nodes": 96}
        assert judged(gpu_executor.judge_fusions, on, off) == [verdict]
