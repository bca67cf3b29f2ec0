"""A matrix product with an optional bias: y = x W^T + b."""

import torch.nn.functional as F
from torch import Tensor

from ostinato.kernels.packed import Weight
from ostinato.kernels.weight import dense_of


def linear_torch(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [rows, in] times weight [out, in] gives [rows, out], in x.dtype. Bound by reading the weight at few rows."""
    return F.linear(x, weight if isinstance(weight, Tensor) else dense_of(weight, x.dtype), bias)
