"""Matrices on their way from the mapped file into the CPU's tiles (`backends/native/tiles.py`).

A matrix is packed a few tiles at a time, straight from the file's pages, which are let go as soon as they were read: no
weight is in memory twice, and any number of threads can work at one large tensor. What a tile cannot hold as the file
has it is dequantised and kept as the nearest type that one can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.backends.native.tiles import TILE_TYPES, TileMatrix, empty_tiles, fill_tiles, nearest_type, tile_bytes
from ostinato.files.quants import BLOCKS, check_readable, dequantize

if TYPE_CHECKING:
    from ostinato.files.checkpoint import Checkpoint, TensorInfo

TILE_ROWS: Final = 16
# Of the file, packed by one call: enough that the call is nothing beside it, little enough to be shared out.
PIECE_BYTES: Final = 1 << 20
_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TilePiece:
    """Some bytes of the file to be read and put where they belong; may run beside any other."""

    n_bytes: int
    read: Callable[[], None]


class TileReader:
    """Lays out tiles for the matrices of a checkpoint, and packs them piece by piece."""

    def __init__(self, checkpoint: Checkpoint, *, wide: bool) -> None:
        self._checkpoint, self._wide = checkpoint, wide
        self._matrices: list[tuple[str, int, TileMatrix]] = []  # of a tensor, from which row of its bytes on
        self._changed: list[tuple[str, Callable[[Tensor], Tensor], TileMatrix]] = []

    def matrix(self, name: str, rows: int, cols: int, *, first: int = 0) -> TileMatrix:
        """Tiles for rows [first, first + rows) of a tensor of the file; filled when its pieces were read."""
        tiles = empty_tiles(tile_type(self._checkpoint.tensors[name].type), rows, cols, wide=self._wide)
        self._matrices.append((name, first, tiles))
        return tiles

    def changed(self, name: str, rows: int, cols: int, values: Callable[[Tensor], Tensor]) -> TileMatrix:
        """Tiles for a tensor that the format keeps otherwise than we do: its values, changed, as float32."""
        tiles = empty_tiles("F32", rows, cols, wide=self._wide)
        self._changed.append((name, values, tiles))
        return tiles

    def pieces(self) -> Iterator[TilePiece]:
        """Everything there is to read, each byte once."""
        for name, first, tiles in self._matrices:
            row_bytes = max(1, self._checkpoint.raw(name).shape[1])
            step = max(1, PIECE_BYTES // row_bytes // TILE_ROWS) * TILE_ROWS
            for start in range(0, tiles.rows, step):
                stop = min(tiles.rows, start + step)
                yield TilePiece((stop - start) * row_bytes, partial(self._pack, name, first, tiles, start, stop))
        for name, values, tiles in self._changed:
            yield TilePiece(self._checkpoint.tensors[name].n_bytes, partial(self._pack_changed, name, values, tiles))

    def _pack(self, name: str, first: int, tiles: TileMatrix, start: int, stop: int) -> None:
        stored = self._checkpoint.tensors[name].type
        raw = self._checkpoint.raw(name)[first + start : first + stop]
        fill_tiles(tiles, raw if stored == tiles.type else requantised(raw, stored, tiles.type), start)
        self._checkpoint.let_go(name, first + start, first + stop)

    def _pack_changed(self, name: str, values: Callable[[Tensor], Tensor], tiles: TileMatrix) -> None:
        plain = torch.empty(tuple(self._checkpoint.tensors[name].shape), dtype=torch.float32)
        self._checkpoint.read(name, plain.numpy())
        ours = values(plain).reshape(tiles.rows, tiles.cols).contiguous()
        fill_tiles(tiles, ours.view(torch.uint8).numpy(), 0)


def tile_type(stored: str) -> str:
    """What a matrix of a file's type is in tiles: the same, or the nearest that they hold."""
    return stored if stored in TILE_TYPES else nearest_type(stored)


def is_matrix(tensor: TensorInfo) -> bool:
    """Whether a tensor is multiplied with, alone or as one of the experts: what goes into tiles."""
    return len(tensor.shape) >= 2


def tiled_bytes(tensor: TensorInfo) -> int:
    """What a tensor takes in memory beside the native loop: tiles, or float32 where it is no matrix."""
    if not is_matrix(tensor):
        return tensor.n_elements * torch.float32.itemsize
    *outer, rows, cols = tensor.shape
    return int(np.prod(outer, dtype=np.int64)) * tile_bytes(tile_type(tensor.type), rows, cols)


def requantised(raw: NDArray[np.uint8], stored: str, kept: str) -> NDArray[np.uint8]:
    """Rows of one type, uint8 [rows, row_bytes], as rows of another."""
    check_readable(stored, "the tensor")
    values = dequantize(raw, stored)
    if kept == "Q8_0":
        return q8_0_blocks(values)
    return torch.from_numpy(values).to(_PLAIN[kept]).view(torch.uint8).numpy()


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
