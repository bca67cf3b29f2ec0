"""Parses calls while they are generated: markers in text, and JSON objects character by character.

Models write calls into their text, each family in its own format; `tools.py` knows which, and `block_calls.py` reads
those that are no JSON. The text is untrusted: whatever is not a call is returned as content, character by character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from ostinato.text.answer import CallDelta, Delta
from ostinato.text.bare_calls import BareForm
from ostinato.text.block_calls import ARGUMENTS
from ostinato.text.literals import whole_characters
from ostinato.text.stream import open_end

NewId = Callable[[], str]


class CallObject:
    """One call, `{"name": ..., "arguments": {...}}`, character by character; `take` until `ended` or `broken`.

    The arguments are returned as they arrive, once the name is known. Members of other names are skipped; a call
    inside of a member `function` counts as the call. With a `name`, only the arguments follow.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.ended = self.broken = False
        self._only_arguments = name is not None
        self._depth = self._base = int(self._only_arguments)
        self._in_string = self._escaped = False
        self._place: Literal["key", "colon", "value", "next"] = "value" if self._only_arguments else "key"
        self._key = "arguments" if self._only_arguments else ""
        self._token: list[str] = []  # the key or value being read
        self._arguments: list[str] = []
        self.n_given = 0  # of the arguments' characters

    def take(self, character: str) -> str:
        """The arguments' text that can be returned now."""
        at_member = not self._in_string and self._depth == self._base and self._depth > 0
        if self._in_string:
            # Some models write line ends as they are, where JSON has an escape.
            written = character if character >= " " else json.dumps(character)[2 if self._escaped else 1 : -1]
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            self._token += written
            if not self._in_string and self._depth == self._base and self._place == "key":
                self._key, self._place = self._loaded(), "colon"
        elif self._depth == 0 and character != "{":
            self.broken = self.broken or not character.isspace()
        elif at_member and self._place != "value":
            self._between(character)
        elif at_member and character in ",}":
            self._end_value(character)
        else:
            self._within(character)
        return self._new_arguments()

    def _between(self, character: str) -> None:
        """Outside of values: a key, a colon, a comma or the end."""
        if character.isspace():
            return
        match self._place, character:
            case "key", '"':
                self._token = [character]
                self._in_string = True
            case "colon", ":":
                self._token, self._place = [], "value"
            case "next", ",":
                self._place = "key"
            case (("key" | "next"), "}"):
                self._close()
            case _:
                self.broken = True

    def _within(self, character: str) -> None:
        if self._depth == 0:
            self._depth = self._base = 1
            return
        if not self._token and character.isspace():
            return
        if not self._token and self._key == "function" and character == "{":
            self._depth += 1
            self._base, self._place = self._depth, "key"
            return
        if self._depth == self._base and self._token[:1] in (["{"], ["["]):  # behind a value that has ended
            self.broken = not character.isspace()
            return
        self._token.append(character)
        self._in_string = character == '"'
        self._depth += (character in "{[") - (character in "}]")
        if self._only_arguments and self._depth == self._base and not self._in_string:
            self.ended = True

    def _end_value(self, character: str) -> None:
        value = self._loaded()
        if self._key in ("name", "tool_name", "function") and isinstance(value, str):
            self.name = whole_characters(value)
        if self._key in ARGUMENTS and value is not None:  # null is none
            self._arguments = list(whole_characters(value) if isinstance(value, str) else "".join(self._token).rstrip())
        self._token = []
        self._place = "key" if character == "," else "next"
        if character == "}":
            self._close()

    def _close(self) -> None:
        self._depth -= 1
        self._base, self._place = self._depth, "next"
        self.ended = self._depth == 0

    def _loaded(self) -> Any:
        try:
            return json.loads("".join(self._token))
        except ValueError:
            self.broken = True
            return None

    def _new_arguments(self) -> str:
        if self._place == "value" and self._key in ARGUMENTS and self._token[:1] == ["{"]:
            self._arguments = self._token
        if self.name is None or len(self._arguments) <= self.n_given:
            return ""
        new = self._arguments[self.n_given :]
        self.n_given = len(self._arguments)
        return "".join(new)


