"""Text as it is generated: bytes of tokens become whole characters, and stop strings are never shown.

Built on the same map from ids to bytes as `Tokenizer.decode`, so that the pieces join to what one call would give.
Nothing here knows about models or requests.
"""

import codecs
from collections.abc import Collection, Sequence

from ostinato.text.tokenizer import Tokenizer


class TextStream:
    """The text of one growing list of ids, piece by piece.

    A piece never ends inside a character or inside what may still become a stop string; the pieces join to
    `tokenizer.decode(all ids, at_start=at_start)` cut before the first stop string, the one that begins first. Where
    a longer stop string that began earlier may still come, it is waited for. Each push costs the same, however long
    the text. Control tokens show nothing, but for those named by `show`: what marks a tool call, say.
    """

    __slots__ = ("_characters", "_held", "_show", "_start", "_stop", "_tokenizer", "met")

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, at_start: bool = True, show: Collection[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._show = frozenset(id for id in tokenizer.hidden if tokenizer.texts[id] in show) if show else frozenset()
        self._stop = tuple(s for s in stop if s)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._start = at_start
        self._held = ""
        self.met: str | None = None  # the stop string that ended the text: what is before it has been returned

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met: nothing follows."""
        return self.met is not None

    def push(self, id: int) -> str:
        """Take the next token; the text that is safe to show now, often empty."""
        piece = self._tokenizer.piece_bytes(id, start=self._start, special=id in self._show)
        # The first token with visible text ends the start of the text.
        self._start = self._start and id in self._tokenizer.hidden
        return self._release(self._characters.decode(piece), last=False)

    def finish(self) -> str:
        """What was held back, on a normal end of the text."""
        return self._release(self._characters.decode(b"", final=True), last=True)

    def _release(self, text: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        held = self._held + text
        # Of two that begin at one place the shorter is met first, as it is where they come character by character.
        met = min(((at, len(s), s) for s in self._stop if (at := held.find(s)) >= 0), default=None)
        maybe = len(held) if last else len(held) - open_end(held, self._stop)
        if met is not None and met[0] <= maybe:
            self.met = met[2]
            self._held = ""
            return held[: met[0]]
        self._held = held[maybe:]
        return held[:maybe]


def open_end(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of a text may still become a marker.

    >>> open_end("so <tool", ["<tool_call>"])
    5
    """
    longest = max((len(marker) for marker in markers), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[len(text) - n :]) for marker in markers):
            return n
    return 0
