"""Reasoning told apart from the answer, however the text is cut; and free before an answer that follows a grammar."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.options import Sampling
from ostinato.text import channels
from ostinato.text.answer import AnswerReader
from ostinato.text.call_parser import JsonCalls
from ostinato.text.folder import tokenizer_from_folder
from ostinato.text.grammar import Grammars
from ostinato.text.reasoning import Channels, Reasoning
from ostinato.text.template import ChatTemplate
from ostinato.text.tokenizer import Tokenizer
from ostinato.text.tools import Tool, ToolFormat
from tests.models import tiny_text
from tests.text.test_grammar import allowed

THINK = Reasoning("<think>", "</think>", ("<think>", "</think>"), {})


def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        tiny_text.write_files(Path(folder))
        return tokenizer_from_folder(Path(folder))


def read(pieces: list[str], prompt: str = "", marks: Reasoning = THINK) -> tuple[str, str]:
    parser = marks.parser(prompt)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<think>\nhm <x>\n</think>\n\nyes", "hm <x>", "yes"),
        ("", "\n<think>hm</think>yes </think>", "hm", "yes </think>"),
        ("", "yes", "", "yes"),
        ("", " <thing", "", " <thing"),
        ("", "yes <think>no</think>", "", "yes <think>no</think>"),
        ("", "<think>on and on \n", "on and on \n", ""),
        ("user: hi\n<think>\n", "hm\n</think>\n\nyes\n", "hm", "yes\n"),
        ("<think>\n\n</think>\n\n", "yes", "", "yes"),
        ("what is <think>?", "yes", "", "yes"),
        ("", "", "", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_reasoning_is_told_apart_however_the_text_is_cut(
    prompt: str, text: str, reasoning: str, content: str, size: int
) -> None:
    assert read([text[at : at + size] for at in range(0, len(text), size)], prompt) == (reasoning, content)


GEMMA = Reasoning("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>"), {})


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel>thought\nhm\n<channel|>yes<channel|>", "hm", "yes"),
        ("<|channel>thought\n<channel|>yes<|channel>thought\n<channel|><channel|>", "", "yes"),
        ("<channel|>yes, <channel|>so <|chan", "", "yes, so <|chan"),
        ("<|channel>thought\nhm<channel|>yes\n<|channel>thought\nor <|<channel|> no", "hm\n\nor <|", "yes\n\n\nno"),
        ("yes<|channel>thought\non and on", "on and on", "yes"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_gemma_may_reason_again_and_ends_what_it_did_not_begin(
    text: str, reasoning: str, content: str, size: int
) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert read(pieces, marks=GEMMA) == (reasoning, content)


@given(st.lists(st.sampled_from([*GEMMA.markers, "thought", " ", "\n", "<", "so", "|>"])).map("".join), st.data())
def test_gemmas_answers_are_read_the_same_whole_or_in_pieces(text: str, cuts: st.DataObject) -> None:
    at = sorted(cuts.draw(st.sets(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    assert read(pieces, marks=GEMMA) == read([text], marks=GEMMA)


@given(st.text(alphabet="<>/think \n", max_size=50), st.data(), st.booleans())
def test_any_text_is_read_the_same_whole_or_in_pieces(text: str, cuts: st.DataObject, inside: bool) -> None:
    at = sorted(cuts.draw(st.sets(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    prompt = "<think>" if inside else ""
    assert read(pieces, prompt) == read([text], prompt)


def test_calls_are_looked_for_in_the_answer_and_not_in_the_reasoning() -> None:
    calls = JsonCalls(["<tool_call>"], ["</tool_call>"], lambda: "id")
    reader = AnswerReader(THINK.parser(""), calls)
    call = '<tool_call>{"name": "f"}</tool_call>'
    deltas = reader.feed(f"<think>{call}</think>{call}") + reader.finish()
    assert [delta.reasoning for delta in deltas if delta.reasoning] == [call]
    assert reader.n_calls == 1


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("{% if '</think>' in content %}", ("<think>", "</think>")),
        ("[THINK]{{ x }}[/THINK]", ("[THINK]", "[/THINK]")),
        ("<seed:think>{{ x }}</seed:think>", ("<seed:think>", "</seed:think>")),
        ("<|channel>thought{{ x }}<channel|>", ("<|channel>thought", "<channel|>")),
        ("{{ messages }}", None),
    ],
)
def test_the_template_shows_whether_a_model_thinks_aloud(source: str, found: tuple[str, str] | None) -> None:
    template = ChatTemplate(source, bos_token="", eos_token="")
    reasoning = Reasoning.for_template(template, tokenizer())
    assert (None if reasoning is None else (reasoning.begin, reasoning.end)) == found
    assert Reasoning.for_template(None, tokenizer()) is None


SAMPLINGS = [
    Sampling(schema={"type": "integer"}),
    Sampling(regex=r"\d+"),
    Sampling(choice=("42", "43")),
    Sampling(grammar='start: "4" "2"'),
    Sampling(grammar='root ::= "42"'),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: sampling.rule.kind)
def test_thinking_is_free_before_an_answer_that_follows_a_rule(sampling: Sampling) -> None:
    known = tokenizer()
    grammars = Grammars(known, known.vocab_size)

    def ends(prompt: str, text: str) -> bool | None:
        """Whether the answer may end after the text; None where the text is not allowed."""
        matcher = grammars.matcher(THINK.before(sampling, prompt))
        assert matcher is not None
        for id in known.encode(text, bos=False):
            if id not in allowed(matcher.mask()):
                return None
            matcher.take(id)
        return bool(set(allowed(matcher.mask())) & matcher.ends)

    assert ends("", "42")
    assert ends("", '<think>\nso {"a" or\n</think>\n\n42')
    assert ends("", "<think>x</think>a") is None
    assert ends("", "x") is None
    assert ends("<think>\n", "hm\n</think>42")
    assert ends("<think>\n", "42") is False
    assert THINK.before(sampling, "").rule != sampling.rule


def test_marks_that_are_control_tokens_are_named_by_their_ids() -> None:
    known = tokenizer()
    marks = "<|im_start|>", "<|im_end|>"
    reasoning = Reasoning(*marks, marks, {"<|im_start|>": 1, "<|im_end|>": 2})
    grammar = reasoning.before(Sampling(choice=("a",)), "").grammar
    assert grammar is not None
    assert "<[1]>" in json.loads(grammar)["grammars"][0]["lark_grammar"]
    assert Grammars(known, known.vocab_size).matcher(Sampling(grammar=grammar)) is not None


def test_nothing_to_follow_is_left_alone() -> None:
    sampling = Sampling(max_tokens=3)
    assert THINK.before(sampling, "") is sampling


@pytest.mark.parametrize(
    ("before", "text", "reasoning", "content"),
    [
        ("Yes", " <think>no</think>", "", " <think>no</think>"),
        ("<think>hm</think>Ye", "s", "", "s"),
        ("<think>hm", " <x>\n</think>\n\nyes", " <x>", "yes"),
        ("<think>", " on and on", " on and on", ""),
    ],
)
def test_reasoning_that_began_in_a_continued_message_goes_on(
    before: str, text: str, reasoning: str, content: str
) -> None:
    reader = AnswerReader(THINK.continued(before))
    deltas = [delta for character in text for delta in reader.feed(character)] + reader.finish()
    assert "".join(delta.reasoning for delta in deltas) == reasoning
    assert "".join(delta.content for delta in deltas) == content


# Channels

CHANNELS = Channels("<|channel|>analysis<|message|>", "<|end|>", channels.MARKERS, {}, "<|channel|>final<|message|>")
FINAL = "<|start|>assistant<|channel|>final<|message|>"


def read_channels(pieces: list[str], *, said: str = "") -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls."""
    parser = CHANNELS.continued(said) if said else CHANNELS.parser("")
    calls = ToolFormat("harmony", channels.MARKERS, {}).parser([Tool("f", "", {})])
    reader = AnswerReader(parser, calls)
    deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.finish()
    found: dict[int, list[str]] = {}
    for delta in deltas:
        if delta.call is not None:
            found.setdefault(delta.call.index, [delta.call.name or ""]).append(delta.call.arguments)
    texts = "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)
    return *texts, [(name, "".join(parts)) for name, *parts in found.values()]