class JsonCalls:
    """Reads calls that are JSON objects behind a marker, alone or in a list; bare at the start where `bare`.

    `named`: what a call's name looks like where it stands before the arguments, with one group around the name; an
    object of them follows. `known`: a bare object is a call if its name is one of these, and else it is content.
    `form`: how a bare call must begin; without one, it may have its members in any order. `told`: the answer's grammar
    tells calls from text by their marker, so that behind a call, or the list of them, an object without one is content.
    `outer`: under such a grammar, the markers around a list of calls, outside of which there is none.
    """

    def __init__(
        self,
        openers: Sequence[str],
        closers: Sequence[str],
        new_id: NewId,
        *,
        bare: bool = False,
        named: str | None = None,
        known: Collection[str] = (),
        form: BareForm | None = None,
        told: bool = False,
        outer: tuple[str, str] | None = None,
    ) -> None:
        self._openers, self._closers = tuple(openers), tuple(closers)
        self._first = tuple(openers) if outer is None else outer[:1]  # what begins calls in a text
        self._last = None if outer is None else outer[1]
        self._new_id, self._known, self._form = new_id, known, form
        self._named = None if named is None else re.compile(rf"{named}\s*(?=\{{)")
        self._state: Literal["start", "text", "calls", "name", "object"] = "start" if bare else "text"
        self._told = told
        self._in_list = self._is_over = False  # what a marker began
        self._marked = False  # whether the current call began with a marker
        self._buffer = ""  # not read yet
        self._raw: list[str] = []  # of the object being read, in case it is not a call
        self._call = CallObject()
        self._began = False  # whether the start of the current call was returned
        self._index = -1

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        return self._run(last=False)

    def finish(self) -> list[Delta]:
        deltas = self._run(last=True)
        if self._state == "object" and not self._began:
            return [*deltas, *_content("".join(self._raw))]
        if self._state == "name":
            return [*deltas, *_content(self._buffer)]
        return deltas

    def _run(self, *, last: bool) -> list[Delta]:
        deltas: list[Delta] = []
        steps = {
            "start": self._start,
            "text": self._text,
            "calls": self._between,
            "name": self._read_name,
            "object": self._object,
        }
        while True:
            before = self._state, self._buffer
            deltas += steps[self._state](last)
            if (self._state, self._buffer) == before:
                return deltas

    def _start(self, last: bool) -> list[Delta]:
        """At the start of the text: an object may be a call without a marker."""
        if self._form is not None:
            return self._start_in(self._form, last)
        shown = self._buffer.lstrip()
        if shown.startswith("{"):
            self._buffer = shown
            self._begin(marked=False)
        elif shown:
            self._state = "text"
        return []

    def _start_in(self, form: BareForm, last: bool) -> list[Delta]:
        found = form.read(self._buffer)
        if found is not None and found[0] in self._known:
            name, end = found
            self._buffer = self._buffer[end:]
            self._begin(marked=True, name=name)
        elif found is not None or last or not form.may_become(self._buffer):
            self._state = "text"
        return []

    def _text(self, last: bool) -> list[Delta]:
        """Content up to a marker; trailing blanks are held back, because before a call they mean nothing."""
        at, opener = min(((self._buffer.find(o), o) for o in self._first if o in self._buffer), default=(-1, ""))
        if at >= 0:
            said, self._buffer = self._buffer[:at].rstrip(), self._buffer[at + len(opener) :]
            self._state, self._in_list, self._is_over = "calls", False, False
            return _content(said)
        keep = 0 if last else open_end(self._buffer, self._first)
        free = self._buffer[: len(self._buffer) - keep]
        said = free if last else free.rstrip()
        self._buffer = self._buffer[len(said) :]
        return _content(said)

    def _between(self, last: bool) -> list[Delta]:
        """Behind a marker, before a call or after one."""
        markers = (*self._openers, *self._closers)
        text = self._buffer.lstrip(" \t\r\n,;")
        while text:
            marker = next((m for m in markers if text.startswith(m)), None)
            if marker is None and not last and open_end(text, markers) == len(text):
                break  # it may become one
            if marker is None and text[0] not in "[]":
                self._buffer = text
                if self._told and self._is_over:
                    self._state = "text"
                elif text.startswith("{"):
                    self._begin(marked=True)
                else:
                    self._state = "name" if self._named else "text"
                return []
            if marker is not None and marker == self._last:
                self._buffer, self._state = text[len(marker) :], "text"
                return []
            self._in_list = self._in_list or text[0] == "["
            self._is_over = marker in self._closers or text[0] == "]" or (self._is_over and marker is None)
            text = text[len(marker or "[") :].lstrip(" \t\r\n,;")
        self._buffer = text
        return []

    def _read_name(self, last: bool) -> list[Delta]:
        """A name and then arguments: `name[ARGS]{...}`."""
        found = None if self._named is None else self._named.match(self._buffer)
        if found is None:
            if "{" in self._buffer or len(self._buffer) > 1024:
                self._state = "text"
            return []
        self._buffer = self._buffer[found.end() :]
        self._begin(marked=True, name=found[1])
        return []

    def _begin(self, *, marked: bool, name: str | None = None) -> None:
        self._state, self._marked = "object", marked
        self._call, self._began, self._raw = CallObject(name), False, []

    def _object(self, last: bool) -> list[Delta]:
        deltas: list[Delta] = []
        call = self._call
        arguments: list[str] = []
        for at, character in enumerate(self._buffer):
            self._raw.append(character)
            arguments.append(call.take(character))
            foreign = call.name is not None and not self._marked and call.name not in self._known
            if call.broken or foreign:
                deltas += self._call_deltas(arguments)
                if not self._began:
                    self._buffer = self._buffer[at + 1 :]
                    return [*deltas, *self._no_call()]
                # Its end is missing: what follows may be a marker, another call or text.
                self._buffer, self._state, self._is_over = self._buffer[at:], "calls", not self._in_list
                return deltas
            if call.ended:
                self._buffer = self._buffer[at + 1 :]
                if not call.n_given:
                    arguments.append("{}")
                deltas += self._call_deltas(arguments)
                if not self._began:
                    return [*deltas, *self._no_call()]
                self._state, self._is_over = "calls", not self._in_list
                return deltas
        self._buffer = ""
        return deltas + self._call_deltas(arguments)

    def _call_deltas(self, arguments: Sequence[str]) -> list[Delta]:
        call, text = self._call, "".join(arguments)
        if call.name is None or not (self._marked or call.name in self._known):
            return []
        if not self._began:
            self._began = True
            self._index += 1
            return [Delta(call=CallDelta(self._index, self._new_id(), call.name, text))]
        return [Delta(call=CallDelta(self._index, arguments=text))] if text else []

    def _no_call(self) -> list[Delta]:
        """Return what was read as content; the rest is text."""
        self._state = "text"
        return _content("".join(self._raw))


def _content(text: str) -> list[Delta]:
    return [Delta(content=text)] if text else []
