"""Which usual quantisation of a model would fit where its file does not: by arithmetic over the header's elements.

Only types that every backend keeps packed are named; a file of fewer bits is dequantised when it is loaded. Bits of a
mixed quantisation are those of files that llama.cpp makes, so that sizes are right within a few parts in a hundred.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ostinato.files.quants import BLOCKS
from ostinato.models.header import HeaderTensors

if TYPE_CHECKING:
    from ostinato.models.shape import Shape

_FLOAT_BITS: Final = 32  # of norms and biases


def _bits(type: str) -> float:
    return 8 * BLOCKS[type].n_bytes / BLOCKS[type].elements


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A usual kind of file, and the bits of a weight in its matrices."""

    name: str
    bits: float
    head_bits: float = _bits("Q6_K")  # of the matrix that gives the logits

    def n_bytes(self, shape: Shape, tensors: HeaderTensors) -> int:
        """About what the weights of such a file of this model take."""
        head, total = "token_embd.weight" if shape.tied_head else "output.weight", 0.0
        for name, tensor in tensors.items():
            bits = self.head_bits if name == head else self.bits
            total += tensor.n_elements * (bits if len(tensor.shape) > 1 else _FLOAT_BITS)
        return int(total / 8)


# From many bits to few. Q5_K_M and Q4_K_M keep some matrices in Q6_K: measured over files of 8B and 70B.
QUANTISATIONS: Final = (
    Quantisation("Q8_0", _bits("Q8_0"), _bits("Q8_0")),
    Quantisation("Q6_K", _bits("Q6_K")),
    Quantisation("Q5_K_M", 5.65),
    Quantisation("Q4_K_M", 4.8),
    Quantisation("Q4_0", _bits("Q4_0")),
)


def largest_within(n_bytes: int, shape: Shape, tensors: HeaderTensors) -> tuple[Quantisation, int] | None:
    """The quantisation of most bits whose weights take at most so many bytes, and what they take; None without one."""
    sizes = ((one, one.n_bytes(shape, tensors)) for one in QUANTISATIONS)
    return next(((one, size) for one, size in sizes if size <= n_bytes), None)
