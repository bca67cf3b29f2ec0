"""Optional calls in formats that are no JSON: whatever their grammars allow is read, and the arguments validate."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from ostinato.options import Rule, Sampling
from ostinato.text.answer import AnswerReader
from ostinato.text.automaton import AutomatonMatcher, GrammarMasks, Trie, of_rule
from ostinato.text.call_schema import read_value
from ostinato.text.channels import ChannelParser
from ostinato.text.reasoning import Reasoning
from ostinato.text.tools import _SHAPES, FormatName, Tool, ToolFormat
from tests.counts import soak
from tests.text.oracle import Vocabulary
from tests.text.test_automaton import compare
from tests.text.test_grammar import allowed
from tests.text.test_tools import follows

FORMATS: tuple[FormatName, ...] = ("tags", "seed", "key-tags", "atem", "python", "gemma", "harmony")
# Markers are text or control tokens; harmony's are control tokens.
CASES = [(name, special) for name in FORMATS for special in (False, True) if special or name != "harmony"]
LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 20},
        "unit": {"type": "string", "enum": ["c", "cf", "12"]},
        "level": {"enum": ["low", "7", 7, None]},
        "now": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "where": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "deep": {"type": "array", "items": {"$ref": "#/$defs/kind"}}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "tags"],
    "additionalProperties": False,
    "$defs": {"kind": {"enum": ["a", "b"]}},
}
ODD: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
TOOLS = [Tool("look", "", LOOK), Tool("look.up", "", {"type": "object", "properties": {}}), Tool("3d", "", ODD)]
# Whole words of the formats, so that random walks come through them; and every byte.
WORDS = [
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>",
    "<seed:tool_call>", "</seed:tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<atem:function_calls>", "</atem:function_calls>", "<atem:invoke", 'name="', "</atem:invoke>",
    "<atem:parameter", "</atem:parameter>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>",
    "<tool_call|>", '<|"|>', "call:", "look", "3d", "look.up", "city", "days", "unit", "level", "now", "tags",
    "where", "note", "cf", "low", "true", "True", "None", "null", "deep", '"x":', "x=", "x:", "x", '","', '"],',
    '",', '="', '=""', ":[", ":{", '":', '{"', '["a","b"]', "=>", "to=functions.", "assistant", "commentary",
    "analysis", "json", "to=self", "to=look", "Hello,", "é", "😀",
]  # fmt: skip
END = 0


@dataclass(frozen=True)
class Words:
    """A small vocabulary: the end, control tokens, words, and every byte."""

    tokens: list[bytes]
    markers: dict[str, int]
    special: list[int]

    @property
    def trie(self) -> Trie:
        return Trie(self.tokens, self.special)


@cache
def words_of(name: FormatName, special: bool) -> tuple[Words, ToolFormat]:
    """A vocabulary whose markers of the format are control tokens or text, and the format over it; two control tokens
    are no markers."""
    texts = [text for text in _SHAPES[name].markers if special]
    control = ["<end>", *texts, "<image>", "<other>"]
    bytes_ = [bytes([byte]) for byte in range(256)]
    tokens = [
        *(text.encode() for text in control),
        *(word.encode() for word in WORDS),
        b"\n",
        b">\n",
        b"\n</parameter>",
        *bytes_,
    ]
    markers = {text: 1 + number for number, text in enumerate(texts)}
    n = len(control)
    how = ToolFormat(name, _SHAPES[name].markers, markers, other_control=(n - 2, n - 1))
    return Words(tokens, markers, list(range(n))), how


def grammar_of(how: ToolFormat, *, parallel: bool = True, tools: Sequence[Tool] = TOOLS) -> str:
    found = how.triggered_grammar(tools, parallel=parallel)
    assert found is not None
    return found


@cache
def masks_of(name: FormatName, special: bool, parallel: bool) -> GrammarMasks:
    words, how = words_of(name, special)
    made = of_rule(Rule("grammar", grammar_of(how, parallel=parallel)))
    return GrammarMasks(made, words.trie, len(words.tokens))


def walked(
    words: Words, masks: GrammarMasks, rng: random.Random, begin: str, most: int = 250
) -> tuple[str, list[int]] | None:
    """The text and the tokens of a random answer that begins so, None if it did not end; words of the formats are
    likelier than letters."""
    matcher = AutomatonMatcher(masks, frozenset([END]), Sampling())
    found = tokens_of(words, begin)
    for id in found:
        matcher.take(id)
    for step in range(most):
        ids = allowed(matcher.mask())
        if ids == [END] or (END in ids and rng.random() < step / most / 4):
            shown = [words.tokens[id] for id in found if id not in words.special or id in words.markers.values()]
            return b"".join(shown).decode("utf-8", "replace"), found
        (id,) = rng.choices(ids, [weight(words, id) for id in ids])
        closing = [
            id for id in ids if id != END and words.tokens[id].strip().startswith((b"</", b"<|", b'"', b")", b"}"))
        ]
        if closing and rng.random() < 0.2:
            id = rng.choice(closing)
        if id == END:
            continue
        matcher.take(id)
        found.append(id)
    return None


def tokens_of(words: Words, text: str) -> list[int]:
    """Markers that are control tokens, and bytes."""
    parts = re.split("(" + "|".join(map(re.escape, words.markers)) + ")", text) if words.markers else [text]
    first = len(words.tokens) - 256
    return [
        id
        for part in parts
        for id in ([words.markers[part]] if part in words.markers else [first + byte for byte in part.encode()])
    ]


def weight(words: Words, id: int) -> float:
    """Letters, which are many, are rare each; so are control tokens that are no markers."""
    return 0 if id == END else 0.1 if len(words.tokens[id]) == 1 or id in words.special[-2:] else 3


def calls_in(how: ToolFormat, text: str, rng: random.Random) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls of a text that arrives in pieces."""
    reader = AnswerReader(ChannelParser() if how.name in ("harmony", "atem") else None, how.parser(TOOLS))
    calls: dict[int, list[str]] = {}
    content = ""
    for deltas in [*(reader.feed(piece) for piece in _pieces(text, rng)), reader.finish()]:
        for delta in deltas:
            content += delta.content
            if delta.call is not None:
                calls.setdefault(delta.call.index, [delta.call.name or ""]).append(delta.call.arguments)
    return content, [(name, json.loads("".join(parts))) for name, *parts in calls.values()]


