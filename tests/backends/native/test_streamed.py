"""Memory for weights: many small arrays in one run of it, which goes when the last of them does."""

import weakref

import numpy as np
import pytest

from ostinato.backends.native import streamed as module
from ostinato.backends.native.streamed import RUN_BYTES, streamed
from ostinato.errors import HardwareCannot


def test_arrays_lie_apart_and_on_cache_lines() -> None:
    sizes = [1, 64, 100, 0, 4096, 3]
    arrays = [streamed(size) for size in sizes]
    for number, array in enumerate(arrays):
        array.fill(number)
    for number, (size, array) in enumerate(zip(sizes, arrays, strict=True)):
        assert array.shape == (size,)
        assert size == 0 or array.ctypes.data % 64 == 0
        assert (array == number).all()


def test_a_run_is_given_back_with_its_last_array() -> None:
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
    third.fill(1)
    del third
    assert shared() is None
    assert streamed(10).dtype == np.uint8


def test_more_than_there_is_is_refused_in_words() -> None:
    with pytest.raises(HardwareCannot, match="no memory for"):
        streamed(1 << 60)
