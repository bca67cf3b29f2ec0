"""`/v1/messages` through the real client: answers are those of chats, and every event has the client's own type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import BaseModel, TypeAdapter

from ostinato import LLM
from ostinato.serve.settings import ServeLimits
from tests.serve.running import DEADLINE_S, Running, only, serving

PATH, CHAT, COUNT = "/v1/messages", "/v1/chat/completions", "/v1/messages/count_tokens"
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HELLO: Any = {"role": "user", "content": "hello"}
BEGUN: Any = {"role": "assistant", "content": "The sea is"}
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}
FEW: Any = {"max_tokens": 12, "seed": 3}
LOOK: Any = {
    "name": "look",
    "description": "Look somewhere.",
    "input_schema": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
}
CHAT_LOOK: Any = {
    "type": "function",
    "function": {"name": "look", "description": "Look somewhere.", "parameters": LOOK["input_schema"]},
}
USE: Any = {"type": "tool_use", "id": "call_1", "name": "look", "input": {"far": True}}
CALLED: Any = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"far": true}'}}
FOR_A_WHILE: Any = {"cache_control": {"type": "ephemeral"}}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def client_of(server: Running, **words: Any) -> anthropic.Anthropic:
    given = {"api_key": "none", "max_retries": 0, "timeout": DEADLINE_S, **words}
    return anthropic.Anthropic(base_url=server.url, **given)


@pytest.fixture
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as made:
        yield made


def ask(server: Running, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """A whole message, which must be of the client's type."""
    reply = server.post(PATH, {"messages": [HELLO], **FEW, **body}, **headers)
    assert reply.status_code == 200, reply.text
    Message.model_validate(reply.json())
    message: dict[str, Any] = reply.json()
    return message


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream but for pings: each of the client's type, named before its data."""
    found = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "error":
            ErrorResponse.model_validate(event)
        elif event["type"] != "ping":
            assert EVENT.validate_python(event).type == event["type"]
        found.append(event)
    return found


