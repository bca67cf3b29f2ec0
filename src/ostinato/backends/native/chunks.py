"""Chunks by the native loop: nothing is padded, because a row's bits are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ostinato.backends.base import CHUNK_ROWS, ChunkOutput, ChunkPart, ChunkWant, output_rows, rows_of_logits
from ostinato.backends.native.pages import PAGE_TOKENS
from ostinato.backends.native.plan import NativeStep, OutputsStruct, PartStruct
from ostinato.errors import InternalError
from ostinato.files.unpack import Floats
from ostinato.loop.plan import Buffer

Int32s = NDArray[np.int32]


class NativeChunks:
    """Chunks through the same packed weights as the steps; each goes between two of them."""

    n_copies = 0
    any_cut = True
    captured: Sequence[Buffer] = ()
    failures: Mapping[int, str] = MappingProxyType({})

    def __init__(self, native: NativeStep) -> None:
        self._native = native
        self.rows = native.chunk_rows
        self.max_outputs = rows_of_logits(native.vocab, self.rows)
        self._whole = not native.causal  # texts go through as a whole
        self._logits: Floats | None = None  # behind log-probabilities, from the first of them on

    def rows_for(self, n_prompt: int) -> int:
        return max(CHUNK_ROWS["cpu"], n_prompt) if self._whole else self.rows

    def run(self, parts: Sequence[ChunkPart], rows: int, want: ChunkWant | None = None) -> ChunkOutput:
        ids = np.array([token for part in parts for token in part.tokens], np.int32)
        self._check(parts, ids)
        pages = [_page_tables(part) for part in parts]
        slots = [-1 if part.slot is None else part.slot for part in parts]
        placed = [
            PartStruct(_at(own), len(part.tokens), part.start, slot, own.shape[1], part.rope_set)
            for part, own, slot in zip(parts, pages, slots, strict=True)
        ]
        asked = np.array(output_rows(parts, want, self.max_outputs, self._native.vocab), np.int32)
        targets = np.array(want.targets if want is not None else (), np.int32)
        output = self._room(len(asked), want)
        outputs = self._outputs(asked, targets, output, want)
        self._native.chunk((PartStruct * len(placed))(*placed), ids, self._segments(parts), outputs)
        return output

    def first(self, slot: int) -> None:
        self._native.first(slot)

    def _check(self, parts: Sequence[ChunkPart], ids: Int32s) -> None:
        if not 0 < len(ids) <= self.rows:
            raise InternalError(f"a chunk of {len(ids)} rows; there is room for 1 to {self.rows}")
        for part in parts:
            if len(part.page_tables) != self._native.n_groups:
                raise InternalError(f"{len(part.page_tables)} page tables; the layers have {self._native.n_groups}")
            n, n_pages = len(part.tokens), min(map(len, part.page_tables))
            if part.start + n > n_pages * PAGE_TOKENS:
                raise InternalError(f"{n} rows from {part.start} on do not fit into {n_pages} pages")
            if part.start + n > self._native.n_positions:
                raise InternalError(f"{n} rows from {part.start} on; there are {self._native.n_positions} positions")
            if self._native.recurs and part.slot is None:
                raise InternalError("a model that recurs has no state for a sequence without a slot")
            if self._whole and part.start:
                raise InternalError(f"a text of an encoder is cut at {part.start}, and its rows see each other")
        wrong = ids[(ids < 0) | (ids >= self._native.vocab)]
        if len(wrong):
            raise InternalError(f"a chunk has the id {wrong[0]}, and this model has {self._native.vocab}")

    def _segments(self, parts: Sequence[ChunkPart]) -> Int32s | None:
        """Which of two texts each row is of; None where all rows are of the first."""
        if not any(part.segments for part in parts):
            return None
        found = np.array([n for part in parts for n in (part.segments or [0] * len(part.tokens))], np.int32)
        n_rows, n_known = sum(len(part.tokens) for part in parts), self._native.n_segments
        if len(found) != n_rows or found.min() < 0 or found.max() >= n_known:
            raise InternalError(
                f"{len(found)} rows are of segments up to {found.max()}; {n_rows} of {n_known} are there"
            )
        return found

    def _room(self, n: int, want: ChunkWant | None) -> ChunkOutput:
        """The arrays that the chunk fills."""
        if want is None:
            return ChunkOutput()
        if want.kind == "hidden":
            return ChunkOutput(hidden=np.empty((n, self._native.hidden), np.float32))
        if want.kind == "logits":
            return ChunkOutput(logits=np.empty((n, self._native.vocab), np.float32))
        return ChunkOutput(
            logprobs=np.empty(n, np.float32),
            top_ids=np.empty((n, want.top), np.int32),
            top_logprobs=np.empty((n, want.top), np.float32),
        )

    def _outputs(self, asked: Int32s, targets: Int32s, output: ChunkOutput, want: ChunkWant | None) -> OutputsStruct:
        logits = output.logits
        if output.logprobs is not None:
            if self._logits is None:
                self._logits = np.empty((self.max_outputs, self._native.vocab), np.float32)
            logits = self._logits
        return OutputsStruct(
            *map(_at, (asked, output.hidden, logits, targets, output.logprobs, output.top_ids, output.top_logprobs)),
            len(asked),
            self.max_outputs if logits is not None else len(asked),
            0 if want is None else want.top,
            self._native.vocab if want is None else want.n_tokens or self._native.vocab,
        )


def _page_tables(part: ChunkPart) -> Int32s:
    """[groups, pages]; the tables of a sequence differ in length, and no page behind the end of one is used."""
    tables = np.zeros((len(part.page_tables), max(map(len, part.page_tables))), np.int32)
    for group, table in enumerate(part.page_tables):
        tables[group, : len(table)] = table
    return tables


def _at(array: NDArray[np.int32] | Floats | None) -> int | None:
    """Where an array lies; None where there is none."""
    return None if array is None else array.ctypes.data
