"""Items and events from any order of deltas: the events join to the items, and the items to the deltas."""

from __future__ import annotations

import random
from typing import Any, cast

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from ostinato.serve.answer_parts import Event
from ostinato.serve.responses_output import NewItem
from ostinato.text.answer import Delta
from tests.serve.played import call, drawn, played

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
KINDS = {"reasoning": "reasoning", "message": "text", "function_call": "call"}


def made(deltas: list[Delta], reason: str = "stop") -> tuple[list[Event], list[dict[str, Any]]]:
    """The events, which are of the client's type, and the items of an answer."""
    events, items = played(deltas, NewItem("id", cast(Any, None)), reason)
    for number, event in enumerate(events):
        EVENT.validate_python({**event, "sequence_number": number})
    return events, items


def text_of(item: dict[str, Any]) -> str:
    """The text of an item, whatever it is called."""
    return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def test_events_join_to_items_and_items_to_deltas() -> None:
    draw = random.Random(3)
    for _ in range(500):
        deltas, reason, expected = drawn(draw)
        events, items = made(deltas, reason)
        assert [(KINDS[item["type"]], text_of(item)) for item in items] == expected
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == items
        for index, item in enumerate(items):
            mine = [event for event in events if event["output_index"] == index]
            assert text_of(item) == "".join(event.get("delta", "") for event in mine)
            assert mine[0]["item"]["id"] == item["id"]
            assert {event["item_id"] for event in mine if "item_id" in event} == {item["id"]}
        statuses = [item["status"] for item in items]
        assert statuses == ["completed"] * (len(items) - 1) + ["incomplete" if reason == "length" else "completed"]


def test_blanks_before_a_call_are_no_message_and_before_text_they_are_part_of_it() -> None:
    _, items = made([Delta(content="\n\n"), *call(0, "{}"), Delta(content="\n"), *call(1, "{}"), Delta(content="\n")])
    assert [item["type"] for item in items] == ["function_call"] * 2
    _, items = made([Delta(reasoning="hm"), Delta(content="\n"), Delta(content="yes "), Delta(content="\n")])
    assert [text_of(item) for item in items] == ["hm", "\nyes \n"]
    _, items = made([Delta(content=" \n")])
    assert [text_of(item) for item in items] == [" \n"]
