"""Separates a thinking model's reasoning from its answer.

The markers are those of its chat template. If an answer must follow a schema or a grammar, the reasoning before it is
unconstrained (`Reasoning.before`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Final

from ostinato.options import MadeGrammar, Rule, Sampling
from ostinato.text import channels
from ostinato.text.answer import Delta, Parser
from ostinato.text.channels import ChannelParser
from ostinato.text.grammar import as_lark, compact, literal, with_control_tokens
from ostinato.text.stream import open_end
from ostinato.text.template import ChatTemplate
from ostinato.text.tokenizer import Tokenizer

_GEMMA_END: Final = "<channel|>"

# The texts before and after the reasoning, and what of them may be control tokens.
_MARKS: Final = (
    *((begin, end, (begin, end)) for begin, end in (("<think>", "</think>"), ("[THINK]", "[/THINK]"))),
    ("<seed:think>", "</seed:think>", ("<seed:think>", "</seed:think>")),
    ("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_THINKING|>", "<|END_THINKING|>")),
    ("<|channel>thought", _GEMMA_END, ("<|channel>", _GEMMA_END)),
)

# What begins and ends a message that is reasoning, and what begins the answer.
_CHANNELS: Final = ("<|channel|>analysis<|message|>", "<|end|>", "<|channel|>final<|message|>")
_RECIPIENTS: Final = (" to=self<|message|>", "<|eom|>", " to=user<|message|>")


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How one model marks its reasoning: the texts before and after it, the markers in them, which an answer's text
    must show, and the ids of those that are control tokens."""

    begin: str
    end: str
    markers: tuple[str, ...]
    special: dict[str, int]

    @staticmethod
    def for_template(template: ChatTemplate | None, tokenizer: Tokenizer) -> Reasoning | None:
        """None for a model without marked reasoning."""
        source = "" if template is None else template.source
        if "<|start|>assistant" in source and "<|message|>" in source:
            marks = _RECIPIENTS if " to=self<|message|>" in source else _CHANNELS
            return Channels(*marks[:2], channels.MARKERS, tokenizer.control_ids(channels.MARKERS), marks[2])
        for begin, end, markers in _MARKS:
            if end in source:
                return Reasoning(begin, end, markers, tokenizer.control_ids(markers))
        return None

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends inside the reasoning: its template began it for the model."""
        return prompt.rfind(self.begin) > prompt.rfind(self.end) and prompt.rstrip().endswith(self.begin)

    @property
    def again(self) -> bool:
        """Whether the model may reason again behind content, and ends what it did not begin: Gemma 4."""
        return self.end == _GEMMA_END

    def parser(self, prompt: str) -> Parser:
        """A parser of an answer to this prompt, whose end may have begun the reasoning already."""
        return ReasoningParser(self.begin, self.end, inside=self.is_open(prompt), again=self.again)

    def continued(self, text: str) -> Parser | None:
        """A parser of what continues an answer that began with this text; None if its reasoning is over."""
        if text.rfind(self.begin) <= text.rfind(self.end):
            return None
        return ReasoningParser(self.begin, self.end, inside=True, fresh=False, again=self.again)

    def before(self, sampling: Sampling, prompt: str, *, calls: bool = False) -> Sampling:
        """`sampling` whose answer may think before it follows its rule; it must if the prompt began the reasoning.

        `calls`: the rule is that of a tool format, which writes the whole of a message."""
        rule = sampling.rule
        if rule is None:
            return sampling
        lark = "\n".join([*self._rules(prompt, calls), r"BLANK: /[ \n]{0,4}/"])
        grammars = {"grammars": [{"name": "thinking", "lark_grammar": lark}, {"name": "answer", **_part(rule)}]}
        bare = replace(sampling, schema=None, json_mode=False, regex=None, choice=None, grammar=None)
        made_of = rule.text.made_of if isinstance(rule.text, MadeGrammar) else rule.kind
        return replace(bare, grammar=MadeGrammar(json.dumps(grammars), made_of))

    def _rules(self, prompt: str, calls: bool) -> list[str]:
        """The rules of what stands before an answer, in Lark."""
        begin = "" if self.is_open(prompt) else self._mark(self.begin)
        optional = "" if self.is_open(prompt) else "?"
        return [f"start: think{optional} @answer", *self._thought(begin, self.end, "BLANK")]

    def _thought(self, begin: str, end: str, after: str) -> list[str]:
        """Rules of any text up to a marker, which must be written if it is a control token."""
        if end in self.special:
            return [f"think: {begin} TEXT {self._mark(end)} {after}", r"TEXT: /(.|\n)*/"]
        return [f"think: {begin} inner {after}", rf"inner[suffix={literal(end)}]: /(.|\n)*/"]

    def _mark(self, text: str) -> str:
        return with_control_tokens(text, self.special)


@dataclass(frozen=True, slots=True)
class Channels(Reasoning):
    """Reasoning that is a message of its own, as in gpt-oss and Muse Glimmer: `channels.py`."""

    final: str  # what begins the answer

    def is_open(self, prompt: str) -> bool:
        return False

    def parser(self, prompt: str) -> Parser:
        return ChannelParser()

    def continued(self, text: str) -> Parser | None:
        return ChannelParser(in_content=True)

    def _rules(self, prompt: str, calls: bool) -> list[str]:
        final = "" if calls else self._mark(self.final)
        again = self._mark("<|start|>assistant")
        return [f"start: think? {final} @answer", *self._thought(self._mark(self.begin), self.end, again)]


def _part(rule: Rule) -> dict[str, object]:
    """A rule as a part of a larger grammar, in llguidance's own form."""
    if rule.kind == "schema":
        return {"json_schema": compact(json.loads(rule.text))}
    return {"lark_grammar": as_lark(rule)}


