"""Memory of two KV caches: a full one for layers that see everything, and a small one for windowed layers (SW-6)."""

from __future__ import annotations

from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.memory import sequence_ops as ops
from ostinato.decoder.cells.memory.coordinator.cursor import CursorStep, KVPlace, PreparedBatch, WorstCase, failed
from ostinato.decoder.cells.memory.coordinator.interface import Cursor, Update
from ostinato.decoder.cells.memory.coordinator.splits import split_equal, split_simple
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.sequence_ops import PositionSpan
from ostinato.decoder.cells.memory.status import combine
from ostinato.errors import InvalidBatch


class TwoCacheCoordinator:
    """Both caches see the same ubatches; a sequence operation changes both or neither (HY-1..7)."""

    def __init__(self, full: KVCache, windowed: KVCache) -> None:
        self.full = full
        self.windowed = windowed
        # Positions come from the windowed cache, which drops old ones first (HY-6).
        self.pos_min = windowed.pos_min
        self.pos_max = windowed.pos_max

    @property
    def can_shift(self) -> bool:
        """Only where both can, and are equally large (HY-7)."""
        return self.full.can_shift and self.windowed.can_shift and self.full.size == self.windowed.size

    def prepare_update(self, optimise: bool) -> Update:
        status = combine(self.full.prepare_update(optimise), self.windowed.prepare_update(optimise))
        return Update(status, self._apply_update)

    def prepare_batch(self, splitter: Splitter, n_ubatch: int, all_outputs: bool) -> Cursor:
        if not self.full.unified:
            return self._prepare(split_equal(splitter, n_ubatch, sequential=True))
        simple = self._prepare(split_simple(splitter, n_ubatch))
        if not simple.status.is_failure:
            return simple
        # With an equal split, windows may have moved far enough to free the cells that a ubatch needs (SP-15).
        return self._prepare(split_equal(splitter, n_ubatch, sequential=False))

    def prepare_full(self) -> Cursor:
        return WorstCase([self.full, self.windowed])

    def seq_rm(self, s: int | None, p0: int | None = None, p1: int | None = None) -> bool:
        """Both parts, always (HY-4)."""
        for cache in self._both:
            cache.check_rm(s)
        for cache in self._both:
            cache.seq_rm(s, p0, p1)
        return True

    def seq_cp(self, a: int, b: int, p0: int | None = None, p1: int | None = None) -> None:
        for cache in self._both:
            cache.check_cp(a, b, p0, p1)
        for cache in self._both:
            cache.seq_cp(a, b, p0, p1)

    def seq_keep(self, s: int) -> None:
        for cache in self._both:
            cache.check_keep(s)
        for cache in self._both:
            cache.seq_keep(s)

    def seq_add(self, s: int, p0: int | None, p1: int | None, distance: int) -> None:
        if not ops.shifts_nothing(PositionSpan.of(p0, p1), distance):
            self._check_can_shift()
        for cache in self._both:
            cache.check_add(s, p0, p1, distance)
        for cache in self._both:
            cache.seq_add(s, p0, p1, distance)

    def seq_div(self, s: int, p0: int | None, p1: int | None, divisor: int) -> None:
        if not ops.divides_nothing(PositionSpan.of(p0, p1), divisor):
            self._check_can_shift()
        for cache in self._both:
            cache.check_div(s, p0, p1, divisor)
        for cache in self._both:
            cache.seq_div(s, p0, p1, divisor)

    def clear(self, data: bool = False) -> None:
        for cache in self._both:
            cache.clear(data)

    @property
    def _both(self) -> tuple[KVCache, KVCache]:
        return self.full, self.windowed

    def _prepare(self, ubatches: list[Ubatch] | None) -> PreparedBatch:
        """Slots in both caches, or in neither: preparing changes nothing (HY-2)."""
        if ubatches is None or (full := self.full.prepare(ubatches)) is None:
            return failed()
        if (windowed := self.windowed.prepare(ubatches)) is None:
            return failed()
        return PreparedBatch(
            [
                CursorStep(ubatch, attention=KVPlace(self.full, ubatch, a), windowed=KVPlace(self.windowed, ubatch, b))
                for ubatch, a, b in zip(ubatches, full, windowed, strict=True)
            ]
        )

    def _apply_update(self) -> None:
        for cache in self._both:
            cache.apply_update()

    def _check_can_shift(self) -> None:
        if not self.can_shift:
            raise InvalidBatch(
                f"positions cannot be shifted or divided: the caches have {self.full.size} and {self.windowed.size} "
                "cells, or one of them cannot shift (HY-7)",
                reason="shift_unsupported",
            )
