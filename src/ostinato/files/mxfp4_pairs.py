"""MXFP4 as folders keep it: `X_blocks`, 16 bytes for each 32 columns, and `X_scales`, an exponent for each.

Both are read as one tensor X of GGUF's type MXFP4, whose blocks begin with the exponent and pair other columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ostinato.errors import BadFile
from ostinato.files.checkpoint import TensorInfo

BLOCKS, SCALES = "_blocks", "_scales"
COLUMNS: Final = 32
BLOCK_BYTES: Final = 17


def joined(tensors: Mapping[str, TensorInfo], path: Path) -> dict[str, TensorInfo]:
    """What each pair of tensors is together, by the name that both share."""
    found = {}
    for name, blocks in tensors.items():
        if not name.endswith(BLOCKS):
            continue
        stem = name.removesuffix(BLOCKS)
        scales = tensors.get(stem + SCALES)
        good = scales is not None and blocks.shape == (*scales.shape, COLUMNS // 2) and len(blocks.shape) > 2
        if not good or scales is None or {blocks.type, scales.type} != {"U8"}:
            kept = "is missing" if scales is None else f"is {scales.type} {list(scales.shape)}"
            raise BadFile(
                f"{path}: {name} is {blocks.type} {list(blocks.shape)}, and {stem + SCALES} {kept}; MXFP4 weights have "
                f"U8 blocks [..., {COLUMNS // 2}] and a U8 scale for each"
            )
        shape = (*scales.shape[:-1], scales.shape[-1] * COLUMNS)
        found[stem] = TensorInfo(stem, shape, "MXFP4", scales.n_elements * BLOCK_BYTES)
    return found


def as_rows(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rows of GGUF's blocks, uint8 [rows, n * 17], of blocks [rows, n, 16] and scales [rows, n].

    A folder has columns 2 j and 2 j + 1 in byte j, the first in the low nibble; GGUF has columns j and j + 16.
    """
    rows, n = scales.shape
    columns = np.stack((blocks & 15, blocks >> 4), -1).reshape(rows, n, COLUMNS)
    out = np.empty((rows, n, BLOCK_BYTES), np.uint8)
    out[..., 0] = scales
    out[..., 1:] = columns[..., :16] | columns[..., 16:] << 4
    return out.reshape(rows, -1)