def stream(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = server.post(PATH, {"messages": [HELLO], **FEW, **body, "stream": True})
    assert reply.status_code == 200, reply.text
    return events(reply.text)


def chat_digest(server: Running, messages: list[Any], **more: Any) -> str:
    reply = server.post(CHAT, {"messages": messages, **FEW, **more})
    assert reply.status_code == 200, reply.text
    digest: str = reply.json()["digest"]
    return digest


def refused(server: Running, body: dict[str, Any], path: str = PATH, status: int = 400) -> str:
    """What an error says, which must be of the client's type."""
    reply = server.post(path, body)
    assert reply.status_code == status, reply.text
    error = ErrorResponse.model_validate(reply.json())
    assert error.request_id == reply.headers["request-id"] == reply.headers["x-request-id"]
    if status == 400:
        assert error.error.type == "invalid_request_error"
    return error.error.message


# Answers


def test_a_message_is_the_answer_of_a_chat(client: anthropic.Anthropic, server: Running) -> None:
    chat = server.post(CHAT, {"messages": [HELLO], **FEW}).json()
    made = client.messages.create(model="tiny", messages=[HELLO], max_tokens=12, extra_body={"seed": 3})
    assert [block.text for block in made.content if block.type == "text"] == [chat["choices"][0]["message"]["content"]]
    assert (made.type, made.role, made.model) == ("message", "assistant", "tiny")
    assert (made.stop_reason, made.stop_sequence) == ("max_tokens", None)
    usage = made.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == chat["usage"]["prompt_tokens"]
    assert usage.output_tokens == 12
    assert (made.model_extra or {})["digest"] == chat["digest"]
    assert made._request_id is not None
    assert made.id == f"msg_{made._request_id}"


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        ({}, ["text_delta"]),
        ({"tools": [LOOK], "tool_choice": ONE_CALL, "max_tokens": 150}, ["input_json_delta"]),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"enum": ["yes"]}}}}, ["text_delta"]),
    ],
    ids=["text", "call", "schema"],
)
def test_a_stream_has_its_events_in_order_and_joins_to_the_whole(
    server: Running, body: dict[str, Any], kinds: list[str]
) -> None:
    whole = ask(server, body)
    found = stream(server, body)
    assert [event["type"] for event in found[:3]] == ["message_start", "content_block_start", "ping"]
    assert [event["type"] for event in found[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = found[3:-3]
    assert {event["type"] for event in deltas} == {"content_block_delta"}
    assert list(dict.fromkeys(event["delta"]["type"] for event in deltas)) == kinds
    started, ended = found[0]["message"], found[-2]
    assert (started["content"], started["stop_reason"], started["usage"]["output_tokens"]) == ([], None, 0)
    for name in ("digest", "seed"):
        assert ended[name] == whole[name]
    assert ended["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert ended["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    for usage in (started["usage"], ended["usage"]):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == n_input(whole)


def n_input(message: dict[str, Any]) -> int:
    n: int = message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    return n


def test_the_client_joins_a_stream_to_the_same_message(client: anthropic.Anthropic, server: Running) -> None:
    words: Any = {"model": "tiny", "messages": [HELLO], "max_tokens": 12, "extra_body": {"seed": 3}}
    with client.messages.stream(**words) as streamed:
        said = "".join(streamed.text_stream)
        final = streamed.get_final_message()
    whole = client.messages.create(**words)
    assert [block.to_dict() for block in whole.content] == [text(said)]
    assert [(block.type, getattr(block, "text", "")) for block in final.content] == [("text", said)]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


class Answer(BaseModel):
    yes: bool


def test_parse_of_the_client_works(client: anthropic.Anthropic) -> None:
    made = client.messages.parse(model="tiny", messages=[HELLO], max_tokens=50, output_format=Answer)
    assert isinstance(made.parsed_output, Answer)


def test_how_an_answer_ends_is_said(server: Running) -> None:
    bias = {str(id): 100 for id in server.llm.tokenizer.eog_ids}
    made = ask(server, {"temperature": 0, "logit_bias": bias})
    assert (made["stop_reason"], made["content"]) == ("end_turn", [text("")])
    only_a = {**only(server, "a"), "max_tokens": 2000}
    assert ask(server, only_a)["stop_reason"] == "model_context_window_exceeded"
    for stops, met in ((["x", "aaa"], "aaa"), (["aaaa", "aa"], "aa")):
        made = ask(server, {**only_a, "stop_sequences": stops})
        assert (made["stop_reason"], made["stop_sequence"], made["content"]) == ("stop_sequence", met, [text("")])
        assert stream(server, {**only_a, "stop_sequences": stops})[-2]["delta"] == {
            "stop_reason": "stop_sequence", "stop_sequence": met,
        }  # fmt: skip


def test_sampling_is_that_of_a_chat(server: Running) -> None:
    chosen = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    made = ask(server, {**chosen, "metadata": {"user_id": "x"}, "service_tier": "auto"})
    assert made["digest"] == chat_digest(server, [HELLO], **chosen)
    stopped = ask(server, {"stop_sequences": ["a", "b"]})
    assert stopped["digest"] == chat_digest(server, [HELLO], stop=["a", "b"])
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    made = ask(server, {"output_config": {"format": {"type": "json_schema", "schema": schema}}})
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert made["digest"] == chat_digest(server, [HELLO], response_format=format)


# Conversations

SYSTEM: Any = [
    text("x-anthropic-billing-header: cc_version=1; cch=0;"),
    text("be brief", **FOR_A_WHILE),
    text("be kind"),
]


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        ({"messages": [{"role": "user", "content": [text("hello", **FOR_A_WHILE)]}]}, [HELLO]),
        ({"system": "be brief"}, [{"role": "system", "content": "be brief"}, HELLO]),
        ({"system": SYSTEM}, [{"role": "system", "content": "be brief\nbe kind"}, HELLO]),
        ({"system": SYSTEM[:1]}, [HELLO]),
        (
            {"messages": [{"role": "user", "content": [text("a"), text("b")]}]},
            [{"role": "user", "content": "a\nb"}],
        ),
        ({"messages": [HELLO, HELLO]}, [{"role": "user", "content": "hello\n\nhello"}]),
        (
            {
                "messages": [
                    HELLO,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "redacted_thinking", "data": "x"},
                            text("I "), text("look."), {**USE, **FOR_A_WHILE},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "call_1", "content": [text("a"), text("sea")]},
                            text("and now?"),
                        ],
                    },
                ]
            },
            [
                HELLO,
                {"role": "assistant", "content": "I look.", "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "call_1", "content": "a\nsea"},
                {"role": "user", "content": "and now?"},
            ],
        ),
        (
            {
                "messages": [
                    HELLO,
                    {"role": "assistant", "content": [USE, {**USE, "id": "call_2"}, {**USE, "id": "call_3"}]},
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "call_1", "content": "fog", "is_error": True},
                            {"type": "tool_result", "tool_use_id": "call_2", "content": "sea", "is_error": False},
                            {"type": "tool_result", "tool_use_id": "call_3"},
                        ],
                    },
                ]
            },
            [
                HELLO,
                {"role": "assistant", "tool_calls": [CALLED, {**CALLED, "id": "call_2"}, {**CALLED, "id": "call_3"}]},
                {"role": "tool", "tool_call_id": "call_1", "content": "Error: fog"},
                {"role": "tool", "tool_call_id": "call_2", "content": "sea"},
                {"role": "tool", "tool_call_id": "call_3", "content": ""},
            ],
        ),
    ],
    ids=["block", "system", "system blocks", "billing alone", "blocks", "one role twice", "turn", "results"],
)  # fmt: skip
def test_blocks_become_the_messages_of_a_chat(server: Running, body: dict[str, Any], messages: list[Any]) -> None:
    assert ask(server, body)["digest"] == chat_digest(server, messages)
    with_tools = ask(server, {**body, "tools": [{**LOOK, **FOR_A_WHILE}]})
    assert with_tools["digest"] == chat_digest(server, messages, tools=[CHAT_LOOK])
    counted = server.post(COUNT, {"messages": [HELLO], **body, "tools": [LOOK]})
    assert MessageTokensCount.model_validate(counted.json()).input_tokens == n_input(with_tools)


