"""What the GPU checks are made of: outcomes, checks by name, and children that do the work.

Every piece of work runs in a process of its own, so that a fault, a hang or a full card ends one check and not the
run; the parent holds no device. A child says what it finds as it goes, one line of JSON each: what it had said before
it died still counts. Nothing here knows what is checked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

Verdict = Literal["PASS", "FAIL", "MISS", "SKIP"]
Record = dict[str, Any]
Work = Callable[..., Iterator[Record]]  # a child's: (device, **words) to records

ROOT: Final = Path(__file__).resolve().parents[1]
MARK: Final = "RESULT "
SAID: Final = "SAID "  # what a child tells its parent while it works
TAIL_LINES: Final = 25


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the summary. A MISS is a figure under its bar; a FAIL is something wrong."""

    verdict: Verdict
    name: str
    value: str
    bar: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        return f"{self.verdict} {self.name}: {self.value}" + (f"  [{self.bar}]" if self.bar else "")


@dataclass(frozen=True, slots=True)
class Job:
    """Work for a child: its name in the table of works, its words, and how long it may take."""

    work: str
    words: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Ended:
    """What a child said, and why it did not end well, if so."""

    job: Job
    records: tuple[Record, ...]
    error: str | None
    seconds: float
    cut: bool = False  # the part's time was over before it ended, or before its turn came

    def of(self, what: str) -> list[Record]:
        """The records of one kind."""
        return [record for record in self.records if record.get("what") == what]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the checks run, and until when."""

    device: str
    model: str | None
    deadline: float  # of time.monotonic
    trace: Callable[[str], None]
    running: set[subprocess.Popen[str]] = field(default_factory=set)  # kept by `run_child`: an interrupt ends them

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


@dataclass(frozen=True, slots=True)
class Check:
    """A check by name: the children it needs, and what their records come to. `alone`: nothing may run beside it."""

    part: str
    name: str
    jobs: Callable[[Setting], Sequence[Job]]
    judge: Callable[[Setting, Sequence[Ended]], Sequence[Outcome]]
    alone: bool = False
    run: Callable[[Setting, Job], Ended] | None = None  # where a child needs more than waiting for


# Children


def run_child(
    setting: Setting, job: Job, heard: Callable[[subprocess.Popen[str], str], None] = lambda process, line: None
) -> Ended:
    """Do a job in a process of its own. `heard` is told each line that the child says to its parent."""
    seconds = min(job.seconds, setting.left)
    if seconds <= 1:
        return Ended(job, (), "the part's time was over", 0.0, cut=True)
    began = time.monotonic()
    records: list[Record] = []
    words = json.dumps({"device": setting.device, "work": job.work, "words": dict(job.words)})
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.gpu_check", "--child", words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        env=child_environment(setting),
        start_new_session=True,  # a child's own processes end with it: they hold its output open
    )
    assert process.stdout is not None
    setting.running.add(process)
    late = threading.Event()

    def end() -> None:
        late.set()
        kill_group(process)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    tail: list[str] = []
    try:
        for line in process.stdout:
            line = line.rstrip()
            if line.startswith(MARK):
                records.append(json.loads(line.removeprefix(MARK)))
            elif line.startswith(SAID):
                heard(process, line.removeprefix(SAID))
            elif line:
                tail = [*tail[-TAIL_LINES + 1 :], line]
        code = process.wait()
    finally:
        timer.cancel()
        kill_group(process)
        setting.running.discard(process)
        process.stdout.close()
    spent = time.monotonic() - began
    error = None
    if late.is_set():
        error = f"ended after {seconds:.0f} s; it last said: {_short(tail)}"
    elif code != 0:
        error = f"exit {code}: {_short(tail)}"
    if error is not None:
        setting.trace("\n".join([f"  {job.work} {dict(job.words)}:", *(f"  | {line}" for line in tail)]))
    return Ended(job, tuple(records), error, spent, cut=late.is_set() and seconds < job.seconds)


def kill_group(process: subprocess.Popen[str]) -> None:
    """End what is left of a child and of the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def child_environment(setting: Setting) -> dict[str, str]:
    """What a child sees: the packages of this checkout, real kernels, and few threads, for many run side by side."""
    environment = dict(os.environ)
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("OMP_NUM_THREADS", "2" if setting.on_gpu else "1")
    # Some CPUs announce AMX and refuse it (backends/torch/amx.py); the twins in bfloat16 run on the CPU.
    environment.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    environment.pop("TRITON_INTERPRET", None)
    return environment


