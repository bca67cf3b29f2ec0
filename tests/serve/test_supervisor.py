"""The program as it is started: a supervisor, a worker, signals, and what follows a death."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from ostinato.errors import BadInput
from ostinato.serve.settings import ServeOptions
from ostinato.serve.supervisor import Supervisor, listen, private_sockets
from ostinato.serve.worker import drop_waiting
from tests.cli import tiny_model
from tests.serve.program import Program, program
from tests.serve.running import DEADLINE_S

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]
SLOW = ("--context", "4096", "--mode", "eager")  # an answer can be caught on its way
pytestmark = pytest.mark.slow


def test_the_program_says_where_it_is_answers_and_drains_on_a_signal(tiny: Path) -> None:
    with program(str(tiny), "--port", "0", "--alias", "mine", "--slots", "2", *SLOW) as running:
        ready = running.until("ready: mine at http://127.0.0.1:")
        assert "2 slots, context 4096" in ready
        with httpx2.Client(base_url=running.url, timeout=DEADLINE_S) as http:
            body = {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 2000, "model": "mine"}
            with http.stream("POST", CHAT, json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                running.process.send_signal(signal.SIGTERM)
                running.until("draining: 1 requests")
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert running.process.wait(DEADLINE_S) == 0
        log = [json.loads(line) for line in running.lines if line.startswith("{")]
        assert [line["outcome"] for line in log] == ["length"]


def test_a_second_signal_ends_running_requests_and_the_exit_code_says_so(tiny: Path) -> None:
    with program(str(tiny), "--port", "0", *SLOW) as running:
        running.until("ready: ")
        with httpx2.Client(base_url=running.url, timeout=DEADLINE_S) as http:
            body = {"messages": HELLO, "stream": True, "ignore_eos": True}
            with http.stream("POST", CHAT, json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                running.process.send_signal(signal.SIGINT)
                running.until("draining: ")
                running.process.send_signal(signal.SIGINT)
                last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
        assert running.process.wait(DEADLINE_S) == 130
    assert "stopped 1 requests" in running.lines
    logged = [json.loads(line) for line in running.lines if line.startswith("{")]
    assert [(line["model"], line["outcome"]) for line in logged] == [("tiny", "cancelled")]


# A supervisor whose first worker breaks, as the fourth argument says.
FAULTY = (
    "import sys\n"
    "from ostinato.serve.settings import ServeOptions\n"
    "from ostinato.options import LoadOptions\n"
    "from ostinato.serve.supervisor import Supervisor\n"
    "options = ServeOptions(sys.argv[1], load=LoadOptions(context=512, slots=2, mode='eager'), port=0)\n"
    "command = (sys.executable, '-m', 'tests.serve.faulty_worker', *sys.argv[2:4])\n"
    "talk = lambda text: print(text, file=sys.stderr, flush=True)\n"
    "sys.exit(Supervisor(options, talk, command=command, silent_s=float(sys.argv[4])).run())\n"
)


def test_after_an_engines_death_the_next_request_is_answered_by_the_next_worker(tiny: Path, tmp_path: Path) -> None:
    """E-2."""
    with program(str(tiny), str(tmp_path / "died"), "dies", "60", program=("-c", FAULTY)) as running:
        running.until("ready: ")
        with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="tiny", messages=HELLO, stream=True, extra_body={"ignore_eos": True}
            )
            with pytest.raises(openai.APIError, match="broken on purpose"):
                for _ in stream:
                    pass
            running.until("the worker ended: ")
            patient = client.with_options(max_retries=10)
            answer = patient.chat.completions.create(model="tiny", messages=HELLO, max_tokens=30)
            assert answer.choices[0].finish_reason in ("length", "stop")
        health = httpx2.get(running.url + "/health").json()
        assert health["restarts"] == {"fault": 1}
        assert 'worker_restarts_total{model="tiny",reason="fault"} 1.0' in httpx2.get(running.url + "/metrics").text


def test_a_worker_whose_event_loop_hangs_is_replaced_and_its_streams_end(tiny: Path, tmp_path: Path) -> None:
    # Long enough for the import of torch on a busy machine, during which a worker's event loop may not run.
    with program(str(tiny), str(tmp_path / "hung"), "hangs", "20", program=("-c", FAULTY)) as running:
        running.until("ready: ")
        with httpx2.Client(base_url=running.url, timeout=DEADLINE_S) as http:
            body = {"messages": HELLO, "stream": True, "ignore_eos": True}
            with http.stream("POST", CHAT, json=body) as stream:
                last = [line for line in stream.iter_lines() if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_restarting"
            assert running.until("the worker ended: ") == "the worker ended: it said nothing for 20 s; starting another"
            running.until("ready: ", n=2)
            assert http.post(CHAT, json={"messages": HELLO, "max_tokens": 30}).status_code == 200
            assert http.get("/health").json()["restarts"]["hang"] >= 1


# `ostinato serve`; at a line on standard input, the disk under its standard error is full.
FILLED = (
    "import os, sys, threading\n"
    "def fill():\n"
    "    sys.stdin.readline()\n"
    "    os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n"
    "    print('full', flush=True)\n"
    "threading.Thread(target=fill, daemon=True).start()\n"
    "from ostinato.cli import main\n"
    "main(['serve', *sys.argv[1:]])\n"
)
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")


@needs_full
def test_a_full_disk_under_the_log_ends_neither_the_supervisor_nor_its_next_worker(tiny: Path) -> None:
    command = [sys.executable, "-c", FILLED, str(tiny), "--port", "0", "--context", "64"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as running:  # type: ignore[call-overload]  # of the pipes
        try:
            url = next(line for line in running.stderr if line.startswith("listening at ")).split()[2].rstrip(";")
            next(line for line in running.stderr if line.startswith("ready: "))
            print("now", file=running.stdin, flush=True)
            assert running.stdout.readline() == "full\n"
            for pid in children_of(running.pid):
                os.kill(pid, signal.SIGKILL)
            end = time.monotonic() + DEADLINE_S
            while not (health := health_of(url)) or not health["ready"] or not health["restarts"]:
                assert running.poll() is None, "the supervisor ended"
                assert time.monotonic() < end, health
                time.sleep(0.05)
            # The next worker has the full standard error from its start, and answers.
            few = {"messages": HELLO, "max_tokens": 2}
            assert httpx2.post(url + CHAT, json=few, timeout=DEADLINE_S).status_code == 200
            running.terminate()
            assert running.wait(DEADLINE_S) == 0
        finally:
            running.kill()


def health_of(url: str) -> dict[str, Any]:
    """Empty while a connection of the killed worker is being closed."""
    try:
        health: dict[str, Any] = httpx2.get(url + "/health").json()
    except httpx2.TransportError:
        return {}
    return health


@needs_full
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "2</dev/null"])
def test_a_standard_error_that_cannot_be_written_to_is_told_on_standard_output(tiny: Path, redirection: str) -> None:
    command = f'exec "{sys.executable}" -m ostinato serve "{tiny}" --port 0 {redirection}'
    ran = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert ran.returncode == 2
    assert ran.stdout.startswith("error: cannot write to standard error, where the log goes: ")


def test_a_killed_worker_and_a_killed_front_are_replaced(tiny: Path) -> None:
    with program(str(tiny), "--port", "0", "--context", "64") as running:
        running.until("ready: ")
        os.kill(worker_of(running), signal.SIGKILL)
        running.until("ready: ", n=2)
        assert httpx2.get(running.url + "/health").json()["restarts"] == {"crash": 1}
        worker = worker_of(running)
        (front,) = {*children_of(running.process.pid)} - {worker}
        os.kill(front, signal.SIGKILL)
        running.until("the front ended: ")
        # The model stays in memory, and the next front knows it.
        few = {"messages": HELLO, "max_tokens": 2}
        assert httpx2.post(running.url + CHAT, json=few, timeout=DEADLINE_S).status_code == 200
        assert httpx2.get(running.url + "/health", timeout=DEADLINE_S).json()["restarts"] == {"crash": 2}
        assert worker_of(running) == worker


def test_the_streams_of_every_api_end_with_one_error_when_their_worker_is_killed(tiny: Path) -> None:
    same = {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 3000}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: same,
        "/v1/messages": same,
        "/v1/responses": {"input": "hello", "stream": True, "ignore_eos": True, "max_output_tokens": 3000},
        "/api/chat": {"messages": HELLO, "options": {"ignore_eos": True, "num_predict": 3000}},
    }
    with program(str(tiny), "--port", "0", "--slots", "4", *SLOW) as running, ExitStack() as opened:
        running.until("ready: ")
        http = opened.enter_context(httpx2.Client(base_url=running.url, timeout=DEADLINE_S))
        streams = {}
        for path, body in bodies.items():
            streams[path] = opened.enter_context(http.stream("POST", path, json=body)).iter_lines()
            assert any(line for line in streams[path])
        os.kill(worker_of(running), signal.SIGKILL)
        errors = {}
        for path, lines in streams.items():
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("data: ", "{"))]
            errors[path] = events[-1]
            assert sum("error" in event or event.get("type") == "error" for event in events) == 1
    assert "has died" in errors["/api/chat"]["error"]
    assert errors[CHAT]["error"]["code"] == "engine_restarting"
    assert errors["/v1/messages"]["error"]["type"] == "overloaded_error"
    assert errors["/v1/responses"]["type"] == "error"


def test_the_death_of_one_models_worker_is_not_that_of_another(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny, tmp_path / "other.gguf")
    shutil.copy(tiny, tmp_path / "bad.gguf")
    models = (str(tiny), str(tmp_path / "other.gguf"), str(tmp_path / "bad.gguf"))
    with program(*models, "--port", "0", "--alias", "a=tiny", "--alias", "b=other", *SLOW) as running:
        running.until("ready: a at ")
        first = worker_of(running)
        with httpx2.Client(base_url=running.url, timeout=DEADLINE_S) as http:
            few = {"messages": HELLO, "max_tokens": 2}
            assert http.post(CHAT, json={**few, "model": "b"}).json()["model"] == "b"
            assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["a", "b", "bad"]
            (second,) = {*workers_of(running)} - {first}
            body = {"messages": HELLO, "stream": True, "ignore_eos": True}
            with (
                http.stream("POST", CHAT, json={**body, "model": "a", "n": 2}) as of_a,
                http.stream("POST", CHAT, json={**body, "model": "b", "n": 2}) as of_b,
            ):
                lines_of_a, lines_of_b = of_a.iter_lines(), of_b.iter_lines()
                assert next(lines_of_a).startswith("data: ")
                assert next(lines_of_b).startswith("data: ")
                os.kill(second, signal.SIGKILL)
                last = [line for line in lines_of_b if line][-1]
                assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_restarting"
                running.until("the worker of b ended: signal SIGKILL")
                assert http.post(CHAT, json={**few, "model": "b"}).status_code == 200
                assert [line for line in lines_of_a if line][-1] == "data: [DONE]"
            assert first in workers_of(running)
            # A file that is no model any more is told in its own words, and ends nothing.
            (tmp_path / "bad.gguf").write_bytes(b"no model")
            refused = http.post(CHAT, json={**few, "model": "bad"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_failed")
            assert refused.json()["error"]["message"].startswith("bad could not be loaded: bad.gguf: ")
            running.until(f"error: bad: {tmp_path}/bad.gguf: ")
            health = http.get("/health").json()
        assert (health["restarts"], health["ready"]) == ({"crash": 1}, True)
        assert [model["state"] for model in health["models"]] == ["ready", "ready", "failed"]
        running.process.terminate()
        assert running.process.wait(DEADLINE_S) == 0


def test_the_model_that_was_not_used_for_longest_is_unloaded_and_the_log_says_so(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny, tmp_path / "other.gguf")
    arguments = (str(tiny), str(tmp_path / "other.gguf"), "--models-max", "1", "--port", "0", "--context", "64")
    with program(*arguments) as running:
        running.until("ready: tiny at ")
        for model in ("other", "tiny"):
            assert (
                httpx2.post(
                    running.url + CHAT, json={"model": model, "messages": HELLO, "max_tokens": 2}, timeout=DEADLINE_S
                ).json()["model"]
                == model
            )
        running.until("unloading tiny: other is needed, and 1 may be in memory at once (--models-max)")
        running.until("ready: other at ")
        running.until("unloading other: tiny is needed")
        running.until("ready: tiny at ", n=2)
        assert len(workers_of(running)) == 1


def worker_of(running: Program) -> int:
    """The process of the only model."""
    (found,) = workers_of(running)
    return found


def workers_of(running: Program) -> list[int]:
    children = children_of(running.process.pid)
    return [pid for pid in children if b"ostinato.serve.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_processes_whose_supervisor_is_killed_end_by_themselves(tiny: Path) -> None:
    with program(str(tiny), "--port", "0", "--context", "64") as running:
        running.until("ready: ")
        workers = children_of(running.process.pid)
        assert len(workers) == 2
        running.process.kill()
        end = time.monotonic() + DEADLINE_S
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_signal_while_the_model_loads_ends_it_at_once(tiny: Path, tmp_path: Path) -> None:
    slow = (
        "import time\n"
        "from ostinato.engine.choose import Room\n"
        "from ostinato.serve import worker\n"
        "def slow(model, load, talk, admitted, beside_others):\n"
        "    admitted(lambda: Room('cpu', 1, 2, 2))\n"
        "    talk('loading for ever')\n"
        "    time.sleep(600)\n"
        "worker.AdmittedLLM = slow\n"
        "worker.main()\n"
    )
    code = (
        "import sys\n"
        "from ostinato.serve.settings import ServeOptions\n"
        "from ostinato.serve.supervisor import Supervisor\n"
        "talk = lambda text: print(text, file=sys.stderr, flush=True)\n"
        "command = (sys.executable, '-c', sys.argv[2])\n"
        "sys.exit(Supervisor(ServeOptions(sys.argv[1], port=0), talk, command=command).run())\n"
    )
    with program(str(tiny), slow, program=("-c", code)) as running:
        running.until("loading for ever")
        assert httpx2.get(running.url + "/health").json()["status"] == "loading"
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_model_that_cannot_be_had_is_told_once_and_not_tried_again(tmp_path: Path) -> None:
    with program(str(tmp_path / "none.gguf"), "--port", "0") as running:
        assert running.process.wait(DEADLINE_S) == 2
    assert sum("none.gguf" in line and line.startswith("error: ") for line in running.lines) == 1
    assert not any("Traceback" in line or line.startswith("listening") for line in running.lines)


def test_models_that_cannot_be_loaded_are_all_named_before_the_address_is_told(tiny: Path, tmp_path: Path) -> None:
    def change(metadata: dict[str, Any]) -> None:
        metadata["tokenizer.ggml.model"].value = "runes"

    (tmp_path / "bad.gguf").write_bytes(b"no model")
    tiny_model.write(tmp_path / "runes.gguf", change=change)
    with program(*(str(one) for one in (tiny, *sorted(tmp_path.iterdir()))), "--port", "0") as running:
        assert running.process.wait(DEADLINE_S) == 2
    bad, runes = running.lines
    assert bad.startswith(f"error: bad: {tmp_path}/bad.gguf: ")
    assert runes.startswith(f"error: runes: {tmp_path}/runes.gguf: tokenizers of the kind 'runes'")


def test_a_model_that_is_refused_is_refused_before_the_address_is_told(tiny: Path) -> None:
    with program(str(tiny), "--port", "0", "--context", "999999") as running:
        assert running.process.wait(DEADLINE_S) == 2
    assert [line for line in running.lines if "999999" in line] == running.lines[-1:]
    assert not any(line.startswith("listening") for line in running.lines)


def test_an_open_address_without_a_key_and_a_taken_port_are_refused(tiny: Path) -> None:
    with program(str(tiny), "--host", "0.0.0.0") as running:
        assert running.process.wait(DEADLINE_S) == 2
    assert "--no-api-key" in running.lines[-1]
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        with program(str(tiny), "--port", port) as running:
            assert running.process.wait(DEADLINE_S) == 2
    assert port in running.lines[-1]


@pytest.mark.parametrize("host", ["nowhere.invalid", "a" * 100, "203.0.113.7", "fe80::zz"])
def test_an_address_that_is_none_of_ours_is_refused_in_words(host: str) -> None:
    with pytest.raises(BadInput, match="cannot listen at"):
        listen(host, 0)


def test_a_machine_without_ipv6_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", none)
    with pytest.raises(BadInput, match="Address family not supported"):
        listen("::1", 0)


# A front that ends well after so many ends of workers, as its argument says, and tells what it is given then.
FAKE_FRONT = (
    "import json, os, sys\n"
    "given = json.loads(sys.stdin.readline())\n"
    "ended = 0\n"
    "while ended < int(sys.argv[1]):\n"
    "    line = sys.stdin.readline()\n"
    "    if not line:\n"
    "        sys.exit(1)\n"
    "    ended += json.loads(line)['event'] == 'ended'\n"
    "os.write(given['events'], sys.argv[2].encode())\n"
)


def supervised(code: str, *, ends: int = 1, tells: str = "", silent_s: float = 60.0) -> tuple[int, list[str]]:
    """The exit code of a supervisor over workers that do this once they are ready, and what it said. Its front ends
    when it has been told of so many ends of workers."""
    said: list[str] = []
    begin = (
        "import json, os, signal, sys, time\n"
        "given = json.loads(sys.stdin.readline())\n"
        'ready = b\'{"event": "ready", "model": "x", "seconds": 0}\\n\'\n'
    )
    command = (sys.executable, "-c", begin + code)
    front = (sys.executable, "-c", FAKE_FRONT, str(ends), tells)
    words = {"command": command, "front": front}
    return Supervisor(ServeOptions("x", port=0), said.append, silent_s=silent_s, **words).run(), said


class PlayedChild:
    """A process that is only told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.started = time.monotonic()
        self.was_ready = self.refused = self.terminated = False
        self.died_of: tuple[str, str] | None = None

    def tell(self, command: dict[str, Any]) -> None:
        self.told.append(command)

    def terminate(self) -> None:
        self.terminated = True

    def end(self) -> int:
        return -9


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """A supervisor of two models that starts no processes."""
    monkeypatch.setattr(Supervisor, "_start_front", lambda _: PlayedChild())
    monkeypatch.setattr(Supervisor, "_start_worker", lambda *_: PlayedChild())
    made = Supervisor(ServeOptions("a", more_models=("b",), port=0), lambda _: None)
    yield made
    made._listening.close()


