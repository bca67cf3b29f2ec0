"""Dequantisation of the types that look up four or eight values at once in a grid (IQ1, IQ2, IQ3).

Each function takes blocks, uint8 [n, n_bytes], and writes their 256 values to `out`, float32 [n, 256]; the
layout of a block is in its docstring, in the order of the bytes. The grids themselves are in `iq_grids.py`.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from ostinato.files.iq_grids import grid
from ostinato.files.unpack import Bytes, Floats, fields, half, scale_groups, words

Index = NDArray[np.integer]


@cache
def _signs() -> Floats:
    """[256, 8]: +1 or -1 for each bit of a byte, the lowest bit first."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.float32(1) - np.float32(2) * bits.astype(np.float32)


@cache
def _even_signs() -> Floats:
    """[128, 8]: signs from seven bits; the eighth makes the number of minus signs even."""
    sevens = np.arange(128, dtype=np.uint8)
    parity = np.unpackbits(sevens[:, None], axis=1).sum(axis=1, dtype=np.uint8) & 1
    signs: Floats = _signs()[sevens | (parity << 7)]
    return signs


def _look_up(out: Floats, table: Floats, index: Index) -> None:
    """Write row `index[n, i]` of `table` [rows, width] to the i-th run of `width` values of `out`."""
    np.take(table, index, axis=0, out=out.reshape(*index.shape, table.shape[1]), mode="clip")


def _apply_signs(out: Floats, table: Floats, index: Index) -> None:
    eights = out.reshape(*index.shape, 8)
    eights *= table[index]


def _scaled(d: Floats, scales: Index, factor: float) -> Floats:
    """d * (scales + 1/2) * factor."""
    return d * (scales.astype(np.float32) + np.float32(0.5)) * np.float32(factor)


def iq2_xxs(blocks: Bytes, out: Floats) -> None:
    """d, then for each 32 values 4 grid bytes and a word: four seven-bit signs, a scale in the top nibble."""
    both = words(blocks, 2, 66, "<u4")
    tails = both[:, 1::2]
    index = np.ascontiguousarray(both[:, ::2]).view(np.uint8)
    _look_up(out, grid("IQ2_XXS"), index)
    _apply_signs(out, _even_signs(), fields(tails, (0, 7, 14, 21), 127))
    scale_groups(out, _scaled(half(blocks, 0), tails >> 28, 0.25))


def iq2_xs(blocks: Bytes, out: Floats) -> None:
    """d, 32 words (nine bits of grid index, seven of signs), 16 nibbles of scales."""
    both = words(blocks, 2, 66, "<u2")
    _look_up(out, grid("IQ2_XS"), both & 511)
    _apply_signs(out, _even_signs(), both >> 9)
    scale_groups(out, _scaled(half(blocks, 0), fields(blocks[:, 66:], (0, 4), 15), 0.25))


def iq2_s(blocks: Bytes, out: Floats) -> None:
    """d, 32 low bytes of grid indices, 32 sign bytes, 8 bytes of upper index pairs, 16 nibbles of scales."""
    high = fields(blocks[:, 66:74], (0, 2, 4, 6), 3).astype(np.uint16)
    _look_up(out, grid("IQ2_S"), blocks[:, 2:34] | (high << 8))
    _apply_signs(out, _signs(), blocks[:, 34:66])
    scale_groups(out, _scaled(half(blocks, 0), fields(blocks[:, 74:], (0, 4), 15), 0.25))


def iq3_xxs(blocks: Bytes, out: Floats) -> None:
    """d, 64 grid bytes, for each 32 values a word: four seven-bit signs, a scale in the top nibble."""
    tails = words(blocks, 66, 98, "<u4")
    _look_up(out, grid("IQ3_XXS"), blocks[:, 2:66])
    _apply_signs(out, _even_signs(), fields(tails, (0, 7, 14, 21), 127))
    scale_groups(out, _scaled(half(blocks, 0), tails >> 28, 0.5))


def iq3_s(blocks: Bytes, out: Floats) -> None:
    """d, 64 low bytes of grid indices, their 64 upper bits, 32 sign bytes, 8 nibbles: d * (2 * scale + 1)."""
    high = fields(blocks[:, 66:74], tuple(range(8)), 1).astype(np.uint16)
    _look_up(out, grid("IQ3_S"), blocks[:, 2:66] | (high << 8))
    _apply_signs(out, _signs(), blocks[:, 74:106])
    scales = fields(blocks[:, 106:], (0, 4), 15)
    scale_groups(out, half(blocks, 0) * (2 * scales + 1).astype(np.float32))


_DELTA = np.array([0.125, -0.125], np.float32)  # what IQ1 adds to every grid value, by one bit


def iq1_s(blocks: Bytes, out: Floats) -> None:
    """d, 32 low bytes of grid indices, 8 words: four upper index triples, a three-bit scale, delta's sign."""
    packed = words(blocks, 34, 50, "<u2")
    _look_up(out, grid("IQ1"), blocks[:, 2:34] | (fields(packed, (0, 3, 6, 9), 7) << 8))
    thirties = out.reshape(len(out), 8, 32)
    thirties += _DELTA[packed >> 15][:, :, None]
    scale_groups(out, half(blocks, 0) * (2 * ((packed >> 12) & 7) + 1).astype(np.float32))


def iq1_m(blocks: Bytes, out: Floats) -> None:
    """32 low bytes of grid indices, 32 nibbles (upper triple, delta's sign), 4 words of three-bit scales.

    The top nibbles of the four words are d, the lowest first: the only type that keeps its float16 in pieces.
    """
    high = fields(blocks[:, 32:48], (0, 4), 15)
    packed = words(blocks, 48, 56, "<u2")
    pieces = (packed >> 12) << np.array([0, 4, 8, 12], np.uint16)
    d = np.bitwise_or.reduce(pieces, axis=1, keepdims=True).astype("<u2").view("<f2").astype(np.float32)
    _look_up(out, grid("IQ1"), blocks[:, :32] | ((high & 7).astype(np.uint16) << 8))
    eights = out.reshape(len(out), 32, 8)
    eights += _DELTA[high >> 3][:, :, None]
    scale_groups(out, d * (2 * fields(packed, (0, 3, 6, 9), 7) + 1).astype(np.float32))
