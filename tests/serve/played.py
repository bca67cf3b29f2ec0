"""Answers whose deltas are given, for the APIs that turn them into parts and events."""

from __future__ import annotations

import random
from typing import Any, cast

from ostinato.serve.answer_parts import AnswerParts, Event, NewPart, PartKind
from ostinato.serve.conversation import AnswerDeltas, DeltaTokens
from ostinato.text.answer import CallDelta, Delta


class Played:
    """An answer whose deltas are given: one for each token."""

    n_reasoning = 0

    def __init__(self, deltas: list[Delta], reason: str) -> None:
        self._left, self._ends_as, self.reason = deltas, reason, ""

    def read(self, update: object) -> list[DeltaTokens]:
        made = [DeltaTokens(self._left.pop(0), [])] if self._left else []
        if not self._left:
            self.reason = self._ends_as
        return made


def played(deltas: list[Delta], new_part: NewPart, reason: str) -> tuple[list[Event], list[dict[str, Any]]]:
    """The events and the parts of an answer."""
    answer = Played(list(deltas), reason)
    parts = AnswerParts(cast(AnswerDeltas, answer), new_part)
    events: list[Event] = []
    while not answer.reason:
        events += parts.format_update(cast(Any, None))
    return events, parts.whole()


def call(index: int, *parts: str) -> list[Delta]:
    first = Delta(call=CallDelta(index, f"call_{index}", "look"))
    return [first, *(Delta(call=CallDelta(index, arguments=part)) for part in parts)]


def drawn(draw: random.Random) -> tuple[list[Delta], str, list[tuple[PartKind, str]]]:
    """Any order of deltas, how the answer ends, and the kinds and texts of its parts, in order."""
    deltas: list[Delta] = []
    expected: list[tuple[PartKind, str]] = []
    kinds: list[PartKind] = ["reasoning", "text", "call"]
    for index in range(draw.randrange(6)):
        kind = draw.choice(kinds)
        parts = [draw.choice(["a", "b ", "{}"]) for _ in range(draw.randrange(1, 4))]
        if kind == "call":
            parts = draw.choice([['{"far":', " true}"], ["{}"], ['{"far": tr']])
            deltas += call(index, *parts)
        else:
            deltas += [Delta(reasoning=part) if kind == "reasoning" else Delta(content=part) for part in parts]
        if kind != "call" and expected and expected[-1][0] == kind:
            expected[-1] = (kind, expected[-1][1] + "".join(parts))
        else:
            expected.append((kind, "".join(parts)))
    reason = draw.choice(["stop", "length"])
    if all(kind == "reasoning" for kind, _ in expected) and (reason == "stop" or not expected):
        expected.append(("text", ""))
    return deltas, reason, expected
