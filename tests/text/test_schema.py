"""Schemas that no grammar can follow are refused with their place, by our compiler and before llguidance sees them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from ostinato.errors import BadOption
from ostinato.options import Rule, Sampling
from ostinato.text.automaton import of_rule
from ostinato.text.schema import followable

REFUSED: dict[str, tuple[Any, str]] = {
    "digits": ({"type": "integer", "minimum": 10**400}, "it has minimum larger than a float"),
    "digits within": ({"items": {"type": "number", "maximum": -(10**400)}}, "items has maximum larger than a float"),
    "integers beyond": ({"type": "integer", "minimum": 10**20, "maximum": 2 * 10**20}, "beyond 64 bits"),
    "integers below": ({"type": ["integer", "null"], "exclusiveMaximum": -1e20}, "beyond 64 bits"),
    "patterns": ({"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(24)]}, "24 patterns; at most 12"),
    "half a constant": ({"const": "\ud800"}, "half a character in const"),
    "half a choice": ({"enum": ["a", {"b": "\udfff"}]}, "half a character in enum"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_at_once_with_its_place(name: str) -> None:
    schema, why = REFUSED[name]
    started = time.monotonic()
    with pytest.raises(BadOption, match=why):
        followable(schema)
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "number", "minimum": 1e20, "maximum": 1.7e308},
        {"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}]},
        {"const": "é😀"},
    ],
)
def test_bounds_patterns_and_texts_of_ordinary_size_are_left_as_they_are(schema: Any) -> None:
    assert followable(json.loads(json.dumps(schema))) == schema


@pytest.mark.parametrize("text", ['{"const": 1e999}', '{"enum": [1, -1e999]}', '{"minimum": 1e999}'])
def test_numbers_that_json_reads_as_infinite_are_refused(text: str) -> None:
    with pytest.raises(BadOption, match="float"):
        of_rule(Rule("schema", text))


def test_a_choice_with_half_a_character_is_refused() -> None:
    with pytest.raises(BadOption, match="without half a character"):
        Sampling(choice=["a", "\ud800"])