class ReasoningParser:
    """Separates reasoning, content and the markers between them; blanks around the reasoning belong to neither.

    With `again` reasoning may also follow content, and an end without a beginning is neither; between two of one kind
    stands an empty line."""

    def __init__(self, begin: str, end: str, *, inside: bool, fresh: bool = True, again: bool = False) -> None:
        self._begin, self._end = begin, end
        self._marks = (begin, end) if again else ()  # in what follows the reasoning
        self._inside, self._over = inside, False
        self._said = {True: False, False: False}  # whether there was reasoning, and content
        self._fresh = fresh  # at the start of the reasoning, or of what follows it
        self._buffer = ""

    def feed(self, text: str) -> list[Delta]:
        """The deltas of the text so far."""
        self._buffer += text
        return self._read(last=False)

    def finish(self) -> list[Delta]:
        """The text that was held back, when the text has ended."""
        return self._read(last=True)

    def _read(self, *, last: bool) -> list[Delta]:
        deltas: list[Delta] = []
        if not self._over and not self._inside:
            shown = self._buffer.lstrip()
            if shown.startswith(self._begin):
                self._buffer, self._inside = shown[len(self._begin) :], True
            elif last or (shown and not self._begin.startswith(shown)):
                self._over, self._fresh = True, False  # it answers at once
            else:
                return []
        while True:
            if self._inside:
                at = self._buffer.find(self._end)
                thought = self._buffer[: at if at >= 0 else len(self._buffer) - self._kept(last)]
                self._buffer = self._buffer[len(thought) :]
                thought = thought.rstrip() if at >= 0 else thought
                deltas += self._delta(thought.lstrip() if self._fresh else thought, reasoning=True)
                if at < 0:
                    return deltas
                self._buffer = self._buffer[len(self._end) :]
                self._inside, self._over, self._fresh = False, True, True
            if self._fresh:
                self._buffer = self._buffer.lstrip()
            at, mark = min(((self._buffer.find(m), m) for m in self._marks if m in self._buffer), default=(-1, ""))
            keep = 0 if last else open_end(self._buffer, self._marks)
            said = self._buffer[: at if at >= 0 else len(self._buffer) - keep]
            self._buffer = self._buffer[len(said) + len(mark) :]
            deltas += self._delta(said, reasoning=False)
            if at < 0:
                return deltas
            if mark == self._begin:
                self._inside, self._fresh = True, True

    def _kept(self, last: bool) -> int:
        """Characters at the end that may be the mark, or blanks before it."""
        if last:
            return 0
        marked = open_end(self._buffer, (self._end,))
        rest = self._buffer[: len(self._buffer) - marked]
        return marked + len(rest) - len(rest.rstrip())

    def _delta(self, text: str, *, reasoning: bool) -> list[Delta]:
        if not text:
            return []
        text = f"\n\n{text}" if self._fresh and self._said[reasoning] else text
        self._fresh, self._said[reasoning] = False, True
        return [Delta(reasoning=text) if reasoning else Delta(content=text)]
