"""The memory that an engine will need, counted before anything is loaded: the rows that its backend reports.

All of it is reserved at the start, within nine tenths of what is free then; on the CPU pages are used as sequences
grow. The figures for a prompt's chunk and for the libraries are estimates, and named so. A plan that does not fit says
how much is needed, how much is free and what to lower.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from ostinato.backends.base import Backend, MemoryRow, Settled
from ostinato.backends.memory_rows import KV_PAGES
from ostinato.engine.quantisations import QUANTISATIONS, largest_within
from ostinato.errors import HardwareCannot
from ostinato.files.fetch import megabytes
from ostinato.models.header import HeaderTensors

if TYPE_CHECKING:
    from ostinato.models.shape import Shape

LEAST_CONTEXT: Final = 128
USABLE_SHARE: Final = 0.9  # of free memory; the rest is for what was counted too low, and for other processes
CONTEXT_STEP: Final = 256  # of contexts that are told to fit
FEWER_BYTES: Final = 0.95  # of what weights take now: a quantisation of more is no smaller one
SMALL_CONTEXT: Final = 4096  # with which a quantisation must fit to be advised
REQUEST_POSITIONS: Final = 1024  # of the request whose memory is told


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The rows, and whether they fit the free memory of the device."""

    backend: Backend
    shape: Shape
    tensors: HeaderTensors
    settled: Settled
    free_bytes: int

    @property
    def rows(self) -> tuple[MemoryRow, ...]:
        return self.backend.needs(self.shape, self.tensors, self.settled)

    @property
    def device_bytes(self) -> int:
        return sum(row.n_bytes for row in self.rows if not row.on_host)

    @property
    def host_bytes(self) -> int:
        """Pinned host memory beside a GPU; 0 on the CPU, where all memory is the device's."""
        return sum(row.n_bytes for row in self.rows if row.on_host)

    def bytes_of(self, *names: str) -> int:
        """The sum of the rows with these names."""
        return sum(row.n_bytes for row in self.rows if row.name in names)

    @property
    def usable_bytes(self) -> int:
        """What may be taken of the free memory."""
        return int(self.free_bytes * USABLE_SHARE)

    @property
    def bytes_beside_pages(self) -> int:
        return self.device_bytes - self.bytes_of(KV_PAGES)

    @property
    def left_for_pages(self) -> int:
        """What everything else leaves of it."""
        return max(0, self.usable_bytes - self.bytes_beside_pages)

    @property
    def used_bytes(self) -> int:
        """What of the device's memory is used when the engine is open and nothing has been asked yet."""
        return sum(row.n_bytes for row in self.rows if not (row.on_host or row.on_demand))

    @property
    def request_bytes(self) -> int:
        """What a request adds to that by its pages; 0 where all pages are allocated when the engine opens."""
        one = replace(self.settled, n_pages=self.settled.pages_for(self.request_positions))
        rows = replace(self, settled=one).rows
        return sum(row.n_bytes for row in rows if row.name == KV_PAGES and row.on_demand)

    @property
    def request_positions(self) -> int:
        return min(REQUEST_POSITIONS, self.settled.context)

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.usable_bytes

    @property
    def verdict(self) -> str:
        """One sentence: how much is reserved or would be needed, how much is free, and what to lower."""
        settled, are = self.settled, "are reserved" if self.fits else "are needed"
        asked = (
            f"{megabytes(self.device_bytes)} {are} on {settled.device} for {settled.n_slots} slots and "
            f"a context of {settled.context}, and {megabytes(self.usable_bytes)} may be taken of "
            f"{megabytes(self.free_bytes)} that are free"
        )
        return f"{asked}: it fits" if self.fits else f"{asked}; {self.advice}"

    @property
    def advice(self) -> str:
        """What to lower, with figures that fit where there are any."""
        settled = self.settled
        fewer = [self._with(n, settled.context) for n in _halves(settled.n_slots)]
        shorter = [self._with(1, n) for n in _halves(settled.context, LEAST_CONTEXT)]
        for smaller in (*fewer, *shorter):
            if smaller.fits:
                context = smaller.settled.context
                also = "" if context == settled.context else f" and --context {context}"
                return f"lower --slots to {smaller.settled.n_slots}{also}, or --kv-type to q8_0"
        narrower = "--dtype bfloat16, " if settled.dtype == "float32" and settled.weights != "tiles" else ""
        weights, beside = self.bytes_of("weights"), self.bytes_beside_pages
        return (
            f"without pages it is {megabytes(beside)}, and the weights alone are {megabytes(weights)}: take {narrower}"
            f"{self.smaller or 'fewer bits a weight or a smaller model'}"
        )

    @property
    def fitting(self) -> tuple[tuple[int, int], ...]:
        """Numbers of slots, from as many as settled down to one, each with the longest context of which every slot has
        all pages at once; one that has no longer context than more slots have is left out."""
        found: list[tuple[int, int]] = []
        if not self.shape.causal:
            return ()  # no sequence of an encoder stays
        for n_slots in _halves(self.settled.n_slots):
            steps = range(CONTEXT_STEP, self.shape.context + CONTEXT_STEP, CONTEXT_STEP)
            n_steps = bisect_right(steps, False, key=partial(self._is_over, n_slots))
            context = min(n_steps * CONTEXT_STEP, self.shape.context)
            if context >= LEAST_CONTEXT and (not found or context > found[-1][1]):
                found.append((n_slots, context))
        return tuple(found)

    @property
    def smaller(self) -> str | None:
        """Which quantisation of a model that does not fit would fit, as advice; None where the weights are dequantised,
        whatever the file has."""
        if self.settled.weights == "dense" or not self.tensors:
            return None
        least = self._with(1, min(SMALL_CONTEXT, self.shape.context))
        room = self.usable_bytes - (least.device_bytes - least.bytes_of("weights", "tape"))
        now = max(self.bytes_of("weights"), self.bytes_of("tape"))
        if (found := largest_within(min(room, int(FEWER_BYTES * now)), self.shape, self.tensors)) is None:
            none = largest_within(room, self.shape, self.tensors) is None
            return "a smaller model" + (f": not even {QUANTISATIONS[-1].name} of this one would fit" if none else "")
        return (
            f"this model as {found[0].name} (about {megabytes(found[1])} of weights, which fit with a context of "
            f"{least.settled.context}) or a smaller model"
        )

    def _is_over(self, n_slots: int, context: int) -> bool:
        return not self._with(n_slots, context).fits

    def _with(self, n_slots: int, context: int) -> MemoryPlan:
        """The plan of fewer slots or a shorter context, with pages for all of it."""
        n_pages = n_slots * self.settled.pages_for(context)
        return replace(self, settled=replace(self.settled, n_slots=n_slots, context=context, n_pages=n_pages))

    def check(self) -> None:
        """HardwareCannot, with the verdict, where it does not fit."""
        if not self.fits:
            raise HardwareCannot(self.verdict)


def _halves(n: int, least: int = 1) -> list[int]:
    """n, its half, and so on down to the least.

    >>> _halves(8)
    [8, 4, 2, 1]
    """
    found = []
    while n >= least:
        found.append(n)
        n //= 2
    return found
