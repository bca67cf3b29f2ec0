"""Calls that stand between two markers and are read when the second has come: tags, Python's calls, Gemma's.

`BlockCalls` finds the blocks; a function per format reads one. The text is untrusted: a block that is no call is
returned as content, character by character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ostinato.text.answer import CallDelta, Delta
from ostinato.text.call_schema import read_value
from ostinato.text.literals import Literals, as_json, from_json, whole_characters
from ostinato.text.stream import open_end

Calls = list[tuple[str, Any]]  # names and arguments
Schemas = Mapping[str, Mapping[str, Any]]  # each function's parameters, by its name
ReadBlock = Callable[[str, Schemas], "Calls | None"]
ARGUMENTS: Final = ("arguments", "parameters")  # what the member of a JSON call is called that has them


class BlockCalls:
    """Reads calls in blocks, each block when it is complete."""

    def __init__(self, form: BlockForm, new_id: Callable[[], str], schemas: Schemas) -> None:
        """`schemas` say which values are text where the form does not."""
        self._blocks, self._read = form.blocks, form.read
        self._new_id, self._schemas = new_id, schemas
        self._buffer = ""
        self._index = -1
        self._after_call = False
        self._stray = ""  # what may close a block behind a call that stood alone: some models leave out its opening

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        return self._run(last=False)

    def finish(self) -> list[Delta]:
        deltas = self._run(last=True)
        held, self._buffer = self._buffer, ""
        return [*deltas, *_content(held)]

    def _run(self, *, last: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while self._buffer:
            if self._after_call:  # blanks between calls mean nothing
                self._buffer = self._buffer.lstrip()
                if not last and self._stray.startswith(self._buffer) and self._buffer != self._stray:
                    return deltas
                self._buffer, self._stray = self._buffer.removeprefix(self._stray).lstrip(), ""
            at, opener = min(((self._buffer.find(o), o) for o in self._blocks if o in self._buffer), default=(-1, ""))
            if at < 0:
                keep = 0 if last else open_end(self._buffer, tuple(self._blocks))
                free = self._buffer[: len(self._buffer) - keep]
                deltas += self._say(free if last else free.rstrip())
                return deltas
            deltas += self._say(self._buffer[:at].rstrip())
            at = self._buffer.index(opener)
            closer = self._blocks[opener]
            found = self._buffer.find(closer, at + len(opener))
            if found < 0 and not last:
                return deltas
            end = len(self._buffer) if found < 0 else found + len(closer)
            calls = self._read(self._buffer[at:end], self._schemas)
            if calls is None:
                deltas += self._say(self._buffer[:end])
                continue
            self._buffer, self._after_call = self._buffer[end:], True
            outer = next(iter(self._blocks))
            self._stray = "" if opener == outer else self._blocks[outer]
            deltas += [self._call(name, arguments) for name, arguments in calls]
        return deltas

    def _say(self, text: str) -> list[Delta]:
        self._buffer = self._buffer[len(text) :]
        self._after_call = self._after_call and not text
        return _content(text)

    def _call(self, name: str, arguments: Any) -> Delta:
        self._index += 1
        return Delta(call=CallDelta(self._index, self._new_id(), whole_characters(name), as_json(arguments)))


@dataclass(frozen=True, slots=True)
class BlockForm:
    """How a format writes calls: the text that closes a block by the text that opens it, and what reads a block, from
    one to the other."""

    blocks: Mapping[str, str]
    read: ReadBlock


# Tags


def _tags(
    outer: tuple[str, str], call: str, parameter: str, *inner: tuple[str, str], any_name: bool = True
) -> BlockForm:
    """Calls as tags between outer ones, or as JSON objects there; `inner` tags may also stand alone. Without `any_name`
    a name alone is a call only if it is that of a function."""
    one_call, one_parameter = re.compile(call, re.DOTALL), re.compile(parameter, re.DOTALL)

    def read(block: str, schemas: Schemas) -> Calls | None:
        text = _between(block, *outer).strip()
        if text.startswith("{"):
            return _object_calls(text)
        calls: Calls = []
        while text:
            found = one_call.match(text)
            if found is None:
                return None
            name = found["name"].strip()
            schema = schemas.get(name, {})
            properties = schema.get("properties")
            properties = properties if isinstance(properties, Mapping) else {}
            other = schema.get("additionalProperties")
            pairs = [(key.strip(), value) for key, value in one_parameter.findall(found["body"])]
            if not (pairs or any_name or name in schemas):
                return None
            arguments = {key: read_value(value, properties.get(key, other), schema) for key, value in pairs}
            calls.append((name, arguments))
            text = text[found.end() :].strip().removeprefix(outer[0]).strip()
        return calls or None

    return BlockForm(dict((outer, *inner)), read)


def _object_calls(text: str) -> Calls | None:
    try:
        return _named_calls([from_json(text)])
    except ValueError:
        return None


def _named_calls(objects: list[Any]) -> Calls | None:
    """Calls as `{"name": ..., "arguments": {...}}`; some models write the arguments as a text of JSON."""
    calls: Calls = []
    for one in objects:
        name = one.get("name") if isinstance(one, dict) else None
        if not isinstance(name, str):
            return None
        arguments: Any = next((one[key] for key in ARGUMENTS if one.get(key) is not None), {})
        if isinstance(arguments, str):
            arguments = from_json(arguments or "{}")
        if not isinstance(arguments, dict):
            return None
        calls.append((name, arguments))
    return calls or None


_FUNCTION: Final = r"<function=(?P<name>[^>]+)>(?P<body>.*?)</function>"
_PARAMETER: Final = r"<parameter=([^>]+)>\n?(.*?)\n?(?:</parameter>|\Z)"  # of the last one the end may be missing
TAGS: Final = _tags(("<tool_call>", "</tool_call>"), _FUNCTION, _PARAMETER, ("<function=", "</function>"))
SEED_TAGS: Final = _tags(("<seed:tool_call>", "</seed:tool_call>"), _FUNCTION, _PARAMETER)
ATEM_TAGS: Final = _tags(
    ("<atem:function_calls>", "</atem:function_calls>"),
    r'<atem:invoke name="(?P<name>[^"]+)">(?P<body>.*?)</atem:invoke>',
    r'<atem:parameter name="([^"]+)">(.*?)</atem:parameter>',
)
KEY_TAGS: Final = _tags(
    ("<tool_call>", "</tool_call>"),
    # Atomic groups: a key or value ends at the first marker, and is not tried again at each later one.
    r"(?P<name>[\w.-]+)\s*(?P<body>(?>(?><arg_key>.*?</arg_key>)\s*(?><arg_value>.*?</arg_value>)\s*)*)$",
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    any_name=False,
)


# Python's calls, and Gemma's


def _python_calls(block: str, _: Schemas) -> Calls | None:
    """`[f(a=1, b="x"), g()]`, or JSON objects in a list."""
    text = Literals(_between(block, *PYTHON_MARKERS))
    try:
        text.expect("[")
        if text.takes("{"):
            objects = [text.members(":", "}")]
            while text.takes(","):
                objects.append(text.value())
            text.expect("]")
            return _named_calls(objects) if text.at_end else None
        calls: Calls = []
        while not text.takes("]"):
            name = text.name()
            text.expect("(")
            calls.append((name, text.members("=", ")")))
            if not text.takes(","):
                text.expect("]")
                break
        return calls if calls and text.at_end else None
    except ValueError:
        return None


def _gemma_calls(block: str, _: Schemas) -> Calls | None:
    """`call:name{key:<|"|>text<|"|>,other:2}`."""
    text = Literals(_between(block, *GEMMA_MARKERS))
    calls: Calls = []
    try:
        while not text.at_end:
            text.expect("call:")
            name = text.name()
            text.expect("{")
            calls.append((name, text.members(":", "}")))
    except ValueError:
        return None
    return calls or None


def _between(block: str, opener: str, closer: str) -> str:
    return block.removeprefix(opener).removesuffix(closer)


PYTHON_MARKERS: Final = ("<|tool_call_start|>", "<|tool_call_end|>")
GEMMA_MARKERS: Final = ("<|tool_call>", "<tool_call|>")
PYTHON: Final = BlockForm(dict((PYTHON_MARKERS,)), _python_calls)
GEMMA: Final = BlockForm(dict((GEMMA_MARKERS,)), _gemma_calls)


def _content(text: str) -> list[Delta]:
    return [Delta(content=text)] if text else []
