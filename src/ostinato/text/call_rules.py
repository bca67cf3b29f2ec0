"""Rules of grammars for calls, in Lark as llguidance reads it, and what schemas ask of members, texts and JSON.

`call_tags.py` and `call_literals.py` write arguments with it. What a schema asks for and no rule can say raises
`Unwritable`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ostinato.errors import BadOption
from ostinato.text.call_schema import kind_of, value_kinds
from ostinato.text.grammar import compact, in_slashes, literal
from ostinato.text.json_formats import PATTERNS
from ostinato.text.schema_program import ascii_classes

# Keywords that are not written here, wherever they stand in a schema.
FOREIGN: Final = frozenset(
    {
        *("allOf", "not", "if", "contains", "uniqueItems", "patternProperties", "propertyNames", "prefixItems"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef"),
        *("additionalItems", "unevaluatedProperties", "unevaluatedItems"),
    }
)
OF_TEXTS: Final = ("minLength", "maxLength", "pattern", "format")
OF_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_NO_OBJECT: Final = FOREIGN | {"$ref", "anyOf", "oneOf", "enum", "const"}
_DEFINITIONS: Final = ("$defs", "definitions")
_NO_ANCHOR: Final = re.compile(r"(?:[^\\\[^$|]|\\.|\[\^?\]?(?:[^\]\\]|\\.)*\])*", re.DOTALL)
_MAX_LENGTH: Final = 1_000_000


class Unwritable(Exception):
    """A schema asks for what no rule here can say."""


class Rules:
    """Rules and terminals of a grammar, each once."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._bodies: dict[str, str] = {}

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        return self._named(body, f"r{len(self._bodies)}")

    def terminal(self, body: str) -> str:
        """The name of a terminal with this body."""
        return self._named(body, f"T{len(self._bodies)}")

    def declare(self) -> str:
        """The name of a rule whose body comes later."""
        name = f"r{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        self._bodies[name] = body

    def any(self) -> str:
        """Any text."""
        return self.terminal(r"/(.|\n)*/")

    def without(self, texts: Iterable[str]) -> str:
        """Any text that holds none of these."""
        held = " | ".join(map(literal, dict.fromkeys(texts)))
        return self.terminal(f"{self.any()} & ~({self.any()} ({held}) {self.any()})")

    def lines(self) -> list[str]:
        return [f"{name}: {body}" for name, body in self._bodies.items()]

    def _named(self, body: str, name: str) -> str:
        if body not in self._names:
            self._names[body] = name
            self._bodies[name] = body
        return self._names[body]


def member_names(schema: Mapping[str, Any]) -> dict[str, tuple[Any, bool]]:
    """The members of an object: each one's schema, and whether it must be there; Unwritable if the schema says more."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if _OF_NO_OBJECT & schema.keys() or not isinstance(properties, Mapping) or not isinstance(required, list):
        raise Unwritable
    kind = schema.get("type", "object")
    names = dict.fromkeys([*properties, *filter(_is_text, required)])
    if (kind != "object" and "object" not in kind) or not all(map(_is_text, [*properties, *required])):
        raise Unwritable
    return {name: (properties.get(name, True), name in required) for name in names}


def listed(schema: Mapping[str, Any]) -> list[Any]:
    """The values of an enum or const that are of the schema's type."""
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(values, list):
        raise Unwritable
    kinds = value_kinds({"type": schema["type"]}, {}) if "type" in schema else None
    if kinds is None:
        return values
    wider = kinds | ({"integer"} if "number" in kinds else set())
    return [value for value in values if kind_of(value) in wider]


def lengths(schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    """The bounds that a schema names; Unwritable if they are none."""
    low, high = schema.get(least, 0), schema.get(most)
    if not _is_length(low) or not (high is None or _is_length(high)) or (high is not None and high < low):
        raise Unwritable
    return low, high


def text_condition(schema: Mapping[str, Any]) -> list[str]:
    """What a schema asks of a text, as parts of a terminal that are joined by `&`."""
    if {"anyOf", "oneOf", "$ref", *FOREIGN} & schema.keys():
        raise Unwritable
    found = []
    low, high = lengths(schema, "minLength", "maxLength")
    if low or high is not None:
        found.append(rf"/(.|\n){{{low},{'' if high is None else high}}}/")
    if "pattern" in schema:
        found.append(_searched(schema["pattern"]))
    if "format" in schema and schema["format"] in PATTERNS:
        found.append(f"/{in_slashes(PATTERNS[schema['format']])}/")
    return found


def json_rule(schema: Any, root: Mapping[str, Any]) -> str:
    """The values of a schema as JSON, with the definitions of `root`."""
    definitions = {word: root[word] for word in _DEFINITIONS if word in root}
    whole = {**definitions, **schema} if _references(schema) else dict(schema)
    inside = tuple(f"#/{word}/" for word in _DEFINITIONS)
    if any(not reference.startswith(inside) for reference in _references(whole)):
        raise Unwritable
    try:
        return f"%json {json.dumps(compact(whole), ensure_ascii=False)}"
    except BadOption:
        raise Unwritable from None


def _references(schema: Any) -> list[str]:
    if isinstance(schema, Mapping):
        own = [str(schema["$ref"])] if "$ref" in schema else []
        return own + [found for value in schema.values() for found in _references(value)]
    return [found for value in schema for found in _references(value)] if isinstance(schema, list) else []


def _searched(pattern: Any) -> str:
    """A pattern of which a part of the text must match, as one that all of it matches."""
    if not isinstance(pattern, str):
        raise Unwritable
    begins, inner = ("", pattern[1:]) if pattern.startswith("^") else (r"(.|\n)*", pattern)
    ends = r"(.|\n)*"
    if inner.endswith("$") and not inner.endswith(r"\$"):
        inner, ends = inner[:-1], ""
    if _NO_ANCHOR.fullmatch(re.sub(r"\((?:[^()\\^$]|\\.)*\)", "()", inner)) is None or "(?" in inner:
        raise Unwritable  # an anchor or a choice that is not about the whole
    return f"/{begins}({in_slashes(ascii_classes(inner))}){ends}/"


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_LENGTH


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
