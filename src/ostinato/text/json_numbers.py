"""Ranges of JSON numbers as regular expressions, character by character as llguidance writes them.

The numbers that a schema allows must be those that llguidance allows, so the cases and their order are its own (for
example, a number with bounds has no exponent).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

from ostinato.errors import BadOption


@dataclass(frozen=True, slots=True)
class NumberSchema:
    """What a schema asks of a number. `multiple_of`: coefficient and decimals, in lowest terms."""

    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: float | None = None
    exclusive_maximum: float | None = None
    integer: bool = False
    multiple_of: tuple[int, int] | None = None

    def least(self) -> tuple[float | None, bool]:
        """The lower bound, and whether it is excluded."""
        if self.exclusive_minimum is not None and (self.minimum is None or self.exclusive_minimum >= self.minimum):
            return self.exclusive_minimum, True
        return self.minimum, False

    def most(self) -> tuple[float | None, bool]:
        if self.exclusive_maximum is not None and (self.maximum is None or self.exclusive_maximum <= self.maximum):
            return self.exclusive_maximum, True
        return self.maximum, False


def decimal_of(value: float) -> tuple[int, int]:
    """A step of `multipleOf` as coefficient and decimals; BadOption if it has too many digits.

    As it is written: llguidance multiplies it by ten until it is whole, and refuses 0.07 as 7000000000000001.

    >>> decimal_of(0.07), decimal_of(250.0)
    ((7, 2), (250, 0))
    """
    _, digits, exponent = Decimal(repr(abs(value))).as_tuple()
    decimals = max(0, -int(exponent))
    coefficient = int("".join(map(str, digits))) * 10 ** (int(exponent) + decimals)
    coefficient, decimals = lowest(coefficient, decimals)
    if coefficient > 2**32 - 1:
        raise BadOption("it has a multipleOf with too many digits")
    return coefficient, decimals


def lowest(coefficient: int, decimals: int) -> tuple[int, int]:
    if coefficient == 0:
        return 0, 0
    while decimals > 0 and coefficient % 10 == 0:
        coefficient, decimals = coefficient // 10, decimals - 1
    return coefficient, decimals


def least_common_multiple(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    if one[0] == 0 or other[0] == 0:
        return 0, 0
    a = one[0] * 10 ** max(other[1] - one[1], 0)
    b = other[0] * 10 ** max(one[1] - other[1], 0)
    return lowest(math.lcm(a, b), max(one[1], other[1]))


def number_pattern(number: NumberSchema) -> str | None:
    """The numbers within the bounds; None if there is none. `multipleOf` is left to the caller."""
    if _is_unsatisfiable(number):
        return None
    if number.integer:
        return _integers(*_integer_bounds(number))
    (least, without_least), (most, without_most) = number.least(), number.most()
    return _floats(least, most, not without_least, not without_most)


def _integer_bounds(number: NumberSchema) -> tuple[int | None, int | None]:
    (least, without_least), (most, without_most) = number.least(), number.most()
    low = None if least is None else math.ceil(least) if not without_least else math.floor(least) + 1
    high = None if most is None else math.floor(most) if not without_most else math.ceil(most) - 1
    return _clamped(low), _clamped(high)


def _clamped(value: int | None) -> int | None:
    return None if value is None else max(-(2**63), min(2**63 - 1, value))


def _is_unsatisfiable(number: NumberSchema) -> bool:
    (least, without_least), (most, without_most) = number.least(), number.most()
    if least is not None and most is not None:
        if least > most or (least == most and (without_least or without_most)):
            return True
        if number.integer:
            low, high = _integer_bounds(number)
            if low is not None and high is not None and low > high:
                return True
    if number.multiple_of is None:
        return False
    coefficient, decimals = number.multiple_of
    if coefficient == 0:
        below = least is not None and (least > 0 or (without_least and least >= 0))
        return below or (most is not None and (most < 0 or (without_most and most <= 0)))
    if least is None or most is None:
        return False
    step = coefficient / 10.0**decimals
    first, last = math.ceil(least / step) * step, math.floor(most / step) * step
    first = first + step if without_least and first == least else first
    last = last - step if without_most and last == most else last
    if number.integer:
        first, last = math.ceil(first), math.floor(last)
    return first > last


def _or(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"


def _digits(number: int) -> int:
    return len(str(abs(number)))


def _integers(left: int | None, right: int | None) -> str:
    if left is None and right is None:
        return "-?(0|[1-9][0-9]*)"
    if right is None:
        assert left is not None
        if left < 0:
            return _or([_integers(left, -1), _integers(0, None)])
        if _digits(left) > 18:
            raise BadOption("it has a bound with too many digits")
        return _or([_integers(left, int("9" * _digits(left))), f"[1-9][0-9]{{{_digits(left)},}}"])
    if left is None:
        if right >= 0:
            return _or([_integers(0, right), _integers(None, -1)])
        return f"-{_integers(-right, None)}"
    if left < 0:
        if right < 0:
            return f"(-{_integers(-right, -left)})"
        return f"(-{_integers(0, -left)}|{_integers(0, right)})"
    if _digits(left) != _digits(right):
        if _digits(left) > 18:
            raise BadOption("it has a bound with too many digits")
        end = 10 ** _digits(left) - 1
        return _or([_integers(left, end), _integers(end + 1, right)])
    return _of_one_length(str(left), str(right))


def _of_one_length(left: str, right: str) -> str:
    if left == right:
        return f"({left})"
    (left_head, left_end), (right_head, right_end) = (left[:-1], left[-1]), (right[:-1], right[-1])
    if left_head == right_head:
        return f"({left_head}[{left_end}-{right_end}])"
    low, high = int(left_head or 0), int(right_head or 0)
    parts = []
    if left_end != "0":
        low += 1
        parts.append(f"{left_head}[{left_end}-9]")
    if right_end != "9":
        high -= 1
        parts.append(f"{right_head}[0-{right_end}]")
    if low <= high:
        parts.append(f"{_integers(low, high)}[0-9]")
    return _or(parts)


def _from_digits(digits: str, *, inclusive: bool) -> str:
    """Digits after the point that are not below these, or above them."""
    if not digits:
        return "[0-9]*" if inclusive else "[0-9]*[1-9]"
    if inclusive and len(digits) == 1:
        return f"[{digits}-9][0-9]*"
    first = int(digits[0])
    parts = [digits[0] + _from_digits(digits[1:], inclusive=inclusive)]
    return _or([*parts, f"[{first + 1}-9][0-9]*"] if first < 9 else parts)


def _to_digits(digits: str, *, inclusive: bool) -> str:
    if not digits:
        if inclusive:
            return ""
        raise BadOption("it has bounds of a number that cannot be followed")
    first = int(digits[0])
    if not inclusive and len(digits) == 1:
        if first == 0:
            raise BadOption("it has bounds of a number that cannot be followed")
        return f"[0-{first - 1}][0-9]*"
    parts = [digits[0] + _to_digits(digits[1:], inclusive=inclusive)]
    return _or([*parts, f"[0-{first - 1}][0-9]*"] if first > 0 else parts)


def _digit_range(left: str, right: str, with_left: bool, with_right: bool) -> str:
    if left == right:
        if with_left and with_right:
            return left
        raise BadOption("it has bounds of a number that cannot be followed")
    first, last = int(left[0]), int(right[0])
    if first == last:
        return left[0] + _digit_range(left[1:], right[1:], with_left, with_right)
    parts = [left[0] + _from_digits(left[1:].rstrip("0"), inclusive=with_left)]
    if first + 1 < last:
        parts.append(f"[{first + 1}-{last - 1}][0-9]*")
    rest = right[1:].rstrip("0")
    if rest or with_right:
        parts.append(right[0] + _to_digits(rest, inclusive=with_right))
    return _or(parts)


def _shown(value: float) -> str:
    """A float in full, without an exponent and without a needless point."""
    text = format(Decimal(repr(value)), "f")
    return text.removesuffix(".0")


def _floats(left: float | None, right: float | None, with_left: bool, with_right: bool) -> str:
    if left is None and right is None:
        return r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
    if right is None:
        assert left is not None
        if left < 0:
            return _or([_floats(left, 0.0, with_left, False), _floats(0.0, None, True, False)])
        length = _digits(min(int(left), 2**63 - 1))
        return _or([_floats(left, 10.0**length, with_left, False), rf"[1-9][0-9]{{{length},}}(\.[0-9]+)?"])
    if left is None:
        if right > 0:
            return _or([f"-{_floats(0.0, None, False, False)}", _floats(0.0, right, True, with_right)])
        if right < 0:
            return f"-{_floats(-right, None, with_right, False)}"
        below = f"-{_floats(0.0, None, False, False)}"
        return _or([below, "0"]) if with_right else below
    if left == right:
        return f"({_shown(left).replace('.', chr(92) + '.').replace('-', chr(92) + '-')})"
    if left < 0:
        if right < 0:
            return f"(-{_floats(-right, -left, with_right, with_left)})"
        parts = [f"(-{_floats(0.0, -left, False, with_left)})"]
        if right > 0 or with_right:
            parts.append(_floats(0.0, right, True, with_right))
        return _or(parts)
    return _positive(_shown(left), _shown(right), with_left, with_right)


def _positive(left: str, right: str, with_left: bool, with_right: bool) -> str:
    (left_whole, _, left_part), (right_whole, _, right_part) = left.partition("."), right.partition(".")
    low, high = int(left_whole), int(right_whole)
    if max(low, high) >= 2**63:
        raise BadOption("it has a bound with too many digits")
    if low == high:
        length = max(len(left_part), len(right_part))
        left_part, right_part = left_part.ljust(length, "0"), right_part.ljust(length, "0")
        rest = rf"\.{_digit_range(left_part, right_part, with_left, with_right)}"
        return f"({low}({rest})?)" if int(left_part or 0) == 0 else f"({low}{rest})"
    parts = []
    if left_part or not with_left:
        parts.append(rf"({low}\.{_from_digits(left_part, inclusive=with_left)})")
        low += 1
    if high > low:
        parts.append(rf"({_integers(low, high - 1)}(\.[0-9]+)?)")
    if right_part:
        parts.append(rf"({high}(\.{_to_digits(right_part, inclusive=with_right)})?)")
    elif with_right:
        parts.append(rf"{high}(\.0+)?")
    return _or(parts)
