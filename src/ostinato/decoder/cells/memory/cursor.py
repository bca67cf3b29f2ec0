"""The cursor over a prepared batch (MC-7): ubatches, each with its place in each part of memory. Only `apply` changes
memory, in the order of HY-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.cache.state_run import StateRun
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.recurrent import RecurrentMemory
from ostinato.decoder.cells.memory.slots import Slot
from ostinato.decoder.cells.memory.status import Status
from ostinato.errors import InternalError


@dataclass(frozen=True, slots=True, eq=False)
class KVPlace:
    """Where one ubatch goes in one cache. `n_kv` is valid once the ubatch is applied."""

    cache: KVCache
    ubatch: Ubatch
    slot: Slot

    @property
    def n_kv(self) -> int:
        return self.cache.n_kv(self.slot)

    def apply(self) -> None:
        self.cache.apply(self.ubatch, self.slot)

    def roll_back(self) -> None:
        self.cache.roll_back(self.ubatch, self.slot)


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentPlace:
    """Where one ubatch goes in recurrent memory."""

    memory: RecurrentMemory
    ubatch: Ubatch
    run: StateRun

    def apply(self) -> None:
        self.memory.apply(self.ubatch, self.run)

    def roll_back(self) -> None:
        self.memory.roll_back(self.ubatch, self.run)


@dataclass(frozen=True, slots=True, eq=False)
class CursorStep:
    """One ubatch and its place in each part that the memory has."""

    ubatch: Ubatch
    attention: KVPlace | None = None
    windowed: KVPlace | None = None
    recurrent: RecurrentPlace | None = None

    @property
    def parts(self) -> list[KVPlace | RecurrentPlace]:
        """In the order in which they are applied (HY-3)."""
        return [part for part in (self.attention, self.windowed, self.recurrent) if part is not None]

    @property
    def shape(self) -> tuple[int, ...]:
        shape: list[int] = []
        for place in (self.attention, self.windowed):
            shape += [] if place is None else [place.n_kv, len(place.slot.streams)]
        if self.recurrent is not None:
            shape += [self.recurrent.run.head, self.recurrent.run.count]
        return tuple(shape)


def kv_places(cache: KVCache | None, ubatches: Sequence[Ubatch]) -> Sequence[KVPlace | None] | None:
    """The places of ubatches in a cache, where there is one; None when it has no room for them."""
    if cache is None:
        return [None] * len(ubatches)
    slots = cache.prepare(ubatches)
    return None if slots is None else [KVPlace(cache, *pair) for pair in zip(ubatches, slots, strict=True)]


def recurrent_places(
    memory: RecurrentMemory | None, ubatches: Sequence[Ubatch]
) -> Sequence[RecurrentPlace | None] | None:
    """The same in recurrent memory."""
    if memory is None:
        return [None] * len(ubatches)
    runs = memory.prepare(ubatches)
    return None if runs is None else [RecurrentPlace(memory, *pair) for pair in zip(ubatches, runs, strict=True)]


class PreparedBatch:
    """A cursor over steps, or over none where the prepare failed."""

    def __init__(self, steps: Sequence[CursorStep], status: Status = Status.SUCCESS) -> None:
        self.status = status
        self._steps = tuple(steps)
        self._at = 0
        self._applied: list[KVPlace | RecurrentPlace] | None = None  # parts of the current ubatch; None: not applied

    @property
    def ubatches(self) -> tuple[Ubatch, ...]:
        """All of them, in order; none after a failure."""
        return tuple(step.ubatch for step in self._steps)

    @property
    def ubatch(self) -> Ubatch:
        """The current one."""
        return self._step.ubatch

    @property
    def attention(self) -> KVPlace | None:
        """Where the current ubatch goes in the cache of the full attention layers, where there is one."""
        return self._step.attention

    @property
    def windowed(self) -> KVPlace | None:
        """Where the current ubatch goes in the cache of the windowed layers, where they have one of their own."""
        return self._step.windowed

    @property
    def recurrent(self) -> StateRun | None:
        """What the current ubatch's run does to recurrent states, where there are any."""
        place = self._step.recurrent
        return None if place is None else place.run

    @property
    def n_kv(self) -> int:
        """Cells that full attention reads, once the current ubatch is applied; 0 without attention (KV-13)."""
        place = self._step.attention
        return 0 if place is None else place.n_kv

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an applied ubatch: equal iff memory lets two of them run in the same graph (GS-2)."""
        return self._step.shape

    def apply(self) -> None:
        """Put the current ubatch into every part of memory, or into none."""
        if self._applied is not None:
            raise InternalError("the current ubatch is applied already (MC-7)")
        self._applied = []
        try:
            for part in self._step.parts:
                part.apply()
                self._applied.append(part)
        except BaseException:
            self.roll_back()
            raise

    def roll_back(self) -> None:
        """Undo `apply` of the current ubatch; no effect where it was not applied (KV-14, RM-19)."""
        while self._applied:
            self._applied[-1].roll_back()
            self._applied.pop()
        self._applied = None

    def advance(self) -> bool:
        """Move to the next ubatch, after the current one was applied; False at the end."""
        if self._applied is None:
            raise InternalError("a ubatch that is not applied cannot be left behind (MC-7)")
        self._applied = None
        self._at += 1
        return self._at < len(self._steps)

    @property
    def _step(self) -> CursorStep:
        if self._at >= len(self._steps):
            raise InternalError("there is no current ubatch: the prepare failed, or the end is reached (MC-7)")
        return self._steps[self._at]


def failed() -> PreparedBatch:
    """The cursor that says that there is no room."""
    return PreparedBatch((), Status.FAILED_PREPARE)
