"""Checks that the positions of a batch continue those in memory, in order and without holes (rules S-13 to S-16).

Each check works on all sequences at once and reports the first that fails, in the order of its rule. Only the first
position dimension counts (S-18).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostinato.cache.sequences import MAX_SEQ, Ints
from ostinato.decoder.batch.entries import Entries, Sets
from ostinato.errors import InvalidBatch


@dataclass(frozen=True, slots=True, eq=False)
class Remembered:
    """The positions in memory of the batch's sequences, [sequences]; `first` and `last` are valid where `present`."""

    present: NDArray[np.bool_]
    first: Ints
    last: Ints

    @staticmethod
    def of(extremes: list[tuple[int, int] | None]) -> Remembered:
        present = np.array([found is not None for found in extremes])
        first, last = np.array([found or (0, 0) for found in extremes], np.int64).reshape(-1, 2).T
        return Remembered(present, first, last)

    @property
    def next_pos(self) -> Ints:
        """The next position of each sequence, 0 where memory has none of it."""
        return np.where(self.present, self.last + 1, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The positions of a batch gathered by sequence, [entries], with each sequence's extremes, [sequences]."""

    gathered: Ints
    low: Ints
    high: Ints

    @staticmethod
    def of(entries: Entries, pos: Ints) -> Spans:
        gathered = pos[entries.tokens]
        low, high = (side.reduceat(gathered, entries.first) for side in (np.minimum, np.maximum))
        return Spans(gathered, low, high)

    def by_id(self, entries: Entries) -> dict[int, tuple[int, int]]:
        extremes = zip(self.low.tolist(), self.high.tolist(), strict=True)
        return dict(zip(entries.unique.tolist(), extremes, strict=True))


def check_steps(entries: Entries, spans: Spans, memory: Remembered) -> None:
    """S-13: a sequence begins right after its last position in memory, and has no hole."""
    gap = memory.present & (spans.low != memory.last + 1)
    hole = _holes(entries, spans)
    wrong = gap | hole
    if wrong.any():
        place = int(wrong.argmax())
        raise _gap(entries, spans, memory, place) if gap[place] else _hole(entries, spans, place)


def check_jumps(entries: Entries, spans: Spans, memory: Remembered, *, repeats: bool) -> None:
    """S-14, several position dimensions: forward jumps are legal; `repeats` allows the last position once more."""
    gap = memory.present & (spans.low < memory.last + (0 if repeats else 1))
    if gap.any():
        raise _gap(entries, spans, memory, int(gap.argmax()))


def _holes(entries: Entries, spans: Spans) -> NDArray[np.bool_]:
    """Which sequences have fewer distinct positions than their extremes span, [sequences]."""
    width = spans.high - spans.low
    # Where a sequence spans more positions than it has entries, there is a hole; elsewhere every position, counted
    # from the lowest, has an index of its own among the sequence's entries.
    index = np.minimum(spans.gathered - np.repeat(spans.low, entries.size), np.repeat(entries.size - 1, entries.size))
    taken = np.zeros(len(index), np.int64)
    taken[np.repeat(entries.first, entries.size) + index] = 1
    wide: NDArray[np.bool_] = width >= np.add.reduceat(taken, entries.first)
    return wide


def _positions(entries: Entries, spans: Spans, place: int) -> Ints:
    return spans.gathered[entries.first[place] : entries.first[place] + entries.size[place]]


def _at(entries: Entries, spans: Spans, place: int, position: int) -> int:
    """The first token of a sequence with this position."""
    return int(entries.tokens_of(place)[(_positions(entries, spans, place) == position).argmax()])


def _gap(entries: Entries, spans: Spans, memory: Remembered, place: int) -> InvalidBatch:
    lowest, last, sequence = spans.low[place], memory.last[place], entries.unique[place]
    what = f"position {lowest} does not follow {last}, the last of sequence {sequence} in memory"
    return InvalidBatch.of_token(_at(entries, spans, place, lowest), what, "pos_memory_gap")


def _hole(entries: Entries, spans: Spans, place: int) -> InvalidBatch:
    distinct = np.unique(_positions(entries, spans, place))
    low, high = distinct[(np.diff(distinct) > 1).argmax() :][:2]
    what = f"position {high} leaves a hole after {low} in sequence {entries.unique[place]}"  # S-13
    return InvalidBatch.of_token(_at(entries, spans, place, high), what, "pos_not_contiguous")


def check_coupling(entries: Entries, memory: Remembered) -> None:
    """S-15: sequences that share a token have the same range of positions in memory."""
    if not entries.has_coupling:
        return
    primary = np.repeat(entries.ids[entries.start[:-1]], np.diff(entries.start))
    pairs, example = np.unique(entries.ids * MAX_SEQ + primary, return_index=True)
    mine, other = np.searchsorted(entries.unique, pairs // MAX_SEQ), np.searchsorted(entries.unique, pairs % MAX_SEQ)
    apart = memory.present[mine] != memory.present[other]
    for side in (memory.first, memory.last):
        apart |= memory.present[mine] & (side[mine] != side[other])
    if apart.any():
        place = int(apart.argmax())
        index = int(np.searchsorted(entries.start, example[place], side="right")) - 1
        a, b = (f"sequence {entries.unique[k]} {_told(memory, k)}" for k in (int(mine[place]), int(other[place])))
        raise InvalidBatch.of_token(index, f"{a} and {b}, so they cannot share a token", "coupled_diverged")  # S-15


def _told(memory: Remembered, place: int) -> str:
    if not memory.present[place]:
        return "holds nothing in memory"
    return f"holds {memory.first[place]} to {memory.last[place]} in memory"


def check_walk(entries: Entries, sets: Sets, spans: Spans) -> None:
    """S-16: from token to token of a sequence, sets stay equal or shrink and positions do not go down."""
    same = np.ones(len(entries.tokens), bool)
    same[entries.first] = False
    lower = np.zeros(len(same), bool)
    lower[1:] = spans.gathered[1:] < spans.gathered[:-1]
    grown = np.zeros(len(same), bool)
    if entries.has_coupling:
        words = sets.words[:, entries.tokens]
        grown[1:] = (words[:, 1:] & ~words[:, :-1]).any(axis=0)
    wrong = (lower | grown) & same
    if wrong.any():
        raise _out_of_step(entries, spans, wrong, grown)


def _out_of_step(entries: Entries, spans: Spans, wrong: NDArray[np.bool_], grown: NDArray[np.bool_]) -> InvalidBatch:
    gathered = np.flatnonzero(wrong)
    at = int(gathered[entries.order[gathered].argmin()])  # the first in batch order, ids as listed
    index, sequence = int(entries.tokens[at]), entries.ids[entries.order[at]]
    if grown[at]:
        ids, before = entries.ids_of(index), entries.ids_of(int(entries.tokens[at - 1]))
        what = f"its sequences {ids} are not all among {before}, where sequence {sequence} was before"  # S-16
        return InvalidBatch.of_token(index, what, "subset_diverged")
    last, position = spans.gathered[at - 1 : at + 1]
    what = f"position {position} is lower than {last}, the one before it in sequence {sequence}"  # S-16
    return InvalidBatch.of_token(index, what, "pos_decreasing")
