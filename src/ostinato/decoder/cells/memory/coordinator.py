"""The decoder's one interface to memory: the caches and recurrent states that a model has, kept in step (MC-1..9, HY).

A model has a cache for layers that see everything, perhaps a small one for windowed layers (SW-6), perhaps recurrent
states, or nothing if it is an encoder. All parts see the same ubatches, and a sequence operation changes all or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.memory.cursor import MemoryPart, PreparedBatch, failed
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.recurrent import RecurrentMemory
from ostinato.decoder.cells.memory.sequence_ops import PositionChange, PositionSpan, SequenceMemory
from ostinato.decoder.cells.memory.splits import refuse_coupling, split_equal, split_seq, split_simple
from ostinato.decoder.cells.memory.status import Status, combine
from ostinato.errors import AllocationFailed, ComputeFailed, InvalidBatch, NoSlot


class Coordinator(SequenceMemory):
    """Memory of any kind."""

    def __init__(
        self,
        full: KVCache | None = None,
        windowed: KVCache | None = None,
        recurrent: RecurrentMemory | None = None,
    ) -> None:
        self.full, self.windowed, self.recurrent = full, windowed, recurrent
        self._caches = [cache for cache in (full, windowed) if cache is not None]
        # In the order in which they are asked for room (HY-3) and for removals (HY-4); calls are checked in the other.
        self._parts: list[RecurrentMemory | KVCache] = [*([] if recurrent is None else [recurrent]), *self._caches]

    @property
    def can_shift(self) -> bool:
        """Whether all caches can, and are equally large (HY-7); recurrent states always can (RM-18)."""
        return all(cache.can_shift for cache in self._caches) and self._are_equally_large

    # Updates and batches

    def prepare_update(self, optimise: bool) -> Status:
        """Whether work is pending, which `apply_update` would carry out."""
        return reduce(combine, (part.prepare_update(optimise) for part in self._parts), Status.NO_UPDATE)

    def apply_update(self) -> None:
        """Carry out pending work; raises where it fails."""
        for cache in self._caches:
            cache.apply_update()

    def prepare_batch(self, splitter: Splitter, n_ubatch: int, all_outputs: bool) -> PreparedBatch:
        """Split the batch and find room for all of it; InvalidBatch where it can never fit (MC-6)."""
        cursors = (self._prepare(ubatches) for ubatches in self._splits(splitter, n_ubatch, all_outputs))
        return next((cursor for cursor in cursors if not cursor.status.is_failure), failed())

    def prepare_full(self) -> tuple[int, ...]:
        """The shape of the worst case, with all streams, for reserving (MC-4)."""
        counts = [count for cache in self._caches for count in (cache.size, len(cache.streams))]
        return (*counts, *(() if self.recurrent is None else (0, self.recurrent.size)))

    # Sequence operations: checked in every part before any changes (HY-5)

    def seq_rm(self, s: int | None, p0: int | None = None, p1: int | None = None) -> bool:
        """Recurrent states come first: if they cannot forget the positions, nothing changes (HY-4)."""
        if s is not None:
            self._check_id(s)
        return all(part.seq_rm(s, p0, p1) for part in self._parts)

    def seq_cp(self, a: int, b: int, p0: int | None = None, p1: int | None = None) -> None:
        for part in reversed(self._parts):
            part.check_cp(a, b, p0, p1)
        for part in self._parts:
            part.seq_cp(a, b, p0, p1)

    def seq_keep(self, s: int) -> None:
        self._check_id(s)
        for part in self._parts:
            part.seq_keep(s)

    def move(self, s: int, span: PositionSpan, change: PositionChange) -> None:
        if change.changes(span) and not self._are_equally_large:
            sizes = " and ".join(str(cache.size) for cache in self._caches)
            raise InvalidBatch(
                f"positions cannot be shifted or divided: the caches have {sizes} cells",  # HY-7
                reason="shift_unsupported",
            )
        for part in reversed(self._parts):
            part.check_move(s, span, change)
        for part in self._parts:
            part.move(s, span, change)

    def clear(self, data: bool = False) -> None:
        for part in self._parts:
            part.clear(data)

    def pos_min(self, s: int) -> int | None:
        """The highest of the parts' lowest positions; None when a part has nothing (HY-6)."""
        return _extreme(max, [part.pos_min(s) for part in self._telling])

    def pos_max(self, s: int) -> int | None:
        """The lowest of the parts' highest positions; None when a part has nothing (HY-6)."""
        return _extreme(min, [part.pos_max(s) for part in self._telling])

    # Inside

    @property
    def _telling(self) -> list[KVCache | RecurrentMemory]:
        """The parts that positions come from; of two caches the windowed one, which drops old ones first (HY-6)."""
        return [part for part in self._parts if part is not self.full or self.windowed is None]

    @property
    def _are_equally_large(self) -> bool:
        return len({cache.size for cache in self._caches}) <= 1

    def _check_id(self, s: int) -> None:
        for part in reversed(self._parts):
            part.check_id(s)

    def _splits(self, splitter: Splitter, n_ubatch: int, all_outputs: bool) -> Iterator[list[Ubatch] | None]:
        """The splits that all parts can take, in the order in which they are tried (SP-15)."""
        has_streams = self.full is not None and not self.full.unified
        if has_streams:
            refuse_coupling(splitter)
        if self.recurrent is not None and all_outputs:
            yield split_seq(splitter, n_ubatch)
        elif self.recurrent is not None:
            sequential = self.full is None or has_streams
            yield split_equal(splitter, n_ubatch, sequential=sequential, n_keep_tail=self.recurrent.n_keep_tail)
        elif has_streams:
            yield split_equal(splitter, n_ubatch, sequential=True)
        else:
            yield split_simple(splitter, n_ubatch)
            if self.windowed is not None:
                # With an equal split, windows may have moved far enough to free the cells that a ubatch needs.
                yield split_equal(splitter, n_ubatch, sequential=False)

    def _prepare(self, ubatches: list[Ubatch] | None) -> PreparedBatch:
        """A place in every part, or in none: preparing changes nothing (HY-2, HY-3)."""
        if ubatches is None:
            return failed()
        found: list[tuple[MemoryPart[Any], Sequence[Any]]] = []
        for part in self._parts:
            places = part.prepare(ubatches)
            if places is None:
                return failed()
            found.append((part, places))
        return PreparedBatch(ubatches, sorted(found, key=lambda each: each[0] is self.recurrent))


