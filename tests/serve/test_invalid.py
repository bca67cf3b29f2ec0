"""What is told about values of wrong types, for every field of every body."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from ostinato.serve.app import parsed
from ostinato.serve.errors import Refusal
from ostinato.serve.messages_body import CountBody, MessagesBody
from ostinato.serve.ollama_body import EmbedBody, GenerateBody, OldEmbedBody, OllamaChatBody, ShowBody
from ostinato.serve.responses_body import ResponsesBody
from ostinato.serve.shapes import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RerankBody,
    TemplateBody,
    TokenizeBody,
)
from tests.serve.running import Running

TALK: Any = {"messages": [{"role": "user", "content": "x"}]}
BODIES: Any = {
    ChatBody: TALK,
    CompletionBody: {"prompt": "x"},
    EmbeddingBody: {"input": "x"},
    RerankBody: {"query": "x", "documents": ["x"]},
    TokenizeBody: {"content": "x"},
    DetokenizeBody: {"tokens": [1]},
    TemplateBody: TALK,
    ResponsesBody: {"input": "x"},
    MessagesBody: {**TALK, "max_tokens": 1},
    CountBody: TALK,
    OllamaChatBody: TALK,
    GenerateBody: {"prompt": "x"},
    EmbedBody: {"input": "x"},
    OldEmbedBody: {"prompt": "x"},
    ShowBody: {},
}
PLAIN = [5, -7, 1.5, 10**30, float("nan"), True, "", "a b", "x" * 2000, [], {}]
INNER = [
    *("role", "content", "type", "text", "name", "function", "tool_calls", "id", "schema", "json_schema", "regex"),
    *("json", "effort", "format", "mode", "tools", "choice", "temperature", "num_predict", "arguments", "input"),
    *("include_usage", "tool_use_id", "call_id", "output", "grammar", "structural_tag"),
]
TYPES = [
    *("text", "image_url", "json_schema", "regex", "choice", "function", "message", "function_call", "tool_use"),
    *("function_call_output", "tool_result", "thinking", "custom", "allowed_tools", "namespace", "reasoning"),
]


def values() -> Iterator[Any]:
    """Values of which most fields take none."""
    yield from PLAIN
    yield from ([value] for value in PLAIN)
    yield ["x"] * 20
    for name in INNER:
        for value in PLAIN:
            yield {name: value}
            yield [{name: value}]
    for kind in TYPES:
        for value in ({"type": kind}, {"type": kind, "name": 5, "text": 5, "content": 5, kind: 5}):
            yield value
            yield [value]
            yield [{"role": "user", "content": [value]}]


def refusal_of(kind: type[Body], body: dict[str, Any]) -> Refusal | None:
    try:
        parsed(kind, json.dumps(body).encode())
    except Refusal as refusal:
        return refusal
    return None


@pytest.mark.parametrize("kind", BODIES)
def test_no_refusal_is_in_the_words_of_a_library(kind: type[Body]) -> None:
    n_refused = 0
    for field, given in kind.model_fields.items():
        for value in values():
            refusal = refusal_of(kind, {**BODIES[kind], given.alias or field: value})
            if refusal is None:
                continue
            n_refused += 1
            told = refusal.message
            assert not re.search("should|pydantic|cannot be read", told, re.IGNORECASE), (field, value, told)
            assert (refusal.param or "").startswith(field), (field, value, told)
    assert n_refused > 10


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"temperature": "warm"}, "temperature is 'warm'; it must be a number"),
        ({"temperature": -1}, "temperature is -1; it must be at least 0"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be at least 0.01"),
        ({"top_k": 2**40}, f"top_k is {2**40}; it must be at most 2147483647"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be an integer"),
        ({"stream": "yes"}, "stream is 'yes'; it must be true or false"),
        ({"stop": {}}, "stop is an object; it must be a string, or a list"),
        ({"stop": [""]}, "stop[0] is empty; give it at least 1 character"),
        ({"stop": ["x"] * 17}, "stop has 17 items; it may have at most 16"),
        ({"messages": "hello"}, "messages is 'hello'; it must be a list"),
        ({"messages": [5]}, "messages[0] is 5; it must be an object"),
        ({"tool_choice": True}, "tool_choice is true; it must be 'none', 'auto' or 'required', or an object"),
        ({"stream_options": {"x": 1}}, "stream_options.x is not supported here; leave it out"),
        ({"response_format": {}}, "response_format.type is missing, and it is required here"),
        ({"response_format": {"type": 5}}, "response_format.type is 5; it must be one of 'text', 'json_object', "),
    ],
)
def test_a_wrong_value_is_shown_with_what_it_must_be(body: dict[str, Any], told: str) -> None:
    refusal = refusal_of(ChatBody, {**TALK, **body})
    assert refusal is not None
    assert refusal.message.startswith(told)


def test_a_wrong_value_in_a_url_is_told_in_the_same_words(server: Running) -> None:
    reply = server.get("/v1/responses/x/input_items?limit=many")
    assert reply.json()["error"]["message"] == "limit is 'many'; it must be an integer"
