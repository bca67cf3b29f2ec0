"""One ubatch, wholly or not at all: memory applied, the graph run, the rows counted, and undone on any failure.

Memory is known only as a cursor with `apply` and `roll_back`; what runs is a callable, in practice
`ComputeExecutor.execute`. Which ubatch comes next is `cell_flow.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from ostinato.errors import ComputeFailed, DecodeError, InternalError


class AppliedMemory(Protocol):
    """What an executor needs of a memory cursor that stands on the ubatch to run."""

    @property
    def n_kv(self) -> int:
        """Cells the attention looks at, once the ubatch is applied (KV-13)."""

    def apply(self) -> object: ...
    def roll_back(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Executed:
    """Output rows that a ubatch produced, and the cells its attention looked at."""

    rows: int
    n_visible: int


class UbatchExecutor:
    """Runs ubatches; `n_roll_backs` counts the ones that had to be undone."""

    def __init__(self) -> None:
        self.n_roll_backs = 0

    def execute(self, memory: AppliedMemory, compute: Callable[[], int], *, expected: int) -> Executed:
        """Apply memory, run `compute`, which gives the rows it produced, and check their number (UX-1).

        Whatever fails, the ubatch is rolled back once and the first failure is what the caller sees (UX-2); one
        that has no class counts as ComputeFailed (D-21).
        """
        try:
            memory.apply()
            rows = compute()
            if rows != expected:
                raise ComputeFailed(
                    f"the run produced {rows} output rows where {expected} were due (UX-1)", reason="rows"
                )
        # BaseException: an interrupt from the keyboard must not leave half a ubatch in memory either.
        except BaseException as failure:
            self._roll_back(memory, failure)
            self._raise_classed(failure)
        return Executed(rows, memory.n_kv)

    def _roll_back(self, memory: AppliedMemory, failure: BaseException) -> None:
        self.n_roll_backs += 1
        try:
            memory.roll_back()
        except Exception as second:
            both = BaseExceptionGroup("a ubatch failed and could not be undone", [failure, second])
            raise InternalError(
                f"rolling back a failed ubatch failed: {second}; the ubatch had failed with: {failure}; "
                "memory can no longer be trusted (UX-2)"
            ) from both

    @staticmethod
    def _raise_classed(failure: BaseException) -> NoReturn:
        if isinstance(failure, DecodeError | InternalError) or not isinstance(failure, Exception):
            raise failure
        raise ComputeFailed(f"memory could not be applied: {failure} (UX-1)", reason="apply") from failure
