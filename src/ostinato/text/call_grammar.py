"""Grammars of optional calls in formats whose calls are no JSON, or are messages of their own.

Text is free until a call begins; from there on the call is written as the model's format writes it, with arguments
that follow the function's schema. A schema that cannot be written leaves that function any arguments of the format.
The grammars are in Lark, as llguidance reads it; `call_tags.py` and `call_literals.py` write the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from ostinato.errors import BadOption
from ostinato.options import MAX_RULE_CHARACTERS, Rule
from ostinato.text import channels
from ostinato.text.block_calls import GEMMA_MARKERS, PYTHON_MARKERS
from ostinato.text.call_literals import JsonValues, LiteralArguments, LiteralForm
from ostinato.text.call_rules import Rules, Unwritable
from ostinato.text.call_tags import TagArguments, TagForm
from ostinato.text.grammar import literal, with_control_tokens
from ostinato.text.literals import GEMMA_QUOTE

Functions = Mapping[str, Mapping[str, Any]]  # the schemas of parameters, by name
_KEPT: Final = 512  # clients send the same tools with every turn of a conversation


@dataclass(frozen=True, slots=True)
class Tokens:
    """The control tokens of a vocabulary: ids of markers by their text, and of others that may stand in text."""

    special: Mapping[str, int]
    other: Sequence[int] = ()

    def any_of(self, *markers: str, other: bool = False) -> str:
        """One of these markers that are control tokens, and one of the others; empty if there is none."""
        ids = [self.special[marker] for marker in markers if marker in self.special]
        ids += self.other if other else []
        return f"<[{','.join(map(str, ids))}]>" if ids else ""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A format whose calls stand between markers: what opens a block, the text around the calls in it, how arguments
    are written, and the opening of a call that may stand alone."""

    opener: str
    before: str
    closer: str
    form: TagForm | LiteralForm
    alone: str = ""
    separator: str = ""  # between calls in one block, as a part of a grammar; without one, a block has one call


_FUNCTION_CLOSERS: Final = ("</parameter>", "</function>")
_TAGS: Final = TagForm(
    begin="NAME>\n",
    key="<parameter=KEY>\n",
    value_end="\n</parameter>",
    after="\n",
    end="</function>",
    closers=(*_FUNCTION_CLOSERS, "</tool_call>"),
)
_SEED: Final = TagForm(
    begin="NAME>\n",
    key="<parameter=KEY>",
    value_end="</parameter>",
    after="\n",
    end="</function>",
    closers=(*_FUNCTION_CLOSERS, "</seed:tool_call>"),
    strips=True,
)
_ATEM: Final = TagForm(
    begin='NAME">\n',
    key='<atem:parameter name="KEY">',
    value_end="</atem:parameter>",
    after="\n",
    end="</atem:invoke>",
    closers=("</atem:parameter>", "</atem:invoke>", "</atem:function_calls>"),
)
_KEY_TAGS: Final = TagForm(
    begin="NAME\n",
    key="<arg_key>KEY</arg_key>\n<arg_value>",
    value_end="</arg_value>",
    after="\n",
    end="",
    closers=("</arg_value>", "</tool_call>"),
    lenient=True,
)
_PYTHON: Final = LiteralForm(
    begin="NAME(",
    end=")",
    between="=",
    separator="/, ?/",
    colon="/: ?/",
    words={"true": ("True", "true"), "false": ("False", "false"), "null": ("None", "null")},
    quote=None,
    closers=(PYTHON_MARKERS[1],),
)
_GEMMA: Final = LiteralForm(
    begin="call:NAME{",
    end="}",
    between=":",
    separator='","',
    colon=":",
    words={word: (word,) for word in ("true", "false", "null")},
    quote=GEMMA_QUOTE,
    closers=(GEMMA_QUOTE, GEMMA_MARKERS[1]),
    in_order=False,  # its template sorts them
)
_ATEM_OPENER: Final = "<atem:function_calls>"
BLOCKS: Final[Mapping[str, BlockShape]] = {
    "tags": BlockShape("<tool_call>", "\n<function=", "\n</tool_call>", _TAGS, alone="<function="),
    "seed": BlockShape("<seed:tool_call>", "\n<function=", "\n</seed:tool_call>", _SEED),
    "key-tags": BlockShape("<tool_call>", "", "</tool_call>", _KEY_TAGS),
    "atem": BlockShape(_ATEM_OPENER, '\n<atem:invoke name="', "\n</atem:function_calls>", _ATEM),
    "python": BlockShape(PYTHON_MARKERS[0], "[", f"]{PYTHON_MARKERS[1]}", _PYTHON, separator="/, ?/"),
    "gemma": BlockShape(GEMMA_MARKERS[0], "", GEMMA_MARKERS[1], _GEMMA),
}


