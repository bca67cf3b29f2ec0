"""From a checkpoint to dense weights, on any device.

A loader gives a weight for each reference of a model's blocks: memory is laid out at once, and the bytes are read
later, all together and in parallel, so that no weight exists twice. `load` has it lay out twice: once to see what it
takes, without memory, then in one piece of just that size (E-16).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.loading import Progress, WeightPiece, read_all
from ostinato.backends.torch.allocate import Allocate, BumpAllocator, Measure
from ostinato.backends.torch.arrays import array_dtype, array_of, tensor_of
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.upload import THREADS, Uploads
from ostinato.backends.torch.weight import Weight
from ostinato.errors import InternalError
from ostinato.files.checkpoint import holds_as_it_is
from ostinato.models.blocks import ModelBlocks, with_leaves
from ostinato.models.tensors import (
    Constant,
    ExpertBiases,
    ExpertMatrices,
    HeadMatrices,
    Matrices,
    Reference,
    StackedTensors,
    TensorTable,
    is_whole,
)


class DenseLoader:
    """Every tensor in the model's dtype. A backend with a layout of its own derives from it and lays out `matrices`
    and `experts` otherwise."""

    def __init__(self, table: TensorTable, dtype: torch.dtype, device: torch.device, allocate: Allocate) -> None:
        """`allocate`: where memory comes from, an arena or what measures one."""
        self.table, self.dtype, self.device, self.allocate = table, dtype, device, allocate
        self.uploads = Uploads(device)
        self._jobs: list[tuple[str, Tensor]] = []
        self._heads: list[tuple[HeadMatrices, Tensor]] = []

    def leaf(self, reference: Reference) -> Weight:
        """What takes the place of a reference; its values are there once it was read."""
        match reference:
            case Constant():
                return constant(reference, self.dtype, self.device)
            case ExpertMatrices():
                return self.experts(reference)
            case ExpertBiases():
                return self.expert_biases(reference)
            case HeadMatrices():
                return self.head_matrices(reference)
            case Matrices():
                return self.matrices(reference)
            case StackedTensors():
                return self.tensors(reference)
        raise InternalError(f"{reference!r} is no reference to tensors")

    def tensors(self, reference: StackedTensors, dtype: torch.dtype | None = None) -> Tensor:
        """Tensors on top of each other in one piece of memory."""
        dtype = dtype or (torch.float32 if reference.exact else self.dtype)
        out = self.allocate(reference.shape, dtype, self.device)
        out[slice(*reference.zeros)] = 0
        for name, start, stop in reference.placed:
            self.into(name, out[start:stop])
        return out

    def matrices(self, reference: Matrices) -> Weight:
        return self.tensors(reference)

    def experts(self, reference: ExpertMatrices) -> Weight:
        """An expert's parts on top of each other: [n_experts, parts * rows, cols]."""
        rows = reference.size[0]
        whole = self.allocate(reference.shape, self.dtype, self.device)
        for number, names in enumerate(reference.parts):
            self.into_experts(names, whole[:, number * rows : (number + 1) * rows])
        return whole

    def expert_biases(self, reference: ExpertBiases) -> Tensor:
        """An expert's parts side by side: float32 [n_experts, parts * width]."""
        whole, width = self.allocate(reference.shape, torch.float32, self.device), reference.width
        for number, name in enumerate(reference.names):
            self.into(name, whole[:, number * width : (number + 1) * width])
        return whole

    def head_matrices(self, reference: HeadMatrices) -> Weight:
        """[n_heads, rows, cols]."""
        return self.dense_heads(reference, self.dtype)

    def dense_heads(self, reference: HeadMatrices, dtype: torch.dtype) -> Tensor:
        out = self.allocate(reference.shape, dtype, self.device)
        self._heads.append((reference, out))
        return out

    def into_experts(self, names: Sequence[str], out: Tensor) -> None:
        """One part of all experts into memory [n_experts, rows, cols]."""
        if is_whole(tuple(names)):
            self.into(names[0], out)
            return
        for name, own in zip(names, out, strict=True):
            self.into(name, own)

    def into(self, name: str, out: Tensor) -> None:
        """One tensor into memory that is laid out, a view of it included."""
        self._jobs.append((name, out))

    def pieces(self) -> Iterator[WeightPiece]:
        """Everything there is to read."""
        for name, out in self._jobs:
            yield WeightPiece(self.table.info(name).n_bytes, partial(self._read, name, out))
        for reference, out in self._heads:
            yield WeightPiece(self.table.info(reference.name).n_bytes, partial(self._read_heads, reference, out))

    def read(self, progress: Progress | None = None) -> None:
        """Read everything, the largest first, so that no thread is left with one big tensor at the end."""
        pieces = sorted(self.pieces(), key=lambda piece: -piece.n_bytes)
        read_all(pieces, reading_threads(self.device), progress)
        self.uploads.close()

    def _read_heads(self, reference: HeadMatrices, out: Tensor) -> None:
        stored = self.table.values(reference.name, array_dtype(out.dtype))
        values = np.ascontiguousarray(reference.of(stored))
        if out.device.type != "cpu":
            self.uploads.put(values, out)
        else:
            out.copy_(tensor_of(values))

    def _read(self, name: str, out: Tensor) -> None:
        table, there = self.table, out.device.type != "cpu"
        if out.is_contiguous() and table.is_as_stored(name):
            if not there:
                table.checkpoint.read(table.names[name], array_of(out))
                return
            if holds_as_it_is(table.info(name).type, array_dtype(out.dtype)):
                self.uploads.put(table.raw(name), out)
                return
        values = table.values(name, array_dtype(out.dtype))
        if there and out.is_contiguous():
            self.uploads.put(values, out)
        else:
            out.copy_(tensor_of(values).reshape(out.shape))


def reading_threads(device: torch.device) -> int:
    """One for each core that torch uses; to a device, as many as fill the bus."""
    cores = torch.get_num_threads()
    return cores if device.type == "cpu" else max(cores, min(THREADS, os.cpu_count() or 1))


def constant(reference: Constant, dtype: torch.dtype, device: torch.device) -> Tensor:
    parts = [torch.full((size,), value) for size, value in zip(reference.sizes, reference.values, strict=True)]
    return torch.cat(parts).to(device=device, dtype=torch.float32 if reference.exact else dtype)


def load(
    blocks: ModelBlocks,
    table: TensorTable,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    loader: type[DenseLoader] = DenseLoader,
) -> Model:
    """The model with its weights on `device`."""
    measure = Measure()
    with_leaves(blocks, cache(loader(table, dtype, torch.device("meta"), measure).leaf))
    reader = loader(table, dtype, device, BumpAllocator(measure.n_bytes, device))
    loaded = with_leaves(blocks, cache(reader.leaf))  # a tied head is the embedding: made once
    reader.read(progress)
    return Model.of(loaded, dtype=dtype, device=device)
