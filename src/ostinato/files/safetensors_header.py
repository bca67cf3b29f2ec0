"""The header of one safetensors file: eight bytes of length, then JSON that says where each tensor lies.

Every bound is checked before a tensor is used: the header inside the file, each tensor inside the data
and of the size its shape asks for, none over another, nothing left over. The JSON itself is parsed by
`json_file.py`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from ostinato.errors import BadFile, Unsupported
from ostinato.files.checkpoint import TensorInfo
from ostinato.files.json_file import parse_json_object
from ostinato.files.mapped import MappedFile

MAX_HEADER_BYTES: Final = 1 << 25  # a hundred thousand tensors take about 2^23
MAX_DIMENSIONS: Final = 8

_AGAIN = "the file is damaged or cut off: fetch it again"
_ITEM_BYTES: Final = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
}
_SMALL_FLOATS: Final = (
    *("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    *("F6_E2M3", "F6_E3M2", "F4"),
)


def read_header(file: MappedFile) -> dict[str, TensorInfo]:
    """Where each tensor of the file lies."""
    path, n_bytes = file.path, file.n_bytes
    if n_bytes < 8:
        raise BadFile(f"{path}: has {n_bytes} bytes, too few for a safetensors file; {_AGAIN}")
    length = int.from_bytes(file.data[:8], "little")
    if length > n_bytes - 8:
        raise BadFile(f"{path}: header length is {length}, but only {n_bytes - 8} bytes follow; {_AGAIN}")
    if length > MAX_HEADER_BYTES:
        raise BadFile(f"{path}: header length is {length}; more than {MAX_HEADER_BYTES} bytes are not accepted")
    header = parse_json_object(bytes(file.data[8 : 8 + length]), f"{path}: the header")
    header.pop("__metadata__", None)
    places = {name: _place(path, name, entry, 8 + length, n_bytes) for name, entry in header.items()}
    _check_cover(path, places, 8 + length, n_bytes)
    return places


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _place(path: Path, name: str, entry: object, data_start: int, n_bytes: int) -> TensorInfo:
    where = f"{path}: tensor {name[:120]!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise BadFile(f"{where}: lacks dtype, shape or data_offsets; {_AGAIN}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype in _SMALL_FLOATS:
        raise Unsupported(f"{where}: is stored as {dtype}; give a model in F32, F16 or BF16, or a quantised GGUF")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise BadFile(f"{where}: dtype is {str(dtype)[:80]!r}, which is unknown; known: {', '.join(_ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise BadFile(f"{where}: shape is {str(shape)[:80]}; it must be up to {MAX_DIMENSIONS} whole numbers; {_AGAIN}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise BadFile(f"{where}: data_offsets is {str(offsets)[:80]}; it must be two whole numbers; {_AGAIN}")
    start, stop = offsets
    if not start <= stop <= n_bytes - data_start:
        raise BadFile(f"{where}: data_offsets is {offsets}, but the data has {n_bytes - data_start} bytes; {_AGAIN}")
    if stop - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise BadFile(f"{where}: data_offsets is {offsets}, but shape {shape} in {dtype} has another size; {_AGAIN}")
    return TensorInfo(name, tuple(shape), dtype, stop - start, data_start + start)


def _check_cover(path: Path, places: dict[str, TensorInfo], data_start: int, n_bytes: int) -> None:
    """Tensors must lie one after the other and fill the file, as the format demands."""
    at = data_start
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].n_bytes)):
        if place.start != at:
            how = "overlaps the tensor before it" if place.start < at else f"leaves {place.start - at} bytes unused"
            raise BadFile(f"{path}: tensor {name[:120]!r}: begins at byte {place.start} and {how}; {_AGAIN}")
        at += place.n_bytes
    if at != n_bytes:
        raise BadFile(f"{path}: {n_bytes - at} bytes follow the last tensor; {_AGAIN}")
