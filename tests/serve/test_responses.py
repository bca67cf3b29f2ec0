"""`/v1/responses` through the real client: answers are those of chats, and every event has the client's own type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from ostinato.errors import BadOption
from ostinato.serve.settings import ServeOptions
from tests.serve.running import Running, only, serving

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HELLO: Any = {"role": "user", "content": "hello"}
FEW: Any = {"max_output_tokens": 12, "seed": 3}
LOOK: Any = {
    "type": "function",
    "name": "look",
    "description": "Look somewhere.",
    "parameters": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
}
CHAT_LOOK: Any = {"type": "function", "function": {name: LOOK[name] for name in ("name", "description", "parameters")}}
CALL: Any = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"far": true}'}
CALLED: Any = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"far": true}'}}


def respond(server: Running, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """A whole response, which must be of the client's type."""
    reply = server.post(PATH, {**FEW, **body}, **headers)
    assert reply.status_code == 200, reply.text
    Response.model_validate(reply.json())
    response: dict[str, Any] = reply.json()
    return response


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream: each of the client's type, named before its data, numbered from 0."""
    found = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        if part.startswith(":"):
            continue
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert EVENT.validate_python(event).type == event["type"]
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def stream(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = server.post(PATH, {**FEW, **body, "stream": True})
    assert reply.status_code == 200, reply.text
    return events(reply.text)


def without_ids(value: Any) -> Any:
    """What two answers to the same request have in common."""
    if isinstance(value, dict):
        changing = {"id", "item_id", "call_id", "created_at", "completed_at", "timings", "cached_tokens"}
        return {name: without_ids(inner) for name, inner in value.items() if name not in changing}
    return [without_ids(inner) for inner in value] if isinstance(value, list) else value


def chat_digest(server: Running, messages: list[Any], **more: Any) -> str:
    reply = server.post(CHAT, {"messages": messages, "max_tokens": 12, "seed": 3, **more})
    assert reply.status_code == 200, reply.text
    digest: str = reply.json()["digest"]
    return digest


# Answers


def test_a_response_is_the_answer_of_a_chat(client: openai.OpenAI, server: Running) -> None:
    chat = server.post(CHAT, {"messages": [HELLO], "max_tokens": 12, "seed": 3}).json()
    made = client.responses.create(model="tiny", input="hello", max_output_tokens=12, extra_body={"seed": 3})
    assert made.output_text == chat["choices"][0]["message"]["content"]
    assert (made.status, made.model, made.object) == ("incomplete", "tiny", "response")
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.usage is not None
    assert made.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert (made.usage.output_tokens, made.usage.total_tokens) == (12, made.usage.input_tokens + 12)
    assert made.model_extra is not None
    assert made.model_extra["digest"] == chat["digest"]


def test_an_answer_that_ends_is_completed(server: Running) -> None:
    bias = {str(id): 100 for id in server.llm.tokenizer.eog_ids}
    made = respond(server, {"input": "hello", "temperature": 0, "logit_bias": bias})
    assert (made["status"], made["incomplete_details"]) == ("completed", None)
    assert made["completed_at"] >= made["created_at"]
    assert [item["content"][0]["text"] for item in made["output"]] == [""]
    assert stream(server, {"input": "hello", "temperature": 0, "logit_bias": bias})[-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    "body",
    [
        {"input": "hello"},
        {"input": "hello", "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        {
            **{"input": "hello", "tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False},
            "max_output_tokens": 150,
        },
        {"input": "hello", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["yes"]}}}},
    ],
    ids=["text", "logprobs", "call", "schema"],
)
def test_a_stream_has_its_events_in_order_and_joins_to_the_whole(server: Running, body: dict[str, Any]) -> None:
    whole = respond(server, body)
    found = stream(server, body)
    (item,) = whole["output"]
    added, done = "response.output_item.added", "response.output_item.done"
    if item["type"] == "function_call":
        of_item = [added, "response.function_call_arguments.delta", "response.function_call_arguments.done", done]
        assert item["arguments"] == "".join(event.get("delta", "") for event in found)
    else:
        parts = ("content_part.added", "output_text.delta", "output_text.done", "content_part.done")
        of_item = [added, *(f"response.{part}" for part in parts), done]
        deltas = [event for event in found if event["type"] == "response.output_text.delta"]
        assert item["content"][0]["text"] == "".join(event["delta"] for event in deltas)
        assert item["content"][0]["logprobs"] == [entry for event in deltas for entry in event["logprobs"]]
    kinds = list(dict.fromkeys(event["type"] for event in found))
    assert kinds == ["response.created", "response.in_progress", *of_item, f"response.{whole['status']}"]
    assert without_ids(found[-1]["response"]) == without_ids(whole)
    assert found[-2]["item"] == found[-1]["response"]["output"][0]
    assert len({event["item_id"] for event in found if "item_id" in event} | {found[-2]["item"]["id"]}) == 1


