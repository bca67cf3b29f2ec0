"""Calls in an answer's text: read the same whole or letter by letter, and nothing that is no call is lost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.text.answer import AnswerReader, Delta, Parser
from ostinato.text.call_parser import CallObject, JsonCalls
from ostinato.text.tools import FormatName, Tool, ToolFormat

ROOT = Path(__file__).parents[2]
Call = tuple[str | None, str]
MakeParser = Callable[[Callable[[], str]], Parser]


TEXT = {"properties": {"a": {"type": "string"}}}
TOOLS = (Tool("f", "", TEXT), Tool("g", "", {}))


def made_by(name: FormatName) -> MakeParser:
    """The parser of a format, as `ToolFormat` makes it, with ids of ours."""

    def make(new_id: Callable[[], str]) -> Parser:
        parser = ToolFormat(name, (), {}).parser(TOOLS)
        parser._new_id = new_id  # type: ignore[attr-defined]
        return parser

    return make


hermes, mistral, tags = made_by("hermes"), made_by("mistral"), made_by("tags")
keys, seed, atem = made_by("key-tags"), made_by("seed"), made_by("atem")
python, gemma, harmony = made_by("python"), made_by("gemma"), made_by("harmony")
deepseek, fenced = made_by("deepseek"), made_by("deepseek-fenced")
nemotron, cohere, granite = made_by("nemotron"), made_by("cohere"), made_by("granite")


def llama(new_id: Callable[[], str]) -> Parser:
    return JsonCalls(["<|python_tag|>"], [], new_id, bare=True, known={"f", "g"})


ALL: tuple[MakeParser, ...] = (
    *(hermes, llama, mistral, tags, keys, seed, atem, python, gemma),
    *(deepseek, fenced, nemotron, cohere, granite, harmony),
)


def read(make: MakeParser, pieces: Sequence[str]) -> tuple[str, list[Call]]:
    """The content and the calls that pieces of text join to."""
    numbers = count()
    parser = make(lambda: f"id{next(numbers)}")
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.feed(piece)
    deltas += parser.finish()
    calls: list[tuple[str, str | None, list[str]]] = []
    for delta in deltas:
        assert bool(delta.content) + (delta.call is not None) == 1
        if delta.call is None:
            continue
        if delta.call.index == len(calls):
            assert delta.call.id == f"id{len(calls)}"  # the first of a call, and only that, has its id and name
            calls.append((delta.call.id, delta.call.name, []))
        else:
            assert delta.call.index == len(calls) - 1
            assert (delta.call.id, delta.call.name) == (None, None)
        calls[-1][2].append(delta.call.arguments)
    return "".join(delta.content for delta in deltas), [(name, "".join(parts)) for _, name, parts in calls]


SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
FIRST, LAST = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
START, STOP = "<|tool_call_start|>", "<|tool_call_end|>"
CALL, NO_CALL = "<tool_call>", "</tool_call>"
KEY_A, KEY_B = "<arg_key>a</arg_key>", "<arg_key>b</arg_key>"

CASES: list[tuple[MakeParser, str, str, list[Call]]] = [
    (hermes, "just text", "just text", []),
    (hermes, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    (hermes, 'Sure.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', "Sure.", [("f", "{}")]),
    (hermes, '<tool_call>{"arguments": {"x": "}"}, "name": "f"}</tool_call>', "", [("f", '{"x": "}"}')]),
    (hermes, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (hermes, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (
        hermes,
        '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "\\"]"}]}}</tool_call>\n'
        '<tool_call>{"name": "g"}</tool_call>',
        "",
        [("f", '{"a": [1, {"b": "\\"]"}]}'), ("g", "{}")],
    ),
    (hermes, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (hermes, '<tool_call>{"name": "f", "arguments": {"a": "1\n2\\\n"}}</tool_call>', "", [("f", '{"a": "1\\n2\\n"}')]),
    # Half a character, which UTF-8 cannot write.
    (hermes, '<tool_call>{"name": "\\ud800", "arguments": "\\ud800"}</tool_call>', "", [("\ufffd", "\ufffd")]),
    (
        tags,
        '<tool_call>{"name": "\\ud800", "arguments": {"a": "\\ud83d\\ude00\\ud800"}}</tool_call>',
        "",
        [("\ufffd", '{"a": "😀\ufffd"}')],
    ),
    (
        tags,
        '<tool_call><function=g><parameter=b>["\\udc00"]</parameter></function></tool_call>',
        "",
        [("g", '{"b": ["\ufffd"]}')],
    ),
    # JSON between tags: arguments as text, or by another name, or none that JSON can write.
    (tags, '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\\"}"}</tool_call>', "", [("f", '{"a": "x"}')]),
    (tags, '<tool_call>{"name": "f", "parameters": {"a": "x"}}</tool_call>', "", [("f", '{"a": "x"}')]),
    (tags, '<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", "{}")]),
    (
        tags,
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        "",
        [("f", '{"a": 1.7976931348623157e+308}')],
    ),
    *(
        (tags, text, text, [])
        for text in (
            '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "oops"}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        )
    ),
    (python, f'{START}[{{"name": "f", "arguments": "{{\\"a\\": 1}}"}}]{STOP}', "", [("f", '{"a": 1}')]),
    (hermes, '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', "", [("f", '{"a": 1}')]),
    (
        hermes,
        '<tool_call>{"name": "f", "arguments": {"a": 1} </tool_call>\n<tool_call>{"name": "g"}</tool_call> so',
        "so",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (granite, '<|tool_call|>[{"name": "f", "arguments": {"a": 1}]', "", [("f", '{"a": 1}')]),
    (mistral, '[TOOL_CALLS][{"name": "f", "arguments": {} oops', "oops", [("f", "{}")]),
    (hermes, "a <tool_ b", "a <tool_ b", []),
    (hermes, "<tool_call>never mind", "never mind", []),
    (hermes, '<tool_call>{"name: 3}</tool_call> so', '{"name: 3}</tool_call> so', []),
    (hermes, '<tool_call>{"name": "f", "argum', "", [("f", "")]),
    (hermes, '<tool_call>{"nam', '{"nam', []),
    (hermes, "blanks \n", "blanks \n", []),
    (llama, '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (llama, '\n{"type": "function", "name": "g", "parameters": {}}', "", [("g", "{}")]),
    (llama, '{"type": "function", "function": {"name": "f", "parameters": {"q": 2}}}', "", [("f", '{"q": 2}')]),
    (llama, '{"name": "other", "parameters": {}} is no call', '{"name": "other", "parameters": {}} is no call', []),
    (llama, '{"answer": 42}', '{"answer": 42}', []),
    (llama, 'In JSON: {"name": "f"}', 'In JSON: {"name": "f"}', []),
    (llama, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"}', "", [("f", "{}"), ("g", "{}")]),
    (mistral, '[TOOL_CALLS] [{"name": "f", "arguments": {"a":1}}, {"name": "g"}]', "", [("f", '{"a":1}'), ("g", "{}")]),
    (mistral, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x9[ARGS]{}', "", [("f", '{"a": 1}'), ("g", "{}")]),
    (mistral, "[TOOL] and [INST] are words", "[TOOL] and [INST] are words", []),
    (
        tags,
        "ok\n<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n12\n</parameter>\n</function>\n</tool_call>",
        "ok",
        [("f", '{"a": "12", "b": 12}')],
    ),
    (tags, '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>', "", [("f", '{"a": "x"}')]),
    (tags, f'{CALL}{{"name": "f", "arguments": null}}{NO_CALL}', "", [("f", "{}")]),
    (tags, "<function=f></function> after", "after", [("f", "{}")]),
    (tags, f"ok <function=f></function>\n{NO_CALL}\n so {NO_CALL}", f"okso {NO_CALL}", [("f", "{}")]),
    (
        tags,
        f"<function=f></function>{NO_CALL}\n{CALL}<function=g></function>{NO_CALL}",
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    (tags, f"<function=f></function> </tool {NO_CALL}", f"</tool {NO_CALL}", [("f", "{}")]),
    (tags, f"{CALL}<function=f><parameter=a>\n1\n</function>{NO_CALL}", "", [("f", '{"a": "1"}')]),
    (tags, "half <function=f><parameter=a>1", "half <function=f><parameter=a>1", []),
    (tags, f"{CALL}<function=f><parameter=a>1</parameter></function>", "", [("f", '{"a": "1"}')]),
    (tags, f"{CALL}<function=f></function>{CALL}<function=g></function>{NO_CALL}", "", [("f", "{}"), ("g", "{}")]),
    (tags, "see <tool_call>this</tool_call> ?", "see <tool_call>this</tool_call> ?", []),
    (
        seed,
        "<seed:tool_call>\n<function=f>\n<parameter=a>1\n2</parameter>\n</function>\n</seed:tool_call>",
        "",
        [("f", '{"a": "1\\n2"}')],
    ),
    (
        keys,
        f"hm\n{CALL}f\n{KEY_A}\n<arg_value>1</arg_value>\n{KEY_B}<arg_value>[1]</arg_value>{NO_CALL}",
        "hm",
        [("f", '{"a": "1", "b": [1]}')],
    ),
    (
        keys,
        f"{CALL}g{NO_CALL}\n{CALL}f{KEY_A}<arg_value> x </arg_value>{NO_CALL} so",
        "so",
        [("g", "{}"), ("f", '{"a": " x "}')],
    ),
    (keys, f"{CALL}never{NO_CALL} {CALL}g h{NO_CALL}", f"{CALL}never{NO_CALL} {CALL}g h{NO_CALL}", []),
    (keys, f"{CALL}f{KEY_A}{NO_CALL}", f"{CALL}f{KEY_A}{NO_CALL}", []),
    (
        atem,
        '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a">1</atem:parameter>\n'
        '<atem:parameter name="b">[true]</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        "",
        [("f", '{"a": "1", "b": [true]}')],
    ),
    (
        python,
        f'I look.{START}[f(a="x", b=[1, -2.5], c={{"d": None}}), g()]{STOP}So.',
        "I look.So.",
        [("f", '{"a": "x", "b": [1, -2.5], "c": {"d": null}}'), ("g", "{}")],
    ),
    (python, f"{START}[f(a='it\\'s', b=True,)]{STOP}", "", [("f", '{"a": "it\'s", "b": true}')]),
    (python, f'{START}[{{"name": "f", "arguments": {{"a": 1}}}}]{STOP}', "", [("f", '{"a": 1}')]),
    (python, f"{START}[f(1)]{STOP} no", f"{START}[f(1)]{STOP} no", []),
    (python, f"{START}[f(a=g())]{STOP}", f"{START}[f(a=g())]{STOP}", []),
    (python, f"{START}[f(a=1e999)]", f"{START}[f(a=1e999)]", []),
    (python, f"{START}[f(a='\\U00110000')]", f"{START}[f(a='\\U00110000')]", []),
    (
        gemma,
        '<|tool_call>call:f{a:<|"|>Ro"me, {x}<|"|>,b:[1,true],c:{d:<|"|><|"|>}}<tool_call|>',
        "",
        [("f", '{"a": "Ro\\"me, {x}", "b": [1, true], "c": {"d": ""}}')],
    ),
    (
        gemma,
        '<|tool_call>call:f{}<tool_call|><|tool_call>call:g{"a": "b"}<tool_call|>',
        "",
        [("f", "{}"), ("g", '{"a": "b"}')],
    ),
    (
        gemma,
        '<|tool_call>call:f{a:{1:2,$x:3,with space :4,a/b@c:<|"|>d<|"|>,Content-Type:null}}<tool_call|>',
        "",
        [("f", '{"a": {"1": 2, "$x": 3, "with space": 4, "a/b@c": "d", "Content-Type": null}}')],
    ),
    (gemma, "<|tool_call>call:f{a:b}<tool_call|>", "<|tool_call>call:f{a:b}<tool_call|>", []),
    (
        deepseek,
        f'Ok{FIRST}{BEGIN}f{SEP}{{"a": 1}}{END}{BEGIN}g{SEP}{{}}{END}{LAST}',
        "Ok",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        fenced,
        f'{FIRST}{BEGIN}function{SEP}f\n```json\n{{"a": 1}}\n```{END}{LAST}',
        "",
        [("f", '{"a": 1}')],
    ),
    (
        nemotron,
        '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</TOOLCALL>',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        cohere,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>',
        "",
        [("f", '{"a": 1}')],
    ),
    (granite, '<|tool_call|>[{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
    (
        harmony,
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        "",
        [("f", '{"a": 1}')],
    ),
    (mistral, '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
]


@pytest.mark.parametrize(("make", "text", "content", "calls"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_calls_are_read_however_the_text_is_cut(
    make: MakeParser, text: str, content: str, calls: list[Call], size: int
) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert read(make, pieces) == (content, calls)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
calls = st.lists(
    st.tuples(st.sampled_from("fg"), st.dictionaries(st.text(max_size=5), values, max_size=3)), min_size=1, max_size=3
)


Made = Sequence[tuple[str, dict[str, Any]]]


def as_json(made: Made, member: str = "arguments", name: str = "name") -> list[str]:
    return [json.dumps({name: function, member: arguments}) for function, arguments in made]


def as_gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{as_gemma(key)}:{as_gemma(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_gemma, value)) + "]"
    return json.dumps(value)


def as_python(made: Made) -> str:
    return ", ".join(f"{name}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for name, a in made)


def as_keys(arguments: Mapping[str, Any]) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items())


WRITTEN: dict[MakeParser, Callable[[Made], str]] = {
    hermes: lambda made: "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in as_json(made)),
    llama: lambda made: "; ".join(as_json(made, "parameters")),
    mistral: lambda made: f"[TOOL_CALLS][{', '.join(as_json(made))}]",
    nemotron: lambda made: f"<TOOLCALL>[{', '.join(as_json(made))}]</TOOLCALL>",
    granite: lambda made: f"<|tool_call|>[{', '.join(as_json(made))}]",
    cohere: lambda made: f"<|START_ACTION|>[{', '.join(as_json(made, 'parameters', 'tool_name'))}]<|END_ACTION|>",
    deepseek: lambda made: "".join(f"{BEGIN}{name}{SEP}{json.dumps(a)}{END}" for name, a in made),
    fenced: lambda made: "".join(f"{BEGIN}function{SEP}{n}\n```json\n{json.dumps(a)}\n```{END}" for n, a in made),
    gemma: lambda made: "".join(f"<|tool_call>call:{name}{as_gemma(a)}<tool_call|>" for name, a in made),
}
NAMED: dict[MakeParser, Callable[[Made], str]] = {
    python: lambda made: f"<|tool_call_start|>[{as_python(made)}]<|tool_call_end|>",
    keys: lambda made: "\n".join(f"<tool_call>{name}\n{as_keys(a)}</tool_call>" for name, a in made),
}


@given(make=st.sampled_from(sorted(WRITTEN, key=list(WRITTEN).index)), made=calls, cuts=st.data())
def test_what_was_written_is_read_again(
    make: MakeParser, made: list[tuple[str, dict[str, Any]]], cuts: st.DataObject
) -> None:
    assert_read_again(make, WRITTEN[make](made), made, cuts)


words = st.text(st.characters(whitelist_categories=["Ll"]), min_size=1, max_size=4).map(lambda word: f"k{word}")
letters = st.characters(exclude_characters="<|>", exclude_categories=["Cs"])
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(letters, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@given(
    make=st.sampled_from(sorted(NAMED, key=list(NAMED).index)),
    made=st.lists(st.tuples(st.sampled_from("fg"), st.dictionaries(words, plain_values, max_size=3)), min_size=1),
    cuts=st.data(),
)
@settings(max_examples=60)
def test_names_and_literals_that_were_written_are_read_again(
    make: MakeParser, made: list[tuple[str, dict[str, Any]]], cuts: st.DataObject
) -> None:
    if make is keys:  # a text that looks like another value is one, where no schema says that it is text
        made = [(name, {key: loads(value) for key, value in a.items()}) for name, a in made]
    assert_read_again(make, NAMED[make](made), made, cuts)


def loads(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def assert_read_again(make: MakeParser, text: str, made: Made, cuts: st.DataObject) -> None:
    at = sorted(cuts.draw(st.sets(st.integers(1, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    content, found = read(make, pieces)
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == list(made)


PARTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<function=f>", "</function>",
    "<parameter=a>", "</parameter>", '{"name": "f"', '"arguments": {', '"a": 1', "}", "}}", ", ", " ", "\n", "f", '"',
    "[", "]", "\\", "{", '"name": "g"', "so", "<",
    "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call_start|>", "<|tool_call_end|>", "f(a=", "1)",
    "<|tool_call>", "<tool_call|>", "call:f{", 'a:<|"|>', '<|"|>', "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<seed:tool_call>", "</seed:tool_call>", "<TOOLCALL>", "</TOOLCALL>", "<|tool_call|>", "<|START_ACTION|>", "```",
    '<atem:function_calls><atem:invoke name="f">', "</atem:invoke></atem:function_calls>",
    "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>", "<|call|>",
]  # fmt: skip


@pytest.mark.slow
@given(make=st.sampled_from(ALL), text=st.lists(st.sampled_from(PARTS), max_size=14).map("".join), cuts=st.data())
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_the_same_whole_or_in_pieces(make: MakeParser, text: str, cuts: st.DataObject) -> None:
    at = sorted(cuts.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    assert read(make, pieces) == read(make, [text])


OF_MARKERS = re.compile("call|tool|function|action|invoke|param|arg|channel|start|message|python", re.IGNORECASE)


@given(text=st.text(max_size=80).filter(lambda text: OF_MARKERS.search(text) is None))
def test_text_without_a_marker_is_content_to_the_letter(text: str) -> None:
    for make in (make for make in ALL if make is not llama):
        assert read(make, [text]) == (text, [])


def test_arguments_are_given_out_as_they_come() -> None:
    parser = hermes(lambda: "id")
    told = [
        delta.call.arguments
        for piece in ['<tool_call>{"name": "f", "arguments": {"a"', ": 1", "23}}", "</tool_call>"]
        for delta in parser.feed(piece)
        if delta.call is not None
    ]
    assert told == ['{"a"', ": 1", "23}"]


def test_a_long_call_is_read_in_time_that_grows_with_its_length() -> None:
    call = CallObject()
    text = json.dumps({"name": "f", "arguments": {"text": "x" * 200_000}})
    assert len("".join(map(call.take, text))) > 200_000
    assert call.ended


CUT_CALLS = """
from tests.text.test_call_parser import atem, gemma, keys, python, read, seed, tags
n = 3_000
for make, begin, one, end in (
    (keys, "<tool_call>f", "<arg_key>a</arg_key><arg_value>1</arg_value>", "<arg_key>b</arg_key><arg_value>x"),
    (keys, "<tool_call>f", "<arg_key>a</arg_key>", "<arg_value>x"),
    (tags, "<tool_call><function=f>", "<parameter=a>1</parameter>", "<parameter=b>x"),
    (tags, "<tool_call><function=f>", "<parameter=a>", "x"),
    (seed, "<seed:tool_call><function=f>", "<parameter=a>1</parameter>", "<parameter=b>x"),
    (atem, '<atem:function_calls><atem:invoke name="f">', '<atem:parameter name="a">1</atem:parameter>', "x"),
    (python, "<|tool_call_start|>[f(", "a='x',", "b='"),
    (gemma, "<|tool_call>call:f{", 'a:<|"|>x<|"|>,', 'b:<|"|>'),
):
    text = begin + one * n + end
    content, calls = read(make, [text])
    assert (content == text) != bool(calls), (content[:50], calls[:1])
