"""Bytes that go through windows arrive as they were, whatever their size and from whichever thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.backends.torch import upload
from ostinato.backends.torch.allocate import pinned_zeros
from ostinato.backends.torch.upload import Uploads
from ostinato.errors import HardwareCannot

CPU = torch.device("cpu")


@pytest.mark.parametrize("n", [1, 63, 64, 65, 128, 129, 1000])
def test_bytes_arrive_whatever_their_number(n: int) -> None:
    """E-33."""
    source = np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8)
    source.setflags(write=False)  # as a memory map is
    room = torch.full((n + 8,), 7, dtype=torch.uint8)
    Uploads(CPU, window_bytes=64).put(source, room[4 : n + 4])
    assert torch.equal(room[4 : n + 4], torch.from_numpy(source.copy()))
    assert bool((room[:4] == 7).all() and (room[n + 4 :] == 7).all())


def test_values_of_any_shape_and_order_arrive_from_many_threads() -> None:
    """E-33."""
    uploads = Uploads(CPU, window_bytes=256)
    sources = [torch.randn(7, 33).bfloat16().t() for _ in range(20)]
    outs = [torch.zeros(33, 7, dtype=torch.bfloat16) for _ in sources]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(uploads.put, sources, outs))
    uploads.close()
    assert all(torch.equal(out, source) for out, source in zip(outs, sources, strict=True))


def test_where_the_system_gives_no_pinned_memory_windows_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on WSL, which limits it; a stub refuses it here."""
    monkeypatch.setattr(torch, "empty", without_pinned(torch.empty))
    assert len(upload._window(100, pinned=True)) == 100


def test_rings_that_cannot_be_pinned_are_refused_with_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "zeros", without_pinned(torch.zeros))
    words = (
        r"gives no 3\.0 MiB of pinned memory for the rings \(CUDA error: out of memory\); lower --slots .* \.wslconfig"
    )
    with pytest.raises(HardwareCannot, match=words):
        pinned_zeros((3 << 20,), torch.uint8, "the rings")


def without_pinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*size: Any, pin_memory: bool = False, **words: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
        return make(*size, **words)

    return made