def test_logprobs_are_those_of_the_chat(server: Running) -> None:
    asked = {"messages": [HELLO], "max_tokens": 12, "seed": 3, "logprobs": True, "top_logprobs": 2}
    chat = server.post(CHAT, asked).json()["choices"][0]["logprobs"]["content"]
    made = respond(server, {"input": "hello", "top_logprobs": 2})
    assert made["output"][0]["content"][0]["logprobs"] == chat
    bare = respond(server, {"input": "hello", "include": ["message.output_text.logprobs"]})
    assert [entry["logprob"] for entry in bare["output"][0]["content"][0]["logprobs"]] == [
        entry["logprob"] for entry in chat
    ]


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([HELLO], [HELLO]),
        ([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}], [HELLO]),
        (
            [
                {"role": "developer", "content": "be brief"},
                HELLO,
                {"id": "rs_1", "type": "reasoning", "summary": []},
                {
                    "id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "phase": "commentary",
                    "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
                },
                {**CALL, "id": "fc_1", "status": "completed"},
                {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "text", "text": "sea"}]},
                {"role": "user", "content": "and now?"},
            ],
            [
                {"role": "system", "content": "be brief"},
                HELLO,
                {"role": "assistant", "content": "I look.", "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "call_1", "content": "sea"},
                {"role": "user", "content": "and now?"},
            ],
        ),
        (
            [HELLO, CALL, {**CALL, "call_id": "call_2"}, *(
                {"type": "function_call_output", "call_id": f"call_{n}", "output": "sea"} for n in (1, 2)
            )],
            [HELLO, {"role": "assistant", "tool_calls": [CALLED, {**CALLED, "id": "call_2"}]}, *(
                {"role": "tool", "tool_call_id": f"call_{n}", "content": "sea"} for n in (1, 2)
            )],
        ),
    ],
    ids=["message", "parts", "turn", "two calls"],
)  # fmt: skip
def test_items_become_the_messages_of_a_chat(server: Running, items: list[Any], messages: list[Any]) -> None:
    made = respond(server, {"input": items, "tools": [LOOK], "tool_choice": "none"})
    assert made["digest"] == chat_digest(server, messages)
    auto = respond(server, {"input": items, "tools": [LOOK]})
    assert auto["digest"] == chat_digest(server, messages, tools=[CHAT_LOOK])


def test_instructions_and_system_messages_at_the_start_are_one_message(server: Running) -> None:
    items = [{"role": "developer", "content": "be kind"}, HELLO]
    made = respond(server, {"input": items, "instructions": "be brief"})
    both = {"role": "system", "content": "be brief\n\nbe kind"}
    assert made["digest"] == chat_digest(server, [both, HELLO])
    assert made["instructions"] == "be brief"


# Tools


def test_a_call_and_its_output_go_round(client: openai.OpenAI) -> None:
    words: Any = {"model": "tiny", "tools": [LOOK], "max_output_tokens": 150, "extra_body": {"seed": 3}}
    first = client.responses.create(input="hello", tool_choice="required", parallel_tool_calls=False, **words)
    (call,) = first.output
    assert call.type == "function_call"
    assert isinstance(json.loads(call.arguments)["far"], bool)
    assert first.status == "completed"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "a sea"}
    by_id = client.responses.create(input=[output], previous_response_id=first.id, tool_choice="none", **words)
    whole: Any = [{"role": "user", "content": "hello"}, call.to_dict(), output]
    by_items = client.responses.create(input=whole, tool_choice="none", store=False, **words)
    assert by_id.output_text == by_items.output_text
    assert (by_id.model_extra or {})["digest"] == (by_items.model_extra or {})["digest"]


def test_which_function_is_called_can_be_chosen(server: Running) -> None:
    other = {**LOOK, "name": "other"}
    asked = {"input": "hello", "tools": [LOOK, other], "max_output_tokens": 150}
    named = respond(server, {**asked, "tool_choice": {"type": "function", "name": "other"}})
    assert [item["name"] for item in named["output"]] == ["other"]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    made = respond(server, {**asked, "tool_choice": allowed, "parallel_tool_calls": False})
    assert [item["name"] for item in made["output"]] == ["other"]
    assert made["tool_choice"] == allowed


