"""The header of a GGUF file: version, metadata and tensor table; bounds first, allocation after.

A count or a length in the file is never trusted: it must fit what is left of the header, and the whole
header must fit limits far above any real model, so that a hostile file costs a BadFile and neither memory
nor time. Strings in values that are not UTF-8 (some vocabularies hold half characters) keep their bytes as
lone surrogates (`errors="surrogateescape"`): `text.encode("utf-8", "surrogateescape")` gives them back.
Keys and tensor names must be UTF-8.
"""

from __future__ import annotations

import math
import mmap
import reprlib
import struct
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from ostinato.errors import BadFile
from ostinato.files.checkpoint import TensorInfo
from ostinato.files.quants import BLOCKS

MAX_HEADER_BYTES: Final = 1 << 27  # a quarter of a million tokens with their merges take about 2^24
MAX_VALUES: Final = 1 << 23  # array elements in all; real headers hold below 2^21
MAX_KEYS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 17
MAX_ARRAY_DEPTH: Final = 4
MAX_NAME_BYTES: Final = 65_535
MAX_DIMENSIONS: Final = 4
DEFAULT_ALIGNMENT: Final = 32

_AGAIN = "the file is damaged or cut off: fetch it again"
_ARRAY, _STRING, _BOOL = 9, 8, 7
# Of single values by kind, as struct calls them.
_FORMATS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_SCALARS: Final = {kind: np.dtype(f"<{format}") for kind, format in _FORMATS.items()}
_SMALLEST: Final = {_STRING: 8, _ARRAY: 12, **{kind: dtype.itemsize for kind, dtype in _SCALARS.items()}}
# By number, 0 to 41; those that `quants.BLOCKS` lacks were dropped from the format.
_TENSOR_TYPES: Final[tuple[str, ...]] = tuple(
    """
    F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1
    Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S
    IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M
    BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 IQ4_NL_4_8 IQ4_NL_8_8 MXFP4
    NVFP4 Q1_0
    """.split()  # noqa: SIM905  a table reads better than quotes around each
)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(data: mmap.mmap | bytes, n_bytes: int, path: Path) -> GGUFHeader:
    """Read the header of the file whose `n_bytes` bytes are `data`; BadFile says what is wrong, and where."""
    reader = _Reader(data, n_bytes, path)
    version = _read_version(reader)
    n_tensors = reader.number("<Q", "tensor count")
    n_keys = reader.number("<Q", "metadata count")
    reader.check_count(n_keys, 14, MAX_KEYS, "metadata count")  # 8 bytes of length, 4 of kind, a key, a value
    metadata = _read_metadata(reader, n_keys)
    reader.check_count(n_tensors, 33, MAX_TENSORS, "tensor count")  # 8 of length, a name, 24 of one dimension
    entries = _read_table(reader, n_tensors)
    return GGUFHeader(version, metadata, _place(reader, entries, _alignment(reader, metadata)))


def _short(text: str) -> str:
    """A name for a message: a hostile file may hold one of 64 KiB."""
    return text if len(text) <= 120 else text[:117] + "..."


class _Reader:
    """A cursor in the bytes of a header; nothing is read beyond `end`."""

    def __init__(self, data: mmap.mmap | bytes, n_bytes: int, path: Path) -> None:
        self.data = data
        self.n_bytes = n_bytes
        self.end = min(n_bytes, MAX_HEADER_BYTES)
        self.at = 0
        self.values_left = MAX_VALUES
        self.path = path

    def bad(self, field: str, value: object, why: str) -> BadFile:
        shown = _short(reprlib.repr(value))
        return BadFile(f"{self.path}: {_short(field)} is {shown} (near byte {self.at}): {why}; {_AGAIN}")

    def need(self, n: int, field: str) -> None:
        if n > self.end - self.at:
            limit = "the file ends at" if self.end == self.n_bytes else "a header may not reach beyond"
            raise BadFile(
                f"{self.path}: {_short(field)} needs {n} bytes from byte {self.at}, but {limit} byte "
                f"{self.end}; {_AGAIN}"
            )

    def check_count(self, count: int, smallest: int, most: int, field: str) -> None:
        """A count of things of at least `smallest` bytes must fit what is left, and not be above `most`."""
        left = self.end - self.at
        if count > most:
            raise self.bad(field, count, f"more than {most:,} are not accepted")
        if count > left // smallest:
            raise self.bad(field, count, f"that many cannot fit the {left} bytes that follow")

    def number(self, format: str, field: str) -> Any:
        n = struct.calcsize(format)
        self.need(n, field)
        (value,) = struct.unpack_from(format, self.data, self.at)
        self.at += n
        return value

    def bytes(self, field: str) -> bytes:
        length = self.number("<Q", f"length of {field}")
        self.need(length, field)
        self.at += length
        return self.data[self.at - length : self.at]

    def name(self, field: str) -> str:
        """A key or a tensor's name: not empty, UTF-8, of bounded length."""
        length = self.number("<Q", f"length of {field}")
        if not 0 < length <= MAX_NAME_BYTES:
            raise self.bad(f"length of {field}", length, f"it must be from 1 to {MAX_NAME_BYTES}")
        self.need(length, field)
        self.at += length
        raw = self.data[self.at - length : self.at]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.bad(field, raw[:80], "it is not UTF-8") from None


