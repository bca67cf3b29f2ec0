"""Arguments of calls between tags, as rules of a grammar: text as it is, and everything else as JSON.

A value's text does not hold the tags that close it. `call_schema.read_value` reads what is written here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ostinato.text.call_literals import JsonValues
from ostinato.text.call_rules import (
    FOREIGN,
    OF_NUMBERS,
    OF_TEXTS,
    Rules,
    Unwritable,
    listed,
    member_names,
    text_condition,
)
from ostinato.text.call_schema import Kinds, kind_of, read_value, resolved, value_kinds
from ostinato.text.grammar import literal, with_control_tokens

_STRUCTURED: Final = frozenset({"array", "object"})
_KEY: Final = re.compile(r'[^\s<>"]+(?: [^\s<>"]+)*')
_ANY_KEY: Final = "/[A-Za-z0-9_.-]+/"


@dataclass(frozen=True, slots=True)
class TagForm:
    """How a format with tags writes a call: the text around its arguments and around each value."""

    begin: str  # NAME stands for the function's name
    key: str  # KEY for the argument's
    value_end: str
    after: str
    end: str
    closers: tuple[str, ...]  # texts that a value cannot hold
    strips: bool = False  # the parser leaves out a newline at each end of a value
    lenient: bool = False  # newlines may be left out


class TagArguments:
    """Writes the arguments of functions, one after the other."""

    def __init__(self, form: TagForm, rules: Rules, special: Mapping[str, int]) -> None:
        self._form, self._rules, self._special = form, rules, special
        self._free = rules.without(form.closers)
        self._json = JsonValues(rules, form.closers)

    def call(self, name: str, schema: Mapping[str, Any] | None) -> str:
        """A call; without a schema, with any arguments."""
        begin, end = self._fixed(self._form.begin.replace("NAME", name)), self._fixed(self._form.end)
        return f"{begin} {self._any() if schema is None else self._members(schema)} {end}"

    def _fixed(self, text: str) -> str:
        """A text of the format; its newlines may be optional."""
        if not self._form.lenient:
            return with_control_tokens(text, self._special)
        parts = [with_control_tokens(part, self._special) for part in text.split("\n")]
        return ' "\\n"? '.join(parts).strip()

    def _any(self) -> str:
        return f"({self._member(self._rules.terminal(_ANY_KEY), self._text([]))})*"

    def _member(self, key: str, value: str) -> str:
        """`key` and `value`: as the grammar writes them."""
        before, _, behind = self._form.key.partition("KEY")
        return f"{self._fixed(before)} {key} {self._fixed(behind)} {value} {self._fixed(self._form.after)}".strip()

    def _members(self, schema: Mapping[str, Any]) -> str:
        parts = []
        members = member_names(schema)
        for name, (one, needed) in members.items():
            if _KEY.fullmatch(name) is None:
                raise Unwritable
            member = self._member(literal(name), self._value(one, schema))
            parts.append(member if needed else f"({member})?")
        other = schema.get("additionalProperties", False)
        if other is not False:
            known = " | ".join(map(literal, members))
            key = self._rules.terminal(f"{_ANY_KEY} & ~({known})" if known else _ANY_KEY)
            parts.append(f"({self._member(key, self._value(other, schema))})*")
        return " ".join(parts)

    def _value(self, schema: Any, root: Mapping[str, Any]) -> str:
        """A value and the tag that closes it."""
        kinds, found = value_kinds(schema, root), resolved(schema, root)
        if schema is False or (kinds is not None and not kinds):
            raise Unwritable
        if kinds is None or not isinstance(found, Mapping):
            return self._text([])
        if "enum" in found or "const" in found:
            return self._text([self._values(found, root)])
        if "string" in kinds:
            return self._text_or_other(found, root, kinds)
        if kinds <= {"boolean", "null"} and not FOREIGN & found.keys():
            return self._text([" | ".join(map(literal, _words(kinds)))])
        return self._json_value(schema, root)

    def _json_value(self, schema: Any, root: Mapping[str, Any]) -> str:
        end = with_control_tokens(self._form.value_end, self._special)
        return self._rules.rule(f"{self._json.value(schema, root)} {end}")

    def _values(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """The values of an enum, each as the text that is read as it."""
        texts = []
        for value in listed(schema):
            for text in (value if isinstance(value, str) else "", json.dumps(value, ensure_ascii=False)):
                read = read_value(text, schema, root)
                same = read == value and kind_of(read) == kind_of(value)
                if same and not (self._form.strips and text != text.strip("\n")):
                    texts.append(text)
                    break
        if not texts:
            raise Unwritable
        return " | ".join(map(literal, texts))

    def _text_or_other(self, schema: Mapping[str, Any], root: Mapping[str, Any], kinds: Kinds) -> str:
        """A text, or something else where the schema allows both."""
        parts = _parts(schema, root)
        options = [" & ".join(text_condition(part)) for part in parts if "string" in _types(part, root)]
        conditions = []
        if "" not in options:
            words = map(literal, _words(kinds & {"boolean", "null"}))
            conditions.append(" | ".join([*(f"({option})" for option in options), *words]))
            # A text that is quoted is read without its quotation marks where it need not be a text.
            conditions += [] if kinds == frozenset(["string"]) else [r'~(/[ \t\r\n]*"(.|\n)*/)']
            conditions += [r"~(/\n(.|\n)*/)", r"~(/(.|\n)*\n/)"] if self._form.strips else []
        if not kinds & _STRUCTURED:
            return self._text(conditions)
        others = [part for part in parts if _types(part, root) & _STRUCTURED]
        text = self._text([*conditions, r"~(/[ \t\r\n]*[\[{](.|\n)*/)"])
        return f"({' | '.join([text, *(self._json_value(part, root) for part in others)])})"

    def _text(self, conditions: Sequence[str]) -> str:
        """A text without a closing tag, and the tag behind it."""
        parts = [self._free, *(f"({condition})" for condition in conditions)]
        text = self._rules.terminal(" & ".join(parts)) if len(parts) > 1 else self._free
        end = self._form.value_end
        if any(marker in end for marker in self._special):
            return f"{text} {with_control_tokens(end, self._special)}"
        return self._rules.rule(self._rules.terminal(f"{text} {literal(end)}"))


def _parts(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas of one type each of which one must hold."""
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            if schema.keys() & {"type", "enum", "const", *OF_TEXTS, *OF_NUMBERS, *FOREIGN}:
                raise Unwritable
            options = [resolved(option, root) for option in schema[word]]
            return [part for option in options if isinstance(option, Mapping) for part in _parts(option, root)]
    kinds = schema.get("type")
    return [{**schema, "type": kind} for kind in kinds] if isinstance(kinds, list) else [schema]


def _types(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Kinds:
    kinds = value_kinds(schema, root)
    if kinds is None or "enum" in schema or "const" in schema:
        raise Unwritable
    return kinds


def _words(kinds: Kinds) -> list[str]:
    """Words of JSON and of Python: templates write either."""
    words = ["true", "false", "True", "False"] if "boolean" in kinds else []
    return [*words, "null", "None"] if "null" in kinds else words