SIGHT: Any = {"type": "namespace", "name": "sight", "description": "Of eyes.", "tools": [LOOK, {"type": "custom"}]}


def test_a_function_of_a_namespace_is_called_by_both_names(server: Running) -> None:
    asked = {"input": "hello", "tools": [LOOK, SIGHT], "max_output_tokens": 200, "tool_choice": "required"}
    named = {**asked, "tool_choice": {"type": "function", "name": "sight.look"}}
    reply = server.post(PATH, named)
    assert reply.status_code == 200, reply.text
    Response.model_validate(reply.json())
    call = reply.json()["output"][0]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "sight", "look")
    assert reply.headers["x-ostinato-ignored"] == "tools.namespace.description, tools.namespace.custom"
    assert [tool["type"] for tool in reply.json()["tools"]] == ["function", "namespace"]
    done = [event for event in stream(server, named) if event["type"] == "response.output_item.done"]
    assert (done[0]["item"]["namespace"], done[0]["item"]["name"]) == ("sight", "look")
    plain = respond(server, {**asked, "tool_choice": {"type": "function", "name": "look"}})["output"][0]
    assert (plain["name"], plain.get("namespace")) == ("look", None)


def test_a_call_in_a_namespace_goes_round(server: Running) -> None:
    """The model reads the name that it wrote, in the input and in a kept response."""
    output = {"type": "function_call_output", "call_id": "call_1", "output": "the sea"}
    body = {"input": [HELLO, {**CALL, "namespace": "sight"}, output], "tools": [SIGHT], "tool_choice": "none"}
    function = {**CALLED["function"], "name": "sight.look"}
    turns = [
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": [{**CALLED, "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "the sea"},
    ]
    response = respond(server, body)
    assert response["digest"] == chat_digest(server, turns)
    kept = server.get(f"{PATH}/{response['id']}/input_items?order=asc").json()
    assert ResponseItemList.model_validate(kept).data
    assert kept["data"][1]["namespace"] == "sight"
    choice = {"type": "function", "name": "sight.look"}
    made = respond(server, {"input": "hello", "tools": [SIGHT], "tool_choice": choice, "max_output_tokens": 200})
    result = {**output, "call_id": made["output"][0]["call_id"]}
    assert respond(server, {"input": [result], "previous_response_id": made["id"], "tools": [SIGHT]})["output"]


def test_tools_that_are_no_functions_are_left_out_and_named_in_a_header(server: Running) -> None:
    others: list[Any] = [
        {"type": "web_search"}, {"type": "file_search", "vector_store_ids": ["x"]}, {"type": "local_shell"},
        {"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "image_generation"},
        {"type": "mcp", "server_label": "x", "server_url": "https://x.example"}, {"type": "mcp", "server_label": "y"},
    ]  # fmt: skip
    body = {**FEW, "input": "hello", "tools": [*others, LOOK]}
    reply = server.post(PATH, body)
    kinds = ("web_search", "file_search", "local_shell", "code_interpreter", "image_generation", "mcp")
    assert reply.headers["x-ostinato-ignored"] == ", ".join(f"tools.{kind}" for kind in kinds)
    assert [tool["name"] for tool in reply.json()["tools"]] == ["look"]
    assert reply.json()["digest"] == chat_digest(server, [HELLO], tools=[CHAT_LOOK])
    streamed = server.post(PATH, {**body, "stream": True})
    assert streamed.headers["x-ostinato-ignored"] == reply.headers["x-ostinato-ignored"]
    assert "x-ostinato-ignored" not in server.post(PATH, {**FEW, "input": "hello", "tools": [LOOK]}).headers


# Formats


class Answer(BaseModel):
    yes: bool


def test_parse_and_stream_of_the_client_work(client: openai.OpenAI) -> None:
    words: Any = {"model": "tiny", "input": "hello", "text_format": Answer, "extra_body": {"seed": 3}}
    parsed = client.responses.parse(**words)
    assert isinstance(parsed.output_parsed, Answer)
    with client.responses.stream(**words) as streamed:
        kinds = [event.type for event in streamed]
        final = streamed.get_final_response()
    assert final.output_parsed == parsed.output_parsed
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


@pytest.mark.parametrize(
    ("format", "asked"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "x", "strict": True, "schema": {"enum": ["a", "b"]}},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}},
        ),
        ({"type": "regex", "regex": "[ab]{3}c"},) * 2,
        ({"type": "choice", "choice": ["red", "green"]},) * 2,
    ],
    ids=lambda one: None if one is None else one["type"],
)
def test_formats_are_those_of_chats(server: Running, format: dict[str, Any], asked: dict[str, Any] | None) -> None:
    made = respond(server, {"input": "hello", "text": {"format": format}})
    assert made["text"]["format"] == (format if format["type"].startswith("json") else {"type": "text"})
    assert made["digest"] == chat_digest(server, [HELLO], response_format=asked)


