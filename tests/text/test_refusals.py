"""Refusals of schemas, regular expressions and grammars: they name the place in the caller's own text, and name
llguidance only where it would follow what was given."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import pytest
from llguidance import LLParserLimits

from ostinato.errors import BadOption
from ostinato.options import Sampling
from ostinato.text import grammar
from ostinato.text.grammar import Grammars, _reason
from ostinato.text.matchers import Matchers
from ostinato.text.reasoning import Reasoning
from tests.text.test_grammar import tokenizer


@cache
def matchers() -> Matchers:
    return Matchers(tokenizer(), 512)


def refusal(matchers: Matchers | Grammars, given: dict[str, Any]) -> str | None:
    """Why it is refused, without the first words, which every refusal has; None if it is followed."""
    try:
        matchers.matcher(Sampling(**given))
    except BadOption as error:
        kind, why = str(error).split(" cannot be followed: ", 1)
        assert kind == f"this {next(iter(given))}"
        return why
    return None


def in_a_property(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "array", "items": schema}}, "required": ["a"]}


# What no compiler follows, and why.
HOPELESS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[0-9"}, "the pattern '[0-9' has an open bracket"),
    ({"regex": "(a"}, "the pattern '(a' has an open parenthesis"),
    ({"regex": "a)"}, "the pattern 'a)' has a parenthesis too many"),
    ({"regex": "*"}, "the pattern '*' repeats nothing"),
    ({"regex": "a{2,1}"}, "the pattern 'a{2,1}' has a repeat whose bounds are reversed"),
    ({"regex": "[z-a]"}, "the pattern '[z-a]' has a range that is reversed"),
    ({"regex": "(?=a)b"}, "the pattern '(?=a)b' looks ahead or behind, which cannot be followed"),
    ({"regex": "(?<!a)b"}, "the pattern '(?<!a)b' looks ahead or behind, which cannot be followed"),
    ({"regex": r"(a)\1"}, r"the pattern '(a)\\1' refers back to a group, which cannot be followed"),
    ({"regex": r"\bx"}, r"the pattern '\\bx' has a word boundary, which cannot be followed"),
    ({"regex": r"\q"}, r"the pattern '\\q' has an escape that is not known"),
    ({"regex": "(?z)a"}, "the pattern '(?z)a' has a flag that is not known"),
    ({"regex": "[a&&b]"}, "no text satisfies it"),
    (
        {"schema": in_a_property({"pattern": r"\d("})},
        r"in properties.a.items, the pattern '\\d(' has an open parenthesis",
    ),
    (
        {"schema": in_a_property({"patternProperties": {"(": {}}})},
        "in properties.a.items, the pattern '(' has an open parenthesis",
    ),
    ({"schema": {"enum": []}}, "enum is empty, so no text satisfies it; name at least one"),
    (
        {"schema": in_a_property({"properties": {"x": {}, "y": {}}, "minProperties": 1})},
        "properties.a.items has minProperties or maxProperties beside optional properties",
    ),
    ({"schema": {"patternProperties": {"(": {}}, "properties": {"a": {}}}}, "the pattern '(' has an open parenthesis"),
    (
        {"schema": in_a_property({"type": "text"})},
        "in properties.a.items, 'text' is not a type; the types are null, boolean, number, string, array, object, "
        "integer",
    ),
    ({"schema": in_a_property(3)}, "in properties.a.items, a schema must be an object or a boolean"),
    (
        {"schema": in_a_property({"minItems": -1})},
        "in properties.a.items, minItems must be a whole number that is not negative",
    ),
    (
        {"schema": in_a_property({"not": {}})},
        "in properties.a.items, the keyword 'not' is not supported; leave it out, check the answer",
    ),
    ({"schema": in_a_property({"$ref": "#/x"})}, "in properties.a.items, the reference '#/x' leads nowhere"),
    ({"schema": {"$id": "http://a/", "anyOf": [{"$ref": "//[x"}]}}, "in anyOf.0, '//[x' is no URI"),
    (
        {"schema": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"enum": 3}}}},
        "in $defs.a/b, enum must be a list",
    ),
    (
        {"schema": in_a_property({"oneOf": [{"type": "string"}, {"enum": ["x"]}]})},
        "the options of properties.a.items.oneOf may overlap; use anyOf",
    ),
    ({"schema": {"$ref": "#"}}, "its references go in circles"),
    ({"schema": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "no text satisfies it"),
    ({"schema": {"type": "number", "multipleOf": 0}}, "it has a multipleOf that is 0"),
    ({"schema": {"const": "\ud800"}}, "it has half a character in const, which no answer can hold"),
    ({"grammar": 'x: "a"'}, "the grammar has no rule named start, with which it must begin"),
    (
        {"grammar": 'start: "a"\n  | nowhere'},
        "line 2, column 5 of the grammar names the rule 'nowhere', which the grammar does not have",
    ),
    (
        {"grammar": "start: A\nA: B"},
        "line 2, column 4 of the grammar names the terminal 'B', which the grammar does not have",
    ),
    (
        {"grammar": 'start: "a'},
        "line 1, column 8 of the grammar has '\"a', a string that has no closing quote on its line",
    ),
    (
        {"grammar": 'start: "x"\n  | /a\n'},
        "line 2, column 5 of the grammar has '/a', a regular expression that has no closing slash on its line",
    ),
    (
        {"grammar": 'start: "a"{5,2}'},
        "line 1, column 11 of the grammar has the repeat '{5,2}', whose bounds are reversed",
    ),
    ({"grammar": 'start: "\\q"'}, "line 1, column 8 of the grammar has '\"\\\\q\"', which is not a string of JSON"),
    ({"grammar": 'start: "\\ud800"'}, "line 1, column 8 of the grammar has half a character, which no answer can hold"),
    ({"grammar": 'start: "a")'}, "line 1, column 11 of the grammar has ')', which is not supported there"),
    (
        {"grammar": 'start: "a"\nstart: "b"'},
        "line 2, column 1 of the grammar has 'start' where a rule of another name must begin",
    ),
    ({"grammar": "start: /(/"}, "the pattern '(' has an open parenthesis"),
    (
        {"grammar": 'start: x\nx: %json {"items": {"enum": 3}}'},
        "line 2, column 4 of the grammar has a schema that cannot be followed: in items, enum must be a list",
    ),
    ({"grammar": "start: start"}, "its references go in circles"),
    ({"grammar": "start: <[700000]>"}, "it names the token 700000, but the vocabulary has 300 tokens, 0 to 299"),
    ({"grammar": "start: <[99999999999]>"}, "it names the token 99999999999, which no vocabulary has"),
]


@pytest.mark.parametrize(("given", "why"), HOPELESS, ids=str)
def test_hopeless_input_is_refused_in_words_about_the_callers_text(given: dict[str, Any], why: str) -> None:
    assert refusal(matchers(), given) == why
    assert refusal(Grammars(tokenizer(), 512), given) is not None


@pytest.mark.parametrize("word", ["enum", "anyOf", "oneOf", "type"])
def test_an_empty_list_of_values_is_refused_with_its_place_even_where_it_could_be_left_out(word: str) -> None:
    why = "is empty, so no text satisfies it; name at least one"
    assert refusal(matchers(), {"schema": in_a_property({word: []})}) == f"in properties.a.items, {word} {why}"


# What llguidance follows and our compiler does not.
FOLLOWED: list[dict[str, Any]] = [
    {"regex": r"\p{L}+"},
    {"regex": r"\w+"},
    {"regex": "[[:alpha:]]"},
    {"regex": "(?x) a # c"},
    {"schema": in_a_property({"type": "string", "pattern": r"^\p{Lu}"})},
    {"grammar": '%import common.INT\nstart: INT "a"'},
    {"grammar": 'start: "a"i'},
    {"grammar": 'start: "a" .. "z"'},
    {"grammar": 'start: "\\x41"'},
    {"grammar": "start[max_tokens=3]: /a/"},
    {"grammar": 'start: start "a" | "b"'},
    {"grammar": "start: <[3]>"},
]


@pytest.mark.parametrize("given", FOLLOWED, ids=str)
def test_what_llguidance_would_follow_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    assert refusal(matchers(), given) is None
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "; llguidance, which is not installed, may follow it; type: " in (refusal(matchers(), given) or "")


def test_without_llguidance_hopeless_input_is_refused_in_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert [refusal(matchers(), given) for given, _ in HOPELESS] == [why for _, why in HOPELESS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"grammar": 'start: "a"i x\nx: nowhere'}, 'line 2, column 4: unknown name: "nowhere"'),
        ({"grammar": 'start: "a"i <[700000]>'}, "line 1, column 8: Token range end too large: 700000"),
        ({"regex": r"\p{Nope}"}, "Unicode property not found"),
    ],
    ids=str,
)
def test_what_llguidance_refuses_is_told_with_the_callers_lines(given: dict[str, Any], why: str) -> None:
    ours, _, theirs = (refusal(matchers(), given) or "").partition("; llguidance says: ")
    assert "not supported" in ours
    assert theirs == why


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"], "additionalProperties": False}
    return inner


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"schema": nested(70)}, "its shortest texts nest deeper than 64 open calls"),
        ({"schema": {"type": "number", "minimum": 1e20}}, "it has a bound with too many digits"),
        (
            {"schema": in_a_property({"type": "number", "minimum": 1e20})},
            "in properties.a.items, it has a bound with too many digits",
        ),
        ({"regex": "$a"}, "the pattern '$a' has $ in the middle"),
        ({"regex": ".*" * 1500}, "it is too complex"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_neither_compiler_follows_is_refused_in_our_words(given: dict[str, Any], why: str) -> None:
    assert refusal(matchers(), given) == why


def test_a_first_token_that_takes_too_much_work_is_not_said_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_limits", lambda: LLParserLimits(step_lexer_fuel=10))
    assert (
        refusal(Grammars(tokenizer(), 512), {"regex": "(.{1,100}){1,100}q|([a-z]{0,900}){0,900}"})
        == "it is too complex"
    )


@pytest.mark.parametrize(
    "what", ["too many expressions constructed", "too many states: 9 >= 3", "Too many items (limit 1)"]
)
def test_an_answer_that_llguidance_cannot_continue_is_too_complex(what: str) -> None:
    assert _reason(f"lexer error: {what}") == "it is too complex"


def test_a_grammar_in_gbnf_without_llguidance_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    given = Sampling(grammar='root ::= "yes"')
    for follow in (Matchers(tokenizer(), 512).matcher, lambda it: Reasoning("<a>", "</a>", (), {}).before(it, "Hi")):
        with pytest.raises(BadOption, match=r"this grammar cannot be followed: it is in GBNF, .* type: .*pip install"):
            follow(given)


def test_a_grammar_in_gbnf_has_no_places_of_its_translation() -> None:
    assert refusal(matchers(), {"grammar": "root ::= b"}) == "as GBNF the grammar cannot be read: Rule 'b' not found"
    why = refusal(matchers(), {"grammar": 'root ::= "a" [z-a]'})
    assert why == "the pattern '[z-a]' has a range that is reversed"


@pytest.mark.parametrize("grammar", ['?start: "a"', 'start: x\n!x: "a"', "start: %json true"])
def test_marks_of_rules_and_schemas_without_keywords_are_read(grammar: str) -> None:
    assert refusal(matchers(), {"grammar": grammar}) is None
