"""JSON schemas in a normal form: references resolved, `allOf` merged, and every keyword in the place of its type.

The keywords mean here what they mean to llguidance, whose reading this follows step by step: which of them are known to
a draft, what merges with what, and in which order. BadOption says what cannot be taken. `schema_program.py` makes a
program from the normal form.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias
from urllib.parse import unquote, urljoin

from ostinato.errors import BadOption, quoted
from ostinato.text.json_numbers import NumberSchema, decimal_of, least_common_multiple, number_pattern
from ostinato.text.program import TOOK_TOO_LONG, TookTooLong, Unfollowable
from ostinato.text.schema import MAX_NUMBER, place_name

MAX_SIZE: Final = 50_000
MAX_MS: Final = 500
MAX_MERGES: Final = 128  # within one another

# A regular expression of a string's value: ("literal" | "whole" | "part", text), or ("and", expressions).
Pattern: TypeAlias = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class AnySchema:
    """Every value."""


@dataclass(frozen=True, slots=True)
class NoSchema:
    """No value."""


@dataclass(frozen=True, slots=True)
class NullSchema:
    """Null."""


@dataclass(frozen=True, slots=True)
class BooleanSchema:
    value: bool | None = None


@dataclass(frozen=True, slots=True)
class StringSchema:
    min_length: int = 0
    max_length: int | None = None
    pattern: Pattern | None = None


@dataclass(frozen=True, slots=True)
class ArraySchema:
    min_items: int
    max_items: int | None
    prefix: tuple[Schema, ...]
    items: Schema | None


@dataclass(frozen=True, slots=True)
class ObjectSchema:
    """`required` is in the order of the schema."""

    properties: Mapping[str, Schema]
    patterns: Mapping[str, Schema]
    additional: Schema | None
    required: tuple[str, ...]
    min_properties: int
    max_properties: int | None
    path: str = field(default="", compare=False)  # of the schema that it was read from


@dataclass(frozen=True, slots=True)
class UnionSchema:
    """Any of them; with `exactly_one`, of which one may hold and it is not known that at most one can."""

    options: tuple[Schema, ...]
    exactly_one: bool = False
    path: str = field(default="", compare=False)  # of the schema that it was read from


@dataclass(frozen=True, slots=True)
class ReferenceSchema:
    uri: str


Schema: TypeAlias = (
    AnySchema
    | NoSchema
    | NullSchema
    | BooleanSchema
    | NumberSchema
    | StringSchema
    | ArraySchema
    | ObjectSchema
    | UnionSchema
    | ReferenceSchema
)
ANY: Final = AnySchema()
NO: Final = NoSchema()
NULL: Final = NullSchema()

TYPES: Final = ("null", "boolean", "number", "string", "array", "object")
_DRAFTS: Final = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
_IMPLEMENTED: Final = frozenset(
    {
        *("anyOf", "oneOf", "allOf", "$ref", "const", "enum", "type", "items", "additionalItems"),
        *("prefixItems", "minItems", "maxItems", "properties", "additionalProperties", "patternProperties"),
        *("required", "minProperties", "maxProperties", "minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
_REMARKS: Final = frozenset(
    {
        *("$anchor", "$defs", "definitions", "$schema", "$id", "id", "$comment", "title", "description"),
        *("default", "readOnly", "writeOnly", "examples", "contentMediaType", "contentEncoding"),
    }
)
# The first draft that knows a keyword, and the last.
_SINCE: Final = {
    **dict.fromkeys(
        [
            *("$ref", "$schema", "additionalItems", "additionalProperties", "allOf", "anyOf", "dependencies"),
            *("enum", "exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems", "maxLength"),
            *("maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf"),
            *("not", "oneOf", "pattern", "patternProperties", "properties", "required", "type", "uniqueItems"),
        ],
        (0, 9999),
    ),
    "id": (4, 4),
    **dict.fromkeys(["$id", "const", "contains", "propertyNames"], (6, 9999)),
    **dict.fromkeys(["contentEncoding", "contentMediaType"], (6, 7)),
    **dict.fromkeys(["else", "if", "then"], (7, 9999)),
    **dict.fromkeys(
        [
            *("$anchor", "$defs", "$recursiveAnchor", "$recursiveRef", "dependentRequired", "dependentSchemas"),
            *("maxContains", "minContains", "prefixItems", "unevaluatedItems", "unevaluatedProperties"),
        ],
        (2019, 9999),
    ),
    **dict.fromkeys(["$dynamicAnchor", "$dynamicRef"], (2020, 2020)),
}
_IN_PLACE: Final = frozenset(["const", "enum", "allOf", "anyOf", "oneOf", "$ref"])

Matches: TypeAlias = Callable[[str, str], bool]  # whether a part of a text matches a pattern
Disjoint: TypeAlias = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a schema stands: the base of its references, and the draft that it is written in."""

    base: str
    draft: int


