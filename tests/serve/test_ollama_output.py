"""Parts of a message from any order of deltas: the lines of a stream join to the whole answer."""

from __future__ import annotations

import random
from typing import Any, cast

from ollama._types import Message

from ostinato.serve.answer_parts import arguments_of
from ostinato.serve.ollama import as_message, as_response
from ostinato.serve.ollama_output import NewMessagePart, joined
from ostinato.text.tokenizer import Tokenizer
from tests.serve.played import drawn, played

NO_LOGPROBS = cast(Tokenizer, None)


def test_the_lines_of_a_stream_join_to_the_whole_message() -> None:
    draw = random.Random(5)
    for _ in range(500):
        deltas, reason, expected = drawn(draw)
        events, parts = played(deltas, NewMessagePart(NO_LOGPROBS), reason)
        whole: dict[str, Any] = as_message(joined(parts))["message"]
        assert as_message(joined(events))["message"] == whole
        Message.model_validate(whole)
        texts = {kind: "".join(text for one, text in expected if one == kind) for kind in ("reasoning", "text")}
        assert whole["content"] == texts["text"]
        assert whole.get("thinking", "") == texts["reasoning"]
        calls = [call["function"] for call in whole.get("tool_calls", ())]
        assert [call["arguments"] for call in calls] == [
            arguments_of(text) for kind, text in expected if kind == "call"
        ]
        assert {call["name"] for call in calls} <= {"look"}
        response = as_response(joined(parts))
        assert (response["response"], response.get("thinking", "")) == (texts["text"], texts["reasoning"])
