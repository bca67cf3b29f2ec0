"""Memory of one KV cache, shared by all sequences or with a stream for each."""

from __future__ import annotations

from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.cells.memory.coordinator.cursor import CursorStep, KVPlace, PreparedBatch, WorstCase, failed
from ostinato.decoder.cells.memory.coordinator.interface import Cursor, Update
from ostinato.decoder.cells.memory.coordinator.splits import split_equal, split_simple
from ostinato.decoder.cells.memory.kv_cache import KVCache


class KVCoordinator:
    """Attention only: sequence operations go to the cache, and its streams decide the split (SP-15)."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.seq_rm = cache.seq_rm
        self.seq_cp = cache.seq_cp
        self.seq_keep = cache.seq_keep
        self.seq_add = cache.seq_add
        self.seq_div = cache.seq_div
        self.clear = cache.clear
        self.pos_min = cache.pos_min
        self.pos_max = cache.pos_max

    @property
    def can_shift(self) -> bool:
        return self.cache.can_shift

    def prepare_update(self, optimise: bool) -> Update:
        return Update(self.cache.prepare_update(optimise), self.cache.apply_update)

    def prepare_batch(self, splitter: Splitter, n_ubatch: int, all_outputs: bool) -> Cursor:
        if self.cache.unified:
            ubatches = split_simple(splitter, n_ubatch)
        else:
            ubatches = split_equal(splitter, n_ubatch, sequential=True)
        if ubatches is None or (slots := self.cache.prepare(ubatches)) is None:
            return failed()
        pairs = zip(ubatches, slots, strict=True)
        return PreparedBatch(
            [CursorStep(ubatch, attention=KVPlace(self.cache, ubatch, slot)) for ubatch, slot in pairs]
        )

    def prepare_full(self) -> Cursor:
        return WorstCase([self.cache])
