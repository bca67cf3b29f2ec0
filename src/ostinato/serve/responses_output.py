"""An answer as the output items of a response, and as the typed events of its stream.

`answer_parts.py` says when an item begins and ends; here are its form and its events. Nothing here knows about HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from ostinato.engine.request import Token
from ostinato.serve import logprobs
from ostinato.serve.answer_parts import Event, PartKind
from ostinato.serve.errors import Refusal
from ostinato.serve.stream import named_event
from ostinato.text.answer import CallDelta
from ostinato.text.tokenizer import Tokenizer

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

    def add(self, text: str, tokens: Sequence[Token]) -> list[Event]:
        raise NotImplementedError

    def end(self, *, cut: bool) -> list[Event]:
        self.status = "incomplete" if cut else "completed"
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

    def add(self, text: str, tokens: Sequence[Token]) -> list[Event]:
        self._texts.append(text)
        return [self._event(f"response.{self.name}.delta", content_index=0, delta=text, **self._with(tokens))]

    def end(self, *, cut: bool) -> list[Event]:
        return [
            self._event(f"response.{self.name}.done", content_index=0, text=self.text, **self._done()),
            self._event("response.content_part.done", content_index=0, part=self.part()),
            *super().end(cut=cut),
        ]

    def _with(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """What a delta carries beside its text."""
        return {}

    def _done(self) -> dict[str, Any]:
        return {}


class MessageOutput(TextItem):
    """The text of the answer, with its log-probabilities if they were requested."""

    name = "output_text"

    def __init__(self, id: str, index: int, listed: Callable[[Sequence[Token]], list[dict[str, Any]]]) -> None:
        super().__init__(id, index)
        self._listed = listed
        self._logprobs: list[dict[str, Any]] = []

    def _with(self, tokens: Sequence[Token]) -> dict[str, Any]:
        listed = self._listed(tokens) if tokens else []
        self._logprobs += listed
        return {"logprobs": listed}

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
    """A call of a function; one in a namespace names that too."""

    def __init__(self, id: str, index: int, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__(id, index)
        self.call_id, self._name, self._namespace, self._arguments = call_id, name, namespace, ""

    def add(self, text: str, tokens: Sequence[Token]) -> list[Event]:
        self._arguments += text
        return [self._event("response.function_call_arguments.delta", delta=text)]

    def end(self, *, cut: bool) -> list[Event]:
        done = {"name": self._name, "arguments": self._arguments}
        return [self._event("response.function_call_arguments.done", **done), *super().end(cut=cut)]

    def whole(self) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self.id,
            "status": self.status,
            "call_id": self.call_id,
            "name": self._name,
            **({} if self._namespace is None else {"namespace": self._namespace}),
            "arguments": self._arguments,
        }


class NewItem:
    """Makes the items of one answer."""

    def __init__(
        self,
        id: str,
        tokenizer: Tokenizer,
        seal: Callable[[str], str] | None = None,
        namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> None:
        """`id`: of the request; the ids of items are made from it. `seal` makes reasoning's `encrypted_content`, if
        that was requested. `namespaces`: namespace and name of functions, by what the model calls them."""
        self._id, self._tokenizer, self._seal, self._namespaces = id, tokenizer, seal, namespaces

    def __call__(self, kind: PartKind, index: int, call: CallDelta | None) -> OutputItem:
        number = f"{self._id}{index:04x}"
        if call is not None:
            namespace, name = self._namespaces.get(call.name or "", (None, call.name or ""))
            return CallOutput(f"fc_{number}", index, call.id or "", name, namespace)
        if kind == "reasoning":
            return ReasoningOutput(f"rs_{number}", index, self._seal)
        return MessageOutput(f"msg_{number}", index, self._listed)

    def _listed(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = logprobs.for_chat(self._tokenizer, tokens)["content"]
        return content
