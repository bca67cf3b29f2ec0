"""Bytes of the host onto a device, through windows of pinned memory, two in turn (E-33).

A copy from ordinary memory goes through a small buffer of the driver's, and waits for it; from pinned memory it runs by
itself while the other window is being filled. Every thread has windows and a stream of its own, so that several fill at
once: one core copies more slowly than the bus.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WINDOW_BYTES: Final = 8 << 20
THREADS: Final = 8  # that upload at once; more do not make the bus faster


class Uploads:
    """Where threads upload to one device; `close` once all have ended."""

    def __init__(self, device: torch.device, window_bytes: int = WINDOW_BYTES) -> None:
        self._device, self._window_bytes = device, window_bytes
        self._own = threading.local()

    def put(self, source: NDArray[Any] | Tensor, out: Tensor) -> None:
        """Copy everything; `out`, contiguous, has as many bytes, and has them when this returns."""
        given = source.contiguous().view(-1).view(torch.uint8).numpy() if isinstance(source, Tensor) else source
        raw = np.ascontiguousarray(given).view(np.uint8).reshape(-1)
        target = out.view(-1).view(torch.uint8)
        windows: _Windows | None = getattr(self._own, "windows", None)
        if windows is None:
            windows = self._own.windows = _Windows(self._device, self._window_bytes)
        windows.put(raw, target)

    def close(self) -> None:
        """Give the windows back to the system: torch would keep them for the next allocation of pinned memory."""
        self._own = threading.local()
        give_back = getattr(torch._C, "_host_emptyCache", None)
        if self._device.type == "cuda" and give_back is not None:
            give_back()


class _Windows:
    """Two windows and a stream. On the CPU, where nothing is uploaded but by tests, they are plain memory."""

    def __init__(self, device: torch.device, n_bytes: int) -> None:
        on_gpu, cuda = device.type == "cuda", _cuda()
        self._device = device
        self._stream: Any = cuda.Stream(device) if on_gpu else None
        self._windows = [_window(n_bytes, pinned=on_gpu) for _ in range(2)]
        self._copied: list[Any] = [cuda.Event() if on_gpu else None for _ in range(2)]

    def put(self, raw: NDArray[np.uint8], out: Tensor) -> None:
        size = len(self._windows[0])
        if self._stream is not None:
            # What had this memory before may still be at work on the stream that it was allocated on.
            self._stream.wait_stream(_cuda().current_stream(self._device))
        for number, start in enumerate(range(0, len(raw), size)):
            piece = raw[start : start + size]
            window, copied = self._windows[number % 2][: len(piece)], self._copied[number % 2]
            if copied is not None:
                copied.synchronize()  # what was in this window has left it
            window.numpy()[:] = piece
            with self._on_stream():
                out[start : start + size].copy_(window, non_blocking=True)
            if copied is not None:
                copied.record(self._stream)
        if self._stream is not None:
            self._stream.synchronize()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _window(n_bytes: int, *, pinned: bool) -> Tensor:
    """Plain memory where the system gives no pinned memory, as WSL may: the copy is then slower, and as right."""
    try:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError:
        return torch.empty(n_bytes, dtype=torch.uint8)


def _cuda() -> Any:
    """torch leaves its streams and events untyped."""
    return torch.cuda
