"""Grammars in Lark, as llguidance reads it, as programs of the grammar compiler.

Read are rules and terminals of strings, regular expressions, groups, repeats, `%json`, token ids (`<[7]>`), rules that
end with a `suffix`, references to other grammars (`@answer`), and `&` and `~` in terminals. Everything else is refused.
Strings, regular expressions and terminals are lexemes: each takes as much text as it can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ostinato.errors import BadOption
from ostinato.text.program import UNBOUNDED, Program, Unfollowable
from ostinato.text.schema import HALF

_TOKEN: Final = re.compile(
    r"""(?P<blank>[ \t\r]+|//[^\n]*|\#[^\n]*)
    |(?P<line>\n)
    |(?P<mark>^[?!](?=[A-Za-z_]))
    |(?P<options>%llguidance\s*(?=\{))
    |(?P<json>%json\s*(?=\{|true\b|false\b))
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<regex>/(?:[^/\\\n]|\\.)+/)
    |(?P<special><\[[0-9]+(?:,[0-9]+)*\]>)
    |(?P<name>@?[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<range>\{[0-9]*(?:,[0-9]*)?\})
    |(?P<sign>[:|()\[\]*+?=,&~])""",
    re.VERBOSE | re.MULTILINE,
)
_MAX_DEPTH: Final = 60
_QUOTED: Final = {
    '"': "a string that has no closing quote on its line",
    "/": "a regular expression that has no closing slash on its line",
}

# What llguidance reads beyond that begins so: statements, special tokens by name, ranges of them, aliases, attributes.
_MORE: Final = re.compile(r"%(ignore|import|declare|override|regex|lark)|<[^\s>]+>|->|\.\.|[0-9]")

_FLAGS: Final = re.compile(r"[ilmsux]+(?![A-Za-z0-9_-])")
_ATTRIBUTES: Final = ("capture", "lazy", "max_tokens", "stop", "stop_capture", "temperature")

JsonNode: TypeAlias = Callable[[Program, Any], int]


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    value: Any
    starts_line: bool
    where: str


@dataclass(frozen=True, slots=True)
class _LarkRule:
    """Where its alternatives begin among the tokens, and the text that ends it, if one is named."""

    at: int
    suffix: str | None


def lark_node(
    program: Program,
    text: str,
    json_node: JsonNode,
    others: Mapping[str, Callable[[], int]],
    *,
    written: bool = True,
) -> int:
    """The texts of a grammar as a node of `program`; `others` make the grammars that it may refer to; `written`:
    whether the caller wrote this text, so that messages may name places in it. BadOption where it has more than is read
    here."""
    try:
        return _LarkReader(program, _tokens(text), json_node, others).root()
    except RecursionError:
        raise Unfollowable("its rules refer to one another too deep") from None  # llguidance may take half a minute
    except BadOption as error:
        raise error if written else type(error)(_WHERE.sub("the grammar", str(error))) from None


def _tokens(text: str) -> list[_Token]:
    found, at, starts_line = [], 0, True
    while at < len(text):
        match = _TOKEN.match(text, at)
        kind = match.lastgroup if match else None
        if match is None or kind is None:
            kind_of_error = BadOption if _MORE.match(text, at) else Unfollowable
            part = text[at : at + 20].partition("\n")[0]
            if part[0] in _QUOTED:
                raise Unfollowable(f"{_where(text, at)} has {part!r}, {_QUOTED[part[0]]}")
            raise kind_of_error(f"{_where(text, at)} has {part!r}, which is not supported")
        where, at = _where(text, at), match.end()
        value: Any = match[0]
        if kind in ("blank", "mark"):  # marks of rules say how a parser shows them
            continue
        if kind == "line":
            starts_line = True
            continue
        if kind in ("json", "options"):
            try:
                value, at = json.JSONDecoder().raw_decode(text, at)
            except ValueError as error:
                what = "a schema that is" if kind == "json" else "options that are"
                raise Unfollowable(f"{where} has {what} not JSON: {error}") from None
        if kind == "options":
            if value != {}:
                raise BadOption(f"{where} has options of its own")
            continue
        if kind == "string":
            try:
                value = json.loads(value)
            except ValueError:
                kind_of_error = BadOption if "\\x" in value else Unfollowable
                raise kind_of_error(f"{where} has {value[:20]!r}, which is not a string of JSON") from None
            if HALF.search(value):
                raise Unfollowable(f"{where} has half a character, which no answer can hold")
        if kind in ("string", "regex") and _FLAGS.match(text, at):
            raise BadOption(f"{where} has flags after a string or a regular expression, which are not supported")
        found.append(_Token(kind, value, starts_line, where))
        starts_line = False
    return found


_WHERE: Final = re.compile(r"line \d+, column \d+ of the grammar")


def _where(text: str, at: int) -> str:
    line = text.count("\n", 0, at) + 1
    return f"line {line}, column {at - text.rfind(chr(10), 0, at)} of the grammar"


class _LarkReader:
    def __init__(
        self, program: Program, tokens: list[_Token], json_node: JsonNode, others: Mapping[str, Callable[[], int]]
    ) -> None:
        self._p, self._tokens, self._json, self._others = program, tokens, json_node, others
        self._at = 0
        self._rules: dict[str, _LarkRule] = {}
        self._calls: dict[str, int] = {}
        self._terminals: dict[str, int | None] = {}
        self._find_rules()

    def root(self) -> int:
        if "start" not in self._rules:
            raise Unfollowable("the grammar has no rule named start, with which it must begin")
        return self._rule("start")

    def _find_rules(self) -> None:
        while self._at < len(self._tokens):
            name = self._next("name")
            suffix = None
            if self._eat("["):
                attribute = self._next("name")
                if attribute.value != "suffix":
                    kind_of_error = BadOption if attribute.value in _ATTRIBUTES else Unfollowable
                    raise kind_of_error(f"{attribute.where} has {attribute.value!r}, which is not supported there")
                self._need("=")
                suffix = self._next("string").value
                self._need("]")
            self._need(":")
            if not name.starts_line or name.value in self._rules or name.value.startswith("@"):
                raise Unfollowable(f"{name.where} has {name.value!r} where a rule of another name must begin")
            self._rules[name.value] = _LarkRule(self._at, suffix)
            while self._at < len(self._tokens) and not self._begins_rule():
                self._at += 1

    def _begins_rule(self) -> bool:
        token = self._tokens[self._at]
        return token.starts_line and token.kind == "name"

    def _rule(self, name: str) -> int:
        """A call of a rule; rules may refer to one another before they are read."""
        if name not in self._calls:
            if name not in self._rules:
                raise Unfollowable(f"{self._here} names the rule {name!r}, which the grammar does not have")
            procedure = self._p.declare()
            self._calls[name] = self._p.call(procedure)
            self._p.define(procedure, self._body(name, lexical=False))
        return self._calls[name]

    def _body(self, name: str, *, lexical: bool) -> int:
        rule, back = self._rules[name], self._at
        self._at = rule.at
        try:
            node = self._alternatives(lexical or rule.suffix is not None, 0)
            if self._at < len(self._tokens) and not self._begins_rule():
                token = self._tokens[self._at]
                raise Unfollowable(f"{token.where} has {token.value!r}, which is not supported there")
        finally:
            self._at = back
        return node if rule.suffix is None else self._p.lexeme(self._until(node, rule.suffix))

    def _until(self, node: int, suffix: str) -> int:
        """A text and, after it, the first occurrence of the suffix."""
        end, everything = self._p.literal(suffix), self._p.negated(self._p.nothing)
        too_long = self._p.cat(everything, end, self._p.negated(self._p.empty))
        return self._p.both(self._p.cat(node, end), self._p.negated(too_long))

    def _terminal(self, name: str) -> int:
        if name not in self._rules:
            raise Unfollowable(f"{self._here} names the terminal {name!r}, which the grammar does not have")
        if name in self._terminals and self._terminals[name] is None:
            raise Unfollowable(f"{self._here} has the terminal {name!r} refer to itself")
        self._terminals.setdefault(name, None)
        found = self._terminals[name]
        if found is None:
            found = self._terminals[name] = self._body(name, lexical=True)
        return found

    def _alternatives(self, lexical: bool, deep: int) -> int:
        if deep > _MAX_DEPTH:
            raise Unfollowable(f"{self._here} is nested too deep")
        nodes = [self._conjunction(lexical, deep)]
        while self._eat("|"):
            nodes.append(self._conjunction(lexical, deep))
        return self._p.either(nodes)

    def _conjunction(self, lexical: bool, deep: int) -> int:
        nodes = [self._sequence(lexical, deep)]
        while lexical and self._eat("&"):
            nodes.append(self._sequence(lexical, deep))
        return nodes[0] if len(nodes) == 1 else self._p.both(*nodes)

    def _sequence(self, lexical: bool, deep: int) -> int:
        nodes = []
        while self._at < len(self._tokens) and not self._begins_rule() and not self._is_next("|", "&", ")", "]"):
            if lexical and self._eat("~"):
                nodes.append(self._p.negated(self._repeated(self._atom(lexical, deep))))
            else:
                nodes.append(self._repeated(self._atom(lexical, deep)))
        return self._p.cat(*nodes)

    def _repeated(self, node: int) -> int:
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if token.kind == "range":
                low, comma, high = token.value[1:-1].partition(",")
                least = int(low or 0)
                if high and int(high) < least:
                    raise Unfollowable(f"{token.where} has the repeat {token.value!r}, whose bounds are reversed")
                node = self._p.repeat(node, least, (int(high) if high else UNBOUNDED) if comma else least)
            elif token.kind == "sign" and token.value in "*+?":
                low_high = {"*": (0, UNBOUNDED), "+": (1, UNBOUNDED), "?": (0, 1)}[token.value]
                node = self._p.repeat(node, *low_high)
            else:
                break
            self._at += 1
        return node

    def _atom(self, lexical: bool, deep: int) -> int:
        if self._at == len(self._tokens):
            raise Unfollowable("the grammar ends where a part of a rule must be")
        token = self._tokens[self._at]
        self._at += 1
        match token.kind:
            case "string":
                return self._text(self._p.literal(token.value), lexical)
            case "regex":
                return self._text(self._p.pattern(token.value[1:-1]), lexical)
            case "name" if token.value.startswith("@"):
                if lexical or token.value[1:] not in self._others:
                    raise Unfollowable(f"{token.where} refers to {token.value!r}, which is not there")
                return self._others[token.value[1:]]()
            case "name" if token.value.isupper():
                return self._text(self._terminal(token.value), lexical)
            case "name" if not lexical:
                return self._rule(token.value)
            case "json" if not lexical:
                try:
                    return self._json(self._p, token.value)
                except BadOption as error:
                    raise type(error)(f"{token.where} has a schema that cannot be followed: {error}") from None
            case "special" if not lexical:
                return self._p.either([self._p.token(int(id)) for id in token.value[2:-2].split(",")])
            case "sign" if token.value in "([":
                node = self._alternatives(lexical, deep + 1)
                self._need(")" if token.value == "(" else "]")
                return node if token.value == "(" else self._p.optional(node)
        kind_of_error = BadOption if token.value == "~" else Unfollowable
        raise kind_of_error(f"{token.where} has {token.value!r}, which is not supported there")

    @property
    def _here(self) -> str:
        """Where the token stands that was read last."""
        return self._tokens[self._at - 1].where

    def _text(self, node: int, lexical: bool) -> int:
        return node if lexical else self._p.lexeme(node)

    def _is_next(self, *signs: str) -> bool:
        token = self._tokens[self._at] if self._at < len(self._tokens) else None
        return token is not None and token.kind == "sign" and token.value in signs

    def _eat(self, sign: str) -> bool:
        found = self._is_next(sign)
        self._at += found
        return found

    def _need(self, sign: str) -> None:
        if not self._eat(sign):
            where = self._tokens[self._at].where if self._at < len(self._tokens) else "the end of the grammar"
            raise Unfollowable(f"{where} has no {sign!r}, which must be there")

    def _next(self, kind: str) -> _Token:
        if self._at >= len(self._tokens) or self._tokens[self._at].kind != kind:
            where = self._tokens[self._at].where if self._at < len(self._tokens) else "the end of the grammar"
            raise Unfollowable(f"{where} has no {kind}, which must be there")
        self._at += 1
        return self._tokens[self._at - 1]
