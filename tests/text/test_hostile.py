"""Hostile schemas, regular expressions and grammars: each becomes an automaton or one refusal, in bounded time."""

from __future__ import annotations

import json
import random
import re
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest

from ostinato.errors import BadInput
from ostinato.options import Sampling
from ostinato.text.automaton import AutomatonMatcher
from ostinato.text.grammar import Matcher
from ostinato.text.matchers import Matchers
from tests.counts import soak
from tests.text.test_grammar import tokenizer

SECONDS = 6.0  # for one, on a busy machine: half a second to read, half to compile, then llguidance's limits
MEGABYTES = 700  # for all of them together

TYPES = ["null", "boolean", "number", "string", "array", "object", "integer", "text", "", "\ud800"]
TEXTS = [*TYPES, "a", "é", "\x00", "\udfff\ud800", "😀", '"', "\\", "#", "#/$defs/a", "$defs", "\n", "a" * 300]
PATTERNS = [
    *["a", ".", "[a-z]", "[^\\x00]", "\\d", "\\w", "\\p{L}", "\\b", "^", "$", "|", "(", ")", "[", "]", "{", "}", "*"],
    *["+", "?", "{2}", "{3,}", "{1,900}", "{999999}", "{2,1}", "(?:", "(?i)", "(?=", "(?<n>", "(?P<n>", "\\", "\\x4"],
    *["\\u{110000}", "[[:alpha:]]", "[a-", "&&", "--", "~~", "\x00", "\ud800", "é", "😀", "\\1", "(?s:.)", "/", "\n"],
]
LARK = [
    *["start", "a", "B", "_c", ":", "|", "(", ")", "[", "]", "*", "+", "?", "{2,3}", "{99999999999}", "~", "&", "@x"],
    *[
        '"a"',
        '"\\u00e9"',
        '"\\ud800"',
        '"',
        "/a+/",
        "/(/",
        "/",
        "\n",
        "\nstart: ",
        "\na: ",
        "\nB: ",
        "<[0]>",
        "<[1,2]>",
    ],
    *["<[99999999999999999999]>", "<a>", "%json ", '%json {"type": "object"}', '%json {"$ref": "#"}', "%json true"],
    *["%import common.INT", "%ignore /x/", "%llguidance {}", '%llguidance {"x": 1}', "[suffix=", "\x00", "\ud800", "é"],
    *["// c", "..", "->", "3", "::=", "root ::= ", "\nb ::= [a-z]"],
]
NUMBERS: list[Any] = [0, 1, -1, 2, 13, 0.5, 1e-9, 1e308, -1e308, 2**31, 2**63, 2**64, 10**30, 10**400, True, None, "1"]
SIZES = ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"]
BOUNDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
ONE = ["items", "additionalProperties", "not", "if", "contains", "propertyNames", "additionalItems"]
SEVERAL = ["anyOf", "oneOf", "allOf", "prefixItems", "items", "enum"]
NAMED = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"]


