"""Dequantisation of the types whose values are small integers or tiny floats times a scale.

Each function takes blocks, uint8 [n, n_bytes], and writes their values to `out`, float32 [n, elements]. The
layout of a block is in its function's docstring, in the order of the bytes; d is a scale, m a minimum, both
float16.
"""

from collections.abc import Callable

import numpy as np

from ostinato.files.unpack import Bytes, Floats, bit_planes, fields, half, nibbles, pairs, scale_groups


def numbers(dtype: str) -> Callable[[Bytes, Floats], None]:
    """Of a type whose blocks are single numbers of this dtype."""

    def undo(blocks: Bytes, out: Floats) -> None:
        out[...] = blocks.view(dtype)

    return undo


def bf16(blocks: Bytes, out: Floats) -> None:
    """The upper half of a float32."""
    bits = out.view(np.uint32)
    bits[...] = blocks.view("<u2")
    bits <<= 16


def q4_0(blocks: Bytes, out: Floats) -> None:
    """d, 16 bytes of nibbles: d * (q - 8)."""
    out[...] = nibbles(blocks[:, 2:], 16)
    out -= 8
    out *= half(blocks, 0)


def q4_1(blocks: Bytes, out: Floats) -> None:
    """d, m, 16 bytes of nibbles: d * q + m."""
    out[...] = nibbles(blocks[:, 4:], 16)
    out *= half(blocks, 0)
    out += half(blocks, 2)


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """Values of five bits: the fifth of all 32 in four bytes `high`, the others in nibbles `low`."""
    q = np.unpackbits(high, axis=1, bitorder="little")
    q <<= 4
    q |= nibbles(low, 16)
    return q


def q5_0(blocks: Bytes, out: Floats) -> None:
    """d, 32 fifth bits, 16 bytes of nibbles: d * (q - 16)."""
    out[...] = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    out -= 16
    out *= half(blocks, 0)


def q5_1(blocks: Bytes, out: Floats) -> None:
    """d, m, 32 fifth bits, 16 bytes of nibbles: d * q + m."""
    out[...] = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    out *= half(blocks, 0)
    out += half(blocks, 2)


def q8_0(blocks: Bytes, out: Floats) -> None:
    """d, 32 int8: d * q."""
    out[...] = blocks[:, 2:].view(np.int8)
    out *= half(blocks, 0)


def q2_k(blocks: Bytes, out: Floats) -> None:
    """16 bytes (scale, minimum in nibbles), 64 bytes of two-bit q, d, m: d * scale * q - m * minimum."""
    scales = blocks[:, :16]
    out[...] = pairs(blocks[:, 16:80])
    scale_groups(out, half(blocks, 80) * (scales & 15).astype(np.float32))
    _subtract_groups(out, half(blocks, 82) * (scales >> 4).astype(np.float32))


