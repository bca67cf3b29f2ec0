"""Weight matrices kept as in the file: the blocks of a quantised type, their fields sorted into planes.

A plane holds one field of all blocks (quants, further bits, scales), so that a kernel reads each in wide aligned words;
together they have exactly the bytes of the file, and `unpack` gives those back. The twins here say what a kernel must
compute; `files/quants.py` says what the blocks mean.

Planes are uint8. Rows stand together in runs of `run` (the largest of 16, 8, 4, 2, 1 that divides their number), and
columns in units; within a run, what a unit needs of all its rows is contiguous:

    quants  [runs, units, run, w]          4 bits: byte j of a unit of 2 w columns has column j low, column w + j high;
                                           8 bits: byte j is column j. w is `unit_bytes`
    high    [runs, units, words, run, 4]   the bits above the fourth, one or two for each column: the lower half of a
                                           word has its even columns in order, the upper half its odd ones
    scales  [runs, n, words, run, 4]       two float16 of neighbouring blocks (or one, [runs, n, run, 2], where blocks
                                           are odd in number); scale and minimum of a block; of K types see `_k_scales`;
                                           of MXFP4 [runs, n, run, 2], two exponents, or one, [runs, n, run, 1]
    blocks  [runs, n, run, 2]              Q6_K alone: the float16 scale of its 256 columns
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from ostinato.backends.cuda.packed_types import PACKED_TYPES
from ostinato.backends.torch.allocate import Allocate, empty
from ostinato.backends.torch.weight import DeviceMatrix, Weight
from ostinato.errors import InternalError, Unsupported
from ostinato.files.quants import BLOCKS

PLANES: Final = ("quants", "high", "scales", "blocks")  # the order in which a matrix has them


@dataclass(frozen=True, slots=True)
class Packed(DeviceMatrix):
    """A matrix [rows, cols] of one quantised type; planes are in the order of PLANES, without those the type lacks."""

    type: str
    rows: int
    cols: int
    planes: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def dtype(self) -> torch.dtype:
        """What a GPU's kernels round rows to."""
        return torch.bfloat16

    @property
    def run(self) -> int:
        """How many rows stand together."""
        return run_of(self.rows)

    @property
    def unit_bytes(self) -> int:
        """Bytes of quants in a unit of one row."""
        return unit_bytes(self.type, self.cols)

    @property
    def device(self) -> torch.device:
        return self.planes[0].device

    def plane(self, name: str) -> Tensor | None:
        """The plane of that name, or None where the type has none."""
        return dict(zip(_row_shapes(self.type, self.cols), self.planes, strict=True)).get(name)

    def to(self, device: torch.device | str) -> Packed:
        """The same matrix on another device."""
        return replace(self, planes=tuple(plane.to(device) for plane in self.planes))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix itself: exactly what `files/quants.py` reads, rounded to dtype."""
        return dequantize_torch(unpack(self), self.type).to(dtype)

    def rows_at(self, ids: Tensor) -> Tensor:
        """Rows `ids`, int [n], dequantised: float32 [n, cols]; what an embedding needs, or one expert of many."""
        return dequantize_torch(raw_rows(self, ids), self.type)


def for_a_gpu(weight: Weight) -> Tensor | Packed:
    """A weight that a GPU's kernels multiply as stored: not another backend's, nor one that is dequantised first."""
    if not isinstance(weight, Tensor | Packed):
        raise InternalError(f"a GPU's kernels were given a {type(weight).__name__}, which they do not multiply")
    return weight


def run_of(rows: int) -> int:
    """How many rows stand together in a plane of so many.

    >>> run_of(4096), run_of(24), run_of(50257)
    (16, 8, 1)
    """
    return min(16, rows & -rows)


def unit_bytes(type: str, cols: int) -> int:
    """Bytes of quants that a unit of one row has; a unit of a 4-bit type has twice as many columns."""
    if type == "Q6_K":
        return 16  # its scales change every 16 columns
    return 16 if type in _PAIRED and cols % 64 else 32


# Types with a scale for each 32 columns: two such blocks make a unit, where the columns allow it.
_PAIRED: Final = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")

# What is taken from an integer before it is scaled; of other types nothing.
OFFSETS: Final[Mapping[str, int]] = MappingProxyType({"Q4_0": 8, "Q5_0": 16, "Q6_K": 32})

# Twice the value of each nibble of MXFP4: a sign, two bits of exponent, one of mantissa.
FLOAT4: Final = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)

# Where a block's fields begin and end, in the order of the file.
_FIELDS: Final[Mapping[str, Mapping[str, tuple[int, int]]]] = MappingProxyType(
    {
        "Q4_0": {"scales": (0, 2), "quants": (2, 18)},
        "Q4_1": {"scales": (0, 4), "quants": (4, 20)},
        "Q5_0": {"scales": (0, 2), "high": (2, 6), "quants": (6, 22)},
        "Q5_1": {"scales": (0, 4), "high": (4, 8), "quants": (8, 24)},
        "Q8_0": {"scales": (0, 2), "quants": (2, 34)},
        "Q4_K": {"scales": (0, 16), "quants": (16, 144)},
        "Q5_K": {"scales": (0, 16), "high": (16, 48), "quants": (48, 176)},
        "Q6_K": {"quants": (0, 128), "high": (128, 192), "scales": (192, 208), "blocks": (208, 210)},
        "MXFP4": {"scales": (0, 1), "quants": (1, 17)},
    }
)
assert tuple(_FIELDS) == PACKED_TYPES
_CHUNK_BYTES: Final = 1 << 24  # sorted at a time: temporaries are a few times as large


def laid_out(type: str, rows: int, cols: int, device: torch.device, allocate: Allocate = empty) -> Packed:
    """A matrix whose planes have their memory and no values yet. Raises Unsupported for a type that no kernel takes
    and for columns that are no whole blocks; the caller dequantises those."""
    if type not in _FIELDS:
        raise Unsupported(f"{type} weights are not multiplied packed; packed are {', '.join(PACKED_TYPES)}")
    if cols % BLOCKS[type].elements:
        raise Unsupported(
            f"rows of {cols} columns are no whole {type} blocks of {BLOCKS[type].elements}; dequantise this matrix "
            "instead"
        )
    planes = (allocate((rows * prod(shape),), torch.uint8, device) for shape in _row_shapes(type, cols).values())
    return Packed(type, rows, cols, tuple(planes))


def put(packed: Packed, raw: Tensor, start: int) -> None:
    """Rows `start` and following of the matrix become raw, uint8 [n, row_bytes] as in the file, on its device; start
    and n are whole runs."""
    type, run, cols = packed.type, packed.run, packed.cols
    block, shapes = BLOCKS[type], _row_shapes(type, cols)
    n_blocks = cols // block.elements
    planes = [
        plane.view(-1, *shape[:-1], run, shape[-1]) for plane, shape in zip(packed.planes, shapes.values(), strict=True)
    ]
    step = max(_CHUNK_BYTES // raw.shape[1] // run, 1) * run
    for first in range(0, len(raw), step):
        blocks = raw[first : first + step].reshape(-1, n_blocks, block.n_bytes)
        at = (start + first) // run
        for (name, shape), plane in zip(shapes.items(), planes, strict=True):
            begin, end = _FIELDS[type][name]
            fields = _sorted(type, name, cols, blocks[:, :, begin:end]).reshape(-1, run, *shape)
            plane[at : at + len(fields)] = fields.movedim(1, -2)


def unpack(packed: Packed) -> Tensor:
    """The bytes of the file again: uint8 [rows, row_bytes]."""
    return _raw(packed, {name: plane.reshape(-1, *plane.shape[2:]) for name, plane in _by_row(packed).items()})


def raw_rows(packed: Packed, ids: Tensor) -> Tensor:
    """Rows `ids`, int [n], in the bytes of the file: uint8 [n, row_bytes]."""
    return _raw(packed, {n: plane[ids // packed.run, ids % packed.run] for n, plane in _by_row(packed).items()})


def dequantize_torch(raw: Tensor, type: str) -> Tensor:
    """The values of raw, uint8 [rows, row_bytes], float32 [rows, cols], to the bit as `files/quants.py` has them."""
    q, (scales, minima) = quants_of(raw, type).float(), scales_of(raw, type)
    if type == "MXFP4":
        q = torch.tensor(FLOAT4, device=raw.device)[q.long()]
    q = q - OFFSETS[type] if type in OFFSETS else q
    values = torch.unflatten(q, 1, (scales.shape[1], -1)) * scales[..., None]
    return (values if minima is None else values - minima[..., None]).flatten(1)


def quants_of(raw: Tensor, type: str) -> Tensor:
    """The integers of raw, uint8 [rows, row_bytes], without their scales: [rows, cols], int8 of Q8_0, else uint8."""
    block, fields = BLOCKS[type], _FIELDS[type]
    blocks = raw.reshape(len(raw), -1, block.n_bytes)
    quants = blocks[:, :, slice(*fields["quants"])]
    if type == "Q8_0":
        return quants.view(torch.int8).flatten(1)
    if type == "Q6_K":
        high = _split(torch.unflatten(blocks[:, :, slice(*fields["high"])], 2, (2, 32)), 2)
        return (_halves(torch.unflatten(quants, 2, (2, 64))) | high << 4).flatten(1)
    q = _halves(torch.unflatten(quants, 2, (4, 32))).flatten(2) if block.elements == 256 else _halves(quants)
    if "high" in fields:
        high = blocks[:, :, slice(*fields["high"])]
        q = q | (_split(high, 1) if type == "Q5_K" else _fields_of(high, 1)) << 4
    return q.flatten(1)


def scales_of(raw: Tensor, type: str) -> tuple[Tensor, Tensor | None]:
    """Scales and minima of raw, uint8 [rows, row_bytes], float32 [rows, groups]: a value is (q - offset) * scale -
    minimum, with the type's offset of OFFSETS; types with an offset have no minima."""
    blocks = raw.reshape(len(raw), -1, BLOCKS[type].n_bytes)
    scales = blocks[:, :, slice(*_FIELDS[type]["scales"])]
    if type == "Q6_K":
        return (_half(blocks, 208) * scales.contiguous().view(torch.int8).float()).flatten(1), None
    if type == "MXFP4":  # half a power of two, 2^(e - 128), by its bits: what it scales is doubled
        e = scales.flatten(1).int()
        return torch.where(e > 1, (e - 1) << 23, 1 << (21 + e)).view(torch.float32), None
    if type in ("Q4_K", "Q5_K"):
        six_bits, minima = (v.float() for v in _six_bits(scales[:, :, 4:]))
        return (_half(scales, 0) * six_bits).flatten(1), (_half(scales, 2) * minima).flatten(1)
    return _half(scales, 0).flatten(1), -_half(scales, 2).flatten(1) if type in ("Q4_1", "Q5_1") else None


