"""What a vector expects against what came out, by the rules of the vector file.

Only the keys listed in `expect` count; lists match element by element; a map whose keys are sequence ids must have
exactly those keys, and an empty map means "none". `"any"` matches any present value and `"absent"` matches none.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

ANY: Final = "any"
ABSENT: Final = "absent"
MISSING: Final = "(nothing)"
# Weights of a mean are written with four decimals; every other number in a vector is whole.
DECIMALS: Final = 4


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One place where result and expectation part; `key` is the path to it, as in `ubatches[1].index`."""

    key: str
    expected: object
    got: object

    def __str__(self) -> str:
        return f"{self.key or 'result'}: expected {self.expected!r}, got {self.got!r}"


def plain(value: Any) -> Any:
    """The value as JSON would hold it: arrays and tuples as lists, numpy scalars as numbers, map keys as text."""
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def compare(expect: Any, got: Any) -> list[Mismatch]:
    """Every mismatch between what a vector expects and what a component gave, in the order of `expect`."""
    return list(_differences("", expect, plain(got)))


def _differences(key: str, expect: Any, got: Any) -> Iterator[Mismatch]:
    if isinstance(expect, dict):
        yield from _maps(key, expect, got)
    elif isinstance(expect, list):
        yield from _lists(key, expect, got)
    elif not _same(expect, got):
        yield Mismatch(key, expect, got)


def _maps(key: str, expect: dict[str, Any], got: Any) -> Iterator[Mismatch]:
    # `all` holds for the empty map too: it means "none", so the result must be empty as well.
    by_id = all(name.isdigit() for name in expect)
    if not isinstance(got, dict) or (by_id and set(got) != set(expect)):
        yield Mismatch(key, expect, got)
        return
    for name, value in expect.items():
        path = f"{key}.{name}" if key else name
        if name in got:
            yield from _differences(path, value, got[name])
        elif value != ABSENT:
            yield Mismatch(path, value, MISSING)


def _lists(key: str, expect: list[Any], got: Any) -> Iterator[Mismatch]:
    if not isinstance(got, list) or len(got) != len(expect):
        yield Mismatch(key, expect, got)
        return
    # A list of plain values is told whole: one differing flag among sixteen says little without its neighbours.
    if all(not isinstance(item, dict | list) for item in expect) and ANY not in expect and ABSENT not in expect:
        if not all(_same(a, b) for a, b in zip(expect, got, strict=True)):
            yield Mismatch(key, expect, got)
        return
    for place, (a, b) in enumerate(zip(expect, got, strict=True)):
        yield from _differences(f"{key}[{place}]", a, b)


def _same(expect: Any, got: Any) -> bool:
    if expect == ANY:
        return got is not None and got != ABSENT
    if expect == ABSENT:
        return got is None or got == ABSENT
    if isinstance(expect, float) and isinstance(got, float | int) and not isinstance(got, bool):
        return round(expect, DECIMALS) == round(got, DECIMALS)
    # `True == 1` in Python, but a flag and a count are different answers.
    return isinstance(expect, bool) == isinstance(got, bool) and bool(expect == got)