CALL = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"<|channel|>analysis<|message|>hm <x>\n<|end|>{FINAL}Yes.", "hm <x>\n", "Yes.", []),
        ("<|channel|>final<|message|>Yes.<|return|>", "", "Yes.", []),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>", "", "", [CALL]),
        (" to=functions.f<|channel|>commentary json<|message|>{\"a\": 1}<|call|>", "", "", [CALL]),
        (" to=functions.f<|channel|>commentary<|message|>{\"a\": 1}", "", "", [CALL]),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>f it is<|end|>"
            "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{\"a\": 1}<|call|>",
            "hm\n\nf it is",
            "I look.",
            [CALL],
        ),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|><|call|>", "", "", [("f", "{}")]),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "", "", [("f", "{}")]),
        ("<|channel|>commentary to=assistant<|channel|>analysis<|message|>hm<|end|>", "hm", "", []),
        ("<|channel|>commentary to=assistant<|channel|>final <|constrain|>json<|message|>3", "", "3", []),
        ("<|channel|>commentary to=functions.f<|channel|>commentary json<|message|>{\"a\": 1}", "", "", [CALL]),
        ("<|channel|>analysis<|message|>on and on", "on and on", "", []),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "hm", "", []),
        ("No header at all.", "", "No header at all.", []),
        ("A <|message|> of mine", "", "A <|message|> of mine", []),
        (" to=functions.f<|channel|>commentary json<|message|>no", "", "f<|channel|>commentary json<|message|>no", []),
        (" to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>", "hm", "Yes.", []),
        ("", "", "", []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_channels_are_told_apart_however_the_text_is_cut(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]], size: int
) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert read_channels(pieces) == (reasoning, content, calls)


