"""A server under every fault at random, in rounds: a storm, then a calm in which none of its processes may end.

In a storm, processes are killed, stopped and paused, the disk under the log is full, and models are unloaded for each
other, while honest and harmful clients (`chaos_clients.py`) ask. After each round everything must be idle: no request,
no slot and no page is held, and every request is in the log once. In the calm only the clients go on, and what each
process holds must not grow. Everything is on this machine's loopback, and every process is ended by its id.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.chaos_clients import HARMS, End, Harm, ask, get, honest
from bench.chaos_held import Held, growth, held
from ostinato.options import LoadOptions
from ostinato.processes import python_command
from ostinato.serve.settings import ServeOptions
from ostinato.serve.supervisor import YOUNG_S
from tests.cli import tiny_model

ROOT: Final = Path(__file__).resolve().parents[1]

MODELS: Final = ("one", "two", "three")
MOST_LOADED: Final = 2
CALM_MODELS: Final = MODELS[:MOST_LOADED]
CONTEXT, SLOTS, KEPT_RESPONSES = 8192, 2, 50
SILENT_S: Final = 4.0  # until the supervisor kills a process that says nothing
N_HONEST, N_HARMFUL = 4, 2
STORM_SHARE: Final = 0.6  # of the time
SAMPLE_S: Final = 2.0
QUIET_S: Final = 60.0  # for a round's last requests, restarts and connections
START_S: Final = 120.0
LEFT_S: Final = 10.0  # for the processes of its processes to notice its end
AFTER_S: Final = {"log": 0.5, "pause": 0.5}  # a fault may still be noticed so long after it
AFTER_DEATH_S: Final = 8.0  # of a process, or of the supervisor's standstill
POOLED: Final = 12  # threads of a process's pools, started when they are first needed
MOST_WRONG: Final = 20
_REASONS: Final = re.compile(
    r"the (?:worker|front)(?: of \w+)? ended: (?P<died>.*); starting another$"
    r"|error: (?:\w+: )?(?P<refused>the worker (?:ended before the model was loaded|died \d+ times in a row).*)$"
)
_OURS: Final = ("signal SIGKILL", "it said nothing for", "it read no commands")  # what our faults make of a process


@dataclass(slots=True)
class ServerReport:
    """What was done, and what was wrong. Mutable: it is filled round by round."""

    seconds: float = 0.0
    rounds: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)  # of honest requests
    harms: Counter[str] = field(default_factory=Counter)  # by client and by how it was answered
    log: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[Held]] = field(default_factory=dict)  # by process
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Span:
    """When a fault lasted. Mutable: its end is not known at first."""

    what: str  # front, worker, supervisor, log
    begin: float
    end: float = float("inf")


# The server


class Server:
    """A server of three models in processes of its own, with its log in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log_path = folder, folder / "log"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        tiny = tiny_model.write(folder / f"{MODELS[0]}.gguf", context=2 * CONTEXT)
        for name in MODELS[1:]:
            (folder / f"{name}.gguf").write_bytes(tiny.read_bytes())
        options = ServeOptions(
            str(tiny),
            more_models=tuple(str(folder / f"{name}.gguf") for name in MODELS[1:]),
            load=LoadOptions(device="cpu", context=CONTEXT, slots=SLOTS, threads=1),
            port=0,
            models_max=MOST_LOADED,
            keep_responses=KEPT_RESPONSES,
        )
        paths = [str(ROOT), os.environ.get("PYTHONPATH")]  # `python_command` leaves the current folder out
        self._read = 0  # bytes of the log
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                python_command("-m", "bench.chaos_supervisor", options.to_json(), str(SILENT_S)),
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={
                    **os.environ,
                    "TMPDIR": str(self.temporary),
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    # With an arena for each thread, what glibc keeps of bodies of megabytes would hide a leak.
                    "MALLOC_ARENA_MAX": "1",
                },
            )
        self.lines: list[str] = []
        self.port = 0

    async def start(self) -> None:
        end = time.monotonic() + START_S
        while not any(line.startswith("ready: ") for line in self.lines):
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {self.lines[-5:]}")
            await asyncio.sleep(0.05)
            self.lines += self.new_lines()
        (listening,) = (line for line in self.lines if line.startswith("listening at "))
        self.port = int(re.findall(r":(\d+);", listening)[0])

    def new_lines(self) -> list[str]:
        """Whole lines of the log since the last call."""
        with self.log_path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace").splitlines()

    def children(self, kind: str) -> list[int]:
        """The processes that now run as `front` or `worker`."""
        found = []
        with suppress(OSError):
            for one in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
                with suppress(OSError):
                    if f"ostinato.serve.{kind}".encode() in Path(f"/proc/{one}/cmdline").read_bytes():
                        found.append(int(one))
        return found

    def processes(self) -> list[int]:
        return [self.process.pid, *self.children("front"), *self.children("worker")]

    def touch_models(self) -> None:
        """Have models tried again that were given up after several deaths: else they would be refused for minutes."""
        for name in MODELS:
            os.utime(self.folder / f"{name}.gguf")

    def end(self) -> int:
        """Ask it to end; its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(QUIET_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def left(self) -> list[str]:
        """What it should have taken with it: processes, which are killed now, and files."""
        end = time.monotonic() + LEFT_S
        while (pids := self._family()) and time.monotonic() < end:
            time.sleep(0.1)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [*(f"process {pid}" for pid in pids), *(f"folder {path.name}" for path in self.temporary.iterdir())]

    def _family(self) -> list[int]:
        """Every process that this server has started, and those that they have: they share its folder for temporary
        files, whatever process is their parent now."""
        mark = f"TMPDIR={self.temporary}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found


def is_ours(pid: int) -> bool:
    """Whether a process of the server, seen before, still runs: its id may have gone to another."""
    try:
        return b"ostinato.serve." in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def age_s(pid: int) -> float:
    """For how long a process has run."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return up - ticks / os.sysconf("SC_CLK_TCK")


