"""Many clients at once, and some that behave badly: the others are unaffected, and every slot becomes free again."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.engine.request import Cancelled
from ostinato.engine.token_queue import TokenQueue
from ostinato.serve.settings import ServeLimits
from tests.serve.running import DEADLINE_S, Running, serving

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]
LONG: Any = {"messages": HELLO, "ignore_eos": True}
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
APIS: dict[str, Any] = {
    CHAT: LONG,
    RESPONSES: {"input": "hello", "ignore_eos": True},
    MESSAGES: {**LONG, "max_tokens": 4096},
    OLLAMA: {"messages": HELLO, "options": {"ignore_eos": True}},
}
LIMITED: dict[str, Any] = {
    CHAT: {"max_tokens": 700},
    RESPONSES: {"max_output_tokens": 700},
    MESSAGES: {"max_tokens": 700},
    OLLAMA: {"options": {"ignore_eos": True, "num_predict": 700}},
}
every_api = pytest.mark.parametrize("path", APIS)
SLOW: Any = {"context": 4096, "mode": "eager"}  # a step takes long enough that an answer can be caught on its way


def until(is_true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.002)


def asking(server: Running, path: str, body: dict[str, Any]) -> socket.socket:
    """A client that has asked and reads nothing; it leaves when it is closed."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    client = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    client.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return client


def error_in(line: str) -> dict[str, Any]:
    """The error of a stream's last event; Ollama's has only a message."""
    last = json.loads(line.removeprefix("data: "))
    error = last["error"] if "error" in last else last["response"]["error"]
    return {"message": error, "type": None} if isinstance(error, str) else error


def free_slots(server: Running) -> int:
    return sum(slot.state == "free" for slot in server.llm.slots())


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_four_answers_at_once_share_their_steps(tiny: Path, stream: bool) -> None:
    """E-73: an answer that is sent whole goes through the same slots as a stream, and waits for no other."""
    n_tokens = 300
    body = {**LONG, "stream": stream, "max_tokens": n_tokens}
    with serving(tiny, llm={**SLOW, "slots": 4}) as server, ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda _: server.post(CHAT, body).status_code, range(4)))
        stats = server.llm.stats()
        assert (answers, stats.tokens) == ([200] * 4, 4 * n_tokens)
        assert stats.steps < 2 * n_tokens


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@every_api
def test_a_client_that_leaves_frees_its_slot(tiny: Path, path: str, stream: bool) -> None:
    with serving(tiny, llm={**SLOW, "slots": 2}) as server:
        with asking(server, path, {**APIS[path], "stream": stream}):
            until(lambda: server.llm.stats().tokens > 5, "it is answered")
            assert free_slots(server) == 1
        left = server.llm.stats().steps
        until(lambda: free_slots(server) == 2, "the slot is free")
        assert server.llm.stats().steps - left < 500  # of four thousand that were asked for
        until(lambda: bool(server.log), "it is logged")
        assert server.log[-1]["outcome"] == "cancelled"
        assert server.llm.stats().ended["cancelled"] == 1
        assert server.llm.stats().pages_leased == 0


def test_who_has_read_everything_waits_for_more_and_is_not_told_to_look_again() -> None:
    async def read() -> None:
        box = TokenQueue(8, lambda: None)
        box.put(0, Cancelled())
        assert box.take() == (0, Cancelled())  # found without a look, whose wake event has rung meanwhile
        assert box.take() is None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await box.look()
        box.wake()
        async with asyncio.timeout(DEADLINE_S):
            await box.look()

    asyncio.run(read())


