"""An answer as the output items of a response, and as the typed events of its stream.

An item begins with the first delta of its kind (reasoning, text, a call) and ends when another begins, or the answer
does; joined, the events are the items. Nothing here knows about HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from ostinato.engine.request import Token
from ostinato.serve import logprobs
from ostinato.serve.answers import TokenUpdate
from ostinato.serve.conversation import AnswerDeltas
from ostinato.serve.errors import Refusal
from ostinato.serve.stream import named_event
from ostinato.text.answer import CallDelta, Delta
from ostinato.text.tokenizer import Tokenizer

Event = dict[str, Any]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


def lost_event(refusal: Refusal, number: int) -> bytes:
    """The last event of a stream whose response is lost with the process that made it."""
    error = refusal.body()["error"]
    told = {name: error[name] for name in ("code", "message", "param")}
    return named_event({"type": "error", **told, "sequence_number": number})


class OutputItem:
    """One item while it is made: `begin`, `add`..., `end`, each with its events."""

    def __init__(self, id: str, index: int) -> None:
        self.id, self._index = id, index
        self.status: ItemStatus = "in_progress"

    def begin(self) -> list[Event]:
        return [{"type": "response.output_item.added", "output_index": self._index, "item": self.whole()}]

    def end(self, status: ItemStatus) -> list[Event]:
        self.status = status
        return [{"type": "response.output_item.done", "output_index": self._index, "item": self.whole()}]

    def whole(self) -> dict[str, Any]:
        """The item, so far."""
        raise NotImplementedError

    def _event(self, type: str, **more: Any) -> Event:
        return {"type": type, "item_id": self.id, "output_index": self._index, **more}


class TextItem(OutputItem):
    """An item with one part of text: a message, or reasoning."""

    name: str  # of the events of its text

    def __init__(self, id: str, index: int) -> None:
        super().__init__(id, index)
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def part(self) -> dict[str, Any]:
        """The part, so far."""
        raise NotImplementedError

    def begin(self) -> list[Event]:
        return [*super().begin(), self._event("response.content_part.added", content_index=0, part=self.part())]

    def add(self, text: str, **more: Any) -> Event:
        self._texts.append(text)
        return self._event(f"response.{self.name}.delta", content_index=0, delta=text, **more)

    def end(self, status: ItemStatus) -> list[Event]:
        return [
            self._event(f"response.{self.name}.done", content_index=0, text=self.text, **self._done()),
            self._event("response.content_part.done", content_index=0, part=self.part()),
            *super().end(status),
        ]

    def _done(self) -> dict[str, Any]:
        return {}


class MessageOutput(TextItem):
    """The text of the answer, with its log-probabilities if they were requested."""

    name = "output_text"

    def __init__(self, id: str, index: int, listed: Callable[[Sequence[Token]], list[dict[str, Any]]]) -> None:
        super().__init__(id, index)
        self._listed = listed
        self._logprobs: list[dict[str, Any]] = []

    def add(self, text: str, *, tokens: Sequence[Token] = (), **more: Any) -> Event:
        listed = self._listed(tokens) if tokens else []
        self._logprobs += listed
        return super().add(text, logprobs=listed, **more)

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}

    def whole(self) -> dict[str, Any]:
        content = [] if self.status == "in_progress" else [self.part()]
        return {"type": "message", "id": self.id, "status": self.status, "role": "assistant", "content": content}

    def _done(self) -> dict[str, Any]:
        return {"logprobs": self._logprobs}


class ReasoningOutput(TextItem):
    """What the model thought, as it thought it: no summary is made."""

    name = "reasoning_text"

    def __init__(self, id: str, index: int, seal: Callable[[str], str] | None) -> None:
        """`seal` makes its `encrypted_content`, if that was requested."""
        super().__init__(id, index)
        self._seal = seal

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def whole(self) -> dict[str, Any]:
        ended = self.status != "in_progress"
        return {
            "type": "reasoning",
            "id": self.id,
            "status": self.status,
            "summary": [],
            "content": [self.part()] if ended else [],
            "encrypted_content": self._seal(self.text) if ended and self._seal is not None else None,
        }


class CallOutput(OutputItem):
    """A call of a function."""

    def __init__(self, id: str, index: int, call: CallDelta) -> None:
        super().__init__(id, index)
        self.call_id, self._name, self._arguments = call.id or "", call.name or "", ""

    def add(self, arguments: str) -> Event:
        self._arguments += arguments
        return self._event("response.function_call_arguments.delta", delta=arguments)

    def end(self, status: ItemStatus) -> list[Event]:
        done = {"name": self._name, "arguments": self._arguments}
        return [self._event("response.function_call_arguments.done", **done), *super().end(status)]

    def whole(self) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self.id,
            "status": self.status,
            "call_id": self.call_id,
            "name": self._name,
            "arguments": self._arguments,
        }


class Output:
    """All items of one answer, while its tokens arrive."""

    def __init__(
        self, id: str, tokenizer: Tokenizer, deltas: AnswerDeltas, seal: Callable[[str], str] | None = None
    ) -> None:
        """`id`: of the request; the ids of items are made from it."""
        self._id, self._tokenizer, self._deltas, self._seal = id, tokenizer, deltas, seal
        self._items: list[OutputItem] = []
        self._unsaid = ""  # of a message that has no other text yet: before a call it is no message
        self._unsaid_tokens: list[Token] = []

    @property
    def reason(self) -> str:
        return self._deltas.reason

    @property
    def n_reasoning(self) -> int:
        return self._deltas.n_reasoning

    def items(self) -> list[dict[str, Any]]:
        return [item.whole() for item in self._items]

    def format_update(self, update: TokenUpdate) -> list[Event]:
        """The events of a token: none, one or several."""
        events = [event for delta, tokens in self._deltas.read(update) for event in self._read(delta, tokens)]
        return events + self._end() if self.reason else events

    def _read(self, delta: Delta, tokens: Sequence[Token]) -> list[Event]:
        if delta.call is not None:
            return self._read_call(delta.call)
        if delta.reasoning:
            return self._think(delta.reasoning)
        self._unsaid += delta.content
        self._unsaid_tokens += tokens
        if not self._unsaid.strip() and not isinstance(self._last, MessageOutput):
            return []
        return self._say()

    def _think(self, text: str) -> list[Event]:
        events, item = [], self._last
        if not isinstance(item, ReasoningOutput):
            item = ReasoningOutput(self._item_id("rs"), len(self._items), self._seal)
            events = self._opened(item)
        return [*events, item.add(text)]

    def _say(self) -> list[Event]:
        """The text that is not said yet."""
        text, tokens = self._unsaid, self._unsaid_tokens
        self._unsaid, self._unsaid_tokens = "", []
        events, item = [], self._last
        if not isinstance(item, MessageOutput):
            item = MessageOutput(self._item_id("msg"), len(self._items), self._listed)
            events = self._opened(item)
        return [*events, item.add(text, tokens=tokens)]

    def _read_call(self, call: CallDelta) -> list[Event]:
        events, item = [], self._last
        if call.name is not None:
            self._unsaid, self._unsaid_tokens = "", []
            item = CallOutput(self._item_id("fc"), len(self._items), call)
            events = self._opened(item)
        assert isinstance(item, CallOutput), "a call's arguments came before its name"
        return [*events, item.add(call.arguments)] if call.arguments else events

    def _opened(self, item: OutputItem) -> list[Event]:
        """The events of an item that begins: the end of the one before it comes first."""
        events = self._close("completed")
        self._items.append(item)
        return [*events, *item.begin()]

    @property
    def _last(self) -> OutputItem | None:
        last = self._items[-1] if self._items else None
        return last if last is not None and last.status == "in_progress" else None

    def _close(self, status: ItemStatus) -> list[Event]:
        last = self._last
        return [] if last is None else last.end(status)

    def _end(self) -> list[Event]:
        """The end of the last item; an answer that says nothing and calls nothing has a message all the same."""
        cut_while_thinking = self.reason == "length" and bool(self._items)
        silent = all(isinstance(item, ReasoningOutput) for item in self._items)
        events = self._say() if silent and not cut_while_thinking else []
        return events + self._close("incomplete" if self.reason == "length" else "completed")

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._id}{len(self._items):04x}"

    def _listed(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = logprobs.for_chat(self._tokenizer, tokens)["content"]
        return content