def _short(lines: Sequence[str]) -> str:
    said = [line for line in lines if line.strip()]
    return " | ".join(said[-3:])[-600:] or "nothing"


def serve_child(works: Mapping[str, Work], text: str) -> None:
    """Be a child: do what the text asks, say each record as it comes, and go without farewells.

    A process whose card has died cannot take down its libraries in peace; everything has been said by then. It ends in
    the usual way only where it is asked to.
    """
    asked = json.loads(text)
    try:
        for record in works[asked["work"]](asked["device"], **asked["words"]):
            print(MARK + json.dumps(record), flush=True)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    if asked.get("farewell"):  # a tool around this process waits for it
        return
    os._exit(0)


def say(text: str) -> None:
    """A child tells its parent."""
    print(SAID + text, flush=True)


# Running checks


def run_checks(checks: Sequence[Check], setting: Setting, n_beside: int) -> Iterator[Outcome]:
    """Outcomes as they come. Checks that do not mind company have their children side by side, from the start."""
    with ThreadPoolExecutor(max_workers=n_beside) as pool:
        planned: list[tuple[Check, list[Future[Ended]] | str]] = []
        for check in checks:
            if check.alone:
                planned.append((check, []))
                continue
            try:
                planned.append((check, [pool.submit(_run, setting, check, job) for job in check.jobs(setting)]))
            except Exception as error:  # what was planned wrongly is one check's failure
                planned.append((check, repr(error)))
        try:
            for check, futures in planned:
                if isinstance(futures, str):
                    yield Outcome("FAIL", check.name, futures)
                elif not check.alone:
                    yield from _judged(setting, check, [future.result() for future in futures])
            for check, _ in planned:
                if check.alone:
                    yield from _run_alone(setting, check)
        except BaseException:  # an interrupt: children have sessions of their own, and do not hear of it
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(setting.running):
                kill_group(process)
            raise


def _run_alone(setting: Setting, check: Check) -> Sequence[Outcome]:
    if setting.left <= 1:
        return [Outcome("SKIP", check.name, "the part's time was over before its turn came (--seconds)")]
    try:
        ended = [_run(setting, check, job) for job in check.jobs(setting)]
    except Exception as error:
        return [Outcome("FAIL", check.name, repr(error))]
    return _judged(setting, check, ended)


def _run(setting: Setting, check: Check, job: Job) -> Ended:
    return run_child(setting, job) if check.run is None else check.run(setting, job)


def _judged(setting: Setting, check: Check, ended: Sequence[Ended]) -> Sequence[Outcome]:
    """Of a check that the part's time cut off, what failed until then, and that it was cut off."""
    whole = [one for one in ended if not one.cut]
    if n_cut := len(ended) - len(whole):
        reason = f"the part's time was over before {n_cut} of {len(ended)} children had ended (--seconds)"
        failed = [one for one in _outcomes(setting, check, whole) if one.verdict == "FAIL"] if whole else []
        return [*failed, Outcome("SKIP", check.name, reason)]
    return _outcomes(setting, check, ended)


def _outcomes(setting: Setting, check: Check, ended: Sequence[Ended]) -> Sequence[Outcome]:
    try:
        return check.judge(setting, ended)
    except Exception as error:
        broken = "; ".join(f"{one.job.work}: {one.error}" for one in ended if one.error)
        return [Outcome("FAIL", check.name, broken or f"its records could not be judged: {error!r}")]
