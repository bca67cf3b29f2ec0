"""Any weight as plain numbers: a tensor, a packed matrix, tiles, or several on top of each other."""

import torch
from torch import Tensor

from ostinato.errors import InternalError
from ostinato.kernels.packed import Packed, Stack, Weight, dense, rows
from ostinato.kernels.tiles import TileMatrix, tile_rows


def dense_of(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The whole weight [rows, cols] as dtype."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    if isinstance(weight, Packed):
        return dense(weight, dtype)
    if isinstance(weight, TileMatrix):
        return tile_rows(weight, torch.arange(weight.rows)).to(dtype)
    return torch.cat([dense_of(part, dtype) for part in weight.parts])


def rows_of(weight: Weight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows of a weight, [len(ids), cols], as dtype."""
    if isinstance(weight, Tensor):
        return weight.index_select(0, ids).to(dtype)
    assert not isinstance(weight, Stack), "an embedding is one matrix"
    return (tile_rows(weight, ids) if isinstance(weight, TileMatrix) else rows(weight, ids)).to(dtype)


def for_a_gpu(weight: Tensor | Packed | TileMatrix) -> Tensor | Packed:
    """A weight that a GPU's kernels multiply: all but tiles, which are the CPU's."""
    if isinstance(weight, TileMatrix):
        raise InternalError("a GPU's kernels were given tiles, which are the CPU's weights")
    return weight
