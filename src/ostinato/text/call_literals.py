"""Arguments of calls as literals, as rules of a grammar: Python's, Gemma's, and JSON inside of other formats.

Members come in an order, required ones always. `JsonValues` is the JSON of tags and of messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ostinato.text.call_rules import (
    FOREIGN,
    OF_NUMBERS,
    OF_TEXTS,
    Rules,
    Unwritable,
    json_rule,
    lengths,
    listed,
    member_names,
    text_condition,
)
from ostinato.text.call_schema import Kinds, resolved, value_kinds
from ostinato.text.grammar import literal, with_control_tokens

_WORD_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
# Numbers that a float holds, and integers that Python reads.
_NUMBERS: Final = {
    "integer": "/-?(0|[1-9][0-9]{0,40})/",
    "number": r"/-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,2})?/",
}
# A character of a JSON string; the halves of one are escaped together.
_CHARACTER: Final = (
    r'[^"\\\x00-\x1F\x7F]|\\[nrbtf\\"]|\\u([0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    r"|[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_MAX_DEPTH: Final = 40


@dataclass(frozen=True, slots=True)
class LiteralForm:
    """How a format with literals writes a call, and the values in it."""

    begin: str  # NAME stands for the function's name
    end: str
    between: str  # of an argument's name and its value
    separator: str  # as a part of a grammar
    colon: str
    words: Mapping[str, Sequence[str]]
    quote: str | None  # around texts, and around no names; None: texts are JSON's, and so are names in objects
    closers: tuple[str, ...]  # texts that a text cannot hold
    in_order: bool = True  # of the schema, and otherwise of the names


class LiteralArguments:
    """Writes the arguments of functions, one after the other."""

    def __init__(self, form: LiteralForm, rules: Rules, special: Mapping[str, int]) -> None:
        self._form, self._rules, self._special = form, rules, special
        self._references: dict[str, str] = {}
        self._anything: str | None = None
        self._root: Mapping[str, Any] = {}

    def call(self, name: str, schema: Mapping[str, Any] | None) -> str:
        """A call; without a schema, with any arguments."""
        self._root, self._references = schema or {}, {}
        if schema is None:
            members = self._any_members(self._form.between, quoted=False)
        else:
            members = self._members(schema, self._form.between, quoted=False)
        return f"{literal(self._form.begin.replace('NAME', name))} {members} {literal(self._form.end)}"

    def value(self, schema: Any, root: Mapping[str, Any]) -> str:
        """A value of a schema, whose references lead into `root`."""
        self._root, self._references = root, {}
        return self._value(schema, 0)

    # Any values

    def _any_value(self) -> str:
        if self._anything is None:
            self._anything = self._rules.declare()
            several = f"({self._anything} ({self._form.separator} {self._anything})*)?"
            options = [
                self._text({}),
                self._rules.terminal(_NUMBERS["number"]),
                *(self._word(word) for word in ("true", "false", "null")),
                self._rules.rule(f'"[" {several} "]"'),
                self._rules.rule(f'"{{" {self._any_members(self._form.colon, quoted=True)} "}}"'),
            ]
            self._rules.define(self._anything, " | ".join(options))
        return self._anything

    def _any_members(self, between: str, *, quoted: bool) -> str:
        key = self._text({}) if quoted and self._form.quote is None else self._other_key([], quoted=False)
        member = self._rules.rule(f"{key} {self._sign(between)} {self._any_value()}")
        return f"({member} ({self._form.separator} {member})*)?"

    # Members

    def _members(self, schema: Mapping[str, Any], between: str, *, quoted: bool, deep: int = 0) -> str:
        """The members of an object in their order, the optional ones present or not."""
        members = member_names(schema)
        names = list(members) if self._form.in_order else sorted(members, key=lambda name: (name.lower(), name))
        after = first = ""  # what follows a member; what follows none
        other = schema.get("additionalProperties", False)
        if other is not False:
            key = self._other_key(names, quoted=quoted)
            member = self._rules.rule(f"{key} {self._sign(between)} {self._value(other, deep + 1)}")
            after = f"({self._form.separator} {member})*"
            first = f"({member} {after})?"
        for name in reversed(names):
            one, needed = members[name]
            member = f"{self._key(name, quoted=quoted)} {self._sign(between)} {self._value(one, deep + 1)}"
            behind, further = f"{member} {after}", f"{self._form.separator} {member}"
            if needed:
                first, after = self._rules.rule(behind), self._rules.rule(f"{further} {after}")
            else:
                first = self._rules.rule(f"{behind} | {first}" if first else f"({behind})?")
                after = self._rules.rule(f"({further})? {after}")
        return first

    def _key(self, name: str, *, quoted: bool) -> str:
        if quoted and self._form.quote is None:
            return self._written(name)
        return literal(name) if _WORD_KEY.fullmatch(name) else self._unwritable()

    def _other_key(self, names: Sequence[str], *, quoted: bool) -> str:
        """The name of a member that the schema does not name."""
        taken = " | ".join(self._key(name, quoted=quoted) for name in names)
        is_text = quoted and self._form.quote is None
        pattern = rf'/"{_WORD_KEY.pattern}"/' if is_text else f"/{_WORD_KEY.pattern}/"
        return self._rules.terminal(f"{pattern} & ~({taken})" if taken else pattern)

    # Values

    def _value(self, schema: Any, deep: int) -> str:
        if deep > _MAX_DEPTH or schema is False:
            raise Unwritable
        if not isinstance(schema, Mapping):
            return self._any_value()
        if "$ref" in schema:
            return self._reference(schema, deep)
        if FOREIGN & schema.keys():
            raise Unwritable
        if "enum" in schema or "const" in schema:
            texts = [self._written(value) for value in listed(schema)]
            return self._rules.rule(" | ".join(texts)) if texts else self._unwritable()
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return self._either(schema, word, deep)
        kinds = value_kinds(schema, self._root)
        if kinds is None:
            return self._any_value()
        return self._rules.rule(" | ".join(self._of_kind(kind, schema, deep) for kind in sorted(kinds)))

    def _reference(self, schema: Mapping[str, Any], deep: int) -> str:
        reference, found = schema["$ref"], resolved(schema, self._root)
        if not isinstance(found, Mapping) or not isinstance(reference, str):
            raise Unwritable
        if reference not in self._references:
            self._references[reference] = name = self._rules.declare()
            self._rules.define(name, self._value(found, deep + 1))
        return self._references[reference]

    def _either(self, schema: Mapping[str, Any], word: str, deep: int) -> str:
        options = schema[word]
        if not isinstance(options, list) or not options or schema.keys() & {"type", *OF_TEXTS, *OF_NUMBERS}:
            raise Unwritable
        kinds = [value_kinds(option, self._root) for option in options]
        if word == "oneOf" and (None in kinds or sum(len(one or ()) for one in kinds) > len(_union(kinds))):
            raise Unwritable  # more than one may hold
        return self._rules.rule(" | ".join(self._value(option, deep + 1) for option in options))

    def _of_kind(self, kind: str, schema: Mapping[str, Any], deep: int) -> str:
        match kind:
            case "string":
                return self._text(schema)
            case "integer" | "number":
                bounds = {word: schema[word] for word in OF_NUMBERS if word in schema}
                return json_rule({"type": kind, **bounds}, {}) if bounds else self._rules.terminal(_NUMBERS[kind])
            case "boolean":
                return f"{self._word('true')} | {self._word('false')}"
            case "null":
                return self._word("null")
            case "array":
                return self._list(schema, deep)
            case "object":
                return self._object(schema, deep)
        raise Unwritable

    def _word(self, word: str) -> str:
        return " | ".join(map(literal, self._form.words[word]))

    def _list(self, schema: Mapping[str, Any], deep: int) -> str:
        low, high = lengths(schema, "minItems", "maxItems")
        if isinstance(schema.get("items"), list):
            raise Unwritable
        if high == 0:
            return literal("[]")
        item = self._value(schema.get("items", True), deep + 1)
        most = "" if high is None else high - 1
        items = f"{item} ({self._form.separator} {item}){{{max(0, low - 1)},{most}}}"
        return self._rules.rule(f'"[" {items if low else f"({items})?"} "]"')

    def _object(self, schema: Mapping[str, Any], deep: int) -> str:
        if not {"properties", "required", "additionalProperties"} & schema.keys():
            members = self._any_members(self._form.colon, quoted=True)
        else:
            members = self._members(schema, self._form.colon, quoted=True, deep=deep + 1)
        return self._rules.rule(f'"{{" {members} "}}"')

    def _text(self, schema: Mapping[str, Any]) -> str:
        plain = {word: schema[word] for word in OF_TEXTS if word in schema}
        free = self._rules.without(self._form.closers)
        if self._form.quote is None and {"pattern", "format"} & plain.keys():
            return json_rule({"type": "string", **plain}, {})
        if self._form.quote is None:
            return self._rules.rule(self._rules.terminal(f"{_quoted(plain)} & {free}"))
        conditions = [free, *(f"({one})" for one in text_condition(plain))]
        text = self._rules.terminal(" & ".join(conditions)) if len(conditions) > 1 else free
        quote = self._sign(self._form.quote)
        if self._form.quote in self._special:
            return self._rules.rule(f"{quote} {text} {quote}")
        return self._rules.rule(f"{quote} {self._rules.terminal(f'{text} {quote}')}")

    def _written(self, value: Any) -> str:
        """One value as the format writes it."""
        if value is None or isinstance(value, bool):
            return f"({self._word(json.dumps(value))})"
        if isinstance(value, list | dict) and self._form.quote is not None:
            raise Unwritable
        is_bare = isinstance(value, str) and self._form.quote is not None
        text = value if is_bare else json.dumps(value, ensure_ascii=False)
        if any(closer in text for closer in self._form.closers):
            raise Unwritable
        return self._sign(f"{self._form.quote}{text}{self._form.quote}") if is_bare else literal(text)

    def _sign(self, text: str) -> str:
        return text if text.startswith("/") else with_control_tokens(text, self._special)

    def _unwritable(self) -> str:
        raise Unwritable


class JsonValues:
    """Writes values as JSON whose texts do not hold what would end the call, as far as a schema can be written here;
    otherwise as any JSON of the schema."""

    def __init__(self, rules: Rules, closers: tuple[str, ...]) -> None:
        words = {word: (word,) for word in ("true", "false", "null")}
        form = LiteralForm("", "", "", "/, ?/", "/: ?/", words, None, closers)
        self._rules, self._values = rules, LiteralArguments(form, rules, {})

    def value(self, schema: Any, root: Mapping[str, Any]) -> str:
        try:
            return self._values.value(schema, root)
        except Unwritable:
            return self._rules.rule(json_rule(schema, root))


def _quoted(schema: Mapping[str, Any]) -> str:
    """A JSON string of a length, as a part of a terminal."""
    low, high = lengths(schema, "minLength", "maxLength")
    return f'/"({_CHARACTER}){{{low},{"" if high is None else high}}}"/'


def _union(kinds: Sequence[Kinds | None]) -> Kinds:
    return frozenset().union(*(one for one in kinds if one is not None))
