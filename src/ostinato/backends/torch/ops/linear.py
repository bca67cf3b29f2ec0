"""A matrix product with an optional bias: y = x W^T + b."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.backends.torch.weight import Weight, dense_of
from ostinato.backends.weights import HostMatrix, Stack


def linear_torch(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [rows, in] times weight [out, in] gives [rows, out], in x.dtype. Bound by reading the weight at few rows.

    A matrix that its backend multiplies itself has the bits here that it has there.
    """
    if isinstance(weight, Stack) and any(isinstance(part, HostMatrix) for part in weight.parts):
        y = torch.cat([linear_torch(x, part, None) for part in weight.parts], -1)
    elif isinstance(weight, HostMatrix):
        rows = x.to(torch.float32).reshape(-1, x.shape[-1]).contiguous()
        product = weight.product(rows.numpy(), torch.get_num_threads())
        y = torch.from_numpy(product).to(x.dtype).view(*x.shape[:-1], weight.shape[0])
    else:
        return F.linear(x, weight if isinstance(weight, Tensor) else dense_of(weight, x.dtype), bias)
    return y if bias is None else y + bias
