"""Matchers: whatever their masks lead to parses; what cannot be followed is refused, in bounded time and memory."""

from __future__ import annotations

import json
import random
import re
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.engine.constraint import Constraint
from ostinato.errors import BadInput, BadOption, HardwareCannot, Unsupported
from ostinato.options import MAX_RULE_CHARACTERS, Sampling
from ostinato.text import schema as schema_formats
from ostinato.text.folder import tokenizer_from_folder
from ostinato.text.grammar import Grammars, Matcher, check_multiples, compact
from ostinato.text.tokenizer import Tokenizer
from tests.models import tiny_text

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@cache
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        tiny_text.write_files(Path(folder))
        return tokenizer_from_folder(Path(folder))


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), 512)  # more ids than tokens, as padded models have


def allowed(mask: np.ndarray) -> list[int]:
    return [int(id) for id in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def walk(matcher: Constraint, rng: random.Random, most: int = 200) -> tuple[bytes, bool]:
    """A random answer that follows the masks, and whether it ended; the longer it is the sooner it ends."""
    found = b""
    for step in range(most):
        ids = allowed(matcher.mask())
        ends = [id for id in ids if id in matcher.ends]
        if ends and (len(ends) == len(ids) or rng.random() < step / most):
            return found, True
        id = rng.choice([id for id in ids if id not in matcher.ends])
        found += tokenizer().shown[id]
        matcher.take(id)
    return found, False


def made(sampling: Sampling) -> Matcher:
    matcher = grammars().matcher(sampling)
    assert matcher is not None
    return matcher


def spelt(matcher: Matcher, text: str) -> None:
    """Take a text token by token, each of which must be allowed."""
    for id in tokenizer().encode(text, bos=False):
        assert id in allowed(matcher.mask()), text
        matcher.take(id)


def may_end(matcher: Matcher) -> bool:
    return bool(set(allowed(matcher.mask())) & matcher.ends)


# Random schemas


def schemas(depth: int = 3) -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.integers(-50, 50)
    leaves: list[st.SearchStrategy[dict[str, Any]]] = [
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "integer"}, {"type": "number"}]),
        st.tuples(bounds, bounds).map(lambda b: {"type": "integer", "minimum": min(b), "maximum": max(b)}),
        st.integers(1, 40).map(lambda n: {"type": "integer", "multipleOf": n}),
        st.tuples(st.integers(0, 3), st.integers(3, 6)).map(
            lambda b: {"type": "string", "minLength": b[0], "maxLength": b[1]}
        ),
        st.sampled_from(["^[a-c]{2,4}$", r"^\d+$", "^(ja|nein)$"]).map(lambda p: {"type": "string", "pattern": p}),
        st.sampled_from(["date", "time", "uuid", "ipv4"]).map(lambda f: {"type": "string", "format": f}),
        st.lists(st.one_of(st.text(max_size=4), bounds, st.booleans(), st.none()), min_size=1, max_size=4).map(
            lambda values: {"enum": values}
        ),
        st.text(max_size=4).map(lambda value: {"const": value}),
    ]
    if depth == 0:
        return st.one_of(leaves)
    inner = schemas(depth - 1)
    names = st.sampled_from(["a", "b", "name", "größe", 'q"q', "x y"])

    @st.composite
    def objects_of(draw: st.DrawFn) -> dict[str, Any]:
        properties = draw(st.dictionaries(names, inner, max_size=3))
        required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
        extra = draw(st.sampled_from([False, {"type": "integer"}]))
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": extra}

    arrays = st.tuples(inner, st.integers(0, 2), st.integers(2, 3)).map(
        lambda v: {"type": "array", "items": v[0], "minItems": v[1], "maxItems": v[2]}
    )
    unions = st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
    return st.one_of(*leaves, objects_of(), arrays, unions)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_what_a_schema_leads_to_parses_and_validates(schema: dict[str, Any], seed: int) -> None:
    text, ended = walk(made(Sampling(schema=schema)), random.Random(seed))
    if ended:
        value = json.loads(text)
        jsonschema.validate(value, schema)
        outside = re.sub(r'"(\\.|[^"\\])*"', '""', text.decode())
        assert not re.search(r"\s", outside)  # compact


