"""From a checkpoint to the weights of a GPU's kernels: matrices stay in the file's type where kernels multiply it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import gcd
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.backends.cuda.packed import Packed, laid_out, put
from ostinato.backends.cuda.packed_types import stays_packed
from ostinato.backends.loading import WeightPiece
from ostinato.backends.torch.allocate import Allocate, empty
from ostinato.backends.torch.load import DenseLoader
from ostinato.backends.torch.weight import Weight
from ostinato.backends.weights import Stack
from ostinato.models.tensors import ExpertMatrices, HeadMatrices, Matrices, StackedTensors, TensorTable

SORTED_AT_ONCE: Final = 4  # pieces of packed weights that are on the device a second time
_PIECE_BYTES: Final = 1 << 26  # of packed weights, read and sorted at a time


@dataclass(frozen=True, slots=True)
class _Packing:
    """A packed matrix to be read: for each expert (or once, where it is none) the rows of every part."""

    parts: Sequence[Sequence[str]]  # of each, the one tensor, or one for each expert
    n_experts: int
    packed: Packed


class PackedLoader(DenseLoader):
    """Matrices packed where that can be, F16 as it is, the rest dense."""

    def __init__(self, table: TensorTable, dtype: torch.dtype, device: torch.device, allocate: Allocate) -> None:
        super().__init__(table, dtype, device, allocate)
        self._packing: list[_Packing] = []
        self._sorting = threading.Semaphore(SORTED_AT_ONCE)

    def matrices(self, reference: Matrices) -> Weight:
        """One part for each run of one type."""
        parts: list[Packed | Tensor] = []
        for kept, run in groupby(reference.wanted, key=lambda one: self._kept_as(one[0], one[1][-1])):
            names, shapes = zip(*run, strict=True)
            some = StackedTensors(names, shapes)
            if isinstance(kept, torch.dtype):
                parts.append(self.tensors(some, kept))
            else:
                rows, cols = some.shape
                parts.append(self._laid_out([[name] for name in names], 1, kept, rows, cols))
        return parts[0] if len(parts) == 1 else Stack(tuple(parts))

    def experts(self, reference: ExpertMatrices) -> Weight:
        """Of several parts (gate and up) an expert's stand together where they are of one type: dense
        [n_experts, parts * rows, cols], or packed [n_experts * parts * rows, cols]. Parts of different types stay
        apart, each [n_experts * rows, cols], in a `Stack`."""
        n, (rows, cols) = reference.n_experts, reference.size
        kept = [self._kept_experts(names, cols) for names in reference.parts]
        if all(isinstance(one, torch.dtype) for one in kept):
            return super().experts(reference)
        if len(set(kept)) == 1:
            return self._laid_out(reference.parts, n, str(kept[0]), n * len(kept) * rows, cols)
        apart: list[Packed | Tensor] = []
        for names, one in zip(reference.parts, kept, strict=True):
            if isinstance(one, str):
                apart.append(self._laid_out([names], n, one, n * rows, cols))
            else:
                plain = self.allocate((n, rows, cols), one, self.device)
                self.into_experts(names, plain)
                apart.append(plain.flatten(0, 1))
        return Stack(tuple(apart))

    def head_matrices(self, reference: HeadMatrices) -> Weight:
        """Heads on top of each other, packed [n_heads * rows, cols], where the file has them so; dense [n_heads, rows,
        cols] where it has other matrices between them, or their columns, which cannot be taken out of blocks."""
        name, n, (rows, cols) = reference.name, reference.n_heads, reference.size
        kept = self._kept_as(name, cols)
        if isinstance(kept, torch.dtype):
            return self.dense_heads(reference, kept)
        if reference.rows is not None:
            return self.dense_heads(reference, self.dtype)
        return self._laid_out([[name]], 1, kept, n * rows, cols)

    def pieces(self) -> Iterator[WeightPiece]:
        yield from super().pieces()
        for job in self._packing:
            n_bytes = sum(self.table.info(name).n_bytes for part in job.parts for name in part)
            yield WeightPiece(n_bytes, partial(self._read_packed, job))

    def _laid_out(self, parts: Sequence[Sequence[str]], n_experts: int, type: str, rows: int, cols: int) -> Packed:
        packed = laid_out(type, rows, cols, self.device, self.allocate)
        self._packing.append(_Packing(parts, n_experts, packed))
        return packed

    def _kept_as(self, name: str, cols: int) -> str | torch.dtype:
        """The type that a matrix is kept in: its own where it can be, else the dtype it is dequantised to."""
        type = self.table.info(name).type
        if self.table.keeps_rows(name) and stays_packed(type, (1, cols)):
            return type
        return torch.float16 if type == "F16" else self.dtype

    def _kept_experts(self, names: Sequence[str], cols: int) -> str | torch.dtype:
        """What all experts are kept as: their packed type where it is the same one, else the model's dtype."""
        kept = {self._kept_as(name, cols) for name in names}
        only = kept.pop()
        return only if not kept and isinstance(only, str) else self.dtype

    def _read_packed(self, job: _Packing) -> None:
        """Piece by piece: what is read is on the device a second time, and experts are many."""
        n, packed = job.n_experts, job.packed
        raws = [[self.table.raw(name) for name in part] for part in job.parts]
        blocks = [[raw.reshape(n // len(part), -1, raw.shape[-1]) for raw in part] for part in raws]
        of_expert = [[matrix for raw in part for matrix in raw] for part in blocks]
        rows = packed.rows // n
        few = packed.run // gcd(packed.run, rows)  # experts that are whole runs of rows
        at_once = few * max(_PIECE_BYTES // (few * rows * blocks[0][0].shape[-1]), 1)
        for start in range(0, n, at_once):
            some = range(start, min(start + at_once, n))
            with self._sorting:
                put(packed, self._uploaded([part[expert] for expert in some for part in of_expert]), start * rows)

    def _uploaded(self, raw: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Rows of packed bytes, one piece after the other, on the device."""
        whole = empty((sum(len(piece) for piece in raw), raw[0].shape[-1]), torch.uint8, self.device)
        at = 0
        for piece in raw:
            self.uploads.put(piece, whole[at : at + len(piece)])
            at += len(piece)
        return whole