# Reasoning


def test_reasoning_is_an_item_of_its_own(thinking: Running) -> None:
    body = {"input": "hello", **only(thinking, "a"), "max_output_tokens": 4}
    made = respond(thinking, {**body, "include": ["reasoning.encrypted_content"]})
    (item,) = made["output"]
    assert (item["type"], item["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "aaaa"}])
    assert (item["summary"], item["status"]) == ([], "incomplete")
    assert made["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    found = stream(thinking, body)
    kinds = [event["type"] for event in found]
    assert [kind for kind in kinds if kind.startswith("response.reasoning_text")] == [
        *["response.reasoning_text.delta"] * 4, "response.reasoning_text.done",
    ]  # fmt: skip
    assert found[-2]["item"]["encrypted_content"] is None
    # Without its text, as clients send it that keep only what is sealed, it is the same conversation.
    whole = [HELLO, item, {"role": "user", "content": "go on"}]
    bare = [HELLO, {**item, "content": []}, {"role": "user", "content": "go on"}]
    digests = {respond(thinking, {**body, "input": items})["digest"] for items in (whole, bare)}
    assert len(digests) == 1
    assert respond(thinking, {**body, "input": [HELLO, {"role": "user", "content": "go on"}]})["digest"] not in digests


def test_reasoning_ends_before_the_text_begins(thinking: Running) -> None:
    body = {"input": "hello", "text": {"format": {"type": "choice", "choice": ["red"]}}, "max_output_tokens": 200}
    found = stream(thinking, {**body, "seed": 5})
    kinds = [event["item"]["type"] for event in found if event["type"] == "response.output_item.done"]
    if kinds == ["reasoning"]:
        assert found[-1]["type"] == "response.incomplete"
    else:
        assert kinds == ["reasoning", "message"]
        assert found[-1]["response"]["output"][1]["content"][0]["text"] == "red"


def test_an_effort_reaches_a_template_that_knows_it_and_is_named_otherwise(thinking: Running, server: Running) -> None:
    body = {**only(thinking, "a"), "input": "hello", "max_output_tokens": 4}
    reply = thinking.post(PATH, {**body, "reasoning": {"effort": "none"}})
    assert [item["type"] for item in reply.json()["output"]] == ["message"]
    assert "x-ostinato-ignored" not in reply.headers
    assert [item["type"] for item in respond(thinking, {**body, "reasoning": {"effort": "high"}})["output"]] == [
        "reasoning"
    ]
    asked = {**FEW, "input": "hello", "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}}
    include = ["everything", "web_search_call.results", "message.output_text.logprobs"]
    named = server.post(PATH, {**FEW, "input": "hello", "include": include}).headers["x-ostinato-ignored"]
    assert named == "include.everything"
    told = server.post(PATH, asked).headers["x-ostinato-ignored"]
    assert told == "reasoning.effort, reasoning.summary, text.verbosity"


# Kept responses


def test_a_response_continues_another_without_its_instructions(client: openai.OpenAI, server: Running) -> None:
    words: Any = {"model": "tiny", "max_output_tokens": 12, "extra_body": {"seed": 3}}
    first = client.responses.create(input="hello", instructions="be brief", **words)
    second = client.responses.create(input="and you?", previous_response_id=first.id, **words)
    third = client.responses.create(input="and now?", previous_response_id=second.id, instructions="be kind", **words)
    turns: list[Any] = [HELLO, {"role": "assistant", "content": first.output_text}]
    turns += [{"role": "user", "content": "and you?"}, {"role": "assistant", "content": second.output_text}]
    assert (second.model_extra or {})["digest"] == chat_digest(server, turns[:3])
    kind = {"role": "system", "content": "be kind"}
    assert (third.model_extra or {})["digest"] == chat_digest(
        server, [kind, *turns, {"role": "user", "content": "and now?"}]
    )
    assert third.previous_response_id == second.id


def test_a_conversation_by_ids_finds_its_prefix_in_memory(server: Running) -> None:
    made: dict[str, Any] = {"id": None}
    cached = []
    for turn in range(5):
        body = {"input": f"turn {turn} of a conversation that goes on", "previous_response_id": made["id"]}
        made = respond(server, body)
        cached.append(made["usage"]["input_tokens_details"]["cached_tokens"])
    assert cached[1:] == sorted(cached[1:])
    assert cached[-1] > 4 * 40


def test_a_kept_response_can_be_read_and_deleted(client: openai.OpenAI, server: Running) -> None:
    made = client.responses.create(model="tiny", input="hello", max_output_tokens=4, metadata={"a": "b"})
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    assert made.metadata == {"a": "b"}
    later = client.responses.create(model="tiny", input="go on", previous_response_id=made.id, max_output_tokens=4)
    client.responses.delete(made.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            gone(made.id)
    with pytest.raises(openai.BadRequestError, match="there is no response") as refused:
        client.responses.create(model="tiny", input="go on", previous_response_id=made.id)
    assert refused.value.code == "previous_response_not_found"
    # What continued it is whole all the same.
    last = respond(server, {"input": "and now?", "previous_response_id": later.id})
    turns = [HELLO, {"role": "assistant", "content": made.output_text}, {"role": "user", "content": "go on"}]
    turns += [{"role": "assistant", "content": later.output_text}, {"role": "user", "content": "and now?"}]
    assert last["digest"] == chat_digest(server, turns)


def test_a_response_that_is_not_stored_is_gone(server: Running) -> None:
    made = respond(server, {"input": "hello", "store": False})
    assert made["store"] is False
    assert server.get(f"{PATH}/{made['id']}").status_code == 404


def test_a_streamed_response_is_kept_too(server: Running) -> None:
    last = stream(server, {"input": "hello"})[-1]["response"]
    assert server.get(f"{PATH}/{last['id']}").json() == last
    assert server.get(f"{PATH}/{last['id']}?stream=true").status_code == 400


def test_an_item_can_be_named_by_its_id(server: Running) -> None:
    first = respond(server, {"input": "hello"})
    (item,) = first["output"]
    more = {"role": "user", "content": "go on"}
    by_id = respond(server, {"input": [HELLO, {"type": "item_reference", "id": item["id"]}, more]})
    assert by_id["digest"] == respond(server, {"input": [HELLO, item, more]})["digest"]
    assert server.post(PATH, {"input": [{"type": "item_reference", "id": "msg_none"}]}).status_code == 404


def test_a_server_that_keeps_nothing_says_so(tiny: Path) -> None:
    with serving(tiny, llm={"context": 64, "slots": 1}, keep_responses=0) as server:
        made = respond(server, {"input": "hello"})
        assert made["store"] is False
        for body in ({"store": True}, {"previous_response_id": made["id"]}):
            reply = server.post(PATH, {"input": "hello", **body})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == next(iter(body))
            assert "--keep-responses" in reply.json()["error"]["message"]
        gone = server.get(f"{PATH}/{made['id']}")
        assert gone.status_code == 404
        assert "--keep-responses" in gone.json()["error"]["message"]


def test_only_so_many_are_kept(tiny: Path) -> None:
    with serving(tiny, llm={"context": 64, "slots": 1}, keep_responses=2) as server:
        made = [respond(server, {"input": "hello"})["id"] for _ in range(3)]
        assert [server.get(f"{PATH}/{id}").status_code for id in made] == [404, 200, 200]
    for wrong in ({"keep_responses": -1}, {"keep_responses_s": 0.0}):
        with pytest.raises(BadOption, match="--keep-responses"):
            ServeOptions("tiny", **wrong)


def test_the_input_of_a_kept_response_is_listed_by_pages(client: openai.OpenAI, server: Running) -> None:
    output = {"type": "function_call_output", "call_id": "call_1", "output": "sea"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"role": "assistant", "content": "I look."}
    made = respond(server, {"input": [HELLO, thought, said, CALL, output, {"role": "user", "content": "and now?"}]})
    page = server.get(f"{PATH}/{made['id']}/input_items?order=asc&limit=4").json()
    assert ResponseItemList.model_validate(page).has_more
    whole = [item.to_dict() for item in client.responses.input_items.list(made["id"], limit=2, order="asc")]
    assert [item["type"] for item in whole] == [
        "message", "reasoning", "message", "function_call", "function_call_output", "message",
    ]  # fmt: skip
    assert whole[:4] == page["data"]
    assert [item.to_dict() for item in client.responses.input_items.list(made["id"])] == whole[::-1]
    assert whole[0]["content"] == [{"type": "input_text", "text": "hello"}]
    again = respond(server, {"input": whole})
    assert again["digest"] == made["digest"]
    assert server.get(f"{PATH}/{made['id']}/input_items?after=none").status_code == 400
    assert server.get(f"{PATH}/{made['id']}/input_items?limit=0").status_code == 400
    assert server.get(f"{PATH}/none/input_items").status_code == 404


def test_the_tokens_of_an_input_can_be_counted(client: openai.OpenAI, server: Running) -> None:
    made = respond(server, {"input": "hello", "instructions": "be brief", "tools": [LOOK]})
    counted = client.responses.input_tokens.count(model="tiny", input="hello", instructions="be brief", tools=[LOOK])
    assert counted.input_tokens == made["usage"]["input_tokens"]


# Truncation


def test_a_conversation_that_is_too_long_loses_its_oldest_turns_if_it_may(server: Running) -> None:
    turns: list[Any] = [{"role": "user", "content": f"turn {n}: " + "x" * 200} for n in range(8)]
    body = {"input": turns, "instructions": "be brief", "max_output_tokens": 12}
    refused = server.post(PATH, body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    made = respond(server, {**body, "truncation": "auto"})
    system = {"role": "system", "content": "be brief"}
    # The slow way: one turn less, until it fits.
    fitting = next(
        turns[start:]
        for start in range(len(turns))
        if len(server.llm.chat_ids([system, *turns[start:]])) + 12 <= server.llm.context
    )
    assert 0 < len(fitting) < len(turns)
    assert made["digest"] == chat_digest(server, [system, *fitting])
    alone = {**body, "input": "x" * 4000, "truncation": "auto"}
    assert server.post(PATH, alone).status_code == 400


# Refusals and faults


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "pilot", "content": "x"}]}, "input[0].role"),
        ({"input": [HELLO, {"type": "web_search_call", "id": "ws_1"}]}, "input[1]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "é"}]}, "tools[0].type"),
        ({"input": "x", "tools": [LOOK, LOOK]}, "tools[1]"),
        ({"input": "x", "tools": [SIGHT, {**SIGHT, "tools": [{"type": "custom"}, LOOK]}]}, "tools[1].tools[1]"),
        ({"input": "x", "tools": [{**LOOK, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        (
            {"input": "x", "tool_choice": "required", "tools": [{"type": "web_search"}, {**LOOK, "parameters": {
                "type": "object", "properties": {"a": {"type": "text"}},
            }}]},
            "tools[1].parameters",
        ),
        ({"input": "x", "tool_choice": "perhaps"}, "tool_choice"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": "x", "tools": [LOOK], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        (
            {"input": "x", "tools": [LOOK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
                {"type": "function", "name": "x"},
            ]}},
            "tool_choice",
        ),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"input": "x", "text": {"format": {"type": "regex", "regex": "("}}}, "text.format"),
        (
            {"input": "x", "tools": [LOOK], "text": {"format": {"type": "regex", "regex": "a"}}},
            "text.format",
        ),
        ({"input": "x", "include": ["every thing"]}, "include[0]"),
        ({"input": "x", "truncation": "some"}, "truncation"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_its_field(server: Running, body: dict[str, Any], param: str) -> None:
    reply = server.post(PATH, body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param, reply.text


def test_a_stream_that_fails_ends_with_one_event_that_says_so(tiny: Path) -> None:
    with serving(tiny, llm={"context": 4096, "slots": 1, "mode": "eager"}) as server, server.http() as http:
        body = {"input": "hello", "stream": True, "ignore_eos": True}
        with http.stream("POST", PATH, json=body) as reply:
            parts = []
            for part in reply.iter_text():
                parts.append(part)
                if len(parts) == 2:  # of thousands: a step of this mode takes a tenth of a millisecond and more
                    server.call(server.service.stop)
        found = events("".join(parts))
        last = found[-1]["response"]
        assert found[-1]["type"] == "response.failed"
        assert (last["status"], last["error"]["code"]) == ("failed", "server_error")
        assert "stopped" in last["error"]["message"]
        assert set(last["error"]) == {"code", "message"}
        said = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
        (item,) = last["output"]
        assert (item["status"], item["content"][0]["text"]) == ("incomplete", said)
