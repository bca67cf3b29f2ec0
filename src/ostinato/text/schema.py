"""JSON schemas before they become grammars: keywords that ask for nothing are left out, and those that no grammar can
follow are named with their place. Nothing here knows llguidance or tokens; `grammar.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ostinato.errors import BadOption

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
MAX_DEPTH: Final = 128  # schemas that are nested deeper are refused later, as too deep


def followable(schema: Any, place: tuple[str, ...] = ()) -> Any:
    """A schema without keywords that ask for nothing; BadOption names the place of one that cannot be followed.

    >>> followable({"type": "array", "items": {"type": "string", "format": "password"}, "uniqueItems": False})
    {'type': 'array', 'items': {'type': 'string'}}
    >>> followable({"items": {"uniqueItems": True}})
    Traceback (most recent call last):
    ostinato.errors.BadOption: items has uniqueItems, which cannot be followed; leave it out, and check the answer
    """
    if not isinstance(schema, Mapping) or len(place) > MAX_DEPTH:
        return schema
    made: dict[str, Any] = {}
    for word, value in schema.items():
        if word == "uniqueItems" and _is_about_nothing(schema):
            continue
        if word == "uniqueItems":
            raise BadOption(
                f"{_at(place)} has uniqueItems, which cannot be followed; leave it out, and check the answer"
            )
        if word == "format" and isinstance(value, str) and value not in FORMATS:
            if value in _NOT_FOLLOWED:
                known = ", ".join(FORMATS)
                raise BadOption(f"{_at(place)} has the format {value!r}, which cannot be followed; these can: {known}")
            continue
        made[word] = _inner(word, value, (*place, word))
    return made


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
    return ".".join(place)[:200] or "it"
