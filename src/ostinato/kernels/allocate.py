"""Memory for tensors, or an error that says how much was asked for and where."""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from ostinato.errors import HardwareCannot


def empty(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory whose contents nobody may read before writing them."""
    return _claimed(torch.empty, size, dtype, device)


def zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory; on the CPU the system hands it out page by page, as it is first written."""
    return _claimed(_system_zeros if device.type == "cpu" else torch.zeros, size, dtype, device)


def _system_zeros(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """By numpy, which asks the system for zeros where torch would write them."""
    n_bytes = prod(size) * dtype.itemsize
    if n_bytes == 0:
        return torch.zeros(tuple(size), dtype=dtype)
    return torch.from_numpy(np.zeros(n_bytes, np.uint8)).view(dtype).view(tuple(size))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be had: torch has no one kind for it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and ("allocate memory" in str(error) or "storage size" in str(error))


def _claimed(make: Callable[..., Tensor], size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        return make(tuple(size), dtype=dtype, device=device)
    except (MemoryError, RuntimeError, OverflowError) as error:
        raise HardwareCannot(
            f"{device} has no memory for a tensor of {' x '.join(map(str, size))} {str(dtype).removeprefix('torch.')}; "
            "take a smaller model or context"
        ) from error
