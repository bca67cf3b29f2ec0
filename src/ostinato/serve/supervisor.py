"""The supervisor: it holds the listening socket, starts a worker, and starts the next when one dies.

It imports neither torch nor a web server, so that it starts at once and has little that can fail. A worker that
refuses its settings is not restarted; after several early deaths in a row the supervisor gives up; a worker without
heartbeats hangs, and is killed. SIGTERM and Ctrl-C drain; a second signal stops.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from ostinato.errors import BadInput
from ostinato.options import Talk
from ostinato.processes import python_command
from ostinato.serve.settings import ServeOptions

WORKER: Final = tuple(python_command("-m", "ostinato.serve.worker"))
BACKLOG: Final = 1024
YOUNG_S: Final = 20.0  # a death within this time after the start is an early one
MOST_YOUNG_DEATHS: Final = 5
KILL_S: Final = 10.0  # from the second signal to SIGKILL
START_S: Final = 600.0  # to a worker's first event: Python and torch may load from a slow disk
SILENT_S: Final = 60.0  # without a heartbeat, which a worker sends every second
_LOOK_S: Final = 0.5
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def listen(host: str, port: int) -> socket.socket:
    """The socket that every worker serves."""
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


class Supervisor:
    """Runs one server. `command` starts a worker; one without a heartbeat for `silent_s` counts as hanging."""

    def __init__(
        self, options: ServeOptions, talk: Talk, *, command: Sequence[str] = WORKER, silent_s: float = SILENT_S
    ) -> None:
        self._options, self._talk, self._command, self._silent_s = options, talk, command, silent_s
        self._listening = listen(options.host, options.port)
        self._restarts: Counter[str] = Counter()
        self._n_signals = 0
        self._stopped_at = 0.0
        self._worker: subprocess.Popen[bytes] | None = None
        # The name of the reason and its sentence; None if only the exit code is known.
        self._died_of: tuple[str, str] | None = None
        self._was_ready = self._refused = False

    @property
    def url(self) -> str:
        """The address that it listens on."""
        host, port = self._listening.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> int:
        """Run until the end and return the exit code. Handles the process's signals meanwhile."""
        before = {number: signal.signal(number, self._signalled) for number in _SIGNALS}
        try:
            return self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._end_worker()
            self._listening.close()

    def _run(self) -> int:
        self._talk(f"listening at {self.url}; loading {self._options.model}")
        young_deaths = 0
        while True:
            started = time.monotonic()
            code = self._one_worker()
            if self._n_signals or code == 0:
                return code if code > 0 else 0
            kind, reason = self._died_of or ("crash", _cause_of(code))
            if not self._was_ready and not self._restarts:
                if not self._refused:
                    self._talk(f"error: the worker ended before the model was loaded: {reason}")
                return code if code > 0 else 3
            young_deaths = young_deaths + 1 if time.monotonic() - started < YOUNG_S else 0
            self._restarts[kind] += 1
            if young_deaths >= MOST_YOUNG_DEATHS:
                self._talk(f"error: the worker died {young_deaths} times in a row, last of: {reason}; giving up")
                return 3
            self._talk(f"the worker ended: {reason}; starting another")

    def _one_worker(self) -> int:
        """Start a worker and read its events until it ends; return its exit code."""
        reading, writing = os.pipe()
        fds = (self._listening.fileno(), writing)
        self._died_of, self._was_ready, self._refused = None, False, False
        self._worker = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor, which passes it on
        )
        os.close(writing)
        if self._n_signals:  # the signal came while there was no worker to pass it on to
            self._worker.send_signal(signal.SIGTERM)
        given = {
            "options": self._options.to_json(),
            "restarts": dict(self._restarts),
            "socket": fds[0],
            "events": fds[1],
        }
        with os.fdopen(reading, "rb") as events, suppress(BrokenPipeError):
            assert self._worker.stdin is not None
            self._worker.stdin.write(json.dumps(given).encode() + b"\n")
            self._worker.stdin.flush()
            self._listen_to(events.fileno())
        return self._wait()

    def _listen_to(self, events: int) -> None:
        """Read the worker's events until it closes the pipe, sends no heartbeat, or takes too long to stop."""
        heard = b""
        patience = START_S
        # Counted in polls, not by the clock: a suspended supervisor (Ctrl-Z, a closed lid) does not poll.
        silent_looks = 0
        with selectors.DefaultSelector() as ready:
            ready.register(events, selectors.EVENT_READ)
            while not self._overdue():
                if not ready.select(timeout=_LOOK_S):
                    silent_looks += 1
                    if silent_looks * _LOOK_S >= patience:
                        self._give_up(patience)
                        return
                    continue
                part = os.read(events, 65_536)
                if not part:
                    return
                silent_looks, patience = 0, self._silent_s
                *lines, heard = (heard + part).split(b"\n")
                for line in lines:
                    self._heard(json.loads(line))

    def _give_up(self, silent_s: float) -> None:
        """Kill a worker that hangs. Its clients find their connections closed, without an error event."""
        self._died_of = "hang", f"it said nothing for {silent_s:.0f} s"
        assert self._worker is not None
        self._worker.kill()

    def _heard(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "ready":
                self._was_ready = True
                self._talk(
                    f"ready: {event['model']} at {self.url} ({event.get('mode')} on {event.get('device')}, "
                    f"{event.get('slots')} slots, context {event.get('context')}, after {event['seconds']:.1f} s)"
                )
                for why in event.get("why_not_higher", ()):
                    self._talk(f"not {why}")
            case "fault":
                self._died_of = "fault", event["reason"]
            case "refused":
                self._refused = True
                self._talk(f"error: {event['message']}")
            case "draining":
                n_running = event["running"]
                self._talk(f"draining: {n_running} requests run; once more to stop them" if n_running else "stopping")

    def _overdue(self) -> bool:
        return self._n_signals > 1 and time.monotonic() - self._stopped_at > KILL_S

    def _wait(self) -> int:
        worker = self._worker
        assert worker is not None
        with suppress(subprocess.TimeoutExpired):
            worker.wait(KILL_S)
        self._end_worker()
        return int(worker.returncode)

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if worker.poll() is None:
            worker.kill()
            worker.wait()
        if worker.stdin is not None:
            with suppress(OSError):
                worker.stdin.close()

    def _signalled(self, number: int, frame: object) -> None:
        self._n_signals += 1
        self._stopped_at = time.monotonic()
        if self._worker is not None and self._worker.poll() is None:
            self._worker.send_signal(signal.SIGTERM)


def _cause_of(code: int) -> str:
    if code == -signal.SIGKILL:
        return "signal SIGKILL, which the system sends where memory runs out"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