"""


@pytest.mark.slow
def test_a_call_that_is_cut_behind_many_arguments_is_read_in_time_that_grows_with_its_length() -> None:
    """In a process of its own: a regular expression that tries every way holds its thread for years."""
    subprocess.run([sys.executable, "-c", CUT_CALLS], timeout=60, check=True, cwd=ROOT)


def test_a_reader_counts_the_calls_that_it_passes_on() -> None:
    reader = AnswerReader(calls=hermes(lambda: "id"))
    for piece in ("a", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>'):
        reader.feed(piece)
    reader.finish()
    assert reader.n_calls == 2


def test_a_reader_that_is_to_pass_on_one_call_leaves_out_the_others() -> None:
    reader = AnswerReader(calls=hermes(lambda: "id"), most_calls=1)
    text = 'a<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><tool_call>{"name": "g"}</tool_call>'
    deltas = [delta for letter in text for delta in reader.feed(letter)] + reader.finish()
    assert [delta.call.name for delta in deltas if delta.call is not None and delta.call.name] == ["f"]
    assert "".join(delta.call.arguments for delta in deltas if delta.call is not None) == '{"x": 1}'
    assert "".join(delta.content for delta in deltas) == "a"
    assert reader.n_calls == 1


@pytest.mark.parametrize("object", ['{"name": oops}', '{"arguments": {}}', '{"name": 5}'])
def test_an_object_between_tags_that_is_no_call_is_content(object: str) -> None:
    text = f"a <tool_call>{object}</tool_call> b<function=f></function>"
    for pieces in ([text], list(text)):
        reader = AnswerReader(calls=tags(lambda: "id"))
        deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.finish()
        assert [delta.call.name for delta in deltas if delta.call is not None] == ["f"]
        assert "".join(delta.content for delta in deltas) == f"a <tool_call>{object}</tool_call> b"
