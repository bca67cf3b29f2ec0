"""Calls in an answer's text: read the same whole or letter by letter, and nothing that is no call is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.text.answer import AnswerReader, Delta, Parser
from ostinato.text.call_parser import CallObject, JsonCalls, TagCalls

Call = tuple[str | None, str]
MakeParser = Callable[[Callable[[], str]], Parser]


def hermes(new_id: Callable[[], str]) -> Parser:
    return JsonCalls(["<tool_call>"], ["</tool_call>"], new_id)


def llama(new_id: Callable[[], str]) -> Parser:
    return JsonCalls(["<|python_tag|>"], [], new_id, bare=True, known={"f", "g"})


def mistral(new_id: Callable[[], str]) -> Parser:
    return JsonCalls(["[TOOL_CALLS]"], [], new_id, named=True)


def tags(new_id: Callable[[], str]) -> Parser:
    return TagCalls(new_id, {"f": {"properties": {"a": {"type": "string"}}}})


ALL: tuple[MakeParser, ...] = (hermes, llama, mistral, tags)


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
    (tags, "<function=f></function> after", "after", [("f", "{}")]),
    (tags, "half <function=f><parameter=a>1", "half <function=f><parameter=a>1", []),
]  # fmt: skip


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


def written(make: MakeParser, made: Sequence[tuple[str, dict[str, Any]]], spaced: bool) -> str:
    between = {} if spaced else {"separators": (",", ":")}
    member = "parameters" if make is llama else "arguments"
    texts = [json.dumps({"name": name, member: arguments}, **between) for name, arguments in made]  # type: ignore[arg-type]
    if make is hermes:
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return "[TOOL_CALLS][" + ", ".join(texts) + "]" if make is mistral else "; ".join(texts)


@given(make=st.sampled_from([hermes, llama, mistral]), made=calls, spaced=st.booleans(), cuts=st.data())
def test_what_was_written_is_read_again(
    make: MakeParser, made: list[tuple[str, dict[str, Any]]], spaced: bool, cuts: st.DataObject
) -> None:
    text = written(make, made, spaced)
    at = sorted(cuts.draw(st.sets(st.integers(1, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    content, found = read(make, pieces)
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == made


PARTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<function=f>", "</function>",
    "<parameter=a>", "</parameter>", '{"name": "f"', '"arguments": {', '"a": 1', "}", "}}", ", ", " ", "\n", "f", '"',
    "[", "]", "\\", "{", '"name": "g"', "so", "<",
]  # fmt: skip


@given(make=st.sampled_from(ALL), text=st.lists(st.sampled_from(PARTS), max_size=14).map("".join), cuts=st.data())
@settings(max_examples=150, deadline=None)
def test_any_text_is_read_the_same_whole_or_in_pieces(make: MakeParser, text: str, cuts: st.DataObject) -> None:
    at = sorted(cuts.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    assert read(make, pieces) == read(make, [text])


@given(text=st.text(max_size=80))
def test_text_without_a_call_is_content_to_the_letter(text: str) -> None:
    for make in (hermes, mistral, tags):
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
        reader = AnswerReader(calls=TagCalls(lambda: "id", {}))
        deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.finish()
        assert [delta.call.name for delta in deltas if delta.call is not None] == ["f"]
        assert "".join(delta.content for delta in deltas) == f"a <tool_call>{object}</tool_call> b"