def test_a_conversation_of_five_turns_finds_its_prefix_in_memory(client: anthropic.Anthropic) -> None:
    """As a command-line coder sends it: a header that changes with each turn, and the marker on the last block."""
    messages: list[Any] = []
    cached, fresh = [], []
    for turn in range(5):
        for message in messages:
            for block in message["content"]:
                block.pop("cache_control", None)
        messages.append(
            {"role": "user", "content": [text(f"turn {turn} of a conversation that goes on", **FOR_A_WHILE)]}
        )
        system: Any = [text(f"x-anthropic-billing-header: cch={turn:05x};"), text("Be brief. " * 5, **FOR_A_WHILE)]
        made = client.messages.create(
            model="tiny", system=system, messages=messages, max_tokens=12, tools=[LOOK], extra_body={"seed": turn}
        )
        messages.append({"role": "assistant", "content": [block.to_dict() for block in made.content]})
        cached.append(made.usage.cache_read_input_tokens or 0)
        fresh.append(made.usage.input_tokens)
    assert all(before < after for before, after in pairwise(cached)), cached
    assert cached[1] > 300  # the tools and the system prompt among them
    assert max(fresh[1:]) < 100, fresh


def test_a_last_message_of_the_assistant_is_continued(server: Running) -> None:
    made = ask(server, {"messages": [HELLO, BEGUN]})
    assert made["digest"] == chat_digest(server, [HELLO, BEGUN], continue_final_message=True)
    parts = [{"type": "text", "text": "The sea"}, {"type": "text", "text": " is"}]
    assert ask(server, {"messages": [HELLO, {**BEGUN, "content": parts}]})["digest"] == made["digest"]


# Tools


