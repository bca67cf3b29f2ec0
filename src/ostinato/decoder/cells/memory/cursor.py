"""The cursor over a prepared batch (MC-7): ubatches, each with its place in each part of memory. Only `apply` changes
memory, in the order of HY-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.status import Status
from ostinato.errors import InternalError

At = TypeVar("At")  # cells of a cache, or a run of recurrent states


class MemoryPart(Protocol[At]):
    """A part of memory: it says where ubatches go in it, and takes them."""

    def prepare(self, ubatches: Sequence[Ubatch], /) -> list[At] | None: ...
    def apply(self, ubatch: Ubatch, at: At, /) -> None: ...
    def roll_back(self, ubatch: Ubatch, at: At, /) -> None: ...
    def shape(self, at: At, /) -> tuple[int, ...]: ...


class PreparedBatch:
    """A cursor over ubatches, or over none where the prepare failed. `places`: in the order in which they are applied,
    the parts of memory, each with the place of every ubatch."""

    def __init__(
        self,
        ubatches: Sequence[Ubatch],
        places: Sequence[tuple[MemoryPart[Any], Sequence[Any]]] = (),
        status: Status = Status.SUCCESS,
    ) -> None:
        self.status = status
        self.ubatches = tuple(ubatches)
        self._places = places
        self._at = 0
        self._applied: list[tuple[MemoryPart[Any], Any]] | None = None  # of the current ubatch; None: not applied

    @property
    def ubatch(self) -> Ubatch:
        """The current one."""
        if self._at >= len(self.ubatches):
            raise InternalError("there is no current ubatch: the prepare failed, or the end is reached")  # MC-7
        return self.ubatches[self._at]

    def place(self, part: MemoryPart[At]) -> At | None:
        """Where the current ubatch goes in a part of memory; None if it does not go there."""
        return next((places[self._at] for each, places in self._places if each is part), None)

    @property
    def n_kv(self) -> int:
        """Cells that full attention reads, once the current ubatch is applied; 0 without attention (KV-13)."""
        return next((part.n_kv(at[self._at]) for part, at in self._places if isinstance(part, KVCache)), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an applied ubatch: equal iff memory lets two of them run in the same graph (GS-2)."""
        return tuple(size for part, places in self._places for size in part.shape(places[self._at]))

    def apply(self) -> None:
        """Put the current ubatch into every part of memory, or into none."""
        if self._applied is not None:
            raise InternalError("the current ubatch is applied already")  # MC-7
        ubatch, self._applied = self.ubatch, []
        try:
            for part, places in self._places:
                part.apply(ubatch, places[self._at])
                self._applied.append((part, places[self._at]))
        except BaseException:
            self.roll_back()
            raise

    def roll_back(self) -> None:
        """Undo `apply` of the current ubatch; no effect where it was not applied (KV-14, RM-19)."""
        while self._applied:
            part, place = self._applied[-1]
            part.roll_back(self.ubatch, place)
            self._applied.pop()
        self._applied = None

    def advance(self) -> bool:
        """Move to the next ubatch, after the current one was applied; False at the end."""
        if self._applied is None:
            raise InternalError("a ubatch that is not applied cannot be left behind")  # MC-7
        self._applied = None
        self._at += 1
        return self._at < len(self.ubatches)


def failed() -> PreparedBatch:
    """The cursor that says that there is no room."""
    return PreparedBatch((), status=Status.FAILED_PREPARE)
