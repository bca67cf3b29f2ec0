"""The real client against a server over the default model, on the CPU; skipped, and said, where it cannot be had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.serve.running import Running, serving
from tests.serve.test_concurrent_clients import until

pytestmark = [pytest.mark.slow, pytest.mark.model]
FRANCE: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def smollm2(default_model: Path) -> Iterator[Running]:
    with serving("smollm2", llm={"context": 1024, "slots": 4}) as running:
        yield running


@pytest.fixture
def client(smollm2: Running) -> Iterator[openai.OpenAI]:
    with smollm2.openai() as made:
        yield made


def test_it_is_ready_within_seconds_and_named(smollm2: Running, client: openai.OpenAI) -> None:
    assert smollm2.told[0]["seconds"] < 30
    assert [model.id for model in client.models.list()] == ["smollm2"]


def test_a_chat_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=FRANCE, max_tokens=16, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(model="smollm2", messages=FRANCE, max_tokens=16, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content


def test_a_completion_goes_on_and_stops_where_it_is_told(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2", prompt="One, two, three, four,", max_tokens=24, temperature=0, stop=["seven"], logprobs=2
    )
    assert "five" in answer.choices[0].text
    assert "seven" not in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert all(value <= 0 for value in answer.choices[0].logprobs.token_logprobs or [])


def test_logprobs_say_how_sure_it_is(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=FRANCE, max_tokens=4, temperature=0, logprobs=True, top_logprobs=5
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    first = told.content[0]
    assert first.token == first.top_logprobs[0].token
    assert first.logprob == pytest.approx(first.top_logprobs[0].logprob)
    ordered = [entry.logprob for entry in first.top_logprobs]
    assert ordered == sorted(ordered, reverse=True)


def test_an_answer_follows_its_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    asked: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model="smollm2", messages=FRANCE, max_tokens=100, temperature=0, response_format=asked
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)


def test_a_tool_is_called_and_its_result_read(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    messages: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
    first = client.chat.completions.create(
        model="smollm2", messages=messages, tools=tools, tool_choice="required", max_tokens=80, temperature=0
    )
    called: Any = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert called[0].function.name == "weather"
    assert json.loads(called[0].function.arguments)["city"] in ("Paris", "Rome")
    messages += [
        first.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": called[0].id, "content": "sunny"},
    ]
    second = client.chat.completions.create(
        model="smollm2", messages=messages, tools=tools, tool_choice="none", max_tokens=30, temperature=0
    )
    assert second.choices[0].message.content


def test_embeddings_tell_near_from_far(client: openai.OpenAI) -> None:
    texts = ["a cat sat on the mat", "a kitten sat on the rug", "interest rates rose by half a percent"]
    vectors = [entry.embedding for entry in client.embeddings.create(model="smollm2", input=texts).data]

    def alike(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert alike(vectors[0], vectors[1]) > alike(vectors[0], vectors[2])
    assert alike(vectors[0], vectors[0]) == pytest.approx(1, abs=1e-4)


def test_a_closed_stream_is_cancelled(smollm2: Running, client: openai.OpenAI) -> None:
    before = smollm2.llm.stats().ended.get("cancelled", 0)
    stream = client.chat.completions.create(
        model="smollm2", messages=FRANCE, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    stream.close()
    until(lambda: smollm2.llm.stats().ended.get("cancelled", 0) == before + 1, "it is cancelled")
    until(lambda: smollm2.llm.stats().live == 0, "its slot is free")


def test_errors_are_those_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context"):
        client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "word " * 5000}])
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=FRANCE)
