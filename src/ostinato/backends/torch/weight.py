"""Any weight as plain numbers: a tensor, a packed matrix, tiles, one on the tape, or several on top of each other."""

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.cuda.packed import Packed, Stack, Weight, dense, rows
from ostinato.backends.native.tiles import TileMatrix, product, tile_rows
from ostinato.backends.tape.pack import unpack_torch
from ostinato.backends.tape.tape_weight import TapeWeight
from ostinato.errors import InternalError


def dense_of(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The whole weight [rows, cols] as dtype."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    if isinstance(weight, Packed):
        return dense(weight, dtype)
    if isinstance(weight, TileMatrix):
        return torch.from_numpy(tile_rows(weight, np.arange(weight.rows))).to(dtype)
    if isinstance(weight, TapeWeight):
        return unpacked(weight).to(dtype)
    return torch.cat([dense_of(part, dtype) for part in weight.parts])


def rows_of(weight: Weight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows of a weight, [len(ids), cols], as dtype."""
    if isinstance(weight, Tensor):
        return weight.index_select(0, ids).to(dtype)
    assert not isinstance(weight, Stack | TapeWeight), "an embedding is one matrix, and never on the tape alone"
    if isinstance(weight, TileMatrix):
        return torch.from_numpy(tile_rows(weight, ids.numpy())).to(dtype)
    return rows(weight, ids).to(dtype)


def tile_product(x: Tensor, weight: TileMatrix) -> Tensor:
    """x [n, cols] times a matrix in tiles: float32 [n, rows], with the very bits that the native loop has."""
    return torch.from_numpy(product(x.float().numpy(), weight, torch.get_num_threads()))


def unpacked(weight: TapeWeight) -> Tensor:
    """A weight of the tape in memory of its own: by the kernel where the tape lies on a GPU, else by its twin."""
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    if weight.device.type == "cuda":
        from ostinato.backends.tape.unpack import bind_unpack

        bind_unpack(weight, out)()
    else:
        unpack_torch(weight, out)
    return out


def for_a_gpu(weight: Tensor | Packed | TileMatrix | TapeWeight) -> Tensor | Packed:
    """A weight that a GPU's kernels multiply: all but tiles, which are the CPU's, and what must be unpacked first."""
    if isinstance(weight, TileMatrix):
        raise InternalError("a GPU's kernels were given tiles, which are the CPU's weights")
    if isinstance(weight, TapeWeight):
        raise InternalError("a product was given a weight of the tape, which is unpacked first")
    return weight
