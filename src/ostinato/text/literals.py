"""Values as models write them into calls: JSON, Python's literals, and Gemma's quotation marks.

The text is untrusted: `Literals` raises ValueError for whatever is not a value, and nothing is evaluated.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any, Final

GEMMA_QUOTE: Final = '<|"|>'
MAX_DEPTH: Final = 64
_WORDS: Final = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_WORD: Final = re.compile(r"[^\W\d][\w.-]*")
_KEY: Final = re.compile(r"""(?!\s)[^,:{}\[\]<>'"]+(?<!\s)""")  # of an object, without quotation marks
_FUNCTION: Final = re.compile(r"[\w.-]+")
_NUMBER: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_BLANK: Final = re.compile(r"\s*")
_STRING: Final = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(U[0-9a-fA-F]{8}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{c: c for c in "\\/'\""}}


class Literals:
    """Reads values one after the other from a text.

    >>> Literals("{city: 'Rome', days: [1, 2.5], now: True}").value()
    {'city': 'Rome', 'days': [1, 2.5], 'now': True}
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    @property
    def at_end(self) -> bool:
        """Whether nothing but blanks follows."""
        self._skip()
        return self._at == len(self._text)

    def takes(self, sign: str) -> bool:
        """Whether `sign` follows; then it is read."""
        self._skip()
        found = self._text.startswith(sign, self._at)
        self._at += len(sign) if found else 0
        return found

    def expect(self, sign: str) -> None:
        """Read `sign`."""
        if not self.takes(sign):
            raise ValueError(f"no {sign!r} at {self._at}")

    def name(self) -> str:
        """Read the name of a function, which may begin with a digit."""
        return self._matched(_FUNCTION)[0]

    def word(self) -> str:
        """Read a word: a name of an argument, or a value such as `true`."""
        return self._matched(_WORD)[0]

    def value(self, depth: int = 0) -> Any:
        """Read a value: an object, a list, a text, a number or a word such as `true`."""
        if depth > MAX_DEPTH:
            raise ValueError(f"values nest deeper than {MAX_DEPTH}")
        if self.takes("{"):
            return self.members(":", "}", depth)
        if self.takes("["):
            return self._list("]", depth)
        if self.takes("("):
            return self._list(")", depth)
        first = self._text[self._at : self._at + 1]
        if first in ("'", '"') or self._text.startswith(GEMMA_QUOTE, self._at):
            return self._string()
        if first in "+-." or first.isdigit():
            return self._number()
        word = self.word()
        if word not in _WORDS:
            raise ValueError(f"{word!r} is no value")
        return _WORDS[word]

    def members(self, between: str, end: str, depth: int = 0) -> dict[str, Any]:
        """Read names and values up to `end`; its beginning was read."""
        found: dict[str, Any] = {}
        while not self.takes(end):
            name = self._name(_KEY if between == ":" else _WORD)
            self.expect(between)
            found[name] = self.value(depth + 1)
            if not self.takes(","):
                self.expect(end)
                break
        return found

    def _list(self, end: str, depth: int) -> list[Any]:
        found = []
        while not self.takes(end):
            found.append(self.value(depth + 1))
            if not self.takes(","):
                self.expect(end)
                break
        return found

    def _name(self, form: re.Pattern[str]) -> str:
        self._skip()
        quoted = self._text[self._at : self._at + 1] in ("'", '"') or self._text.startswith(GEMMA_QUOTE, self._at)
        return self._string() if quoted else self._matched(form)[0]

    def _string(self) -> str:
        if self.takes(GEMMA_QUOTE):
            end = self._text.find(GEMMA_QUOTE, self._at)
            if end < 0:
                raise ValueError("a text does not end")
            text, self._at = self._text[self._at : end], end + len(GEMMA_QUOTE)
            return text
        found = self._matched(_STRING)
        return whole_characters(_ESCAPE.sub(_unescaped, found[1] if found[1] is not None else found[2]))

    def _number(self) -> float | int:
        text = self._matched(_NUMBER)[0]
        number = int(text) if text.lstrip("+-").isdigit() else float(text)
        if not math.isfinite(number):
            raise ValueError(f"{text} is no number that JSON has")
        return number

    def _matched(self, pattern: re.Pattern[str]) -> re.Match[str]:
        self._skip()
        found = pattern.match(self._text, self._at)
        if found is None:
            raise ValueError(f"nothing to read at {self._at}")
        self._at = found.end()
        return found

    def _skip(self) -> None:
        blank = _BLANK.match(self._text, self._at)
        self._at = self._at if blank is None else blank.end()


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1]
    if len(code) > 1:
        number = int(code[1:], 16)
        if number > sys.maxunicode:
            raise ValueError(f"{escape[0]} is no character")
        return chr(number)
    return _ESCAPED.get(code, escape[0])


def whole_characters(text: str) -> str:
    """Halves of a character become one; a half alone, which UTF-8 cannot write, becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def as_json(arguments: Any) -> str:
    """The text of a call's arguments."""
    return whole_characters(json.dumps(arguments, ensure_ascii=False))


def from_json(text: str) -> Any:
    """A value written as JSON; ValueError where it is none, or has what JSON cannot write, as NaN."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_refused)
    except RecursionError as error:
        raise ValueError("values nest too deep") from error


def _finite(text: str) -> float:
    """A number that JSON can write, the nearest where a float cannot hold it."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is no value that JSON has")