def triggered(name: str, functions: Functions, tokens: Tokens, *, parallel: bool, loose: bool) -> str | None:
    """The grammar of an answer that may call, in one of the formats above or in `harmony`; None where the markers of
    messages are no control tokens. `loose`: with any arguments of the format."""
    if name == "harmony":
        return _in_channels(functions, tokens, loose)
    shape, rules = BLOCKS[name], Rules()
    blocks = _Blocks(shape, rules, tokens, _calls(name, rules, tokens, functions, loose), parallel=parallel)
    if name == "atem" and "<|message|>" in tokens.special:
        start = _in_messages(blocks, rules, tokens, parallel=parallel)
    else:
        start = blocks.text("*" if parallel else "?")
    return "\n".join([f"start: {start}", *rules.lines()])


# Calls between markers


class _Blocks:
    """Text with blocks of calls in it."""

    def __init__(self, shape: BlockShape, rules: Rules, tokens: Tokens, call: str, *, parallel: bool) -> None:
        self._shape, self._rules, self._tokens = shape, rules, tokens
        markers = [shape.opener, shape.alone] if shape.alone else [shape.opener]
        self.free = rules.without(markers)  # any text in which no call begins
        self._control = tokens.any_of(other=True)
        more = f"({shape.separator} {call})*" if shape.separator and parallel else ""
        before, closer = (with_control_tokens(text, tokens.special) for text in (shape.before, shape.closer))
        self._block = rules.rule(f"{self._begun(shape.opener)} {before} {call} {more} {closer}")
        if shape.alone:
            self._block = f"({self._block} | {rules.rule(f'{self._begun(shape.alone)} {call}')})"

    def text(self, again: str) -> str:
        """Text with blocks in it, as many as `again` says: `*`, `?`, or none if it is empty."""
        control = f"({self.free} {self._control})*" if self._control else ""
        blocks = f"({control} {self._block}){again}" if again else ""
        return f"{blocks} {control} {self.free}"

    def one(self) -> str:
        """Text with one block in it."""
        return f"{self.text('').removesuffix(self.free)} {self._block} {self.text('')}"

    def _begun(self, marker: str) -> str:
        """Text up to a marker."""
        if marker in self._tokens.special:
            return f"{self.free} {with_control_tokens(marker, self._tokens.special)}"
        return self._rules.terminal(f"{self.free} {literal(marker)}")


def _calls(format: str, rules: Rules, tokens: Tokens, functions: Functions, loose: bool) -> str:
    """A call of one of the functions."""
    writer = _writer(format, rules, tokens)
    calls = []
    for name, schema in functions.items():
        is_followed = not loose and _can_be_written(format, tuple(tokens.special.items()), name, json.dumps(schema))
        calls.append(rules.rule(writer.call(name, schema if is_followed else None)))
    return rules.rule(" | ".join(calls))


def _writer(format: str, rules: Rules, tokens: Tokens) -> TagArguments | LiteralArguments:
    form = BLOCKS[format].form
    if isinstance(form, TagForm):
        return TagArguments(form, rules, tokens.special)
    return LiteralArguments(form, rules, tokens.special)


@lru_cache(_KEPT)
def _can_be_written(format: str, special: tuple[tuple[str, int], ...], name: str, schema: str) -> bool:
    """Whether calls of a function can be written by its schema, and our compiler takes them."""
    rules = Rules()
    try:
        call = _writer(format, rules, Tokens(dict(special))).call(name, json.loads(schema))
    except (Unwritable, RecursionError):
        return False
    return _compiles("\n".join([f"start: {call}", *rules.lines()]))


def _compiles(grammar: str) -> bool:
    from ostinato.text.automaton import of_rule

    try:
        of_rule(Rule("grammar", grammar))
    except BadOption:
        return False
    return len(grammar) <= MAX_RULE_CHARACTERS


# Calls in messages


