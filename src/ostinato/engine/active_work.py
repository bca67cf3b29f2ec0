"""Work that runs: each text gets pages when its turn comes, and a chunk holds as many texts as it has rows for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields

from ostinato.backends.base import ChunkOutput, ChunkWant
from ostinato.decoder.flow import PagedFlow, PendingChunk
from ostinato.decoder.paged import PagedSequence, SequencePart
from ostinato.engine.work import PageCopyJob, Work, WorkRows, WorkText


@dataclass(frozen=True, slots=True, eq=False)
class ActiveText:
    """A text that has pages."""

    number: int
    text: WorkText
    sequence: PagedSequence


class ActiveWork:
    """Work that has left the queue; mutable, because it moves on from chunk to chunk."""

    def __init__(self, work: Work, flow: PagedFlow, slots: set[int] | None, *, whole: bool = False) -> None:
        """`slots`: for a recurrent model, the set of slots that texts occupy; None where a text needs no slot.
        `whole`: a text is not cut, because its rows see those that follow, as an encoder's do."""
        self.work, self._flow, self._slots, self._whole = work, flow, slots, whole
        texts, chunks = work.spec.texts, flow.chunks
        self.rows = max(chunks.rows_for(len(text.tokens)) for text in texts)
        self._copy = work.spec.copy  # None once it has begun
        self._n_begun = 0
        self._open: deque[ActiveText] = deque()

    @property
    def ready(self) -> bool:
        """Whether an open text, which has pages, has rows left to compute."""
        return bool(self._open)

    @property
    def done(self) -> bool:
        return self._n_begun == len(self.work.spec.texts) and not self._open

    def lease(self, free_slot: Callable[[int | None], int | None]) -> bool:
        """Lease pages for enough texts to fill the next chunk; False where too few pages are free."""
        texts = self.work.spec.texts
        n_open = sum(text.sequence.n_left for text in self._open)
        while self._n_begun < len(texts) and n_open < self.rows:
            slot = None
            if self._slots is not None:
                slot = None if self._open else free_slot(self._flow.memory.kept_slot if self._copy else None)
                if slot is None:
                    return True  # with recurrent state, one text runs at a time
            text = texts[self._n_begun]
            sequence = self._sequence(text, slot)
            if sequence is None:
                return False
            if slot is not None and self._slots is not None:
                self._slots.add(slot)
            self._open.append(ActiveText(self._n_begun, text, sequence))
            self._n_begun += 1
            n_open += sequence.n_left
        return True

    def begin(self) -> PendingChunk:
        """Start the next chunk."""
        if self._copy is not None and not self._open[0].sequence.n_left:
            return self._begin_copy(self._copy, self._open[0].sequence)
        parts, targets, spec = list[SequencePart](), list[int](), self.work.spec
        rows_left = self.rows
        outputs_left = self._flow.chunks.max_outputs if spec.kind == "logits" else rows_left
        for text in self._open:
            start, outputs = text.sequence.n_held, text.text.outputs
            stop = start + min(text.sequence.n_left, rows_left)
            asked = range(max(outputs.start, start), min(outputs.stop, stop))
            if len(asked) > outputs_left:
                asked = asked[:outputs_left]
                stop = asked.stop
            if stop == start or (self._whole and stop < len(text.text.tokens)):
                break
            parts.append(SequencePart(text.sequence, stop - start, range(asked.start - start, asked.stop - start)))
            targets += text.text.targets[asked.start - outputs.start : asked.stop - outputs.start]
            rows_left -= stop - start
            outputs_left -= len(asked)
        wanted = any(part.outputs for part in parts)
        want = ChunkWant(spec.kind, targets, spec.top, spec.n_tokens) if wanted else None
        return self._flow.begin(parts, self.rows, want)

    def finish(self, chunk: PendingChunk) -> None:
        """Deliver the rows of a finished chunk; texts that are complete release their pages."""
        output, row = self._flow.finish(chunk), 0
        for part, text in zip(chunk.parts, list(self._open), strict=False):
            if part.outputs:
                self.work.put(WorkRows(text.number, _rows(output, row, row + len(part.outputs))))
                row += len(part.outputs)
        while self._copy is None and self._open and not self._open[0].sequence.n_left:
            self._close(self._open.popleft(), complete=True)

    def close(self) -> None:
        """Release all pages and slots; none of its chunks may be running."""
        while self._open:
            self._close(self._open.popleft(), complete=False)

    def _begin_copy(self, copy: PageCopyJob, sequence: PagedSequence) -> PendingChunk:
        self._copy = None
        pages, slot = self._flow.memory.reserve.tables(sequence.lease), sequence.slot
        return self._flow.begin_copy(lambda: copy.run(pages, slot))

    def _sequence(self, text: WorkText, slot: int | None) -> PagedSequence | None:
        n, memory, copy = len(text.tokens), self._flow.memory, self._copy
        shared = text.outputs.start >= n - 1 and self.rows == self._flow.chunks.rows_for(n)
        if copy is not None:
            shared = copy.computes
        least_left = 0 if copy is not None and copy.computes else None
        sequence = memory.open(
            text.tokens,
            n,
            slot=slot,
            shared=shared,
            least_left=least_left,
            rope_set=text.rope_set,
            segments=text.segments,
        )
        if sequence is not None and copy is not None and not copy.computes:
            memory.fill(sequence)
        elif sequence is not None:
            memory.find(sequence)
        return sequence

    def _close(self, text: ActiveText, *, complete: bool) -> None:
        memory, sequence = self._flow.memory, text.sequence
        if complete and self.work.spec.copy is not None:
            memory.keep(sequence, sequence.tokens, len(sequence.tokens))
        else:
            memory.close(sequence)
        if self._slots is not None and sequence.slot is not None:
            self._slots.remove(sequence.slot)


def _rows(output: ChunkOutput, first: int, stop: int) -> ChunkOutput:
    found = {field.name: getattr(output, field.name) for field in fields(output)}
    return ChunkOutput(**{name: None if array is None else array[first:stop] for name, array in found.items()})