def _half(fields: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of the last dimension, as float32 with that dimension 1."""
    return fields[..., at : at + 2].contiguous().view(torch.float16).float()


def _halves(packed: Tensor) -> Tensor:
    """The low nibbles of [..., n] bytes, then the high ones: [..., 2 n]."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _split(packed: Tensor, bits: int) -> Tensor:
    """Fields of `bits` bits of [..., 32] bytes: the lowest of all bytes, then the next; [..., 32 * 8 / bits]."""
    shifts = torch.arange(0, 8, bits, device=packed.device, dtype=torch.uint8)
    return (packed[..., None, :] >> shifts[:, None] & (1 << bits) - 1).flatten(-2)


def _joined(values: Tensor, bits: int) -> Tensor:
    """Values below 2^bits, [..., n], to bytes, the first in the lowest bits: [..., n * bits / 8]."""
    shifts = torch.arange(0, 8, bits, device=values.device, dtype=torch.uint8)
    return (torch.unflatten(values, -1, (-1, 8 // bits)) << shifts).sum(-1, dtype=torch.uint8)


def _fields_of(packed: Tensor, bits: int) -> Tensor:
    """What `_joined` joined: [..., n] bytes to [..., n * 8 / bits] values."""
    shifts = torch.arange(0, 8, bits, device=packed.device, dtype=torch.uint8)
    return (packed[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def _evens_first(values: Tensor, n: int) -> Tensor:
    """Of each n values those at even places, then those at odd ones: how the bits of neighbours stand in a word."""
    return torch.unflatten(values, -1, (-1, n // 2, 2)).transpose(-1, -2).flatten(-3)


def _in_turn(values: Tensor, n: int) -> Tensor:
    """What `_evens_first` was given."""
    return torch.unflatten(values, -1, (-1, 2, n // 2)).transpose(-1, -2).flatten(-3)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima out of the 12 bytes of a K block, as the file has them."""
    first, second, low = torch.unflatten(packed, -1, (3, 4)).unbind(-2)
    scales = torch.cat((first & 63, low & 15 | first >> 6 << 4), -1)
    return scales, torch.cat((second & 63, low >> 4 | second >> 6 << 4), -1)


def _k_scales(fields: Tensor) -> Tensor:
    """16 bytes of a K block as four words: the two float16; scales 0-3; scales 4-7; minima 0-3, a byte each.

    What a byte has above six bits holds minima 4-7: two bits in each of the three words, the lowest first.
    """
    scales, minima = _six_bits(fields[..., 4:])
    late = minima[..., 4:]
    words = (scales[..., :4] | late << 6, scales[..., 4:] | late >> 2 << 6, minima[..., :4] | late >> 4 << 6)
    return torch.cat((fields[..., :4], *words), -1)


def _k_scales_again(words: Tensor) -> Tensor:
    halves, first, second, third = torch.unflatten(words, -1, (4, 4)).unbind(-2)
    late = first >> 6 | second >> 6 << 2 | third >> 6 << 4
    scales = second & 63
    return torch.cat((halves, first & 63 | scales >> 4 << 6, third & 63 | late >> 4 << 6, scales & 15 | late << 4), -1)


def _row_shapes(type: str, cols: int) -> dict[str, tuple[int, ...]]:
    """How one row lies in each plane: [units, bytes], or [units, words, 4]."""
    block, fields, unit = BLOCKS[type], _FIELDS[type], unit_bytes(type, cols)
    n_blocks = cols // block.elements
    shapes: dict[str, tuple[int, ...]] = {"quants": (cols // (unit if type == "Q8_0" else 2 * unit), unit)}
    n_units = shapes["quants"][0]
    if "high" in fields:
        start, stop = fields["high"]
        shapes["high"] = (n_units, n_blocks * (stop - start) // n_units // 4, 4)
    if block.elements == 256:
        shapes["scales"] = (n_blocks, 4, 4)
    elif type == "MXFP4":
        shapes["scales"] = (n_blocks, 1) if n_blocks % 2 else (n_blocks // 2, 2)
    elif fields["scales"][1] == 4:
        shapes["scales"] = (n_units, n_blocks // n_units, 4)
    else:
        shapes["scales"] = (n_blocks, 2) if n_blocks % 2 else (n_blocks // 2, 1, 4)
    if "blocks" in fields:
        shapes["blocks"] = (n_blocks, 2)
    return shapes


def entries_of(packed: Packed) -> dict[str, tuple[int, int]]:
    """For each plane, how many bytes an entry of it has (1, 2 or 4) and how many the plane."""
    shapes = _row_shapes(packed.type, packed.cols)
    return {n: (1 if n == "quants" else shape[-1], packed.rows * prod(shape)) for n, shape in shapes.items()}


def _sorted(type: str, plane: str, cols: int, fields: Tensor) -> Tensor:
    """One field of blocks, [rows, blocks, bytes] in the file's order, in the order of its plane; as many bytes."""
    if plane == "quants" and type in _PAIRED and cols % 64 == 0:
        even, odd = torch.unflatten(fields, 1, (-1, 2)).unbind(2)
        return torch.cat((even & 15 | odd << 4, even >> 4 | odd & 240), -1)
    if plane == "quants" and type == "Q6_K":
        first, second = torch.unflatten(fields, -1, (2, 2, 2, 16)).unbind(-2)
        return torch.stack((first & 15 | second << 4, first >> 4 | second & 240), 3)
    if plane == "high" and type == "Q6_K":
        return _joined(_evens_first(_split(torch.unflatten(fields, -1, (2, 32)), 2), 16), 2)
    if plane == "high":
        bits = _split(fields, 1) if type == "Q5_K" else _fields_of(fields, 1)
        return _joined(_evens_first(bits, 32), 1)
    if plane == "scales" and type in ("Q4_K", "Q5_K"):
        return _k_scales(fields)
    return fields


def _in_file_order(type: str, plane: str, cols: int, fields: Tensor) -> Tensor:
    """What `_sorted` was given, [rows, blocks, bytes], out of what it gave, [rows, blocks, bytes]."""
    if plane == "quants" and type in _PAIRED and cols % 64 == 0:
        first, second = torch.unflatten(fields, 1, (-1, 2)).unbind(2)
        return torch.stack((first & 15 | second << 4, first >> 4 | second & 240), 2)
    if plane == "quants" and type == "Q6_K":
        low, high = torch.unflatten(fields, -1, (2, 2, 2, 16)).unbind(3)
        return torch.stack((low & 15 | high << 4, low >> 4 | high & 240), -2)
    if plane == "high" and type == "Q6_K":
        pairs = torch.unflatten(_in_turn(_fields_of(fields, 2), 16), -1, (2, 4, 32))
        return _joined(pairs.transpose(-1, -2).flatten(-2), 2)
    if plane == "high":
        bits = _in_turn(_fields_of(fields, 1), 32)
        by_byte = torch.unflatten(bits, -1, (8, 32)).transpose(-1, -2).flatten(-2) if type == "Q5_K" else bits
        return _joined(by_byte, 1)
    if plane == "scales" and type in ("Q4_K", "Q5_K"):
        return _k_scales_again(fields)
    return fields


def _by_row(packed: Packed) -> dict[str, Tensor]:
    """The planes as [runs, run, ...]: a view whose first two dimensions name a row."""
    shapes = _row_shapes(packed.type, packed.cols)
    return {
        name: plane.view(-1, *shape[:-1], packed.run, shape[-1]).movedim(-2, 1)
        for (name, shape), plane in zip(shapes.items(), packed.planes, strict=True)
    }


def _raw(packed: Packed, fields: dict[str, Tensor]) -> Tensor:
    """The bytes of the file, [rows, row_bytes], out of the planes of some rows, [rows, ...] each."""
    block = BLOCKS[packed.type]
    n_blocks = packed.cols // block.elements
    n_rows = len(fields["quants"])
    raw = torch.empty((n_rows, n_blocks, block.n_bytes), dtype=torch.uint8, device=packed.device)
    for name, plane in fields.items():
        start, stop = _FIELDS[packed.type][name]
        sorted_fields = plane.reshape(n_rows, n_blocks, stop - start)
        raw[:, :, start:stop] = _in_file_order(packed.type, name, packed.cols, sorted_fields).reshape(
            n_rows, n_blocks, stop - start
        )
    return raw.view(n_rows, -1)