def q3_k(blocks: Bytes, out: Floats) -> None:
    """32 bytes of third bits, 64 of two-bit q, 12 of six-bit scales, d: d * (scale - 32) * (q - 4)."""
    q = bit_planes(blocks[:, :32])
    q <<= 2
    q |= pairs(blocks[:, 32:96])
    low = nibbles(blocks[:, 96:104], 8)
    packed = blocks[:, 104:108]
    high = np.concatenate([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = (low | (high << 4)).astype(np.float32) - np.float32(32)
    out[...] = q
    out -= 4
    scale_groups(out, half(blocks, 108) * scales)


def _scales_and_minima(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight six-bit scales and eight six-bit minima out of 12 bytes.

    The first four scales are the low six bits of bytes 0-3, the first four minima those of bytes 4-7; the
    last four of each have low nibbles in bytes 8-11 (scale low, minimum high), top bits in what is left.
    """
    first, second, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (low & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (low >> 4) | ((second >> 6) << 4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _subtract_groups(out: Floats, minima: Floats) -> None:
    grouped = out.reshape(len(out), minima.shape[1], -1)
    grouped -= minima[:, :, None]


def _apply_k_scales(blocks: Bytes, out: Floats) -> None:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scale_groups(out, half(blocks, 0) * scales)
    _subtract_groups(out, half(blocks, 2) * minima)


def q4_k(blocks: Bytes, out: Floats) -> None:
    """d, m, 12 bytes of scales and minima, 128 bytes of nibbles: d * scale * q - m * minimum."""
    out[...] = nibbles(blocks[:, 16:], 32)
    _apply_k_scales(blocks, out)


def q5_k(blocks: Bytes, out: Floats) -> None:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles."""
    q = bit_planes(blocks[:, 16:48])
    q <<= 4
    q |= nibbles(blocks[:, 48:], 32)
    out[...] = q
    _apply_k_scales(blocks, out)


def q6_k(blocks: Bytes, out: Floats) -> None:
    """128 bytes of nibbles, 64 bytes of upper two bits, 16 int8 scales, d: d * scale * (q - 32)."""
    q = pairs(blocks[:, 128:192])
    q <<= 4
    q |= nibbles(blocks[:, :128], 64)
    out[...] = q
    out -= 32
    scale_groups(out, half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32))


def _ternary_digits() -> Bytes:
    """[5, 256]: the k-th ternary digit of each byte, which is read as a fraction b / 256."""
    powers = np.array([1, 3, 9, 27, 81], np.uint16)[:, None]
    shifted = (np.arange(256, dtype=np.uint16) * powers) & 255
    return ((shifted * 3) >> 8).astype(np.uint8)


_DIGITS = _ternary_digits()


def tq1_0(blocks: Bytes, out: Floats) -> None:
    """48 bytes of five ternary digits, 4 bytes of four, d: d * (digit - 1); all first digits come first."""
    at = 0
    for start, stop, n_digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        for k in range(n_digits):
            out[:, at : at + stop - start] = _DIGITS[k][blocks[:, start:stop]]
            at += stop - start
    out -= 1
    out *= half(blocks, 52)


def tq2_0(blocks: Bytes, out: Floats) -> None:
    """64 bytes of two-bit q, d: d * (q - 1)."""
    out[...] = pairs(blocks[:, :64])
    out -= 1
    out *= half(blocks, 64)


# A four-bit float (sign, two bits of exponent, one of mantissa), doubled so that all values are whole.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
# An eight-bit exponent, halved to undo the doubling: 2^(e - 128); exact, the two smallest as subnormals.
_E8M0 = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)[:, None]


def mxfp4(blocks: Bytes, out: Floats) -> None:
    """An exponent byte, 16 bytes of nibbles: 2^(e - 127) * float4."""
    np.take(_E2M1, nibbles(blocks[:, 1:], 16), out=out, mode="clip")
    out *= _E8M0[blocks[:, 0]]


def _unsigned_e4m3() -> Floats:
    """Half the value of each scale byte: four bits of exponent (bias 7), three of mantissa, no sign."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10)) / 2
    values[0x7F] = 0  # not a number; the format reads it as no scale at all
    halved: Floats = values.astype(np.float32)
    return halved


_UE4M3 = _unsigned_e4m3()


def nvfp4(blocks: Bytes, out: Floats) -> None:
    """Four scale bytes, 32 bytes of nibbles, eight for each scale: scale * float4."""
    np.take(_E2M1, nibbles(blocks[:, 4:], 8), out=out, mode="clip")
    scale_groups(out, _UE4M3[blocks[:, :4]])


_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def iq4_nl(blocks: Bytes, out: Floats) -> None:
    """d, 16 bytes of nibbles that choose among 16 uneven levels: d * level."""
    np.take(_IQ4, nibbles(blocks[:, 2:], 16), out=out, mode="clip")
    out *= half(blocks, 0)


def iq4_xs(blocks: Bytes, out: Floats) -> None:
    """d, 8 upper pairs and 8 lower nibbles of scales, 128 bytes of nibbles: d * (scale - 32) * level."""
    high = fields(blocks[:, 2:4], (0, 2, 4, 6), 3)
    low = fields(blocks[:, 4:8], (0, 4), 15)
    scales = (low | (high << np.uint8(4))).astype(np.float32) - np.float32(32)
    np.take(_IQ4, nibbles(blocks[:, 8:], 16), out=out, mode="clip")
    scale_groups(out, half(blocks, 0) * scales)
