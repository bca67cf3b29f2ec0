"""Small pieces that the block layouts share: taking scales and fields of a few bits out of rows of bytes.

Blocks are uint8 [n, n_bytes]; results are new arrays that belong to the caller.
"""

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def words(blocks: Bytes, start: int, stop: int, dtype: str) -> NDArray[np.integer]:
    """Bytes [start, stop) of each block as little-endian words [n, words]."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def nibbles(packed: Bytes, group: int) -> Bytes:
    """Four-bit fields of [n, bytes]: of each `group` bytes the low, then the high ones; [n, 2 * bytes]."""
    n, n_bytes = packed.shape
    grouped = packed.reshape(n, n_bytes // group, group)
    fields = np.empty((n, n_bytes // group, 2, group), np.uint8)
    np.bitwise_and(grouped, 15, out=fields[:, :, 0])
    np.right_shift(grouped, 4, out=fields[:, :, 1])
    return fields.reshape(n, 2 * n_bytes)


def pairs(packed: Bytes) -> Bytes:
    """Two-bit fields of [n, bytes]: of each 32 bytes all the lowest, then the next; [n, 4 * bytes]."""
    n, n_bytes = packed.shape
    grouped = packed.reshape(n, n_bytes // 32, 32)
    fields = np.empty((n, n_bytes // 32, 4, 32), np.uint8)
    for i in range(4):
        np.right_shift(grouped, 2 * i, out=fields[:, :, i])
    fields &= 3
    return fields.reshape(n, 4 * n_bytes)


def bit_planes(packed: Bytes) -> Bytes:
    """Bits of [n, 32] plane by plane: first bit 0 of all 32 bytes, then bit 1; [n, 256] of 0 and 1."""
    planes = np.empty((len(packed), 8, 32), np.uint8)
    for i in range(8):
        np.right_shift(packed, i, out=planes[:, i])
    planes &= 1
    return planes.reshape(len(packed), 256)


def fields(packed: NDArray[np.integer], shifts: tuple[int, ...], mask: int) -> NDArray[np.integer]:
    """Each word of [n, words] shifted right by each of `shifts`, then masked; [n, words * shifts]."""
    by = np.array(shifts, packed.dtype)
    mask_word = packed.dtype.type(mask)
    return ((packed[:, :, None] >> by) & mask_word).reshape(len(packed), -1)


def scale_groups(out: Floats, scales: Floats) -> None:
    """Multiply `out` [n, elements] in place by `scales` [n, groups], each for its run of elements."""
    grouped = out.reshape(len(out), scales.shape[1], -1)
    grouped *= scales[:, :, None]
