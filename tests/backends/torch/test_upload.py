"""Bytes that go through windows arrive as they were, whatever their size and from whichever thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from ostinato.backends.torch.upload import Uploads

CPU = torch.device("cpu")


@pytest.mark.parametrize("n", [1, 63, 64, 65, 128, 129, 1000])
def test_bytes_arrive_whatever_their_number(n: int) -> None:
    source = np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8)
    source.setflags(write=False)  # as a memory map is
    room = torch.full((n + 8,), 7, dtype=torch.uint8)
    Uploads(CPU, window_bytes=64).put(source, room[4 : n + 4])
    assert torch.equal(room[4 : n + 4], torch.from_numpy(source.copy()))
    assert bool((room[:4] == 7).all() and (room[n + 4 :] == 7).all())


def test_values_of_any_shape_and_order_arrive_from_many_threads() -> None:
    uploads = Uploads(CPU, window_bytes=256)
    sources = [torch.randn(7, 33).bfloat16().t() for _ in range(20)]
    outs = [torch.zeros(33, 7, dtype=torch.bfloat16) for _ in sources]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(uploads.put, sources, outs))
    uploads.close()
    assert all(torch.equal(out, source) for out, source in zip(outs, sources, strict=True))