def test_a_call_and_its_result_go_round(client: anthropic.Anthropic) -> None:
    words: Any = {"model": "tiny", "tools": [LOOK], "max_tokens": 150, "extra_body": {"seed": 3}}
    made = client.messages.create(messages=[HELLO], tool_choice=ONE_CALL, **words)
    with client.messages.stream(messages=[HELLO], tool_choice=ONE_CALL, **words) as streamed:
        final = streamed.get_final_message()
    assert made.stop_reason == final.stop_reason == "tool_use"
    for block in (made.content[0], final.content[0]):
        called: Any = block.to_dict()
        assert isinstance(called["input"]["far"], bool)
    turns: Any = [HELLO, {"role": "assistant", "content": made.content}]
    assert made.content[0].type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": made.content[0].id, "content": "a sea"}
    turns.append({"role": "user", "content": [result]})
    after = client.messages.create(messages=turns, tool_choice={"type": "none"}, **words)
    assert [block.type for block in after.content] == ["text"]


def test_which_tool_is_called_can_be_chosen(server: Running) -> None:
    body = {"tools": [LOOK, {**LOOK, "type": "custom", "name": "other"}], "max_tokens": 150}
    named = ask(server, {**body, "tool_choice": {"type": "tool", "name": "other"}})
    assert [block["name"] for block in named["content"]] == ["other"]
    several = {"role": "user", "content": "call both"}
    one = ask(
        server, {**body, "messages": [several], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    )
    assert [block["type"] for block in one["content"]] == ["tool_use"]
    chat = {"tools": [CHAT_LOOK], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 150}
    alone = ask(
        server,
        {"tools": [LOOK], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 150},
    )
    assert alone["digest"] == chat_digest(server, [HELLO], **chat)
    assert ask(server, {**body, "tool_choice": {"type": "none"}, "max_tokens": 12})["digest"] == chat_digest(
        server, [HELLO]
    )


def test_a_name_of_a_tool_may_be_long(server: Running) -> None:
    long = "mcp__" + "a" * 123
    body = {"tools": [{**LOOK, "name": long}], "tool_choice": {"type": "any"}, "max_tokens": 300}
    assert ask(server, body)["content"][0]["name"] == long
    refused = server.post(PATH, {"messages": [HELLO], **FEW, **body, "tools": [{**LOOK, "name": f"{long}a"}]})
    assert refused.status_code == 400


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(server: Running) -> None:
    for n in (2_000, 200_000):  # too many tokens, and too many characters to be tokenized at all
        refused = server.post(PATH, {"messages": [{"role": "user", "content": "x" * n}], **FEW})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("prompt is too long: the prompt has 2")
    assert ask(server, {"max_tokens": 32_000, "stop_sequences": ["e"]})["content"]  # a limit above the context is none


def test_a_call_that_is_cut_has_the_input_so_far(server: Running) -> None:
    body = {"tools": [LOOK], "tool_choice": ONE_CALL, "temperature": 0}
    whole = ask(server, {**body, "max_tokens": 150})
    n = whole["usage"]["output_tokens"]
    found = [ask(server, {**body, "max_tokens": limit}) for limit in range(n - 12, n)]
    assert {made["stop_reason"] for made in found} <= {"max_tokens", "tool_use"}
    inputs = [block["input"] for made in found for block in made["content"] if block["type"] == "tool_use"]
    assert {} in inputs
    assert all(one in ({}, whole["content"][0]["input"]) for one in inputs)


def test_tools_of_servers_are_left_out_and_named_in_a_header(server: Running) -> None:
    others: list[Any] = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "bash_20250124", "name": "bash"}, {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ]  # fmt: skip
    body = {**FEW, "messages": [HELLO], "tools": [*others, LOOK]}
    reply = server.post(PATH, body)
    named = "tools.web_search_20250305, tools.bash_20250124, tools.mcp_toolset"
    assert reply.headers["x-ostinato-ignored"] == named
    assert reply.json()["digest"] == chat_digest(server, [HELLO], tools=[CHAT_LOOK])
    assert server.post(PATH, {**body, "stream": True}).headers["x-ostinato-ignored"] == named
    assert "x-ostinato-ignored" not in server.post(PATH, {**body, "tools": [LOOK]}).headers


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "array"}, "must describe an object; its type is 'array'"),
        (
            {"type": "object", "properties": {"a": {"type": "text"}}},
            "cannot be followed: in properties.a, 'text' is no",
        ),
    ],
)
def test_a_schema_of_a_tool_that_cannot_be_followed_is_named_by_its_place(
    server: Running, schema: dict[str, Any], why: str
) -> None:
    others = [{"type": "bash_20250124", "name": "bash"}, LOOK]
    body = {**FEW, "messages": [HELLO], "tools": [*others, {**LOOK, "name": "other", "input_schema": schema}]}
    found = refused(server, {**body, "tool_choice": {"type": "any"}})
    assert found.startswith(f"tools[2].input_schema of 'other' {why}")