def test_a_model_that_is_unloaded_while_the_server_drains_has_not_failed(played: Supervisor) -> None:
    worker = played._workers[0]
    worker.start()
    played._front_said({"event": "unload", "model": 0, "why": None})
    played._n_signals = 1
    played._ended(worker, 0)
    assert (worker.told[-1]["event"], worker.told[-1]["unloaded"], worker.told[-1]["why"]) == ("ended", True, None)


def test_a_new_front_is_told_of_a_model_that_loads_that_it_has_room(played: Supervisor) -> None:
    for worker in played._workers:
        worker.start()
    played._tell_front({"event": "starting", "model": 1})
    for free in (1, 2):
        played._worker_said(played._workers[1], 1, {"event": "needs", "usable_bytes": free})
    assert [(one["event"], one.get("usable_bytes")) for one in played._workers[1].told] == [
        ("starting", None),
        ("needs", 2),
    ]
    played._front_said({"event": "go", "model": 1})
    assert [one["event"] for one in played._workers[1].told] == ["starting", "loads"]


def test_a_signal_between_two_fronts_reaches_the_second(played: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    played._front.start()
    monkeypatch.setattr(played, "_talk", lambda _: played._signalled(signal.SIGTERM, None))
    played._ended(played._front, -9)
    second: Any = played._front.child
    assert second.terminated


def test_a_model_that_died_once_and_is_refused_later_is_not_tried_again(played: Supervisor) -> None:
    worker = played._workers[0]
    worker.start().was_ready = True
    played._ended(worker, -9)
    assert worker.child is not None
    played._worker_said(worker, 0, {"event": "refused", "message": "x.gguf: it is damaged", "told": "it is damaged"})
    played._ended(worker, 2)
    assert worker.child is None
    assert (worker.told[-1]["why"], worker.told[-1]["starting_another"]) == ("it is damaged", False)


def test_the_next_worker_is_not_asked_what_the_last_one_left_unaccepted() -> None:
    with ExitStack() as opened:
        listening = private_sockets(1, opened)["0"]
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(listening.getsockname())
            asking.sendall(b"POST / HTTP/1.1\r\n")
            drop_waiting(listening)
            asking.settimeout(DEADLINE_S)
            with suppress(ConnectionResetError):
                assert asking.recv(1) == b""
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EMFILE])
def test_a_connection_that_cannot_be_accepted_does_not_end_the_next_worker(number: int) -> None:
    class Failing(socket.socket):
        def accept(self) -> Any:
            raise OSError(number, os.strerror(number))

    with Failing(socket.AF_UNIX) as listening:
        drop_waiting(listening)


