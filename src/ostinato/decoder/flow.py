"""Runs parts of sequences through the backend that decodes, over the paged memory kind.

A chunk of a prompt, a text to score or embed, a sequence to save: `begin` starts it as a job beside the loop, and
`finish` takes its results when the job is done, so the caller never waits for a device. A failed chunk records
no positions. Batches that need cells use `cells/decoder.py`, which has the full order of the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ostinato.backends.base import ChunkOutput, Chunks, ChunkWant, SequenceCopy
from ostinato.cache.snapshots import StateSnapshot
from ostinato.decoder.paged import PagedSequences, SequencePart
from ostinato.files.unpack import Bytes
from ostinato.loop.start import PendingWork


@dataclass(slots=True, eq=False)
class PendingChunk:
    """A chunk that the device computes; mutable, because its job fills it in."""

    parts: Sequence[SequencePart]
    returned: bool = False  # the host's part is done; on a GPU the device's may not be
    output: ChunkOutput | None = None
    work: PendingWork | None = None
    # Of recurrent models: the snapshots that its parts begin at, held until their copies are done, and what was read
    # of the states after a part.
    begins_at: Sequence[StateSnapshot] = ()
    states: list[tuple[SequencePart, Sequence[Bytes]]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.work is not None and self.work.done()


class PagedFlow:
    """Chunks over pages. `beside` runs a job beside the loop and returns at once. `copy`: of a recurrent model's
    states, where snapshots of them are kept."""

    def __init__(
        self,
        memory: PagedSequences,
        chunks: Chunks,
        beside: Callable[[Callable[[], None]], PendingWork],
        copy: SequenceCopy | None = None,
    ) -> None:
        self.memory, self.chunks, self._beside, self._copy = memory, chunks, beside, copy

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
        begun = [(part.sequence.slot, at) for part in parts if (at := part.sequence.begins_at) is not None]
        kept = [part for part in parts if self._copy is not None and self.memory.takes_snapshot(part)]
        pending = PendingChunk(parts, begins_at=[snapshot for _, snapshot in begun])

        def run() -> ChunkOutput:
            for slot, snapshot in begun:
                assert self._copy is not None
                assert slot is not None
                self._copy.write_states(slot, snapshot.states)
            output = chunks.run(planned, rows, want)
            if first is not None:
                chunks.first(first)
            for part in kept:
                assert self._copy is not None
                assert part.sequence.slot is not None
                pending.states.append((part, self._copy.read_states(part.sequence.slot)))
            return output

        return self._begin(pending, run)

    def begin_copy(self, copy: Callable[[], None]) -> PendingChunk:
        """Start a copy of pages, out of the backend's store or into it."""

        def run() -> ChunkOutput:
            copy()
            return ChunkOutput()

        return self._begin(PendingChunk(()), run)

    def _begin(self, pending: PendingChunk, job: Callable[[], ChunkOutput]) -> PendingChunk:
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
        for part, states in pending.states:
            self.memory.keep_states(part, states)
        return pending.output or ChunkOutput()
