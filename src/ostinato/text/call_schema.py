"""Which JSON types a schema allows, and a value of a call that is written as bare text read by them.

Both sides of a call use it: the parser of an answer (`block_calls.py`), and the grammar that the answer follows
(`call_tags.py`), so that what the grammar allows is read as the schema says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ostinato.text.literals import Literals, from_json

_MAX_REFERENCES: Final = 16
_PYTHON_WORDS: Final = {"True": True, "False": False, "None": None}
Kinds = frozenset[str]


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema behind references into `root`; None if one leads nowhere, or they do not end."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        found: Any = root
        reference = schema["$ref"]
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        for part in reference[2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        schema = found
    return None


def value_kinds(schema: Any, root: Mapping[str, Any], deep: int = 0) -> Kinds | None:
    """The JSON types of the values that a schema allows; None if it does not say.

    >>> sorted(value_kinds({"anyOf": [{"type": "string"}, {"enum": [1, None]}]}, {}))
    ['integer', 'null', 'string']
    """
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or deep > _MAX_REFERENCES:
        return None
    if "const" in schema:
        return frozenset([kind_of(schema["const"])])
    if isinstance(schema.get("enum"), list):
        return frozenset(map(kind_of, schema["enum"]))
    match schema.get("type"):
        case str() as kind:
            return frozenset([kind])
        case [*kinds] if kinds and all(isinstance(kind, str) for kind in kinds):
            return frozenset(kinds)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            options = [value_kinds(option, root, deep + 1) for option in schema[word]]
            known = [kinds for kinds in options if kinds is not None]
            return frozenset().union(*known) if len(known) == len(options) else None
    return None


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def read_value(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value that a bare text means: JSON, unless the schema asks for text or for another type than that JSON has.
    Some templates write words, lists and objects as Python does: these are read too where the schema asks for them.

    >>> [read_value(text, {"type": ["string", "null"]}, {}) for text in ("12", "null", "None")]
    ['12', None, None]
    >>> read_value("['a', None]", {"type": "array"}, {})
    ['a', None]
    """
    kinds = value_kinds(schema, root)
    if kinds == frozenset(["string"]):
        return text
    try:
        value = from_json(text)
    except ValueError:
        return text if kinds is None else _from_python(text, kinds)
    if kinds is not None and "string" in kinds and not _is_of(value, kinds):
        return text
    return value


def _from_python(text: str, kinds: Kinds) -> Any:
    """A word, a list or an object in Python's form; the text itself where it is none or may be text."""
    if text in _PYTHON_WORDS:
        value = _PYTHON_WORDS[text]
        return value if "string" not in kinds or kind_of(value) in kinds else text
    if "string" in kinds or not kinds & {"array", "object"}:
        return text
    literals = Literals(text)
    try:
        value = literals.value()
    except ValueError:
        return text
    return value if literals.at_end and kind_of(value) in kinds else text


def _is_of(value: Any, kinds: Kinds) -> bool:
    kind = kind_of(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)