class Reader:
    """Reads one document; `definitions` holds what references name, once `read` has returned."""

    def __init__(self, document: Any, matches: Matches, disjoint: Disjoint) -> None:
        self.definitions: dict[str, Schema] = {}
        self._document = document
        self._matches, self._disjoint = matches, disjoint
        self._seen: set[str] = set()
        self._n = 0
        self._until = time.monotonic() + MAX_MS / 1000
        self._resources: dict[str, tuple[Any, Place]] | None = None
        self._path: tuple[str, ...] = ()  # of the schema that is being read; where an error was found, of that one

    def read(self) -> Schema:
        if isinstance(self._document, bool):
            return ANY if self._document else NO
        try:
            return self._resource(self._document, Place("", 2020))
        except TookTooLong:
            raise
        except BadOption as error:
            raise type(error)(f"in {place_name(self._path)}, {error}" if self._path else str(error)) from None

    def property_schema(self, object: ObjectSchema, name: str) -> Schema:
        found = object.properties.get(name)
        if found is not None:
            return found
        for pattern, schema in object.patterns.items():
            if self._matches(pattern, name):
                return schema
        return ANY if object.additional is None else object.additional

    # --- one schema ---

    def _resource(self, contents: Any, place: Place, *names: str) -> Schema:
        """What stands in the schema that is being read under these names."""
        return self._read_at((*self._path, *names), contents, place)

    def _read_at(self, path: tuple[str, ...], contents: Any, place: Place) -> Schema:
        before, self._path = self._path, path
        made = self._normal(self._contents(contents, _inside(contents, place)))
        self._path = before  # not after an error: it is where that was
        return made

    def _contents(self, contents: Any, place: Place) -> Schema:
        if isinstance(contents, bool):
            return ANY if contents else NO
        if not isinstance(contents, dict):
            raise Unfollowable("a schema must be an object or a boolean")
        self._count()
        if all(word in _REMARKS or not _is_known(word, place.draft) for word in contents):
            return ANY
        for word in contents:
            if _is_known(word, place.draft) and word not in _IMPLEMENTED and word not in _REMARKS:
                raise Unfollowable(f"the keyword {word!r} is not supported; leave it out, check the answer")
        result: Schema = ANY
        current: dict[str, Any] = {}
        for word, value in contents.items():
            if word in _IN_PLACE:
                if current:
                    result = self._merged(result, self._plain(current, contents, place))
                    current = {}
                result = self._applied(result, word, value, place)
            elif word not in _REMARKS:
                current[word] = value
                if word == "additionalProperties" and "properties" not in current and "properties" in contents:
                    current["properties"] = dict.fromkeys(_mapping(contents["properties"], "properties"), True)
                if word == "items" and "prefixItems" not in current and "prefixItems" in contents:
                    current["prefixItems"] = [True] * len(_list(contents["prefixItems"], "prefixItems"))
        if current:
            result = self._merged(result, self._plain(current, contents, place))
        return result

    def _applied(self, result: Schema, word: str, value: Any, place: Place) -> Schema:
        match word:
            case "const":
                return self._merged(result, constant(value))
            case "enum":
                return self._merged(result, UnionSchema(tuple(map(constant, _some(value, word)))))
            case "allOf":
                for number, one in enumerate(_list(value, word)):
                    result = self._merged(result, self._resource(one, place, word, str(number)))
                return result
            case "anyOf" | "oneOf":
                options = tuple(
                    self._resource(one, place, word, str(number)) for number, one in enumerate(_some(value, word))
                )
                return self._merged(result, UnionSchema(options, word == "oneOf", place_name((*self._path, word))))
        if not isinstance(value, str):
            raise Unfollowable("$ref must be a text")
        uri = place.base + value if value.startswith("#") else _joined(place.base, value)
        if isinstance(result, AnySchema):
            self._define(uri)
            return ReferenceSchema(uri)
        return self._merged_with_reference(uri, result, reference_first=False, deep=0)

    def _plain(self, current: dict[str, Any], contents: Mapping[str, Any], place: Place) -> Schema:
        """The keywords that are not applied in place, with the type that stands beside them."""
        words = {**current, "type": contents["type"]} if "type" in contents else current
        types = words.get("type", TYPES)
        if isinstance(types, str):
            return self._of_type(types, words, place)
        if isinstance(types, list) and not all(isinstance(one, str) for one in types):
            raise Unfollowable("type must be a text or a list of texts")
        if not isinstance(types, list | tuple):
            raise Unfollowable("type must be a text or a list of texts")
        if not types:
            raise _empty("type")
        options = tuple(self._of_type(one, words, place) for one in types)
        return options[0] if len(options) == 1 else UnionSchema(options)

    def _of_type(self, type: str, words: Mapping[str, Any], place: Place) -> Schema:
        self._count()
        match type:
            case "null":
                return NULL
            case "boolean":
                return BooleanSchema()
            case "number" | "integer":
                made = _number(words, integer=type == "integer")
                number_pattern(made)  # refuses bounds that cannot be followed here, where their place is known
                return made
            case "string":
                return self._string(words)
            case "array":
                return self._array(words, place)
            case "object":
                return self._object(words, place)
        raise Unfollowable(f"{quoted(type)} is not a type; the types are {', '.join((*TYPES, 'integer'))}")

    def _string(self, words: Mapping[str, Any]) -> Schema:
        patterns: list[Pattern] = []
        for word, kind in (("pattern", "part"), ("format", "format")):
            if word in words:
                if not isinstance(words[word], str):
                    raise Unfollowable(f"{word} must be a text")
                patterns.append((kind, words[word]))
        if "pattern" in words:
            self._matches(words["pattern"], "")  # refuses what is no pattern here, where its place is known
        pattern: Pattern | None = ("and", patterns) if len(patterns) == 2 else patterns[0] if patterns else None
        return StringSchema(_size(words, "minLength") or 0, _size(words, "maxLength"), pattern)

    def _array(self, words: Mapping[str, Any], place: Place) -> Schema:
        prefix, items, more = words.get("prefixItems"), words.get("items"), words.get("additionalItems")
        if place.draft <= 2019 or "additionalItems" in words or isinstance(items, list):
            prefix, items = (items, more) if isinstance(items, list) else (None, items)
        word = "prefixItems" if "prefixItems" in words else "items"
        made = tuple(
            self._resource(one, place, word, str(number))
            for number, one in enumerate(_list([] if prefix is None else prefix, "prefixItems"))
        )
        rest = (
            None if items is None else self._resource(items, place, "items" if items is not more else "additionalItems")
        )
        return ArraySchema(_size(words, "minItems") or 0, _size(words, "maxItems"), made, rest)

    def _object(self, words: Mapping[str, Any], place: Place) -> Schema:
        low, high = _size(words, "minProperties") or 0, _size(words, "maxProperties")
        properties = self._by_name(words, "properties", place)
        patterns = self._by_name(words, "patternProperties", place)
        for pattern in patterns:
            self._matches(pattern, "")
        self._check_disjoint(list(patterns))
        for name in properties if patterns else ():
            for pattern, schema in patterns.items():
                if self._matches(pattern, name):
                    properties[name] = self._merged(properties[name], schema)
                    break
        additional = words.get("additionalProperties")
        rest = None if additional is None else self._resource(additional, place, "additionalProperties")
        required = _list(words.get("required", []), "required")
        if not all(isinstance(name, str) for name in required):
            raise Unfollowable("required must be a list of texts")
        names, path = tuple(dict.fromkeys(required)), place_name(self._path)
        return _sized(ObjectSchema(properties, patterns, rest, names, low, high, path))

    def _by_name(self, words: Mapping[str, Any], word: str, place: Place) -> dict[str, Schema]:
        return {
            name: self._resource(one, place, word, name) for name, one in _mapping(words.get(word, {}), word).items()
        }

    def _check_disjoint(self, patterns: Sequence[str]) -> None:
        for number, one in enumerate(patterns):
            for other in patterns[number + 1 :]:
                if not self._disjoint(one, other):
                    raise Unfollowable(f"the patterns {one!r} and {other!r} of patternProperties may match one name")

    def _count(self) -> None:
        self._n += 1
        if self._n > MAX_SIZE:
            raise BadOption("the schema is too large")
        if self._n % 64 == 0 and time.monotonic() > self._until:
            raise TookTooLong(f"{TOOK_TOO_LONG} {MAX_MS} ms to read")

    # --- references ---

    def _define(self, uri: str) -> None:
        if uri not in self._seen:
            self._seen.add(uri)
            contents, place = self._find(uri)
            path = tuple(_unescaped(part) for part in uri.partition("#")[2].split("/") if part)
            self.definitions[uri] = self._read_at(path, contents, place)

    def _find(self, uri: str) -> tuple[Any, Place]:
        document, _, fragment = uri.partition("#")
        if self._resources is None:
            self._resources = {}
            self._collect(self._document, Place("", 2020), 0)
        if document not in self._resources:
            raise Unfollowable(f"the reference {uri[:100]!r} leads outside of the schema")
        contents, place = self._resources[document]
        if fragment and not fragment.startswith("/"):
            if uri not in self._resources:
                raise Unfollowable(f"the reference {uri[:100]!r} leads nowhere")
            return self._resources[uri]
        for part in fragment.split("/")[1:]:
            part = _unescaped(part)
            if isinstance(contents, list) and part in map(str, range(len(contents))):
                contents = contents[int(part)]
            elif isinstance(contents, dict) and part in contents:
                contents = contents[part]
            else:
                raise Unfollowable(f"the reference {uri[:100]!r} leads nowhere")
            place = _inside(contents, place)
        return contents, place

    def _collect(self, contents: Any, place: Place, deep: int) -> None:
        """Every part of the document that has a name of its own."""
        assert self._resources is not None
        if isinstance(contents, dict):
            inner = _inside(contents, place)
            if deep == 0 or inner.base != place.base:
                self._resources.setdefault(inner.base, (contents, inner))
            own = contents.get("$anchor")
            if not isinstance(own, str):
                own = contents.get("id" if inner.draft == 4 else "$id")
                own = own[1:] if isinstance(own, str) and own.startswith("#") else None
            if own:
                self._resources.setdefault(f"{inner.base}#{own}", (contents, inner))
            place = inner
        if isinstance(contents, dict | list):
            for one in contents.values() if isinstance(contents, dict) else contents:
                self._collect(one, place, deep + 1)

    def _merged_with_reference(self, uri: str, schema: Schema, *, reference_first: bool, deep: int) -> Schema:
        self._define(uri)
        found = self.definitions.get(uri)
        if found is None:
            raise BadOption("it has circular references with keywords beside them")
        pair = (found, schema) if reference_first else (schema, found)
        return self._merged(*pair, deep + 1)

    # --- merging ---

    def _merged(self, one: Schema, other: Schema, deep: int = 0) -> Schema:
        """The values that satisfy both."""
        self._count()
        if deep > MAX_MERGES:
            raise BadOption("its schemas are merged too deep")
        return self._normal(self._both(one, other, deep + 1))

    def _both(self, one: Schema, other: Schema, deep: int) -> Schema:
        if isinstance(one, AnySchema) or isinstance(other, NoSchema):
            return one if isinstance(one, NoSchema) else other
        if isinstance(other, AnySchema) or isinstance(one, NoSchema):
            return one
        if isinstance(one, ReferenceSchema):
            return self._merged_with_reference(one.uri, other, reference_first=True, deep=deep)
        if isinstance(other, ReferenceSchema):
            return self._merged_with_reference(other.uri, one, reference_first=False, deep=deep)
        for exactly in (True, False):
            if isinstance(one, UnionSchema) and one.exactly_one is exactly:
                return replace(one, options=tuple(self._merged(option, other, deep) for option in one.options))
            if isinstance(other, UnionSchema) and other.exactly_one is exactly:
                return replace(other, options=tuple(self._merged(one, option, deep) for option in other.options))
        match one, other:
            case NullSchema(), NullSchema():
                return NULL
            case BooleanSchema(), BooleanSchema():
                if one.value is None or other.value is None or one.value == other.value:
                    return BooleanSchema(other.value if one.value is None else one.value)
                return NO
            case NumberSchema(), NumberSchema():
                return _both_numbers(one, other)
            case StringSchema(), StringSchema():
                patterns = [found for found in (one.pattern, other.pattern) if found is not None]
                pattern = ("and", patterns) if len(patterns) == 2 else patterns[0] if patterns else None
                high = _least(one.max_length, other.max_length)
                return StringSchema(max(one.min_length, other.min_length), high, pattern)
            case ArraySchema(), ArraySchema():
                return self._both_arrays(one, other, deep)
            case ObjectSchema(), ObjectSchema():
                return self._both_objects(one, other, deep)
        return NO

    def _optional(self, one: Schema | None, other: Schema | None, deep: int) -> Schema | None:
        if one is None or other is None:
            return other if one is None else one
        return self._merged(one, other, deep)

    def _both_arrays(self, one: ArraySchema, other: ArraySchema, deep: int) -> Schema:
        length = max(len(one.prefix), len(other.prefix))
        left, right = ([*of.prefix, *[of.items or ANY] * (length - len(of.prefix))] for of in (one, other))
        prefix = tuple(self._merged(a, b, deep) for a, b in zip(left, right, strict=True))
        items = self._optional(one.items, other.items, deep)
        return ArraySchema(max(one.min_items, other.min_items), _least(one.max_items, other.max_items), prefix, items)

    def _both_objects(self, one: ObjectSchema, other: ObjectSchema, deep: int) -> Schema:
        properties = {
            name: self._merged(schema, self.property_schema(other, name), deep)
            for name, schema in one.properties.items()
        }
        # What the second names is, to the first, one of its other members: its own names are settled already.
        rest = replace(one, properties={})
        for name, schema in other.properties.items():
            if name not in properties:
                properties[name] = self._merged(self.property_schema(rest, name), schema, deep)
        patterns: dict[str, Schema] = {}
        for pattern, schema in one.patterns.items():
            found = other.patterns.get(pattern, other.additional)
            patterns[pattern] = schema if found is None else self._merged(schema, found, deep)
        for pattern, schema in other.patterns.items():
            if pattern not in one.patterns:
                patterns[pattern] = schema if one.additional is None else self._merged(schema, one.additional, deep)
        if patterns:
            self._check_disjoint(list(patterns))
        return _sized(
            ObjectSchema(
                properties,
                patterns,
                self._optional(one.additional, other.additional, deep),
                tuple(dict.fromkeys((*one.required, *other.required))),
                max(one.min_properties, other.min_properties),
                _least(one.max_properties, other.max_properties),
                one.path or other.path,
            )
        )

    def _normal(self, schema: Schema) -> Schema:
        """A union without empty or nested options."""
        if not isinstance(schema, UnionSchema):
            return schema
        options: list[Schema] = []
        for option in schema.options:
            if isinstance(option, AnySchema) and not schema.exactly_one:
                return ANY
            if isinstance(option, UnionSchema) and option.exactly_one == schema.exactly_one:
                options += option.options
            elif not isinstance(option, NoSchema):
                options.append(option)
        if len(options) < 2:
            return options[0] if options else NO
        pairs = ((a, b) for number, a in enumerate(options) for b in options[number + 1 :])
        overlap = schema.exactly_one and not all(self._are_disjoint(a, b) for a, b in pairs)
        return replace(schema, options=tuple(options), exactly_one=overlap)

    def _are_disjoint(self, one: Schema, other: Schema) -> bool:
        """Whether it is certain that no value satisfies both."""
        if isinstance(one, NoSchema) or isinstance(other, NoSchema):
            return True
        if isinstance(one, AnySchema | ReferenceSchema) or isinstance(other, AnySchema | ReferenceSchema):
            return False
        if isinstance(one, UnionSchema):
            return all(self._are_disjoint(option, other) for option in one.options)
        if isinstance(other, UnionSchema):
            return all(self._are_disjoint(one, option) for option in other.options)
        match one, other:
            case BooleanSchema(), BooleanSchema():
                return one.value is not None and other.value is not None and one.value != other.value
            case StringSchema(pattern=("literal", a)), StringSchema(pattern=("literal", b)):
                return bool(a != b)
            case ObjectSchema(), ObjectSchema():
                return any(
                    self._are_disjoint(self.property_schema(one, name), self.property_schema(other, name))
                    for name in {*one.required, *other.required}
                )
        return type(one) is not type(other)


