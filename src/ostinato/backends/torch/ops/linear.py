"""A matrix product with an optional bias: y = x W^T + b."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.backends.cuda.packed import Stack, Weight
from ostinato.backends.native.tiles import TileMatrix
from ostinato.backends.torch.weight import dense_of, tile_product


def linear_torch(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [rows, in] times weight [out, in] gives [rows, out], in x.dtype. Bound by reading the weight at few rows."""
    if isinstance(weight, Stack) and any(isinstance(part, TileMatrix) for part in weight.parts):
        y = torch.cat([linear_torch(x, part, None) for part in weight.parts], -1)
    elif isinstance(weight, TileMatrix):
        y = tile_product(x.reshape(-1, x.shape[-1]), weight).to(x.dtype).view(*x.shape[:-1], -1)
    else:
        return F.linear(x, weight if isinstance(weight, Tensor) else dense_of(weight, x.dtype), bias)
    return y if bias is None else y + bias
