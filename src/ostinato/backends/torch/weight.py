"""Any weight as plain numbers: a tensor, a matrix in another backend's layout, or several on top of each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.weights import HostMatrix, Stack


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


Weight: TypeAlias = Tensor | DeviceMatrix | HostMatrix | Stack


def dense_of(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The whole weight [rows, cols] as dtype."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    if isinstance(weight, Stack):
        return torch.cat([dense_of(part, dtype) for part in weight.parts])
    if isinstance(weight, HostMatrix):
        return torch.from_numpy(weight.rows_at(np.arange(weight.shape[0]))).to(dtype)
    return weight.dense(dtype)


def rows_of(weight: Weight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows of a weight, [len(ids), cols], as dtype."""
    if isinstance(weight, Tensor):
        return weight.index_select(0, ids).to(dtype)
    assert not isinstance(weight, Stack), "an embedding is one matrix"
    if isinstance(weight, HostMatrix):
        return torch.from_numpy(weight.rows_at(ids.numpy())).to(dtype)
    return weight.rows_at(ids).to(dtype)


def dtype_of(weight: Weight) -> torch.dtype:
    """What rows are multiplied in with this weight."""
    first = weight.parts[0] if isinstance(weight, Stack) else weight
    return torch.float32 if isinstance(first, HostMatrix) else first.dtype
