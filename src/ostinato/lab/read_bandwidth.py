"""The bandwidth of a loop that only reads: the limit for decoding on a CPU.

The native library reads the weights of a step if it is available; otherwise torch sums a large tensor.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.backends.native.library import cpu_library
from ostinato.errors import HardwareCannot


class _Plane(ctypes.Structure):
    """As `backends/native/src/read.h` has it."""

    _fields_ = (("bytes", ctypes.c_void_p), ("n_bytes", ctypes.c_int64))


def read_seconds(tensors: Sequence[Tensor], threads: int, passes: int) -> float:
    """Seconds to read some tensors of the CPU so many times, after once to warm; raises HardwareCannot."""
    read = cpu_library().ostinato_read
    read.restype, read.argtypes = ctypes.c_uint64, (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)
    planes = (_Plane * len(tensors))(*(_Plane(one.data_ptr(), one.numel() * one.element_size()) for one in tensors))
    read(planes, len(tensors), threads, 1)
    started = time.perf_counter()
    read(planes, len(tensors), threads, passes)
    return time.perf_counter() - started


def cpu_bandwidth(n_bytes: int, threads: int, repeats: int) -> float:
    """Bytes per second of a plain read of so much memory, the best of several."""
    data = torch.ones(n_bytes // 4)
    try:
        return n_bytes / min(read_seconds([data], threads, 1) for _ in range(repeats))
    except HardwareCannot:  # no compiler and no prebuilt object: torch reads, as eager does
        data.sum()
        return n_bytes / min(_summed(data) for _ in range(repeats))


def _summed(data: Tensor) -> float:
    started = time.perf_counter()
    data.sum()
    return time.perf_counter() - started
