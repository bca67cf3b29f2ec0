"""What a weight is to whoever multiplies with it: a tensor, a matrix in some backend's own layout, or several stacked.

A backend that keeps matrices its own way derives its class from one of the two here. The torch backend, which every
model can run through, then needs to know nothing else of that layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Floats = NDArray[np.float32]


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


class DeviceMatrix(ABC):
    """A matrix [rows, cols] on a device, in a layout that the backend's kernels read; torch makes it dense first."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """What rows are multiplied in."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix itself, rounded to dtype."""

    @abstractmethod
    def rows_at(self, ids: Tensor) -> Tensor:
        """Some rows, [len(ids), cols], not rounded further than they are."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices over the same columns, one above the other, of types that may differ."""

    parts: tuple[Tensor | DeviceMatrix | HostMatrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        sizes = [shape_of(part) for part in self.parts]
        return sum(rows for rows, _ in sizes), sizes[0][1]


Weight: TypeAlias = "Tensor | DeviceMatrix | HostMatrix | Stack"


def shape_of(weight: Weight) -> tuple[int, int]:
    """[rows, cols] of any weight."""
    rows, cols = weight.shape
    return rows, cols
