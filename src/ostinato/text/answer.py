"""Splits an answer's text into content, reasoning and tool calls while it arrives.

`AnswerReader` passes text through `reasoning.py` and `tools.py` and returns deltas, as a stream of a chat needs them;
joined, they are the message. Nothing here knows about tokens or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from ostinato.options import Sampling


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a tool call: the first of a call has its id and name; `arguments` is the next part of its JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """One of three: content, text of the model's reasoning, or a part of a call."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


class Parser(Protocol):
    """Parses text as it arrives."""

    def feed(self, text: str) -> list[Delta]:
        """The deltas of the text so far; text that may still become a marker is held back."""

    def finish(self) -> list[Delta]:
        """The text that was held back, when the text has ended."""


class AnswerReader:
    """Reasoning first, then calls: either parser may be absent.

    >>> AnswerReader().feed("hello")
    [Delta(content='hello', reasoning='', call=None)]
    """

    def __init__(
        self, reasoning: Parser | None = None, calls: Parser | None = None, *, most_calls: int | None = None
    ) -> None:
        """`most_calls`: calls beyond this number are left out."""
        self._reasoning, self._calls, self._most_calls = reasoning, calls, most_calls
        self.n_calls = 0

    def feed(self, text: str) -> list[Delta]:
        """The deltas of a piece of text."""
        plain = [Delta(content=text)] if text else []
        return self._read(plain if self._reasoning is None else self._reasoning.feed(text))

    def finish(self) -> list[Delta]:
        """The last deltas, when the text has ended."""
        held = [] if self._reasoning is None else self._reasoning.finish()
        return self._read(held) + ([] if self._calls is None else self._counted(self._calls.finish()))

    def _read(self, deltas: Iterable[Delta]) -> list[Delta]:
        read: list[Delta] = []
        for delta in deltas:
            read += self._calls.feed(delta.content) if delta.content and self._calls is not None else [delta]
        return self._counted(read)

    def _counted(self, deltas: list[Delta]) -> list[Delta]:
        most = self._most_calls
        kept = [delta for delta in deltas if delta.call is None or most is None or delta.call.index < most]
        self.n_calls = max([self.n_calls, *(delta.call.index + 1 for delta in kept if delta.call is not None)])
        return kept


@dataclass(frozen=True, slots=True)
class GenerationInput:
    """One answer to generate.

    Attributes:
        ids: the prompt's tokens.
        sampling: how tokens are sampled.
        fresh: whether the answer is a text of its own, as in a conversation, and does not continue the prompt's.
        show: special tokens whose text appears in the answer, because its reader parses them.
        reader: makes the reader of the answer's text.
    """

    ids: list[int]
    sampling: Sampling
    fresh: bool
    show: tuple[str, ...] = ()
    reader: Callable[[], AnswerReader] = AnswerReader
