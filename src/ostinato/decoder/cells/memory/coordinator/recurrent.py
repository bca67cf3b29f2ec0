"""Memory of recurrent states only."""

from __future__ import annotations

from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.cells.memory.coordinator.cursor import (
    CursorStep,
    PreparedBatch,
    RecurrentPlace,
    WorstCase,
    failed,
)
from ostinato.decoder.cells.memory.coordinator.interface import Cursor, Update
from ostinato.decoder.cells.memory.coordinator.splits import split_equal, split_seq
from ostinato.decoder.cells.memory.recurrent import RecurrentMemory


class RecurrentCoordinator:
    """No attention: sequence operations go to the recurrent memory, and its states decide the split (SP-15)."""

    def __init__(self, memory: RecurrentMemory) -> None:
        self.memory = memory
        self.seq_rm = memory.seq_rm
        self.seq_cp = memory.seq_cp
        self.seq_keep = memory.seq_keep
        self.seq_add = memory.seq_add
        self.seq_div = memory.seq_div
        self.clear = memory.clear
        self.pos_min = memory.pos_min
        self.pos_max = memory.pos_max

    @property
    def can_shift(self) -> bool:
        return self.memory.can_shift

    def prepare_update(self, optimise: bool) -> Update:
        return Update(self.memory.prepare_update(optimise), lambda: None)

    def prepare_batch(self, splitter: Splitter, n_ubatch: int, all_outputs: bool) -> Cursor:
        if all_outputs:
            ubatches = split_seq(splitter, n_ubatch)
        else:
            ubatches = split_equal(splitter, n_ubatch, sequential=True, n_keep_tail=self.memory.n_keep_tail)
        if ubatches is None or (runs := self.memory.prepare(ubatches)) is None:
            return failed()
        pairs = zip(ubatches, runs, strict=True)
        return PreparedBatch(
            [CursorStep(ubatch, recurrent=RecurrentPlace(self.memory, ubatch, run)) for ubatch, run in pairs]
        )

    def prepare_full(self) -> Cursor:
        return WorstCase([], self.memory)
