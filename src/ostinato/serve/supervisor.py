"""The supervisor: it holds the sockets, starts the front and a worker for each model, and the next when one dies.

It imports neither torch nor a web server, so that it starts at once and has little that can fail. It loads the first
model at once, the others when the front says so. A worker that refuses its model is not restarted; after several early
deaths in a row the supervisor gives up; a process without heartbeats hangs, and is killed. SIGTERM and Ctrl-C drain; a
second signal stops.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from ostinato.errors import BadInput, OstinatoError
from ostinato.options import Talk
from ostinato.processes import python_command
from ostinato.serve.settings import ServeOptions

WORKER: Final = tuple(python_command("-m", "ostinato.serve.worker"))
FRONT: Final = tuple(python_command("-m", "ostinato.serve.front"))
CHECK: Final = tuple(python_command("-m", "ostinato.serve.loadable"))
BACKLOG: Final = 1024
YOUNG_S: Final = 20.0  # a death within this time after the start is an early one
MOST_YOUNG_DEATHS: Final = 5
KILL_S: Final = 10.0  # from the second signal to SIGKILL
START_S: Final = 600.0  # to a worker's first event: Python and torch may load from a slow disk
SILENT_S: Final = 60.0  # without a heartbeat, which a worker sends every second
INTERRUPTED: Final = 130  # the exit code where a second signal ended running requests
_LOOK_S: Final = 0.5
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_LONGEST_PATH: Final = 100  # of a socket, which is shorter than that of a file; on some systems 103 bytes


def listen(host: str, port: int) -> socket.socket:
    """The socket that clients connect to; the front serves it."""
    try:
        return _listening(host, port)
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"cannot listen at {host} port {port}: {why}; give another --host or --port") from error


def _listening(host: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


class CannotLoad(NamedTuple):
    """Which model cannot be loaded, why, and the exit code of that error."""

    number: int
    why: str
    exit_code: int


def models_that_cannot_load(options: ServeOptions) -> list[CannotLoad]:
    """Ask, in a process that ends then, which of the models cannot be loaded here."""
    # In a session of its own: Ctrl-C in the terminal reaches this process, which ends that one.
    ran = subprocess.run(CHECK, input=options.to_json().encode(), stdout=subprocess.PIPE, start_new_session=True)
    if ran.returncode:
        raise OstinatoError(f"the process that checks the models ended by {_cause_of(ran.returncode)}")
    return [CannotLoad(*found) for found in json.loads(ran.stdout)]


class Child:
    """A process that the supervisor has started: its pipe of events, and what it has told."""

    def __init__(self, command: Sequence[str], given: Mapping[str, Any], sockets: Mapping[str, socket.socket]) -> None:
        """`given`: its settings. `sockets`: those that it serves, by the names that they have in its settings."""
        self.events, writing = os.pipe()
        fds = {name: one.fileno() for name, one in sockets.items()} | {"events": writing}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=tuple(fds.values()),
            start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor, which passes it on
        )
        os.close(writing)
        self.started = time.monotonic()
        self.was_ready = self.refused = False
        # The name of the reason and its sentence; None if only the exit code is known.
        self.died_of: tuple[str, str] | None = None
        self._heard = b""
        self._patience_s = START_S
        self._silent_s = 0.0
        self._give({**given, **fds})

    def _give(self, settings: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # its end is noticed by its pipe of events
            self.process.stdin.write(json.dumps(settings).encode() + b"\n")
            self.process.stdin.flush()
        os.set_blocking(self.process.stdin.fileno(), False)

    def tell(self, command: Mapping[str, Any]) -> None:
        """Write a line to its standard input. A process that does not read hangs, and is killed."""
        assert self.process.stdin is not None
        line = json.dumps(command).encode() + b"\n"
        with suppress(BrokenPipeError):
            try:
                if os.write(self.process.stdin.fileno(), line) < len(line):
                    self.kill("it read no commands")
            except BlockingIOError:
                self.kill("it read no commands")

    def read(self, silent_s: float) -> list[dict[str, Any]] | None:
        """The events that have arrived; None at the end of the pipe. From now on it may be silent for `silent_s`."""
        part = os.read(self.events, 65_536)
        if not part:
            return None
        self._silent_s, self._patience_s = 0.0, silent_s
        *lines, self._heard = (self._heard + part).split(b"\n")
        return [json.loads(line) for line in lines]

    def was_silent(self, seconds: float) -> None:
        """Count time without an event. Kill a process that hangs."""
        self._silent_s += seconds
        if self._silent_s >= self._patience_s:
            self._silent_s = 0.0
            self.kill(f"it said nothing for {self._patience_s:.0f} s")

    def kill(self, why: str) -> None:
        self.died_of = "hang", why
        self.process.kill()

    def terminate(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()

    def end(self) -> int:
        """Wait for its end, or bring it about; return the exit code."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_S)
        self.close()
        return int(self.process.returncode)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.events)
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()