def _pieces(text: str, rng: random.Random) -> Iterator[str]:
    while text:
        size = rng.randint(1, 12)
        yield text[:size]
        text = text[size:]


BEGINNINGS: dict[FormatName, str] = {
    "tags": "Well.\n<tool_call>\n<function=look>",
    "seed": "<seed:tool_call>\n<function=look>",
    "key-tags": "So <tool_call>look<",
    "atem": ' to=look<|message|><atem:function_calls>\n<atem:invoke name="look">',
    "python": "<|tool_call_start|>[look(",
    "gemma": "Yes.<|tool_call>call:look{",
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.look<|channel|>",
}
OPENERS: dict[FormatName, tuple[str, ...]] = {
    "tags": ("<tool_call>", "<function="),
    "seed": ("<seed:tool_call>",),
    "key-tags": ("<tool_call>",),
    "atem": ("<atem:function_calls>",),
    "python": ("<|tool_call_start|>",),
    "gemma": ("<|tool_call>",),
}


# The opening of a call, and a call of each format as its model writes it
WRITTEN: dict[FormatName, tuple[str, str]] = {
    "tags": (
        "<tool_call>",
        "\n<function=look>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
        '<parameter=now>\nTrue\n</parameter>\n<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>',
    ),
    "seed": (
        "<seed:tool_call>",
        "\n<function=look>\n<parameter=city>Rome</parameter>\n<parameter=days>12</parameter>\n"
        '<parameter=now>true</parameter>\n<parameter=tags>["a","b"]</parameter>\n</function>\n</seed:tool_call>',
    ),
    "key-tags": (
        "<tool_call>",
        "look\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key><arg_value>12</arg_value>"
        "<arg_key>now</arg_key>\n<arg_value>true</arg_value>\n"
        '<arg_key>tags</arg_key>\n<arg_value>["a", "b"]</arg_value>\n</tool_call>',
    ),
    "atem": (
        " to=look<|message|><atem:function_calls>",
        '\n<atem:invoke name="look">\n<atem:parameter name="city">Rome</atem:parameter>\n'
        '<atem:parameter name="days">12</atem:parameter>\n<atem:parameter name="now">true</atem:parameter>\n'
        '<atem:parameter name="tags">["a", "b"]</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    ),
    "python": ("<|tool_call_start|>", '[look(city="Rome", days=12, now=True, tags=["a", "b"])]<|tool_call_end|>'),
    "gemma": (
        "<|tool_call>",
        'call:look{city:<|"|>Rome<|"|>,days:12,now:true,tags:[<|"|>a<|"|>,<|"|>b<|"|>]}<tool_call|>',
    ),
    "harmony": (
        "<|channel|>commentary to=functions.",
        'look <|constrain|>json<|message|>{"city": "Rome", "days": 12, "now": true, "tags": ["a", "b"]}<|call|>',
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "special"), CASES)
def test_a_call_is_written_as_its_model_writes_it_and_follows_the_schema(name: FormatName, special: bool) -> None:
    _, how = words_of(name, special)
    begin, rest = WRITTEN[name]

    def judged(text: str) -> str:
        return follows(how, text, tools=TOOLS)

    assert judged(begin + rest) == "ends"
    content, calls = calls_in(how, begin + rest, random.Random(0))
    assert calls == [("look", {"city": "Rome", "days": 12, "now": True, "tags": ["a", "b"]})]
    assert content == ""
    assert judged(begin + rest.replace("look", "lock", 1)).startswith("ck")
    assert judged(begin + rest.replace("Rome", "Firenze")).startswith("e")  # six characters at most
    assert judged(begin + rest.replace("12", "21")).startswith("1")
    assert judged(begin + rest.replace("now", "new")).startswith("ew")
    assert judged(begin + rest.replace("city", "unit")).startswith("unit")  # city is required
    assert judged(begin + rest.partition("Ro")[0]) == "goes on"


@pytest.mark.parametrize(("name", "special"), CASES)
def test_text_without_a_call_is_free(name: FormatName, special: bool) -> None:
    _, how = words_of(name, special)
    for text in ("", "No.", "Say <tool, call: [look(city=3)] é\n</function> to=functions", '{"name": "look"}'):
        assert follows(how, text) == "ends"


def test_messages_that_are_no_calls_are_free_and_a_call_may_follow_them() -> None:
    _, how = words_of("harmony", True)
    before = "<|channel|>analysis<|message|>I call to=functions.other, {.<|end|><|start|>assistant"
    assert follows(how, f"{before}<|channel|>final<|message|>Done: to=functions.look") == "ends"
    assert follows(how, f"{before}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant") == "ends"
    for header in (
        " to=functions.look.up<|channel|>commentary json<|message|>",
        " to=functions.look.up<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.look.up<|message|>",
        "<|channel|>analysis to=functions.look.up json<|message|>",
    ):
        assert follows(how, f"{before}{header}{{}}<|call|>", tools=TOOLS) == "ends"
        assert follows(how, f"{before}{header}{{}}", tools=TOOLS) == "goes on"
        assert calls_in(how, f"{before}{header}{{}}<|call|>", random.Random(0))[1] == [("look.up", {})]
    assert follows(how, f"{before} so to=functions.look.up").startswith(".look.up")  # the parser reads no such header
    assert ToolFormat("harmony", (), {}).triggered_grammar(TOOLS) is None  # headers cannot be told from text


def test_what_muse_glimmer_thinks_is_free() -> None:
    _, how = words_of("atem", True)
    thought = " to=self<|message|>Maybe <atem:function_calls> with {.<|eom|><|start|>assistant"
    call = "".join(WRITTEN["atem"])
    assert follows(how, thought + call, tools=TOOLS) == "ends"
    assert follows(how, f"{thought} to=user<|message|>Or <atem:function_calls> with").startswith(" with")
    again = f"{thought}{call}<|eom|><|start|>assistant{call}"
    assert follows(how, again, tools=TOOLS) == "ends"
    assert [name for name, _ in calls_in(how, again, random.Random(0))[1]] == ["look", "look"]
    assert follows(how, again, tools=TOOLS, parallel=False).startswith(">\n<atem:invoke")


@pytest.mark.parametrize("prompt", ["Hi", "Hi <think>"])
@pytest.mark.parametrize("name", ["tags", "seed", "key-tags", "python", "gemma"])
def test_what_is_thought_before_a_call_is_free(name: FormatName, prompt: str) -> None:
    words, how = words_of(name, True)
    reasoning = Reasoning("<think>", "</think>", ("<think>", "</think>"), {})
    rule = reasoning.before(Sampling(grammar=grammar_of(how)), prompt, calls=True).rule
    assert rule is not None
    masks = GrammarMasks(of_rule(rule), words.trie, len(words.tokens))
    begin = "" if prompt.endswith("<think>") else "<think>"
    for city, fits in (("Rome", True), ("Firenze", False)):
        position = masks.begin()
        answer = f"{begin}I call 3d{{</think>\n{''.join(WRITTEN[name]).replace('Rome', city)}"
        assert all(masks.take(position, id) for id in tokens_of(words, answer)) is fits
        assert masks.ends(position) is fits


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])
def test_calls_come_once_where_they_are_not_parallel(name: FormatName) -> None:
    how = ToolFormat(name, (), {})
    begin, rest = WRITTEN[name]
    opener = begin.removeprefix(" to=look<|message|>")
    call = opener + rest
    assert follows(how, f"{call} and {call}.", tools=TOOLS) == "ends"
    assert follows(how, f"{call} and {call}", tools=TOOLS, parallel=False) == opener[-1] + rest
    assert follows(how, f"{call} and no more.", tools=TOOLS, parallel=False) == "ends"


