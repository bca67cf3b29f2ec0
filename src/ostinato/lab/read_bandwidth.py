"""The bandwidth of a loop that only reads: the limit for decoding on a CPU.

The native library reads the weights of a step if it is available; otherwise numpy sums a large array.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ostinato.backends.native.library import cpu_library
from ostinato.errors import HardwareCannot
from ostinato.loop.memory import memory_in
from ostinato.loop.plan import Buffer, without_repeats

if TYPE_CHECKING:
    from ostinato.models.blocks import LoadedModel


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


def cache_bytes() -> int:
    """The size of this CPU's largest cache; 0 where the system does not say."""
    sizes = (path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return max((int(size[:-1]) << 10 for size in sizes if re.fullmatch(r"\d+K", size)), default=0)


def weights_bandwidth(model: LoadedModel, threads: int, repeats: int, least_bytes: int) -> float:
    """Bytes per second at which a CPU reads all weights of a model again and again, the best of several. Each
    measurement reads `least_bytes` or more."""
    weights = without_repeats([Buffer.of(name, memory) for name, memory in memory_in(model, "")])
    n_bytes = sum(one.n_bytes for one in weights)
    passes = max(1, least_bytes // n_bytes)
    try:
        return passes * n_bytes / min(read_seconds(weights, threads, passes) for _ in range(repeats))
    except HardwareCannot:  # no compiler and no prebuilt object
        return cpu_bandwidth(least_bytes, threads, repeats)


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
