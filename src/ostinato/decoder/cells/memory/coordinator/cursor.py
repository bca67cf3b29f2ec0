"""The cursor that every coordinator returns for a prepared batch (MC-7): ubatches, each with its place in each part.

The coordinator makes the steps and so decides which parts there are; a cursor applies them in the order of HY-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.cache.state_run import StateRun
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.memory.cells import Bools
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.recurrent import RecurrentMemory
from ostinato.decoder.cells.memory.slots import Slot
from ostinato.decoder.cells.memory.status import Status
from ostinato.errors import InternalError


@dataclass(frozen=True, slots=True, eq=False)
class KVPlace:
    """Where one ubatch goes in one cache. `n_kv` and `visible` are valid once the ubatch is applied."""

    cache: KVCache
    ubatch: Ubatch
    slot: Slot

    @property
    def n_kv(self) -> int:
        return self.cache.n_kv(self.slot)

    def visible(self, *, causal: bool = True) -> list[Bools]:
        """For each stream of the slot, where a row sees a cell, bool [rows, n_kv] (KV-16)."""
        return self.cache.visible(self.ubatch, self.slot, causal=causal)

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


class PreparedBatch:
    """A cursor over steps, or over none where the prepare failed."""

    def __init__(self, steps: Sequence[CursorStep], status: Status = Status.SUCCESS) -> None:
        self.status = status
        self._steps = tuple(steps)
        self._at = 0
        self._applied: list[KVPlace | RecurrentPlace] | None = None  # parts of the current ubatch; None: not applied

    @property
    def ubatches(self) -> tuple[Ubatch, ...]:
        return tuple(step.ubatch for step in self._steps)

    @property
    def ubatch(self) -> Ubatch:
        return self._step.ubatch

    @property
    def attention(self) -> KVPlace | None:
        return self._step.attention

    @property
    def windowed(self) -> KVPlace | None:
        return self._step.windowed

    @property
    def recurrent(self) -> StateRun | None:
        place = self._step.recurrent
        return None if place is None else place.run

    @property
    def n_kv(self) -> int:
        place = self._step.attention
        return 0 if place is None else place.n_kv

    @property
    def shape(self) -> tuple[int, ...]:
        return self._step.shape

    def apply(self) -> None:
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
        while self._applied:
            self._applied[-1].roll_back()
            self._applied.pop()
        self._applied = None

    def advance(self) -> bool:
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


class WorstCase:
    """The cursor of `prepare_full`: the largest possible shapes, and no ubatch (MC-4)."""

    def __init__(self, caches: Sequence[KVCache], recurrent: RecurrentMemory | None = None) -> None:
        self.status = Status.SUCCESS
        self.ubatches: tuple[Ubatch, ...] = ()
        self.attention: KVPlace | None = None
        self.windowed: KVPlace | None = None
        self.recurrent: StateRun | None = None
        self.n_kv = caches[0].size if caches else 0
        counts = [count for cache in caches for count in (cache.size, len(cache.streams))]
        self.shape: tuple[int, ...] = (*counts, *(() if recurrent is None else (0, recurrent.size)))

    @property
    def ubatch(self) -> Ubatch:
        raise InternalError("the worst case has no ubatch (MC-4)")

    def apply(self) -> None:
        raise InternalError("the worst case cannot be applied (MC-4)")

    def roll_back(self) -> None:
        """Nothing was applied."""

    def advance(self) -> bool:
        return False
