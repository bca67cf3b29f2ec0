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
    """`elements` consecutive values of a row are stored in `n_bytes` bytes; `undo` gives the values of many blocks."""

    elements: int
    n_bytes: int
    undo: Callable[[Bytes, Floats], None] | None = None  # None: known, and not read here


BLOCKS: Final[Mapping[str, QuantBlock]] = MappingProxyType(
    {
        "F32": QuantBlock(1, 4, plain.numbers("<f4")),
        "F16": QuantBlock(1, 2, plain.numbers("<f2")),
        "Q4_0": QuantBlock(32, 18, plain.q4_0),
        "Q4_1": QuantBlock(32, 20, plain.q4_1),
        "Q5_0": QuantBlock(32, 22, plain.q5_0),
        "Q5_1": QuantBlock(32, 24, plain.q5_1),
        "Q8_0": QuantBlock(32, 34, plain.q8_0),
        "Q8_1": QuantBlock(32, 36),
        "Q2_K": QuantBlock(256, 84, plain.q2_k),
        "Q3_K": QuantBlock(256, 110, plain.q3_k),
        "Q4_K": QuantBlock(256, 144, plain.q4_k),
        "Q5_K": QuantBlock(256, 176, plain.q5_k),
        "Q6_K": QuantBlock(256, 210, plain.q6_k),
        "Q8_K": QuantBlock(256, 292),
        "IQ2_XXS": QuantBlock(256, 66, iq.iq2_xxs),
        "IQ2_XS": QuantBlock(256, 74, iq.iq2_xs),
        "IQ3_XXS": QuantBlock(256, 98, iq.iq3_xxs),
        "IQ1_S": QuantBlock(256, 50, iq.iq1_s),
        "IQ4_NL": QuantBlock(32, 18, plain.iq4_nl),
        "IQ3_S": QuantBlock(256, 110, iq.iq3_s),
        "IQ2_S": QuantBlock(256, 82, iq.iq2_s),
        "IQ4_XS": QuantBlock(256, 136, plain.iq4_xs),
        "I8": QuantBlock(1, 1, plain.numbers("i1")),
        "I16": QuantBlock(1, 2, plain.numbers("<i2")),
        "I32": QuantBlock(1, 4, plain.numbers("<i4")),
        "I64": QuantBlock(1, 8, plain.numbers("<i8")),
        "F64": QuantBlock(1, 8, plain.numbers("<f8")),
        "IQ1_M": QuantBlock(256, 56, iq.iq1_m),
        "BF16": QuantBlock(1, 2, plain.bf16),
        "TQ1_0": QuantBlock(256, 54, plain.tq1_0),
        "TQ2_0": QuantBlock(256, 66, plain.tq2_0),
        "MXFP4": QuantBlock(32, 17, plain.mxfp4),
        "NVFP4": QuantBlock(64, 36, plain.nvfp4),
        "Q1_0": QuantBlock(128, 18),
    }
)
READABLE: Final = frozenset(type for type, block in BLOCKS.items() if block.undo is not None)


def check_readable(type: str, where: str) -> Callable[[Bytes, Floats], None]:
    """How blocks of a type are undone; Unsupported, by name, for one that is known and cannot be dequantised here."""
    undo = BLOCKS[type].undo if type in BLOCKS else None
    if undo is None:
        raise Unsupported(
            f"{where}: is stored as {type}, which is not read here; give a file in one of {', '.join(sorted(READABLE))}"
        )
    return undo


def dequantize_into(blocks: Bytes, type: str, out: Floats) -> None:
    """Write the values of `blocks`, uint8 [n, n_bytes], to `out`, float32 [n, elements], both contiguous.

    Goes in chunks, so that temporaries stay small however large the tensor is.
    """
    undo = check_readable(type, "the tensor")
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
