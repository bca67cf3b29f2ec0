"""Memory for weights that are read from end to end at every step: on the system's huge pages, where it has them.

A page of 2 MiB needs one TLB entry in place of 512, and the CPU prefetches up to its end. Matrices may be smaller than
such a page, so many share a run of memory; a run is freed when its last matrix is freed.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ostinato.errors import HardwareCannot
from ostinato.loop.memory import host_zeros

RUN_BYTES: Final = 256 << 20  # of addresses; memory is taken as it is written
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


def _run(n_bytes: int, advice: int) -> mmap.mmap:
    """Private memory, which the system maps page by page on the first write."""
    try:
        run = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HardwareCannot(f"the CPU has no memory for {n_bytes} bytes of weights; take a smaller model") from error
    with suppress(OSError):  # a system without huge pages: the same memory, a little slower
        run.madvise(advice)
    return run
