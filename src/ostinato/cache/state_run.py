"""What a run of a ubatch does to recurrent states: which rows it reads, which it writes. Integers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class StateSource(NamedTuple):
    """The place of a state: a row, and in it the newest state (plane 0) or the one `plane` tokens earlier (RM-13)."""

    row: int
    plane: int


class Move(NamedTuple):
    """A whole row, all its planes, that must be copied for a sequence that is not in the run."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StateRun:
    """What a run of a ubatch does to the states: the state of set k ends in row `head + k`.

    First everything is read, from `starts` and the sources of `moves`; then rows are written, and only once the run
    has succeeded, so that a failed one has changed nothing (RM-19).
    """

    head: int
    count: int  # cells from head on that the run spans
    starts: tuple[StateSource | None, ...]  # for each set, where its state begins; None: fresh, all zeros
    moves: tuple[Move, ...]
