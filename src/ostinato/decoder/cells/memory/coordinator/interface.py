"""The decoder's interface to any memory, and how it handles the results (MC-1..9, D-12).

`kv.py`, `two_cache.py`, `recurrent.py` and `hybrid.py` each implement `Memory`; `cursor.py` is the cursor they share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ostinato.cache.state_run import StateRun
from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.memory.coordinator.cursor import KVPlace
from ostinato.decoder.cells.memory.status import Status
from ostinato.errors import AllocationFailed, ComputeFailed, NoSlot


@dataclass(frozen=True, slots=True)
class Update:
    """Pending work, if there is any; `apply` carries it out and raises where it fails."""

    status: Status
    apply: Callable[[], None]


class Cursor(Protocol):
    """The ubatches of a prepared batch, one after the other. Only `apply` changes memory (MC-7)."""

    @property
    def status(self) -> Status: ...

    @property
    def ubatches(self) -> tuple[Ubatch, ...]:
        """All of them, in order; none after a failure."""

    @property
    def ubatch(self) -> Ubatch:
        """The current one."""

    @property
    def attention(self) -> KVPlace | None:
        """Where the current ubatch goes in the cache of the full attention layers, where there is one."""

    @property
    def windowed(self) -> KVPlace | None:
        """Where the current ubatch goes in the cache of the windowed layers, where they have one of their own."""

    @property
    def recurrent(self) -> StateRun | None:
        """What the current ubatch's run does to recurrent states, where there are any."""

    @property
    def n_kv(self) -> int:
        """Cells that full attention reads, once the current ubatch is applied; 0 without attention (KV-13)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an applied ubatch: equal iff memory lets two of them run in the same graph (GS-2)."""

    def apply(self) -> None:
        """Put the current ubatch into every part of memory, or into none."""

    def roll_back(self) -> None:
        """Undo `apply` of the current ubatch; no effect where it was not applied (KV-14, RM-19)."""

    def advance(self) -> bool:
        """Move to the next ubatch, after the current one was applied; False at the end."""


class Memory(Protocol):
    """A memory of any kind. Positions [p0, p1): None stands for the beginning, or for no end."""

    @property
    def can_shift(self) -> bool: ...

    def prepare_update(self, optimise: bool) -> Update: ...

    def prepare_batch(self, splitter: Splitter, n_ubatch: int, all_outputs: bool) -> Cursor:
        """Split the batch and find room for all of it; InvalidBatch where it can never fit (MC-6)."""

    def prepare_full(self) -> Cursor:
        """The worst case, for reserving; it has no ubatch (MC-4)."""

    def seq_rm(self, s: int | None, p0: int | None = None, p1: int | None = None) -> bool: ...
    def seq_cp(self, a: int, b: int, p0: int | None = None, p1: int | None = None) -> None: ...
    def seq_keep(self, s: int) -> None: ...
    def seq_add(self, s: int, p0: int | None, p1: int | None, distance: int) -> None: ...
    def seq_div(self, s: int, p0: int | None, p1: int | None, divisor: int) -> None: ...
    def clear(self, data: bool = False) -> None: ...
    def pos_min(self, s: int, /) -> int | None: ...
    def pos_max(self, s: int, /) -> int | None: ...


def flush(memory: Memory) -> bool:
    """Carry out pending work; returns whether there was any, which invalidates graphs (D-11, MC-5, UP-8)."""
    update = memory.prepare_update(optimise=False)
    if update.status is Status.FAILED_PREPARE:
        raise AllocationFailed("memory cannot prepare its pending update (MC-5)", reason="update")
    if update.status is Status.FAILED_COMPUTE:
        raise ComputeFailed("memory cannot compute its pending update (MC-5)", reason="update")
    if update.status is Status.SUCCESS:
        update.apply()
    return update.status is Status.SUCCESS


def prepare_with_retry(
    memory: Memory,
    splitter: Splitter,
    n_ubatch: int,
    all_outputs: bool,
    *,
    on_compaction: Callable[[], None] = lambda: None,
) -> Cursor:
    """Find room for the batch; if there is none, ask memory once to compact itself, and retry (D-12, MC-5).

    `on_compaction` is called when memory was compacted: that invalidates graphs built before (UP-8).

    Raises NoSlot without room, AllocationFailed for an unexpected status, InvalidBatch where the batch can never
    fit. No sequence has changed either way.
    """
    cursor = memory.prepare_batch(splitter, n_ubatch, all_outputs)
    if cursor.status is Status.FAILED_PREPARE and _optimise(memory):
        on_compaction()
        cursor = memory.prepare_batch(splitter, n_ubatch, all_outputs)
    if cursor.status is Status.FAILED_PREPARE:
        raise NoSlot(
            "memory has no room for the batch; retry later, with a smaller batch, or after removing sequences (D-12)",
            reason="no_slot",
        )
    if cursor.status is not Status.SUCCESS:
        raise AllocationFailed(f"memory answered {cursor.status.value!r} to a batch (MC-5)", reason="status")
    return cursor


def _optimise(memory: Memory) -> bool:
    """Ask memory to compact itself; whether it did anything."""
    update = memory.prepare_update(optimise=True)
    if update.status is not Status.SUCCESS:
        return False
    update.apply()
    return True
