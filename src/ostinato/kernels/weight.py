"""Any weight as plain numbers: a tensor, a packed matrix, or several on top of each other."""

import torch
from torch import Tensor

from ostinato.kernels.packed import Packed, Stack, Weight, dense, rows


def dense_of(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The whole weight [rows, cols] as dtype."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    if isinstance(weight, Packed):
        return dense(weight, dtype)
    return torch.cat([dense_of(part, dtype) for part in weight.parts])


def rows_of(weight: Weight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows of a weight, [len(ids), cols], as dtype."""
    if isinstance(weight, Tensor):
        return weight.index_select(0, ids).to(dtype)
    assert not isinstance(weight, Stack), "an embedding is one matrix"
    return rows(weight, ids).to(dtype)
