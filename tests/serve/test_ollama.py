"""Ollama's API, by its own client: answers are those of a chat, and what has no effect is named."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ollama
import pytest
from ollama import ChatResponse, GenerateResponse
from pydantic import BaseModel

from ostinato import LLM
from ostinato.serve.conversation import MOST_NAMED
from ostinato.serve.ollama_body import closed
from ostinato.serve.settings import ServeLimits
from tests.serve.running import DEADLINE_S, Running, only, serving

CHAT, PATH, GENERATE, EMBED = "/v1/chat/completions", "/api/chat", "/api/generate", "/api/embed"
HELLO: Any = {"role": "user", "content": "hello"}
FEW: Any = {"num_predict": 12, "seed": 3, "temperature": 0}
ONE_CALL: Any = {"tool_choice": "required", "parallel_tool_calls": False}
FORCED: Any = {"seed": 3, "temperature": 0, "num_predict": 200, **ONE_CALL}
SEED: Any = {"max_tokens": 12, "seed": 3, "temperature": 0}
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
    },
}
IGNORED = "x-ostinato-ignored"


class Answer(BaseModel):
    yes: bool


def client_of(server: Running) -> ollama.Client:
    return ollama.Client(server.url, verify=False)


@pytest.fixture(scope="module")
def ours(server: Running) -> Iterator[ollama.Client]:
    with client_of(server) as made:
        yield made


def ask(server: Running, body: dict[str, Any], path: str = PATH) -> dict[str, Any]:
    """A whole answer, which must be of the client's type."""
    kind = ChatResponse if path == PATH else GenerateResponse
    asked = {"messages": [HELLO]} if path == PATH else {"prompt": "hello"}
    reply = server.post(path, {**asked, "options": FEW, **body, "stream": False})
    assert reply.status_code == 200, reply.text
    made: dict[str, Any] = reply.json()
    kind.model_validate(made)
    return made


def lines(server: Running, body: dict[str, Any], path: str = PATH) -> list[dict[str, Any]]:
    """The lines of a stream, which is the default."""
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.text.endswith("}\n")
    return [json.loads(line) for line in reply.text.splitlines()]


def refused(server: Running, body: dict[str, Any], path: str = PATH, status: int = 400) -> str:
    """What an error says."""
    reply = server.post(path, body)
    assert reply.status_code == status, reply.text
    error: dict[str, str] = reply.json()
    assert list(error) == ["error"]
    return error["error"]


def chat_of(server: Running, messages: list[Any], **more: Any) -> dict[str, Any]:
    reply = server.post(CHAT, {"messages": messages, **SEED, **more})
    assert reply.status_code == 200, reply.text
    made: dict[str, Any] = reply.json()
    return made


# Answers


def test_a_chat_is_the_answer_of_a_chat(ours: ollama.Client, server: Running) -> None:
    before = datetime.now(UTC)
    made = ours.chat("tiny", [HELLO], options=FEW)
    chat = chat_of(server, [HELLO])
    assert made.message.content == chat["choices"][0]["message"]["content"]
    assert (made.model, made.message.role, made.done, made.done_reason) == ("tiny", "assistant", True, "length")
    assert (made.prompt_eval_count, made.eval_count) == (chat["usage"]["prompt_tokens"], 12)
    parts = (made.load_duration, made.prompt_eval_duration, made.eval_duration)
    assert all(isinstance(part, int) for part in parts)
    assert made.total_duration is not None
    assert 0 < sum(part or 0 for part in parts) <= made.total_duration < 60e9
    assert before <= datetime.fromisoformat(made.created_at or "") <= datetime.now(UTC)
    whole = ask(server, {"model": "tiny"})
    assert (whole["digest"], whole["seed"]) == (chat["digest"], 3)
    assert whole["eval_duration"] == round(whole["timings"]["decode_s"] * 1e9)


