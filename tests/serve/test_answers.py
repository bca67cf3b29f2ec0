"""Chats and completions through the real client: shapes, streams, parameters, and one end for each."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from ostinato import Sampling, Timings
from tests.cli import tiny_model
from tests.serve.running import Running, serving
from tests.text.test_tools import HARMONY, STYLES

HELLO: Any = [{"role": "user", "content": "hello"}]
FEW: Any = {"model": "tiny", "max_tokens": 12, "seed": 3}


def test_a_chat_is_the_answer_that_the_engine_gives(client: openai.OpenAI, server: Running) -> None:
    answer = client.chat.completions.create(messages=HELLO, **FEW)
    same = server.llm.chat(HELLO, Sampling(max_tokens=12, seed=3))
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == same.text
    assert choice.finish_reason == same.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(same.prompt_ids), 12)
    assert answer.model_extra is not None
    assert answer.model_extra["digest"] == same.digest
    assert answer.model_extra["seed"] == 3


def test_a_stream_joins_to_the_same_answer_and_has_one_end(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=HELLO, **FEW)
    chunks = list(
        client.chat.completions.create(messages=HELLO, stream=True, stream_options={"include_usage": True}, **FEW)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == ["length"]
    assert reasons[-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_prompt_asked_again_is_found_in_memory(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "the same words again and again, and then some more of them"}]
    first = client.chat.completions.create(messages=long, **FEW)
    second = client.chat.completions.create(messages=long, **FEW)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 16
    assert second.choices[0].message.content == first.choices[0].message.content


def test_usage_can_come_with_every_chunk(server: Running) -> None:
    body = {"messages": HELLO, "stream": True, "max_tokens": 4, "stream_options": {"continuous_usage_stats": True}}
    chunks = events_of(server.post("/v1/chat/completions", body).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_several_answers_to_one_prompt_have_seeds_that_follow_each_other(server: Running) -> None:
    body = {"messages": HELLO, "n": 3, "max_tokens": 6, "seed": 5, "temperature": 1.0, "ignore_eos": True}
    together = server.post("/v1/chat/completions", body).json()
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    for number, choice in enumerate(together["choices"]):
        alone = server.post("/v1/chat/completions", {**body, "n": 1, "seed": 5 + number}).json()
        assert choice["message"]["content"] == alone["choices"][0]["message"]["content"]
    assert together["usage"]["completion_tokens"] == 18


def test_streams_of_several_answers_are_told_apart(server: Running) -> None:
    body = {"messages": HELLO, "n": 3, "max_tokens": 6, "seed": 5, "temperature": 1.0, "ignore_eos": True}
    whole = server.post("/v1/chat/completions", body).json()
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, list[str]] = defaultdict(list)
    for chunk in events_of(server.post("/v1/chat/completions", {**body, "stream": True}).text):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
            reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert [texts[i] for i in range(3)] == [choice["message"]["content"] for choice in whole["choices"]]
    assert [reasons[i] for i in range(3)] == [["length"]] * 3


def test_a_completion_goes_on_from_texts_and_from_token_ids(client: openai.OpenAI, server: Running) -> None:
    ids = [server.llm.tokenize("the rain"), server.llm.tokenize("in the")]
    by_text = client.completions.create(prompt=["the rain", "in the"], **FEW)
    by_ids = client.completions.create(prompt=ids, **FEW)
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_ids.choices]
    one = client.completions.create(prompt=ids[0], **FEW)
    assert one.choices[0].text == server.llm.generate("the rain", Sampling(max_tokens=12, seed=3)).text


def test_an_echo_shows_the_prompt_first(client: openai.OpenAI) -> None:
    plain = client.completions.create(prompt="the rain", **FEW)
    echoed = client.completions.create(prompt="the rain", echo=True, **FEW)
    assert echoed.choices[0].text == "the rain" + plain.choices[0].text
    streamed = client.completions.create(prompt="the rain", echo=True, stream=True, **FEW)
    assert "".join(chunk.choices[0].text for chunk in streamed) == echoed.choices[0].text


def test_logprobs_of_an_echoed_prompt_are_what_the_model_gives_each_token(server: Running) -> None:
    body = {"prompt": "the rain", "echo": True, "logprobs": 2, "max_tokens": 6, "seed": 3, "ignore_eos": True}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    told, ids = choice["logprobs"], server.llm.tokenize("the rain")
    rows = torch.from_numpy(server.llm.logits(ids[:-1])).log_softmax(-1)
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    for row, id, logprob, top in zip(rows, ids[1:], told["token_logprobs"][1:], told["top_logprobs"][1:], strict=False):
        assert logprob == pytest.approx(float(row[id]), abs=1e-4)
        assert sorted(top.values()) == pytest.approx(row.topk(2).values.tolist()[::-1], abs=1e-4)
    assert len(told["tokens"]) == len(ids) + 6
    # Asked as a prompt, what was made has the logprobs that it was made with.
    plain = server.post("/v1/completions", {**body, "echo": False}).json()["choices"][0]["logprobs"]
    assert told["tokens"][len(ids) :] == plain["tokens"]
    assert told["token_logprobs"][len(ids) :] == plain["token_logprobs"]
    made = server.llm.generate("the rain", Sampling(max_tokens=6, seed=3, ignore_eos=True)).token_ids
    scored = server.post("/v1/completions", {"prompt": [*ids, *made], "echo": True, "logprobs": 0, "max_tokens": 0})
    later = scored.json()["choices"][0]["logprobs"]["token_logprobs"][len(ids) :]
    assert later == pytest.approx(plain["token_logprobs"], abs=1e-3)


def test_offsets_of_tokens_are_where_the_text_shows_them(server: Running) -> None:
    bias = {str(server.llm.tokenize("a")[0]): 100}
    for prompt in ("the rain in spain", "größer: 雨 ☂ x"):
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 3, "logit_bias": bias, "temperature": 0}
        choice = server.post("/v1/completions", body).json()["choices"][0]
        text, told = choice["text"], choice["logprobs"]
        assert text == prompt + "aaa"
        whole = [pair for pair in zip(told["tokens"], told["text_offset"], strict=True) if "bytes:" not in pair[0]]
        assert len(whole) > 5
        assert all(text[offset:].startswith(token) for token, offset in whole)
        assert whole[-1] == ("a", len(text) - 1)


def test_a_prompt_can_be_scored_without_making_anything(client: openai.OpenAI, server: Running) -> None:
    asked: Any = {
        "model": "tiny",
        "prompt": ["the rain", "in the"],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 0,
        "n": 2,
    }
    before = server.llm.stats().submitted
    answer = client.completions.create(**asked)
    assert [choice.text for choice in answer.choices] == ["the rain"] * 2 + ["in the"] * 2
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert answer.usage.prompt_tokens == sum(len(server.llm.tokenize(text)) for text in ("the rain", "in the"))
    whole = [choice.to_dict() for choice in answer.choices]
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert [choice.to_dict() for chunk in chunks for choice in chunk.choices] == whole
    assert chunks[-1].usage == answer.usage
    assert server.llm.stats().submitted == before


def test_a_completion_without_a_limit_fills_the_context(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="the rain", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.total_tokens == 1024
    timings: Any = answer.timings  # type: ignore[attr-defined]  # beyond OpenAI's shape
    assert {field.name for field in dataclasses.fields(Timings)} <= timings.keys()
    assert timings["predicted_per_second"] == timings["decode_tok_s"]  # the old name


@pytest.mark.slow
def test_a_stop_string_ends_an_answer_and_is_never_shown(server: Running) -> None:
    body = {"prompt": "hello", "max_tokens": 60, "seed": 1, "temperature": 1.5, "ignore_eos": True}
    text = server.post("/v1/completions", body).json()["choices"][0]["text"]
    for start in range(4, 40, 5):
        stop = text[start : start + 3]
        for stream in (False, True):
            asked = {**body, "stop": [stop], "stream": stream, "logprobs": 1}
            reply = server.post("/v1/completions", asked)
            choices = [c for chunk in events_of(reply.text) for c in chunk["choices"]] if stream else []
            choices = choices or reply.json()["choices"]
            assert "".join(choice["text"] for choice in choices) == text[: text.find(stop)]
            assert choices[-1]["finish_reason"] == "stop"


def test_logprobs_of_a_chat_are_the_models_own(client: openai.OpenAI, server: Running) -> None:
    answer = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=3, **FEW)
    same = server.llm.chat(HELLO, Sampling(max_tokens=12, seed=3, logprobs=3))
    assert same.logprobs is not None
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [entry.logprob for entry in told.content] == [entry.logprob for entry in same.logprobs]
    assert all(len(entry.top_logprobs) == 3 for entry in told.content)
    assert b"".join(bytes(entry.bytes or []) for entry in told.content).decode(errors="replace") == same.text


def test_logprobs_of_a_stream_are_those_of_the_whole(server: Running) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 20, "seed": 9}),
        ("/v1/completions", {"prompt": "hello", "logprobs": 2, "max_tokens": 20, "seed": 9}),
        ("/v1/completions", {"prompt": "hello", "logprobs": 2, "max_tokens": 20, "seed": 9, "echo": True}),
    ):
        whole = server.post(path, body).json()["choices"][0]["logprobs"]
        parts = [
            choice["logprobs"]
            for chunk in events_of(server.post(path, {**body, "stream": True}).text)
            for choice in chunk["choices"]
            if choice["logprobs"]
        ]
        for name, value in whole.items():
            if isinstance(value, list):
                assert [entry for part in parts for entry in part[name]] == value


def test_logit_bias_and_ignored_ends_are_honoured(client: openai.OpenAI, server: Running) -> None:
    wanted = server.llm.tokenize("a")[0]
    answer = client.chat.completions.create(messages=HELLO, temperature=0, logit_bias={str(wanted): 100}, **FEW)
    assert answer.choices[0].message.content == "a" * 12
    ended = server.llm.tokenizer.eog_ids
    bias = {str(id): 100 for id in ended}
    stopped = client.chat.completions.create(messages=HELLO, temperature=0, logit_bias=bias, **FEW)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == ""
    more = client.chat.completions.create(
        messages=HELLO, temperature=0, logit_bias=bias, extra_body={"ignore_eos": True, "min_tokens": 3}, **FEW
    )
    assert more.choices[0].finish_reason == "length"


def test_content_may_come_in_parts(server: Running) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    body = {"max_tokens": 8, "seed": 1}
    one = server.post("/v1/chat/completions", {"messages": parts, **body}).json()
    other = server.post("/v1/chat/completions", {"messages": HELLO, **body}).json()
    assert one["choices"][0]["message"] == other["choices"][0]["message"]


def test_harmless_fields_change_nothing(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(messages=HELLO, **FEW)
    more = client.chat.completions.create(messages=HELLO, user="me", store=False, metadata={"a": "b"}, n=1, **FEW)
    assert more.choices[0].message == plain.choices[0].message


@pytest.mark.parametrize(
    "asked",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}},
        {"type": "regex", "regex": "[ab]{3}c"},
        {"type": "choice", "choice": ["red", "green"]},
        {"type": "grammar", "grammar": 'start: "one" | "two"'},
    ],
    ids=lambda asked: asked["type"],
)
def test_an_answer_follows_its_format(server: Running, asked: dict[str, Any]) -> None:
    body = {"messages": HELLO, "max_tokens": 200, "seed": 4, "temperature": 0.8, "response_format": asked}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    text = choice["message"]["content"]
    if choice["finish_reason"] != "stop":
        assert asked["type"] == "json_object"  # anything may be long
    elif asked["type"].startswith("json"):
        assert isinstance(json.loads(text), dict)
    else:
        assert text in ("red", "green", "one", "two") or (len(text) == 4 and text[-1] == "c")


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look somewhere.",
            "parameters": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
        },
    }
]


def test_the_loop_watches_for_optional_calls_and_a_schema_that_cannot_be_followed_is_no_error(server: Running) -> None:
    odd = {"type": "object", "properties": {"all": {"type": "array", "uniqueItems": True}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    for choice, path in (("auto", "device+stack"), ("none", None)):
        reply = server.post("/v1/chat/completions", {"messages": HELLO, "tools": tools, "tool_choice": choice, **FEW})
        assert reply.status_code == 200, reply.text
        assert reply.json()["timings"]["grammar"] == path


def test_a_required_call_comes_back_parsed_streamed_or_not(client: openai.OpenAI) -> None:
    words: Any = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", **FEW, "max_tokens": 150}
    words["parallel_tool_calls"] = False
    answer = client.chat.completions.create(**words)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    call: Any = choice.message.tool_calls[0]
    assert call.function.name == "look"
    assert isinstance(json.loads(call.function.arguments)["far"], bool)
    with client.chat.completions.stream(**words) as stream:
        streamed: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert [(one.function.name, one.function.arguments) for one in streamed] == [
        ("look", call.function.arguments),
    ]


def test_a_named_call_is_that_one_and_none_forbids_calls(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "look"}}
    answer = client.chat.completions.create(
        messages=HELLO, tools=TOOLS, tool_choice=named, **{**FEW, "max_tokens": 150}
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["look"]
    none = client.chat.completions.create(messages=HELLO, tools=TOOLS, tool_choice="none", **FEW)
    plain = client.chat.completions.create(messages=HELLO, **FEW)
    assert none.choices[0].message.content == plain.choices[0].message.content


def test_a_conversation_with_calls_and_their_results_goes_on(client: openai.OpenAI) -> None:
    call: Any = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"far": true}'}}
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a sea"},
    ]
    answer = client.chat.completions.create(messages=messages, tools=TOOLS, tool_choice="none", **FEW)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 30


def test_what_a_model_thinks_is_told_apart_from_what_it_says(tmp_path: Path) -> None:
    def thinking(metadata: dict[str, Any]) -> None:
        template = metadata["tokenizer.chat_template"]
        template.value = template.value.replace("assistant\n", "assistant\n<think>\n") + "{# </think> #}"

    model = tiny_model.write(tmp_path / "thinking.gguf", context=256, change=thinking)
    with serving(model, llm={"context": 256, "slots": 1}) as server:
        prompt = server.post("/apply-template", {"messages": HELLO}).json()["prompt"]
        assert prompt.endswith("<think>\n")
        body = {"messages": HELLO, "temperature": 0, "max_tokens": 4, "seed": 1}
        body["logit_bias"] = {str(server.llm.tokenize("a")[0]): 100}
        message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("aaaa", "")
        deltas = [
            choice["delta"]
            for chunk in events_of(server.post("/v1/chat/completions", {**body, "stream": True}).text)
            for choice in chunk["choices"]
        ]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "aaaa"
        assert "".join(delta.get("content", "") for delta in deltas) == ""


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which must end as it should."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_model_of_channels_calls_and_answers_by_a_schema_streamed_or_not(tmp_path: Path) -> None:
    """The header of a message is neither content nor reasoning, and what is forced stands in the right one."""

    def change(metadata: dict[str, Any]) -> None:
        metadata["tokenizer.chat_template"].value = HARMONY

    model = tiny_model.write(tmp_path / "tiny.gguf", context=1024, change=change)
    schema = {"type": "json_schema", "json_schema": {"name": "yes", "schema": {"type": "boolean"}}}
    with serving(model, llm={"context": 1024, "slots": 1}) as server, server.openai() as client:
        words: Any = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", **FEW, "max_tokens": 400}
        called = client.chat.completions.create(**words).choices[0]
        assert called.finish_reason == "tool_calls"
        assert called.message.content is None
        calls: Any = called.message.tool_calls
        assert [call.function.name for call in calls] == ["look"]
        with client.chat.completions.stream(**words) as stream:
            streamed: Any = stream.get_final_completion().choices[0].message.tool_calls
        assert [one.function.arguments for one in streamed] == [calls[0].function.arguments]
        said = client.chat.completions.create(messages=HELLO, response_format=schema, **{**FEW, "max_tokens": 400})  # type: ignore[call-overload]
        assert said.choices[0].message.content in ("true", "false")


@pytest.mark.parametrize(
    ("name", "markers", "path"),
    [
        ("python", ("<|tool_call_end|>", "<|tool_call_start|>"), "device+stack"),
        ("gemma", ("<tool_call|>", '<|"|>', "<|tool_call>"), "device+stack"),
        ("tags", (), "device+stack"),
        ("harmony", ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"), "device+stack"),
    ],
)
def test_an_optional_call_follows_its_schema_in_the_format_of_the_model(
    tmp_path: Path, name: str, markers: tuple[str, ...], path: str
) -> None:
    """Where one control token opens calls, the model is pushed to it; the grammar does the rest."""

    def change(metadata: dict[str, Any]) -> None:
        if markers:
            tiny_model.with_control_tokens_of(metadata, markers)
        metadata["tokenizer.chat_template"].value = STYLES[name]

    model = tiny_model.write(tmp_path / "tiny.gguf", context=1024, change=change)
    with serving(model, llm={"context": 1024, "slots": 1}) as server:
        assert server.llm.chat_format.tools.name == name
        body: Any = {"messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False, **FEW, "max_tokens": 100}
        if name in ("python", "gemma"):
            body["logit_bias"] = {str(tiny_model.VOCAB - 1): 100, str(server.llm.tokenizer.eos_id): 50}
        reply = server.post("/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["timings"]["grammar"] == path
        if name in ("python", "gemma"):
            (choice,) = reply.json()["choices"]
            assert choice["finish_reason"] == "tool_calls"
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "look"
            assert json.loads(call["function"]["arguments"]) in ({"far": True}, {"far": False})


# Reads reasoning from parts of the content, and refuses a user's turn directly behind a result.
IN_TURN = """\
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | length }}{% endif %}
{%- set seen = namespace(turns=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != (seen.turns % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
        {%- set seen.turns = seen.turns + 1 %}
    {%- endif %}
    {{- '<' + m.role + '>' }}
    {%- if m.content is string %}{{ m.content }}
    {%- else %}
        {%- for part in m.content %}
            {{- '[THINK]' + part.thinking + '[/THINK]' if part.type == 'thinking' else part.text }}
        {%- endfor %}
    {%- endif %}
    {%- for call in m.tool_calls or [] %}
        {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
    {%- endfor %}
{%- endfor %}
"""


def test_reasoning_and_a_text_after_a_result_reach_a_template_in_its_form_from_every_api(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any]) -> None:
        metadata["tokenizer.chat_template"].value = IN_TURN

    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"far": true}'}}
    chat: Any = [
        *HELLO,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a sea"},
        {"role": "user", "content": "and now?"},
    ]
    use = {"type": "tool_use", "id": "call_1", "name": "look", "input": {"far": True}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "a sea"}
    blocks = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    items = [
        *HELLO,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"far": true}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "a sea"},
        {"role": "user", "content": "and now?"},
    ]
    function = TOOLS[0]["function"]
    anthropic_tool = {"name": "look", "description": "Look.", "input_schema": function["parameters"]}
    model = tiny_model.write(tmp_path / "tiny.gguf", context=512, change=change)
    with serving(model, llm={"context": 512, "slots": 1}) as server:
        prompt = server.llm.chat_text(chat, tools=TOOLS)
        assert prompt == (
            "[AVAILABLE_TOOLS]1<user>hello<assistant>[THINK]hm[/THINK]"
            '[TOOL_CALLS]look[ARGS]{"far": true}<tool>a sea\n\nand now?'
        )
        assert server.post("/apply-template", {"messages": chat, "tools": TOOLS}).json()["prompt"] == prompt
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"messages": chat, "tools": TOOLS, "max_tokens": 4}),
            ("/v1/messages", {"messages": blocks, "tools": [anthropic_tool], "max_tokens": 4}),
            ("/v1/responses", {"input": items, "tools": [{"type": "function", **function}], "max_output_tokens": 4}),
        ]
        replies = [server.post(path, {**body, "model": "tiny", "seed": 3}) for path, body in asked]
        assert [reply.status_code for reply in replies] == [200] * 3, [reply.text for reply in replies]
        same = server.llm.chat(chat, Sampling(max_tokens=4, seed=3), tools=TOOLS)
        assert same.prompt_ids == tuple(server.llm.tokenizer.encode_rendered(prompt))
        assert {reply.json()["digest"] for reply in replies} == {same.digest}
