"""The memory of an encoder, which keeps nothing: a batch is one ubatch, and every row sees its whole text (EN-1)."""

from __future__ import annotations

from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.cells.memory.coordinator.cursor import CursorStep, PreparedBatch, WorstCase
from ostinato.decoder.cells.memory.coordinator.interface import Cursor, Update
from ostinato.decoder.cells.memory.coordinator.splits import split_simple
from ostinato.decoder.cells.memory.status import Status


class NoMemory:
    """Nothing is pending, nothing is in memory, and there is always room."""

    can_shift = False

    def prepare_update(self, optimise: bool) -> Update:
        return Update(Status.NO_UPDATE, lambda: None)

    def prepare_batch(self, splitter: Splitter, n_ubatch: int, all_outputs: bool) -> Cursor:
        return PreparedBatch([CursorStep(ubatch) for ubatch in split_simple(splitter, n_ubatch) or ()])

    def prepare_full(self) -> Cursor:
        return WorstCase([])

    def seq_rm(self, s: int | None, p0: int | None = None, p1: int | None = None) -> bool:
        return True

    def seq_cp(self, a: int, b: int, p0: int | None = None, p1: int | None = None) -> None: ...
    def seq_keep(self, s: int) -> None: ...
    def seq_add(self, s: int, p0: int | None, p1: int | None, distance: int) -> None: ...
    def seq_div(self, s: int, p0: int | None, p1: int | None, divisor: int) -> None: ...
    def clear(self, data: bool = False) -> None: ...

    def pos_min(self, s: int) -> int | None:
        return None

    def pos_max(self, s: int) -> int | None:
        return None
