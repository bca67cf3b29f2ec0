"""Packs matrices from the mapped file into the CPU's tiles (`backends/native/tiles.py`).

A matrix is packed a few tiles at a time, straight from the file's pages, which are let go as soon as they were read: no
weight is in memory twice, and any number of threads can work at one large tensor. What a tile cannot hold as the file
has it is dequantised and kept as the nearest type that one can. What is no matrix becomes an array of float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ostinato.backends.loading import Progress, WeightPiece, read_all
from ostinato.backends.native.tiles import TileMatrix, empty_tiles, fill_tiles, nearest_type, tile_bytes
from ostinato.backends.weights import Stack
from ostinato.errors import InternalError
from ostinato.files.checkpoint import BFLOAT16
from ostinato.files.quants import BLOCKS, check_readable, dequantize
from ostinato.models.blocks import LoadedModel, ModelBlocks, with_leaves
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
from ostinato.options import Activations

if TYPE_CHECKING:
    from ostinato.files.checkpoint import TensorInfo

TILE_ROWS: Final = 16
# Of the file, packed by one call: enough that the call is nothing beside it, little enough to be shared out.
PIECE_BYTES: Final = 1 << 20
_FLOAT32: Final = np.dtype(np.float32)
_ROUNDED: Final = {"F16": np.dtype(np.float16), "BF16": BFLOAT16}  # types that a changed tensor is kept in
# Of two dimensions, and no product is made with them: they are added to rows (the tokens' may be a head too), or are
# what recurrent blocks convolve and scan with.
NO_MATRICES: Final = (
    "position_embd.weight",
    "token_types.weight",
    "ssm_conv1d.weight",
    "ssm_a",
    "ssm_d",
    "ssm_norm.weight",
)


def load_tiles(
    blocks: ModelBlocks,
    table: TensorTable,
    activations: Activations,
    n_threads: int,
    progress: Progress | None = None,
) -> LoadedModel:
    """The model over tiles, to be multiplied with such activations, and over arrays of float32."""
    loader = TileLoader(table, wide=activations == "wide")
    loaded = with_leaves(blocks, cache(loader.leaf))  # a tied head is the embedding: made once
    read_all(loader.pieces(), n_threads, progress)
    return LoadedModel.over(loaded, frequencies=loaded.shape.frequencies(), dtype="float32", device="cpu")


class TileLoader:
    """Lays out what takes the place of references, and reads it piece by piece. Tiles lie in runs of their own
    (`backends/native/streamed.py`)."""

    def __init__(self, table: TensorTable, *, wide: bool) -> None:
        self._table, self._wide = table, wide
        self._arrays: list[tuple[str, NDArray[np.float32]]] = []
        self._matrices: list[tuple[str, int, TileMatrix]] = []  # of a tensor, from which row of its bytes on
        # Kept by the file otherwise than we do: a tensor, and the matrices that its rows become, in order.
        self._changed: list[tuple[str, list[TileMatrix]]] = []
        self._some_rows: list[tuple[HeadMatrices, list[TileMatrix]]] = []

    def leaf(self, reference: Reference) -> Any:
        match reference:
            case Constant():
                return np.repeat(np.array(reference.values, np.float32), reference.sizes)
            case ExpertMatrices():
                return self._experts(reference)
            case ExpertBiases():
                return self._expert_biases(reference)
            case HeadMatrices():
                return self._heads(reference)
            case Matrices():
                return self._stack(reference)
            case StackedTensors():
                return self._array(reference)
        raise InternalError(f"{reference!r} is no reference to tensors")

    def pieces(self) -> Iterator[WeightPiece]:
        """Everything there is to read, each byte once."""
        for name, out in self._arrays:
            yield WeightPiece(self._table.info(name).n_bytes, partial(self._read, name, out))
        for name, first, tiles in self._matrices:
            info = self._table.info(name)
            row_bytes = max(1, info.n_bytes * info.shape[-1] // max(1, info.n_elements))
            step = max(1, PIECE_BYTES // row_bytes // TILE_ROWS) * TILE_ROWS
            for start in range(0, tiles.rows, step):
                stop = min(tiles.rows, start + step)
                yield WeightPiece((stop - start) * row_bytes, partial(self._pack, name, first, tiles, start, stop))
        for reference, heads in self._some_rows:
            yield WeightPiece(self._table.info(reference.name).n_bytes, partial(self._pack_heads, reference, heads))
        for name, matrices in self._changed:
            yield WeightPiece(self._table.info(name).n_bytes, partial(self._pack_changed, name, matrices))

    def _array(self, reference: StackedTensors) -> NDArray[np.float32]:
        out = np.empty(reference.shape, np.float32)
        out[slice(*reference.zeros)] = 0
        for name, start, stop in reference.placed:
            self._arrays.append((name, out[start:stop]))
        return out

    def _expert_biases(self, reference: ExpertBiases) -> NDArray[np.float32]:
        """An expert's parts side by side."""
        out, width = np.empty(reference.shape, np.float32), reference.width
        for number, name in enumerate(reference.names):
            self._arrays.append((name, out[:, number * width : (number + 1) * width]))
        return out

    def _stack(self, reference: Matrices) -> TileMatrix | Stack:
        """One matrix for each tensor; two for one that is halves, because the second would begin inside of a tile."""
        if reference.halves:
            (name,), (rows, cols) = reference.names, reference.shape
            return Stack(tuple(self._rows(name, rows // 2, cols, first) for first in (0, rows // 2)))
        tiles = [self._matrix(name, *shape) for name, shape in reference.wanted]
        return tiles[0] if len(tiles) == 1 else Stack(tuple(tiles))

    def _heads(self, reference: HeadMatrices) -> tuple[TileMatrix, ...]:
        """A matrix for each head, as for experts."""
        n, (rows, cols) = reference.n_heads, reference.size
        if reference.rows is None:
            return tuple(self._cut(reference.name, n, rows, cols))
        type = self._table.info(reference.name).type
        tiles = [empty_tiles(type if type in _ROUNDED else "F32", rows, cols, wide=self._wide) for _ in range(n)]
        self._some_rows.append((reference, tiles))
        return tuple(tiles)

    def _experts(self, reference: ExpertMatrices) -> tuple[TileMatrix | Stack, ...]:
        """Every expert by itself: the native loop multiplies with those that a row was sent to."""
        n = reference.n_experts
        if reference.halves:
            ((name,),), (rows, cols) = reference.parts, reference.size
            halves = self._cut(name, 2 * n, rows // 2, cols)
            return tuple(Stack((gate, up)) for gate, up in zip(halves[::2], halves[1::2], strict=True))
        parts = [self._of_experts(names, reference) for names in reference.parts]
        return tuple(own[0] if len(own) == 1 else Stack(own) for own in zip(*parts, strict=True))

    def _of_experts(self, names: Sequence[str], reference: ExpertMatrices) -> list[TileMatrix]:
        rows, cols = reference.size
        if not is_whole(tuple(names)):
            return [self._matrix(name, rows, cols) for name in names]
        return self._cut(names[0], reference.n_experts, rows, cols)

    def _cut(self, name: str, n: int, rows: int, cols: int) -> list[TileMatrix]:
        """A tensor as n matrices of so many rows each."""
        if self._table.keeps_rows(name):
            return [self._rows(name, rows, cols, number * rows) for number in range(n)]
        return self._changed_rows(name, n, rows, cols)

    def _changed_rows(self, name: str, n: int, rows: int, cols: int) -> list[TileMatrix]:
        """The same of what the file keeps otherwise: floats of its type, or float32."""
        type = self._table.info(name).type
        tiles = [empty_tiles(type if type in _ROUNDED else "F32", rows, cols, wide=self._wide) for _ in range(n)]
        self._changed.append((name, tiles))
        return tiles

    def _matrix(self, name: str, rows: int, cols: int) -> TileMatrix:
        return self._cut(name, 1, rows, cols)[0]

    def _rows(self, name: str, rows: int, cols: int, first: int) -> TileMatrix:
        """Rows [first, first + rows) of a tensor."""
        tiles = empty_tiles(nearest_type(self._table.info(name).type), rows, cols, wide=self._wide)
        self._matrices.append((name, first, tiles))
        return tiles

    def _read(self, name: str, out: NDArray[np.float32]) -> None:
        out[:] = self._table.values(name, _FLOAT32).reshape(out.shape)

    def _pack(self, name: str, first: int, tiles: TileMatrix, start: int, stop: int) -> None:
        stored = self._table.info(name)
        raw = self._table.raw_rows(name, first + start, first + stop)
        fill_tiles(tiles, raw if stored.type == tiles.type else requantised(raw, stored.type, tiles.type), start)
        self._table.let_go(name, first + start, first + stop)

    def _pack_heads(self, reference: HeadMatrices, matrices: list[TileMatrix]) -> None:
        dtype = _ROUNDED.get(matrices[0].type, _FLOAT32)
        ours = np.ascontiguousarray(reference.of(self._table.values(reference.name, dtype)))
        for tiles, own in zip(matrices, ours, strict=True):
            fill_tiles(tiles, own.view(np.uint8), 0)

    def _pack_changed(self, name: str, matrices: list[TileMatrix]) -> None:
        first = matrices[0]
        ours = self._table.values(name, _ROUNDED.get(first.type, _FLOAT32)).reshape(len(matrices), *first.shape)
        for tiles, own in zip(matrices, ours, strict=True):
            fill_tiles(tiles, own.view(np.uint8), 0)


def is_matrix(tensor: TensorInfo) -> bool:
    """Whether a tensor is multiplied with, alone or as one of the experts: what goes into tiles."""
    return len(tensor.shape) >= 2


def tiled_bytes(name: str, tensor: TensorInfo) -> int:
    """What a tensor of this name of ours takes in memory beside the native loop: tiles, or float32 where nothing is
    multiplied with it."""
    if not is_matrix(tensor) or name.endswith(NO_MATRICES):
        return tensor.n_elements * _FLOAT32.itemsize
    *outer, rows, cols = tensor.shape
    return int(np.prod(outer, dtype=np.int64)) * tile_bytes(nearest_type(tensor.type), rows, cols)


def requantised(raw: NDArray[np.uint8], stored: str, kept: str) -> NDArray[np.uint8]:
    """Rows of one type, uint8 [rows, row_bytes], as rows of another."""
    check_readable(stored, "the tensor")
    values = dequantize(raw, stored)
    return q8_0_blocks(values) if kept == "Q8_0" else values.view(np.uint8)


def q8_0_blocks(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rows of float32 [rows, cols] as Q8_0 blocks: of 32 numbers the largest is 127 times the block's scale.

    >>> q8_0_blocks(np.full((1, 32), 2.0, np.float32))[0, 2:].view(np.int8).max()
    np.int8(127)
    """
    block = BLOCKS["Q8_0"]
    groups = values.reshape(-1, block.elements)
    scale = (np.abs(groups).max(1, keepdims=True) / 127).astype(np.float16)
    steps = scale.astype(np.float32)
    quants = np.rint(np.divide(groups, steps, out=np.zeros_like(groups), where=steps != 0))
    out = np.empty((len(groups), block.n_bytes), np.uint8)
    out[:, :2] = scale.view(np.uint8)
    out[:, 2:] = np.clip(quants, -127, 127).astype(np.int8).view(np.uint8)
    return out.reshape(len(values), -1)
