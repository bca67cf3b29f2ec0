"""What is refused, how it is told, and that nothing of ours leaks with it."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from ostinato import LLM
from ostinato.engine.request import NOT_NUMBERS
from ostinato.errors import BadFile, BadOption, EngineDead, NotNumbers
from ostinato.options import MAX_MADE_CHARACTERS, MadeGrammar, Rule, Sampling
from ostinato.serve.errors import refusal_of, without_folders
from ostinato.serve.settings import ServeLimits, ServeOptions
from ostinato.text.guard import library_ids
from tests.cli import tiny_model
from tests.serve.running import Running, serving

CHAT = "/v1/chat/completions"
JSON = "application/json"
HELLO: Any = [{"role": "user", "content": "hello"}]


def refused(server: Running, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    reply = server.post(path, body)
    assert reply.status_code == 400, reply.text
    assert reply.headers["content-type"] == "application/json"
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temprature", 1),
        ("temperature", -1),
        ("temperature", "warm"),
        ("top_p", 1.5),
        ("top_k", 0.5),
        ("n", 0),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("seed", -2),
        ("top_k", -2),
        ("max_tokens", -2),
        ("stop", [""]),
        ("stop", ["x"] * 10_000),
        ("logit_bias", {"word": 1}),
        ("logit_bias", {"1": 1000}),
        ("logit_bias", {"999999": 1}),
        ("logprobs", 5),
        ("top_logprobs", 3),
        ("stream_options", {"include_usage": True}),
        ("best_of", 2),
        ("functions", [{"name": "x"}]),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content"}),
        ("reasoning_effort", "huge"),
        ("guided_choice", []),
        ("guided_json", "{"),
        ("structured_outputs", {"structural_tag": {}}),
        ("web_search_options", {}),
        ("tools", [{"type": "custom"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "xml"}),
        ("messages", []),
        ("messages", "hello"),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"self": 1}),
        ("messages", [{"role": "usr", "content": "hi"}]),
        ("max_new_tokens", 5),
        ("lora", "x"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_the_fields_name(server: Running, field: str, value: Any) -> None:
    error = refused(server, {"messages": HELLO, field: value})
    assert error["param"] is not None
    assert error["param"].split(".")[0].split("[")[0] == field
    assert field in error["message"]


def test_a_part_that_is_no_text_is_named_where_it_stands(server: Running) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    error = refused(server, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, picture]}]})
    assert error["param"] == "messages[0].content[1].type"
    assert error["message"].endswith("is 'image_url'; this model reads no images")
    error = refused(server, {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]})
    assert "vision models are not supported" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CHAT, {"messages": HELLO, "stop": ["x"] * 17}, "stop", "at most 16"),
        (CHAT, {"messages": HELLO, "tool_choice": 5}, "tool_choice", "'required', or"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format.json_schema", "req"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "regex", "regex": ""}}, "response_format.regex", "at"),
        (CHAT, {"messages": HELLO, "stop_token_ids": [999_999]}, "stop_token_ids", "999999"),
        (CHAT, {"messages": []}, "messages", "messages is empty; give it at least 1 item"),
        (CHAT, {"prompt": "x"}, "messages", "messages is missing, and it is required here; prompt is for /v1/compl"),
        ("/v1/completions", {"messages": HELLO}, "prompt", "; messages is for /v1/chat/completions"),
        ("/v1/completions", {"prompt": []}, "prompt", "at least 1 item"),
        ("/v1/completions", {"prompt": 5}, "prompt", "is 5; it must be a string, or a list"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt[1]", "is 'a'; it must be an integer"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt[1]", "is 1; it must be a string"),
        ("/v1/completions", {"prompt": [[1], "a"]}, "prompt[1]", "is 'a'; it must be a list"),
        ("/v1/completions", {"prompt": [5, 99_999]}, "prompt", "99999 at index 1"),
        ("/v1/completions", {"prompt": ["a"] * 129}, "prompt", "129 answers"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
        ("/v1/completions", {"prompt": [5, 99_999], "max_tokens": 0, "echo": True, "logprobs": 1}, "prompt", "99999"),
        ("/v1/completions", {"prompt": [5] * 5000, "max_tokens": 0, "echo": True, "logprobs": 1}, "prompt", "5000"),
        ("/v1/embeddings", {"input": [[5], [99_999]]}, "input", "input[1]"),
    ],
)
def test_what_is_wrong_is_named_where_it_stands(
    server: Running, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    error = refused(server, body, path)
    assert error["param"] == param, error
    assert words in error["message"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the body is empty"),
        (b"[]", "the body is no JSON object"),
        (b"null", "the body is no JSON object"),
        (b"{", "the body is no JSON: "),
        (b'{"a": "\xff\xfe"}', "no UTF-8"),
        (b"[" * 40_000, "nested too deep"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "too long"),
    ],
)
def test_a_body_that_cannot_be_read_is_told_why(server: Running, content: bytes, words: str) -> None:
    with server.http() as http:
        reply = http.post(CHAT, content=content, headers={"content-type": JSON})
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_a_prompt_that_does_not_fit_is_refused_with_openais_code(server: Running) -> None:
    error = refused(server, {"messages": [{"role": "user", "content": "long " * 2000}]})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert error["message"].endswith("; shorten it, or ask the server's operator for a larger context")
    error = refused(server, {"prompt": [5] * 5000}, "/v1/completions")
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_the_client_gets_the_kinds_of_errors_it_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-5)
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    assert client.models.retrieve("tiny").id == "tiny"
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_paths_methods_and_types_that_are_not_there_are_told_in_the_same_shape(server: Running) -> None:
    with server.http() as http:
        for reply, status in (
            (http.get("/nowhere"), 404),
            (http.get(CHAT), 405),
            (http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415),
            (http.post(CHAT, content=b"{}", headers={"content-type": JSON, "content-encoding": "gzip"}), 415),
            (http.post(CHAT, content=b"{", headers={"content-type": JSON}), 400),
        ):
            assert reply.status_code == status, reply.text
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
            assert reply.headers["x-request-id"]


def test_a_path_that_is_not_there_is_told_before_the_type_of_its_body(server: Running, tiny: Path) -> None:
    with server.http() as http:
        assert http.post("/api/nowhere", content=b"{}").status_code == 404


def test_a_body_beyond_the_limit_is_told_so(server: Running) -> None:
    huge = {"messages": [{"role": "user", "content": "x" * 10_000_000}]}
    reply = server.post(CHAT, huge)
    assert reply.status_code == 413
    assert "8388608" in reply.json()["error"]["message"]


def test_half_characters_are_refused_or_told_without_a_fault(server: Running) -> None:
    for text in (
        r'{"messages": [{"role": "user", "content": "\ud800"}]}',
        r'{"messages": [{"role": "user", "content": "x"}], "\ud800": 1}',
        r'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "chat_template_kwargs": {"a": "\udc00"}}',
    ):
        with server.http() as http:
            reply = http.post(CHAT, content=text.encode(), headers={"content-type": "application/json"})
        assert reply.status_code in (200, 400), reply.text
        json.loads(reply.text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/v1/responses", r'{"input": "\ud800"}'),
        ("/v1/responses", r'{"input": "x", "instructions": "\udc00", "stream": true}'),
        ("/v1/responses", r'{"input": "x", "metadata": {"a": "\ud800x"}}'),
        ("/v1/messages", r'{"max_tokens": 2, "messages": [{"role": "user", "content": "\ud800"}]}'),
        ("/v1/rerank", r'{"query": "x", "documents": ["\udfff"]}'),
        ("/api/chat", r'{"messages": [{"role": "user", "content": "\ud800"}]}'),
    ],
)
def test_half_characters_are_refused_by_every_api(server: Running, path: str, text: str) -> None:
    with server.http() as http:
        reply = http.post(path, content=text.encode(), headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert "half a character" in reply.text


def test_whole_characters_in_two_escapes_are_none_of_them(server: Running) -> None:
    text = r'{"input": "\ud83d\ude00 and \\ud800", "max_output_tokens": 1}'
    with server.http() as http:
        reply = http.post("/v1/responses", content=text.encode(), headers={"content-type": "application/json"})
    assert reply.status_code == 200, reply.text


def test_our_own_faults_tell_nothing_of_the_inside(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tiny, llm={"context": 64, "slots": 1}) as server:
        object.__setattr__(server.llm.chat_format, "tools", None)
        reply = server.post(CHAT, {"messages": [{"role": "tool", "content": "x"}]})
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "Traceback" not in reply.text
    assert "NoneType" not in reply.text
    assert "NoneType" in capfd.readouterr().err
    assert server.log[-1]["status"] == 500


@pytest.mark.slow
def test_a_full_line_is_told_when_to_come_again(tiny: Path) -> None:
    slow = {"context": 4096, "slots": 1, "queue": 0, "mode": "eager"}  # the first is still answered when another comes
    with serving(tiny, llm=slow) as server, server.http() as http:
        # What can never find room is not told to come again.
        assert refused(server, {"messages": HELLO, "n": 2})["param"] == "n"
        body = {"messages": HELLO, "stream": True, "ignore_eos": True}
        with http.stream("POST", CHAT, json=body) as first:
            parts = first.iter_bytes()
            next(parts)
            reply = server.post(CHAT, {"messages": HELLO})
            assert reply.status_code == 429
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["type"] == "rate_limit_error"


# Keys and hosts


@pytest.mark.slow
def test_a_key_guards_everything_but_health_and_the_libraries_of_the_page(tiny: Path) -> None:
    with serving(tiny, llm={"context": 64, "slots": 1}, keys=("sesame-open", "another-one")) as server:
        for path in ("/health", "/ready", "/live", "/vendor/marked-18.2.0/marked.umd.js"):
            assert server.get(path).status_code == 200
        for path in ("/vendor/../metrics", "/vendor/%2e%2e/metrics", "/vendor/x"):
            assert server.get(path).status_code in (401, 404)
        for path in ("/", "/docs", "/metrics", "/slots", "/v1/models", "/openapi.json", "/nowhere", "/vendor"):
            assert server.get(path).status_code == 401
            assert server.get(path, authorization="Bearer wrong-one").status_code == 401
            assert server.get(path, authorization="Bearer another-one").status_code in (200, 404)
        assert server.post(CHAT, {"messages": HELLO}).status_code == 401
        with server.openai("sesame-open") as good:
            assert good.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2).choices
        with server.openai("sesame-oper") as bad, pytest.raises(openai.AuthenticationError):
            bad.chat.completions.create(model="tiny", messages=HELLO)


@pytest.mark.slow
def test_a_browser_is_asked_for_the_key_as_a_password(tiny: Path) -> None:
    with serving(tiny, llm={"context": 64, "slots": 1}, keys=("sesame-open",)) as server:
        asked = server.get("/")
        assert asked.headers["www-authenticate"].startswith("Basic")
        assert server.get("/v1/models").headers["www-authenticate"].startswith("Bearer")
        with server.http(auth=("me", "sesame-open")) as http:
            assert http.get("/").status_code == 200
            assert http.get("/v1/models").status_code == 200
        for broken in ("Basic !!!", "Basic", "Bearer", "Digest x", "Basic YQ=="):
            assert server.get("/", authorization=broken).status_code == 401


def test_another_address_needs_a_key_or_a_word(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="--no-api-key"):
        ServeOptions("tiny", host="0.0.0.0")
    assert ServeOptions("tiny", host="0.0.0.0", no_key=True).keys == ()
    assert ServeOptions("tiny", host="0.0.0.0", keys=("long-enough",)).host == "0.0.0.0"
    with pytest.raises(BadOption, match="given"):
        ServeOptions("tiny", keys=("long-enough",), no_key=True)
    with pytest.raises(BadOption, match="characters"):
        ServeOptions("tiny", keys=("short",))
    with pytest.raises(BadOption, match="--cors"):
        ServeOptions("tiny", cors=("example.org",))


def test_a_name_that_is_not_ours_is_refused_while_no_key_guards(server: Running, tiny: Path) -> None:
    assert server.get("/v1/models", host="evil.example").status_code == 403
    assert server.get("/v1/models", host="localhost:1234").status_code == 200
    with serving(tiny, llm={"context": 64, "slots": 1}, keys=("sesame-open",)) as guarded:
        reply = guarded.get("/v1/models", host="models.example", authorization="Bearer sesame-open")
        assert reply.status_code == 200


def test_pages_of_other_origins_are_let_in_only_when_asked(server: Running, tiny: Path) -> None:
    asking = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    with server.http(headers=asking) as http:
        assert "access-control-allow-origin" not in http.options(CHAT).headers
        assert "access-control-allow-origin" not in http.get("/v1/models").headers
    with (
        serving(tiny, llm={"context": 64, "slots": 1}, cors=("https://chat.example",), keys=("sesame-open",)) as open_,
        open_.http(headers=asking) as http,
    ):
        assert http.options(CHAT).headers["access-control-allow-origin"] == "https://chat.example"
        assert http.get("/v1/models").headers["access-control-allow-origin"] == "https://chat.example"
        # The clients that people put into pages send headers of their own.
        words = {"access-control-request-headers": "authorization,content-type,x-stainless-os"}
        assert http.options(CHAT, headers=words).status_code == 200
        other = http.get("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


# Slow and broken clients


@pytest.mark.slow
def test_a_body_that_stops_half_way_is_given_up(tiny: Path) -> None:
    limits = ServeLimits(body_s=0.3, head_s=0.3)
    with serving(tiny, llm={"context": 64, "slots": 1}, limits=limits) as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with socket.create_connection(address, timeout=10) as half:
            half.sendall(head + b'content-length: 100\r\n\r\n{"prompt"')
            assert b"408" in half.recv(4096).split(b"\r\n")[0]
        with socket.create_connection(address, timeout=10) as silent:
            silent.sendall(head)  # and never its end
            assert silent.recv(4096) == b""
        with socket.create_connection(address, timeout=10) as gone:
            gone.sendall(head + b'content-length: 100\r\n\r\n{"prompt"')
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.slow
def test_while_the_model_loads_everything_is_not_yet(tiny: Path) -> None:
    import threading

    go = threading.Event()

    def slow() -> LLM:
        assert go.wait(30)
        return LLM(tiny, device="cpu", context=64)

    with serving(tiny, load=slow, wait=False) as server:
        health = server.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert server.get("/live").status_code == 200
        ready = server.get("/ready")
        assert (ready.status_code, ready.headers["retry-after"]) == (503, health.headers["retry-after"])
        reply = server.post(CHAT, {"messages": HELLO})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_loading")
        assert reply.headers["retry-after"]
        go.set()
        with server.http() as http:
            while http.get("/ready").status_code == 503:
                pass
        assert server.post(CHAT, {"messages": HELLO, "max_tokens": 1}).status_code == 200


def test_a_long_name_of_a_function_is_refused_at_once_and_quoted_in_part(server: Running) -> None:
    hostile = "a" * 32_000 + "/" * 32_000
    tool = {"type": "function", "function": {"name": hostile}}
    began = time.perf_counter()
    reply = server.post(CHAT, {"messages": HELLO, "tools": [tool]})
    assert time.perf_counter() - began < 5
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400
    assert message.startswith("tools[0].function.name is 'aaaaaaaa")
    assert len(message) < 300


@pytest.mark.parametrize("text", ["a" * 100_000, "/a" * 50_000, "/" * 100_000, "a/" * 50_000])
def test_an_error_with_a_long_text_of_a_client_takes_no_time(text: str) -> None:
    began = time.perf_counter()
    assert refusal_of(BadOption(text)).message == text
    assert without_folders(text, ["/a/a/a.gguf", "smollm2"]) is not None
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize(
    "text",
    [
        "'#/$defs/node'",
        "'/a/b/c'",
        '"^/api/v1/users$"',
        "'org/repo/file.gguf'",
        "'/models/my own/a.gguf'",
        "'~/x/y.json'",
    ],
)
def test_a_clients_text_comes_back_as_it_was(text: str) -> None:
    assert refusal_of(BadOption(f"the value {text} is not known")).message == f"the value {text} is not known"


def test_a_reference_of_a_clients_schema_comes_back_as_it_was(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/inner/node"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = server.post(CHAT, {"messages": HELLO, "response_format": wanted})
    assert reply.status_code == 400
    assert "/$defs/inner/node" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("/my models/q4/a.gguf: it is damaged", "a.gguf: it is damaged"),
        ("'/my models/q4/a-00002-of-00003.gguf' is missing", "'a-00002-of-00003.gguf' is missing"),
        ("/my models/folder/config.json: is not JSON", "folder/config.json: is not JSON"),
        ("near/b.gguf: not /linear/b.gguf or linear/b.gguf", "b.gguf: not /linear/b.gguf or linear/b.gguf"),
        ("./c.gguf: it is damaged", "./c.gguf: it is damaged"),
        ("/d.gguf: it holds 1/2 of them", "/d.gguf: it holds 1/2 of them"),
        ("smollm2: cannot write to /store: it is full", "smollm2: cannot write to the store: it is full"),
        ("/store/smollm2/x.gguf: it is damaged", "smollm2/x.gguf: it is damaged"),
        ("hf:owner/repo/file.gguf: not found", "hf:owner/repo/file.gguf: not found"),
        ("no kernel in /home/me/.cache/kernels", "no kernel in ~/.cache/kernels"),
    ],
)
def test_what_is_wrong_with_a_model_is_told_without_the_operators_folders(
    message: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", "/store")
    monkeypatch.setenv("HOME", "/home/me")
    paths = ("/my models/q4/a.gguf", "/my models/folder", "near/b.gguf", "c.gguf", "/d.gguf")
    assert without_folders(message, (*paths, "smollm2", "hf:owner/repo/file.gguf")) == told


@pytest.mark.parametrize("own", ["/", ""])
def test_an_operator_without_a_folder_of_their_own_changes_no_message(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", own)
    assert without_folders("/x/a.gguf: 1/2 of it", ["/x/a.gguf"]) == "a.gguf: 1/2 of it"


def test_what_an_engine_died_of_is_told_without_the_operators_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert refusal_of(EngineDead("/home/me/x.so cannot be loaded")).message == "~/x.so cannot be loaded"


def test_a_text_that_cannot_be_encoded_is_told_with_the_name_of_the_file_alone() -> None:
    with pytest.raises(BadFile, match=r"^tokenizer\.json cannot encode a text: "):
        library_ids(None, "x", Path("/models/two/tokenizer.json"))  # type: ignore[arg-type]


def raising(metadata: dict[str, Any]) -> None:
    metadata["tokenizer.chat_template"].value = "{{ raise_exception('no') }}"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (tiny_model.without_template, "this model has no chat template; send its prompt as text, to /v1/completions"),
        (raising, "the chat template of tiny.gguf failed: "),
    ],
)
def test_what_is_wrong_with_a_template_is_told_without_the_servers_folders(
    change: Any, told: str, tmp_path: Path
) -> None:
    model = tiny_model.write(tmp_path / "tiny.gguf", change=change)
    with serving(model, llm={"context": 64, "slots": 1}) as server:
        reply = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(told)
    assert str(tmp_path) not in reply.text


BAD_SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "text"}}}


@pytest.mark.parametrize(
    ("format", "param", "message"),
    [
        ({}, "", ".type is missing, and it is required here"),
        ([], "", " is a list; it must be an object"),
        ({"type": 3}, ".type", " is 3; it must be one of 'text', "),
        ({"type": "json_schema", "json_schema": 3}, ".json_schema", " is 3; it must be an object"),
        ({"type": "json_object", "x": 1}, ".x", " is not supported here; leave it out"),
        ({"type": "choice", "choice": "a"}, ".choice", " is 'a'; it must be a list"),
        ({"type": "grammar", "grammar": ""}, ".grammar", " is empty; give it at least 1 character"),
    ],
)
def test_a_format_of_another_shape_is_told_in_our_words(server: Running, format: Any, param: str, message: str) -> None:
    error = refused(server, {"messages": HELLO, "response_format": format})
    assert error["param"] == f"response_format{param}"
    assert error["message"].startswith(error["param"] + message)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_function_whose_arguments_are_no_object_is_named_by_its_place(server: Running, choice: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]
    error = refused(server, {"messages": HELLO, "tools": tools, "tool_choice": choice})
    assert error["param"] == "tools[0].function.parameters"
    assert "of 'f' must describe an object" in error["message"]


def test_tools_whose_grammar_is_refused_are_named_by_their_field() -> None:
    large = MadeGrammar("x" * (MAX_MADE_CHARACTERS + 1))
    with pytest.raises(BadOption, match="together are too large") as caught:
        Sampling(grammar=large)
    assert refusal_of(caught.value).param == "tools"
    shown = Rule("grammar", MadeGrammar("x")).shown
    assert refusal_of(BadOption(f"{shown} cannot be followed: it has too many states")).param == "tools"


def test_a_forced_function_with_a_bad_schema_is_named_by_its_place_among_the_tools(server: Running) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (("good", {"type": "object"}), ("bad", BAD_SCHEMA))
    ]
    for choice in ("required", {"type": "function", "function": {"name": "bad"}}):
        error = refused(server, {"messages": HELLO, "tools": tools, "tool_choice": choice})
        assert error["param"] == "tools[1].function.parameters"
        assert error["message"].startswith(
            "tools[1].function.parameters of 'bad' cannot be followed: in properties.a, 'text' is not a type"
        )


def test_a_model_of_nan_is_an_error_of_the_server_that_says_so() -> None:
    """A client cannot mend it, and learns that asking again is of no use."""
    refusal = refusal_of(NotNumbers(NOT_NUMBERS))
    assert (refusal.status, refusal.message) == (500, NOT_NUMBERS)
