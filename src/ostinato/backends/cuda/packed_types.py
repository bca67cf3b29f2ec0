"""The weight types that a GPU's kernels multiply as the file has them. Known without torch: `inspect` tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ostinato.files.quants import BLOCKS

PACKED_TYPES: Final = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")


def stays_packed(type: str, shape: Sequence[int]) -> bool:
    """Whether a tensor of this type and shape stays packed: a matrix, or the experts' matrices in one tensor of three
    dimensions."""
    return type in PACKED_TYPES and len(shape) in (2, 3) and shape[-1] % BLOCKS[type].elements == 0