@pytest.mark.slow
def test_more_clients_than_slots_all_get_their_own_answers(server: Running) -> None:
    def asked(number: int) -> dict[str, Any]:
        return {"prompt": f"number {number} of", "max_tokens": 10 + number, "seed": number, "temperature": 1.2}

    alone = [server.post("/v1/completions", asked(number)).json()["choices"] for number in range(16)]
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        answers[number] = server.post("/v1/completions", asked(number)).json()["choices"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [answers[number] for number in range(16)] == alone
    assert free_slots(server) == 4


def test_comments_keep_the_connection_of_a_waiting_request_open(tiny: Path) -> None:
    limits = ServeLimits(keep_alive_s=0.05)
    with serving(tiny, llm={**SLOW, "slots": 1}, limits=limits) as server, server.http() as http:
        with http.stream("POST", CHAT, json={**LONG, "stream": True}) as first:
            parts = first.iter_bytes()
            next(parts)
            with http.stream("POST", CHAT, json={**LONG, "stream": True, "max_tokens": 3}) as second:
                lines = second.iter_lines()
                assert next(lines).startswith("data: ")  # its opening
                assert next(line for line in lines if line) == ": waiting"
                first.close()
                rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"


@pytest.mark.slow
@every_api
def test_a_slow_reader_is_cut_off_and_holds_up_no_other_client(tiny: Path, path: str) -> None:
    limits = ServeLimits(unread_tokens=200, write_s=0.5)
    with serving(tiny, llm={**SLOW, "slots": 2}, limits=limits, send_bytes=4096) as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        body = json.dumps({**APIS[path], "stream": True}).encode()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(address)
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            slow.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: server.llm.stats().tokens > 0, "it is answered")
            quick = server.post(CHAT, {"messages": HELLO, "max_tokens": 5})
            assert quick.status_code == 200
            until(lambda: free_slots(server) == 2, "the slow one is cut off")
            assert server.llm.stats().tokens < 4000
            until(lambda: len(server.log) == 2, "it is logged")


@every_api
def test_a_request_that_takes_too_long_ends_with_an_error_event(tiny: Path, path: str) -> None:
    limits = ServeLimits(request_s=0.2, keep_alive_s=0.05)
    with serving(tiny, llm={**SLOW, "slots": 1}, limits=limits) as server:
        text = server.post(path, {**APIS[path], "stream": True}).text
        error = error_in(text.strip().split("\n")[-1])
        assert error["message"] == "no request may take longer than 0 s"
        kind = error["type"] if path in (MESSAGES, OLLAMA) else error["code"]
        kinds = {CHAT: "timeout", RESPONSES: "server_error", MESSAGES: "timeout_error", OLLAMA: None}
        assert kind == kinds[path]
        assert "[DONE]" not in text


# Stopping


@pytest.mark.slow
@every_api
def test_a_drained_server_ends_what_runs_and_takes_nothing_new(tiny: Path, path: str) -> None:
    with serving(tiny, llm={**SLOW, "slots": 2}) as server, server.http() as http:
        with http.stream("POST", path, json={**APIS[path], "stream": True, **LIMITED[path]}) as running:
            lines = running.iter_lines()
            next(lines)
            server.call(server.worker.signalled)
            until(lambda: server.service.state == "draining", "it drains")
            reply = server.post(path, APIS[path])
            assert "the server is being stopped" in error_in(reply.text)["message"]
            assert reply.status_code == (529 if path == MESSAGES else 503)
            assert server.get("/health").json()["status"] == "draining"
            last = [line for line in lines if line][-1].removeprefix("data: ")
            ends = {CHAT: "[DONE]", RESPONSES: "response.incomplete", MESSAGES: "message_stop", OLLAMA: "length"}
            told = {} if path == CHAT else json.loads(last)
            assert told.get("type", told.get("done_reason", last)) == ends[path]
        until(lambda: bool(server.exit_code), "it ends")
        assert server.exit_code == [0]