# Faults


class Faults:
    """Faults of processes and of the disk. Each is remembered with its time, and undone."""

    def __init__(self, server: Server, chance: random.Random, counts: Counter[str]) -> None:
        self._server, self._chance, self._counts = server, chance, counts
        self.spans: list[Span] = []
        self._young_fronts = 0
        self._stopped: set[int] = set()
        self._all: tuple[tuple[int, Callable[[], Awaitable[bool]]], ...] = (
            (5, self.kill_worker),
            (3, self.stop_worker),
            (4, self.pause_worker),
            (2, self.kill_front),
            (1, self.stop_front),
            (2, self.pause_front),
            (2, self.pause_supervisor),
            (4, self.fill_the_disk),
        )

    async def one(self) -> None:
        weights, faults = zip(*self._all, strict=True)
        (fault,) = self._chance.choices(faults, weights)
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended in between
            if await fault():
                self._counts[fault.__name__.replace("_", " ")] += 1

    def excuse(self, begin: float, end: float, *what: str) -> bool:
        """Whether one of these faults may have touched a request of this time."""
        return any(
            one.what in what and begin <= one.end + AFTER_S.get(one.what, AFTER_DEATH_S) and end >= one.begin
            for one in self.spans
        )

    @contextmanager
    def _during(self, what: str) -> Iterator[None]:
        span = Span(what, time.monotonic())
        self.spans.append(span)
        try:
            yield
        finally:
            span.end = time.monotonic()

    def _some(self, kind: str) -> int | None:
        found = self._server.children(kind)
        return self._chance.choice(found) if found else None

    def _victim(self) -> int | None:
        """A worker; seldom a young one, because the supervisor gives a model up after several early deaths in a row."""
        pid = self._some("worker")
        return None if pid is None or (age_s(pid) < YOUNG_S and self._chance.random() < 0.7) else pid

    async def kill_worker(self) -> bool:
        return self._kill("worker", self._victim())

    async def kill_front(self) -> bool:
        return self._kill("front", self._front())

    def _kill(self, what: str, pid: int | None) -> bool:
        if pid is None:
            return False
        with self._during(what):
            os.kill(pid, signal.SIGKILL)
        return True

    def _front(self) -> int | None:
        """The front, unless the supervisor would give it up: it does after several early deaths in a row."""
        pid = self._some("front")
        if pid is None:
            return None
        self._young_fronts = self._young_fronts + 1 if age_s(pid) < YOUNG_S + AFTER_DEATH_S else 0
        return pid if self._young_fronts < 3 else None

    async def stop_worker(self) -> bool:
        return await self._stop("worker", self._victim(), None)

    async def stop_front(self) -> bool:
        return await self._stop("front", self._front(), None)

    async def pause_worker(self) -> bool:
        return await self._stop("pause", self._some("worker"), self._chance.uniform(0.1, SILENT_S / 4))

    async def pause_front(self) -> bool:
        return await self._stop("pause", self._some("front"), self._chance.uniform(0.1, SILENT_S / 4))

    async def pause_supervisor(self) -> bool:
        return await self._stop("supervisor", self._server.process.pid, self._chance.uniform(0.1, 1.5 * SILENT_S))

    async def _stop(self, what: str, pid: int | None, seconds: float | None) -> bool:
        """Stop a process for so long; without seconds, until its supervisor has killed it."""
        if pid is None or pid in self._stopped:  # the first of two stops to end would end both
            return False
        began = time.monotonic()
        with self._during(what):
            os.kill(pid, signal.SIGSTOP)
            self._stopped.add(pid)
            try:
                while seconds is None and time.monotonic() - began < 3 * SILENT_S and is_ours(pid):
                    await asyncio.sleep(0.1)
                if seconds is None:
                    self._counts[f"{what} stopped and {'let go' if is_ours(pid) else 'ended'}"] += 1
                else:
                    await asyncio.sleep(seconds)
            finally:
                self._stopped.discard(pid)
                if pid == self._server.process.pid or is_ours(pid):
                    os.kill(pid, signal.SIGCONT)
        return True

    async def fill_the_disk(self) -> bool:
        """No process can write another byte to the log, or to any file, for a while."""
        with self._during("log"):
            try:
                for pid in self._server.processes():
                    _limit_files(pid, 0)
                await asyncio.sleep(self._chance.uniform(0.2, 3.0))
            finally:
                # The supervisor first: processes that it has started meanwhile have its limit.
                for pid in (self._server.process.pid, *self._server.processes()):
                    _limit_files(pid, resource.RLIM_INFINITY)
        return True


