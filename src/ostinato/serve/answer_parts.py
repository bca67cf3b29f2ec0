"""An answer as a list of parts (reasoning, text, calls), made while its tokens arrive; each API gives them its shape.

A part begins with the first delta of its kind and ends when another begins, or the answer does; joined, the events are
the parts. Nothing here knows the shape of any API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from pydantic_core import from_json

from ostinato.engine.request import Token
from ostinato.serve.answers import TokenUpdate
from ostinato.serve.conversation import AnswerDeltas
from ostinato.text.answer import CallDelta, Delta

Event: TypeAlias = dict[str, Any]
PartKind = Literal["reasoning", "text", "call"]


class AnswerPart(Protocol):
    """One part while it is made: `begin`, `add`..., `end`, each with its events."""

    def begin(self) -> list[Event]: ...

    def add(self, text: str, tokens: Sequence[Token]) -> list[Event]:
        """`text`: of a call, of its arguments' JSON. `tokens`: those whose log-probabilities are sent with it."""

    def end(self, *, cut: bool) -> list[Event]:
        """`cut`: by the limit of tokens."""

    def whole(self) -> dict[str, Any]:
        """The part, so far."""


NewPart = Callable[[PartKind, int, CallDelta | None], AnswerPart]


class _MadePart(NamedTuple):
    kind: PartKind
    part: AnswerPart


class AnswerParts:
    """All parts of one answer, while its tokens arrive."""

    def __init__(self, deltas: AnswerDeltas, new_part: NewPart) -> None:
        """`new_part` makes a part of a kind at an index; a call from its first delta."""
        self._deltas, self._new_part = deltas, new_part
        self._made: list[_MadePart] = []
        self._unsaid = ""  # of a text that is blank so far: before a call it is no part
        self._unsaid_tokens: list[Token] = []

    @property
    def reason(self) -> str:
        """How the answer ended, as `AnswerDeltas` has it; empty before."""
        return self._deltas.reason

    @property
    def stop(self) -> str | None:
        """The stop string that ended it."""
        return self._deltas.stop

    @property
    def n_reasoning(self) -> int:
        return self._deltas.n_reasoning

    def whole(self) -> list[dict[str, Any]]:
        """All parts, so far."""
        return [made.part.whole() for made in self._made]

    def cut_off(self) -> list[dict[str, Any]]:
        """All parts of an answer of which no more will come; the last is marked as cut."""
        if self._made and not self.reason:
            self._made[-1].part.end(cut=True)
        return self.whole()

    def format_update(self, update: TokenUpdate) -> list[Event]:
        """The events of a token: none, one or several."""
        events = [event for delta, tokens in self._deltas.read(update) for event in self._read(delta, tokens)]
        return events + self._end() if self.reason else events

    def _read(self, delta: Delta, tokens: Sequence[Token]) -> list[Event]:
        if delta.call is not None:
            return self._read_call(delta.call)
        if delta.reasoning:
            return [*self._reach("reasoning"), *self._made[-1].part.add(delta.reasoning, ())]
        self._unsaid += delta.content
        self._unsaid_tokens += tokens
        if not self._unsaid.strip() and self._last_kind != "text":
            return []
        return self._say()

    def _say(self) -> list[Event]:
        """The text that is not said yet."""
        text, tokens = self._unsaid, self._unsaid_tokens
        self._unsaid, self._unsaid_tokens = "", []
        return [*self._reach("text"), *self._made[-1].part.add(text, tokens)]

    def _read_call(self, call: CallDelta) -> list[Event]:
        events: list[Event] = []
        if call.name is not None:
            self._unsaid, self._unsaid_tokens = "", []
            events = self._open("call", call)
        assert self._last_kind == "call", "a call's arguments came before its name"
        return [*events, *self._made[-1].part.add(call.arguments, ())] if call.arguments else events

    @property
    def _last_kind(self) -> PartKind | None:
        return self._made[-1].kind if self._made else None

    def _reach(self, kind: PartKind) -> list[Event]:
        """The events until the last part is of a kind."""
        return [] if self._last_kind == kind else self._open(kind)

    def _open(self, kind: PartKind, call: CallDelta | None = None) -> list[Event]:
        """The events of a part that begins: the end of the one before it comes first."""
        events = self._made[-1].part.end(cut=False) if self._made else []
        part = self._new_part(kind, len(self._made), call)
        self._made.append(_MadePart(kind, part))
        return [*events, *part.begin()]

    def _end(self) -> list[Event]:
        """The end of the last part; an answer that says nothing and calls nothing has a text all the same."""
        cut = self.reason == "length"
        cut_while_thinking = cut and bool(self._made)
        silent = all(made.kind == "reasoning" for made in self._made)
        events = self._say() if silent and not cut_while_thinking else []
        return [*events, *self._made[-1].part.end(cut=cut)]


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call, as far as they go where the answer was cut inside of them.

    >>> arguments_of('{"far": true, "at": "se'), arguments_of("")
    ({'far': True}, {})
    """
    try:
        found = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