# Thinking


def test_thinking_is_a_block_with_a_signature_that_is_accepted_back(thinking: Running) -> None:
    body = {**only(thinking, "a"), "max_tokens": 4}
    made = ask(thinking, body)
    (block,) = made["content"]
    assert (block["type"], block["thinking"]) == ("thinking", "aaaa")
    assert block["signature"]
    assert made["usage"]["output_tokens_details"] == {"thinking_tokens": 4}
    found = stream(thinking, body)
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == [*["thinking_delta"] * 4, "signature_delta"]
    assert deltas[-1]["signature"] == block["signature"]
    # Where the text is omitted, the signature holds it: the same conversation follows.
    omitted = {**body, "thinking": {"type": "adaptive", "display": "omitted"}}
    (hidden,) = ask(thinking, omitted)["content"]
    assert hidden["thinking"] == ""
    deltas = [event["delta"] for event in stream(thinking, omitted) if event["type"] == "content_block_delta"]
    assert deltas == [{"type": "signature_delta", "signature": hidden["signature"]}]
    turns = [[HELLO, {"role": "assistant", "content": [one]}, HELLO] for one in (block, hidden)]
    digests = {ask(thinking, {**body, "messages": messages})["digest"] for messages in turns}
    reasoned = [HELLO, {"role": "assistant", "content": "", "reasoning_content": "aaaa"}, HELLO]
    assert digests == {chat_digest(thinking, reasoned, **body)}
    elsewhere = [HELLO, {"role": "assistant", "content": [{**hidden, "signature": "of another server"}]}, HELLO]
    assert ask(thinking, {**body, "messages": elsewhere})["digest"] not in digests
    assert "signature" in refused(thinking, {**body, "messages": [
        HELLO, {"role": "assistant", "content": [{**hidden, "signature": hidden["signature"] + "x"}]}, HELLO,
    ]})  # fmt: skip


def test_thinking_can_be_turned_off_where_the_template_can(thinking: Running, server: Running) -> None:
    body = {"messages": [HELLO], **only(thinking, "a"), "max_tokens": 4}
    for kind, made in (
        ("enabled", "thinking"),
        ("adaptive", "thinking"),
        ("between_tools", "thinking"),
        ("disabled", "text"),
    ):
        content = ask(thinking, {**body, "thinking": {"type": kind}})["content"]
        assert [block["type"] for block in content] == [made]
    effort = {"output_config": {"effort": "high"}}
    off = ask(thinking, {**body, "thinking": {"type": "disabled"}, **effort})
    assert [block["type"] for block in off["content"]] == ["text"]
    budget = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert thinking.post(PATH, {**body, **budget}).headers["x-ostinato-ignored"] == "thinking.budget_tokens"
    named = server.post(PATH, {**FEW, "messages": [HELLO], **budget, **effort}).headers["x-ostinato-ignored"]
    assert named == "output_config.effort, thinking, thinking.budget_tokens"
    plain = server.post(PATH, {**FEW, "messages": [HELLO], "thinking": {"type": "disabled"}})
    assert "x-ostinato-ignored" not in plain.headers


# The API around it


def test_unknown_fields_versions_and_betas_are_ignored(client: anthropic.Anthropic, server: Running) -> None:
    plain = ask(server, {})["digest"]
    unknown = {"context_management": {"edits": []}, "container": "x", "speed": "fast", "stream_options": {}, "n": 7}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-beta-2099-01-01,other"}
    assert ask(server, unknown, **headers)["digest"] == plain
    reply = server.post(f"{PATH}?beta=true", {"messages": [HELLO], **FEW}, **headers)
    assert reply.json()["digest"] == plain
    made = client.beta.messages.create(
        model="tiny", messages=[HELLO], max_tokens=12, betas=["context-management-2025-06-27"], extra_body={"seed": 3}
    )
    assert (made.model_extra or {})["digest"] == plain


