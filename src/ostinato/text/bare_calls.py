"""How a call without a marker begins: `{"name": "weather", "parameters": ` and the other forms that models write.

Both sides use it: the grammar of optional calls (`tools.py`), in which a text that begins so must be that call, and the
parser of an answer under such a grammar (`call_parser.py`), which takes nothing else for a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Final

# What Python strips from the start of an answer, which may be more than the blanks of JSON.
SPACE: Final = r"[\t-\r\x1c- \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
_BLANK: Final = r"[ \t\r\n]"
_LAST: Final = rf"{_BLANK}{{0,8}}"  # bounded: behind it nothing else may come, so blanks could continue without end
_NAME: Final = "NAME"
_NAMES: Final = r"[A-Za-z0-9_.-]"

# The parts of a beginning in their order, each with its alternatives: members as models were trained to write them.
_PARTS: Final[Sequence[Sequence[Sequence[str]]]] = (
    ((f"{SPACE}*", r"\{", f"{_BLANK}*"),),
    ((), ('"type"', f"{_BLANK}*", ":", f"{_BLANK}*", '"function"', f"{_BLANK}*", ",", f"{_BLANK}*")),
    (('"name"',), ('"function"',)),
    ((f"{_BLANK}*", ":", f"{_BLANK}*", '"', _NAME, '"', f"{_BLANK}*", ",", f"{_BLANK}*"),),
    (('"parameters"',), ('"arguments"',)),
    ((f"{_BLANK}*", ":", _LAST),),
)
END: Final = rf"{_LAST}\}}"  # behind the arguments


class BareForm:
    """The beginnings of a call, up to the object of its arguments."""

    def __init__(self, forms: Sequence[Sequence[str]]) -> None:
        """Each form is its parts in their order: regular expressions, a text in quotes, or NAME."""
        wholes = ["".join(f"({_NAMES}{{1,128}})" if part == _NAME else part for part in form) for form in forms]
        self._wholes = [re.compile(rf"{whole}(?=\{{)") for whole in wholes]
        self._begun = [re.compile(_prefix_of(form)) for form in forms]

    def read(self, text: str) -> tuple[str, int] | None:
        """The function that a call at the start of a text names, and where its arguments begin; None if there is no
        call."""
        found = next(filter(None, (whole.match(text) for whole in self._wholes)), None)
        return None if found is None else (found[1], found.end())

    def may_become(self, text: str) -> bool:
        """Whether a text may be the first part of a beginning."""
        return any(begun.fullmatch(text) for begun in self._begun)


def _prefix_of(form: Sequence[str]) -> str:
    """A pattern of the texts that a form may begin with."""
    steps: list[str] = []
    for part in form:
        if part == _NAME:
            steps.append(f"{_NAMES}{{0,128}}")
        else:
            steps += list(part) if part.startswith('"') else [part]
    return "".join(f"(?:{step}" for step in steps) + ")?" * len(steps)


# What a grammar of calls in free text lets a call begin with, and what one of calls beside an answer in JSON writes:
# the blanks of the latter tell it from that answer, which is compact.
ANY_FORM: Final = BareForm([[step for part in chosen for step in part] for chosen in product(*_PARTS)])
SPELLED: Final = BareForm([[r"\{", '"name": "', _NAME, '", "parameters": ']])


def begin_rules() -> list[str]:
    """Terminals of a grammar, in Lark: what stands before a function's name in a call, and between that and the
    arguments."""
    name = next(number for number, part in enumerate(_PARTS) if _NAME in part[0])
    steps = _PARTS[name][0]
    at = steps.index(_NAME)
    before = [*_PARTS[:name], (steps[:at],)]
    behind = [(steps[at + 1 :],), *_PARTS[name + 1 :]]
    return [f"BEFORE_NAME: /{_joined(before)}/", f"BEHIND_NAME: /{_joined(behind)}/"]


def _joined(parts: Sequence[Sequence[Sequence[str]]]) -> str:
    return "".join(f"({'|'.join(''.join(one) for one in part)})" for part in parts)
