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


def as_tensor(memory: NDArray[Any] | Tensor) -> Tensor:
    """The memory of an array, whatever its type is called; a tensor as it is."""
    if isinstance(memory, np.ndarray) and not memory.flags.writeable:
        memory = np.asarray(_Unlocked(memory))  # torch has no tensors that are only read, and warns of such arrays
    return torch.as_tensor(memory)


class _Unlocked:
    """The same memory without its lock, kept alive."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def tensor_of(array: NDArray[Any]) -> Tensor:
    """The memory of an array."""
    tensor = as_tensor(array)
    return tensor.view(torch.bfloat16) if array.dtype == BFLOAT16 else tensor


def array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """What an array over a tensor of this dtype has."""
    return array_of(torch.empty(0, dtype=dtype)).dtype