def wild_schemas(depth: int = 2) -> st.SearchStrategy[dict[str, Any]]:
    """Any keyword that people use, well combined or not."""
    bounds = {key: st.sampled_from([-7, 0, 0.5, 3, 40]) for key in ("minimum", "maximum", "exclusiveMinimum")}
    few = st.integers(0, 3)
    leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
        st.sampled_from([{}, {"type": "object"}, {"type": ["string", "null"]}, {"$ref": "#/$defs/node"}]),
        st.fixed_dictionaries(
            {"type": st.sampled_from(["number", "integer"])},
            optional={**bounds, "multipleOf": st.sampled_from([0.5, 2, 0.25, 7])},
        ),
        st.fixed_dictionaries(
            {"type": st.just("string")},
            optional={
                "minLength": few,
                "maxLength": few,
                "pattern": st.sampled_from(["^a", "b$", "[0-9]+", r"\.", "^$"]),
            },
        ),
        st.lists(st.one_of(few, st.text(max_size=2), st.lists(few, max_size=2)), min_size=1, max_size=3).map(
            lambda values: {"enum": values}
        ),
    )
    if depth == 0:
        return leaves
    inner = wild_schemas(depth - 1)
    names = st.sampled_from(["a", "b", "é"])
    some = st.lists(inner, min_size=1, max_size=2)
    objects = st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(names, inner, max_size=2),
            "required": st.lists(names, max_size=2, unique=True),
            "additionalProperties": st.one_of(st.booleans(), inner),
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "z$"]), inner, max_size=1),
            "minProperties": few,
            "propertyNames": st.just({"pattern": "^[a-c]$"}),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": inner,
            "prefixItems": some,
            "minItems": few,
            "maxItems": few,
            "uniqueItems": st.booleans(),
            "contains": inner,
        },
    )
    together = st.tuples(st.sampled_from(["anyOf", "oneOf", "allOf"]), some, leaves).map(
        lambda parts: {**parts[2], parts[0]: parts[1]}
    )
    return st.one_of(leaves, objects, arrays, together)


NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
    "required": ["value"],
    "additionalProperties": False,
}


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=wild_schemas(), seed=st.integers(0, 2**32))
def test_any_schema_is_refused_or_followed(schema: dict[str, Any], seed: int) -> None:
    whole = {**schema, "$defs": {"node": NODE}}
    try:
        matcher = made(Sampling(schema=whole))
    except BadOption:
        return
    text, ended = walk(matcher, random.Random(seed), most=120)
    if ended:
        jsonschema.validate(json.loads(text), whole, cls=jsonschema.Draft202012Validator)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_json_mode_leads_to_an_object(seed: int) -> None:
    text, ended = walk(made(Sampling(json_mode=True)), random.Random(seed))
    assert text.startswith(b"{")
    if ended:
        assert isinstance(json.loads(text), dict)


@settings(max_examples=40, deadline=None)
@given(
    pattern=st.sampled_from([r"[a-c]{2,5}x?", r"(ab|cd)+e", r"\d{3}-\d{2}", r"(?i)yes|no", "ü+é"]),
    seed=st.integers(0, 2**32),
)
def test_what_a_regex_leads_to_matches_it(pattern: str, seed: int) -> None:
    text, ended = walk(made(Sampling(regex=pattern)), random.Random(seed))
    assert not ended or re.fullmatch(pattern, text.decode())


