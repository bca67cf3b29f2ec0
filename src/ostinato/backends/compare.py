"""Compares memory of two runs to the bit; arrays of the host here, tensors in `backends/torch/compare.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ostinato.loop.memory import address_of, memory_in
from ostinato.loop.plan import Buffer

_INTEGERS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element that differs: where it is, and what was expected there."""

    node: str  # the node that wrote the buffer last
    buffer: str
    place: tuple[int, ...]
    expected: str
    found: str
    step: int | None = None  # None: after the last step
    n_elements: int = 1  # of this buffer that differ

    @property
    def text(self) -> str:
        at = f"{list(self.place)}" if self.place else ""
        when = "" if self.step is None else f" after step {self.step}"
        more = f" ({self.n_elements} of its elements differ)" if self.n_elements > 1 else ""
        return f"{self.node}: {self.buffer}{at} is {self.found} and should be {self.expected}{when}{more}"


def first_difference(node: str, name: str, expected: NDArray[Any], found: NDArray[Any]) -> Difference | None:
    """The first element of two arrays, in memory order, whose bits differ."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        one, two = (Buffer.of("", array).text.strip() for array in (expected, found))
        return Difference(node, name, (), one, two)
    if address_of(expected) == address_of(found):
        return None
    differs = _bits(expected) != _bits(found)
    if not differs.any():
        return None
    place = tuple(int(i) for i in np.argwhere(differs)[0])
    one, two = (f"{array[place]:.9g}" for array in (expected, found))
    if one == two:
        one, two = (f"{value} (bits {int(_bits(a)[place]):#x})" for value, a in ((one, expected), (two, found)))
    return Difference(node, name, place, one, two, n_elements=int(differs.sum()))


def compare_weights(model: Any, fresh: Any) -> tuple[int, Difference | None]:
    """Compare every array of a model with another copy, up to the first difference; how many were compared."""
    expected, n = dict(memory_in(fresh, "model")), 0
    for n, (name, array) in enumerate(memory_in(model, "model"), start=1):
        if (difference := first_difference("load", name, expected[name], array)) is not None:
            return n, difference
    return n, None


def checksums(model: Any) -> dict[str, int]:
    """A sum over the bits of every array: one flipped bit changes it."""
    return {name: int(_bits(array).sum(dtype=np.uint64)) for name, array in memory_in(model, "model")}


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).view(_INTEGERS[array.itemsize])