def _read_version(reader: _Reader) -> int:
    reader.need(24, "the header")
    if reader.data[:4] != b"GGUF":
        raise reader.bad("the magic", bytes(reader.data[:4]), "a GGUF file begins with 'GGUF'")
    reader.at = 4
    version: int = reader.number("<I", "the version")
    if version in (2, 3):
        return version
    if version == 1:
        raise BadFile(f"{reader.path}: is GGUF version 1, of the format's first weeks; fetch a file of version 2 or 3")
    if version and version & 0xFFFF == 0:
        raise BadFile(f"{reader.path}: is a big-endian GGUF file, which is not read here; fetch the little-endian one")
    raise BadFile(f"{reader.path}: is GGUF version {version}; versions 2 and 3 can be read: fetch such a file")


def _read_metadata(reader: _Reader, n_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(n_keys):
        key = reader.name(f"metadata key {i}")
        if key in metadata:
            raise reader.bad(f"metadata key {i}", key, "the key is there twice")
        metadata[key] = _read_value(reader, key)
    return metadata


def _read_value(reader: _Reader, key: str) -> Any:
    kind = reader.number("<I", f"kind of {key!r}")
    if kind == _STRING:
        return reader.bytes(f"value of {key!r}").decode("utf-8", "surrogateescape")
    if kind == _ARRAY:
        return _read_array(reader, key, 1)
    if kind not in _FORMATS:
        raise reader.bad(f"kind of {key!r}", kind, "kinds of values go from 0 to 12")
    value = reader.number(f"<{_FORMATS[kind]}", f"value of {key!r}")
    if kind != _BOOL:
        return value
    if value > 1:
        raise reader.bad(f"value of {key!r}", value, "a truth value is 0 or 1")
    return bool(value)


def _read_array(reader: _Reader, key: str, depth: int) -> Any:
    """An array: numbers as a numpy array, strings and arrays as a list."""
    if depth > MAX_ARRAY_DEPTH:
        raise reader.bad(f"depth of {key!r}", depth, f"arrays may be nested {MAX_ARRAY_DEPTH} deep")
    kind = reader.number("<I", f"element kind of {key!r}")
    count = reader.number("<Q", f"element count of {key!r}")
    if kind not in _SMALLEST:
        raise reader.bad(f"element kind of {key!r}", kind, "kinds of values go from 0 to 12")
    cost = 16 if kind == _ARRAY else 1  # a nested array takes far longer to read than a number
    reader.check_count(count, _SMALLEST[kind], reader.values_left // cost, f"element count of {key!r}")
    reader.values_left -= count * cost
    if kind == _STRING:
        return _read_strings(reader, key, count)
    if kind == _ARRAY:
        return [_read_array(reader, key, depth + 1) for _ in range(count)]
    dtype = _SCALARS[kind]
    values = np.frombuffer(reader.data[reader.at : reader.at + count * dtype.itemsize], dtype)
    reader.at += count * dtype.itemsize
    if kind != _BOOL:
        return values
    if count and values.max() > 1:
        raise reader.bad(f"value of {key!r}", int(values.max()), "a truth value is 0 or 1")
    return values.astype(np.bool_)


def _read_strings(reader: _Reader, key: str, count: int) -> list[str]:
    """Many strings in a row; the inner loop of opening a file, so nothing in it is a call of ours."""
    data, at, end = reader.data, reader.at, reader.end
    unpack = struct.Struct("<Q").unpack_from
    strings: list[str] = []
    for i in range(count):
        if end - at < 8 or (length := unpack(data, at)[0]) > end - at - 8:
            reader.at = at
            length = reader.number("<Q", f"length of string {i} of {key!r}")
            raise reader.bad(f"length of string {i} of {key!r}", length, "it reaches beyond the end")
        at += 8 + length
        strings.append(data[at - length : at].decode("utf-8", "surrogateescape"))
    reader.at = at
    return strings


def _read_table(reader: _Reader, n_tensors: int) -> list[TensorInfo]:
    """The table as it stands: `start` still counts from the beginning of the data."""
    entries: dict[str, TensorInfo] = {}
    for i in range(n_tensors):
        name = reader.name(f"name of tensor {i}")
        if name in entries:
            raise reader.bad(f"name of tensor {i}", name, "the name is there twice")
        shape = _read_shape(reader, name)
        type = _read_type(reader, name)
        offset = reader.number("<Q", f"offset of tensor {name!r}")
        entries[name] = TensorInfo(name, shape, type, _n_bytes(reader, name, shape, type), offset)
    return list(entries.values())


def _read_shape(reader: _Reader, name: str) -> tuple[int, ...]:
    """The shape with the outermost dimension first; the file has the innermost first."""
    n_dimensions = reader.number("<I", f"number of dimensions of {name!r}")
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise reader.bad(f"number of dimensions of {name!r}", n_dimensions, f"it must be from 1 to {MAX_DIMENSIONS}")
    reader.need(8 * n_dimensions, f"shape of {name!r}")
    shape = struct.unpack_from(f"<{n_dimensions}Q", reader.data, reader.at)[::-1]
    reader.at += 8 * n_dimensions
    if 0 in shape or math.prod(shape) >= 1 << 63:
        raise reader.bad(f"shape of {name!r}", list(shape), "dimensions are at least 1, and their product below 2^63")
    return shape


def _read_type(reader: _Reader, name: str) -> str:
    number = reader.number("<I", f"type of {name!r}")
    if number >= len(_TENSOR_TYPES):
        raise BadFile(
            f"{reader.path}: type of {_short(name)!r} is {number}, which is no tensor type known here (0 to "
            f"{len(_TENSOR_TYPES) - 1}); the file is damaged, or newer than this program"
        )
    type: str = _TENSOR_TYPES[number]
    if type not in BLOCKS:
        raise BadFile(f"{reader.path}: type of {_short(name)!r} is {type}, dropped from the format; fetch a newer file")
    return type


def _n_bytes(reader: _Reader, name: str, shape: tuple[int, ...], type: str) -> int:
    if shape[-1] % BLOCKS[type].elements:
        elements = BLOCKS[type].elements
        raise reader.bad(f"row length of {name!r}", shape[-1], f"rows of {type} come in blocks of {elements}")
    return _bytes_as(type, shape)


def _alignment(reader: _Reader, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1) or value > 1 << 20:
        raise reader.bad("general.alignment", value, "it must be a power of two from 1 to 2^20")
    return value


def _place(reader: _Reader, entries: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
    """The table with offsets in the file, each inside it, aligned, and none overlapping another."""
    data_start = -(-reader.at // alignment) * alignment
    placed: dict[str, TensorInfo] = {}
    for entry in entries:
        field = f"offset of tensor {entry.name!r}"
        if entry.start % alignment:
            raise reader.bad(field, entry.start, f"it must be a multiple of the alignment, {alignment}")
        start = data_start + entry.start
        if start + entry.n_bytes > reader.n_bytes:
            raise reader.bad(
                field,
                entry.start,
                f"its {entry.n_bytes} bytes would end at byte {start + entry.n_bytes} of {reader.n_bytes}",
            )
        placed[entry.name] = replace(entry, start=start)
    in_order = sorted(placed.values(), key=lambda entry: entry.start)
    for before, after in pairwise(in_order):
        if before.start + before.n_bytes > after.start:
            raise reader.bad(
                f"offset of tensor {after.name!r}",
                after.start - data_start,
                f"it lies inside tensor {before.name!r}",
            )
    _refuse_unexplained(reader, in_order, alignment)
    return placed


def _refuse_unexplained(reader: _Reader, in_order: list[TensorInfo], alignment: int) -> None:
    """Refuse a type that does not fill a tensor's space, up to the padding of the alignment (E-19).

    A wrong type with fewer bytes than the right one would be read without an error, as other weights. After the last
    tensor any bytes may follow, unless they are exactly what another type would have filled.
    """
    ends = [*(after.start for after in in_order[1:]), reader.n_bytes]
    for entry, end in zip(in_order, ends, strict=False):
        room = end - entry.start
        if room - entry.n_bytes < alignment:
            continue
        fitting = [type for type in BLOCKS if 0 <= room - _bytes_as(type, entry.shape) < alignment]
        if end == reader.n_bytes and not fitting:
            continue
        would = f"; {' or '.join(fitting)} would fill it" if fitting else ""
        raise reader.bad(
            f"type of tensor {entry.name!r}", entry.type, f"it takes {entry.n_bytes} bytes of its room of {room}{would}"
        )


def _bytes_as(type: str, shape: tuple[int, ...]) -> int:
    """The bytes of a tensor in another type; more than any file if its rows are not whole blocks of that type."""
    block = BLOCKS[type]
    return 1 << 62 if shape[-1] % block.elements else math.prod(shape) // block.elements * block.n_bytes
