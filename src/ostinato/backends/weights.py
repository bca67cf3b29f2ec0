"""A weight as products use it: a matrix in some backend's own layout, or several stacked.

A backend that keeps matrices its own way derives its class from `HostMatrix`, or, where torch has the memory, from
`DeviceMatrix` (`torch/weight.py`). The torch backend, which every model can run through, then needs to know nothing
else of that layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ostinato.files.unpack import Floats


class HostMatrix(ABC):
    """A matrix [rows, cols] in the host's memory that its backend multiplies itself; torch multiplies it in float32."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @abstractmethod
    def rows_at(self, ids: NDArray[Any]) -> Floats:
        """Some rows, [len(ids), cols]."""

    @abstractmethod
    def product(self, x: Floats, n_threads: int) -> Floats:
        """x [n, cols] times the matrix, transposed: [n, rows], with the bits that the backend's own step has."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices over the same columns, one above the other, of types that may differ."""

    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, int]:
        sizes = [shape_of(part) for part in self.parts]
        return sum(rows for rows, _ in sizes), sizes[0][1]


def shape_of(weight: Any) -> tuple[int, int]:
    """[rows, cols] of any weight."""
    rows, cols = weight.shape
    return rows, cols
