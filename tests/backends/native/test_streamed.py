"""Memory for weights: many small tensors in one run of it, which goes when the last of them does."""

import weakref

import pytest
import torch

from ostinato.backends.native import streamed as module
from ostinato.backends.native.streamed import RUN_BYTES, streamed
from ostinato.errors import HardwareCannot


def test_tensors_lie_apart_and_on_cache_lines() -> None:
    sizes = [1, 64, 100, 0, 4096, 3]
    tensors = [streamed(size) for size in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert tensor.shape == (size,)
        assert tensor.data_ptr() % 64 == 0
        assert (tensor == number).all()


def test_a_run_is_given_back_with_its_last_tensor() -> None:
    first = streamed(RUN_BYTES)  # a run of its own, and nothing left in it
    assert module._current is not None
    run = module._current
    second = streamed(10)
    assert module._current is not run
    assert run() is not None
    del first
    assert run() is None
    shared = module._current
    third = streamed(10)
    del second
    assert isinstance(shared, weakref.ref)
    assert shared() is not None
    third.fill_(1)
    del third
    assert shared() is None
    assert streamed(10).dtype == torch.uint8


def test_more_than_there_is_is_refused_in_words() -> None:
    with pytest.raises(HardwareCannot, match="no memory for"):
        streamed(1 << 60)