def test_a_list_of_python_calls_has_one_where_they_are_not_parallel() -> None:
    how = ToolFormat("python", (), {})
    two = "<|tool_call_start|>[look.up(), look.up()]<|tool_call_end|>"
    assert follows(how, two, tools=TOOLS) == "ends"
    assert follows(how, two, tools=TOOLS, parallel=False).startswith(", ")


LOOSE: dict[FormatName, str] = {
    "tags": "<tool_call>\n<function=3d>\n<parameter=a>\n[1, 1]\n</parameter>\n</function>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function=3d>\n<parameter=a>[1, 1]</parameter>\n</function>\n</seed:tool_call>",
    "key-tags": "<tool_call>3d<arg_key>a</arg_key><arg_value>[1, 1]</arg_value></tool_call>",
    "python": "<|tool_call_start|>[3d(a=[1, 1])]<|tool_call_end|>",
    "gemma": "<|tool_call>call:3d{a:[1,1]}<tool_call|>",
}


@pytest.mark.parametrize("name", LOOSE)
def test_a_schema_that_cannot_be_written_leaves_any_arguments(name: FormatName) -> None:
    how = ToolFormat(name, (), {})
    assert follows(how, LOOSE[name], tools=TOOLS) == "ends"
    assert calls_in(how, LOOSE[name], random.Random(0)) == ("", [("3d", {"a": [1, 1]})])


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_function_too_large_for_the_compiler_leaves_any_arguments(name: FormatName) -> None:
    many = {f"{'long' * 20}{number}": {"enum": [f"{'e' * 50}{i}" for i in range(40)]} for number in range(400)}
    large = Tool("large", "", {"type": "object", "properties": many})
    _, how = words_of(name, True)
    found = how.triggered_grammar([*TOOLS, large])
    assert found is not None
    assert len(found) < 10_000
    assert of_rule(Rule("grammar", found)).n_states < 5_000


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "12"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("12", {"$ref": "#/$defs/name"}, "12"),
        ("12", {"enum": ["12", "a"]}, "12"),
        ("True", {"type": "boolean"}, True),
        ("True", {}, "True"),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, 1.7976931348623157e308),
        ("[1", {"type": "array"}, "[1"),
    ],
)
def test_a_bare_text_is_read_as_its_schema_says(text: str, schema: Any, value: Any) -> None:
    found = read_value(text, schema, {"$defs": {"name": {"type": "string"}}})
    assert found == value
    assert type(found) is type(value)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("parallel", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "special"), [pytest.param(*case, marks=() if case[1] else pytest.mark.slow) for case in CASES]
)
def test_what_the_grammar_allows_is_read_and_validates(name: FormatName, parallel: bool, special: bool) -> None:
    words, how = words_of(name, special)
    masks, rng = masks_of(name, special, parallel), random.Random(7)
    seen: list[str] = []
    several = without = 0
    for number in range(soak(600, part=40)):
        answer = walked(words, masks, rng, BEGINNINGS[name] if number % 2 else "")
        if answer is None:
            continue
        text, tokens = answer
        content, calls = calls_in(how, text, rng)
        for called, arguments in calls:
            (tool,) = [tool for tool in TOOLS if tool.name == called]
            if tool.name != "3d":  # any arguments
                jsonschema.validate(arguments, {**tool.parameters, "additionalProperties": False})
        assert not any(opener in content for opener in OPENERS.get(name, ())), text
        if name == "harmony":
            assert len(calls) == tokens.count(words.markers["<|call|>"]), text
        assert parallel or len(calls) <= 1, text
        seen += [called for called, _ in calls]
        several, without = several + (len(calls) > 1), without + (not calls)
    assert seen.count("look") > 2
    assert without
    assert bool(several) == (parallel and name != "harmony")


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("name", "special"), CASES)
def test_masks_of_optional_calls_are_those_of_the_oracle(name: FormatName, special: bool) -> None:
    words, how = words_of(name, special)

    class Table:
        eos_token_id, bos_token_id = END, None
        tokens, special_token_ids = words.tokens, words.special

        def __call__(self, text: str) -> list[int]:
            return [words.tokens.index(bytes([byte])) for byte in text.encode()]

    theirs = LLTokenizer(TokenizerWrapper(Table()), n_vocab=len(words.tokens), eos_token=[END])
    closing = np.array([len(token) > 1 for token in words.tokens])
    both = Vocabulary(words.tokens, words.special, [END], closing, words.trie, theirs)
    for parallel in (True, False):
        rule = Rule("grammar", grammar_of(how, parallel=parallel))
        for seed in range(soak(40)):
            compare(both, rule, random.Random(seed), steps=60)


