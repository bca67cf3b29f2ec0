"""Automata: their masks are llguidance's at every step, they judge as it does, and they stay within their limits."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from llguidance import regex_to_lark

from ostinato.errors import BadInput, BadOption
from ostinato.options import Rule, Sampling
from ostinato.text import automaton, channels
from ostinato.text.automaton import MAX_MS, Automaton, AutomatonMatcher, GrammarMasks, of_rule
from ostinato.text.folder import tokenizer_from_folder
from ostinato.text.grammar import as_lark, check_multiples
from ostinato.text.json_formats import PATTERNS
from ostinato.text.program import Program, Unfollowable
from ostinato.text.reasoning import _CHANNELS, _MARKS, Channels, Reasoning
from ostinato.text.schema import FORMATS, followable
from ostinato.text.tools import _SHAPES, Tool, ToolFormat
from ostinato.text.walk import FOLDER as WALK
from ostinato.text.walk import MAX_DEPTH, MOST_KEPT
from tests.counts import soak, soaking
from tests.models import tiny_text
from tests.text.oracle import Vocabulary, ids, schema_rule, vocabulary, vocabulary_of
from tests.text.test_grammar import BAD, NODE, allowed, schemas, tokenizer, walk, wild_schemas
from tests.text.test_grammar import made as made_by_llguidance

REAL = ["gpt-2", "llama-spm"]  # byte-level, and with byte fallback
CALLS = ("BFCL", "Glaive", "MCP")  # schemas of function calls


@cache
def tiny() -> Vocabulary:
    with TemporaryDirectory() as folder:
        tiny_text.write_files(Path(folder))
        return vocabulary(tokenizer_from_folder(Path(folder)))


@cache
def real(folder: Path, name: str, special: int = 0) -> Vocabulary:
    return vocabulary_of(folder / f"{name}.gguf", special)


def accepts(made: Automaton, text: str | bytes) -> bool:
    masks = tiny().masks(made)
    position = masks.begin()
    return masks.take_bytes(position, text.encode() if isinstance(text, str) else text) and masks.ends(position)


def of_schema(schema: Any) -> Automaton:
    return of_rule(schema_rule(schema))


def of_regex(pattern: str) -> Automaton:
    return of_rule(Rule("regex", pattern))


# As the oracle


def compare(words: Vocabulary, rule: Rule, rng: random.Random, steps: int) -> None:
    """Walk with random allowed tokens, and compare the masks at every step."""
    theirs, masks = words.matcher(rule), words.masks(of_rule(rule))
    assert not theirs.is_error(), theirs.get_error()
    position, text = masks.begin(), b""
    for _ in range(steps):
        expected = np.frombuffer(theirs.compute_bitmask(), np.int32)
        if theirs.is_error():  # a limit of its own
            return
        bits = words.bits(masks, position)
        if not np.array_equal(bits, expected[: len(bits)]):
            wrong = ids(bits ^ expected[: len(bits)])[:8]
            told = [(words.tokens[id], bool(bits[id >> 5] >> (id & 31) & 1)) for id in wrong]
            pytest.fail(f"after {text[-100:]!r} the masks differ in {told} (true: only ours allows it)")
        id = chosen(words, bits, rng)
        if id is None:
            return
        assert masks.take(position, id)
        theirs.consume_token(id)
        text += words.tokens[id]


def chosen(words: Vocabulary, bits: np.ndarray, rng: random.Random) -> int | None:
    """Often a token that ends a part, so that walks come through more of the grammar than its first string; None if
    only the end is left."""
    possible = ids(bits)
    possible = possible[~np.isin(possible, words.ends)]
    if not len(possible):
        return None
    closing = possible[words.closing[possible]]
    return int(rng.choice(closing if len(closing) and rng.random() < 0.5 else possible))


def accepted_schemas(data: list[dict[str, Any]], words: Vocabulary) -> list[tuple[dict[str, Any], Any]]:
    """The schemas of the data that llguidance takes with our options, as it gets them."""
    found = []
    for entry in data:
        try:
            check_multiples(json.dumps(entry["schema"]))
            schema = followable(entry["schema"])
        except BadOption:
            continue
        if not words.matcher(schema_rule(schema)).is_error():
            found.append((entry, schema))
    return found


def part_of(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return data if soaking() else data[::10]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", REAL)
def test_masks_over_real_schemas_are_those_of_the_oracle(
    schema_data: list[dict[str, Any]], vocab_data: Path, name: str
) -> None:
    words, rng = real(vocab_data, name), random.Random(7)
    for _, schema in accepted_schemas(part_of(schema_data), words):
        compare(words, schema_rule(schema), rng, steps=100 if soaking() else 25)


@pytest.mark.slow
@pytest.mark.soak
def test_instances_of_real_schemas_are_judged_as_the_oracle_judges_them(
    schema_data: list[dict[str, Any]], vocab_data: Path
) -> None:
    words = real(vocab_data, "gpt-2")
    for entry, schema in accepted_schemas(part_of(schema_data), words):
        theirs, made = words.matcher(schema_rule(schema)), of_schema(schema)
        for test in entry["tests"]:
            text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
            tokens, judge = words.theirs.tokenize_bytes(text), theirs.deep_copy()
            expected = judge.try_consume_tokens(tokens) == len(tokens) and judge.is_accepting()
            assert accepts(made, text) == expected, (entry["name"], text[:200])


@pytest.mark.slow
@pytest.mark.soak
def test_nearly_all_real_schemas_compile_and_soon(schema_data: list[dict[str, Any]], vocab_data: Path) -> None:
    """Of all that the oracle takes at least 90 of 100 compile, of function calls 97; nothing that it refuses does."""
    words, made, calls, seconds = real(vocab_data, "gpt-2"), [], [], []
    for entry in part_of(schema_data):
        [*accepted] = accepted_schemas([entry], words)
        began = time.process_time()
        try:
            of_schema(entry["schema"])
            compiles = True
        except BadOption:
            compiles = False
        seconds.append(time.process_time() - began)
        assert accepted or not compiles, entry["name"]
        if accepted:
            made.append(compiles)
            if entry["name"].startswith(CALLS):
                calls.append(compiles)
    assert np.mean(made) >= 0.90
    assert np.mean(calls) >= 0.97
    assert np.percentile(seconds, 99) < 0.1
    assert np.median(seconds) < 0.002  # of processor time, whatever runs beside this test


SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "s": {"type": "string", "maxLength": 40}, "o": {"type": "object"}},
    "required": ["x"],
}
TOOLS = [Tool("get", "", SCHEMA), Tool("put", "", {"properties": {"k": {"enum": ["a", "b"]}}}), Tool("go", "", {})]


def tool_rules() -> list[Rule]:
    """Forced calls, calls or an answer, and calls in free text, in every format; markers are text or special tokens."""
    found = []
    for name, shape in _SHAPES.items():
        for special in ({}, {marker: number for number, marker in enumerate(shape.markers)}):
            format = ToolFormat(name, shape.markers, special)
            made = [
                format.grammar(TOOLS, "required"),
                format.grammar(TOOLS, TOOLS[0]),
                format.grammar(TOOLS, "auto", schema=json.dumps(SCHEMA)),
                format.triggered_grammar(TOOLS),
                format.triggered_grammar(TOOLS, parallel=False),
            ]
            found += [Rule("grammar", rule) for rule in made if rule is not None]
    return found


def reasoning_rules() -> list[Rule]:
    samplings = [
        Sampling(schema=SCHEMA),
        Sampling(regex="[a-z]+ [0-9]*"),
        Sampling(choice=("yes", "no")),
        Sampling(grammar=tool_rules()[0].text),
    ]
    found = []
    for first, last, markers in (("<think>", "</think>", ("<think>", "</think>")), _MARKS[-1]):
        for special in ({}, {marker: number for number, marker in enumerate(markers)}):
            reasoning = Reasoning(first, last, markers, special)
            found += [reasoning.before(one, prompt).rule for one in samplings for prompt in ("Hi", f"Hi {first}")]
    marks = {marker: number for number, marker in enumerate(channels.MARKERS)}
    for special in ({}, marks):
        channel = Channels(*_CHANNELS[:2], channels.MARKERS, special, _CHANNELS[2])
        found += [channel.before(one, "Hi", calls=one.grammar is not None).rule for one in samplings]
    return [rule for rule in found if rule is not None]


LARK = [
    'start: "a" "bc" | "ab" "d"',
    'start: a*\na: "x" | "y" a "z"',
    'start: e\ne: t ("+" t)*\nt: NUMBER | "(" e ")"\nNUMBER: /[0-9]+/',
    'start: "x"* "xy"',
    "start: A B\nA: /[a-z]*/\nB: /[a-z0-9]+/",
    'start: "q"{2,30} "é"? W\nW: "a" | "b" W2\nW2: /[c-d]{3}/',
    'root ::= "yes" | "no " [a-z]+ ws\nws ::= [ \\t]*',
]
REGEXES = [
    *[r"[a-z]{3,40}\d+", "(foo|bar)*", r"\d{1,3}(\.\d{1,3}){3}", ".*", '[^"]{2,2000}', "a{5,20}b{5,20}|a{7,30}c"],
    *["(ab?){3,100}", "é{1,300}ü", r"(\s|x){20,50}y", "[a-z]{1,100}-[0-9]{1,200}!", "(?i)yes|(?s:.){2}", "[^a-y]+k?"],
    *["(a{13,40}b){2,20}", "(?:x|y){0,3}?[&&z]*", "a|b|", r"[a-c--b]+", "[]a]+", "^ab$"],
]
SAMPLE = [
    *(Rule("regex", pattern) for pattern in REGEXES),
    Rule("choice", json.dumps(["a", "ab", "abc d", "é"])),
    *(Rule("grammar", grammar) for grammar in LARK),
    *tool_rules(),
    *reasoning_rules(),
]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("number", range(0, len(SAMPLE), 1 if soaking() else 9))
def test_masks_of_patterns_grammars_calls_and_reasoning_are_those_of_the_oracle(vocab_data: Path, number: int) -> None:
    words, rng = real(vocab_data, REAL[number % 2], special=16), random.Random(number)
    if not words.matcher(SAMPLE[number]).is_error():
        compare(words, SAMPLE[number], rng, steps=soak(100))


def agrees(schema: Any, seed: int) -> None:
    agrees_on(schema_rule(schema), seed)


def agrees_on(rule: Rule, seed: int) -> None:
    """What llguidance takes has its masks or is refused, and not as if no compiler took it; what it finds without a
    value is refused."""
    theirs = tiny().matcher(rule)
    try:
        of_rule(rule)
    except Unfollowable as error:
        if "no text satisfies it" not in str(error) and not theirs.is_error():  # it begins some texts that cannot end
            raise
        return
    except BadOption:
        return
    if theirs.is_error():
        assert "nsatisfiable" not in theirs.get_error(), theirs.get_error()
        return
    compare(tiny(), rule, random.Random(seed), steps=60)


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=soak(1500, part=40), deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_masks_of_random_schemas_are_those_of_the_oracle(schema: dict[str, Any], seed: int) -> None:
    agrees(schema, seed)


@pytest.mark.soak
@settings(max_examples=soak(1500, part=40), deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=wild_schemas(), seed=st.integers(0, 2**32))
def test_masks_of_wild_schemas_are_those_of_the_oracle(schema: dict[str, Any], seed: int) -> None:
    try:
        whole = followable({**schema, "$defs": {"node": NODE}})
    except BadOption:
        assume(False)
    agrees(whole, seed)


@pytest.mark.soak
@settings(max_examples=soak(1000, part=25), deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_what_an_automaton_leads_to_parses_and_validates(schema: dict[str, Any], seed: int) -> None:
    masks = GrammarMasks(of_schema(schema), tiny().trie, 512)
    text, ended = walk(AutomatonMatcher(masks, frozenset(tiny().ends), Sampling()), random.Random(seed))
    if ended:
        jsonschema.validate(json.loads(text), schema)


def keyword_schemas(depth: int = 2) -> st.SearchStrategy[Any]:
    """Every keyword that the oracle implements, with bounds that are written out and bounds that count."""
    size = st.sampled_from([0, 1, 2, 5, 12, 13, 14, 40, 300])
    patterns = st.sampled_from(
        [
            "^[a-c]{2,4}$",
            "a",
            "^a.*b$",
            "^(ja|nein)",
            "[0-9]{3}$",
            r"^\d{1,30}(-\w{15,20})?$",
            '^[^"x]+$',
            "^é*$",
            r"\s",
        ]
    )
    scalars: list[st.SearchStrategy[Any]] = [
        st.booleans(),
        st.sampled_from([{}, {"type": "null"}, {"type": "boolean"}]),
        st.sampled_from(["#/$defs/node", "#/$defs/name", "#leaf", "http://example.com/far"]).map(
            lambda uri: {"$ref": uri}
        ),
        st.fixed_dictionaries(
            {"type": st.sampled_from(["string", ["string", "null"]])},
            optional={
                "minLength": size,
                "maxLength": size,
                "pattern": patterns,
                "format": st.sampled_from(FORMATS),
            },
        ),
        st.fixed_dictionaries(
            {"type": st.sampled_from(["number", "integer"])},
            optional={
                "minimum": st.sampled_from([-10, 0, 1.5]),
                "exclusiveMinimum": st.sampled_from([True, False, -2, 1.5]),
                "exclusiveMaximum": st.sampled_from([7, 10.25, 1000]),
                "multipleOf": st.sampled_from([2, 0.5]),
            },
        ),
        st.sampled_from([1, 1.5, -0.0, "a", 'q"\n\\', None, True, [1, "b"], {"k": 1}, {}, []]).map(
            lambda v: {"const": v}
        ),
        st.lists(st.sampled_from([1, 12, "a", "ab", None, [1], {"k": "v"}]), min_size=1, max_size=4).map(
            lambda values: {"enum": values}
        ),
    ]
    if depth == 0:
        return st.one_of(scalars)
    inner = keyword_schemas(depth - 1)
    names = st.sampled_from(["a", "ab", "b", "k", 'q"', "é", ""])
    some = st.lists(inner, min_size=1, max_size=3)
    objects = st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("object"),
            "properties": st.dictionaries(names, inner, max_size=4),
            "required": st.lists(names, max_size=3, unique=True),
            "additionalProperties": inner,
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "^k$", "z{2}"]), inner, max_size=2),
            "minProperties": st.integers(0, 3),
            "maxProperties": st.integers(0, 20),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={"items": inner, "prefixItems": some, "minItems": size, "maxItems": size},
    )
    old_arrays = st.tuples(some, inner).map(lambda v: {"type": "array", "items": v[0], "additionalItems": v[1]})
    several = st.tuples(st.sampled_from(["anyOf", "oneOf", "allOf"]), some, st.one_of(st.just({}), objects)).map(
        lambda v: {**v[2], v[0]: v[1]}
    )
    return st.one_of(*scalars, objects, objects, arrays, old_arrays, several)


def definitions(draft: int) -> dict[str, Any]:
    """What references of `keyword_schemas` name: by a path, by an anchor, and by the URI of a resource of its own."""
    plain = {"node": NODE, "name": {"type": "string", "maxLength": 20}}
    id = "id" if draft == 4 else "$id"
    leaf = {"$anchor": "leaf"} if draft == 2020 else {id: "#leaf"}
    where = "$defs" if draft == 2020 else "definitions"
    far = {id: "http://example.com/far", "anyOf": [{"$ref": f"#/{where}/near"}], where: {"near": {"enum": [[1]]}}}
    found: dict[str, Any] = {where: {"leaf": {**leaf, "enum": ["a", 12]}, "far": far}}
    found["$defs"] = {**found.get("$defs", {}), **plain}
    return found if draft == 2020 else {**found, "$schema": f"http://json-schema.org/draft-0{draft}/schema#"}


@pytest.mark.soak
@settings(max_examples=soak(3000, part=60), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    schema=keyword_schemas(),
    draft=st.sampled_from([4, 7, 2020]),
    seed=st.integers(0, 2**32),
)
def test_masks_of_every_keyword_are_those_of_the_oracle(schema: Any, draft: int, seed: int) -> None:
    whole = {"properties": {"x": schema}, "required": ["x"]} if isinstance(schema, bool) else schema
    agrees({**whole, **definitions(draft)}, seed)


def test_what_no_array_reaches_is_not_read() -> None:
    unread = {"type": "object", "properties": {"a": {}}, "maxProperties": 0}
    made = of_schema({"type": "array", "prefixItems": [{"const": 1}, False, unread], "items": unread})
    assert [accepts(made, text) for text in ("[]", "[1]", "[1,2]", "[2]")] == [True, True, False, False]


def test_an_object_may_have_no_more_members_than_it_must() -> None:
    made = of_schema({"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"], "maxProperties": 1})
    assert [accepts(made, text) for text in ('{"b":1}', "{}", '{"a":1,"b":1}', '{"b":1,"c":1}')] == [True] + [False] * 3


def test_a_member_whose_patterns_no_text_matches_is_left_out() -> None:
    never = {"type": "string", "format": "date", "pattern": "^[a-c]{2,4}$"}
    made = of_schema({"type": "object", "properties": {"a": never}, "maxProperties": 1})
    assert [accepts(made, text) for text in ("{}", '{"b":1}', '{"b":1,"c":1}')] == [True, True, False]


def patterns() -> st.SearchStrategy[str]:
    """Regular expressions of every construct that is read here; many are refused by both sides."""
    atoms = st.sampled_from(
        [
            *[
                "a",
                "b",
                "ab",
                ".",
                "[a-c]",
                "[^a]",
                '[^"]',
                r"\d",
                r"\D",
                r"\s",
                r"\S",
                "é",
                "[é-ü]",
                r"\.",
                r"\n",
                '"',
            ],
            *["/", "(?:a|b)", r"[\d-]", "[a-c&&b-d]", r"[^\s]", r"\x41", r"\u00e9", "$", "^", "(?s:.)", "(?i:k)"],
            *["[-a]", "[a-]", "[]x]", "[^]]", r"\{", r"[\]]", "(?i)S", r"\\"],
        ]
    )
    repeats = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{0,3}", "{1,}", "{13,20}", "*?", "{14,}", "{0}"])

    def longer(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        groups = st.tuples(inner, repeats).map(lambda v: f"({v[0]}){v[1]}")
        return st.one_of(
            groups, st.lists(inner, min_size=2, max_size=3).map("".join), st.tuples(inner, inner).map("|".join)
        )

    return st.recursive(st.tuples(atoms, repeats).map("".join), longer, max_leaves=6)


@pytest.mark.soak
@settings(max_examples=soak(2000, part=40), deadline=None, suppress_health_check=list(HealthCheck))
@given(pattern=patterns(), most=st.sampled_from([None, 3, 20, 100]), inside=st.booleans(), seed=st.integers(0, 2**32))
def test_masks_of_random_patterns_are_those_of_the_oracle(
    pattern: str, most: int | None, inside: bool, seed: int
) -> None:
    length = {} if most is None else {"maxLength": most}
    agrees_on(schema_rule({"type": "string", "pattern": pattern, **length}) if inside else Rule("regex", pattern), seed)


@pytest.mark.soak
@settings(max_examples=soak(2000, part=40), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    bounds=st.dictionaries(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
        st.one_of(st.integers(-2000, 2000), st.floats(-50, 50).map(lambda x: round(x, 3)), st.sampled_from([0, 1e6])),
        max_size=3,
    ),
    multiple=st.sampled_from([None, None, 3, 0.5, 0.01, 7, 250]),
    type=st.sampled_from(["integer", "number"]),
    seed=st.integers(0, 2**32),
)
def test_masks_of_bounded_numbers_are_those_of_the_oracle(
    bounds: dict[str, float], multiple: float | None, type: str, seed: int
) -> None:
    steps = {} if multiple is None else {"multipleOf": multiple}
    agrees({"type": type, **bounds, **steps}, seed)


@pytest.mark.parametrize("hundredths", range(1, 100))
def test_every_step_of_hundredths_is_followed(hundredths: int) -> None:
    made = of_schema({"type": "number", "multipleOf": hundredths / 100})
    for text, fits in ((str(round(hundredths * 0.03, 2)), True), ("0.001", False)):
        assert accepts(made, text) is fits, text
    assert accepts(made, f"{(hundredths * 3 + 1) / 100:.2f}") is (hundredths == 1)


def test_zero_with_a_sign_is_not_zero_without() -> None:
    signed, plain = ({"type": "number", "minimum": zero, "maximum": zero} for zero in (-0.0, 0.0))
    for schema in (signed, plain, signed):
        agrees(schema, 0)


@pytest.mark.soak
@pytest.mark.parametrize("format", FORMATS)
def test_masks_of_formats_are_those_of_the_oracle(format: str) -> None:
    assert set(PATTERNS) == set(FORMATS)
    for seed in range(soak(100)):
        compare(tiny(), schema_rule({"type": "string", "format": format}), random.Random(seed), steps=80)


# What automata are


@pytest.mark.slow
def test_a_bounded_repeat_counts_and_is_not_written_out() -> None:
    made = of_schema({"type": "string", "minLength": 1990, "maxLength": 5000})
    assert made.n_states < 100
    for length, fits in ((1989, False), (1990, True), (5000, True), (5001, False)):
        for character in ("a", "é", "\\n", "😀", "\\u001f"):
            assert accepts(made, f'"{character * length}"') is fits, (length, character)


@pytest.mark.parametrize("length", [13, 49, 300])
def test_a_text_that_cannot_become_long_enough_is_refused_or_ends_in_time(length: int) -> None:
    with pytest.raises(BadOption, match="no text satisfies it"):
        of_schema({"type": "string", "format": "date", "minLength": length})
    made = of_schema({"type": "string", "pattern": "^(abc)*$", "maxLength": length})
    fits = length // 3
    assert accepts(made, f'"{"abc" * fits}"')
    assert not tiny().masks(made).take_bytes(tiny().masks(made).begin(), f'"{"abc" * fits}a'.encode())


def test_counters_of_nested_arrays_are_apart() -> None:
    inner = {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 20, "maxItems": 40}
    made = of_schema({"type": "array", "items": inner, "minItems": 15, "maxItems": 100})
    for outer, middle, length, fits in ((15, 20, 30, True), (100, 40, 0, True), (101, 20, 1, False)):
        value = [["x" * length] * middle] * outer
        assert accepts(made, json.dumps(value, separators=(",", ":"))) is fits
    assert not accepts(made, json.dumps([["x"] * 41] * 15, separators=(",", ":")))
    assert not accepts(made, json.dumps([["x" * 31] * 20] * 15, separators=(",", ":")))


def test_calls_nest_as_deep_as_the_stack_and_no_deeper() -> None:
    made = of_schema({})
    assert made.depth is None
    assert accepts(made, "[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert not accepts(made, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))


def test_the_depth_of_a_closed_schema_is_known() -> None:
    closed = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "null"}}}}
    assert of_schema({**closed, "additionalProperties": False}).depth == 2
    assert of_schema(closed).depth is None


def test_recursion_is_a_call() -> None:
    made = of_schema({"$ref": "#/$defs/node", "$defs": {"node": NODE}})
    assert made.depth is None
    assert accepts(made, '{"value":1,"next":{"value":2,"next":{"value":3}}}')
    assert not accepts(made, '{"value":1,"next":{"value":2,"next":{}}}')


@pytest.mark.slow
@pytest.mark.parametrize("most_kept", [3, MOST_KEPT])
def test_a_kept_mask_is_the_one_that_would_be_computed(vocab_data: Path, most_kept: int) -> None:
    """The same masks from one cache over many walks, full or not, and from one that keeps nothing."""
    words, rng = real(vocab_data, "llama-spm"), random.Random(5)
    schema = {"type": "array", "items": {"anyOf": [{"type": "string", "maxLength": 60}, {"type": "object"}]}}
    made = of_schema({**schema, "maxItems": 20})
    kept, fresh = (GrammarMasks(made, words.trie, len(words.tokens), most_kept=most) for most in (most_kept, 0))
    for _ in range(8):
        position = kept.begin()
        for _ in range(60):
            bits = kept.mask(position)
            assert np.array_equal(bits, fresh.mask(position))
            id = chosen(words, bits, rng)
            if id is None:
                break
            assert kept.take(position, id)
    assert fresh.n_kept == 0
    assert 3 <= kept.n_kept <= most_kept


def test_a_mask_is_what_each_token_finds_on_its_own() -> None:
    masks = tiny().masks(of_schema({"type": "array", "items": {"type": ["object", "string"]}, "maxItems": 20}))
    position, rng = masks.begin(), random.Random(1)
    for _ in range(60):
        bits = masks.mask(position)
        assert list(ids(bits)) == [id for id in range(len(tiny().tokens)) if masks.take(position.copy(), id)]
        id = chosen(tiny(), bits, rng)
        if id is None:
            return
        assert masks.take(position, id)


def test_a_token_that_is_not_allowed_leaves_the_position_as_it_was() -> None:
    masks = tiny().masks(of_schema({"type": "array", "items": {"type": "integer"}}))
    position = masks.begin()
    before = position.copy()
    refused = next(id for id, token in enumerate(tiny().tokens) if token == b"x")
    assert not masks.take(position, refused)
    assert np.array_equal(position, before)


def test_nothing_but_gbnf_needs_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for rule in (schema_rule(SCHEMA), Rule("regex", "a+"), Rule("choice", '["a"]'), Rule("grammar", LARK[0])):
        assert of_rule(rule).n_states > 1
    for rule in (*tool_rules()[:3], *reasoning_rules()[:1]):
        assert of_rule(rule).n_states > 1


@pytest.mark.parametrize(
    "grammar",
    [
        *(f'{{"grammars": {text}}}' for text in ("[]", "5", "[5]", '[{"lark_grammar": 5}]', '[{"lark_grammar": "x"}]')),
        '{"grammars": [{"name": "a", "json_schema": {}}]}',
        '{"grammars": [',
        "start: A\nA: ~",
        "start: A\nA: /a/ &",
    ],
)
def test_a_grammar_of_another_form_is_refused_with_a_sentence(grammar: str) -> None:
    rule = Rule("grammar", grammar.replace('{"grammars": ', '{"grammars":'))
    with pytest.raises(BadOption):
        of_rule(rule)
    with pytest.raises(BadOption):
        made_by_llguidance(Sampling(grammar=rule.text))


@pytest.mark.parametrize("pattern", [*REGEXES, "a/b", r"a\/b", "a\nb\t", r"\\/", r"[\d/\D]\\d", "\\\n"])
def test_a_regex_stands_in_lark_as_llguidance_would_write_it(pattern: str) -> None:
    assert as_lark(Rule("regex", pattern)) == f"start: /{regex_to_lark(pattern, 'd')}/"


def test_the_header_and_python_agree_on_the_layout() -> None:
    text = (WALK / "grammar_walk.h").read_text()
    enums = {
        name: re.findall(r"\b[A-Z_]+\b(?=\s*[,}\n/])", body)
        for name, body in re.findall(r"enum (\w+) \{(.*?)\}", text, re.DOTALL)
    }
    header = enums["HeaderWord"]
    assert header.index("HEADER_WORDS") == automaton.AUTOMATON_WORDS
    assert header.index("HEADER_STATES") == automaton._HEADER_STATES
    assert header.index("HEADER_DEPTH") == automaton._HEADER_DEPTH
    assert enums["VocabularyWord"].index("VOCABULARY_WORDS") == automaton._VOCABULARY_WORDS
    assert enums["VocabularyWord"].index("VOCABULARY_LONGEST") == automaton._VOCABULARY_LONGEST
    assert f"MAX_DEPTH = {MAX_DEPTH};" in text


# Ends


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(regex="a+b?"),
        Sampling(regex="a+b?", min_tokens=3),
        Sampling(regex="a{1,3}b?", ignore_eos=True),
        Sampling(regex="[,ab]*", min_tokens=2, stop_token_ids=(3,)),
    ],
)
def test_end_tokens_wait_as_those_of_a_matcher_do(sampling: Sampling) -> None:
    theirs = made_by_llguidance(sampling)
    assert sampling.rule is not None
    ours = AutomatonMatcher(GrammarMasks(of_rule(sampling.rule), tiny().trie, 512), theirs.ends, sampling)
    for character in "aaab":
        mask = ours.mask()
        for id in (*theirs.ends, *sampling.stop_token_ids):
            assert (id in allowed(mask)) == (id in allowed(theirs.mask()))
        (id,) = tokenizer().encode(character, bos=False)
        theirs.take(id)
        ours.take(id)
    assert set(allowed(ours.mask())) & theirs.ends == set(allowed(theirs.mask())) & theirs.ends


def test_a_token_outside_of_the_grammar_ends_the_answer_with_an_error() -> None:
    matcher = AutomatonMatcher(tiny().masks(of_regex("a+")), frozenset(tiny().ends), Sampling())
    with pytest.raises(BadInput, match="not allowed by its grammar"):
        matcher.take(tokenizer().encode("b", bos=False)[0])


# Limits

HOSTILE = {
    "nested repeats": Rule("regex", "(" * 90 + "a" + "){1,30}" * 90),
    "exponential": Rule("regex", "(a|b)*a(a|b){40}"),
    "repeats of repeats": Rule("regex", "(a{1,1000}|b){1,1000}"),
    "many repeats": Rule("regex", "|".join(f"[a-{chr(98 + i % 20)}]{{{i},900}}x{i}" for i in range(300))),
    "many members": schema_rule({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}),
    "a chain of rules": Rule(
        "grammar", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}?" for i in range(3000)) + '\nr3000: "a"'
    ),
    "two trees": schema_rule(
        {
            "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {
                name: {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{name}"}, "y": {"type": type}}}
                for name, type in (("a", "string"), ("b", "integer"))
            },
        }
    ),
    **{name: rule for name, entry in BAD.items() if (rule := Sampling(**entry).rule) is not None},
}
QUICK = ("nested repeats", "exponential", "a chain of rules", "two trees")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in HOSTILE]
)
def test_a_hostile_grammar_is_refused_or_compiled_in_bounded_time(name: str) -> None:
    began = time.process_time()
    try:
        made = of_rule(HOSTILE[name])
        assert made.n_states <= automaton.MAX_STATES
        assert made.words.size <= automaton.MAX_WORDS
    except BadOption as error:
        said = str(error)
    else:
        said = "compiled"
    assert re.fullmatch(".+", said)  # one line
    assert time.process_time() - began < 3 * MAX_MS / 1000


@pytest.mark.parametrize(
    ("limits", "said"),
    [({"max_states": 20}, "more than 20 states"), ({"max_words": 200}, "200 words"), ({"max_ms": 0}, "0 ms")],
)
def test_each_limit_is_named_where_it_is_exceeded(limits: dict[str, int], said: str) -> None:
    program = Program()
    program.root(automaton._rule_node(program, HOSTILE["exponential"]))
    with pytest.raises(BadOption, match=said):
        automaton.compiled(program, **limits)
