"""The cursor over a prepared batch (MC-7): ubatches, each with its place in each part of memory. Only `apply` changes
memory, in the order of HY-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ostinato.cache.state_run import StateRun
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.memory.slots import Slot
from ostinato.decoder.cells.memory.status import Status
from ostinato.errors import InternalError

At = TypeVar("At")  # cells of a cache, or a run of recurrent states


class MemoryPart(Protocol[At]):
    """A part of memory: it says where ubatches go in it, and takes them."""

    def prepare(self, ubatches: Sequence[Ubatch], /) -> list[At] | None: ...
    def apply(self, ubatch: Ubatch, at: At, /) -> None: ...
    def roll_back(self, ubatch: Ubatch, at: At, /) -> None: ...
    def shape(self, at: At, /) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Place(Generic[At]):
    """Where one ubatch goes in one part of memory. `shape` is valid once the ubatch is applied."""

    part: MemoryPart[At]
    ubatch: Ubatch
    at: At

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape(self.at)

    def apply(self) -> None:
        self.part.apply(self.ubatch, self.at)

    def roll_back(self) -> None:
        self.part.roll_back(self.ubatch, self.at)


@dataclass(frozen=True, slots=True, eq=False)
class CursorStep:
    """One ubatch and its place in each part that the memory has."""

    ubatch: Ubatch
    attention: Place[Slot] | None = None
    windowed: Place[Slot] | None = None
    recurrent: Place[StateRun] | None = None

    @property
    def parts(self) -> list[Place[Slot] | Place[StateRun]]:
        """In the order in which they are applied (HY-3)."""
        return [part for part in (self.attention, self.windowed, self.recurrent) if part is not None]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for part in self.parts for size in part.shape)


def places(part: MemoryPart[At] | None, ubatches: Sequence[Ubatch]) -> Sequence[Place[At] | None] | None:
    """The places of ubatches in a part of memory, where there is one; None when it has no room for them."""
    if part is None:
        return [None] * len(ubatches)
    found = part.prepare(ubatches)
    return None if found is None else [Place(part, *pair) for pair in zip(ubatches, found, strict=True)]


class PreparedBatch:
    """A cursor over steps, or over none where the prepare failed."""

    def __init__(self, steps: Sequence[CursorStep], status: Status = Status.SUCCESS) -> None:
        self.status = status
        self._steps = tuple(steps)
        self._at = 0
        self._applied: list[Place[Slot] | Place[StateRun]] | None = (
            None  # parts of the current ubatch; None: not applied
        )

    @property
    def ubatches(self) -> tuple[Ubatch, ...]:
        """All of them, in order; none after a failure."""
        return tuple(step.ubatch for step in self._steps)

    @property
    def ubatch(self) -> Ubatch:
        """The current one."""
        return self._step.ubatch

    @property
    def attention(self) -> Place[Slot] | None:
        """Where the current ubatch goes in the cache of the full attention layers, where there is one."""
        return self._step.attention

    @property
    def windowed(self) -> Place[Slot] | None:
        """Where the current ubatch goes in the cache of the windowed layers, where they have one of their own."""
        return self._step.windowed

    @property
    def recurrent(self) -> StateRun | None:
        """What the current ubatch's run does to recurrent states, where there are any."""
        place = self._step.recurrent
        return None if place is None else place.at

    @property
    def n_kv(self) -> int:
        """Cells that full attention reads, once the current ubatch is applied; 0 without attention (KV-13)."""
        place = self._step.attention
        return 0 if place is None else place.shape[0]

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
