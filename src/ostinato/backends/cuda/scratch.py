"""Weights that no product of a prompt reads where they lie: each is unpacked into scratch memory right before it.

A backend with such a layout derives its class from `ScratchWeight` and gives its own launches; nothing else here or in
`chunks.py` knows the layout. Matrices of layers fit the scratch whole; a larger one comes by slices of its rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from math import prod
from typing import ClassVar

from torch import Tensor

from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.kernels import Launch, play
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.weight import DeviceMatrix, Weight
from ostinato.models.blocks import leaves_of


class ScratchWeight(DeviceMatrix):
    """A matrix in a layout that is unpacked before its product."""

    __slots__ = ()
    tile_rows: ClassVar[int]  # a slice begins at a multiple of so many rows

    @abstractmethod
    def bind_unpack(self, out: Tensor, first: int = 0) -> Launch:
        """Rows `first` and following into out [rows, cols] of its dtype."""


class Scratch:
    """The memory that all such weights of a model are unpacked into, one after the other; none where it has none."""

    def __init__(self, model: Model) -> None:
        needed = any(isinstance(leaf, ScratchWeight) for leaf in leaves_of(model.layers))
        self._memory = zeros((scratch_elements(model) if needed else 0,), model.dtype, model.device)

    def product(self, weight: Weight, out: Tensor, bind: Callable[[Weight, Tensor], Launch]) -> Launch:
        """The launch of a product into out [rows, weight rows], by a binder of products with weights as they lie. A
        weight that comes by slices must have no bias, which its binder would not cut."""
        if not isinstance(weight, ScratchWeight):
            return bind(weight, out)
        rows, columns = weight.shape
        launches: list[Launch] = []
        for own in slices_of(rows, columns, len(self._memory), weight.tile_rows):
            plain = self._memory[: (own.stop - own.start) * columns].view(-1, columns)
            launches += [weight.bind_unpack(plain, own.start), bind(plain, out[:, own])]
        return partial(play, launches)


def scratch_elements(model: Model) -> int:
    """Elements of the largest matrix of a layer."""
    sizes: list[int] = [prod(leaf.shape) for leaf in leaves_of(model.layers)]
    return max(sizes)


def slices_of(rows: int, columns: int, most: int, tile_rows: int) -> list[slice]:
    """Rows of a matrix in slices of whole tiles and of at most so many numbers: one slice, or several of about one
    size, since a small one would be cut otherwise by its product (`triton/tiles.py`), and its sums have other bits.

    >>> slices_of(1000, 8, 4000, 16)
    [slice(0, 336, None), slice(336, 672, None), slice(672, 1000, None)]
    """
    if rows * columns <= most:
        return [slice(0, rows)]
    at_most = most // columns // tile_rows * tile_rows
    each = -(-rows // -(-rows // at_most))
    each += -each % tile_rows
    return [slice(start, min(start + each, rows)) for start in range(0, rows, each)]
