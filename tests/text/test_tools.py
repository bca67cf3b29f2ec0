"""Tools: definitions checked and handed to templates of every style, and answers that must be calls."""

from __future__ import annotations

import copy
import json
import pickle
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import BadInput, BadOption
from ostinato.options import MAX_RULE_CHARACTERS, MadeGrammar, Rule, Sampling
from ostinato.text.answer import AnswerReader
from ostinato.text.automaton import GrammarMasks, Trie, of_rule
from ostinato.text.bare_calls import ANY_FORM, SPELLED, BareForm
from ostinato.text.channels import ChannelParser
from ostinato.text.chat import ChatFormat, ChatRequest
from ostinato.text.folder import tokenizer_from_folder
from ostinato.text.grammar import Grammars
from ostinato.text.stream import TextStream
from ostinato.text.template import ChatTemplate
from ostinato.text.tokenizer import Tokenizer
from ostinato.text.tools import _SHAPES, FormatName, Tool, ToolFormat, read_allowed, read_choice, read_tools
from tests.counts import soak
from tests.models import tiny_text
from tests.text.templates import CHATML, TURNS
from tests.text.test_grammar import allowed

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What the sky does.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city"],
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TOOLS = read_tools([WEATHER, NOW])

# Templates in the styles of the families, each reduced to what it does with tools.
QWEN = """\
{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Answer within <tool_call></tool_call> tags.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}<|im_start|>assistant
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CODER = QWEN + "{# <function=name> <parameter=key> #}"
LLAMA = """\
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if not message.tool_calls | length == 1 %}{{ raise_exception("only single tool-calls at once!") }}{% endif %}
{{- '<|python_tag|>' if false }}{"name": "{{ message.tool_calls[0].function.name }}", "parameters": \
{{ message.tool_calls[0].function.arguments | tojson }}}
{%- else %}[{{ message.role }}]{{ message.content }}{% endif %}
{%- if loop.first and tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- endfor %}"""
MISTRAL = """\
{%- for message in messages %}
{%- if message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("Tool call IDs must have length 9!") }}{% endif %}
{{- call.function | tojson }}{{ call.id }}{% endfor %}]
{%- elif message.role == "tool" %}[TOOL_RESULTS]{{ message.tool_call_id }}[{{ message.content }}][/TOOL_RESULTS]
{%- else %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- endif %}{% endfor %}"""
PHI = """\
{%- for message in messages %}
{%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{- '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}
{%- else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"""

HARMONY = """\
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- set called = namespace(name=none) %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 or message.content %}{{ raise_exception("one call, no content") }}{% endif %}
{%- set call = message.tool_calls[0].function %}{% set called.name = call.name %}
{{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|>' if message.thinking }}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'tool' %}<|start|>functions.{{ called.name }} to=assistant{{ message.content | tojson }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}
{{- '<|start|>assistant' }}"""
SEPARATED = """\
{%- for message in messages %}
{%- if message.tool_calls %}<｜tool▁calls▁begin｜>
{%- for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments | tojson }}
{%- endfor %}
{%- else %}<{{ message.role }}>{{ message.content }}{% endif %}{% endfor %}"""
LISTED = """\
{%- if tools %}List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"""

STYLES = {
    "hermes": QWEN,
    "seed": CODER.replace("tool_call>", "seed:tool_call>"),
    "key-tags": QWEN + "{# <arg_key> #}",
    "atem": QWEN + "{# <atem:invoke #}",
    "gemma": QWEN + "{# <|tool_call>call: #}",
    "nemotron": QWEN + "{# <TOOLCALL> #}",
    "cohere": QWEN + "{# <|START_ACTION|> #}",
    "granite": LISTED.replace("<|tool_list_start|>", "<|start_of_role|><|tool_call|>").replace("List of", ""),
    "python": LISTED,
    "deepseek": SEPARATED,
    "deepseek-fenced": SEPARATED + "{# ```json #}",
    "harmony": HARMONY,
    "tags": CODER,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral-named": MISTRAL + "{# [ARGS] #}",
    "phi": PHI,
    "plain": CHATML,
}
# Those whose conversations are changed for the template; the others are given as they are.
RENDERED = [name for name, template in STYLES.items() if not template.startswith(QWEN) or name == "hermes"]
RENDERED.remove("seed")
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "How is the sky?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "blue"},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
]


@cache
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        tiny_text.write_files(Path(folder))
        return tokenizer_from_folder(Path(folder))


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), tokenizer().vocab_size)


@contextmanager
def template_of(source: str) -> Iterator[ChatTemplate]:
    template = ChatTemplate(source, bos_token="", eos_token="")
    try:
        yield template
    finally:
        template.close()


def format_of(source: str | None) -> ToolFormat:
    if source is None:
        return ToolFormat.for_template(None, tokenizer())
    with template_of(source) as template:
        return ToolFormat.for_template(template, tokenizer())


def rendered(source: str, talk: list[dict[str, Any]], tools: tuple[Tool, ...]) -> str:
    how = format_of(source)
    with template_of(source) as template:
        return template.render(how.prompt_messages(talk, tools), tools=how.prompt_tools(tools))


# Definitions


def test_a_function_has_a_name_and_may_have_the_rest() -> None:
    assert [tool.name for tool in TOOLS] == ["weather", "now"]
    assert TOOLS[1] == Tool("now", "", {"type": "object", "properties": {}})
    assert read_tools(None) == read_tools([]) == ()
    assert TOOLS[0].definition == WEATHER


@pytest.mark.parametrize(
    ("definitions", "why"),
    [
        ("weather", "tools is str"),
        ([3], r"tools\[0\] must be of the form"),
        ([NOW, {"type": "retrieval"}], r"tools\[1\] must be of the form"),
        ([{"type": "function"}], r"tools\[0\].function is missing"),
        ([{"type": "function", "function": {}}], r"tools\[0\].function.name is None"),
        ([{"type": "function", "function": {"name": "a b"}}], "letters, digits"),
        ([{"type": "function", "function": {"name": "a", "description": 3}}], "description is int"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], "parameters is list"),
        (
            [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}],
            r"tools\[0\].function.parameters of 'a' must describe an object; its type is 'string'",
        ),
        ([NOW, NOW], r"tools\[1\] is a second function of the name 'now'"),
        ([NOW] * 129, "at most 128"),
    ],
)
def test_what_is_no_tool_is_refused_by_its_place(definitions: Any, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        read_tools(definitions)


def test_a_choice_is_a_word_or_names_a_function() -> None:
    named = {"type": "function", "function": {"name": "now"}}
    assert read_choice(None, TOOLS) == read_choice("auto", TOOLS) == "auto"
    assert read_choice(None, ()) == read_choice("none", TOOLS) == read_choice("auto", ()) == "none"
    assert read_choice("required", TOOLS) == "required"
    assert read_choice(named, TOOLS) == TOOLS[1]
    for bad, why in (("must", "must be none, auto"), ({"type": "function", "function": {"name": "x"}}, "weather, now")):
        with pytest.raises(BadInput, match=why):
            read_choice(bad, TOOLS)
    with pytest.raises(BadInput, match="there are no tools"):
        read_choice("required", ())


def test_a_choice_may_allow_some_of_the_tools() -> None:
    def choice(mode: str, *names: str) -> Any:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    assert read_allowed(choice("auto", "now"), TOOLS) == ((TOOLS[1],), "auto")
    assert read_allowed(choice("required", "now", "weather"), TOOLS) == (tuple(TOOLS), "required")
    assert read_allowed(choice("auto"), TOOLS) == ((), "none")
    assert read_allowed("required", TOOLS) == (tuple(TOOLS), "required")
    for bad, why in (
        (choice("auto", "then"), "allows the function 'then', which is not among the tools"),
        (choice("required"), "there are no tools"),
        (choice("sometimes", "now"), "must have a mode"),
        ({"type": "allowed_tools", "tools": []}, "must have a mode"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["now"]}}, "the function None"),
    ):
        with pytest.raises(BadInput, match=why):
            read_allowed(bad, TOOLS)


# Optional calls


@cache
def masks_of(grammar: str) -> GrammarMasks:
    return GrammarMasks(of_rule(Rule("grammar", grammar)), Trie([b"x"] * 200, list(range(200))), 200)


def follows(how: ToolFormat, text: str, *, tools: Sequence[Tool] = TOOLS, parallel: bool = True) -> str:
    """What a triggered grammar says of a text: `ends`, `goes on`, or what is left where it refuses. A control token is
    written by its marker."""
    grammar = how.triggered_grammar(tools, parallel=parallel)
    assert grammar is not None
    masks = masks_of(grammar)
    position = masks.begin()
    while text:
        marker = next((marker for marker in how.special if text.startswith(marker)), None)
        left = text.removeprefix(marker or text[0])
        if marker is None:
            taken = masks.take_bytes(position, text[0].encode())
        else:
            taken = masks.take(position, how.special[marker])
        if not taken:
            return text
        text = left
    return "ends" if masks.ends(position) else "goes on"


WRITTEN: dict[FormatName, tuple[str, str]] = {  # what begins a call, and the rest of it
    "hermes": ("<tool_call>", '\n{"name": "weather", "arguments": {"city":"Rome"}}\n</tool_call>'),
    "llama": ('{"name": "weather", "parameters": ', '{"city":"Rome"}}'),
    "plain": ('{"name": "weather", "parameters": ', '{"city":"Rome"}}'),
    "mistral": ("[TOOL_CALLS]", '[{"name": "weather", "arguments": {"city":"Rome"}}]'),
    "mistral-named": ("[TOOL_CALLS]", 'weather[ARGS]{"city":"Rome"}'),
    "phi": ("<|tool_call|>", '[{"name": "weather", "arguments": {"city":"Rome"}}]<|/tool_call|>'),
    "granite": ("<|tool_call|>", '[{"name": "weather", "arguments": {"city":"Rome"}}]'),
    "nemotron": ("<TOOLCALL>", '[{"name": "weather", "arguments": {"city":"Rome"}}]</TOOLCALL>'),
}


@pytest.mark.parametrize("special", [False, True], ids=["text", "control tokens"])
@pytest.mark.parametrize("name", WRITTEN)
def test_text_is_free_until_a_call_begins_and_then_its_schema_holds(name: FormatName, special: bool) -> None:
    markers = _SHAPES[name].markers
    how = ToolFormat(name, markers, {marker: 10 + i for i, marker in enumerate(markers)} if special else {})
    begin, rest = WRITTEN[name]
    bare = name in ("llama", "plain")
    for free in ("", "No.", 'Say {"name": 3}, é\n<tool', '{"name": "other", "parameters": {}}'):
        assert follows(how, free) == "ends"
    assert follows(how, begin + rest) == "ends"
    assert follows(how, begin + rest.partition("me")[0]) == "goes on"
    assert follows(how, begin + rest.replace("Rome", "Anywhere")).startswith("re")  # six characters at most
    assert follows(how, begin + rest.replace("city", "town")).startswith("town")
    if not bare:
        assert follows(how, f"I look. {begin}{rest} Done.") == "ends"
        assert follows(how, begin + rest.replace("weather", "whether")).startswith("hether")


@pytest.mark.parametrize("special", [False, True], ids=["text", "control tokens"])
@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in ("llama", "plain")])
def test_what_stands_behind_a_call_or_has_another_marker_is_content(name: FormatName, special: bool) -> None:
    markers = _SHAPES[name].markers
    how = ToolFormat(name, markers, {marker: 10 + i for i, marker in enumerate(markers)} if special else {})
    call = "".join(WRITTEN[name])
    other = '{"name": "weather", "arguments": {"town":1}}'
    for before in (f"{call}\n", f"{call}, ", "Done: <tool_calls>", "functools["):
        assert follows(how, before + other) == "ends"
        content, calls = calls_in(how, before + other, ANY_FORM)
        assert other in content
        assert calls == ([("weather", {"city": "Rome"})] if call in before else [])
    for text in (f'{call} look[ARGS]{{"town":1}}', call * 2, f"{call}\n{call}"):
        found = calls_in(how, text, ANY_FORM)[1] if follows(how, text) == "ends" else []
        assert all(one == ("weather", {"city": "Rome"}) for one in found)


@pytest.mark.parametrize("special", [False, True], ids=["text", "control tokens"])
def test_outside_of_their_list_deepseeks_calls_are_content_where_a_grammar_tells_them(special: bool) -> None:
    markers = _SHAPES["deepseek"].markers
    how = ToolFormat("deepseek", markers, {marker: 10 + i for i, marker in enumerate(markers)} if special else {})
    begin, call, sep, end, last = markers
    one = f'{call}weather{sep}{{"city":"Rome"}}{end}'
    wrong = f'{call}weather{sep}{{"town":1}}{end}'
    assert calls_in(how, f"I look. {begin}{one}{one}{last}", ANY_FORM)[1] == [("weather", {"city": "Rome"})] * 2
    for before, n_calls in (("No: ", 0), (f"{begin}{one}{last}\n", 1), (f"{begin}{one}{last} So: ", 1)):
        content, calls = calls_in(how, before + wrong, ANY_FORM)
        assert wrong in content
        assert calls == [("weather", {"city": "Rome"})] * n_calls
    assert calls_in(how, f"No: {wrong}")[1] == [("weather", {"town": 1})]  # without a grammar, as before


def test_a_marker_that_other_tokens_spell_begins_no_optional_call() -> None:
    how = ToolFormat("hermes", _SHAPES["hermes"].markers, {"<tool_call>": 10, "</tool_call>": 11})
    masks = masks_of(how.triggered_grammar(TOOLS) or "")
    assert masks.take_bytes(masks.begin(), b"I look <tool_")
    assert not masks.take_bytes(masks.begin(), b"I look <tool_call>")


BARE = [
    ToolFormat("plain", (), {}),
    ToolFormat("plain", (), {"<hidden>": 10}, other_control=(10,)),
    ToolFormat("llama", ("<|python_tag|>",), {}),
    ToolFormat("llama", ("<|python_tag|>",), {"<|python_tag|>": 10}),
]
FITTING = [
    '{"name": "weather", "parameters": {"city":"Rome"}}',
    '{"name":"weather","arguments":{"city":"Rome","days":2}}',
    '\n {\n  "name": "now",\n  "parameters": {}\n}',
    '{"type": "function", "name": "weather", "parameters": {"city":"Rome"}};{"function": "now", "arguments": {}}',
    '\u3000{"name" : "now" , "parameters" : {}}; {"name": "weather", "parameters": {"city":""} }',
]


@pytest.mark.parametrize("how", BARE, ids=str)
@pytest.mark.parametrize("text", FITTING)
def test_an_optional_call_without_a_marker_may_have_any_form_that_models_write(how: ToolFormat, text: str) -> None:
    assert follows(how, text) == "ends"
    content, calls = calls_in(how, text, ANY_FORM)
    assert (content, len(calls)) == ("", text.count('"now"') + text.count('"weather"'))
    assert follows(how, text.replace('"city"', '"town"')).startswith("town") == ("city" in text)


@st.composite
def bare_texts(draw: st.DrawFn) -> str:
    """Texts that are calls in one form or another, or nearly, with arguments that fit and that do not."""
    blank = st.sampled_from(["", " ", "\n  "])
    called = st.sampled_from(['"weather"', '"weather"', '"now"', '"other"'])
    arguments = st.sampled_from(['{"city":"Rome"}'] * 3 + ["{}", '{"town":"Rome"}', '"{}"', '{"city": "Rome"}', "[1]"])

    def member(*names: str, value: str) -> str:
        name = draw(st.sampled_from(names))
        return f'{draw(blank)}"{name}"{draw(blank)}:{draw(blank)}{value}{draw(blank)}'

    def one() -> str:
        members = [
            member("name", "name", "function", "tool_name", "n\\u0061me", value=draw(called)),
            member("parameters", "arguments", value=draw(arguments)),
        ]
        if draw(st.booleans()):
            members.insert(0, member("type", "type", "id", value='"function"'))
        if draw(st.integers(0, 3)) == 0:
            members = draw(st.permutations(members))
        return f"{{{','.join(members[: draw(st.integers(1, 9))])}}}"

    before = ["", "", "", " ", "\u3000", "\n" * 12, "<hidden>", " <hidden>", "<|python_tag|>", "So: ", '{"a": 1}']
    between = draw(st.sampled_from(["; ", ";", "\n", "<hidden>"]))
    return draw(st.sampled_from(before)) + between.join(one() for _ in range(draw(st.integers(1, 2))))


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=soak(10_000, part=20), deadline=None)
@given(how=st.sampled_from(BARE), text=bare_texts())
def test_what_is_read_as_an_optional_call_without_a_marker_follows_its_schema(how: ToolFormat, text: str) -> None:
    """Every other text is content, or refused by the grammar before its arguments are over."""
    if follows(how, text) != "ends":
        return
    shown = text if "<hidden>" not in how.special else text.replace("<hidden>", "")
    _, calls = calls_in(how, shown, ANY_FORM)
    for called, arguments in calls:
        tool = next(tool for tool in TOOLS if tool.name == called)
        jsonschema.validate(arguments, {**tool.parameters, "additionalProperties": False})


def test_an_answer_in_json_is_no_call_beside_forced_ones() -> None:
    """Where calls and an answer of a schema are both allowed, compact JSON is the answer, whatever its members."""
    how = ToolFormat("plain", (), {})
    text = '{"name":"weather","parameters":{"city":1}}'
    grammar = how.grammar(TOOLS, "auto", schema='{"type": "object"}')
    assert grammar is not None
    assert calls_in(how, text, SPELLED) == (text, [])
    called = calls_in(how, '{"name": "weather", "parameters": {"city":"Rome"}}', SPELLED)
    assert called == ("", [("weather", {"city": "Rome"})])


def test_an_answer_in_json_is_passed_on_as_soon_as_it_can_be_no_call() -> None:
    parser = ToolFormat("plain", (), {}).parser(TOOLS, ANY_FORM)
    assert [delta.content for delta in parser.feed('{"na')] == []
    assert [delta.content for delta in parser.feed("me of")] == ['{"name of']


def test_an_optional_call_comes_once_where_calls_are_not_parallel() -> None:
    how = ToolFormat("hermes", (), {})
    call = "".join(WRITTEN["hermes"])
    assert follows(how, f"{call}\n{call}") == "ends"
    assert follows(how, f"{call}\n{call}", parallel=False).startswith(">" + WRITTEN["hermes"][1])
    assert follows(how, f"{call} And that is all.", parallel=False) == "ends"


def test_a_schema_that_cannot_be_followed_leaves_an_optional_call_any_object() -> None:
    odd = Tool("odd", "", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    how = ToolFormat("hermes", (), {})
    call = '<tool_call>\n{"name": "odd", "arguments": {"b":[1,1]}}\n</tool_call>'
    assert follows(how, call, tools=[odd]) == "ends"
    with pytest.raises(BadInput, match="uniqueItems"):
        how.grammar([odd], "required")


# Into the prompt


@pytest.mark.parametrize("name", STYLES)
def test_the_template_shows_how_a_model_calls(name: str) -> None:
    assert format_of(STYLES[name]).name == name
    assert format_of(None).name == "plain"


@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERED)
def test_definitions_reach_the_prompt_in_every_style(name: str) -> None:
    prompt = rendered(STYLES[name], TALK[:1], TOOLS)
    assert '"weather"' in prompt
    assert "What the sky does." in prompt
    assert "How is the sky?" in prompt


@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERED)
def test_a_conversation_without_tools_is_left_as_it_is(name: str) -> None:
    with template_of(STYLES[name]) as template:
        assert rendered(STYLES[name], TALK[:1], ()) == template.render(TALK[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERED)
def test_earlier_calls_and_results_reach_the_prompt_in_every_style(name: str) -> None:
    prompt = rendered(STYLES[name], TALK, TOOLS)
    assert re.search(r'city"?[:=] ?"Rome"', prompt), prompt
    assert prompt.count("weather") >= 2
    assert "blue" in prompt or "[TOOL_RESULTS]" in prompt


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=str)
def test_a_call_without_text_beside_it_reaches_a_template_that_joins_the_two(content: dict[str, Any]) -> None:
    joined = QWEN.replace("<|im_start|>assistant\n{%- for", "{{ '<|im_start|>assistant' + message.content }}{%- for")
    assert joined != QWEN
    called = {"role": "assistant", "tool_calls": TALK[1]["tool_calls"], **content}
    assert rendered(joined, [TALK[0], called, *TALK[2:]], TOOLS) == rendered(QWEN, TALK, TOOLS)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=str)
def test_deepseeks_templates_are_given_calls_as_they_take_them(content: dict[str, Any]) -> None:
    joined = SEPARATED.replace("if message.tool_calls", "if message.content is none").replace("| tojson", "+ ''")
    assert format_of(joined).name == "deepseek"
    called = {"role": "assistant", "tool_calls": TALK[1]["tool_calls"], **content}
    assert rendered(joined, [TALK[0], called, *TALK[2:]], TOOLS) == rendered(SEPARATED, TALK, TOOLS)


def test_ids_that_a_template_refuses_are_changed_alike_in_calls_and_results() -> None:
    prompt = rendered(MISTRAL, TALK, TOOLS)
    called = re.findall(r"\}([A-Za-z0-9]{9})", prompt)
    assert called == re.findall(r"\[TOOL_RESULTS\]([A-Za-z0-9]{9})\[", prompt)
    assert len(set(called)) == 2


def test_a_template_without_a_system_message_is_told_in_the_first_turn() -> None:
    silent = re.sub(r"\{%- if messages\[0\].*?endif %\}", "", TURNS)
    assert "system" not in silent
    for source in (TURNS, silent):
        prompt = rendered(source, TALK[:1], TOOLS)
        assert prompt.index("You can call these functions") < prompt.index("How is the sky?")
        assert prompt.count("<start_of_turn>user") == 1
    system = [{"role": "system", "content": "Be brief."}, *TALK[:1]]
    assert "Be brief." in rendered(CHATML, system, TOOLS)
    parts = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *TALK[:1]]
    assert "Be brief." in rendered(CHATML, parts, TOOLS)


def test_results_follow_their_calls_though_a_later_turn_counts_its_calls_anew() -> None:
    later = [dict(message) for message in TALK[2:]]
    later[0]["content"], later[1]["content"] = "grey", "night"
    prompt = rendered(HARMONY, [*TALK, TALK[1], later[1], later[0]], TOOLS)
    found = re.findall(r'<\|start\|>functions.(\w+) to=assistant"(\w+)"', prompt)
    assert found == [("weather", "blue"), ("now", "noon"), ("weather", "grey"), ("now", "night")]


@pytest.mark.parametrize("add", [True, False])
def test_gemmas_answer_is_begun_behind_a_result_whose_call_has_text_beside_it(add: bool) -> None:
    source = """\
{%- for message in messages %}<|turn>{{ message.role }}
{% if message.tool_calls %}<|tool_call>call:{% endif %}{{ message.content }}<turn|>
{% endfor %}{% if tools %}{% endif %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model
{% endif %}"""
    with template_of(source) as template:
        how = ChatFormat(template, tokenizer(), lambda _: False)
        assert how.tools.name == "gemma"
        talk = [TALK[0], {**TALK[1], "content": "I look."}, *TALK[2:]]
        for messages in (talk, talk[:1]):
            asked = ChatRequest(messages, Sampling(), TOOLS, "auto", template_options={"add_generation_prompt": add})
            assert how.render(asked).endswith("<turn|>\n<|turn>model\n" if add else "<turn|>\n")


def test_results_and_what_the_user_says_to_them_are_one_turn_where_they_are_text() -> None:
    prompt = rendered(TURNS, [*TALK, {"role": "user", "content": "So?"}], TOOLS)
    results = "Result of the function call: blue\n\nResult of the function call: noon\n\nSo?"
    assert f"<start_of_turn>user\n{results}<end_of_turn>" in prompt
    later = rendered(TURNS, [*TALK, {"role": "assistant", "content": "Blue."}, TALK[0]], TOOLS)
    assert later.count("<start_of_turn>user") == 3


def test_arguments_that_are_no_json_are_left_as_they_are() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{oops"}}
    (message,) = format_of(QWEN).prompt_messages([{"role": "assistant", "tool_calls": [call]}], TOOLS)
    assert message["tool_calls"] == [call]


# Out of the answer


def random_answer(how: ToolFormat, grammar: str, seed: int) -> str:
    matcher = grammars().matcher(Sampling(grammar=grammar))
    assert matcher is not None
    rng = random.Random(seed)
    stream, text = TextStream(tokenizer(), at_start=False, show=how.markers), ""
    for _ in range(900):
        ids = allowed(matcher.mask())
        ends = [id for id in ids if id in matcher.ends]
        if ends and (len(ends) == len(ids) or rng.random() < 0.5):
            return text + stream.finish()
        id = rng.choice([id for id in ids if id not in matcher.ends])
        text += stream.push(id)
        matcher.take(id)
    pytest.fail(f"no end: {text}")


def calls_in(how: ToolFormat, text: str, form: BareForm | None = None) -> tuple[str, list[tuple[str, Any]]]:
    reader = AnswerReader(ChannelParser() if how.name in ("harmony", "atem") else None, how.parser(TOOLS, form))
    found: dict[int, list[str]] = {}
    content = ""
    for piece in [*text, None]:
        for delta in reader.finish() if piece is None else reader.feed(piece):
            content += delta.content
            if delta.call is not None:
                found.setdefault(delta.call.index, [delta.call.name or ""]).append(delta.call.arguments)
    return content, [(name, json.loads("".join(parts))) for name, *parts in found.values()]


@pytest.mark.slow
@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("seed", range(4))
def test_an_answer_that_must_be_a_call_is_one(name: str, seed: int) -> None:
    how = format_of(STYLES[name])
    for choice in ("required", TOOLS[0], TOOLS[1]):
        grammar = how.grammar(TOOLS, choice)
        assert grammar is not None
        content, calls = calls_in(how, random_answer(how, grammar, seed))
        assert content == ""
        assert calls
        if isinstance(choice, Tool):
            assert [called for called, _ in calls] == [choice.name]
        for called, arguments in calls:
            tool = next(tool for tool in TOOLS if tool.name == called)
            jsonschema.validate(arguments, {**tool.parameters, "additionalProperties": False})


def test_arguments_are_an_object_even_if_the_schema_allows_more() -> None:
    (loose,) = read_tools([{"function": {"name": "f", "parameters": {"type": ["object", "null"], "minProperties": 0}}}])
    how = format_of(CHATML)
    grammar = how.grammar([loose], "required")
    assert grammar is not None
    assert '"parameters": {' in random_answer(how, grammar, 0)
    assert '"null"' not in grammar


def many_tools(n: int) -> list[Tool]:
    names = {f"argument_{j}": {"type": "string", "enum": [f"value-{k}" for k in range(12)]} for j in range(12)}
    return [Tool(f"do_{i}", "", {"type": "object", "properties": names}) for i in range(n)]


def prepared(tools: Sequence[Tool], choice: Any) -> Sampling:
    """What a request with these tools is sampled by, where a loop follows any grammar that compiles."""
    asked = ChatRequest([{"role": "user", "content": "Hi"}], Sampling(), tuple(tools), choice)
    return ChatFormat(None, tokenizer(), lambda sampling: True).prepare(asked, "Hi").sampling


@pytest.mark.parametrize(
    ("follows", "schema", "text", "is_call"),
    [
        (True, None, '{"name":"weather","arguments":{"city":"Rome"}}', True),
        (True, None, '{"arguments":{"town":"Rome"},"name":"weather"}', False),  # free text to the grammar
        (False, None, '{"arguments":{"town":"Rome"},"name":"weather"}', True),  # without a grammar
        (True, {"type": "object"}, '{"name":"weather","parameters":{"town":"Rome"}}', False),  # the answer's own JSON
        (True, {"type": "object"}, '{"name": "weather", "parameters": {"city":"Rome"}}', True),
    ],
)
def test_an_optional_call_is_read_in_the_forms_that_its_grammar_tells_from_text(
    follows: bool, schema: Any, text: str, is_call: bool
) -> None:
    chats = ChatFormat(None, tokenizer(), lambda sampling: follows)
    asked = ChatRequest([{"role": "user", "content": "Hi"}], Sampling(schema=schema), TOOLS, "auto")
    reader = chats.prepare(asked, "Hi").reader()
    deltas = [*reader.feed(text), *reader.finish()]
    assert any(delta.call for delta in deltas) is is_call
    assert "".join(delta.content for delta in deltas) == ("" if is_call else text)


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_many_tools_may_be_called_whose_grammar_is_longer_than_a_caller_may_write(choice: str) -> None:
    rule = prepared(many_tools(32), choice).rule
    assert rule is not None
    assert len(rule.text) > MAX_RULE_CHARACTERS
    assert "argument_11" in rule.text
    assert of_rule(rule).n_states > 0


def test_tools_that_are_together_too_large_are_refused_by_their_name() -> None:
    with pytest.raises(BadOption, match=r"^tools: their schemas together are too large: .* name one in tool_choice"):
        prepared(many_tools(128), "required")
    assert "argument_11" not in (prepared(many_tools(128), "auto").grammar or "")


@pytest.mark.parametrize("made_of", ["tools", "schema"])
def test_a_grammar_that_the_caller_did_not_write_is_refused_by_what_it_is_made_of(made_of: str) -> None:
    rule = Sampling(grammar=MadeGrammar('start: "a" nowhere', made_of)).rule
    assert rule is not None
    assert rule.shown == {"tools": "tools: a grammar of their calls", "schema": "this schema"}[made_of]
    with pytest.raises(BadOption, match=r"^the grammar names the rule 'nowhere'"):
        of_rule(rule)
    assert copy.deepcopy(rule).shown == pickle.loads(pickle.dumps(rule)).shown == rule.shown


@pytest.mark.slow
@pytest.mark.parametrize("name", STYLES)
def test_several_calls_come_only_where_they_may(name: str) -> None:
    how = format_of(STYLES[name])
    several, single = how.grammar(TOOLS, "required"), how.grammar(TOOLS, "required", parallel=False)
    assert several is not None
    assert single is not None
    if name in ("harmony", "atem"):
        assert several == single  # there an answer ends with its first call
        return
    assert max(len(calls_in(how, random_answer(how, several, seed))[1]) for seed in range(12)) > 1
    assert {len(calls_in(how, random_answer(how, single, seed))[1]) for seed in range(12)} == {1}


def test_an_answer_may_be_a_call_or_follow_a_schema() -> None:
    how = format_of(QWEN)
    grammar = how.grammar(TOOLS, "auto", schema='{"type": "boolean"}')
    assert grammar is not None
    answers = [calls_in(how, random_answer(how, grammar, seed)) for seed in range(20)]
    assert {content for content, calls in answers if not calls} == {"true", "false"}
    assert any(calls for _, calls in answers)


def test_where_anything_may_be_said_there_is_no_grammar() -> None:
    how = format_of(QWEN)
    assert how.grammar(TOOLS, "auto") is None
    assert how.grammar(TOOLS, "none", schema="{}") is None


def test_markers_that_are_control_tokens_are_shown_and_may_be_written() -> None:
    """The tiny vocabulary's `<|im_start|>` stands for a control token that opens calls."""
    how = ToolFormat("phi", ("<|im_start|>",), {"<|im_start|>": 1})
    assert how._text("<|im_start|>[") == '<[1]> "["'
    grammar = f"start: {how._text('<|im_start|>[x')}"
    assert random_answer(how, grammar, 0) == "<|im_start|>[x"
    stream = TextStream(tokenizer())
    assert stream.push(1) == ""


def test_ids_of_calls_are_their_own() -> None:
    ids = set()
    for name, pattern in (("hermes", r"call_[0-9a-f]{24}"), ("mistral", r"[A-Za-z0-9]{9}")):
        how = format_of(STYLES[name])
        for _ in range(5):
            opener = "[TOOL_CALLS]" if name == "mistral" else "<tool_call>"
            (delta,) = how.parser(TOOLS).feed(opener + '{"name": "now"}')
            assert delta.call is not None
            assert delta.call.id is not None
            assert re.fullmatch(pattern, delta.call.id)
            ids.add(delta.call.id)
    assert len(ids) == 10
