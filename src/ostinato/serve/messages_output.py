"""An answer as the content blocks of a message, and as the events of its stream.

`answer_parts.py` says when a block begins and ends; here are its form and its events. Nothing here knows about HTTP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from ostinato.engine.request import Token
from ostinato.serve.answer_parts import Event, PartKind, arguments_of
from ostinato.serve.sealed import sealed
from ostinato.text.answer import CallDelta


class ContentBlock:
    """One block while it is made."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def begin(self) -> list[Event]:
        return [{"type": "content_block_start", "index": self._index, "content_block": self.whole()}]

    def add(self, text: str, tokens: Sequence[Token]) -> list[Event]:
        self._texts.append(text)
        return [self._delta(self.delta(text))] if text else []

    def end(self, *, cut: bool) -> list[Event]:
        return [{"type": "content_block_stop", "index": self._index}]

    def delta(self, text: str) -> dict[str, Any]:
        """An added text in the shape of its kind."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """The block, so far."""
        raise NotImplementedError

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class TextBlock(ContentBlock):
    """The text of the answer."""

    def delta(self, text: str) -> dict[str, Any]:
        return {"type": "text_delta", "text": text}

    def whole(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class ThinkingBlock(ContentBlock):
    """What the model thought. The signature, which is not checked, holds the text where that is not shown."""

    def __init__(self, index: int, *, shown: bool) -> None:
        super().__init__(index)
        self._shown, self._signature = shown, ""

    def add(self, text: str, tokens: Sequence[Token]) -> list[Event]:
        events = super().add(text, tokens)
        return events if self._shown else []

    def delta(self, text: str) -> dict[str, Any]:
        return {"type": "thinking_delta", "thinking": text}

    def end(self, *, cut: bool) -> list[Event]:
        self._signature = hashlib.sha256(self.text.encode()).hexdigest() if self._shown else sealed(self.text)
        return [self._delta({"type": "signature_delta", "signature": self._signature}), *super().end(cut=cut)]

    def whole(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": self.text if self._shown else "", "signature": self._signature}


class ToolUseBlock(ContentBlock):
    """A call of a tool."""

    def __init__(self, index: int, call: CallDelta) -> None:
        super().__init__(index)
        self._id, self._name = call.id, call.name

    def delta(self, text: str) -> dict[str, Any]:
        return {"type": "input_json_delta", "partial_json": text}

    def whole(self) -> dict[str, Any]:
        return {"type": "tool_use", "id": self._id, "name": self._name, "input": arguments_of(self.text)}


class NewBlock:
    """Makes the blocks of one answer."""

    def __init__(self, *, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking

    def __call__(self, kind: PartKind, index: int, call: CallDelta | None) -> ContentBlock:
        if call is not None:
            return ToolUseBlock(index, call)
        return ThinkingBlock(index, shown=self._shows_thinking) if kind == "reasoning" else TextBlock(index)