def _limit_files(pid: int, n_bytes: int) -> None:
    with suppress(ProcessLookupError):
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (n_bytes, most))


# Rounds


@dataclass(frozen=True, slots=True)
class Asked:
    """An honest request and its end."""

    begin: float
    end: float
    key: str
    ended: End


class Chaos:
    """One server from its start to its end."""

    def __init__(self, server: Server, seed: int, report: ServerReport) -> None:
        self._server, self._seed, self.report = server, seed, report
        self._faults = Faults(server, random.Random(f"{seed} faults"), report.faults)
        self._texts: dict[str, str] = {}  # answers, by what was asked
        self._ids: Counter[str] = Counter()  # of the log
        self._round = 0
        self._calm_pids: list[int] = []

    async def run(self, seconds: float, round_s: float) -> None:
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds and len(self.report.wrong) < MOST_WRONG:
            storm = passed < STORM_SHARE * seconds
            if not storm and not self._calm_pids:
                await self._become_calm()
            await self._one_round(min(round_s, seconds - passed), storm=storm)
        self.report.seconds = time.monotonic() - began

    async def _become_calm(self) -> None:
        """The models of the calm are loaded, and everything that a fault left behind has ended."""
        chance = random.Random(self._seed)
        self._server.touch_models()
        for name in CALM_MODELS:
            api, body, key = honest(chance, (name,))
            found = await ask(self._server.port, api, body)
            if found.kind != "whole":
                self._wrong(f"{key}: {found.kind} of {name} after the storm: {found.text[:300]}")
        await self._quiet()
        self._calm_pids = self._server.processes()
        self._sample(self._calm_pids)

    async def _one_round(self, seconds: float, *, storm: bool) -> None:
        self._round += 1
        self.report.rounds["storm" if storm else "calm"] += 1
        until = time.monotonic() + seconds
        models = MODELS if storm else CALM_MODELS
        asked: list[Asked] = []
        clients = [self._honest(number, models, until, asked) for number in range(N_HONEST)]
        clients += [self._harmful(number, models, until, storm=storm) for number in range(N_HARMFUL)]
        clients.append(self._storm(until) if storm else self._samples(until))
        await asyncio.gather(*clients)
        await self._quiet()
        self._check_log(asked, storm=storm)
        for one in asked:
            self._judge(one, storm=storm)
        if not storm:
            self._check_processes()

    def _wrong(self, what: str) -> None:
        self.report.wrong.append(f"round {self._round}: {what}")

    async def _storm(self, until: float) -> None:
        chance = random.Random(f"{self._seed} storm {self._round}")
        under_way: set[asyncio.Task[None]] = set()
        while time.monotonic() < until:
            await asyncio.sleep(chance.expovariate(1.0))
            self._server.touch_models()
            if len(under_way) < 4:
                task = asyncio.ensure_future(self._faults.one())
                under_way.add(task)
                task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)

    # Clients

    async def _honest(self, number: int, models: tuple[str, ...], until: float, asked: list[Asked]) -> None:
        chance = random.Random(f"{self._seed} honest {self._round} {number}")
        # Mostly one model at a time: each change makes room for another.
        few = chance.sample(models, 2)
        while time.monotonic() < until:
            api, body, key = honest(chance, (few[0],) * 9 + (few[1],))
            begin = time.monotonic()
            try:
                end = await ask(self._server.port, api, body)
            except TimeoutError:
                end = End("lost")
            except (ValueError, KeyError, TypeError, IndexError) as error:
                end = End("unreadable", f"{type(error).__name__}: {error}")
            except OSError as error:
                end = End("cut", str(error))
            asked.append(Asked(begin, time.monotonic(), key, end))
            await asyncio.sleep(chance.random() * 0.1)

    def _judge(self, one: Asked, *, storm: bool) -> None:
        """Each request has ended with its answer; in a storm, also with an error that a fault explains."""
        kind, text, _ = one.ended
        self.report.ends[kind] += 1
        if kind == "whole":
            known = self._texts.setdefault(one.key, text)
            if text != known:
                self._wrong(f"{one.key}: the answer was {known!r}, and is {text!r}")
            return
        excused = False
        if kind == "cut":
            excused = self._faults.excuse(one.begin, one.end, "front")
        elif kind in ("error", "status 503", "status 529"):
            excused = self._faults.excuse(one.begin, one.end, "front", "worker", "supervisor", "pause", "log")
        if not (storm and excused):
            self._wrong(f"{one.key}: {kind} after {one.end - one.begin:.1f} s: {text[:300]}")

    async def _harmful(self, number: int, models: tuple[str, ...], until: float, *, storm: bool) -> None:
        chance = random.Random(f"{self._seed} harmful {self._round} {number}")
        while time.monotonic() < until:
            harm = chance.choice(HARMS)
            begin = time.monotonic()
            status = await self._harm(harm, chance, models[0] if chance.random() < 0.8 else models[1])
            self.report.harms[f"{harm.__name__.replace('_', ' ')}: {status}"] += 1
            excused = storm and self._faults.excuse(begin, time.monotonic(), "front", "worker", "supervisor", "pause")
            if status == "lost" or (status.startswith("5") and not (excused and status in ("503", "529"))):
                self._wrong(f"a client that {harm.__name__} was answered {status}")
            await asyncio.sleep(chance.random() * 0.2)

    async def _harm(self, harm: Harm, chance: random.Random, model: str) -> str:
        try:
            status = await harm(self._server.port, chance, model)
        except TimeoutError:
            return "lost"
        except Exception as error:
            return "disconnected" if isinstance(error, OSError) or type(error).__name__ == "Cut" else _raise(error)
        return "ended by itself" if status is None else str(status)

    # After a round

    async def _quiet(self) -> None:
        """Wait until nothing is held any more; what still is, is wrong."""
        end = time.monotonic() + QUIET_S
        while busy := await self._busy():
            if time.monotonic() > end or self._server.process.poll() is not None:
                self._wrong(f"still held after {QUIET_S:.0f} s without a request: {busy}")
                return
            await asyncio.sleep(0.1)

    async def _busy(self) -> str:
        """What the server still holds; empty if nothing."""
        try:
            _, health_page = await get(self._server.port, "/health", 2 * SILENT_S)
            _, slots_page = await get(self._server.port, "/slots", 2 * SILENT_S)
            health, slots = json.loads(health_page), json.loads(slots_page)
        except (OSError, TimeoutError, ValueError) as error:
            return f"no answer of /health or /slots: {error!r}"
        except Exception as error:
            return _raise(error) if type(error).__name__ != "Cut" else "a page was cut off"
        models = [one for one in health["models"] if one["state"] not in ("ready", "unloaded", "failed")]
        requests = sum(one["requests"] + one["requests_waiting"] for one in health["models"])
        busy = [slot for slot in slots["slots"] if slot["state"] != "free"]
        ready = sum(one["state"] == "ready" for one in health["models"])
        if len(slots["slots"]) != SLOTS * ready:
            return f"{len(slots['slots'])} slots of {ready} models are told"
        held_now = {"models": models, "requests": requests, "slots": busy, "waiting": slots["waiting"]}
        held_now["pages"] = slots["pages"]["used"]
        return str(held_now) if any(held_now.values()) else ""

    def _check_log(self, asked: Sequence[Asked], *, storm: bool) -> None:
        """Every answered request is in the log once, and no process ended but by a fault of ours."""
        lines = self._server.new_lines()
        for line in lines:
            self._read_line(line, storm=storm)
        for one in asked:
            id = one.ended.id
            if id is None or self._ids[id] == 1:
                self.report.log["requests that are in the log once"] += id is not None
                continue
            n = self._ids[id]
            if storm and self._faults.excuse(one.begin, one.end, "log", "front", "worker", "supervisor"):
                self.report.log[f"requests of a fault that are in the log {n} times"] += 1
            else:
                self._wrong(f"the request {id} ({one.key}, {one.ended.kind}) is in the log {n} times")

    def _read_line(self, line: str, *, storm: bool) -> None:
        if line.startswith("{"):
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                self.report.log["lines cut off by a full disk"] += 1
                if not storm:
                    self._wrong(f"half a line in the log: {line[:200]}")
                return
            self._ids[found["id"]] += 1
            if self._ids[found["id"]] > 1 and not storm:
                self._wrong(f"for the second time in the log: {line[:300]}")
            self.report.log[f"lines: {found['outcome']}"] += 1
            return
        if "Traceback" in line or "our fault" in line:
            self._wrong(f"the log says: {line[:300]}")
        for begins, what in (("ready: ", "models loaded"), ("unloading ", "models unloaded for another")):
            self.report.log[what] += line.startswith(begins)
        if reason := _REASONS.match(line):
            why = reason["died"] or reason["refused"]
            known = next((one for one in _OURS if one in why), None)
            self.report.log[f"processes ended: {known or why}"] += 1
            if known is None or not storm:
                self._wrong(f"a process ended: {line[:300]}")

    async def _samples(self, until: float) -> None:
        """What the processes of the calm hold while they answer."""
        while time.monotonic() < until:
            self._sample(self._calm_pids)
            await asyncio.sleep(SAMPLE_S)

    def _check_processes(self) -> None:
        """In the calm the same processes go on, and what they hold is noted."""
        pids = self._server.processes()
        if pids != self._calm_pids:
            self._wrong(f"the processes were {self._calm_pids}, and are {pids}, without a fault")
        self._sample(pids)

    def _sample(self, pids: Sequence[int]) -> None:
        names = ["supervisor", "front", *(f"worker {number}" for number in range(1, len(pids) - 1))]
        for name, pid in zip(names, pids, strict=False):
            if (sample := held(pid)) is not None:
                self.report.samples.setdefault(name, []).append(sample)


def _raise(error: Exception) -> str:
    raise error


def run(seconds: float, seed: int, folder: Path) -> ServerReport:
    """Chaos for so many seconds; the files of the server are in `folder`."""
    report = ServerReport()
    server = Server(folder)
    try:

        async def main() -> None:
            await server.start()
            await Chaos(server, seed, report).run(seconds, min(60.0, max(5.0, seconds / 10)))

        asyncio.run(main())
    finally:
        ended = server.process.poll()
        code = server.end()
        if ended is not None:
            report.wrong.append(f"the server ended by itself with exit code {ended}")
        elif code != 0:
            report.wrong.append(f"the server ended with exit code {code}")
    report.wrong += [f"left behind: {one}" for one in server.left()]
    for name, samples in report.samples.items():
        report.wrong += [f"{name}: {what}" for what in growth(samples, handles=2, threads=POOLED)]
    return report
