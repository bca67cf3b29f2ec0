"""Memory of the host as the loop and the native backend have it."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

from ostinato.errors import HardwareCannot
from ostinato.loop.memory import ALIGNMENT, address_of, host_zeros, memory_in, read_only_parts


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


class Pair(NamedTuple):
    left: np.ndarray
    right: np.ndarray


@dataclass(frozen=True, slots=True)
class Block:
    weight: np.ndarray
    others: tuple[Pair, ...]
    width: int = 3


def test_read_only_parts_have_the_same_memory_and_cannot_be_written() -> None:
    one, two = np.zeros(2), np.ones(3)
    block = Block(one, (Pair(one, two),))
    seen = read_only_parts({"first": block, "again": block})
    assert seen["first"] is seen["again"]
    assert (type(seen["first"].others[0]), seen["first"].width) == (Pair, 3)
    before, after = (dict(memory_in(part, "x")) for part in ({"first": block}, {"first": seen["first"]}))
    assert {n: address_of(a) for n, a in before.items()} == {n: address_of(a) for n, a in after.items()}
    assert not any(array.flags.writeable for array in after.values())
    assert all(array.flags.writeable for array in before.values())
