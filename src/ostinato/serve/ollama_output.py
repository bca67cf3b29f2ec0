"""An answer as Ollama's messages: a part of one on each line of a stream, or one whole.

`answer_parts.py` says when a part begins and ends. Text and reasoning are sent as they arrive, a call when it is
complete. Nothing here knows about HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ostinato.engine.request import Token
from ostinato.serve import logprobs
from ostinato.serve.answer_parts import Event, PartKind, arguments_of
from ostinato.text.answer import CallDelta
from ostinato.text.tokenizer import Tokenizer


class TextPart:
    """Text of the answer, or of its reasoning. `field`: the message's field that has it."""

    def __init__(self, field: str, tokenizer: Tokenizer) -> None:
        self._field, self._tokenizer = field, tokenizer
        self._texts: list[str] = []
        self._tokens: list[Token] = []

    def begin(self) -> list[Event]:
        return []

    def add(self, text: str, tokens: Sequence[Token]) -> list[Event]:
        self._texts.append(text)
        self._tokens += tokens
        return [self._shaped(text, tokens)] if text else []

    def end(self, *, cut: bool) -> list[Event]:
        return []

    def whole(self) -> dict[str, Any]:
        return self._shaped("".join(self._texts), self._tokens)

    def _shaped(self, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        listed = {"logprobs": logprobs.for_chat(self._tokenizer, tokens)["content"]} if tokens else {}
        return {self._field: text, **listed}


class CallPart:
    """A call of a tool."""

    def __init__(self, call: CallDelta) -> None:
        self._call = call
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        return []

    def add(self, text: str, tokens: Sequence[Token]) -> list[Event]:
        self._texts.append(text)
        return []

    def end(self, *, cut: bool) -> list[Event]:
        return [self.whole()]

    def whole(self) -> dict[str, Any]:
        arguments = arguments_of("".join(self._texts))
        function = {"index": self._call.index, "name": self._call.name, "arguments": arguments}
        return {"tool_calls": [{"id": self._call.id, "function": function}]}


class NewMessagePart:
    """Makes the parts of one answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, kind: PartKind, index: int, call: CallDelta | None) -> TextPart | CallPart:
        if call is not None:
            return CallPart(call)
        return TextPart("thinking" if kind == "reasoning" else "content", self._tokenizer)


def joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A message of its parts, or of its events.

    >>> joined([{"thinking": "h"}, {"thinking": "m"}, {"content": "yes"}, {"tool_calls": [1]}, {"tool_calls": [2]}])
    {'thinking': 'hm', 'content': 'yes', 'tool_calls': [1, 2]}
    """
    made: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            made[name] = made[name] + value if name in made else value
    return made
