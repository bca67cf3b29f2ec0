"""Memory for tensors, or an error that says how much was asked for and where."""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from ostinato.errors import HardwareCannot, InternalError, first_line

Allocate = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]  # as `empty` does


def empty(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory: the caller writes it before reading it."""
    return _claimed(torch.empty, size, dtype, device)


def zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory; on the CPU the system hands it out page by page, as it is first written."""
    return _claimed(_system_zeros if device.type == "cpu" else torch.zeros, size, dtype, device)


def pinned_zeros(size: Sequence[int], dtype: torch.dtype, what: str) -> Tensor:
    """Zeroed host memory that a GPU reads and writes by itself; the system may give little of it, as WSL does."""
    try:
        return torch.zeros(tuple(size), dtype=dtype, pin_memory=True)
    except (MemoryError, RuntimeError) as error:
        n_bytes, cause = prod(size) * dtype.itemsize, first_line(error)
        raise HardwareCannot(
            f"the system gives no {n_bytes / 2**20:.1f} MiB of pinned memory for {what} ({cause}); lower --slots and "
            "--context, and on WSL 2 raise `memory` in .wslconfig"
        ) from error


ALIGNMENT = 256  # bytes: of every piece of an arena


class Measure:
    """Replaces `empty` and allocates nothing: counts the bytes that an arena for all its requests must hold."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def __call__(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        self.n_bytes += _aligned(prod(size) * dtype.itemsize)
        return torch.empty(tuple(size), dtype=dtype, device="meta")


class BumpAllocator:
    """One allocation in place of many: handed out piece by piece, each aligned, in the order of the requests (E-16).

    Replaces `empty` for a caller that allocates exactly what was measured before. The pieces keep it alive.
    """

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        self.n_bytes = n_bytes
        memory = empty((n_bytes + ALIGNMENT,), torch.uint8, device)
        self._free = memory[-memory.data_ptr() % ALIGNMENT :][:n_bytes]

    def __call__(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        n_bytes = prod(size) * dtype.itemsize
        if n_bytes > len(self._free):
            raise InternalError(f"an arena of {self.n_bytes} bytes has no {n_bytes} left; it was measured too small")
        piece, self._free = self._free[:n_bytes], self._free[_aligned(n_bytes) :]
        return piece.view(dtype).view(tuple(size))


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


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
