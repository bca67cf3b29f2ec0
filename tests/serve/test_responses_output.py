"""Items and events from any order of deltas: the events join to the items, and the items to the deltas."""

from __future__ import annotations

import random
from typing import Any, cast

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from ostinato.serve.answer_parts import AnswerParts, Event
from ostinato.serve.conversation import AnswerDeltas, DeltaTokens
from ostinato.serve.responses_output import NewItem
from ostinato.text.answer import CallDelta, Delta

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


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


def played(deltas: list[Delta], reason: str = "stop") -> tuple[list[Event], list[dict[str, Any]]]:
    """The events and the items of an answer."""
    answer = Played(list(deltas), reason)
    output = AnswerParts(cast(AnswerDeltas, answer), NewItem("id", cast(Any, None)))
    events: list[Event] = []
    while not answer.reason:
        events += output.format_update(cast(Any, None))
    for number, event in enumerate(events):
        EVENT.validate_python({**event, "sequence_number": number})
    return events, output.whole()


def text_of(item: dict[str, Any]) -> str:
    """The text of an item, whatever it is called."""
    return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def call(index: int, *parts: str) -> list[Delta]:
    first = Delta(call=CallDelta(index, f"call_{index}", "look"))
    return [first, *(Delta(call=CallDelta(index, arguments=part)) for part in parts)]


def test_events_join_to_items_and_items_to_deltas() -> None:
    draw = random.Random(3)
    for _ in range(500):
        deltas: list[Delta] = []
        expected: list[tuple[str, str]] = []  # kinds and texts, in order
        for index in range(draw.randrange(6)):
            kind = draw.choice(["reasoning", "message", "function_call"])
            parts = [draw.choice(["a", "b ", "{}"]) for _ in range(draw.randrange(1, 4))]
            if kind == "function_call":
                deltas += call(index, *parts)
            else:
                deltas += [Delta(reasoning=part) if kind == "reasoning" else Delta(content=part) for part in parts]
            if kind != "function_call" and expected and expected[-1][0] == kind:
                expected[-1] = (kind, expected[-1][1] + "".join(parts))
            else:
                expected.append((kind, "".join(parts)))
        reason = draw.choice(["stop", "length"])
        if all(kind == "reasoning" for kind, _ in expected) and (reason == "stop" or not expected):
            expected.append(("message", ""))
        events, items = played(deltas, reason)
        assert [(item["type"], text_of(item)) for item in items] == expected
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == items
        for index, item in enumerate(items):
            mine = [event for event in events if event["output_index"] == index]
            assert text_of(item) == "".join(event.get("delta", "") for event in mine)
            assert mine[0]["item"]["id"] == item["id"]
            assert {event["item_id"] for event in mine if "item_id" in event} == {item["id"]}
        statuses = [item["status"] for item in items]
        assert statuses == ["completed"] * (len(items) - 1) + ["incomplete" if reason == "length" else "completed"]


def test_blanks_before_a_call_are_no_message_and_before_text_they_are_part_of_it() -> None:
    _, items = played([Delta(content="\n\n"), *call(0, "{}"), Delta(content="\n"), *call(1, "{}"), Delta(content="\n")])
    assert [item["type"] for item in items] == ["function_call"] * 2
    _, items = played([Delta(reasoning="hm"), Delta(content="\n"), Delta(content="yes "), Delta(content="\n")])
    assert [text_of(item) for item in items] == ["hm", "\nyes \n"]
    _, items = played([Delta(content=" \n")])
    assert [text_of(item) for item in items] == [" \n"]
