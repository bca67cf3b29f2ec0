"""Memory of models with both attention and recurrent layers: a KV cache and recurrent states, kept in step (HY)."""

from __future__ import annotations

from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.memory.coordinator.cursor import (
    CursorStep,
    KVPlace,
    PreparedBatch,
    RecurrentPlace,
    WorstCase,
    failed,
)
from ostinato.decoder.cells.memory.coordinator.interface import Cursor, Update
from ostinato.decoder.cells.memory.coordinator.splits import refuse_coupling, split_equal, split_seq
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.recurrent import RecurrentMemory
from ostinato.decoder.cells.memory.status import combine


class HybridCoordinator:
    """Both parts see the same ubatches; a sequence operation changes both or neither (HY-1..7).

    The recurrent part checks a call before it changes anything, so it is enough to check the attention part first.
    """

    def __init__(self, attention: KVCache, recurrent: RecurrentMemory) -> None:
        self.attention = attention
        self.recurrent = recurrent

    @property
    def can_shift(self) -> bool:
        return self.attention.can_shift

    def prepare_update(self, optimise: bool) -> Update:
        status = combine(self.recurrent.prepare_update(optimise), self.attention.prepare_update(optimise))
        return Update(status, self.attention.apply_update)

    def prepare_batch(self, splitter: Splitter, n_ubatch: int, all_outputs: bool) -> Cursor:
        ubatches = self._split(splitter, n_ubatch, all_outputs)
        # Preparing changes nothing: when the second part has no room, there is nothing to undo in the first (HY-2).
        if ubatches is None or (runs := self.recurrent.prepare(ubatches)) is None:
            return failed()
        if (slots := self.attention.prepare(ubatches)) is None:
            return failed()
        return PreparedBatch(
            [
                CursorStep(
                    ubatch,
                    attention=KVPlace(self.attention, ubatch, slot),
                    recurrent=RecurrentPlace(self.recurrent, ubatch, run),
                )
                for ubatch, slot, run in zip(ubatches, slots, runs, strict=True)
            ]
        )

    def prepare_full(self) -> Cursor:
        return WorstCase([self.attention], self.recurrent)

    def seq_rm(self, s: int | None, p0: int | None = None, p1: int | None = None) -> bool:
        """The recurrent part comes first: if it cannot remove the positions, nothing changes (HY-4)."""
        self.attention.check_rm(s)
        return self.recurrent.seq_rm(s, p0, p1) and self.attention.seq_rm(s, p0, p1)

    def seq_cp(self, a: int, b: int, p0: int | None = None, p1: int | None = None) -> None:
        self.attention.check_cp(a, b, p0, p1)
        self.recurrent.seq_cp(a, b, p0, p1)
        self.attention.seq_cp(a, b, p0, p1)

    def seq_keep(self, s: int) -> None:
        self.attention.check_keep(s)
        self.recurrent.seq_keep(s)
        self.attention.seq_keep(s)

    def seq_add(self, s: int, p0: int | None, p1: int | None, distance: int) -> None:
        self.attention.check_add(s, p0, p1, distance)
        self.recurrent.seq_add(s, p0, p1, distance)
        self.attention.seq_add(s, p0, p1, distance)

    def seq_div(self, s: int, p0: int | None, p1: int | None, divisor: int) -> None:
        self.attention.check_div(s, p0, p1, divisor)
        self.recurrent.seq_div(s, p0, p1, divisor)
        self.attention.seq_div(s, p0, p1, divisor)

    def clear(self, data: bool = False) -> None:
        self.attention.clear(data)
        self.recurrent.clear(data)

    def pos_min(self, s: int) -> int | None:
        """The higher of the parts' lowest positions; None when either part has nothing (HY-6)."""
        attention, recurrent = self.attention.pos_min(s), self.recurrent.pos_min(s)
        return None if attention is None or recurrent is None else max(attention, recurrent)

    def pos_max(self, s: int) -> int | None:
        """The lower of the parts' highest positions; None when either part has nothing (HY-6)."""
        attention, recurrent = self.attention.pos_max(s), self.recurrent.pos_max(s)
        return None if attention is None or recurrent is None else min(attention, recurrent)

    def _split(self, splitter: Splitter, n_ubatch: int, all_outputs: bool) -> list[Ubatch] | None:
        """The split that both parts can take (SP-15)."""
        if not self.attention.unified:
            refuse_coupling(splitter)
        if all_outputs:
            return split_seq(splitter, n_ubatch)
        keep_tail = self.recurrent.n_keep_tail
        return split_equal(splitter, n_ubatch, sequential=not self.attention.unified, n_keep_tail=keep_tail)
