"""Memory of the host as the loop and the native backend have it."""

import numpy as np
import pytest

from ostinato.errors import HardwareCannot
from ostinato.loop.memory import ALIGNMENT, address_of, host_zeros, memory_in


def test_memory_is_zeroed_and_aligned_whatever_its_size() -> None:
    kept = [host_zeros((size, 3), np.int64) for size in (1, 7, 1000)]
    for array in kept:
        assert address_of(array) % ALIGNMENT == 0
        assert array.flags.c_contiguous
        assert not array.any()


@pytest.mark.parametrize("shape", [(1 << 50,), (1 << 62, 8)])
def test_more_than_there_is_is_refused_in_words(shape: tuple[int, ...]) -> None:
    with pytest.raises(HardwareCannot, match=f"no memory for a tensor of {shape[0]}.* float32; take a smaller"):
        host_zeros(shape, np.float32)


def test_memory_is_found_by_its_path() -> None:
    one, two, three = (np.zeros(2) for _ in range(3))
    found = dict(memory_in({"any": (one, "text", [two]), "other": three}, "x"))
    assert {name: address_of(array) for name, array in found.items()} == {
        "x.0.0": address_of(one),
        "x.0.2.0": address_of(two),
        "x.1": address_of(three),
    }
