"""A weight that lies on the tape alone: who wants its numbers unpacks it first, into memory of its own.

The twin of what unpacks is `unpack_torch` of `pack.py`, the kernel `backends/tape/unpack.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.backends.tape.partition import Partition


class Tape:
    """A tape and its map, as one reads it who is not its kernel: `half` is the type of its HALF weights, and `places`
    [matrix, block] where a block's tiles of a matrix begin, on the tape's device."""

    def __init__(self, tape: Tensor, partition: Partition, half: torch.dtype) -> None:
        self.bytes, self.partition, self.half = tape, partition, half
        self.places = torch.tensor(partition.places, dtype=torch.int64, device=tape.device)


@dataclass(frozen=True, slots=True)
class TapeWeight:
    """A weight [rows, cols] that is these matrices of a tape, one above the other."""

    tape: Tape
    matrices: range

    @property
    def shape(self) -> tuple[int, int]:
        found = [self.tape.partition.matrices[number] for number in self.matrices]
        return sum(matrix.rows for matrix in found), found[0].columns

    @property
    def dtype(self) -> torch.dtype:
        """What it is unpacked to."""
        return self.tape.half

    @property
    def device(self) -> torch.device:
        return self.tape.bytes.device