@pytest.mark.parametrize(
    "body",
    [{}, {"tools": [LOOK], "options": FORCED}, {"format": Answer.model_json_schema(), "options": {"seed": 3}}],
    ids=["text", "call", "schema"],
)
def test_a_stream_has_one_object_on_each_line_and_joins_to_the_whole(server: Running, body: dict[str, Any]) -> None:
    whole = ask(server, body)
    found = lines(server, {"messages": [HELLO], "options": FEW, **body})
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    assert all(ChatResponse.model_validate(line).message.role == "assistant" for line in found)
    assert "".join(line["message"]["content"] for line in found) == whole["message"]["content"]
    calls = [call["function"] for line in found for call in line["message"].get("tool_calls", ())]
    assert calls == [call["function"] for call in whole["message"].get("tool_calls", ())]
    assert {name for line in found[:-1] for name in line} == {"model", "created_at", "message", "done"}
    for name in ("digest", "done_reason", "eval_count", "prompt_eval_count"):
        assert found[-1][name] == whole[name]


def test_the_client_streams_at_once_and_in_turn(ours: ollama.Client, server: Running) -> None:
    text = ask(server, {})["message"]["content"]
    parts = list(ours.chat("tiny", [HELLO], options=FEW, stream=True))
    assert "".join(part.message.content or "" for part in parts) == text

    async def several() -> list[str]:
        client = ollama.AsyncClient(server.url, verify=False)

        async def one() -> str:
            stream = await client.chat("tiny", [HELLO], options=FEW, stream=True)
            return "".join([part.message.content or "" async for part in stream])

        async with client:
            return await asyncio.gather(*(one() for _ in range(6)))

    assert asyncio.run(several()) == [text] * 6


