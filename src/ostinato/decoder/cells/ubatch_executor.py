"""Runs one ubatch, completely or not at all: apply memory, run the graph, count the rows, and undo on any failure.

Memory is only a cursor with `apply` and `roll_back` here, and the run is a callable, in practice
`ComputeExecutor.execute`. `decoder.py` decides which ubatch comes next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ostinato.errors import ComputeFailed, DecodeError, InternalError


class AppliedMemory(Protocol):
    """What an executor needs of a memory cursor that stands on the ubatch to run."""

    @property
    def n_kv(self) -> int:
        """Cells that attention reads, once the ubatch is applied (KV-13)."""

    def apply(self) -> object: ...
    def roll_back(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Executed:
    """Output rows that a ubatch produced, and the cells that its attention read."""

    rows: int
    n_visible: int


class UbatchExecutor:
    """Runs ubatches; `n_roll_backs` counts the ones that had to be undone."""

    def __init__(self) -> None:
        self.n_roll_backs = 0

    def execute(self, memory: AppliedMemory, compute: Callable[[], int], *, expected: int) -> Executed:
        """Apply memory, run `compute`, which returns the number of rows it produced, and check that number (UX-1).

        On any failure the ubatch is rolled back once, and the first failure is raised (UX-2); one that is no decode
        error becomes ComputeFailed (D-21).
        """
        try:
            memory.apply()
            rows = compute()
            if rows != expected:
                raise ComputeFailed(  # UX-1
                    f"the run produced {rows} output rows where {expected} were due", reason="rows"
                )
        # BaseException: an interrupt from the keyboard must not leave half a ubatch in memory either.
        except BaseException as failure:
            self._roll_back(memory, failure)
            if isinstance(failure, DecodeError | InternalError) or not isinstance(failure, Exception):
                raise
            raise ComputeFailed(f"memory could not be applied: {failure}", reason="apply") from failure  # UX-1
        return Executed(rows, memory.n_kv)

    def _roll_back(self, memory: AppliedMemory, failure: BaseException) -> None:
        self.n_roll_backs += 1
        try:
            memory.roll_back()
        except Exception as second:
            both = BaseExceptionGroup("a ubatch failed and could not be undone", [failure, second])
            raise InternalError(
                f"rolling back a failed ubatch failed: {second}; the ubatch had failed with: {failure}; "
                "memory can no longer be trusted"  # UX-2
            ) from both