def _in_messages(blocks: _Blocks, rules: Rules, tokens: Tokens, *, parallel: bool) -> str:
    """Messages with headers, as Muse Glimmer writes them: calls stand in those that are not to the model itself."""
    to_self = rules.terminal(r"/[ \t\r\n]*(assistant)?[ \t\r\n]*to=self[ \t\r\n]*/")
    head = rules.terminal(f"{blocks.free} & ~({to_self})")
    message, control = tokens.any_of("<|message|>"), tokens.any_of(other=True)
    thought = f"{to_self} {message} {_with(rules.any(), control)}"
    heads = _with(head, control)

    def said(text: str) -> str:
        return rules.rule(f"{thought} | {heads} {message} {text}")

    next_one = _next_message(rules, tokens)
    plain, header = said(blocks.text("")), f"({heads} | {to_self})"
    if parallel:
        any_message = said(blocks.text("*"))
        return f"({any_message} {next_one})* ({any_message} | {header})"
    calling = rules.rule(f"{heads} {message} {blocks.one()}")
    after = f"({next_one} {plain})* ({next_one} {header})?"
    return f"({plain} {next_one})* ({plain} | {header} | {calling} {after})"


def _in_channels(functions: Functions, tokens: Tokens, loose: bool) -> str | None:
    """gpt-oss's messages: a header to a function is that of a call, and its arguments are JSON; the answer ends with
    it."""
    if not {"<|start|>", "<|channel|>", "<|message|>"} <= tokens.special.keys():
        return None
    rules = Rules()
    control = tokens.any_of(other=True)
    channel, message = tokens.any_of("<|channel|>"), tokens.any_of("<|message|>")
    inside = tokens.any_of("<|channel|>", "<|constrain|>", other=True)
    heads = _with(rules.without(["to=functions."]), inside)
    free = rules.rule(f"{heads} {message} {_with(rules.any(), control)}")
    blank, name = r"/[ \n]{0,4}(assistant)?[ \n]{0,4}", "(commentary|analysis)"
    addressed = rules.terminal(f"{blank}to=functions[.]/")
    in_channel = f"{rules.terminal(f'{blank}/')} {channel} {rules.terminal(f'/{name} to=functions[.]/')}"
    before, after = _call_header(rules, tokens, name), _call_header(rules, tokens, "")
    calls = [_json_calls(functions, rules, tokens, header, loose) for header in (f"/ ?/ {channel} {before}", after)]
    call = f"{addressed} {calls[0]} | {in_channel} {calls[1]}"
    next_one = _next_message(rules, tokens)
    return "\n".join([f"start: ({free} {next_one})* ({free} | {heads} | {call})", *rules.lines()])


def _call_header(rules: Rules, tokens: Tokens, begin: str) -> str:
    """The rest of a header, behind the name or the channel: what the text is, and the end."""
    message, constrain = tokens.any_of("<|message|>"), tokens.any_of("<|constrain|>")
    plain = f"/{begin}( json)? ?/ {message}"
    return rules.rule(f"{plain} | /{begin} ?/ {constrain} /json ?/ {message}" if constrain else plain)


def _json_calls(functions: Functions, rules: Rules, tokens: Tokens, header: str, loose: bool) -> str:
    end = tokens.any_of("<|call|>")
    calls = []
    for name, schema in functions.items():
        is_followed = not loose and _json_compiles(json.dumps(schema))
        arguments = _arguments(rules, schema if is_followed else {"type": "object"})
        calls.append(f"{literal(name)} {header} {arguments} {end}")
    return rules.rule(" | ".join(calls))


@lru_cache(_KEPT)
def _json_compiles(schema: str) -> bool:
    rules = Rules()
    try:
        arguments = _arguments(rules, json.loads(schema))
    except (Unwritable, RecursionError):
        return False
    return _compiles("\n".join([f"start: {arguments}", *rules.lines()]))


def _arguments(rules: Rules, schema: Mapping[str, Any]) -> str:
    return JsonValues(rules, channels.ENDS).value(schema, schema)


def _with(text: str, tokens: str) -> str:
    """Text with control tokens in it."""
    return f"{text} ({tokens} {text})*" if tokens else text


def _next_message(rules: Rules, tokens: Tokens) -> str:
    """The end of a message before another."""
    start, ends = tokens.any_of("<|start|>"), tokens.any_of("<|end|>", "<|eom|>")
    options = [f"{ends} {start}?" if start else ends] if ends else []
    return rules.rule(" | ".join([*options, *([start] if start else [])]))