def test_models_are_listed_in_the_form_of_the_client(client: anthropic.Anthropic, server: Running) -> None:
    (found,) = client.models.list().data
    assert found == ModelInfo.model_validate(client.models.retrieve("tiny").to_dict())
    assert (found.id, found.max_input_tokens) == ("tiny", server.llm.context)
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.models.retrieve("other")
    assert server.get("/v1/models").json()["object"] == "list"
    assert "error" in server.get("/v1/models/other").json()


def test_a_key_may_be_sent_either_way(tiny: Path) -> None:
    with serving(tiny, llm={"context": 64, "slots": 1}, keys=("open sesame".replace(" ", "-"),)) as server:
        words: Any = {"model": "tiny", "messages": [HELLO], "max_tokens": 2}
        for given in ({"api_key": "open-sesame"}, {"api_key": None, "auth_token": "open-sesame"}):
            with client_of(server, **given) as client:
                assert client.messages.create(**words).usage.output_tokens == 2
        with client_of(server, api_key="wrong-key") as client, pytest.raises(anthropic.AuthenticationError) as told:
            client.messages.create(**words)
        error = ErrorResponse.model_validate(told.value.body)
        assert error.error.type == "authentication_error"
        assert told.value.request_id == error.request_id
        assert server.get("/v1/models", **{"x-api-key": "open-sesame"}).status_code == 200


def test_a_client_that_would_leave_the_conversation_to_the_server_is_told_to_send_it(
    client: anthropic.Anthropic, server: Running
) -> None:
    @anthropic.beta_tool
    def look(far: bool) -> str:
        """Look somewhere."""
        return f"a sea, {far=}"

    runner = client.beta.messages.tool_runner(
        model="tiny", messages=[HELLO], tools=[look], tool_choice=ONE_CALL, max_tokens=150, max_iterations=3
    )
    assert [message.stop_reason for message in runner] == ["tool_use"] * 3
    assert "send the whole conversation" in refused(
        server, {**FEW, "messages": [HELLO], "thread": {"previous_message_id": "msg_1"}}
    )
    assert ask(server, {"thread": None})


