"""The paged memory kind: sequences in whole pages of the loop's own store, their positions in order from 0.

It serves the batches that a backend's chunk can express: consecutive positions of single sequences; the cell kinds
serve any batch. `plan` takes the windowed pages that a part writes, and `apply` records what was computed (MC-7). The
last sequence that was to be kept stays until its pages are needed, so that another can continue or save it. Integers
only: the backend holds keys and values.

A model that recurs has states in its slots besides. Its prompts begin at a snapshot of them (`cache/snapshots.py`),
which is taken where a chunk ends: after every whole chunk, and `REPLACED_TOKENS` before the end of the prompt. Where
layers attend too, a beginning is whole pages, so there it is taken after the last whole page before that place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ostinato.backends.base import ChunkPart
from ostinato.cache.reserve import Lease, Reserve
from ostinato.cache.snapshots import StateSnapshot, StateSnapshots
from ostinato.cache.window_pages import PageRun
from ostinato.files.unpack import Bytes

# The next turn of a chat may have other tokens than the last ones of this prompt, which open an answer: templates leave
# out "<think>" later, and a line break becomes one token with what follows it. So many of them at most are expected.
REPLACED_TOKENS: Final = 16


@dataclass(slots=True, eq=False)
class PagedSequence:
    """A sequence and its pages; mutable, because it grows. `shared`: later sequences may reuse its pages."""

    tokens: Sequence[int]
    lease: Lease
    shared: bool
    slot: int | None = None
    n_held: int = 0  # positions in memory
    segments: Sequence[int] = ()  # of an encoder's pair of texts, which of the two each token is of
    begins_at: StateSnapshot | None = None  # states that its slot is to have before its next part
    # The fewest positions after which it can be continued: windows of earlier ones were not copied.
    resumes_from: int = 0

    @property
    def n_left(self) -> int:
        return len(self.tokens) - self.n_held


@dataclass(frozen=True, slots=True)
class SequencePart:
    """The next `n` positions of a sequence; `outputs` are the rows asked for, as indices into them."""

    sequence: PagedSequence
    n: int
    outputs: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class KeptSequence:
    """A sequence that has ended: its tokens, the slot that holds its state, the rope set of its keys, and the fewest
    positions after which another can continue it."""

    tokens: Sequence[int]
    slot: int | None
    rope_set: int
    resumes_from: int


class PagedSequences:
    """All sequences over one reserve of pages. `recurs`: a sequence has a state in its slot beside its pages.
    `snapshots`: of such states; None where none are kept. `attends`: whether layers have pages besides."""

    def __init__(
        self, reserve: Reserve, *, recurs: bool, snapshots: StateSnapshots | None = None, attends: bool = True
    ) -> None:
        self.reserve, self._recurs = reserve, recurs
        self._snapshots, self._attends = snapshots, attends
        self._snapshot_every = reserve.page_tokens if attends else 1  # a snapshot is taken after a multiple of it
        self._kept: KeptSequence | None = None

    def open(
        self,
        tokens: Sequence[int],
        n_positions: int,
        *,
        slot: int | None = None,
        all_now: bool = True,
        shared: bool = True,
        least_left: int | None = None,
        rope_set: int = 0,
        segments: Sequence[int] = (),
    ) -> PagedSequence | None:
        """Lease pages for a sequence that may grow to n_positions; None, and no change, while too few are free.

        `shared`: its cached beginning is not computed again, and later sequences may reuse what it computes.
        `least_left`: it continues the kept sequence, as far as both begin alike and so many tokens are left to compute.
        `rope_set`: what rotates it; only sequences of one set share or continue pages.
        """
        n_held = 0 if least_left is None else self._n_alike(tokens, slot, least_left, rope_set)
        kept = self.reserve.kept(n_held) if n_held else None
        # Which pages a recurrent model can share is known when a snapshot is found, right before its first part.
        begin: Sequence[PageRun] | None = kept if kept is not None else None if shared and not self._recurs else ()
        lease = self.reserve.open(tokens, n_positions, all_now=all_now, begin=begin, rope_set=rope_set)
        if lease is None:
            return None
        resumes_from = 0 if kept is None or self._kept is None else self._kept.resumes_from
        # The new sequence takes the place of the kept one, or its state will be overwritten.
        if kept is not None or (self._recurs and self._kept is not None and self._kept.slot == slot):
            self.forget()
        n_held = 0 if kept is None else n_held
        return PagedSequence(tokens, lease, shared and kept is None, slot, n_held, segments, resumes_from=resumes_from)

    def keep(self, sequence: PagedSequence, tokens: Sequence[int], n_written: int) -> None:
        """Release its pages, but keep those of its first tokens until they are needed, unless the loop has written
        over some of them: it has written `n_written` positions."""
        self.reserve.keep(sequence.lease, len(tokens), n_written)
        self._kept = KeptSequence(tuple(tokens), sequence.slot, sequence.lease.rope_set, sequence.resumes_from)

    def forget(self) -> None:
        """Drop the kept sequence."""
        self.reserve.forget()
        self._kept = None

    @property
    def kept_slot(self) -> int | None:
        """The slot whose state is kept, for a recurrent model."""
        return None if self._kept is None or not self._recurs else self._kept.slot

    def find(self, sequence: PagedSequence) -> int:
        """Share the pages of its beginning that are cached by now, before it is written; the positions in memory."""
        if sequence.shared and self._recurs:
            self._begin_at_snapshot(sequence)
        elif sequence.shared:
            sequence.n_held = self.reserve.share(sequence.lease, sequence.tokens)
        return sequence.n_held

    def _begin_at_snapshot(self, sequence: PagedSequence) -> None:
        """Begin after the longest snapshot whose pages are cached too."""
        lease, tokens, size = sequence.lease, sequence.tokens, self.reserve.page_tokens
        for snapshot in () if self._snapshots is None else self._snapshots.beginnings(tokens, lease.rope_set):
            n = len(snapshot.tokens)
            if self._attends and self.reserve.find(tokens, lease.rope_set, most=n).n_pages * size != n:
                continue
            if self._attends:
                self.reserve.share(lease, tokens, n)
            assert self._snapshots is not None
            self._snapshots.use(snapshot)
            sequence.n_held, sequence.begins_at = n, snapshot
            return

    def part_of(self, sequence: PagedSequence, rows: int) -> SequencePart:
        """The next part of a prompt, of at most so many rows."""
        start, n = sequence.n_held, min(rows, sequence.n_left)
        if self._takes_snapshots(sequence):
            last = self._last_snapshot_at(sequence)
            n = last - start if start < last < start + n else n
        return SequencePart(sequence, n)

    def takes_snapshot(self, part: SequencePart) -> bool:
        """Whether a snapshot of the states after a part is taken: a later prompt may begin with the tokens so far."""
        sequence, stop = part.sequence, part.sequence.n_held + part.n
        if self._snapshots is None or not self._takes_snapshots(sequence):
            return False
        useful = stop % self._snapshot_every == 0 and stop <= self._last_snapshot_at(sequence)
        return useful and not self._snapshots.has(sequence.tokens[:stop], sequence.lease.rope_set)

    def _last_snapshot_at(self, sequence: PagedSequence) -> int:
        """The most positions of a prompt after which a snapshot is taken; 0 or less where it is too short for one."""
        return (len(sequence.tokens) - REPLACED_TOKENS) // self._snapshot_every * self._snapshot_every

    def _takes_snapshots(self, sequence: PagedSequence) -> bool:
        return self._snapshots is not None and sequence.shared and sequence.slot is not None

    def keep_states(self, part: SequencePart, states: Sequence[Bytes]) -> None:
        """Keep the states after a part that was computed and applied."""
        sequence = part.sequence
        assert self._snapshots is not None
        tokens = tuple(sequence.tokens[: sequence.n_held])
        self._snapshots.add(StateSnapshot(tokens, sequence.lease.rope_set, tuple(states)))

    def plan(self, part: SequencePart) -> ChunkPart:
        """A part as the backend's chunk takes it. Layers that see a window get the pages that it writes now."""
        sequence, start = part.sequence, part.sequence.n_held
        rows = slice(start, start + part.n)
        tokens, segments = list(sequence.tokens[rows]), sequence.segments[rows]
        self.reserve.cover(sequence.lease, start, start + part.n)
        lease = sequence.lease
        tables = self.reserve.tables(lease)
        return ChunkPart(tokens, start, tables, sequence.slot, part.outputs, lease.rope_set, segments)

    def apply(self, part: SequencePart) -> None:
        """Record that a part was computed and is in memory."""
        sequence = part.sequence
        sequence.n_held += part.n
        sequence.begins_at = None
        if sequence.shared:
            self._share_computed(sequence)
            self.reserve.remember(sequence.lease, sequence.tokens, sequence.n_held)
        self.reserve.trim(sequence.lease, sequence.n_held)

    def _share_computed(self, sequence: PagedSequence) -> None:
        """Replace pages that were computed again, because no snapshot followed the cached ones, by those, which have
        the same bits: what this sequence computes next is cached only if it follows cached pages that it holds."""
        lease, tokens = sequence.lease, sequence.tokens
        # With the last part, the loop was given the page tables. A recurrent model has no windows.
        if not self._recurs or not sequence.n_left or lease.windows:
            return
        found = self.reserve.find(tokens, lease.rope_set, most=sequence.n_held)
        if found.n_pages and list(found.runs[0].pages) != lease.pages[: found.n_pages]:
            self.reserve.share(lease, tokens, sequence.n_held)

    def stage(self, sequence: PagedSequence, n_positions: int) -> list[list[int]]:
        """The page tables with which the decode loop goes on behind its tokens, to n_positions at most."""
        self.reserve.cover(sequence.lease, sequence.n_held, len(sequence.tokens))
        self.reserve.begin_cycle(sequence.lease, len(sequence.tokens), n_positions)
        return self.reserve.tables(sequence.lease)

    def fill(self, sequence: PagedSequence) -> None:
        """All its positions are about to be copied into its pages; of a window, those that the last one sees."""
        sequence.n_held = len(sequence.tokens)
        sequence.resumes_from = 0 if self.reserve.sees_all(sequence.n_held) else sequence.n_held - 1
        self.reserve.cover(sequence.lease, sequence.n_held, sequence.n_held)

    def close(self, sequence: PagedSequence) -> None:
        """Release its pages."""
        self.reserve.close(sequence.lease)

    def _n_alike(self, tokens: Sequence[int], slot: int | None, least_left: int, rope_set: int) -> int:
        """How many positions of the kept sequence a sequence of these tokens can reuse."""
        kept, reserve = self._kept, self.reserve
        if kept is None or kept.rope_set != rope_set:
            return 0
        most = min(len(kept.tokens), len(tokens) - least_left)
        alike = next((n for n in range(most) if kept.tokens[n] != tokens[n]), most)
        if self._recurs:
            return alike if alike == len(kept.tokens) and kept.slot == slot else 0  # a state cannot be rolled back
        if alike % reserve.page_tokens and alike < len(tokens) and not reserve.is_kept_alone(alike):
            alike -= alike % reserve.page_tokens  # other sequences read the page that would be written
        if alike < kept.resumes_from:
            return 0
        return alike if alike > reserve.find(tokens, rope_set).n_pages * reserve.page_tokens else 0