def test_all_faces_give_the_same_tokens(server: Running) -> None:
    """The same request by four APIs, with all limits given."""
    system = {"role": "system", "content": "Be brief."}
    limits = {"temperature": 0, "seed": 7, "top_k": 0, "top_p": 1.0, "stop": ["zz"]}
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    parameters = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]}
    function = {"name": "look", "description": "Look.", "parameters": parameters}
    sent = {"type": "function", "function": function}
    given: Any = {
        CHAT: {
            "text": {},
            "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            "call": {"tools": [sent], "tool_choice": "required"},
        },
        "/v1/responses": {
            "text": {},
            "schema": {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
            "call": {"tools": [{"type": "function", **function}], "tool_choice": "required"},
        },
        "/v1/messages": {
            "text": {},
            "schema": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
            "call": {
                "tools": [{"name": "look", "description": "Look.", "input_schema": parameters}],
                "tool_choice": {"type": "any"},
            },
        },
        PATH: {"text": {}, "schema": {"format": schema}, "call": {"tools": [sent]}},
    }

    def digest(path: str, kind: str, stream: bool) -> str:
        n = 24 if kind == "text" else 200
        forced = {"tool_choice": "required"} if kind == "call" else {}
        bodies: Any = {
            CHAT: {"messages": [system, HELLO], "max_tokens": n, **limits},
            "/v1/responses": {"instructions": "Be brief.", "input": "hello", "max_output_tokens": n, **limits},
            "/v1/messages": {"system": "Be brief.", "messages": [HELLO], "max_tokens": n, **limits},
            PATH: {"messages": [system, HELLO], "options": {"num_predict": n, **limits, **forced}},
        }
        reply = server.post(path, {**bodies[path], **given[path][kind], "stream": stream})
        assert reply.status_code == 200, reply.text
        ends = [line.removeprefix("data: ") for line in reply.text.splitlines() if '"digest"' in line]
        told = json.loads(ends[-1])
        found: str = told.get("digest") or told["response"]["digest"]
        return found

    for kind in ("text", "schema", "call"):
        digests = {(path, stream): digest(path, kind, stream) for path in given for stream in (True, False)}
        assert len(set(digests.values())) == 1, (kind, digests)


def test_generate_answers_a_prompt_with_or_without_a_template(ours: ollama.Client, server: Running) -> None:
    chat = chat_of(server, [{"role": "system", "content": "Be brief."}, HELLO])
    assert ask(server, {"system": "Be brief."}, GENERATE)["digest"] == chat["digest"]
    made = ours.generate("tiny", "hello", system="Be brief.", options=FEW)
    assert made.response == chat["choices"][0]["message"]["content"]
    parts = list(ours.generate("tiny", "hello", system="Be brief.", options=FEW, stream=True))
    assert "".join(part.response or "" for part in parts) == made.response
    raw = server.post("/v1/completions", {"prompt": "hello", **SEED}).json()
    assert ask(server, {"raw": True}, GENERATE)["digest"] == raw["digest"]
    assert ours.generate("tiny", "hello", raw=True, options=FEW).response == raw["choices"][0]["text"]


def test_what_a_raw_prompt_does_not_meet_is_named(server: Running) -> None:
    options = {**FEW, "tool_choice": "required", "parallel_tool_calls": False, "chat_template_kwargs": {"a": 1}}
    body = {"prompt": "hello", "raw": True, "stream": False, "think": True, "truncate": True, "options": options}
    reply = server.post(GENERATE, body)
    assert reply.status_code == 200, reply.text
    names = "think, truncate, options.tool_choice, options.parallel_tool_calls, options.chat_template_kwargs"
    assert reply.headers[IGNORED] == names
    plain = server.post(GENERATE, {"prompt": "hello", "raw": True, "stream": False, "truncate": False, "options": FEW})
    assert IGNORED not in plain.headers
    assert plain.json()["digest"] == reply.json()["digest"]


def test_without_anything_to_answer_the_model_is_said_to_be_loaded(ours: ollama.Client, server: Running) -> None:
    assert ours.generate("tiny", keep_alive="5m").done_reason == "load"
    assert ours.generate("tiny", keep_alive=0).done_reason == "load"  # it stays in memory
    loaded = ours.chat("tiny", keep_alive=-1)
    assert (loaded.done, loaded.done_reason, loaded.message.content) == (True, "load", "")
    assert [line["done_reason"] for line in lines(server, {"model": "tiny", "messages": None})] == ["load"]


# Options


def test_options_are_read_by_the_names_of_ollama_and_by_ours(server: Running) -> None:
    theirs = {**FEW, "temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.2}
    mine = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    digest = chat_of(server, [HELLO], **mine, **penalties)["digest"]
    assert ask(server, {"options": {**theirs, **penalties}})["digest"] == digest
    assert ask(server, {"options": {**SEED, **mine, **penalties}})["digest"] == digest
    assert ask(server, {"options": {**FEW, "num_predict": 3}})["eval_count"] == 3


def test_what_clients_write_for_not_given_is_taken_so(server: Running) -> None:
    given = {**only(server, "a"), "num_predict": 3, "top_k": -1, "stop": ""}
    assert (
        ask(server, {"options": given})["digest"]
        == ask(server, {"options": {**only(server, "a"), "n_predict": 3}})["digest"]
    )
    reply = server.post(PATH, {"messages": [HELLO], "stream": False, "options": {"n_predict": 3, "seed": -1}})
    assert IGNORED not in reply.headers


@pytest.mark.parametrize("n", [-1, -2, 0])
def test_a_limit_below_one_is_none(server: Running, n: int) -> None:
    stops = {**only(server, "a"), "stop": ["aaaaa"]}
    made = ask(server, {"options": {**stops, "num_predict": n}})
    assert (made["message"]["content"], made["done_reason"], made["eval_count"]) == ("", "stop", 5)


def test_options_and_fields_without_effect_are_named(server: Running) -> None:
    def named(body: dict[str, Any], path: str = PATH) -> str | None:
        asked = {"messages": [HELLO], "prompt": "x", "input": "x", "stream": False, "options": FEW, **body}
        keep = {PATH: {"prompt", "input"}, GENERATE: {"messages", "input"}, EMBED: {"messages", "prompt", "stream"}}
        reply = server.post(path, {name: value for name, value in asked.items() if name not in keep[path]})
        assert reply.status_code == 200, reply.text
        return reply.headers.get(IGNORED)

    assert named({"truncate": True, "shift": False, "think": False}) is None
    for kept, path in (("5m", PATH), (-1, GENERATE), (0, EMBED)):
        assert named({"keep_alive": kept}, path) == "keep_alive"
    assert named({"options": {**FEW, "num_ctx": server.llm.context, "mirostat": None}}) is None
    many = {"num_ctx": 8, "mirostat": 2, "num_gpu": 1, "stream": True, "a\nb": 1}
    assert named({"options": {**FEW, **many}, "shift": True, "think": True, "width": 3}) == (
        "width, options.stream, options.num_ctx, options.a?b, options.mirostat, options.num_gpu, shift, think"
    )
    assert named({"options": {**FEW, "tfs_z": 1}}, GENERATE) == "options.tfs_z"
    assert named({"options": {"num_ctx": 8}, "other": 1}, EMBED) == "other, options.num_ctx"
    listed = named({"options": {**FEW, **{f"option_{n}": n for n in range(2000)}}}) or ""
    assert (listed.count(", "), listed[-3:]) == (MOST_NAMED, "...")


def test_formats_are_json_or_a_schema(ours: ollama.Client, server: Running) -> None:
    made = ours.chat("tiny", [HELLO], format=Answer.model_json_schema(), options={"seed": 3})
    assert Answer.model_validate_json(made.message.content or "") is not None
    assert json.loads(made.message.content or "").keys() == {"yes"}
    generated = ours.generate("tiny", "hello", format=Answer.model_json_schema(), options={"seed": 4})
    Answer.model_validate_json(generated.response or "")
    as_json = ask(server, {"format": "json"})
    assert as_json["digest"] == chat_of(server, [HELLO], response_format={"type": "json_object"})["digest"]
    assert ask(server, {"format": ""})["digest"] == chat_of(server, [HELLO])["digest"]
    assert "format" in refused(server, {"messages": [HELLO], "format": "xml"})
    assert "schema" in refused(server, {"messages": [HELLO], "format": {"type": "nothing"}})


def test_a_schema_is_closed_but_where_it_says_otherwise() -> None:
    inner = {"type": "object", "properties": {"properties": {"type": "string"}}}
    made = closed({"$defs": {"inner": inner}, "properties": {"a": {"anyOf": [{"items": {"properties": {}}}]}}})
    assert made["additionalProperties"] is made["$defs"]["inner"]["additionalProperties"] is False
    assert made["$defs"]["inner"]["properties"] == {"properties": {"type": "string"}}
    assert made["properties"]["a"]["anyOf"][0]["items"]["additionalProperties"] is False
    open_ones: list[Any] = [{"additionalProperties": True}, {"allOf": [{"properties": {}}]}, {"patternProperties": {}}]
    for one in open_ones:
        assert closed({"properties": {}, **one}) == {"properties": {}, **one}


def test_thinking_is_apart_and_can_be_turned_off(thinking: Running, server: Running) -> None:
    options = {**only(thinking, "a"), "num_predict": 4}
    with client_of(thinking) as client:
        on = client.chat("thinking", [HELLO], think=True, options=options)
        off = client.chat("thinking", [HELLO], think=False, options=options)
        assert (on.message.thinking, on.message.content) == ("aaaa", "")
        assert (off.message.thinking, off.message.content) == (None, "aaaa")
        assert client.generate("thinking", "hello", think="high", options=options).thinking == "aaaa"
        parts = list(client.chat("thinking", [HELLO], options=options, stream=True))
        assert "".join(part.message.thinking or "" for part in parts) == "aaaa"
        assert client.show("thinking").capabilities == ["completion", "tools", "thinking"]
    kept = {"role": "assistant", "content": "b", "thinking": "hm"}
    digest = ask(thinking, {"messages": [HELLO, kept, HELLO], "options": options})["digest"]
    same = [HELLO, {"role": "assistant", "content": "b", "reasoning_content": "hm"}, HELLO]
    limits = {**only(thinking, "a"), "max_tokens": 4}
    assert thinking.post(CHAT, {"messages": same, **limits}).json()["digest"] == digest
    assert server.post(PATH, {"messages": [HELLO], "options": FEW, "think": "low"}).headers[IGNORED] == "think"


def test_logprobs_are_listed_beside_the_text(ours: ollama.Client, server: Running) -> None:
    chat = chat_of(server, [HELLO], logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    whole = ask(server, {"logprobs": True, "top_logprobs": 2})
    assert whole["logprobs"] == chat[: len(whole["logprobs"])]
    assert len(whole["logprobs"]) >= 10
    found = lines(server, {"messages": [HELLO], "options": FEW, "logprobs": True, "top_logprobs": 2})
    assert [one for line in found for one in line.get("logprobs", ())] == whole["logprobs"]
    made = ours.chat("tiny", [HELLO], options=FEW, logprobs=True)
    assert made.logprobs is not None


# Tools


def test_a_call_is_made_and_its_result_is_taken_back(ours: ollama.Client, server: Running) -> None:
    def look(far: bool) -> str:
        """Look somewhere.

        Args:
            far: whether to look into the distance.
        """
        return f"the sea, {far=}"

    called = ours.chat("tiny", [HELLO], tools=[look], options=FORCED)
    assert (called.done_reason, called.message.content) == ("stop", "")
    call = (called.message.tool_calls or [])[0]
    result = look(**call.function.arguments)
    turns = [HELLO, called.message, {"role": "tool", "tool_name": "look", "content": result}]
    assert ours.chat("tiny", turns, tools=[look], options=FEW).message.content


@pytest.mark.parametrize("named", ["tool_name", "tool_call_id", "nothing"])
def test_a_turn_of_calls_is_read_as_a_chat_reads_it(server: Running, named: str) -> None:
    def call(id: str, far: bool) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": "look", "arguments": json.dumps({"far": far})}}

    chat = [
        HELLO,
        {"role": "assistant", "tool_calls": [call("call_1_0", True), call("call_1_1", False)]},
        {"role": "tool", "tool_call_id": "call_1_0", "content": "sea"},
        {"role": "tool", "tool_call_id": "call_1_1", "content": "sand"},
    ]
    names: Any = {
        "tool_name": ({"tool_name": "look"}, {"tool_name": "look"}),
        "tool_call_id": ({"tool_call_id": "call_1_0"}, {"tool_call_id": "call_1_1"}),
        "nothing": ({}, {}),
    }
    first, second = names[named]
    calls = [{"function": {"name": "look", "arguments": {"far": far}}} for far in (True, False)]
    mine = [
        HELLO,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "sea", **first},
        {"role": "tool", "content": "sand", **second},
    ]
    assert ask(server, {"messages": mine, "tools": [LOOK]})["digest"] == chat_of(server, chat, tools=[LOOK])["digest"]


def test_a_last_message_of_the_assistant_is_continued_as_in_a_chat(server: Running) -> None:
    begun = [HELLO, {"role": "assistant", "content": "It is"}]
    digest = ask(server, {"messages": begun})["digest"]
    assert digest == chat_of(server, begun)["digest"]
    assert digest != chat_of(server, begun, continue_final_message=False)["digest"]
    assert ask(server, {"messages": begun, "format": Answer.model_json_schema()})["done_reason"] in ("stop", "length")


# Long conversations


def test_a_conversation_that_is_too_long_loses_its_oldest_turns_unless_told_not_to(server: Running) -> None:
    old = [{"role": "user", "content": "word " * 300}, {"role": "assistant", "content": "yes"}]
    system = {"role": "system", "content": "Be brief."}
    shorter = ask(server, {"messages": [system, *old, HELLO]})
    assert ask(server, {"messages": [system, *old, *old, HELLO]})["digest"] == shorter["digest"]
    two = [system, {"role": "system", "content": "Be kind."}]  # all at the start are kept
    assert (
        ask(server, {"messages": [*two, *old, *old, HELLO]})["digest"]
        == ask(server, {"messages": [*two, *old, HELLO]})["digest"]
    )
    assert "context" in refused(server, {"messages": [*old, *old, HELLO], "truncate": False})
    assert "context" in refused(server, {"messages": [{"role": "user", "content": "word " * 900}]})


# Embeddings


def test_embeddings_are_those_of_openais_api(ours: ollama.Client, server: Running) -> None:
    theirs = server.post("/v1/embeddings", {"input": ["one", "two"]}).json()
    made = ours.embed("tiny", ["one", "two"])
    assert [list(vector) for vector in made.embeddings] == [one["embedding"] for one in theirs["data"]]
    assert made.prompt_eval_count == theirs["usage"]["prompt_tokens"]
    assert list(ours.embeddings("tiny", "one").embedding) == theirs["data"][0]["embedding"]
    assert len(ours.embed("tiny", "one", dimensions=8).embeddings[0]) == 8
    assert (ours.embed("tiny", "").embeddings, ours.embeddings("tiny", "").embedding) == ([], [])
    long = "word " * 2000
    cut = server.llm.detokenize(server.llm.tokenize(long)[: server.llm.context])
    assert list(ours.embed("tiny", long).embeddings[0]) == pytest.approx(list(ours.embed("tiny", cut).embeddings[0]))
    assert "context" in refused(server, {"input": long, "truncate": False}, EMBED)
    assert "input[1]" in refused(server, {"input": ["x", ""]}, EMBED)


# Models


def test_the_model_is_listed_shown_and_in_memory(ours: ollama.Client, server: Running) -> None:
    listed, running = ours.list().models[0], ours.ps().models[0]
    assert listed.model == running.model == running.name == "tiny:latest"
    assert listed.digest == running.digest == server.llm.fingerprint()
    assert listed.size == running.size
    assert (running.context_length, running.size_vram) == (server.llm.context, 0)
    assert listed.details is not None
    assert (listed.details.format, listed.details.family, listed.details.quantization_level) == ("gguf", "llama", "F32")
    shown = ours.show(listed.model or "")
    info = shown.modelinfo or {}
    assert info[f"{info['general.architecture']}.context_length"] == server.llm.context
    assert shown.template == server.llm.template.source if server.llm.template else ""
    assert f"num_ctx {server.llm.context}" in (shown.parameters or "").splitlines()
    assert shown.capabilities == ["completion", "tools"]
    assert server.post("/api/show", {"name": "tiny"}).status_code == 200
    assert "version" in server.get("/api/version").json()


def test_latest_is_the_model_itself_on_every_path(server: Running) -> None:
    assert ask(server, {"model": "tiny:latest"})["model"] == "tiny:latest"
    assert chat_of(server, [HELLO], model="tiny:latest")["model"] == "tiny:latest"
    assert "'tiny' is" in refused(server, {"model": "tiny:7b", "messages": [HELLO]}, status=404)


def test_who_asks_for_html_gets_the_page_and_others_the_word(server: Running) -> None:
    browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    page, word = server.get("/", accept=browser), server.get("/")
    assert page.text.startswith("<!doctype html>")
    assert "content-security-policy" in page.headers
    assert (word.text, word.headers["content-type"]) == ("Ollama is running", "text/plain; charset=utf-8")
    assert server.get("/", accept="application/json").text == word.text
    assert page.headers["vary"] == word.headers["vary"] == "accept"
    with server.http() as http:
        assert [http.head(path).status_code for path in ("/", "/api/tags", "/api/version")] == [200] * 3


def test_a_server_that_loads_or_is_full_says_so(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def load() -> LLM:
        assert go_on.wait(DEADLINE_S)
        return LLM(tiny, device="cpu", context=64, slots=1)

    with serving(tiny, load=load, wait=False) as server, client_of(server) as client:
        assert server.get("/api/tags").json()["models"][0]["model"] == "tiny:latest"
        assert server.get("/api/ps").json() == {"models": []}
        assert "loaded" in refused(server, {"messages": [HELLO]}, status=503)
        go_on.set()
        while server.service.state != "ready":
            time.sleep(0.001)
        monkeypatch.setattr(server.service, "most_running", 0)
        with pytest.raises(ollama.ResponseError, match="try again later") as told:
            client.chat("tiny", [HELLO])
        assert told.value.status_code == 429
        monkeypatch.undo()
        monkeypatch.setattr(LLM, "submit", lambda *_, **__: 1 / 0)
        assert "server's fault" in refused(server, {"messages": [HELLO]}, status=500)


def test_a_stream_that_fails_ends_with_a_line_that_the_client_raises(tiny: Path) -> None:
    with serving(tiny, llm={"context": 4096, "slots": 1}) as server, client_of(server) as client:
        stream = client.chat("tiny", [HELLO], options={"ignore_eos": True}, stream=True)
        next(stream)
        server.call(server.service.stop)
        with pytest.raises(ollama.ResponseError, match="stopped"):
            list(stream)


def test_a_stream_that_waits_is_kept_open_by_empty_parts(tiny: Path) -> None:
    limits = ServeLimits(keep_alive_s=0.05)
    options = {"ignore_eos": True, "num_predict": 4000}
    with (
        serving(tiny, llm={"context": 4096, "slots": 1, "mode": "eager"}, limits=limits) as server,
        client_of(server) as client,
        server.http() as http,
        http.stream("POST", PATH, json={"messages": [HELLO], "options": options}) as first,
    ):
        answered = first.iter_bytes()
        next(answered)
        waiting = client.chat("tiny", [HELLO], options={**options, "num_predict": 2}, stream=True)
        assert [next(waiting).message.content for _ in range(2)] == ["", ""]
        first.close()
        assert list(waiting)[-1].eval_count == 2


# Refusals


@pytest.mark.parametrize(
    ("call", "command"),
    [
        (lambda client: client.pull("other"), "ostinato pull NAME"),
        (lambda client: list(client.pull("other", stream=True)), "ostinato pull NAME"),
        (lambda client: client.push("tiny"), "ostinato pull NAME"),
        (lambda client: client.create("mine", from_="tiny"), "ostinato serve FILE"),
        (lambda client: client.copy("tiny", "mine"), "--alias"),
        (lambda client: client.delete("tiny"), "ostinato rm"),
    ],
    ids=["pull", "pull, streamed", "push", "create", "copy", "delete"],
)
def test_what_changes_the_models_names_our_command(
    ours: ollama.Client, call: Callable[[ollama.Client], object], command: str
) -> None:
    with pytest.raises(ollama.ResponseError, match=command) as told:
        call(ours)
    assert told.value.status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (PATH, {"messages": [{**HELLO, "images": ["aGk="]}]}, "messages[0].images: this model reads no images"),
        (GENERATE, {"prompt": "x", "images": ["aGk="]}, "images: this model reads no images"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, "suffix: "),
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "template: "),
        (GENERATE, {"prompt": "x", "context": [1, 2]}, "/api/chat"),
        (GENERATE, {"prompt": "x", "raw": True, "system": "y"}, "system: "),
        (PATH, {"messages": [HELLO], "options": {"temperature": "hot"}}, "options.temperature"),
        (PATH, {"messages": [HELLO], "options": {"tool_choice": "required"}}, "there are no tools"),
        (PATH, {"messages": [HELLO], "tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        (PATH, {"messages": [{"role": "user", "content": [1]}]}, "messages[0].content"),
        (PATH, {"messages": [{"content": "x"}]}, "messages[0].role is missing"),
        (PATH, {"messages": [HELLO], "think": "much"}, "think"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(
    server: Running, path: str, body: dict[str, Any], words: str
) -> None:
    assert words in refused(server, body, path)


FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize("headers", [{}, FORM])
def test_a_body_that_curl_was_given_no_type_for_is_read(server: Running, headers: dict[str, str]) -> None:
    body = json.dumps({"model": "tiny", "messages": [HELLO], "options": FEW, "stream": False}).encode()
    with server.http(headers=headers) as http:
        reply = http.post(PATH, content=body)
        assert http.post("/v1/chat/completions", content=body).status_code == 415
    assert (reply.status_code, reply.json()["done"]) == (200, True)
    assert f'ostinato_requests_total{{outcome="length",path="{PATH}"' in server.get("/metrics").text


@pytest.mark.parametrize("page", [{"origin": "null"}, {"origin": "https://a.example"}, {"sec-fetch-site": "none"}])
def test_a_form_of_a_web_page_is_refused(server: Running, page: dict[str, str]) -> None:
    for kind in ({}, FORM):
        with server.http(headers={**kind, **page}) as http:
            assert http.post(GENERATE, content=b"{}").status_code == 415


def test_errors_have_ollamas_form_on_all_its_paths(ours: ollama.Client, server: Running) -> None:
    assert server.get("/api/nowhere").json() == {"error": "there is no /api/nowhere here; /docs lists what there is"}
    assert server.get(PATH).status_code == 405
    with server.http() as http:
        plain = http.post(PATH, content=b"{}", headers={"content-type": "text/plain"})
        assert (plain.status_code, "Content-Type" in plain.json()["error"]) == (415, True)
        broken = http.post(PATH, content=b"{", headers={"content-type": "application/json"})
    assert "no JSON" in broken.json()["error"]
    with pytest.raises(ollama.ResponseError, match="not served here") as told:
        ours.chat("other", [HELLO])
    assert told.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="not served here"):
        list(ours.chat("other", [HELLO], stream=True))
