"""What Pydantic finds wrong with a body or a URL, as a refusal in our words with the field's name.

Only the one error that says most is told. Nothing here knows which endpoint was called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from ostinato.serve.errors import Refusal, shown

FieldPath = tuple[str | int, ...]  # a path into a body, as Pydantic tells it

_TYPES: Final = {
    "bool": "true or false",
    "dict": "an object",
    "float": "a number",
    "int": "an integer",
    "list": "a list",
    "model": "an object",
    "model_attributes": "an object",
    "string": "a string",
}
_BOUNDS: Final = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
}
_PART_TYPE: Final = re.compile(r"(messages|input)\[\d+\]\.(content|output)\[\d+\]\.type")
_SENT_TO: Final = {"messages": ("prompt", "/v1/completions"), "prompt": ("messages", "/v1/chat/completions")}


def invalid_body(found: Sequence[Mapping[str, Any]]) -> Refusal:
    """The most specific of a body's errors, with the field's name."""
    # The deepest. A missing field says more than a type mismatch, which every other branch of a union reports.
    found = _without_short_branches(found)
    worst = max(found, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))
    param = _place(worst["loc"])
    if not param:
        return Refusal(400, "the body is empty" if worst["type"] == "missing" else "the body is no JSON object")
    if worst["type"] == "union_tag_invalid":
        param += ".type"
    return Refusal(400, _sentence(worst, param) or _alternatives(found, worst, param), param=param)


def _without_short_branches(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Without the branches of a union of lists that fail at an earlier item than another one does: in `["a", null]` the
    null is wrong, though a list of token ids fails at "a"."""
    firsts: dict[FieldPath, dict[str | int, int]] = {}  # of each union, by its branches: the first item that is wrong
    for one in found:
        for union, branch, item in _list_branches(one["loc"]):
            known = firsts.setdefault(union, {})
            known[branch] = min(item, known.get(branch, item))
    furthest = {union: max(known.values()) for union, known in firsts.items()}
    return [
        one
        for one in found
        if all(firsts[union][branch] == furthest[union] for union, branch, _ in _list_branches(one["loc"]))
    ]


def _list_branches(loc: FieldPath) -> Iterator[tuple[FieldPath, str, int]]:
    """The unions on a path of which a branch is a list: the union's place, the branch, and the item in it."""
    for at, (branch, item) in enumerate(pairwise(loc)):
        if isinstance(branch, str) and not _is_field(branch) and isinstance(item, int):
            yield loc[:at], branch, item


def _sentence(error: Mapping[str, Any], param: str) -> str | None:
    """An error that is no wrong type; None for one that is, because a union may take other types."""
    given, limits = error["input"], error.get("ctx", {})
    match error["type"]:
        case "missing":
            other, path = _SENT_TO.get(param, ("", ""))
            hint = f"; {other} is for {path}" if isinstance(given, dict) and other in given else ""
            return f"{param} is missing, and it is required here{hint}"
        case "union_tag_not_found":
            return f"{param}.type is missing, and it is required here"
        case "union_tag_invalid":
            return f"{param} is {shown(given['type'])}; it must be one of {limits['expected_tags']}"
        case "extra_forbidden" | "none_required":
            return f"{param} is not supported here; leave it out"
        case "too_short" | "string_too_short" as kind:
            least = limits["min_length"]
            return f"{param} is empty; give it at least {_counted(least, kind)}"
        case "too_long" | "string_too_long" as kind:
            return f"{param} has {_counted(len(given), kind)}; it may have at most {limits['max_length']}"
        case "literal_error" if _PART_TYPE.fullmatch(param):
            why = "this model reads no images" if "image" in str(given) else "only text parts are supported"
            return f"{param} is {shown(given)}; {why}"
        case "string_pattern_mismatch":
            return f"{param} is {shown(given)}; it must match {limits['pattern']}"
        case "finite_number":
            return f"{param} is {given}; it must be a finite number"
        case kind if kind in _BOUNDS:
            name, words = _BOUNDS[kind]
            return f"{param} is {shown(given)}; it must be {words} {_number(limits[name])}"
        case kind if _expected(error) is None:
            return f"{param}: {error['msg']}" if kind in _OWN else f"{param} is {shown(given)}; it cannot be read"
    return None


# Errors that are worded where they are raised.
_OWN: Final = frozenset({"item_type", "too_many_keys"})


def _number(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def _counted(n: int, kind: str) -> str:
    unit = "character" if kind.startswith("string") else "item"
    return f"{n} {unit}" if n == 1 else f"{n} {unit}s"


def _alternatives(found: Sequence[Mapping[str, Any]], worst: Mapping[str, Any], param: str) -> str:
    """What a value of a wrong type may be, in each branch of a union."""
    alike = [one for one in found if _place(one["loc"]) == param]
    expected = dict.fromkeys(words for one in alike if (words := _expected(one)) is not None)
    return f"{param} is {_described(worst['input'])}; it must be {', or '.join(expected)}"


def _expected(error: Mapping[str, Any]) -> str | None:
    """What the type of a value should be; None for an error that is not about its type."""
    kind: str = error["type"]
    if kind == "literal_error":
        words: str = error["ctx"]["expected"]
        return {"True": "true", "False": "false"}.get(words, words)
    if kind in ("int_from_float", "int_parsing_size"):
        return _TYPES["int"]
    found = re.fullmatch(r"(\w+)_(type|parsing)", kind)
    return None if found is None else _TYPES.get(found[1])


def _described(value: Any) -> str:
    match value:
        case list():
            return "a list"
        case dict():
            return "an object"
    return shown(value)


# Its place

_BRANCH: Final = re.compile(r"[a-z_]+[0-9]*")
_BRANCH_TYPES: Final = frozenset({"str", "int", "float", "bool", "dict", "list", "constrained"})


def _place(loc: Sequence[str | int]) -> str:
    """The path of a field, such as messages[0].content; empty for the body itself."""
    parts = [part for part in loc if isinstance(part, int) or _is_field(part)]
    for format in (["response_format"], ["text", "format"]):
        if parts[: len(format)] == format:
            del parts[len(format) : len(format) + 1]  # the type of format, by which Pydantic chose the branch
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


def _is_field(part: str) -> bool:
    """Pydantic puts the branches of a union into the path: type names, and our own names in upper case."""
    return bool(_BRANCH.fullmatch(part)) and part not in _BRANCH_TYPES