def test_a_worker_that_keeps_dying_young_is_given_up() -> None:
    exit_code, said = supervised("os.write(given['events'], ready)\nsys.exit(9)\n", ends=9)
    assert exit_code == 3
    assert "giving up" in said[-1]
    assert sum("starting another" in line for line in said) == 4


def test_a_worker_that_says_nothing_more_is_killed_and_counted() -> None:
    exit_code, said = supervised("os.write(given['events'], ready)\ntime.sleep(600)\n", silent_s=1.0)
    assert exit_code == 0, said
    assert "the worker ended: it said nothing for 1 s; starting another" in said


def test_a_worker_that_goes_on_saying_that_it_lives_is_let_live() -> None:
    code = (
        "os.write(given['events'], ready)\n"
        "for _ in range(25):\n"
        "    os.write(given['events'], b'{\"event\": \"alive\"}\\n')\n"
        "    time.sleep(0.2)\n"
        "sys.exit(9)\n"
    )
    exit_code, said = supervised(code, silent_s=3.0)
    assert exit_code == 0, said
    assert said[-1] == "the worker ended: exit code 9; starting another"


@pytest.mark.parametrize(
    ("n_running", "told"), [(0, "stopping"), (2, "draining: 2 requests run; once more to stop them")]
)
def test_a_server_without_requests_only_says_that_it_stops(n_running: int, told: str) -> None:
    event = json.dumps({"event": "draining", "running": n_running}) + "\n"
    _, said = supervised("time.sleep(600)\n", ends=0, tells=event)
    assert said[-1] == told


def test_a_worker_that_is_killed_while_it_loads_is_told_of() -> None:
    exit_code, said = supervised("os.kill(os.getpid(), signal.SIGKILL)\n")
    assert exit_code == 3
    assert said[-1].startswith("error: the worker ended before the model was loaded: signal SIGKILL")
