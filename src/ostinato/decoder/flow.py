"""Runs parts of sequences through the backend that decodes, over the paged memory kind.

A chunk of a prompt, a text to score or embed, a sequence to save: `begin` starts it as a job beside the loop, and
`finish` takes its results when the job is done, so the caller never waits for a device. A failed chunk records
no positions. Batches that need cells use `cells/decoder.py`, which has the full order of the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ostinato.backends.base import ChunkOutput, Chunks, ChunkWant
from ostinato.decoder.paged import PagedSequences, SequencePart
from ostinato.loop.start import PendingWork


@dataclass(slots=True, eq=False)
class PendingChunk:
    """A chunk that the device computes; mutable, because its job fills it in."""

    parts: Sequence[SequencePart]
    returned: bool = False  # the host's part is done; on a GPU the device's may not be
    output: ChunkOutput | None = None
    work: PendingWork | None = None

    @property
    def done(self) -> bool:
        return self.work is not None and self.work.done()


class PagedFlow:
    """Chunks over pages. `beside` runs a job beside the loop and returns at once."""

    def __init__(
        self, memory: PagedSequences, chunks: Chunks, beside: Callable[[Callable[[], None]], PendingWork]
    ) -> None:
        self.memory, self.chunks, self._beside = memory, chunks, beside

    def begin(
        self,
        parts: Sequence[SequencePart],
        rows: int,
        want: ChunkWant | None = None,
        *,
        first: int | None = None,
    ) -> PendingChunk:
        """Start parts of sequences as a chunk of `rows` rows. `first`: the slot whose first token is then sampled."""
        chunks, planned = self.chunks, [self.memory.plan(part) for part in parts]

        def run() -> ChunkOutput:
            output = chunks.run(planned, rows, want)
            if first is not None:
                chunks.first(first)
            return output

        return self._begin(parts, run)

    def begin_copy(self, copy: Callable[[], None]) -> PendingChunk:
        """Start a copy of pages, out of the backend's store or into it."""

        def run() -> ChunkOutput:
            copy()
            return ChunkOutput()

        return self._begin((), run)

    def _begin(self, parts: Sequence[SequencePart], job: Callable[[], ChunkOutput]) -> PendingChunk:
        pending = PendingChunk(parts)

        def run() -> None:
            try:
                pending.output = job()
            finally:
                pending.returned = True

        pending.work = self._beside(run)
        return pending

    def finish(self, pending: PendingChunk) -> ChunkOutput:
        """Apply a finished chunk to memory and return its outputs; raises the exception that it raised."""
        assert pending.work is not None
        pending.work.result(0)
        for part in pending.parts:
            self.memory.apply(part)
        return pending.output or ChunkOutput()