PARTS = [
    *channels.MARKERS,
    "assistant",
    "analysis",
    "final",
    "commentary",
    " to=functions.f",
    " json",
    '{"a": 1}',
    "so ",
]


@given(st.lists(st.sampled_from(PARTS), max_size=16).map("".join), st.data())
def test_any_messages_are_read_the_same_whole_or_in_pieces(text: str, cuts: st.DataObject) -> None:
    at = sorted(cuts.draw(st.sets(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    assert read_channels(pieces) == read_channels([text])


def test_a_continued_message_is_one_that_the_user_reads() -> None:
    assert read_channels(["s, ", "it is."], said="Ye") == ("", "s, it is.", [])


@pytest.mark.parametrize(
    ("source", "final"),
    [
        ("<|start|>assistant<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
        ("<|start|>assistant to=self<|message|>", " to=user<|message|>"),
    ],
)
def test_the_template_shows_which_messages_an_answer_has(source: str, final: str) -> None:
    found = Reasoning.for_template(ChatTemplate(source, bos_token="", eos_token=""), tokenizer())
    assert isinstance(found, Channels)
    assert found.final == final


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: sampling.rule.kind)
def test_an_answer_that_follows_a_rule_is_a_final_message(sampling: Sampling) -> None:
    known = tokenizer()
    grammars = Grammars(known, known.vocab_size)

    def ends(text: str, *, calls: bool = False) -> bool | None:
        matcher = grammars.matcher(CHANNELS.before(sampling, "<|start|>assistant", calls=calls))
        assert matcher is not None
        for id in known.encode(text, bos=False):
            if id not in allowed(matcher.mask()):
                return None
            matcher.take(id)
        return bool(set(allowed(matcher.mask())) & matcher.ends)

    assert ends("<|channel|>final<|message|>42")
    assert ends(f"<|channel|>analysis<|message|>so\n<|end|>{FINAL}42")
    assert ends("42") is None
    assert ends("42", calls=True)
    assert ends("<|channel|>final<|message|>a") is None
