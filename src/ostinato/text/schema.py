"""JSON schemas before they become grammars: keywords that ask for nothing are left out, and those that no grammar can
follow are named with their place. Nothing here knows llguidance or tokens; `grammar.py` does.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, Final

from ostinato.text.program import Unfollowable

# The formats that llguidance follows, and further ones that JSON Schema defines. Any other word is a remark for
# readers of the schema (`int32`, `password`): JSON Schema leaves such words without an effect.
FORMATS: Final = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
_NOT_FOLLOWED: Final = frozenset(
    {
        *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"),
        *("uri-reference", "uri-template"),
    }
)
# Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE: Final = frozenset(
    {
        *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)
_SEVERAL: Final = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
HALF: Final = re.compile("[\ud800-\udfff]")
_LEAST: Final = ("minimum", "exclusiveMinimum")
_MOST: Final = ("maximum", "exclusiveMaximum")
MAX_NUMBER: Final = sys.float_info.max  # of a bound
MAX_INTEGER: Final = 2**63 - 1  # of a bound of integers
MAX_PATTERNS: Final = 12  # of one text, by allOf: with 20, llguidance takes seconds and half a gigabyte
MAX_DEPTH: Final = 128  # schemas that are nested deeper are refused later, as too deep


def followable(schema: Any, place: tuple[str, ...] = ()) -> Any:
    """A schema without keywords that ask for nothing; Unfollowable names the place of one that cannot be followed.

    >>> followable({"type": "array", "items": {"type": "string", "format": "password"}, "uniqueItems": False})
    {'type': 'array', 'items': {'type': 'string'}}
    >>> followable({"items": {"uniqueItems": True}})
    Traceback (most recent call last):
    ostinato.text.program.Unfollowable: items has uniqueItems, which cannot be followed; leave it out, check the answer
    """
    if not isinstance(schema, Mapping) or len(place) > MAX_DEPTH:
        return schema
    _check_numbers(schema, place)
    _check_patterns(schema, place)
    for word in ("const", "enum"):
        if HALF.search(json.dumps(schema.get(word), ensure_ascii=False)):
            raise Unfollowable(f"{_at(place)} has half a character in {word}, which no answer can hold")
    made: dict[str, Any] = {}
    for word, value in schema.items():
        if word == "uniqueItems" and _is_about_nothing(schema):
            continue
        if word == "uniqueItems":
            raise Unfollowable(
                f"{_at(place)} has uniqueItems, which cannot be followed; leave it out, check the answer"
            )
        if word == "format" and isinstance(value, str) and value not in FORMATS:
            if value in _NOT_FOLLOWED:
                known = ", ".join(FORMATS)
                raise Unfollowable(
                    f"{_at(place)} has the format {value!r}, which cannot be followed; these can: {known}"
                )
            continue
        made[word] = _inner(word, value, (*place, word))
    return made


def _check_numbers(schema: Mapping[str, Any], place: tuple[str, ...]) -> None:
    """Refuse bounds that are no floating-point numbers, and bounds of integers beyond 64 bits: a grammar would allow a
    number outside of them."""
    for word in (*_LEAST, *_MOST, "multipleOf"):
        value = schema.get(word)
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise Unfollowable(f"{_at(place)} has {word} larger than a float, which cannot be followed")
    if "integer" not in _types(schema):
        return
    beyond = [word for word in _LEAST if _number(schema, word) > MAX_INTEGER]
    beyond += [word for word in _MOST if _number(schema, word) < -MAX_INTEGER]
    if beyond:
        raise Unfollowable(f"{_at(place)} has integers beyond 64 bits ({beyond[0]}), which cannot be followed")


def _number(schema: Mapping[str, Any], word: str) -> float:
    value = schema.get(word)
    return value if isinstance(value, int | float) else 0


def _check_patterns(schema: Mapping[str, Any], place: tuple[str, ...]) -> None:
    """Refuse many patterns of one text: the states of their automaton multiply."""
    parts = schema.get("allOf")
    n_patterns = (
        sum(isinstance(part, Mapping) and "pattern" in part for part in parts) if isinstance(parts, list) else 0
    )
    if n_patterns > MAX_PATTERNS:
        raise Unfollowable(f"{_at(place)} has allOf with {n_patterns} patterns; at most {MAX_PATTERNS} can be followed")


def _types(schema: Mapping[str, Any]) -> tuple[Any, ...]:
    types = schema.get("type")
    return tuple(types) if isinstance(types, list) else (types,)


def _is_about_nothing(schema: Mapping[str, Any]) -> bool:
    most = schema.get("maxItems")
    return schema["uniqueItems"] is False or (isinstance(most, int) and most <= 1)


def _inner(word: str, value: Any, place: tuple[str, ...]) -> Any:
    if word in _NAMED and isinstance(value, Mapping):
        return {name: followable(one, (*place, name)) for name, one in value.items()}
    if word in _SEVERAL and isinstance(value, list):
        return [followable(one, (*place, str(number))) for number, one in enumerate(value)]
    return followable(value, place) if word in _ONE else value


def _at(place: tuple[str, ...]) -> str:
    return place_name(place) or "it"


def place_name(place: tuple[str, ...]) -> str:
    r"""A place in a schema for a message: one line, of printable characters.

    >>> place_name(("properties", "a\n", "items"))
    'properties.a\\n.items'
    """
    text = ".".join(place)[:200]
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