def test_a_second_signal_stops_what_runs_with_an_error_event(tiny: Path) -> None:
    with serving(tiny, llm={**SLOW, "slots": 2}) as server, server.http() as http:
        with http.stream("POST", CHAT, json={**LONG, "stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            server.call(server.worker.signalled)
            server.call(server.worker.signalled)
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
        until(lambda: bool(server.exit_code), "it ends")


@every_api
def test_an_engine_that_dies_sends_each_client_one_error_and_ends_its_worker(tiny: Path, path: str) -> None:
    with serving(tiny, llm={**SLOW, "slots": 2}) as server, server.http() as http:
        with (
            http.stream("POST", path, json={**APIS[path], "stream": True}) as one,
            http.stream("POST", path, json={**APIS[path], "stream": True}) as other,
        ):
            readers = [one.iter_lines(), other.iter_lines()]
            for lines in readers:
                next(lines)
            until(lambda: free_slots(server) == 0, "both sit")
            kill(server)
            for lines in readers:
                last = [line for line in lines if line][-1]
                kinds = {CHAT: "service_unavailable_error", MESSAGES: "overloaded_error"}  # the others have no type
                assert error_in(last).get("type") == kinds.get(path)
                assert error_in(last)["message"] == "broken on purpose"
        until(lambda: bool(server.exit_code), "it ends")
        assert server.exit_code == [70]
        assert [event for event in server.told if event["event"] == "fault"]


def kill(server: Running) -> None:
    """Let the engine's own thread find that its loop is dead."""
    scheduler = server.llm._engine._scheduler
    scheduler._ensure_running = lambda: scheduler._die("broken on purpose")  # type: ignore[method-assign]
    server.llm._engine.runner.changed.set()


# Logs and metrics


def test_a_request_has_one_line_in_the_log_with_the_id_of_its_response(server: Running) -> None:
    reply = server.post(CHAT, {"messages": HELLO, "max_tokens": 4})
    until(lambda: any(line["id"] == reply.headers["x-request-id"] for line in server.log), "it is logged")
    lines = [line for line in server.log if line["id"] == reply.headers["x-request-id"]]
    assert len(lines) == 1
    assert reply.json()["id"] == f"chatcmpl-{lines[0]['id']}"
    assert lines[0]["tokens"] == 4
    assert lines[0]["outcome"] in ("length", "stop")
    assert "hello" not in json.dumps(lines)


def test_prompts_are_logged_only_where_the_operator_asks(tiny: Path) -> None:
    with serving(tiny, llm={"context": 64, "slots": 1}, log_prompts=True) as server:
        server.post(CHAT, {"messages": HELLO, "max_tokens": 4})
        until(lambda: bool(server.log), "it is logged")
    assert "hello" in server.log[0]["prompt"][0]
    assert len(server.log[0]["answer"]) == 1


def test_metrics_count_what_happened_and_tell_no_prompt(tiny: Path) -> None:
    with serving(tiny, llm={"context": 128, "slots": 2}) as server:
        server.post(
            CHAT, {"messages": [{"role": "user", "content": "secretword"}], "max_tokens": 5, "ignore_eos": True}
        )
        server.post(CHAT, {"messages": []})
        page = server.get("/metrics").text
    figures = figures_of(page)
    assert figures['ostinato_requests_total{outcome="length",path="/v1/chat/completions"}'] == 1
    assert figures['ostinato_requests_total{outcome="refused",path="/v1/chat/completions"}'] == 1
    assert figures["ostinato_generated_tokens_total"] == 5
    assert figures["ostinato_token_gap_seconds_count"] == 4
    assert figures["ostinato_time_to_first_token_seconds_count"] == 1
    assert figures["ostinato_slots_free"] == figures["ostinato_slots"] == 2
    assert figures["ostinato_kv_pages_used"] == 0
    assert figures["ostinato_resident_bytes"] > 1 << 20
    assert figures["ostinato_loop_triggers_total"] >= 1
    assert "secretword" not in page


def figures_of(page: str) -> dict[str, float]:
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    }


# Other endpoints


def test_embeddings_come_as_numbers_and_as_base64(server: Running) -> None:
    with server.openai() as client:
        as_numbers = client.embeddings.create(model="tiny", input=["one", "two"], encoding_format="float")
        packed = client.embeddings.create(model="tiny", input=["one", "two"])  # the client asks for base64
        short = client.embeddings.create(model="tiny", input="one", dimensions=8, encoding_format="float")
        ids = client.embeddings.create(model="tiny", input=server.llm.tokenize("one"), encoding_format="float")
    vectors = server.llm.embed(["one", "two"]).tolist()
    for mine, theirs, unpacked in zip(vectors, as_numbers.data, packed.data, strict=True):
        assert theirs.embedding == pytest.approx(mine, abs=1e-6)
        assert unpacked.embedding == pytest.approx(mine, abs=1e-6)
    assert len(short.data[0].embedding) == 8
    assert sum(value * value for value in short.data[0].embedding) == pytest.approx(1)
    assert ids.data[0].embedding == pytest.approx(vectors[0], abs=1e-6)
    assert as_numbers.usage.prompt_tokens == sum(len(server.llm.tokenize(text)) for text in ("one", "two"))


def test_a_prompt_that_the_model_does_not_have_is_refused_by_name(server: Running) -> None:
    answer = server.post("/v1/embeddings", {"input": "one", "prompt_name": "query"})
    assert answer.status_code == 400
    assert "unknown prompt 'query'" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "prompt_name"


def test_embeddings_wait_in_a_bounded_queue_and_a_client_that_disconnects_leaves_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computing, go_on = threading.Semaphore(0), threading.Event()

    def slow(*_: Any, **__: Any) -> Iterator[Any]:
        computing.release()
        assert go_on.wait(DEADLINE_S)
        yield np.ones(4, np.float32)

    body = {"input": "x"}
    with serving(tiny, llm={"context": 64, "slots": 1}, limits=ServeLimits(work_queue=1)) as server:
        monkeypatch.setattr(server.llm, "each_embedding", slow)
        with ThreadPoolExecutor(2) as clients:
            first = clients.submit(server.post, "/v1/embeddings", body)
            assert computing.acquire(timeout=DEADLINE_S)
            with asking(server, "/v1/embeddings", body):
                until(lambda: server.service._n_beside == 2, "the second waits")
                assert server.post("/v1/embeddings", body).status_code == 429
            until(lambda: server.service._n_beside == 1, "the second has left")
            third = clients.submit(server.post, "/v1/embeddings", body)
            until(lambda: server.service._n_beside == 2, "the third waits")
            go_on.set()
            assert [each.result(DEADLINE_S).status_code for each in (first, third)] == [200, 200]
        until(lambda: len(server.log) == 4, "all are logged")
        assert [line["outcome"] for line in server.log] == ["refused", "cancelled", "ok", "ok"]


def test_texts_become_tokens_and_back_and_conversations_prompts(server: Running) -> None:
    told = server.post("/tokenize", {"content": "the rain", "with_pieces": True}).json()
    assert "".join(told["pieces"]) == "the rain"
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"content": "the rain"}
    prompt = server.post("/apply-template", {"messages": HELLO}).json()["prompt"]
    assert prompt == server.llm.chat_text(HELLO)
    refused = server.post("/detokenize", {"tokens": [99_999]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


def test_a_template_is_told_where_its_prompt_ends_in_either_way(server: Running) -> None:
    asked = {"messages": [{"role": "user", "content": "hello"}]}
    open_ended = server.post("/apply-template", asked).json()["prompt"]
    closed = server.post("/apply-template", {**asked, "add_generation_prompt": False}).json()["prompt"]
    assert open_ended.startswith(closed)
    assert open_ended != closed
    by_word = {**asked, "chat_template_kwargs": {"add_generation_prompt": False}}
    assert server.post("/apply-template", by_word).json()["prompt"] == closed


def test_slots_show_who_sits_there(tiny: Path) -> None:
    with serving(tiny, llm={**SLOW, "slots": 2}) as server, server.http() as http:
        with http.stream("POST", CHAT, json={**LONG, "stream": True}) as running:
            parts = running.iter_bytes()
            next(parts)
            until(lambda: server.llm.stats().live == 1, "it sits")
            told = server.get("/slots").json()
        states = [slot["state"] for slot in told["slots"]]
        assert sorted(states) == ["free", "live"]
        assert told["pages"]["used"] > 0


@pytest.mark.slow
def test_an_encoder_embeds_and_says_that_it_cannot_chat(tiny_files: Path) -> None:
    from tests.models import tiny_encoders

    with serving(tiny_encoders.gguf("bert", tiny_files)) as server:
        assert server.post("/v1/embeddings", {"input": "hello"}).status_code == 200
        reply = server.post("/v1/completions", {"prompt": "hello"})
        assert reply.status_code == 400
        assert "encoder" in reply.json()["error"]["message"]
        assert server.get("/health").json()["slots"] == 0
        assert server.get("/slots").json()["slots"] == []
        assert "ostinato_requests_total" in server.get("/metrics").text
