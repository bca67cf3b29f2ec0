"""A weight that lies on the tape alone: before another kernel can read it, it is unpacked into separate memory.

The kernel that does so is `backends/tape/unpack.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ostinato.backends.cuda.scratch import ScratchWeight
from ostinato.backends.tape.partition import TILE_ROWS, Partition
from ostinato.backends.torch.kernels import Bind, Launch
from ostinato.errors import InternalError


class Tape:
    """A tape and its map, for readers other than its kernel: `half` is the type of its HALF weights, and `places`
    [matrix, block] where a block's tiles of a matrix begin, on the tape's device."""

    def __init__(self, tape: Tensor, partition: Partition, half: torch.dtype) -> None:
        from ostinato.backends.tape.unpack import bind_unpack

        self.bytes, self.partition, self.half = tape, partition, half
        self.places = torch.tensor(partition.places, dtype=torch.int64, device=tape.device)
        self.bind_unpack: Bind = bind_unpack


@dataclass(frozen=True, slots=True)
class TapeWeight(ScratchWeight):
    """A weight [rows, cols] that is these matrices of a tape, one above the other."""

    tile_rows: ClassVar[int] = TILE_ROWS

    tape: Tape
    matrices: range

    @property
    def shape(self) -> tuple[int, int]:
        found = [self.tape.partition.matrices[number] for number in self.matrices]
        return sum(matrix.rows for matrix in found), found[0].columns

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it is unpacked to."""
        return self.tape.half

    @property
    def device(self) -> torch.device:
        return self.tape.bytes.device

    def dense(self, dtype: torch.dtype) -> Tensor:
        """In memory of its own."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.bind_unpack(out)()
        return out.to(dtype)

    def bind_unpack(self, out: Tensor, first: int = 0) -> Launch:
        return self.tape.bind_unpack(self, out, first)

    def rows_at(self, ids: Tensor) -> Tensor:
        raise InternalError("some rows were asked of a weight that lies on a tape; an embedding never does")