class Kept:
    """A process that is kept running, or started on demand: the present one, and how those before it ended."""

    def __init__(self, name: str, start: Callable[[], Child]) -> None:
        self.name, self._start = name, start
        self.child: Child | None = None
        self.restarts: Counter[str] = Counter()
        self.young_deaths = 0
        self.ends = False  # it has been told to end
        self.told: list[dict[str, Any]] = []  # of a worker: what a new front must know

    def start(self) -> Child:
        self.ends = False
        self.child = self._start()
        return self.child

    def has_room(self) -> None:
        """A new front need not make room for it."""
        self.told = [{**one, "event": "loads"} if one["event"] == "needs" else one for one in self.told]

    def count_death(self, child: Child, kind: str) -> bool:
        """Count an unexpected end; False after too many early ones in a row."""
        self.restarts[kind] += 1
        self.young_deaths = self.young_deaths + 1 if time.monotonic() - child.started < YOUNG_S else 0
        if self.young_deaths < MOST_YOUNG_DEATHS:
            return True
        self.young_deaths = 0
        return False


class Supervisor:
    """Runs one server. `command` starts a worker; a process without a heartbeat for `silent_s` counts as hanging."""

    def __init__(
        self,
        options: ServeOptions,
        talk: Talk,
        *,
        command: Sequence[str] = WORKER,
        front: Sequence[str] = FRONT,
        silent_s: float = SILENT_S,
    ) -> None:
        self._options, self._talk, self._silent_s = options, talk, silent_s
        self._command, self._front_command = command, front
        self._listening = listen(options.host, options.port)
        self._front = Kept("the front", self._start_front)
        self._workers = [
            Kept(names[0], lambda index=index: self._start_worker(index))  # type: ignore[misc]  # bound at once
            for index, names in enumerate(options.names)
        ]
        self._sockets: dict[str, socket.socket] = {}
        self._n_signals = 0
        self._stopped_at = 0.0
        self._told_address = False
        self._interrupted = False  # a second signal has ended running requests
        self._code: int | None = None

    @property
    def url(self) -> str:
        """The address that it listens on."""
        host, port = self._listening.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> int:
        """Run until the end and return the exit code. Handles the process's signals meanwhile."""
        before = {number: signal.signal(number, self._signalled) for number in _SIGNALS}
        with ExitStack() as open_here:
            open_here.callback(self._listening.close)
            self._sockets = private_sockets(len(self._workers), open_here)
            try:
                return self._run()
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
                for kept in self._all():
                    if kept.child is not None:
                        kept.child.close()

    def _all(self) -> list[Kept]:
        return [self._front, *self._workers]

    def _run(self) -> int:
        self._begin_front()
        self._workers[0].start()
        self._tell_front({"event": "starting", "model": 0})
        while self._code is None:
            self._poll()
        self._end_workers()
        return self._code

    def _poll(self) -> None:
        """Wait for events, and act on them."""
        running = {kept.child.events: kept for kept in self._all() if kept.child is not None}
        began = time.monotonic()
        with selectors.DefaultSelector() as ready:
            for events in running:
                ready.register(events, selectors.EVENT_READ)
            found = {key.fd for key, _ in ready.select(timeout=_LOOK_S)}
        # At most a poll's own time: a suspended supervisor (Ctrl-Z, a closed lid) does not poll.
        waited_s = min(_LOOK_S, time.monotonic() - began)
        for events, kept in running.items():
            child = kept.child
            if child is None or child.events != events:
                continue
            if events not in found:
                child.was_silent(waited_s)
                continue
            told = child.read(self._silent_s)
            for event in told or ():
                self._heard(kept, event)
            if told is None:
                self._ended(kept, child.end())
        if self._n_signals > 1 and time.monotonic() - self._stopped_at > KILL_S:
            self._code = INTERRUPTED

    # Starting

    def _begin_front(self) -> None:
        front = self._front.start()
        if self._n_signals:
            front.terminate()  # the signal came while there was no process to pass it on to

    def _start_front(self) -> Child:
        given = {
            "options": self._options.to_json(),
            "workers": [self._sockets[str(index)].getsockname() for index in range(len(self._workers))],
            "restarts": dict(self._front.restarts),
            "told": {index: worker.told for index, worker in enumerate(self._workers)},
        }
        return Child(self._front_command, given, {"socket": self._listening, "private": self._sockets["front"]})

    def _start_worker(self, index: int) -> Child:
        given = {
            "options": self._options.of_engine(index).to_json(),
            "front": self._sockets["front"].getsockname(),
            "beside_others": len(self._workers) > 1,
            "restarts": dict(self._workers[index].restarts),
        }
        return Child(self._command, given, {"socket": self._sockets[str(index)]})

    def _tell_front(self, event: dict[str, Any]) -> None:
        """Tell the front of a worker, and remember what a new front must be told."""
        worker = self._workers[event["model"]]
        if event["event"] in ("starting", "ended"):
            worker.told.clear()
        if event["event"] == "ready":
            worker.has_room()
        if event["event"] == "needs":  # it may have looked again
            worker.told = [one for one in worker.told if one["event"] != "needs"]
        worker.told.append(event)
        if self._front.child is not None:
            self._front.child.tell(event)

    # Events

    def _heard(self, kept: Kept, event: dict[str, Any]) -> None:
        if kept is self._front:
            self._front_said(event)
        else:
            self._worker_said(kept, self._workers.index(kept), event)

    def _front_said(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "stopped":
                self._talk(f"stopped {event['running']} requests")
                self._interrupted = True
            case "draining":
                n_running = event["running"]
                self._talk(f"draining: {n_running} requests run; once more to stop them" if n_running else "stopping")
            case "load":
                worker = self._workers[event["model"]]
                if worker.child is None:
                    self._talk(f"loading {worker.name}")
                    worker.start()
                    self._tell_front({"event": "starting", "model": event["model"]})
            case "unload":
                worker = self._workers[event["model"]]
                if event["why"] is not None:
                    self._talk(f"unloading {worker.name}: {event['why']}")
                worker.ends = True
                if worker.child is not None:
                    worker.child.terminate()
            case "go" | "look" as command:
                worker = self._workers[event["model"]]
                if command == "go":
                    worker.has_room()
                if worker.child is not None:
                    worker.child.tell({"command": command})

    def _worker_said(self, worker: Kept, index: int, event: dict[str, Any]) -> None:
        child = worker.child
        assert child is not None
        match event["event"]:
            case "needs":
                self._tell_address()
                if any(other.child is not None for other in self._workers if other is not worker):
                    self._tell_front({**event, "model": index})
                else:
                    child.tell({"command": "go"})
                    self._tell_front({**event, "event": "loads", "model": index})
            case "ready":
                self._tell_address()
                child.was_ready = True
                self._tell_front({**event, "model": index})
                self._talk(
                    f"ready: {worker.name} at {self.url} ({event.get('mode')} on {event.get('device')}, "
                    f"{event.get('slots')} slots, context {event.get('context')}, after {event['seconds']:.1f} s)"
                )
                for why in event.get("why_not_higher", ()):
                    self._talk(f"not {why}")
            case "fault":
                child.died_of = "fault", event["reason"]
                self._tell_front({**event, "model": index})
            case "refused":
                child.refused, child.died_of = True, ("refused", event["told"])
                named = f"{worker.name}: " if len(self._workers) > 1 else ""
                self._talk(f"error: {named}{event['message']}")

    def _tell_address(self) -> None:
        """Once the first model is known to be one that can be loaded."""
        if self._told_address:
            return
        self._told_address = True
        first, *others = (worker.name for worker in self._workers)
        later = f"; {', '.join(others)} when first asked for" if others else ""
        self._talk(f"listening at {self.url}; loading {first}{later}")

    # Ends

    def _ended(self, kept: Kept, code: int) -> None:
        child, kept.child = kept.child, None
        assert child is not None
        if kept is self._front:
            self._front_ended(child, code)
        else:
            self._worker_ended(kept, child, code)

    def _front_ended(self, child: Child, code: int) -> None:
        if self._n_signals or code == 0:
            self._code = INTERRUPTED if self._interrupted else max(0, code)
            return
        kind, reason = child.died_of or ("crash", _cause_of(code))
        if not self._front.count_death(child, kind):
            self._talk(f"error: the front died {MOST_YOUNG_DEATHS} times in a row, last of: {reason}; giving up")
            self._code = 3
            return
        self._talk(f"the front ended: {reason}; starting another")
        self._begin_front()

    def _worker_ended(self, worker: Kept, child: Child, code: int) -> None:
        kind, reason = child.died_of or ("crash", _cause_of(code))
        if worker.ends:
            self._tell_end(worker, None, unloaded=True)
            return
        if self._n_signals:
            self._tell_end(worker, reason)  # those who wait for it are told, and no other is started
            return
        if child.refused or (not child.was_ready and not worker.restarts):
            if not child.refused:
                reason = f"the worker ended before the model was loaded: {reason}"
                self._talk(f"error: {reason}" if len(self._workers) == 1 else f"error: {worker.name}: {reason}")
            self._give_up(worker, reason, code if code > 0 else 3)
            return
        if not worker.count_death(child, kind):
            times = f"the worker died {MOST_YOUNG_DEATHS} times in a row, last of: {reason}"
            self._talk(f"error: {times}; giving up" if len(self._workers) == 1 else f"error: {worker.name}: {times}")
            self._give_up(worker, times, 3)
            return
        named = "the worker" if len(self._workers) == 1 else f"the worker of {worker.name}"
        self._talk(f"{named} ended: {reason}; starting another")
        worker.start()
        self._tell_end(worker, reason, starting_another=True)

    def _give_up(self, worker: Kept, why: str, code: int) -> None:
        """A model cannot be served: with no other, the server ends; else the next request for it tries again."""
        if len(self._workers) == 1:
            self._code = code
        else:
            self._tell_address()
            self._tell_end(worker, why)

    def _tell_end(
        self, worker: Kept, why: str | None, *, unloaded: bool = False, starting_another: bool = False
    ) -> None:
        how = {"unloaded": unloaded, "starting_another": starting_another, "restarts": dict(worker.restarts)}
        self._tell_front({"event": "ended", "model": self._workers.index(worker), "why": why, **how})

    def _end_workers(self) -> None:
        """The front has ended: no request is left."""
        for worker in self._workers:
            if worker.child is not None:
                worker.child.terminate()
        end = time.monotonic() + (KILL_S if self._code in (0, INTERRUPTED) else 0.0)
        for worker in self._workers:
            if worker.child is not None:
                with suppress(subprocess.TimeoutExpired):
                    worker.child.process.wait(max(0.0, end - time.monotonic()))

    def _signalled(self, number: int, frame: object) -> None:
        self._n_signals += 1
        self._stopped_at = time.monotonic()
        if self._front.child is not None:
            self._front.child.terminate()


def private_sockets(n_workers: int, open_here: ExitStack) -> dict[str, socket.socket]:
    """The sockets by which the server's own processes speak, in a folder that only this user can open: one of each
    worker, by its number, and that of the front."""
    folder = Path(open_here.enter_context(tempfile.TemporaryDirectory(prefix="ostinato-", dir=_short_folder())))
    sockets: dict[str, socket.socket] = {}
    for name in ("front", *map(str, range(n_workers))):
        sockets[name] = open_here.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sockets[name].bind(str(folder / name))
        sockets[name].listen(BACKLOG)
    return sockets


def _short_folder() -> str | None:
    """The folder for temporary files; another if the path of a socket in it would be too long."""
    return None if len(tempfile.gettempdir()) < _LONGEST_PATH - 30 else "/tmp"


def _cause_of(code: int) -> str:
    if code == -signal.SIGKILL:
        return "signal SIGKILL, which the system sends where memory runs out"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
