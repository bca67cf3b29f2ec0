"""Answers that follow a schema, a regex, a choice or a grammar, through `LLM` on a tiny random model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato import LLM, Sampling
from ostinato.errors import BadInput, BadOption
from ostinato.text.grammar import Grammars
from tests.counts import soaking
from tests.text.test_grammar import PERSON, schemas

WARM = Sampling(max_tokens=90, temperature=1.0, top_k=0, top_p=1.0)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(some=st.lists(schemas(2), min_size=1, max_size=6), seed=st.integers(0, 2**31))
def test_every_answer_that_ends_with_stop_follows_its_schema(
    tiny_llm: LLM, some: list[dict[str, Any]], seed: int
) -> None:
    """Together in the slots, beside a free one."""
    asked = [replace(WARM, schema=json.dumps(schema), seed=seed) for schema in some]
    streams = [tiny_llm.stream("the sea", one) for one in asked]
    begun = [[next(pieces)] for pieces in streams]
    free = list(tiny_llm.stream("the sea", Sampling(max_tokens=20, temperature=0, ignore_eos=True)))
    assert free[-1].finish_reason == "length"
    for schema, first, pieces in zip(some, begun, streams, strict=True):
        last = [*first, *pieces][-1].completion
        assert last is not None
        if last.finish_reason == "stop":
            jsonschema.validate(json.loads(last.text), schema)
            assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', '""', last.text))


@pytest.fixture
def by_llguidance(tiny_gguf: Path) -> Iterator[LLM]:
    """The tiny llama where llguidance computes every mask, on the host."""
    with LLM(tiny_gguf, device="cpu", context=128) as llm:
        llm._engine._constrain = Grammars(llm.tokenizer, llm.shape.vocab).matcher
        yield llm


@pytest.mark.slow
@pytest.mark.soak
def test_the_loop_answers_as_with_masks_of_llguidance_over_schemas_that_people_wrote(
    tiny_llm: LLM, by_llguidance: LLM, schema_data: list[dict[str, Any]]
) -> None:
    n_stops = 0
    for number, entry in enumerate(schema_data if soaking() else schema_data[::10]):
        wanted = Sampling(schema=entry["schema"], temperature=1.0, seed=number, max_tokens=60)
        try:
            expected = by_llguidance.generate("the sea", wanted)
        except BadInput:  # a schema that cannot be followed
            continue
        found = tiny_llm.generate("the sea", wanted)
        assert found.token_ids == expected.token_ids, entry["name"]
        assert (found.finish_reason, expected.timings.grammar) == (expected.finish_reason, "host")
        assert found.timings.grammar in ("device", "device+stack"), entry["name"]
        if found.finish_reason == "stop":
            n_stops += 1
            jsonschema.validate(json.loads(found.text), entry["schema"])
    assert n_stops > 0


def test_a_mapping_its_text_and_a_pydantic_model_are_the_same_schema(tiny_llm: LLM) -> None:
    class Stated:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return PERSON

    given: list[Any] = [PERSON, json.dumps(PERSON, indent=2), Stated]
    answers = [tiny_llm.generate("the sea", replace(WARM, schema=one, seed=3)) for one in given]
    assert len({answer.text for answer in answers}) == 1
    assert len({answer.digest for answer in answers}) == 1
    jsonschema.validate(json.loads(answers[0].text), PERSON)


def test_members_come_in_the_order_of_the_schema_and_the_digest_knows_it(tiny_llm: LLM) -> None:
    def schema(*names: str) -> dict[str, Any]:
        members = {name: {"type": "boolean"} for name in names}
        return {"type": "object", "properties": members, "required": list(names), "additionalProperties": False}

    there = tiny_llm.generate("x", Sampling(schema=schema("a", "b"), temperature=0))
    back = tiny_llm.generate("x", Sampling(schema=schema("b", "a"), temperature=0))
    assert list(json.loads(there.text)) == ["a", "b"]
    assert list(json.loads(back.text)) == ["b", "a"]
    assert there.digest != back.digest


def test_what_is_asked_for_is_a_part_of_the_digest_and_nothing_asked_for_is_not(tiny_llm: LLM) -> None:
    either = [tiny_llm.generate("x", Sampling(temperature=0, regex=one)) for one in ("(ab|ac)", "a(b|c)")]
    assert either[0].text == either[1].text
    assert either[0].digest != either[1].digest


@pytest.mark.parametrize("reuse", [False, True])
def test_the_loop_and_a_saved_state_follow_alike(tiny_llm: LLM, reuse: bool) -> None:
    pieces = list(tiny_llm.stream("the sea", Sampling(regex="[a-f]{5}g", temperature=0), reuse=reuse))
    whole = pieces[-1].completion
    assert whole is not None
    assert re.fullmatch("[a-f]{5}g", whole.text)
    assert whole.finish_reason == "stop"
    assert (whole.timings.mask_s, whole.timings.grammar) == (0, "device")


def test_without_a_rule_nothing_waits_for_a_mask(tiny_llm: LLM) -> None:
    assert tiny_llm.generate("x", Sampling(max_tokens=3)).timings.mask_s == 0


def test_an_unfinished_answer_is_cut_by_length(tiny_llm: LLM) -> None:
    answer = tiny_llm.generate("x", Sampling(schema=PERSON, max_tokens=4))
    assert answer.finish_reason == "length"
    assert answer.text.startswith('{"n')


def test_a_stop_string_ends_an_answer_before_its_grammar(tiny_llm: LLM) -> None:
    answer = tiny_llm.generate("x", Sampling(choice=("one two three",), stop=(" two",)))
    assert (answer.text, answer.finish_reason) == ("one", "stop")


def test_a_list_of_prompts_follows_one_by_one(tiny_llm: LLM) -> None:
    answers = tiny_llm.generate(["one", "two", "three"], Sampling(choice=("yes", "no"), seed=1))
    assert {answer.text for answer in answers} <= {"yes", "no"}


def test_a_schema_that_cannot_be_followed_is_refused_by_the_call(tiny_llm: LLM) -> None:
    with pytest.raises(BadOption, match="schema cannot be followed"):
        tiny_llm.stream("x", Sampling(schema={"not": {}}))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"schema": "{"}, "schema is no JSON"),
        ({"schema": "[1]"}, 'it must be a JSON object, as in {"type": "object"}'),
        ({"schema": {"a": float("nan")}}, "schema is no JSON"),
        ({"schema": {"a": {1}}}, "schema is no JSON"),
        ({"regex": ""}, "regex is ''"),
        ({"regex": 3}, "regex is 3"),
        ({"choice": ["a", ""]}, "a text that is not empty"),
        ({"choice": [1]}, "a text that is not empty"),
        ({"json_mode": 1}, "True or False"),
        ({"regex": "a", "grammar": "b"}, "regex and grammar are both given"),
        ({"schemas": {}}, "nearest"),
    ],
)
def test_options_that_say_nothing_are_refused_by_name(words: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        Sampling(**words)


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_fills_in_a_schema(default_model: str) -> None:
    with LLM(default_model, context=512) as llm:
        question = [{"role": "user", "content": "Ann is 32 years old. Answer with JSON about her."}]
        answer = llm.chat(question, Sampling(schema=PERSON, temperature=0, max_tokens=60))
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), PERSON)
        assert "Ann" in answer.text