BARE_WORDS = (
    "None",
    "null",
    "True",
    "true",
    "False",
    "12",
    "nan",
    "NaN",
    "-",
    "2024-01-01",
    "x",
    "xy",
    '"x"',
    "[1]",
    "1e5",
)
BARE_SCHEMAS: list[dict[str, Any]] = [
    {"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"type": "null"}]},
    {"type": ["string", "null"], "maxLength": 2},
    {"type": ["string", "boolean"], "maxLength": 2},
    {"type": ["string", "null"], "format": "date"},
    {"type": ["string", "integer"], "maxLength": 1},
    {"anyOf": [{"type": "string", "format": "date"}, {"type": "integer"}]},
    {"type": ["string", "number", "null"], "pattern": "^x"},
]
BARE_CALLS: dict[FormatName, str] = {
    "tags": "<tool_call>\n<function=look>\n<parameter=v>\n{}\n</parameter>\n</function>\n</tool_call>",
    "key-tags": "<tool_call>look\n<arg_key>v</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function=look>\n<parameter=v>{}</parameter>\n</function>\n</seed:tool_call>",
}


@pytest.mark.parametrize("name", BARE_CALLS)
@pytest.mark.parametrize("schema", BARE_SCHEMAS, ids=json.dumps)
def test_a_bare_value_that_a_grammar_allows_is_read_as_its_schema_says(
    name: FormatName, schema: dict[str, Any]
) -> None:
    """Of a nullable text templates write null as `None`, which is no text of the pattern."""
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"], "additionalProperties": False}
    tools = [Tool("look", "", parameters)]
    how, n_allowed = words_of(name, True)[1], 0
    for word in BARE_WORDS:
        text = BARE_CALLS[name].format(word)
        if follows(how, text, tools=tools) != "ends":
            continue
        reader = AnswerReader(None, how.parser(tools))
        deltas = [*reader.feed(text), *reader.finish()]
        arguments = json.loads("".join(delta.call.arguments for delta in deltas if delta.call is not None))
        jsonschema.validate(arguments, parameters)
        n_allowed += 1
    assert n_allowed
