"""One address for several models: who answers, who waits while a model loads, and what is told of each."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import jinja2
import ollama
import pytest

from ostinato import LLM
from ostinato.errors import BadFile, Unsupported
from ostinato.options import LoadOptions
from ostinato.serve import forward, upstream
from ostinato.serve.settings import ServeLimits
from ostinato.serve.upstream import UpstreamGone
from ostinato.serve.worker import AdmittedLLM
from tests.cli import tiny_model
from tests.models import tiny_encoders
from tests.models.tiny_text import CONTROL_TOKENS
from tests.serve.fronting import Fronted, fronting
from tests.serve.running import serving

CHAT = "/v1/chat/completions"
_, BOS, EOS = CONTROL_TOKENS
HELLO: Any = [{"role": "user", "content": "hello"}]
FEW: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "seed": 1}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("two")
    return tiny_model.write(folder / "one.gguf", context=4096), tiny_model.write_folder(folder / "two")


@pytest.fixture(scope="module")
def fronted(two: tuple[Path, Path], tiny_files: Path) -> Iterator[Fronted]:
    """Two models that chat, one that embeds and one that ranks."""
    more = (tiny_encoders.gguf("bert", tiny_files), tiny_encoders.gguf("bert-rank", tiny_files))
    with fronting(*two, *more, alias=("first=one", "1=one")) as running:
        yield running


def chatted(server: Fronted, model: str | None, **more: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    reply = server.post(CHAT, {**named, "messages": HELLO, **FEW, **more})
    assert reply.status_code == 200, reply.text
    made: dict[str, Any] = reply.json()
    return made


def test_each_model_answers_to_its_names_and_the_first_to_none(fronted: Fronted, two: tuple[Path, Path]) -> None:
    asked = (None, "first", "1", "1:latest", "one", "two", str(two[1]))
    answered = [chatted(fronted, name) for name in asked]
    assert [reply["model"] for reply in answered] == ["first", *asked[1:]]
    alike = {reply["choices"][0]["message"]["content"] for reply in answered[:5]}
    assert len(alike) == 1
    for name in ("three", "two:7b"):
        reply = fronted.post(CHAT, {"model": name, "messages": HELLO})
        assert reply.status_code == 404
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "'first', 'two', " in error["message"]


def test_all_models_are_listed_in_every_api_whether_they_are_loaded_or_not(fronted: Fronted) -> None:
    chatted(fronted, "first")
    with fronted.openai() as client:
        assert [model.id for model in client.models.list()][:2] == ["first", "two"]
        assert client.models.retrieve("1").id == "1"
        (first, *_) = fronted.get("/v1/models").json()["data"]
        assert first["aliases"] == ["1", "one"]  # without the path of its file
    with anthropic.Anthropic(base_url=fronted.url, api_key="none") as other:
        assert [model.id for model in other.models.list()][:2] == ["first", "two"]
    with ollama_client(fronted) as local:
        tags = local.list().models
        assert [tag.model for tag in tags][:2] == ["first:latest", "two:latest"]
        assert all(tag.size and tag.details for tag in tags)
        assert "first:latest" in [model.model for model in local.ps().models]


@contextmanager
def ollama_client(server: Fronted) -> Iterator[ollama.Client]:
    client = ollama.Client(server.url, verify=False)
    try:
        yield client
    finally:
        client._client.close()


def test_embeddings_and_ranking_beside_chats(fronted: Fronted) -> None:
    vectors = fronted.post("/v1/embeddings", {"model": "bert", "input": ["a", "b"]}).json()
    assert "data" in vectors, vectors
    assert (vectors["model"], len(vectors["data"])) == ("bert", 2)
    ranked = fronted.post("/v1/rerank", {"model": "bert-rank", "query": "a", "documents": ["b", "c"]}).json()
    assert (ranked["model"], len(ranked["results"])) == ("bert-rank", 2)
    assert fronted.post(CHAT, {"model": "bert", "messages": HELLO}).status_code == 400


def test_the_digest_is_the_same_alone_and_beside(fronted: Fronted, two: tuple[Path, Path]) -> None:
    with ThreadPoolExecutor(4) as threads:
        beside = list(threads.map(lambda name: chatted(fronted, name, max_tokens=20)["digest"], ["first", "two"] * 4))
    for index, path in enumerate(two):
        with serving(path, llm={"context": 512, "slots": 2}) as alone:
            reply = alone.post(CHAT, {"messages": HELLO, **FEW, "max_tokens": 20})
        assert set(beside[index::2]) == {reply.json()["digest"]}


def test_responses_are_kept_in_the_front_and_continued_by_any_model(fronted: Fronted) -> None:
    with fronted.openai() as client:
        one = client.responses.create(model="first", input="hello", max_output_tokens=4)
        other = client.responses.create(
            model="two", input="again", previous_response_id=one.id, max_output_tokens=4, stream=True
        )
        last = list(other)[-1]
        assert last.type in ("response.completed", "response.incomplete")
        made = last.response
        assert client.responses.retrieve(made.id).previous_response_id == one.id
        (listed,) = client.responses.input_items.list(made.id).data
        # The input has an id now, and so has the output.
        references: Any = [{"type": "item_reference", "id": id} for id in (listed.id, made.output[0].id)]
        body = {"model": "first", "input": [*references, {"role": "user", "content": "x"}]}
        counted = fronted.post("/v1/responses/input_tokens", body)
        assert counted.status_code == 200, counted.text
        client.responses.delete(one.id)
        with pytest.raises(Exception, match="there is no response"):
            client.responses.retrieve(one.id)
        again = client.responses.create(model="first", input="x", previous_response_id=made.id, max_output_tokens=2)
        assert again.usage is not None
        assert again.usage.input_tokens > counted.json()["input_tokens"]
    gone = fronted.post("/v1/responses", {"input": "x", "previous_response_id": "resp_none"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (400, "previous_response_not_found")


def test_one_line_of_the_log_for_each_request_with_the_id_and_the_client(fronted: Fronted) -> None:
    reply = fronted.post(CHAT, {"messages": HELLO, **FEW})
    id = reply.headers["x-request-id"]
    assert reply.json()["id"] == f"chatcmpl-{id}"
    fronted.until(lambda: any(line["id"] == id for line in fronted.log))  # it is written after the last byte
    (line,) = [line for line in (*fronted.log, *fronted.front_log) if line["id"] == id]
    assert (line["client"], line["model"], line["outcome"], line["tokens"]) == ("127.0.0.1", "first", "length", 4)
    refused = fronted.post(CHAT, {"model": "none", "messages": HELLO}).headers["x-request-id"]
    fronted.until(lambda: any(line["id"] == refused for line in fronted.front_log))
    assert [line["status"] for line in (*fronted.log, *fronted.front_log) if line["id"] == refused] == [404]


def test_a_page_has_every_model_and_metrics_have_its_label(fronted: Fronted) -> None:
    chatted(fronted, "first")
    chatted(fronted, "two")
    health = fronted.get("/health").json()
    assert (health["ready"], health["model"]) == (True, "first")
    assert [model["id"] for model in health["models"]][:2] == ["first", "two"]
    slots = fronted.get("/slots").json()
    assert {slot["model"] for slot in slots["slots"]} >= {"first", "two"}
    assert [(model["id"], model["state"]) for model in slots["models"]][:2] == [("first", "ready"), ("two", "ready")]
    page = fronted.get("/metrics").text
    for line in ('model_loaded{model="two"} 1.0', 'slots{model="two"} 2.0', 'model_loads_total{model="first"} 1.0'):
        assert f"ostinato_{line}" in page
    assert re.search(r'ostinato_requests_total\{model="two",outcome="length",path="/v1/chat/completions"\} [1-9]', page)
    # The front's own questions to its workers are not counted.
    assert not re.search(r'ostinato_requests_total\{model="two",[^}]*path="/health"', page)


def test_paths_types_and_bodies_are_refused_as_by_a_single_model(fronted: Fronted) -> None:
    with fronted.http() as client:
        for method, path, content, status in (
            ("POST", "/nothing", b"{}", 404),
            ("GET", CHAT, None, 405),
            ("POST", CHAT, b"{}", 415),
        ):
            assert client.request(method, path, content=content).status_code == status
        for body in (b"no JSON", b'{"model": 5}', b"[]", b'{"model": "first"', b"\xff"):
            reply = client.post(CHAT, content=body, headers={"content-type": "application/json"})
            assert reply.status_code == 400, reply.text
        form = {"content-type": "application/x-www-form-urlencoded"}
        for page, status in (({}, 200), ({"origin": "https://a.example"}, 415)):
            assert client.post("/api/chat", content=b"{}", headers={**form, **page}).status_code == status
    assert fronted.post("/api/pull", {"model": "x"}).status_code == 400
    assert fronted.get("/openapi.json").json()["paths"].keys() >= {CHAT, "/v1/models"}


def test_showing_a_model_loads_none_and_tells_the_same(two: tuple[Path, Path], tiny_files: Path) -> None:
    with fronting(*two, tiny_encoders.gguf("bert", tiny_files)) as server:
        for name in ("one", "two", "bert"):
            before = server.post("/api/show", {"model": name})
            assert before.status_code == 200, before.text
            assert server.front.models.find(name).n_loads == 0
            path = "/v1/embeddings" if name == "bert" else "/v1/completions"
            body = {"input": "a"} if name == "bert" else {"prompt": "a", **FEW}
            assert server.post(path, {"model": name, **body}).status_code == 200
            assert server.post("/api/show", {"name": name}).json() == before.json()
        assert server.post("/api/show", {"model": "none"}).status_code == 404


def test_the_tokenizer_of_each_model_is_told(fronted: Fronted) -> None:
    for query, name in (("", "first"), ("?model=two", "two"), ("?model=1:latest", "first")):
        reply = fronted.get(f"/tokenizer_info{query}")
        assert reply.status_code == 200, reply.text
        info = reply.json()
        assert (info["bos_token"], info["eos_token"], info["vocab_size"]) == (BOS, EOS, 300)
        assert info["model_max_length"] == 512
        # A client renders prompts itself with this template, and its prompt is that of the server.
        words = {"messages": HELLO, "add_generation_prompt": True}
        own = jinja2.Template(info["chat_template"]).render(**words, bos_token=BOS, eos_token=EOS)
        assert own == fronted.post("/apply-template", {"model": name, "messages": HELLO}).json()["prompt"]
    assert fronted.get("/tokenizer_info?model=none").status_code == 404
    fronted.until(lambda: any((one["path"], one.get("model")) == ("/tokenizer_info", "two") for one in fronted.log))


def test_any_model_answers_to_any_name_and_says_that_it_was_ignored(two: tuple[Path, Path]) -> None:
    with fronting(*two, any_model=True) as server:
        reply = server.post(CHAT, {"model": "gpt-4o", "messages": HELLO, **FEW, "priority": 3})
        assert reply.json()["model"] == "one"
        assert reply.headers["x-ostinato-ignored"] == "model, priority"
        for path, body in (
            ("/api/generate", {"prompt": "x", "options": {"num_predict": 2}, "stream": False}),
            ("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
        ):
            assert server.post(path, {"model": "gpt-4o", **body}).json()["model"] == "one"
        assert server.get("/v1/models/gpt-4o").json()["id"] == "one"
        reply = server.post(CHAT, {"model": "one", "messages": HELLO, **FEW})
        assert "x-ostinato-ignored" not in reply.headers


def test_a_client_that_does_not_read_is_given_up_and_its_model_is_idle_again(two: tuple[Path, Path]) -> None:
    limits = ServeLimits(write_s=0.5)
    with fronting(*two, limits=limits, llm={"context": 4096}) as server:
        chatted(server, "one")
        asked = {"messages": HELLO, "stream": True, "ignore_eos": True, "n": 2, "logprobs": True, "top_logprobs": 20}
        body = json.dumps(asked).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
            client.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            first = server.front.models.first
            server.until(lambda: first.n_running == 1)
            assert chatted(server, "two")["model"] == "two"
            server.until(lambda: first.n_running == 0)
        server.until(lambda: any(line["outcome"] == "cancelled" for line in (*server.front_log, *server.log)))
        assert chatted(server, "one")["model"] == "one"


def test_a_model_that_cannot_be_shown_is_told_shortly_and_without_its_folder(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    def rename(metadata: dict[str, Any]) -> None:
        metadata["general.architecture"].value = "novel"

    with fronting(two[0], tiny_model.write(tmp_path / "novel.gguf", change=rename)) as server:
        reply = server.post("/api/show", {"model": "novel"})
        assert reply.status_code == 503
        assert reply.json()["error"].startswith("novel cannot be loaded: novel.gguf: the architecture 'novel' is not")
        asked = server.post(CHAT, {"model": "novel", "messages": HELLO}).json()["error"]["message"]
        assert asked.startswith("novel could not be loaded: novel.gguf: the architecture 'novel' is not known")
        (told,) = [model["why"] for model in server.get("/slots").json()["models"] if model["id"] == "novel"]
        assert max(map(len, (reply.json()["error"], asked, told))) < 300


# Loading


@contextmanager
def loading(two: tuple[Path, Path], **words: Any) -> Iterator[tuple[Fronted, threading.Event]]:
    """A front whose second model is loaded when the event is set."""
    may = threading.Event()

    def load(index: int) -> LLM:
        assert index == 0 or may.wait(60)
        return LLM(two[index], device="cpu", context=(4096, 512)[index], slots=2)

    limits = ServeLimits(keep_alive_s=0.05, **words.pop("limits", {}))
    with fronting(*two, load=load, limits=limits, **words) as server:
        try:
            yield server, may
        finally:
            may.set()


def test_streams_that_wait_for_a_model_are_kept_alive_in_the_manner_of_their_api(two: tuple[Path, Path]) -> None:
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": HELLO, "stream": True, **FEW},
        "/v1/completions": {"prompt": "x", "stream": True, **FEW},
        "/v1/messages": {"messages": HELLO, "stream": True, "max_tokens": 4},
        "/v1/responses": {"input": "x", "stream": True, "max_output_tokens": 4},
        "/api/chat": {"messages": HELLO, "options": {"num_predict": 4}},
        "/api/generate": {"prompt": "x", "options": {"num_predict": 4}},
    }
    with loading(two) as (server, may), ThreadPoolExecutor(8) as threads:

        def whole(path: str) -> str:
            with server.http() as client, client.stream("POST", path, json={"model": "two", **bodies[path]}) as stream:
                lines = []
                for line in stream.iter_lines():
                    lines.append(line)
                    if len(lines) == 3:
                        begun.release()
                return "\n".join(lines)

        begun = threading.Semaphore(0)
        waiting = {path: threads.submit(whole, path) for path in bodies}
        for _ in bodies:
            assert begun.acquire(timeout=60)
        assert chatted(server, "one")["model"] == "one"
        assert server.state(1) == "loading"
        may.set()
        for path, task in waiting.items():
            text = task.result(60)
            if path.startswith("/api/"):
                lines = [json.loads(line) for line in text.splitlines()]
                assert lines[0]["done"] is False
                assert lines[-1]["done"] is True
                assert {line["model"] for line in lines} == {"two"}
            else:
                assert text.startswith(": waiting\n\n: waiting")
                assert re.search(r"\[DONE\]|message_stop|response.(completed|incomplete)", text)


def test_clients_of_each_api_wait_for_a_model_and_get_their_answer(two: tuple[Path, Path]) -> None:
    with (
        loading(two) as (server, may),
        ThreadPoolExecutor(8) as threads,
        server.openai() as client,
        anthropic.Anthropic(base_url=server.url, api_key="none") as claude,
        ollama_client(server) as local,
    ):
        stream: Any = lambda: [*client.chat.completions.create(model="two", messages=HELLO, stream=True, max_tokens=3)]  # noqa: E731
        whole: Any = lambda: client.chat.completions.create(model="two", messages=HELLO, max_tokens=3)  # noqa: E731
        message: Any = lambda: claude.messages.create(model="two", messages=HELLO, max_tokens=3, stream=True)  # noqa: E731
        tasks = [threads.submit(work) for work in (stream, whole, lambda: [*message()])]
        lines = threads.submit(lambda: [*local.chat("two", HELLO, stream=True, options={"num_predict": 3})])
        server.until(lambda: server.front.models.all[1].n_waiting == 4)
        time.sleep(0.2)
        assert not any(task.done() for task in (*tasks, lines))
        may.set()
        assert tasks[0].result(60)[-1].choices[0].finish_reason is not None
        assert tasks[1].result(60).choices[0].finish_reason is not None
        assert tasks[2].result(60)[-1].type == "message_stop"
        assert lines.result(60)[-1].done


def test_a_model_that_fails_to_load_is_told_to_all_who_wait_and_tried_when_its_files_change(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    files = (two[0], tmp_path / "two")
    shutil.copytree(two[1], files[1])
    good = threading.Event()
    begin = threading.Event()

    def load(index: int) -> LLM:
        begin.wait(60)
        if index == 1 and not good.is_set():
            raise BadFile(f"{files[1]}: it is damaged; fetch it again, with more --slots")
        return LLM(files[index], device="cpu", context=512, slots=2)

    with fronting(*files, load=load, limits=ServeLimits(keep_alive_s=0.05)) as server, ThreadPoolExecutor(4) as threads:
        body = {"model": "two", "messages": HELLO, **FEW}
        whole = threads.submit(server.post, CHAT, body)
        stream = threads.submit(server.post, CHAT, {**body, "stream": True})
        message = threads.submit(server.post, "/v1/messages", {**body, "stream": False})
        server.until(lambda: server.front.models.all[1].n_waiting == 3)
        time.sleep(0.2)
        begin.set()
        reply = whole.result(60)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "10")
        assert reply.json()["error"]["code"] == "model_failed"
        # Neither the operator's folders nor advice for the command line.
        assert reply.json()["error"]["message"] == "two could not be loaded: two: it is damaged"
        assert message.result(60).status_code == 529
        # The head of the stream has been sent: its error is an event.
        event = [line for line in stream.result(60).text.splitlines() if line.startswith("data: ")][-1]
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == "model_failed"
        assert chatted(server, "one")["model"] == "one"
        (told,) = [model for model in server.get("/health").json()["models"] if model["id"] == "two"]
        assert (told["state"], told["why"]) == ("failed", "two: it is damaged")
        good.set()
        assert server.post(CHAT, body).status_code == 503
        (files[1] / "config.json").touch()
        assert chatted(server, "two")["model"] == "two"


def test_a_server_whose_first_model_failed_is_not_said_to_load(two: tuple[Path, Path]) -> None:
    def load(index: int) -> LLM:
        raise BadFile("it is damaged")

    with fronting(*two, load=load) as server:
        assert server.get("/health").json()["status"] == "loading"
        assert server.post(CHAT, {"model": "one", "messages": HELLO}).status_code == 503
        health = server.get("/health").json()
        assert (health["status"], health["models"][0]["status"]) == ("ok", "failed")  # the other one can be asked for
        assert server.get("/ready").status_code == 200
        assert server.post(CHAT, {"model": "two", "messages": HELLO}).status_code == 503
        health = server.get("/health").json()
        assert (health["status"], health["ready"], health["why"]) == ("failed", False, "it is damaged")
        assert server.get("/ready").status_code == 503


def test_a_damaged_tokenizer_is_refused_before_another_model_makes_room(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any]) -> None:
        metadata["tokenizer.ggml.model"].value = "runes"

    path = tiny_model.write(tmp_path / "runes.gguf", change=change)
    asked: list[object] = []
    with pytest.raises(Unsupported, match="'runes' are not supported"):
        AdmittedLLM(str(path), LoadOptions(device="cpu"), lambda _: None, asked.append, beside_others=True)
    assert not asked


def test_a_request_whose_answer_has_not_begun_is_asked_of_the_next_worker_but_not_of_a_third(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_of: list[int] = []

    with fronting(*two) as server:
        chatted(server, "one")
        n_deaths = 1

        real = upstream.asked

        @asynccontextmanager
        async def dying(path: str, *words: Any) -> AsyncIterator[Any]:
            asked_of.append(1)
            if len(asked_of) <= n_deaths:
                how = {"why": "signal SIGKILL", "unloaded": False, "starting_another": True, "restarts": {"crash": 1}}
                server.heard(0, {"event": "ended", **how})
                server.heard(0, {"event": "ready", "context": 512})
                raise UpstreamGone("closed")
            async with real(path, *words) as answer:
                yield answer

        monkeypatch.setattr(forward, "asked", dying)
        assert chatted(server, "one")["model"] == "one"
        assert len(asked_of) == 2
        asked_of.clear()
        n_deaths = 2
        reply = server.post(CHAT, {"model": "one", "messages": HELLO, **FEW})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_restarting")
        assert len(asked_of) == 2
        server.until(lambda: bool(server.front_log) and server.front_log[-1]["status"] == 503)


def test_a_model_makes_room_only_when_it_is_idle_and_says_so(two: tuple[Path, Path]) -> None:
    limits = ServeLimits(keep_alive_s=0.05)
    with fronting(*two, sizes=(60, 100), limits=limits, llm={"slots": 2}) as server, ThreadPoolExecutor(1) as threads:
        body = {"model": "one", "messages": HELLO, "stream": True, "ignore_eos": True}
        with server.http() as client, client.stream("POST", CHAT, json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            other = threads.submit(server.post, CHAT, {"model": "two", "messages": HELLO, **FEW})
            server.until(lambda: server.state(1) == "loading")
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert other.result(60).json()["model"] == "two"
        one, second = server.get("/slots").json()["models"]
        assert (one["state"], one["unloads"], second["state"]) == ("unloaded", 1, "ready")
        assert one["unloaded_for"] == "two needs 0 MiB, and 0 MiB are free on cpu"
        page = server.get("/metrics").text
        assert 'ostinato_model_unloads_total{model="one"} 1.0' in page
        assert 'ostinato_model_loaded{model="one"} 0.0' in page
        assert [model["name"] for model in server.get("/api/ps").json()["models"]] == ["two:latest"]
        assert chatted(server, "one")["model"] == "one"
        assert server.state(1) == "unloaded"


def test_waiting_for_a_model_ends_at_the_deadline_of_a_request(two: tuple[Path, Path]) -> None:
    with loading(two, limits={"request_s": 0.3}) as (server, _):
        reply = server.post(CHAT, {"model": "two", "messages": HELLO})
        assert (reply.status_code, "two was not loaded in time" in reply.text) == (408, True)
        events = server.post(CHAT, {"model": "two", "messages": HELLO, "stream": True}).text.strip().split("\n\n")
        assert events[0] == ": waiting"
        assert "two was not loaded in time" in events[-1]


def test_who_leaves_while_a_model_loads_is_forgotten(two: tuple[Path, Path]) -> None:
    with loading(two) as (server, may):
        body = {"model": "two", "messages": HELLO, "stream": True}
        with server.http() as client, client.stream("POST", CHAT, json=body) as stream:
            next(stream.iter_lines())
        server.until(lambda: server.front.models.all[1].n_waiting == 0)
        server.until(lambda: any(line["outcome"] == "cancelled" for line in server.front_log))
        may.set()
        assert chatted(server, "two")["model"] == "two"


def test_draining_lets_those_who_wait_for_a_model_have_their_answer(two: tuple[Path, Path]) -> None:
    with loading(two) as (server, may), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(server.post, CHAT, {"model": "two", "messages": HELLO, **FEW})
        server.until(lambda: server.front.models.all[1].n_waiting == 1)
        server.loop.call_soon_threadsafe(server.front.signalled)
        server.until(lambda: server.get("/health").json()["status"] == "draining")
        assert server.post(CHAT, {"messages": HELLO}).status_code == 503
        may.set()
        assert waiting.result(60).status_code == 200


def test_a_second_signal_ends_those_who_wait_and_those_who_are_answered(two: tuple[Path, Path]) -> None:
    with loading(two) as (server, _), ThreadPoolExecutor(3) as threads:
        body = {"messages": HELLO, "stream": True, "ignore_eos": True}
        slow = {**body, "n": 2, "top_logprobs": 20, "logprobs": True}
        tasks = [threads.submit(server.post, CHAT, {"model": model, **slow}) for model in ("one", "two")]
        whole = threads.submit(server.post, CHAT, {"model": "one", **slow, "stream": False})
        server.until(lambda: server.front.models.all[1].n_waiting == 1 and server.front.models.all[0].n_running == 2)
        began = time.monotonic()
        server.loop.call_soon_threadsafe(server.front.signalled)
        server.loop.call_soon_threadsafe(server.front.signalled)
        reply = whole.result(60)  # no byte of its answer has been sent
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")
        assert time.monotonic() - began < forward._TOLD_S - 1
        for task in tasks:
            last = task.result(60).text.strip().split("\n\n")[-1].removeprefix("data: ")
            assert json.loads(last)["error"]["code"] == "draining"
    ids = [line["id"] for line in (*server.log, *server.front_log)]
    assert len(ids) == len(set(ids)) == 3  # one line for each request
    assert {line["model"] for line in (*server.log, *server.front_log)} == {"one", "two"}
