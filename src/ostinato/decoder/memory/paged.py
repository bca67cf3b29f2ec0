"""The paged memory kind: sequences in whole pages of the loop's own store, their positions in order from 0.

What the cell kinds can do with any batch, for what a backend's chunk can express: consecutive positions of single
sequences. As there, to plan changes nothing, and `apply` is told of what was computed (MC-7). One sequence that has
ended is kept until its pages are needed: another can go on from it, or save it. Integers only: keys and values are the
backend's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.backends.base import ChunkPart
from ostinato.cache.reserve import Lease, Reserve


@dataclass(slots=True, eq=False)
class PagedSequence:
    """A sequence on its way into its pages; mutable, because it grows. `shared`: later ones may find its pages."""

    tokens: Sequence[int]
    lease: Lease
    shared: bool
    slot: int | None = None
    n_held: int = 0  # positions in memory

    @property
    def n_left(self) -> int:
        return len(self.tokens) - self.n_held


@dataclass(frozen=True, slots=True)
class SequencePart:
    """The next `n` positions of a sequence; `outputs` are the rows that are asked for, by their place among them."""

    sequence: PagedSequence
    n: int
    outputs: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class KeptSequence:
    """A sequence that has ended: its tokens, and the slot that has its state."""

    tokens: Sequence[int]
    slot: int | None


class PagedSequences:
    """All sequences over one reserve of pages. `recurs`: a sequence has a state in its slot beside its pages."""

    def __init__(self, reserve: Reserve, *, recurs: bool) -> None:
        self.reserve, self._recurs = reserve, recurs
        self._kept: KeptSequence | None = None

    def open(
        self,
        tokens: Sequence[int],
        n_positions: int,
        *,
        slot: int | None = None,
        all_now: bool = True,
        shared: bool = True,
    ) -> PagedSequence | None:
        """Pages for a sequence that may grow to n_positions; None, and no change, while there are none to be had.

        `shared`: what is cached of its beginning is not computed again, and later ones may find what it computes.
        """
        lease = self.reserve.open(tokens, n_positions, all_now=all_now, begin=None if shared else ())
        if lease is None:
            return None
        if self._recurs and self._kept is not None and self._kept.slot == slot:
            self.forget()  # its state is written over
        return PagedSequence(tokens, lease, shared, slot)

    def resume(
        self,
        tokens: Sequence[int],
        n_positions: int,
        *,
        slot: int | None = None,
        all_now: bool = True,
        least_left: int = 1,
    ) -> PagedSequence | None:
        """The same for a sequence that goes on from the one that is kept, as far as they are alike and at least so many
        tokens are left; one that has nothing of it begins anew."""
        n_held = self._n_alike(tokens, slot, least_left)
        if not n_held:
            return self.open(tokens, n_positions, slot=slot, all_now=all_now)
        begin = self.reserve.kept[: self.reserve.pages_for(n_held)]
        lease = self.reserve.open(tokens, n_positions, all_now=all_now, begin=begin)
        if lease is None:
            return None
        self.forget()  # it is this one now
        return PagedSequence(tokens, lease, False, slot, n_held)

    def keep(self, sequence: PagedSequence, tokens: Sequence[int]) -> None:
        """Give its pages back, but keep those of its first tokens until they are needed."""
        self.reserve.keep(sequence.lease, len(tokens))
        self._kept = KeptSequence(tuple(tokens), sequence.slot)

    def forget(self) -> None:
        """Keep nothing."""
        self.reserve.forget()
        self._kept = None

    @property
    def kept_slot(self) -> int | None:
        """The slot whose state is kept, of a model that recurs."""
        return None if self._kept is None or not self._recurs else self._kept.slot

    def find(self, sequence: PagedSequence) -> int:
        """Take what is cached of its beginning by now, before it is written; how many positions are in memory."""
        if sequence.shared:
            sequence.n_held = self.reserve.share(sequence.lease, sequence.tokens)
        return sequence.n_held

    def plan(self, part: SequencePart) -> ChunkPart:
        """What the backend is told of a part."""
        sequence, start = part.sequence, part.sequence.n_held
        tokens = list(sequence.tokens[start : start + part.n])
        return ChunkPart(tokens, start, list(sequence.lease.pages), sequence.slot, part.outputs)

    def apply(self, part: SequencePart) -> None:
        """A part was computed: it is in memory now."""
        sequence = part.sequence
        sequence.n_held += part.n
        if sequence.shared:
            self.reserve.remember(sequence.lease, sequence.tokens, sequence.n_held)

    def close(self, sequence: PagedSequence) -> None:
        """Give its pages back."""
        self.reserve.close(sequence.lease)

    def _n_alike(self, tokens: Sequence[int], slot: int | None, least_left: int) -> int:
        """How many positions of what is kept a sequence of these tokens can begin with."""
        kept, reserve = self._kept, self.reserve
        if kept is None or not reserve.kept:
            return 0
        most = min(len(kept.tokens), len(tokens) - least_left)
        alike = next((n for n in range(most) if kept.tokens[n] != tokens[n]), most)
        if self._recurs:
            return alike if alike == len(kept.tokens) and kept.slot == slot else 0  # a state does not go back
        if alike % reserve.page_tokens and alike < len(tokens):
            page = reserve.kept[alike // reserve.page_tokens]
            if not reserve.is_kept_alone(page):
                alike -= alike % reserve.page_tokens  # others read what would be written to
        return alike if alike > len(reserve.find(tokens)) * reserve.page_tokens else 0
