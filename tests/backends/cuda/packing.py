"""Packed matrices for tests, out of the bytes of a file."""

from torch import Tensor

from ostinato.backends.cuda.packed import Packed, laid_out, put


def pack(type: str, raw: Tensor, rows: int, cols: int) -> Packed:
    """The planes of raw, uint8 [rows, row_bytes] as in the file."""
    packed = laid_out(type, rows, cols, raw.device)
    put(packed, raw, 0)
    return packed