def hostile_schema(rng: random.Random, deep: int = 0) -> Any:
    """A schema, or what stands in the place of one."""
    if rng.random() < 0.05 + 0.1 * deep:
        return rng.choice([True, False, {}, None, 3, [], "x", {"type": rng.choice(TYPES)}])
    made: dict[str, Any] = {}
    for _ in range(rng.randint(1, 4)):
        draw = rng.random()
        if draw < 0.2:
            made["type"] = rng.choice([rng.choice(TYPES), rng.choice(TYPES[:7]), rng.sample(TYPES[:7], 3), 3, []])
        elif draw < 0.3:
            made[rng.choice(SIZES)] = rng.choice(NUMBERS)
        elif draw < 0.4:
            made[rng.choice(BOUNDS)] = rng.choice(NUMBERS)
        elif draw < 0.5:
            made[rng.choice(ONE)] = hostile_schema(rng, deep + 1)
        elif draw < 0.65:
            made[rng.choice(SEVERAL)] = [hostile_schema(rng, deep + 1) for _ in range(rng.randint(0, 3))]
        elif draw < 0.85:
            names = [
                hostile_pattern(rng) if rng.random() < 0.2 else rng.choice(TEXTS) for _ in range(rng.randint(0, 3))
            ]
            made[rng.choice(NAMED)] = {name: hostile_schema(rng, deep + 1) for name in names}
        elif draw < 0.9:
            made["$ref"] = rng.choice(
                ["#", "#/$defs/a", "#/properties/a", "#/anyOf/0", "//[", "#/²", "#a", 3, "x.json"]
            )
        elif draw < 0.95:
            made["pattern"] = hostile_pattern(rng)
        else:
            word = rng.choice(["required", "const", "format", "$id", "$schema", "$anchor", "uniqueItems", "x"])
            made[word] = rng.choice([rng.choice(TEXTS), rng.sample(TEXTS, 3), rng.choice(NUMBERS), "http://a/", "date"])
    return made


def hostile_pattern(rng: random.Random) -> str:
    return "".join(rng.choices(PATTERNS, k=rng.randint(1, 12)))


def hostile_grammar(rng: random.Random) -> str:
    return "start: " + " ".join(rng.choices(LARK, k=rng.randint(1, 14)))


def deep(rng: random.Random) -> dict[str, Any]:
    """One construct inside of itself many times, or many times beside itself."""
    n = rng.choice([30, 64, 120, 300, 2000])
    nested = {
        "items": '{"items":' * n + "{}" + "}" * n,
        "anyOf": '{"anyOf":[' * n + "{}" + "]}" * n,
        "const": '{"const":' + "[" * n + "]" * n + "}",
        "wide": json.dumps({"properties": {str(i): {"type": "string", "maxLength": i} for i in range(n)}}),
        "chain": json.dumps({"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(n)}}),
        "cycle": json.dumps(
            {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{(i + 1) % n}"} for i in range(n)}}
        ),
    }
    patterns = [
        "(" * n + ")" * n,
        "(a|" * n + ")" * n,
        "(" * n + "a" + "){2}" * n,
        "[" * n + "]" * n,
        "a?" * n + "a" * n,
    ]
    grammars = [
        "start: " + "(" * n + '"a"' + ")" * n,
        "start: r0\n" + "".join(f"r{i}: r{(i + 1) % n}\n" for i in range(n)),
        "start: r0\n" + "".join(f'r{i}: r{(i + 1) % n} "a" | "b"\n' for i in range(n)),
        "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(n)) + f'T{n}: "a"',
    ]
    return rng.choice(
        [
            {"schema": rng.choice(list(nested.values()))},
            {"regex": rng.choice(patterns)},
            {"grammar": rng.choice(grammars)},
        ]
    )


KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "schema": lambda rng: {"schema": {"type": "object", **_mapping(hostile_schema(rng))}},
    "regex": lambda rng: {"regex": hostile_pattern(rng)},
    "grammar": lambda rng: {"grammar": hostile_grammar(rng)},
    "deep": deep,
}


def _mapping(schema: Any) -> dict[str, Any]:
    return schema if isinstance(schema, dict) else {"items": schema}


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_input_is_compiled_or_refused_in_one_sentence_and_in_time(kind: str) -> None:
    matchers, before = Matchers(tokenizer(), 512), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(soak(4000, part=200 if kind == "deep" else 20)):
        given, began = KINDS[kind](random.Random(seed)), time.process_time()
        try:
            matcher = matchers.matcher(Sampling(**given))
            assert isinstance(matcher, AutomatonMatcher | Matcher), seed
            matcher.mask()
            said = "it is followed"
        except BadInput as error:
            said = str(error)
        assert re.fullmatch(".{5,700}", said), (seed, said)
        took = time.process_time() - began
        assert took < SECONDS, (seed, given)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES * 1024
