"""Two replicas on Ray Serve: the single server's own tests, its digests; routing, cancellation, death, draining."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ostinato import Sampling
from ostinato.errors import BadInput
from ostinato.scale.cluster import check_address
from tests.scale.running import DEADLINE_S, Cluster, Replicas, replicas, until
from tests.serve import test_answers, test_refusals
from tests.serve.running import serving

pytest.importorskip("ray", reason="the extra `scale` is not installed: replicas were not tested")
pytestmark = pytest.mark.slow

# The single server's tests of answers and refusals, asked of replicas: those that start no server of their own.
for module in (test_answers, test_refusals):
    for name, test in vars(module).items():
        wants = set(inspect.signature(test).parameters) if name.startswith("test_") else set()
        if wants & {"server", "client"} and "tiny" not in wants:
            globals()[name] = test

LONG: Any = {"prompt": "hello", "max_tokens": 900, "ignore_eos": True, "stream": True, "seed": 1}
SLOW: Any = {"mode": "eager"}  # a step takes long enough that requests meet, wait and can be caught on their way


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Replicas]:
    with replicas(tiny, 2, "--queue", "4", **SLOW) as running:
        yield running


@pytest.fixture(scope="module")
def in_turn(tiny: Path, cluster: Cluster) -> Iterator[Replicas]:
    """On a cluster that was there, and taking turns; up to three of them."""
    words = ("--ray-address", cluster.address, "--routing", "round_robin", "--max-replicas", "3")
    with replicas(tiny, 2, *words, slots=2, environment=cluster.environment, **SLOW) as running:
        yield running


@pytest.fixture
def client(server: Replicas) -> Iterator[openai.OpenAI]:
    with server.openai() as made:
        yield made


def test_digests_are_those_of_the_single_server_on_every_replica(server: Replicas, tiny: Path) -> None:
    bodies = [{"prompt": f"{n} words", "max_tokens": 6, "seed": n, "temperature": 0.9} for n in range(12)]
    with serving(tiny, llm={"context": 1024, "slots": 4, **SLOW}) as single:
        wanted = [single.post("/v1/completions", body).json() for body in bodies]
    for body, one in zip(bodies, wanted, strict=True):
        found = server.post("/v1/completions", body).json()
        assert (found["digest"], found["choices"]) == (one["digest"], one["choices"])
    per_replica = requests_by_replica(server)
    assert len(per_replica) == 2
    refused = server.post("/v1/completions", {"prompt": "x", "temprature": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "temprature"


def test_a_response_is_answered_and_not_kept(server: Replicas) -> None:
    made = server.post("/v1/responses", {"input": "hello", "max_output_tokens": 3}).json()
    assert (made["status"], made["store"]) == ("incomplete", False)
    assert server.get(f"/v1/responses/{made['id']}").status_code == 404
    refused = server.post("/v1/responses", {"input": "hello", "previous_response_id": made["id"]})
    assert refused.status_code == 400
    assert "--keep-responses" in refused.json()["error"]["message"]


def test_no_process_of_rays_imports_from_the_folder_that_it_was_started_in(server: Replicas) -> None:
    assert server.traps.sprung() == []


def requests_by_replica(server: Replicas) -> dict[str, float]:
    """Tokens that each replica made."""
    found = {}
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("ostinato_generated_tokens_total{replica=") and '"ingress"' not in line:
            found[line.split('"')[1]] = float(line.rsplit(" ", 1)[1])
    return found


def cached_tokens(server: Replicas, name: str) -> int:
    """Of several conversations that take turns, of four turns each."""
    cached = 0
    chats: list[Any] = [[{"role": "user", "content": f"{name} number {n}. " * 6}] for n in range(3)]
    for turn in range(4):
        for messages in chats:
            body = {"messages": messages, "max_tokens": 8, "seed": 1, "ignore_eos": True}
            answer = server.post("/v1/chat/completions", body).json()
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            messages += [answer["choices"][0]["message"], {"role": "user", "content": f"and turn {turn}? " * 6}]
    return cached


def test_a_cluster_that_was_there_serves_a_stream_with_the_digest_of_one_engine(in_turn: Replicas) -> None:
    with in_turn.openai() as client:
        parts = list(client.completions.create(model="tiny", prompt="hello", max_tokens=9, seed=5, stream=True))
    wanted = in_turn.llm.generate("hello", Sampling(max_tokens=9, seed=5))
    assert (parts[-1].model_extra or {})["digest"] == wanted.digest
    assert in_turn.traps.sprung() == []


def test_a_second_application_on_a_cluster_does_not_take_the_place_of_the_first(
    in_turn: Replicas, tiny: Path, cluster: Cluster
) -> None:
    command = [sys.executable, "-m", "ostinato", "serve", tiny, "--device", "cpu", "--port", 0]
    command += ["--ray-address", cluster.address]
    refused = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
        env=dict(cluster.environment),
    )
    assert refused.returncode == 2
    assert "has an application 'ostinato' already" in refused.stderr
    assert in_turn.health()["ready"]


def test_a_cluster_that_wants_a_token_says_so(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(BadInput, match="wants its token; set RAY_AUTH_MODE=token"):
        check_address(cluster.address)


def test_conversations_find_their_prefix_more_often_than_in_turn(server: Replicas, in_turn: Replicas) -> None:
    by_prefix, by_turn = cached_tokens(server, "chat"), cached_tokens(in_turn, "chat")
    assert by_prefix > 1.3 * by_turn


def test_replicas_are_added_when_requests_wait(in_turn: Replicas) -> None:
    assert len(in_turn.health()["replicas"]) == 2
    enough = threading.Event()

    def ask(number: int) -> None:
        while not enough.is_set():
            in_turn.post("/v1/completions", {**LONG, "prompt": f"{number}", "stream": False, "max_tokens": 100})

    # So many that the average of half a minute, which Serve looks at, is soon above what two replicas should have.
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(in_turn.health()["replicas"]) == 3)
    finally:
        enough.set()
        for thread in threads:
            thread.join()


def test_a_request_whose_client_disconnects_is_cancelled_on_its_replica(server: Replicas) -> None:
    with server.http() as client, client.stream("POST", "/v1/completions", json=LONG) as reply:
        next(reply.iter_lines())
    until(lambda: server.health()["slots_busy"] == 0)


def test_a_full_line_is_told_with_429_and_the_rest_is_answered(server: Replicas) -> None:
    statuses: list[int] = []

    def ask(number: int) -> None:
        body = {**LONG, "prompt": f"{number}", "stream": False, "max_tokens": 600}
        statuses.append(server.post("/v1/completions", body).status_code)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = Counter(statuses)
    assert set(counted) == {200, 429}
    assert counted[200] >= 16  # eight seats, and eight in line


def test_a_replica_that_dies_ends_its_streams_with_one_error_and_is_replaced(server: Replicas) -> None:
    ended: dict[int, list[str]] = {}
    began = threading.Barrier(5, timeout=DEADLINE_S)

    def read(number: int) -> None:
        body = {**LONG, "prompt": f"{number} " * 40, "temperature": 0.5}
        lines: list[str] = []
        with server.http() as client, client.stream("POST", "/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    lines.append(line.removeprefix("data: "))
                    if len(lines) == 3:
                        began.wait()
        ended[number] = lines

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    began.wait()
    busy = [one for one in server.health()["replicas"] if one["slots_busy"]]
    assert busy
    dead = busy[0]
    os.kill(dead["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join(DEADLINE_S)
    errors = [lines for lines in ended.values() if "error" in json.loads(lines[-1] if lines[-1] != "[DONE]" else "{}")]
    whole = [lines for lines in ended.values() if lines[-1] == "[DONE]"]
    assert len(errors) + len(whole) == 4
    assert 1 <= len(errors) <= dead["slots_busy"]
    for lines in errors:
        assert json.loads(lines[-1])["error"]["code"] == "engine_restarting"
        assert sum('"error"' in line for line in lines) == 1
    assert server.post("/v1/completions", {"prompt": "still there", "max_tokens": 2}).status_code == 200

    def replaced() -> bool:
        pids = [one["pid"] for one in server.health()["replicas"] if one["ready"]]
        return len(pids) == 2 and dead["pid"] not in pids

    until(replaced)


def test_pages_tell_of_all_replicas(server: Replicas) -> None:
    facts = server.health()
    assert facts["ready"]
    assert facts["slots"] == 8
    assert len(facts["replicas"]) == 2
    assert server.get("/ready").json() == {"ready": True}
    slots = server.get("/slots").json()
    assert Counter(slot["replica"] for slot in slots["slots"]) == {one["replica"]: 4 for one in facts["replicas"]}
    assert server.get("/").text == "Ollama is running"
    assert "text/html" in server.get("/", accept="text/html").headers["content-type"]
    assert server.get("/openapi.json").json()["info"]["title"] == "Ostinato"
    assert server.get("/nowhere").status_code == 404


def test_a_signal_lets_running_requests_end_and_then_the_program(server: Replicas) -> None:
    """The last of this module: nothing is there after it."""
    lines: list[str] = []

    def read() -> None:
        with server.http() as client, client.stream("POST", "/v1/completions", json=LONG) as reply:
            lines.extend(line for line in reply.iter_lines() if line)

    reading = threading.Thread(target=read)
    reading.start()
    until(lambda: len(lines) > 2)
    code = server.stop()
    reading.join(DEADLINE_S)
    assert lines[-1] == "data: [DONE]"
    assert code == 0
    (draining,) = (place for place, line in enumerate(server.said) if "draining: 1 requests run" in line)
    assert [line for line in server.said[draining:] if "raylet" in line] == []  # Ray's reports of what we stopped
