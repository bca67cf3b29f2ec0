"""Blocks and events from any order of deltas: what the client makes of the events is the message."""

from __future__ import annotations

import random
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import ContentBlock, RawMessageStreamEvent
from pydantic import TypeAdapter

from ostinato.serve.messages_output import NewBlock
from tests.serve.played import drawn, played

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BLOCK: TypeAdapter[Any] = TypeAdapter(ContentBlock)
KINDS = {"thinking": "reasoning", "text": "text", "tool_use": "call"}
START: Any = {
    "type": "message_start",
    "message": {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "tiny", "content": [], "stop_reason": None,
        "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 0},
    },
}  # fmt: skip


@pytest.mark.parametrize("shown", [True, False], ids=["shown", "omitted"])
def test_what_the_client_makes_of_the_events_is_the_message(shown: bool) -> None:
    draw = random.Random(3)
    for _ in range(500):
        deltas, reason, expected = drawn(draw)
        events, blocks = played(deltas, NewBlock(shows_thinking=shown), reason)
        snapshot: Any = None
        buffers: dict[int, bytes] = {}
        for event in (START, *events):
            read = EVENT.validate_python(event)
            snapshot = accumulate_event(event=read, current_snapshot=snapshot, json_bufs=buffers)
        assert [BLOCK.validate_python(block).to_dict() for block in blocks] == [
            {name: value for name, value in block.to_dict().items() if name != "parsed_output"}
            for block in snapshot.content
        ]
        assert [KINDS[block["type"]] for block in blocks] == [kind for kind, _ in expected]
        for index, (kind, text) in enumerate(expected):
            mine = [event for event in events if event["index"] == index]
            assert (mine[0]["type"], mine[-1]["type"]) == ("content_block_start", "content_block_stop")
            found = [event["delta"] for event in mine[1:-1]]
            if kind == "reasoning":
                assert found.pop()["type"] == "signature_delta"
                assert blocks[index]["signature"]
            name = {"reasoning": "thinking", "text": "text", "call": "partial_json"}[kind]
            said = text if shown or kind != "reasoning" else ""
            assert "".join(delta[name] for delta in found) == said
