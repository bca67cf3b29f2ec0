"""Work other than answers: compute rows of texts, or copy a text's keys and values to or from pages.

Work waits in the same queue as requests, and runs chunk by chunk between their prompts. The engine's thread puts rows
in, in the order of the texts; one other thread takes them out. Work ends once: after the last row, or with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ostinato.backends.base import ChunkOutput, OutputKind
from ostinato.engine.request import CLOSED, NOT_NUMBERS, MessageQueue
from ostinato.errors import BadInput, NotNumbers
from ostinato.files.unpack import Floats
from ostinato.loop.start import Helper


@dataclass(frozen=True, slots=True)
class WorkText:
    """Token ids, and which of their rows are asked for; for log-probabilities, the token that follows each of those.
    `rope_set` follows from the length of the whole text, of which `tokens` may be the beginning. `segments`: of an
    encoder's pair of texts, which of the two each token is of."""

    tokens: Sequence[int]
    outputs: range
    targets: Sequence[int] = ()
    rope_set: int = 0
    segments: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PageCopyJob:
    """A copy of one text's pages and state. `computes`: tokens that are not in memory are computed before the copy;
    else the copy fills all of them. `run` gets the page tables and the slot; the text is kept afterwards."""

    run: Callable[[Sequence[Sequence[int]], int | None], None]
    computes: bool


@dataclass(frozen=True, slots=True)
class WorkSpec:
    """Checked texts and what to compute for their rows (`ChunkWant`); or one text and its copy."""

    texts: Sequence[WorkText]
    kind: OutputKind = "hidden"
    top: int = 0
    n_tokens: int | None = None
    copy: PageCopyJob | None = None


class WorkRows(NamedTuple):
    """The next rows of a text, by its number."""

    text: int
    output: ChunkOutput


class Work:
    """Accepted work. Read it once, to its end: `for rows in work`; a reader that stops before the end cancels it."""

    def __init__(self, spec: WorkSpec, cancel: Callable[[Work], None], helper: Helper | None) -> None:
        self.spec = spec
        self.ended = False
        self._cancel = cancel
        self._messages: MessageQueue[WorkRows | Exception | None] = MessageQueue(helper)  # None: all rows have come

    def cancel(self) -> None:
        """End it as soon as possible; no effect after its end. From any thread."""
        if not self.ended:
            self._cancel(self)

    def __iter__(self) -> Iterator[WorkRows]:
        try:
            while (message := self._messages.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                if not all(np.isfinite(values).all() for values in _floats(message.output)):
                    raise NotNumbers(NOT_NUMBERS)
                yield message
        finally:
            self.cancel()

    # The engine's side: called on its thread alone

    def put(self, rows: WorkRows) -> None:
        """Deliver the next rows; no effect after the end."""
        if not self.ended:
            self._messages.put(rows)

    def end(self, error: Exception | None = None, *, complete: bool = False) -> None:
        """End after the last row (`complete`), with an error, or as cancelled; no effect after the end."""
        if not self.ended:
            self.ended = True
            self._messages.put(None if complete else error or BadInput(CLOSED))


def _floats(output: ChunkOutput) -> list[Floats]:
    made = (output.hidden, output.logits, output.logprobs)
    return [values for values in made if values is not None]