@settings(max_examples=40, deadline=None)
@given(choices=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_a_choice_leads_to_one_of_its_texts(choices: list[str], seed: int) -> None:
    text, ended = walk(made(Sampling(choice=tuple(choices))), random.Random(seed))
    assert ended
    assert text.decode() in choices


@pytest.mark.parametrize(
    "grammar", ['start: "a" ("b" | "c")+ "d"', 'root ::= "a" ("b" | "c")+ "d"', "start: A\nA: /a[bc]+d/"]
)
def test_a_grammar_may_be_lark_or_gbnf(grammar: str) -> None:
    text, ended = walk(made(Sampling(grammar=grammar)), random.Random(0))
    assert ended
    assert re.fullmatch("a[bc]+d", text.decode())


# Ends


def test_an_answer_may_end_where_its_grammar_may_and_must_where_nothing_follows() -> None:
    matcher = made(Sampling(regex="a+b?"))
    assert not may_end(matcher)
    spelt(matcher, "a")
    assert may_end(matcher)
    spelt(matcher, "b")
    assert set(allowed(matcher.mask())) == matcher.ends


def test_min_tokens_holds_the_end_back_unless_nothing_else_may_come() -> None:
    long = made(Sampling(regex="a+", min_tokens=3))
    for expected in (False, False, False, True):
        assert may_end(long) is expected
        spelt(long, "a")
    short = made(Sampling(regex="ab", min_tokens=30))
    spelt(short, "ab")
    assert set(allowed(short.mask())) == short.ends


def test_stop_ids_wait_for_min_tokens_too() -> None:
    (comma,) = tokenizer().encode(",", bos=False)
    matcher = made(Sampling(regex="[,a]*", min_tokens=1, stop_token_ids=(comma,)))
    assert comma not in allowed(matcher.mask())
    spelt(matcher, "a")
    assert comma in allowed(matcher.mask())


def test_ignoring_the_end_leaves_it_to_the_grammar() -> None:
    matcher = made(Sampling(regex="a{1,3}", ignore_eos=True))
    spelt(matcher, "a")
    assert not may_end(matcher)
    spelt(matcher, "aa")
    assert set(allowed(matcher.mask())) == matcher.ends


def test_control_tokens_are_never_a_part_of_a_text() -> None:
    matcher = made(Sampling(regex="(.|\n)*"))
    assert set(allowed(matcher.mask())) & tokenizer().hidden == matcher.ends


def test_every_request_has_a_matcher_of_its_own() -> None:
    first, second = made(Sampling(regex="ab")), made(Sampling(regex="ab"))
    spelt(first, "a")
    assert allowed(first.mask()) != allowed(second.mask())


def test_nothing_to_follow_is_no_matcher() -> None:
    assert grammars().matcher(Sampling()) is None


# What cannot be followed


def deep(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(n):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def doubling(n: int) -> dict[str, Any]:
    some = [{"type": "object", "properties": {f"{x}{i}": {}}, "required": [f"{x}{i}"]} for i in range(n) for x in "ab"]
    return {"allOf": [{"anyOf": some[2 * i : 2 * i + 2]} for i in range(n)]}


BAD: dict[str, dict[str, Any]] = {
    "unknown keyword": {"schema": {"not": {"type": "string"}}},
    "no value": {"schema": {"type": "colour"}},
    "nothing matches": {"schema": {"enum": []}},
    "itself": {"schema": {"$ref": "#"}},
    "another file": {"schema": {"$ref": "https://example.com/schema.json"}},
    "deep": {"schema": deep(200)},
    "doubling": {"schema": doubling(14)},
    "multiples": {"schema": {"type": "integer", "multipleOf": 999_983}},
    "fractions": {"schema": {"type": "number", "multipleOf": 1e-9}},
    "hidden multiples": {"grammar": 'start: %json {"type":"integer","multiple\\u004ff":999983}'},
    "multiples inside": {"grammar": json.dumps({"grammars": [{"json_schema": {"multipleOf": 999_983}}]})},
    "multiples inside of inside": {
        "grammar": json.dumps({"grammars": [{"lark_grammar": 'start: %json {"multipleOf": 999983}'}]})
    },
    "multiples of multiples": {"schema": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}},
    "regex": {"regex": ".*" * 1500},
    "no regex": {"regex": "(unclosed"},
    "look around": {"regex": "(?=a)b"},
    "doubling terminals": {
        "grammar": "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"'
    },
    "no grammar": {"grammar": "start: nowhere"},
    "no GBNF": {"grammar": 'root ::= ("a"'},
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_followed_is_refused_in_bounded_time_and_memory(name: str) -> None:
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadInput):
        made(Sampling(**BAD[name]))
    assert time.perf_counter() - began < 20  # seconds at most, on a busy machine
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # KiB
    with pytest.raises(BadInput):
        made(Sampling(**BAD[name]))


def test_a_regex_that_is_none_is_told_why_on_one_line() -> None:
    with pytest.raises(BadInput, match=r"cannot be followed: unclosed character class$") as error:
        made(Sampling(regex="[0-9"))
    assert "\n" not in str(error.value)


def test_without_llguidance_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(HardwareCannot, match=r"needs llguidance, which is not installed; type: .*\[serve\]'"):
        Grammars(tokenizer(), 512).matcher(Sampling(regex="a"))


def test_a_model_without_an_end_token_cannot_follow() -> None:
    endless = replace(tokenizer(), eog_ids=frozenset())
    with pytest.raises(Unsupported, match="no token that ends an answer"):
        Grammars(endless, 512).matcher(Sampling(regex="a"))


def test_a_refusal_is_remembered() -> None:
    own = Grammars(tokenizer(), 512)
    with pytest.raises(BadOption, match=r"schema cannot be followed.*not"):
        own.matcher(Sampling(schema={"not": {}}))
    assert own._compiled.cache_info().currsize == 1


def test_only_so_many_grammars_are_kept() -> None:
    own = Grammars(tokenizer(), 512)
    for n in range(40):
        own.matcher(Sampling(regex=f"a{{{n + 1}}}"))
    assert own._compiled.cache_info().currsize == 16


def test_an_answer_that_becomes_too_complex_is_an_error_and_no_end() -> None:
    def go_on() -> None:
        matcher, rng = made(Sampling(regex=r"[\p{L}\p{N}]{1,5000}(\p{L}|\p{S}){5000}")), random.Random(1)
        for _ in range(2000):
            matcher.take(rng.choice([id for id in allowed(matcher.mask()) if id not in matcher.ends]))

    with pytest.raises(BadInput, match="cannot go on"):
        go_on()


def test_a_rule_that_is_too_long_is_refused_by_its_name() -> None:
    with pytest.raises(BadOption, match=r"regex is a text of .* at most 65536"):
        Sampling(regex="a" * (MAX_RULE_CHARACTERS + 1))


@pytest.mark.parametrize(
    "text", ['{"multipleOf": 0.01}', '{"multipleOf": 7}, {"multipleOf": 1000}', '{"multipleOf": "x"}']
)
def test_small_multiples_may_be_followed(text: str) -> None:
    check_multiples(text)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "array", "uniqueItems": True}, "it has uniqueItems"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True, "maxItems": 2}}}, "properties.a has uniqueItems"),
        ({"anyOf": [{}, {"items": {"format": "iri"}}]}, "anyOf.1.items has the format 'iri'"),
        ({"$defs": {"x": {"format": "regex"}}}, "x has the format 'regex', .*these can: date, date-time, duration"),
    ],
)
def test_a_keyword_that_cannot_be_followed_is_named_with_its_place(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(BadOption, match=f"^this schema cannot be followed: .*{why}"):
        made(Sampling(schema=schema))
    with pytest.raises(BadOption, match=f"^this schema cannot be followed: .*{why}"):
        compact(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": False, "maxItems": 3},
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 1},
        {"type": "object", "properties": {"a": {"enum": ["x"], "format": "password"}}, "required": ["a"]},
        {"type": "object", "properties": {"format": {"type": "null"}, "uniqueItems": {"const": True}}},
        {"const": {"format": "iri", "uniqueItems": True}},
        {"type": "integer", "minimum": 0, "maximum": 99, "format": "int32"},
        {"$ref": "#/$defs/x", "$defs": {"x": {"enum": ["y"], "format": "our-own"}}},
    ],
)
def test_a_keyword_that_asks_for_nothing_is_left_out(schema: dict[str, Any]) -> None:
    for seed in range(4):
        text, ended = walk(made(Sampling(schema=schema)), random.Random(seed))
        if ended:
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    assert ended or "properties" in schema


def test_the_formats_that_can_be_followed_are_those_of_llguidance() -> None:
    from llguidance import LLMatcher

    for format in (*schema_formats.FORMATS, *schema_formats._NOT_FOLLOWED, "our-own"):
        grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": format}))
        assert (LLMatcher.validate_grammar(grammar) == "") == (format in schema_formats.FORMATS), format


# Vocabularies of models


def walks(name: str, folder: Path) -> Iterator[str]:
    from ostinato.text.of_checkpoint import open_tokenizer

    known = open_tokenizer(folder / f"{name}.gguf")
    own = Grammars(known, known.vocab_size)
    for seed in range(10):
        matcher = own.matcher(Sampling(schema=PERSON))
        assert matcher is not None
        rng, ids = random.Random(seed), list[int]()
        while not matcher.ends & set(found := allowed(matcher.mask())):
            ids.append(rng.choice(found))
            matcher.take(ids[-1])
        yield known.decode(ids, at_start=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-spm", "phi-3", "gpt-2", "deepseek-llm"])
def test_masks_hold_for_every_kind_of_vocabulary(name: str, vocab_data: Path) -> None:
    for text in walks(name, vocab_data):
        jsonschema.validate(json.loads(text), PERSON)
