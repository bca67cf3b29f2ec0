"""Tensors of the host as numpy arrays and back, over the same memory; bfloat16 as uint16 (`files/checkpoint.py`)."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.files.checkpoint import BFLOAT16


def array_of(tensor: Tensor) -> NDArray[Any]:
    """The memory of a tensor."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def tensor_of(array: NDArray[Any]) -> Tensor:
    """The memory of an array."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == BFLOAT16 else tensor


def array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """What an array over a tensor of this dtype has."""
    return array_of(torch.empty(0, dtype=dtype)).dtype
