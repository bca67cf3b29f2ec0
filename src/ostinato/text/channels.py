"""Answers that are several messages, each with a header: gpt-oss's channels (harmony) and Muse Glimmer's recipients.

A header says what a message is: reasoning, content, or a call. The header of a call is rewritten in one way, and
`call_parser.py` reads it behind; the text is untrusted, and what has no header is content.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from ostinato.text.answer import Delta
from ostinato.text.stream import open_end

MARKERS: Final = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|return|>", "<|call|>", "<|eom|>", "<|eot|>"),
)
CALL_BEGIN: Final = "<|start|>assistant to=functions."
CALL_HEADER: Final = "<|channel|>commentary json<|message|>"
_MESSAGE: Final = "<|message|>"
ENDS: Final = ("<|end|>", "<|return|>", "<|call|>", "<|eom|>", "<|eot|>", "<|start|>")
_MAX_HEADER: Final = 300  # characters; a longer text without a marker is no header
_WORD: Final = r"[\w.:-]+"
_HEADER: Final = re.compile(
    rf"\s*(?:<\|start\|>)?(?:assistant)?\s*(?:to=(?P<to>{_WORD})\s*)?"
    rf"(?:<\|channel\|>(?P<channel>\w+)(?:\s+to=(?P<to_last>{_WORD}))?(?:\s*<\|constrain\|>\s*\w+|\s+\w+)?\s*){{0,2}}"
)

MessageKind = Literal["reasoning", "content", "call"]


class ChannelParser:
    """Separates the messages of an answer; between two of one kind stands an empty line."""

    def __init__(self, *, in_content: bool = False) -> None:
        """`in_content`: the text continues a message that the user reads."""
        self._kind: MessageKind | None = "content" if in_content else None  # None in a header
        self._said: set[MessageKind] = set()
        self._fresh = not in_content  # nothing of this message was returned yet
        self._buffer = ""

    def feed(self, text: str) -> list[Delta]:
        """The deltas of the text so far."""
        self._buffer += text
        return self._read(last=False)

    def finish(self) -> list[Delta]:
        """The text that was held back, when the text has ended."""
        return self._read(last=True)

    def _read(self, *, last: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while self._buffer:
            if self._kind is None and not self._read_header(last, deltas):
                break
            at, end = min(((self._buffer.find(e), e) for e in ENDS if e in self._buffer), default=(-1, ""))
            keep = 0 if last else open_end(self._buffer, ENDS)
            text = self._buffer[: at if at >= 0 else len(self._buffer) - keep]
            deltas += self._delta(text)
            self._buffer = self._buffer[len(text) + len(end) :]
            if at < 0:
                break
            if self._kind == "call":
                deltas += [*self._no_arguments(), Delta(content="<|call|>")]
            self._kind, self._fresh = None, True
        return deltas + (self._no_arguments() if last and self._kind == "call" else [])

    def _no_arguments(self) -> list[Delta]:
        """The arguments of a call that ends without any."""
        return self._delta("{}") if self._fresh else []

    def _read_header(self, last: bool, deltas: list[Delta]) -> bool:
        """Read a header; False while it has not arrived. A text without one is content."""
        at = self._buffer.find(_MESSAGE)
        head = self._buffer[:at] if at >= 0 else self._buffer
        if at < 0 and last and not head.replace("<|start|>", "").removeprefix("assistant").strip():
            self._buffer = ""  # the beginning of a message that never came
            return False
        if at < 0 and not last and len(head) <= _MAX_HEADER:
            return False
        found = _HEADER.fullmatch(head) if at >= 0 else None
        if found is None:
            self._kind = "content"
            return True
        self._buffer = self._buffer[at + len(_MESSAGE) :]
        to = found["to"] or found["to_last"] or ""
        if to.startswith("functions."):
            self._kind = "call"
            deltas.append(Delta(content=f"{CALL_BEGIN}{to.removeprefix('functions.')}{CALL_HEADER}"))
        else:
            self._kind = "reasoning" if found["channel"] == "analysis" or to == "self" else "content"
        return True

    def _delta(self, text: str) -> list[Delta]:
        if not text or self._kind is None:
            return []
        if self._fresh and self._kind != "call" and self._kind in self._said:
            text = f"\n\n{text}"
        self._fresh = False
        self._said.add(self._kind)
        return [Delta(reasoning=text) if self._kind == "reasoning" else Delta(content=text)]