# Refusals and faults


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens is null; it must be an integer"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"messages": []}, "messages is empty"),
        ({"messages": None}, "messages is null; it must be a list"),
        ({"messages": [{"role": "pilot", "content": "x"}]}, "messages[0].role is 'pilot'; it must be 'user'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type is missing"),
        ({"messages": [{"role": "user", "content": [text("x"), {"type": "image", "source": {}}]}]},
         "messages[0].content[1] is of the type 'image'; this model reads no images, only text"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
         "messages[0].content[0] is of the type 'document'; this model reads no documents, only text"),
        ({"messages": [{"role": "user", "content": [{"type": "web_search_tool_result"}]}]}, "'web_search_tool_result'"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0] is of the type 'tool_use'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "no tool_use"),
        ({"messages": [HELLO, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": [text("x"), {"type": "image"}]},
        ]}]}, "messages[2].content[0].content[1] is of the type 'image'; this model reads no images"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is empty"),
        ({"messages": [HELLO, {"role": "assistant", "content": [USE]}]}, "messages[1] is the assistant's and calls a"),
        ({"messages": [HELLO, BEGUN], "tools": [LOOK], "tool_choice": ONE_CALL}, "messages[1]: the last message is"),
        ({"system": [{"type": "image"}]}, "system[0] is of the type 'image'"),
        ({"system": 5}, "system is 5; it must be a string, or a list"),
        ({"temperature": "warm"}, "temperature is 'warm'; it must be a number"),
        ({"stop_sequences": [""]}, "stop_sequences[0] is empty"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{**LOOK, "name": "a b"}]}, "tools[0].name is 'a b'; it must match"),
        ({"tools": [LOOK, LOOK]}, "second function of the name 'look'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is 'any', and there are no tools"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names the function 'x'"),
        ({"tools": [LOOK], "tool_choice": "any"}, "tool_choice is 'any'; it must be an object"),
        ({"thinking": {"type": "hard"}}, "thinking.type is 'hard'; it must be 'enabled'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "tokens"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_where_it_stands(server: Running, body: dict[str, Any], words: str) -> None:
    assert words in refused(server, {"messages": [HELLO], "max_tokens": 4, **body})


def test_max_tokens_is_required_for_a_message_and_not_for_a_count(server: Running) -> None:
    assert refused(server, {"messages": [HELLO]}) == "max_tokens is missing, and it is required here"
    assert server.post(COUNT, {"messages": [HELLO]}).json() == {"input_tokens": len(server.llm.chat_ids([HELLO]))}


def test_statuses_have_the_clients_types(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ServeLimits(body_bytes=2000)
    body: Any = {"messages": [HELLO], "max_tokens": 4}
    with serving(tiny, llm={"context": 64, "slots": 1}, limits=limits) as server, client_of(server) as client:

        def status(expected: int, kind: str, body: dict[str, Any] = body, path: str = PATH) -> None:
            reply = server.post(path, body)
            assert reply.status_code == expected, reply.text
            assert reply.json()["error"]["type"] == kind
            assert reply.json()["request_id"] == reply.headers["request-id"]
            assert ("retry-after" in reply.headers) == (expected in (429, 529))

        status(404, "not_found_error", {**body, "model": "other"})
        status(404, "not_found_error", path=f"{PATH}/batches")
        status(413, "request_too_large", {**body, "system": "x" * 3000})
        assert server.get(PATH).json()["error"]["type"] == "invalid_request_error"
        with server.http(headers={"content-type": "application/json"}) as http:
            assert "no JSON" in http.post(PATH, content=b"{").json()["error"]["message"]
        monkeypatch.setattr(server.service, "most_running", 0)
        status(429, "rate_limit_error")
        monkeypatch.undo()
        monkeypatch.setattr(LLM, "submit", lambda *_, **__: 1 / 0)
        status(500, "api_error")
        monkeypatch.undo()
        monkeypatch.setattr(server.service.idle, "is_set", lambda: False)  # or it would end as soon as it drains
        server.call(server.service.drain)
        while server.service.state != "draining":
            pass
        status(529, "overloaded_error")
        with pytest.raises(anthropic.InternalServerError) as told:
            client.messages.create(model="tiny", **body)
        assert told.value.status_code == 529
        monkeypatch.undo()


def test_a_stream_that_fails_ends_with_one_error_event(tiny: Path) -> None:
    # In eager an answer takes seconds, so that the server stops in the middle of it.
    with serving(tiny, llm={"context": 4096, "slots": 1, "mode": "eager"}) as server, client_of(server) as client:
        words: Any = {"model": "tiny", "messages": [HELLO], "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
        with pytest.raises(anthropic.APIStatusError, match="stopped") as told:  # noqa: PT012  # it fails on its way
            for event in client.messages.create(stream=True, **words):
                if event.type == "content_block_delta":
                    server.call(server.service.stop)
        assert ErrorResponse.model_validate(told.value.body).error.type == "overloaded_error"


def test_a_stream_that_waits_is_kept_open_by_pings(tiny: Path) -> None:
    limits = ServeLimits(keep_alive_s=0.05)
    with (
        serving(tiny, llm={"context": 4096, "slots": 1, "mode": "eager"}, limits=limits) as server,
        server.http() as http,
    ):
        body = {"messages": [HELLO], "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with http.stream("POST", PATH, json=body) as first:
            answered = first.iter_bytes()
            next(answered)
            with http.stream("POST", PATH, json={**body, "max_tokens": 2}) as second:
                parts = second.iter_text()
                said = ""
                while said.count("event: ping") < 2:
                    said += next(parts)
                first.close()
                found = events(said + "".join(parts))
        assert [event["type"] for event in found[:3]] == ["message_start", "ping", "ping"]
        assert found[-2]["usage"]["output_tokens"] == 2