def _extreme(choose: Callable[[list[int]], int], found: list[int | None]) -> int | None:
    positions = [position for position in found if position is not None]
    return choose(positions) if positions and len(positions) == len(found) else None


def flush(memory: Coordinator) -> bool:
    """Carry out pending work; returns whether there was any, which invalidates graphs (D-11, MC-5, UP-8)."""
    status = memory.prepare_update(optimise=False)
    if status is Status.FAILED_PREPARE:
        raise AllocationFailed("memory cannot prepare its pending update", reason="update")  # MC-5
    if status is Status.FAILED_COMPUTE:
        raise ComputeFailed("memory cannot compute its pending update", reason="update")  # MC-5
    if status is Status.SUCCESS:
        memory.apply_update()
    return status is Status.SUCCESS


def prepare_with_retry(
    memory: Coordinator,
    splitter: Splitter,
    n_ubatch: int,
    all_outputs: bool,
    *,
    on_compaction: Callable[[], None] = lambda: None,
) -> PreparedBatch:
    """Find room for the batch; if there is none, ask memory once to compact itself, and retry (D-12, MC-5).

    `on_compaction` is called when memory was compacted: that invalidates graphs built before (UP-8).

    Raises NoSlot without room, AllocationFailed for an unexpected status, InvalidBatch where the batch can never
    fit. No sequence has changed either way.
    """
    cursor = memory.prepare_batch(splitter, n_ubatch, all_outputs)
    if cursor.status is Status.FAILED_PREPARE and memory.prepare_update(optimise=True) is Status.SUCCESS:
        memory.apply_update()
        on_compaction()
        cursor = memory.prepare_batch(splitter, n_ubatch, all_outputs)
    if cursor.status is Status.FAILED_PREPARE:
        raise NoSlot(
            "memory has no room for the batch; retry later, with a smaller batch, or after removing sequences",  # D-12
            reason="no_slot",
        )
    if cursor.status is not Status.SUCCESS:
        raise AllocationFailed(f"memory answered {cursor.status.value!r} to a batch", reason="status")  # MC-5
    return cursor
