"""The bandwidth of a loop that only reads: the limit for decoding on a CPU.

The native library reads the weights of a step if it is available; otherwise numpy sums a large array.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ostinato.backends.native.library import cpu_library
from ostinato.errors import HardwareCannot
from ostinato.loop.plan import Buffer


class _Plane(ctypes.Structure):
    """As `backends/native/src/read.h` has it."""

    _fields_ = (("bytes", ctypes.c_void_p), ("n_bytes", ctypes.c_int64))


def read_seconds(buffers: Sequence[Buffer], threads: int, passes: int) -> float:
    """Seconds to read some of the CPU's memory so many times, after once to warm; raises HardwareCannot."""
    read = cpu_library().ostinato_read
    read.restype, read.argtypes = ctypes.c_uint64, (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)
    planes = (_Plane * len(buffers))(*(_Plane(one.address, one.n_bytes) for one in buffers))
    read(planes, len(buffers), threads, 1)
    started = time.perf_counter()
    read(planes, len(buffers), threads, passes)
    return time.perf_counter() - started


def cpu_bandwidth(n_bytes: int, threads: int, repeats: int) -> float:
    """Bytes per second of a plain read of so much memory, the best of several."""
    data = np.ones(n_bytes // 4, np.float32)
    try:
        return n_bytes / min(read_seconds([Buffer.of("", data)], threads, 1) for _ in range(repeats))
    except HardwareCannot:  # no compiler and no prebuilt object
        parts = np.array_split(data, threads)
        with ThreadPoolExecutor(threads) as pool:
            return n_bytes / min(_summed(pool, parts) for _ in range(repeats + 1))


def _summed(pool: ThreadPoolExecutor, parts: Sequence[np.ndarray]) -> float:
    started = time.perf_counter()
    list(pool.map(np.sum, parts))
    return time.perf_counter() - started