def constant(value: Any) -> Schema:
    """The schema of one value."""
    match value:
        case None:
            return NULL
        case bool():
            return BooleanSchema(value)
        case int() | float():
            whole = isinstance(value, int) and -(2**63) <= value < 2**63
            if abs(value) > MAX_NUMBER:
                raise BadOption("a constant larger than a float cannot be followed")
            return NumberSchema(float(value), float(value), integer=whole)
        case str():
            return StringSchema(pattern=("literal", value))
        case list():
            return ArraySchema(len(value), len(value), tuple(map(constant, value)), NO)
    members = {name: constant(one) for name, one in value.items()}
    return ObjectSchema(members, {}, NO, tuple(members), 0, None)


def _unescaped(part: str) -> str:
    """A part of a JSON pointer in a reference."""
    return unquote(part).replace("~1", "/").replace("~0", "~")


def _joined(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError:
        raise Unfollowable(f"{quoted(uri)} is no URI") from None


def _inside(contents: Any, place: Place) -> Place:
    """The place of what a schema holds."""
    if not isinstance(contents, dict):
        return place
    draft = place.draft
    written = contents.get("$schema")
    if isinstance(written, str):
        draft = _DRAFTS.get(written.rstrip("#"), 2020)
    own = contents.get("id" if draft == 4 else "$id")
    if isinstance(own, str) and not own.startswith("#") and not (draft <= 7 and "$ref" in contents):
        return Place(_joined(place.base, own).partition("#")[0], draft)
    return place if draft == place.draft else Place(place.base, draft)


def _is_known(word: str, draft: int) -> bool:
    since, until = _SINCE.get(word, (9999, 0))
    return since <= draft <= until


def _number(words: Mapping[str, Any], *, integer: bool) -> NumberSchema:
    minimum, maximum = _float(words, "minimum"), _float(words, "maximum")
    bounds = []
    for word, plain in (("exclusiveMinimum", minimum), ("exclusiveMaximum", maximum)):
        value = words.get(word)
        bounds.append(plain if value is True else None if value is None or value is False else _float(words, word))
    step = _float(words, "multipleOf")
    multiple = None if step is None else decimal_of(step)
    return NumberSchema(minimum, maximum, bounds[0], bounds[1], integer, multiple)


def _sized(made: ObjectSchema) -> Schema:
    most = made.max_properties
    return NO if most is not None and max(made.min_properties, len(made.required)) > most else made


def _both_numbers(one: NumberSchema, other: NumberSchema) -> NumberSchema:
    multiple = one.multiple_of or other.multiple_of
    if one.multiple_of is not None and other.multiple_of is not None:
        multiple = least_common_multiple(one.multiple_of, other.multiple_of)
    return NumberSchema(
        _most(one.minimum, other.minimum),
        _least(one.maximum, other.maximum),
        _most(one.exclusive_minimum, other.exclusive_minimum),
        _least(one.exclusive_maximum, other.exclusive_maximum),
        one.integer or other.integer,
        multiple,
    )


def _least(one: Any, other: Any) -> Any:
    return one if other is None else other if one is None else min(one, other)


def _most(one: Any, other: Any) -> Any:
    return one if other is None else other if one is None else max(one, other)


def _float(words: Mapping[str, Any], word: str) -> float | None:
    value = words.get(word)
    if value is None and word not in words:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise Unfollowable(f"{word} must be a number, and no larger than a float")
    return float(value)


def _size(words: Mapping[str, Any], word: str) -> int | None:
    if word not in words:
        return None
    value = words[word]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise Unfollowable(f"{word} must be a whole number that is not negative")
    return value


def _list(value: Any, word: str) -> list[Any]:
    if not isinstance(value, list):
        raise Unfollowable(f"{word} must be a list")
    return value


def _some(value: Any, word: str) -> list[Any]:
    if value == []:
        raise _empty(word)
    return _list(value, word)


def _empty(word: str) -> Unfollowable:
    return Unfollowable(f"{word} is empty, so no text satisfies it; name at least one")


def _mapping(value: Any, word: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unfollowable(f"{word} must be an object")
    return value
