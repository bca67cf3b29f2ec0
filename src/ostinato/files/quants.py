"""Block layouts of every ggml tensor type and their plain dequantisation to float32, vectorised in numpy.

A type stores rows as blocks: `elements` values in `n_bytes` bytes, usually a float16 scale and a few bits
for each value. `quants_plain.py` and `quants_iq.py` undo each type for many blocks at once, with one
rounding for each multiplication and addition, so that the bits are the same on every machine; this file is
the table of them.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from ostinato.errors import BadFile, Unsupported
from ostinato.files import quants_iq as iq
from ostinato.files import quants_plain as plain
from ostinato.files.unpack import Bytes, Floats

CHUNK_ELEMENTS: Final = 1 << 16  # 256 KiB of float32: a chunk and its temporaries stay in a core's own cache


class QuantBlock(NamedTuple):
    """`elements` consecutive values of a row are stored in `n_bytes` bytes."""

    elements: int
    n_bytes: int


BLOCKS: Final[Mapping[str, QuantBlock]] = MappingProxyType(
    {
        "F32": QuantBlock(1, 4),
        "F16": QuantBlock(1, 2),
        "Q4_0": QuantBlock(32, 18),
        "Q4_1": QuantBlock(32, 20),
        "Q5_0": QuantBlock(32, 22),
        "Q5_1": QuantBlock(32, 24),
        "Q8_0": QuantBlock(32, 34),
        "Q8_1": QuantBlock(32, 36),
        "Q2_K": QuantBlock(256, 84),
        "Q3_K": QuantBlock(256, 110),
        "Q4_K": QuantBlock(256, 144),
        "Q5_K": QuantBlock(256, 176),
        "Q6_K": QuantBlock(256, 210),
        "Q8_K": QuantBlock(256, 292),
        "IQ2_XXS": QuantBlock(256, 66),
        "IQ2_XS": QuantBlock(256, 74),
        "IQ3_XXS": QuantBlock(256, 98),
        "IQ1_S": QuantBlock(256, 50),
        "IQ4_NL": QuantBlock(32, 18),
        "IQ3_S": QuantBlock(256, 110),
        "IQ2_S": QuantBlock(256, 82),
        "IQ4_XS": QuantBlock(256, 136),
        "I8": QuantBlock(1, 1),
        "I16": QuantBlock(1, 2),
        "I32": QuantBlock(1, 4),
        "I64": QuantBlock(1, 8),
        "F64": QuantBlock(1, 8),
        "IQ1_M": QuantBlock(256, 56),
        "BF16": QuantBlock(1, 2),
        "TQ1_0": QuantBlock(256, 54),
        "TQ2_0": QuantBlock(256, 66),
        "MXFP4": QuantBlock(32, 17),
        "NVFP4": QuantBlock(64, 36),
        "Q1_0": QuantBlock(128, 18),
    }
)

_DEQUANTISE: Final[Mapping[str, Callable[[Bytes, Floats], None]]] = MappingProxyType(
    {
        "F32": plain.f32,
        "F16": plain.f16,
        "BF16": plain.bf16,
        "F64": plain.f64,
        "I8": plain.i8,
        "I16": plain.i16,
        "I32": plain.i32,
        "I64": plain.i64,
        "Q4_0": plain.q4_0,
        "Q4_1": plain.q4_1,
        "Q5_0": plain.q5_0,
        "Q5_1": plain.q5_1,
        "Q8_0": plain.q8_0,
        "Q2_K": plain.q2_k,
        "Q3_K": plain.q3_k,
        "Q4_K": plain.q4_k,
        "Q5_K": plain.q5_k,
        "Q6_K": plain.q6_k,
        "TQ1_0": plain.tq1_0,
        "TQ2_0": plain.tq2_0,
        "MXFP4": plain.mxfp4,
        "NVFP4": plain.nvfp4,
        "IQ4_NL": plain.iq4_nl,
        "IQ4_XS": plain.iq4_xs,
        "IQ1_S": iq.iq1_s,
        "IQ1_M": iq.iq1_m,
        "IQ2_XXS": iq.iq2_xxs,
        "IQ2_XS": iq.iq2_xs,
        "IQ2_S": iq.iq2_s,
        "IQ3_XXS": iq.iq3_xxs,
        "IQ3_S": iq.iq3_s,
    }
)

READABLE: Final = frozenset(_DEQUANTISE)


def check_readable(type: str, where: str) -> None:
    """Raise Unsupported, by name, for a type that is known and cannot be dequantised here."""
    if type not in _DEQUANTISE:
        raise Unsupported(
            f"{where}: is stored as {type}, which is not read here; give a file in one of {', '.join(sorted(READABLE))}"
        )


def dequantize_into(blocks: Bytes, type: str, out: Floats) -> None:
    """Write the values of `blocks`, uint8 [n, n_bytes], to `out`, float32 [n, elements], both contiguous.

    Goes in chunks, so that temporaries stay small however large the tensor is.
    """
    check_readable(type, "the tensor")
    undo = _DEQUANTISE[type]
    step = CHUNK_ELEMENTS // BLOCKS[type].elements
    with np.errstate(all="ignore"):  # a scale may be infinite or not a number: that is the file's own value
        for start in range(0, len(blocks), step):
            undo(blocks[start : start + step], out[start : start + step])


def dequantize(raw: Bytes, type: str) -> Floats:
    """The values of `raw`, uint8 [rows, row_bytes], as a new float32 [rows, columns].

    >>> dequantize(np.array([[0, 60, 0, 64]], np.uint8), "F16")
    array([[1., 2.]], dtype=float32)
    """
    check_readable(type, "the tensor")
    block = BLOCKS[type]
    n_rows, row_bytes = raw.shape
    if row_bytes % block.n_bytes:
        raise BadFile(f"rows of {row_bytes} bytes are not whole {type} blocks of {block.n_bytes} bytes")
    blocks = np.ascontiguousarray(raw).reshape(-1, block.n_bytes)
    out = np.empty((len(blocks), block.elements), np.float32)
    dequantize_into(blocks, type, out)
    return out.reshape(n_rows, row_bytes // block.n_bytes * block.elements)
