"""Memory that a step reads from end to end, weights and keys and values: on the system's huge pages, where it has them.

A page of 2 MiB needs one TLB entry in place of 512, and the CPU prefetches up to its end. Matrices may be smaller than
such a page, so many share a run of memory; a run is freed when its last matrix is freed. Keys and values have an array
for each layer: there a short sequence would take a huge page of every layer, so each begins with plain ones.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ostinato.errors import HardwareCannot
from ostinato.loop.memory import host_zeros

RUN_BYTES: Final = 256 << 20  # of addresses; memory is taken as it is written
PLAIN_BYTES: Final = 2 << 20
_LINE: Final = 64  # of a cache: where each array begins
_HUGE: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)

# The run that the next arrays are taken from, as long as some array of it is in use.
_lock: Final = threading.Lock()
_current: weakref.ref[mmap.mmap] | None = None
_taken = 0


def streamed(n_bytes: int) -> NDArray[np.uint8]:
    """Uint8 [n_bytes], aligned to 64 bytes, uninitialised: the caller writes it before reading it."""
    global _current, _taken
    if _HUGE is None or n_bytes == 0:
        return host_zeros((n_bytes,), np.uint8)
    with _lock:
        run = None if _current is None else _current()
        at = _taken
        if run is None or at + n_bytes > len(run):
            run, at = _run(max(n_bytes, RUN_BYTES), _HUGE), 0
            _current = weakref.ref(run)
        _taken = at + -(-n_bytes // _LINE) * _LINE
        return np.frombuffer(run, np.uint8, n_bytes, at)


def grown_zeros(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Zeros that take memory as they are written, from the front: plain pages first, then huge ones."""
    kind = np.dtype(dtype)
    n_bytes = prod(shape) * kind.itemsize
    if _HUGE is None or n_bytes <= PLAIN_BYTES:
        return host_zeros(shape, dtype)
    try:
        memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HardwareCannot(
            f"the CPU has no memory for {n_bytes} bytes of keys and values; take a smaller context"
        ) from error
    with suppress(OSError):  # a system without huge pages
        memory.madvise(_HUGE, PLAIN_BYTES, n_bytes - PLAIN_BYTES)
        memory.madvise(mmap.MADV_NOHUGEPAGE, 0, PLAIN_BYTES)
    return np.frombuffer(memory, kind).reshape(shape)


def _run(n_bytes: int, advice: int) -> mmap.mmap:
    """Private memory, which the system maps page by page on the first write."""
    try:
        run = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HardwareCannot(f"the CPU has no memory for {n_bytes} bytes of weights; take a smaller model") from error
    with suppress(OSError):  # a system without huge pages: the same memory, a little slower
        run.madvise(advice)
    return run
