"""JSON schemas as programs of the grammar compiler.

JSON is compact, members come in the order of the schema, and every rule is llguidance's (`json_schema.py` reads the
keywords). Objects, arrays, strings and numbers are procedures; literals are written in place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from ostinato.errors import BadOption
from ostinato.text.json_formats import PATTERNS as FORMATS
from ostinato.text.json_numbers import NumberSchema, number_pattern
from ostinato.text.json_schema import (
    ANY,
    AnySchema,
    ArraySchema,
    BooleanSchema,
    Disjoint,
    Matches,
    NoSchema,
    NullSchema,
    ObjectSchema,
    Pattern,
    Reader,
    ReferenceSchema,
    Schema,
    StringSchema,
    UnionSchema,
)
from ostinato.text.program import UNBOUNDED, Program, Unfollowable

_CLASSES: Final = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9a-zA-Z_]", "W": "[^0-9a-zA-Z_]"}
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
# A JSON string with every escape, where llguidance allows more than control characters to be escaped.
_LOOSE_STRING: Final = (
    r'"([^"\\\x00-\x1F\x7F]|\\[nrbtf\\"]|\\u([0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    r'|[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*"'
)


def ascii_classes(pattern: str, letters: str = "dw") -> str:
    r"""A pattern whose `\d` and `\w` mean ASCII, as JSON schemas have them.

    >>> ascii_classes(r"^\d\\d$")
    '^[0-9]\\\\d$'
    """
    return _ESCAPE.sub(lambda found: _CLASSES[found[1]] if found[1].lower() in letters else found[0], pattern)


def schema_node(program: Program, schema: Any, matches: Matches, disjoint: Disjoint) -> int:
    """The values of a schema, compact, as a node of `program`; BadOption if it cannot be taken."""
    reader = Reader(schema, matches, disjoint)
    try:
        return _Writer(program, reader, matches, disjoint).written(reader.read())
    except RecursionError:
        raise BadOption("it is nested too deep") from None


class _Writer:
    def __init__(self, program: Program, reader: Reader, matches: Matches, disjoint: Disjoint) -> None:
        self._p = program
        self._reader = reader
        self._matches, self._disjoint = matches, disjoint
        self._references: dict[str, int] = {}
        self._pending: list[str] = []
        self._any: int | None = None
        self._comma, self._colon = program.literal(","), program.literal(":")

    def written(self, schema: Schema) -> int:
        made = self._value(schema)
        while self._pending:
            uri = self._pending.pop()
            self._p.define(self._references[uri], self._value(self._reader.definitions[uri]))
        return made

    def _value(self, schema: Schema) -> int:
        match schema:
            case AnySchema():
                return self._any_value()
            case NoSchema():
                return self._p.nothing
            case ArraySchema():
                return self._array(schema)
            case ObjectSchema():
                return self._object(schema)
            case UnionSchema():
                return self._union(schema)
            case ReferenceSchema():
                return self._reference(schema.uri)
        node, plain = self._scalar(schema)
        node = self._p.lexeme(node)
        return node if plain else self._p.procedure(node)

    def _reference(self, uri: str) -> int:
        if uri not in self._references:
            self._references[uri] = self._p.declare()
            self._pending.append(uri)
        return self._p.call(self._references[uri])

    def _union(self, schema: UnionSchema) -> int:
        if schema.exactly_one:
            raise Unfollowable(f"the options of {schema.path} may overlap; use anyOf")
        scalars = [option for option in schema.options if _is_scalar(option)]
        made = [self._value(option) for option in schema.options if not _is_scalar(option)]
        if scalars:
            nodes = [self._scalar(option) for option in scalars]
            node = self._p.lexeme(self._p.either([one for one, _ in nodes]))
            made.append(node if all(plain for _, plain in nodes) else self._p.procedure(node))
        return self._p.either(made)

    def _any_value(self) -> int:
        if self._any is None:
            procedure = self._p.declare()
            self._any = self._p.call(procedure)
            words = [self._p.lexeme(self._p.literal(word)) for word in ("null", "true", "false")]
            values = [
                self._value(NumberSchema()),
                self._value(StringSchema()),
                self._array(ArraySchema(0, None, (), ANY)),
                self._object(ObjectSchema({}, {}, ANY, (), 0, None)),
            ]
            self._p.define(procedure, self._p.either([*words, *values]))
        return self._any

    # --- scalars ---

    def _scalar(self, schema: Schema) -> tuple[int, bool]:
        """The texts of a scalar, and whether they are few literals, which are written in place."""
        match schema:
            case NullSchema():
                return self._p.literal("null"), True
            case BooleanSchema():
                words = ["true", "false"] if schema.value is None else [json.dumps(schema.value)]
                return self._p.either([self._p.literal(word) for word in words]), True
            case NumberSchema():
                return self._number(schema), schema.minimum is not None and schema.minimum == schema.maximum
            case StringSchema():
                return self._string(schema)
        raise TypeError(schema)

    def _number(self, schema: NumberSchema) -> int:
        pattern = number_pattern(schema)
        if pattern is None:
            return self._p.nothing
        node = self._p.pattern(pattern)
        if schema.multiple_of is None:
            return node
        multiple = self._p.multiple(*schema.multiple_of)
        return self._p.both(node, self._p.cat(self._p.optional(self._p.literal("-")), multiple))

    def _string(self, schema: StringSchema) -> tuple[int, bool]:
        low, high = schema.min_length, schema.max_length
        if high is not None and low > high:
            return self._p.nothing, True
        if schema.pattern is not None and schema.pattern[0] == "literal":
            text = schema.pattern[1]
            fits = low <= len(text) and (high is None or len(text) <= high)
            return (self._p.quoted(self._p.literal(text)) if fits else self._p.nothing), True
        length = self._p.repeat(self._p.pattern("(?s:.)"), low, UNBOUNDED if high is None else high)
        if schema.pattern is None:
            return self._p.quoted(length), False
        node = self._pattern(schema.pattern)
        searched = _searched(schema.pattern)
        if any(self._disjoint(one, other) for n, one in enumerate(searched) for other in searched[n + 1 :]):
            return self._p.nothing, True  # a member of this value is left out, and does not count
        return self._p.quoted(node if low == 0 and high is None else self._p.both(node, length)), False

    def _pattern(self, pattern: Pattern) -> int:
        kind, value = pattern
        match kind:
            case "literal":
                return self._p.literal(value)
            case "part":
                return self._p.pattern(ascii_classes(value), search=True, written=value)
            case "format":
                if value not in FORMATS:
                    raise BadOption(f"the format {value!r} is not supported")
                return self._p.pattern(FORMATS[value])
        return self._p.both(*map(self._pattern, value))

    # --- arrays and objects ---

    def _array(self, schema: ArraySchema) -> int:
        low, high = schema.min_items, schema.max_items
        if high is not None and low > high:
            return self._p.nothing
        prefix: list[int] = []
        for one in schema.prefix[:high]:
            prefix.append(self._value(one))
            if prefix[-1] == self._p.nothing:  # what would follow is never read, so it may be what cannot be followed
                break
        ends_early = self._p.nothing in prefix
        item = self._p.nothing if ends_early else self._value(ANY if schema.items is None else schema.items)
        known = max(1, len(prefix))
        first = prefix[0] if prefix else item
        more = self._p.cat(self._comma, item)
        node = self._p.repeat(more, max(0, low - known), UNBOUNDED if high is None else max(0, high - known))
        for number in range(known - 1, 0, -1):
            node = self._p.cat(self._comma, prefix[number], node)
            node = node if number < low else self._p.optional(node)
        node = self._p.cat(first, node) if high != 0 else self._p.empty
        node = node if low > 0 else self._p.optional(node)
        return self._p.procedure(self._p.cat(self._p.literal("["), node, self._p.literal("]")))

    def _object(self, schema: ObjectSchema) -> int:
        names = [*schema.properties, *(name for name in schema.required if name not in schema.properties)]
        required = frozenset(schema.required)
        members: list[tuple[int, bool]] = []
        for name in names:
            value = self._value(self._reader.property_schema(schema, name))
            if value == self._p.nothing and name in required:
                return self._p.nothing
            if value != self._p.nothing:
                member = self._p.cat(self._p.lexeme(self._p.literal(_quoted(name))), self._colon, value)
                members.append((member, name in required))
        n_required = sum(needed for _, needed in members)
        low = max(0, schema.min_properties - n_required)
        high = None if schema.max_properties is None else max(0, schema.max_properties - n_required)
        if high == 0:
            return self._p.nothing if low else self._members([member for member in members if member[1]])
        if n_required < len(members) and (low > 0 or high is not None):
            return self._few_members(schema, members, low, high)
        others = self._other_members(schema, names)
        if others != self._p.nothing:
            rest = self._p.repeat(
                self._p.cat(self._comma, others), max(0, low - 1), UNBOUNDED if high is None else max(0, high - 1)
            )
            members.append((self._p.cat(others, rest), low > 0))
        elif low > 0:
            return self._p.nothing
        return self._members(members)

    def _few_members(
        self, schema: ObjectSchema, members: Sequence[tuple[int, bool]], low: int, high: int | None
    ) -> int:
        """At least one optional member, at most one, or exactly one."""
        closed = isinstance(schema.additional, NoSchema) and not schema.patterns
        if low > 1 or high not in (None, 1) or not closed:
            at = schema.path or "it"
            raise Unfollowable(f"{at} has minProperties or maxProperties beside optional properties")
        options = []
        for chosen, (_, needed) in enumerate(members):
            if needed:
                continue
            if high == 1:
                kept = [(one, True) for number, (one, must) in enumerate(members) if must or number == chosen]
            else:
                kept = [(one, must or number == chosen) for number, (one, must) in enumerate(members)]
            options.append(self._members(kept))
        if low == 0:
            options.append(self._members([member for member in members if member[1]]))
        return self._p.either(options)

    def _other_members(self, schema: ObjectSchema, names: Sequence[str]) -> int:
        """A member that the schema does not name: of a pattern, or any other."""
        taken = [self._p.literal(_quoted(name)) for name in names]
        made, patterns = [], []
        for pattern, one in schema.patterns.items():
            name = self._p.quoted(self._p.pattern(ascii_classes(pattern), search=True, written=pattern))
            patterns.append(name)
            value = self._value(one)
            excluded = [literal for literal, own in zip(taken, names, strict=True) if self._matches(pattern, own)]
            if excluded:
                name = self._p.both(name, self._p.negated(self._p.either(excluded)))
            made.append(self._p.cat(self._p.lexeme(name), self._colon, value))
        value = self._value(ANY if schema.additional is None else schema.additional)
        if value != self._p.nothing:
            if taken or patterns:
                others = self._p.negated(self._p.either([*taken, *patterns]))
                name = self._p.lexeme(self._p.both(self._p.pattern(_LOOSE_STRING), others))
            else:
                name = self._value(StringSchema())
            made.append(self._p.cat(name, self._colon, value))
        return self._p.either(made)

    def _members(self, members: Sequence[tuple[int, bool]]) -> int:
        """An object of these members in their order, the optional ones present or not."""
        after = first = self._p.empty  # what follows a member; what follows none
        for member, needed in reversed(members):
            if needed:
                first = self._p.cat(member, after)
                after = self._p.cat(self._comma, member, after)
            else:
                first = self._p.either([self._p.cat(member, after), first])
                after = self._p.cat(self._p.optional(self._p.cat(self._comma, member)), after)
        return self._p.procedure(self._p.cat(self._p.literal("{"), first, self._p.literal("}")))


def _searched(pattern: Pattern) -> list[str]:
    """The regular expressions of a string's value that a part of it must match."""
    kind, value = pattern
    match kind:
        case "and":
            return [one for part in value for one in _searched(part)]
        case "part":
            return [value]
        case "format":
            return [f"^({FORMATS[value]})$"]
    return []


def _is_scalar(schema: Schema) -> bool:
    return isinstance(schema, NullSchema | BooleanSchema | NumberSchema | StringSchema)


def _quoted(name: str) -> str:
    """A name as llguidance quotes it: with short escapes, and those of four digits in lower case."""
    return json.dumps(name, ensure_ascii=False)
