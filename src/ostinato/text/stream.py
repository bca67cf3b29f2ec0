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

    __slots__ = ("_characters", "_held", "_longest", "_show", "_start", "_stop", "_stopped", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, at_start: bool = True, show: Collection[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._show = frozenset(id for id in tokenizer.hidden if tokenizer.texts[id] in show) if show else frozenset()
        self._stop = tuple(s for s in stop if s)
        self._longest = max((len(s) for s in self._stop), default=0)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._start = at_start
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met: the text before it has been returned, and nothing follows."""
        return self._stopped

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
        if self._stopped:
            return ""
        held = self._held + text
        met = min((at for at in map(held.find, self._stop) if at >= 0), default=None)
        maybe = len(held) if last else self._open_end(held)
        if met is not None and met <= maybe:
            self._stopped = True
            self._held = ""
            return held[:met]
        self._held = held[maybe:]
        return held[:maybe]

    def _open_end(self, text: str) -> int:
        """Where the earliest stop string that `text` may still be inside of begins; its length where there is none."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[at:]) for stop in self._stop):
                return at
        return len(text)
