"""What the server takes although OpenAI's API does not say so, and what it says of the rest: each line of the list in
docs/serving.md."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ostinato.other_engines import OTHER_ENGINES
from ostinato.serve.chat import conversation
from ostinato.serve.conversation import thinking_options
from ostinato.serve.shapes import ALIASES, FORMAT_ALIASES, ChatBody, CompletionBody, GenerationBody
from tests.cli import tiny_model
from tests.models import test_retrieval, tiny_encoders
from tests.serve.running import Running, serving

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]
FEW: Any = {"max_tokens": 8, "seed": 3, "temperature": 1.0}
IGNORED = "x-ostinato-ignored"


def answered(server: Running, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    made: dict[str, Any] = reply.json()
    return made


def refusal(server: Running, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    reply = server.post(path, body)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


# Paths, methods and hosts


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/health", "/live", "/ready", "/metrics", "/slots"])
def test_head_is_answered_where_get_is_and_without_a_body(server: Running, path: str) -> None:
    with server.http() as http:
        head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert int(head.headers["content-length"]) > 0


def test_head_is_refused_where_get_is(server: Running) -> None:
    with server.http() as http:
        assert http.head("/v1/models/tiny").status_code == 200
        assert (http.head("/nowhere").status_code, http.head(CHAT).status_code) == (404, 405)
    assert {line["method"] for line in server.log} >= {"HEAD"}


def test_chats_and_models_are_found_without_v1(server: Running) -> None:
    body = {"messages": HELLO, **FEW}
    assert answered(server, body, "/chat/completions")["digest"] == answered(server, body)["digest"]
    assert server.get("/models").json() == server.get("/v1/models").json()


@pytest.mark.parametrize("host", ["host.docker.internal:8000", "HOST.docker.internal", "host.containers.internal"])
def test_containers_reach_the_server_by_their_name_for_this_machine(server: Running, host: str) -> None:
    assert server.get("/v1/models", host=host).status_code == 200
    assert server.get("/v1/models", host=f"{host.partition(':')[0]}.example").status_code == 403


def test_a_preflight_is_told_the_flag(server: Running) -> None:
    asking = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    with server.http(headers=asking) as http:
        reply = http.options(CHAT)
    assert reply.status_code == 403
    assert "--cors https://chat.example" in reply.json()["error"]["message"]
    assert "access-control-allow-origin" not in reply.headers


# Fields


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("more", [{"seed": -1}, {"top_k": -1}, {"max_tokens": -1}, {"stop": ""}, {"n_predict": -1}])
def test_what_clients_write_for_not_given_is_as_if_it_were_not(
    server: Running, path: str, more: dict[str, Any]
) -> None:
    body = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    # The end of an answer is certain, so that one without a limit is short.
    body |= {"temperature": 0, "min_tokens": 4, "logit_bias": {str(id): 100 for id in server.llm.tokenizer.eog_ids}}
    made, without = (answered(server, given, path) for given in ({**body, **more}, body))
    assert made["choices"] == without["choices"]
    assert made["seed"] >= 0


def test_no_seed_is_another_one_each_time(server: Running) -> None:
    first, second = (answered(server, {"messages": HELLO, "max_tokens": 1, "seed": -1})["seed"] for _ in range(2))
    assert first != second


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/v1/responses"])
def test_fields_that_change_no_token_are_accepted_and_named(server: Running, path: str) -> None:
    body: dict[str, Any] = {"seed": 3}
    body |= {CHAT: {"messages": HELLO}, COMPLETION: {"prompt": "hello"}}.get(path, {"input": "hello"})
    body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 8
    plain = server.post(path, body)
    neutral = server.post(path, {**body, "cache_prompt": True, "priority": 0, "timings_per_token": False})
    given = {"cache_prompt": False, "keep_alive": "5m", "priority": 5, "timings_per_token": True}
    noted = server.post(path, {**body, **given})
    assert IGNORED not in plain.headers | neutral.headers
    assert noted.headers[IGNORED] == "cache_prompt, keep_alive, priority, timings_per_token"
    assert plain.json()["digest"] == neutral.json()["digest"] == noted.json()["digest"]


OFF: dict[str, Any] = {
    "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1,
    "xtc_probability": 0.0, "xtc_threshold": 0.1, "top_n_sigma": -1, "do_sample": True, "num_beams": 1, "tfs": 1,
}  # fmt: skip


def test_samplers_of_other_engines_are_accepted_while_they_are_off(server: Running) -> None:
    asked = {"messages": HELLO, **FEW}
    assert answered(server, {**asked, **OFF})["digest"] == answered(server, asked)["digest"]


@pytest.mark.parametrize("name", ["dry_multiplier", "mirostat", "typical_p", "xtc_probability", "num_beams", "tfs"])
def test_samplers_of_other_engines_are_refused_while_they_are_on(server: Running, name: str) -> None:
    assert refusal(server, {"messages": HELLO, **FEW, name: 0.5})["param"] == name


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"functions": [{"name": "f"}]}, "send tools"),
        ({"function_call": {"name": "f"}}, "send tool_choice"),
        ({"enable_thinking": False}, "send chat_template_kwargs"),
        ({"think": True}, "send reasoning_effort"),
        ({"thinking": {"type": "enabled"}}, "send reasoning_effort"),
        ({"options": {"num_ctx": 5}}, "put its fields into the body itself"),
        ({"extra_body": {}}, "put its fields into the body itself"),
    ],
)
def test_a_field_of_another_api_is_answered_with_what_to_send(
    server: Running, given: dict[str, Any], says: str
) -> None:
    error = refusal(server, {"messages": HELLO, **FEW, **given})
    assert error["param"] == next(iter(given))
    assert says in error["message"]


def test_effort_and_verbosity_are_named_where_the_template_has_no_variable_for_them(server: Running) -> None:
    asked = {"messages": HELLO, **FEW}
    for body, named in (
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"reasoning_effort": "high", "verbosity": "high", "stream": True}, "reasoning_effort, verbosity"),
    ):
        reply = server.post(CHAT, {**asked, **body})
        assert (reply.status_code, reply.headers[IGNORED]) == (200, named)
    assert IGNORED not in server.post(CHAT, {**asked, "verbosity": "medium"}).headers


def test_whether_to_think_reaches_a_template_that_knows_it() -> None:
    for source, thinks, wanted, options in (
        ("{{ enable_thinking }}", True, True, {"enable_thinking": True}),
        ("{%- if thinking %}<think>", True, True, {"thinking": True}),
        ("{%- if thinking %}<think>", True, False, {"thinking": False}),
        ("{%- if message.thinking or thinking_budget %}{% if thinking_budget %}", True, True, {}),
        ("thinking", True, False, None),
        ("", False, False, {}),
    ):
        format = SimpleNamespace(reasoning=thinks or None)
        llm: Any = SimpleNamespace(template=SimpleNamespace(source=source), chat_format=format)
        assert thinking_options(llm, wanted) == options


def test_effort_and_verbosity_reach_a_template_that_knows_them() -> None:
    for source, body, options in (
        ("{{ reasoning_effort }}", {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ("{{ enable_thinking }}", {"reasoning_effort": "none"}, {"enable_thinking": False}),
        ("{%- if not thinking is defined %}", {"reasoning_effort": "low"}, {"thinking": True}),
        ("{% if a %}{%- elif thinking %}", {"reasoning_effort": "minimal"}, {"thinking": False}),
        ("{{ verbosity }}", {"verbosity": "low"}, {"verbosity": "low"}),
        ("{{ verbosity }}", {"verbosity": "low", "chat_template_kwargs": {"verbosity": "x"}}, {"verbosity": "x"}),
    ):
        llm: Any = SimpleNamespace(template=SimpleNamespace(source=source))
        asked, ignored = conversation(llm, ChatBody.model_validate({"messages": HELLO, **body}))
        assert (asked.template_options, ignored) == (options, [])


def test_reasoning_is_another_name_and_null_content_is_empty() -> None:
    messages = [
        {"role": "assistant", "content": "a", "reasoning": "why"},
        {"role": "assistant", "content": None, "reasoning_content": "this", "reasoning": "not this"},
        {"role": "user", "content": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ]
    made = [message.for_template() for message in ChatBody.model_validate({"messages": messages}).messages]
    assert made[0] == {"role": "assistant", "content": "a", "reasoning_content": "why"}
    assert made[1] == {"role": "assistant", "content": "", "reasoning_content": "this"}
    assert made[2] == {"role": "user", "content": ""}
    assert "content" not in made[3]


def test_a_conversation_with_null_content_is_answered(server: Running) -> None:
    null, empty = ([*HELLO, {"role": "assistant", "content": content}, *HELLO] for content in (None, ""))
    assert (
        answered(server, {"messages": null, **FEW})["digest"] == answered(server, {"messages": empty, **FEW})["digest"]
    )
    assert refusal(server, {"messages": [{"role": "user"}]})["message"] == "messages[0] (user) has no content"


# Aliases

SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
WRAPPED: Any = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
REGEX: Any = {"type": "regex", "regex": "a{3}b"}
CHOICE: Any = {"type": "choice", "choice": ["yes", "no"]}
GRAMMAR: Any = {"type": "grammar", "grammar": 'start: "ja" | "nein"'}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"n_predict": 4}, {"max_tokens": 4}),
        ({"grammar": GRAMMAR["grammar"]}, {"response_format": GRAMMAR}),
        ({"grammar": ""}, {}),
        ({"json_schema": SCHEMA}, {"response_format": WRAPPED}),
        ({"guided_json": SCHEMA}, {"response_format": WRAPPED}),
        ({"guided_json": json.dumps(SCHEMA)}, {"response_format": WRAPPED}),
        ({"guided_regex": "a{3}b"}, {"response_format": REGEX}),
        ({"guided_choice": ["yes", "no"]}, {"response_format": CHOICE}),
        ({"guided_grammar": GRAMMAR["grammar"]}, {"response_format": GRAMMAR}),
        ({"structured_outputs": {"json": SCHEMA}}, {"response_format": WRAPPED}),
        ({"structured_outputs": {"regex": "a{3}b", "json_object": False}}, {"response_format": REGEX}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"response_format": CHOICE}),
        ({"structured_outputs": {"grammar": GRAMMAR["grammar"]}}, {"response_format": GRAMMAR}),
        ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}),
        ({"structured_outputs": {"disable_any_whitespace": True}}, {}),
        ({"guided_regex": "a{3}b", "response_format": {"type": "text"}}, {"response_format": REGEX}),
    ],
)
def test_a_field_of_another_engine_is_ours_by_another_name(
    path: str, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    kind: type[GenerationBody] = ChatBody if path == CHAT else CompletionBody
    whole = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    made, expected = (kind.model_validate({**whole, "seed": 3, **given}).sampling() for given in (theirs, ours))
    assert made == expected


def test_an_answer_follows_a_format_by_another_name(server: Running) -> None:
    made = answered(server, {"messages": HELLO, "guided_choice": ["yes", "no"], **FEW})
    assert made["choices"][0]["message"]["content"] in ("yes", "no")
    tools = [{"type": "function", "function": {"name": "look"}}]
    answer = answered(server, {"messages": HELLO, "json_schema": SCHEMA, "tools": tools, **FEW, "max_tokens": 64})
    assert "content" in answer["choices"][0]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"max_tokens": 5, "n_predict": 6}, "n_predict"),
        ({"response_format": REGEX, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_choice": [""]}, "guided_choice"),
    ],
)
def test_two_names_with_two_values_are_refused(server: Running, body: dict[str, Any], param: str) -> None:
    error = refusal(server, {"messages": HELLO, **body})
    assert error["param"] == param
    assert param.rpartition(".")[2] in error["message"]


@pytest.mark.parametrize(
    ("path", "equal", "different", "names"),
    [
        ("/v1/messages", {"stop": "a", "stop_sequences": ["a"]}, {"stop": ["b"], "stop_sequences": ["a"]}, "stop"),
        ("/v1/messages", {"stop": "", "stop_sequences": ["a"]}, {"stop": ["a", "b"], "stop_sequences": ["a"]}, "stop"),
        (CHAT, {"max_completion_tokens": 3}, {"max_completion_tokens": 4}, "max_completion_tokens"),
        ("/api/chat", {"num_predict": 3, "max_tokens": 3}, {"num_predict": 3, "max_tokens": 4}, "num_predict"),
        ("/api/chat", {"num_predict": 3, "n_predict": 3}, {"num_predict": -1, "n_predict": 4}, "num_predict"),
    ],
)
def test_two_names_of_one_field_may_be_given_with_one_value(
    server: Running, path: str, equal: dict[str, Any], different: dict[str, Any], names: str
) -> None:
    def answered_with(given: dict[str, Any]) -> Any:
        more = {"options": given, "stream": False} if path == "/api/chat" else {"max_tokens": 3, **given}
        return server.post(path, {"messages": HELLO, **more})

    assert answered_with(equal).status_code == 200
    refused = answered_with(different)
    assert refused.status_code == 400
    other = {"stop": "stop_sequences"}.get(names, "max_tokens")
    assert re.search(rf"{names} is .+ and {other} is .+; they are two names of one field", refused.text)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_format_that_cannot_be_followed_is_named_as_it_was_given(server: Running, path: str) -> None:
    body = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    for more, param in (
        ({"guided_regex": "(unclosed"}, "guided_regex"),
        ({"grammar": "start: nowhere"}, "grammar"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
        ({"response_format": {"type": "regex", "regex": "(unclosed"}}, "response_format"),
    ):
        assert refusal(server, {**body, **more}, path)["param"] == param


def test_aliases_are_those_that_python_and_the_command_line_answer() -> None:
    for alias, name in {**ALIASES, **FORMAT_ALIASES}.items():
        if alias != name:
            assert OTHER_ENGINES[alias] == f"it is called {name} here"
    assert "cache_prompt" in OTHER_ENGINES


def test_every_answer_has_the_mark_of_the_configuration(server: Running) -> None:
    marks = {answered(server, {"messages": HELLO, **FEW})["system_fingerprint"]}
    marks |= {answered(server, {"prompt": "x", **FEW}, COMPLETION)["system_fingerprint"]}
    events = server.post(CHAT, {"messages": HELLO, **FEW, "stream": True}).text.split("\n\n")
    marks |= {json.loads(event[6:])["system_fingerprint"] for event in events if event.startswith("data: {")}
    assert len(marks) == 1
    assert re.fullmatch(r"fp_[0-9a-f]{12}", marks.pop())


# Tools


def test_a_chat_may_allow_some_of_its_tools(server: Running) -> None:
    tools: Any = [{"type": "function", "function": {"name": name}} for name in ("look", "listen")]
    one = {"mode": "required", "tools": [{"type": "function", "function": {"name": "listen"}}]}
    body = {"messages": HELLO, "tools": tools, "tool_choice": {"type": "allowed_tools", "allowed_tools": one}, **FEW}
    body |= {"max_tokens": 200, "parallel_tool_calls": False}
    message = answered(server, body)["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["listen"]
    one["tools"] = [{"type": "function", "function": {"name": "smell"}}]
    assert refusal(server, body)["param"] == "tool_choice"
    one["tools"] = [{"type": "function", "function": {"name": "listen"}}]
    tools[1]["function"]["parameters"] = {"type": "object", "properties": {"a": {"type": "text"}}}
    assert refusal(server, body)["param"] == "tools[1].function.parameters"


def test_a_forced_answer_may_be_several_calls(server: Running) -> None:
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    semicolon = str(server.llm.tokenize(";")[0])
    body = {"messages": HELLO, "tools": [look], "tool_choice": "required", **FEW, "max_tokens": 120}
    calls = answered(server, {**body, "logit_bias": {semicolon: 100}})["choices"][0]["message"]["tool_calls"]
    assert len(calls) > 2
    assert {call["function"]["name"] for call in calls} == {"look"}
    alone = answered(server, {**body, "logit_bias": {semicolon: 100}, "parallel_tool_calls": False})
    assert len(alone["choices"][0]["message"]["tool_calls"]) == 1


# Continuing a message

BEGUN: Any = [*HELLO, {"role": "assistant", "content": "The sea is"}]


def test_a_last_message_of_the_assistant_is_continued(server: Running) -> None:
    prompt = tiny_model.prompt_of("hello") + "The sea is"
    ids = server.llm.tokenizer.encode_rendered(prompt)
    expected = answered(server, {"prompt": ids, **FEW}, COMPLETION)["choices"][0]["text"]
    parts = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "The sea is"}]}]
    for more in (
        {},
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"add_generation_prompt": False},
        {"messages": parts},
        {"tools": [{"type": "function", "function": {"name": "look"}}], "tool_choice": "none"},
    ):
        made = answered(server, {"messages": BEGUN, **FEW, **more})
        assert made["choices"][0]["message"]["content"] == expected
        assert made["usage"]["prompt_tokens"] == len(ids)
    shown = server.post("/apply-template", {"messages": BEGUN, "continue_final_message": True}).json()
    assert shown == {"prompt": prompt}


def test_a_last_message_of_the_assistant_is_a_turn_of_its_own_where_that_is_said_or_needed(server: Running) -> None:
    whole = server.post("/apply-template", {"messages": BEGUN}).json()["prompt"]
    n_tokens = len(server.llm.tokenizer.encode_rendered(whole))
    for more in ({"continue_final_message": False}, {"add_generation_prompt": True}, {"guided_choice": ["yes"]}):
        assert answered(server, {"messages": BEGUN, **FEW, **more})["usage"]["prompt_tokens"] == n_tokens


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
        ({"messages": HELLO, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": BEGUN, "continue_final_message": True, "guided_choice": ["x"]}, "continue_final_message"),
        ({"messages": BEGUN, "chat_template_kwargs": {"continue_final_message": False}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_continued_is_refused(server: Running, body: dict[str, Any], param: str) -> None:
    error = refusal(server, body)
    assert (error["param"], param in error["message"]) == (param, True)


# Images, schemas, tokens


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image"])
def test_an_image_is_told_that_the_model_reads_none(server: Running, kind: str) -> None:
    content = [{"type": "text", "text": "what is it?"}, {"type": kind, kind: {"url": "data:,"}}]
    error = refusal(server, {"messages": [{"role": "user", "content": content}]})
    assert error["message"] == f"messages[0].content[1].type is '{kind}'; this model reads no images"
    error = refusal(server, {"input": [{"role": "user", "content": content[1:]}]}, "/v1/responses")
    assert "this model reads no images" in error["message"]


def test_keywords_of_a_schema_are_followed_without_effect_or_named(server: Running) -> None:
    tags = {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"tags": tags}}
    error = refusal(server, {"messages": HELLO, "guided_json": schema})
    assert "properties.tags has uniqueItems" in error["message"]
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    error = refusal(server, {"messages": HELLO, "tools": [tool], "tool_choice": "required"})
    assert error["param"] == "tools[0].function.parameters"
    assert "properties.tags has uniqueItems" in error["message"]
    made = answered(server, {"messages": HELLO, "guided_json": {"enum": ["yes"], "format": "our-own"}, **FEW})
    assert made["choices"][0]["message"]["content"] == '"yes"'


def test_tokenize_takes_a_prompt_as_vllm_does(server: Running) -> None:
    ours = server.post("/tokenize", {"content": "the sea", "add_special": True, "with_pieces": True}).json()
    theirs = server.post("/tokenize", {"prompt": "the sea", "return_token_strs": True}).json()
    assert theirs == {
        **{name: ours[name] for name in ("tokens", "count", "max_model_len")},
        "token_strs": ours["pieces"],
    }
    assert refusal(server, {}, "/tokenize")["param"] == "content"
    assert "both given" in refusal(server, {"prompt": "a", "content": "a"}, "/tokenize")["message"]
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == server.llm.tokenize("")


# Ranking

DOCUMENTS = ["it is about time", "a", "there is no other time"]


@pytest.fixture(scope="module")
def ranker(tiny_files: Path) -> Iterator[Running]:
    with serving(tiny_encoders.gguf("bert-rank", tiny_files)) as running:
        yield running


def test_documents_are_ranked_by_a_model_that_ranks(ranker: Running) -> None:
    query = "what is it about?"
    logits = ranker.llm.rank(query, DOCUMENTS)[:, 0].tolist()
    relevance = [1 / (1 + math.exp(-logit)) for logit in logits]
    order = sorted(range(3), key=lambda index: -logits[index])
    made = answered(ranker, {"query": query, "documents": DOCUMENTS}, "/v1/rerank")
    assert [one["index"] for one in made["results"]] == order
    assert [one["document"] for one in made["results"]] == [{"text": DOCUMENTS[index]} for index in order]
    assert [one["relevance_score"] for one in made["results"]] == pytest.approx([relevance[index] for index in order])
    assert (made["object"], made["model"]) == ("list", "bert-rank")
    assert made["usage"]["total_tokens"] > 0
    objects = [{"text": text} for text in DOCUMENTS]
    short = {"query": query, "documents": objects, "top_n": 1, "return_documents": False, "model": "bert-rank"}
    for path in ("/rerank", "/v2/rerank"):
        best = answered(ranker, short, path)["results"]
        assert best == [{"index": order[0], "relevance_score": made["results"][0]["relevance_score"]}]


def test_texts_to_rank_are_tokenized_once(ranker: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(ranker.llm.tokenizer)
    encode, n_calls = kind.encode_pair, 0

    def counted(*words: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        return encode(*words)

    monkeypatch.setattr(kind, "encode_pair", counted)
    answered(ranker, {"query": "time", "documents": DOCUMENTS * 7}, "/v1/rerank")
    assert n_calls == 21


def test_more_documents_than_are_ranked_at_once_have_the_same_scores(ranker: Running) -> None:
    many = DOCUMENTS * 7
    results = answered(ranker, {"query": "time", "documents": many}, "/v1/rerank")["results"]
    scores = {one["index"]: one["relevance_score"] for one in results}
    assert len(scores) == len(many)
    assert [scores[index] for index in range(3, 21)] == pytest.approx([scores[index % 3] for index in range(3, 21)])


def test_documents_are_ranked_by_the_words_of_a_language_model(tmp_path: Path) -> None:
    with serving(test_retrieval.by_words(tmp_path)) as running:
        for name in (None, "code"):
            logits = running.llm.rank("time", DOCUMENTS, prompt=name)[:, 0].tolist()
            made = answered(running, {"query": "time", "documents": DOCUMENTS, "prompt_name": name}, "/v1/rerank")
            scores = {one["index"]: one["relevance_score"] for one in made["results"]}
            assert [scores[i] for i in range(3)] == pytest.approx([1 / (1 + math.exp(-logit)) for logit in logits])
        body = {"query": "time", "documents": DOCUMENTS, "prompt_name": "cod"}
        assert refusal(running, body, "/v1/rerank")["param"] == "prompt_name"


def test_embeddings_leave_a_prompt_out_where_the_files_say_so(tmp_path: Path) -> None:
    path = test_retrieval.as_sentence_transformer("qwen3", tmp_path)
    test_retrieval.state_pooling(path, "mean", include_prompt=False)
    with serving(path) as running:
        made = answered(running, {"input": DOCUMENTS, "prompt_name": "query"}, "/v1/embeddings")["data"]
        wanted = running.llm.embed(DOCUMENTS, prompt="query")
    np.testing.assert_allclose([one["embedding"] for one in made], wanted, atol=1e-5)


def test_what_cannot_be_ranked_is_told_why(server: Running, ranker: Running) -> None:
    error = refusal(server, {"query": "a", "documents": ["b"]}, "/v1/rerank")
    assert (error["param"], "does not rank" in error["message"]) == ("model", True)
    for body, param in (
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": ["b", "time " * 2000]}, "documents[1]"),
        ({"query": "a", "documents": ["b"] * 2049}, "documents"),
    ):
        assert refusal(ranker, body, "/v1/rerank")["param"] == param
