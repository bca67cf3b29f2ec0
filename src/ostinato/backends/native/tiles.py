"""Weight matrices for the CPU's native loop: packed into tiles of 16 rows, and multiplied by its library.

One packing serves a single row, a batch and a prompt. `src/tiles.h` says how a tile lies in memory and how
products are computed; here are its planes, and the same products for the torch backend over these weights.
Activations are rounded to integers with a step for each 32 columns: `wide` keeps about 15 bits, so that logits
are near those of float32, and otherwise there are 8. A row's product has the same bits alone, in any batch and on any
CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ostinato.backends.native.library import cpu_library
from ostinato.backends.native.streamed import streamed
from ostinato.backends.weights import HostMatrix
from ostinato.errors import BadFile, InternalError, Unsupported
from ostinato.files.quants import BLOCKS
from ostinato.files.unpack import Floats

TILE_ROWS: Final = 16
_FLOATS: Final = ("F32", "F16", "BF16")

# Bytes of 16 rows of a block in quants, scales and more; of the floats, of four columns. In the order of the
# enumeration in tiles.h.
_TILE_BYTES: Final[Mapping[str, tuple[int, int, int]]] = MappingProxyType(
    {
        "F32": (256, 0, 0),
        "F16": (128, 0, 0),
        "BF16": (128, 0, 0),
        "Q4_0": (256, 32, 0),
        "Q4_1": (256, 64, 0),
        "Q5_0": (256, 32, 64),
        "Q5_1": (256, 64, 64),
        "Q8_0": (512, 32, 0),
        "MXFP4": (256, 32, 0),
        "Q4_K": (2048, 320, 0),
        "Q5_K": (2048, 320, 512),
        "Q6_K": (2048, 288, 1024),
    }
)
TILE_TYPES: Final = tuple(_TILE_BYTES)


class TileMatrixStruct(ctypes.Structure):
    """A matrix as tiles.h has it; the caller that makes one keeps its planes alive."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("cols", ctypes.c_int),
        ("reserved", ctypes.c_int),
        ("quants", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("more", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, eq=False)  # one is itself alone: planes are too long to compare
class TileMatrix(HostMatrix):
    """A matrix [rows, cols] of one type in tiles: quants, scales and more, uint8; what a type lacks of these is empty.

    `wide` says how finely activations are rounded before they are multiplied with it.
    """

    type: str
    rows: int
    cols: int
    planes: tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]
    wide: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def n_tiles(self) -> int:
        return -(-self.rows // TILE_ROWS)

    @property
    def n_bytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def rows_at(self, ids: NDArray[Any]) -> Floats:
        """Some rows, to the bit as `files/quants.py` reads them."""
        wanted = np.ascontiguousarray(ids, np.int32)
        out = np.empty((len(wanted), self.cols), np.float32)
        if len(wanted):
            low, high = int(wanted.min()), int(wanted.max())
            assert 0 <= low <= high < self.rows, f"rows {low} to {high} of a matrix of {self.rows}"
            matrix = self.matrix
            _library().ostinato_rows(ctypes.byref(matrix), wanted.ctypes.data, len(wanted), out.ctypes.data)
        return out

    def product(self, x: Floats, n_threads: int) -> Floats:
        """x [n, cols] times the matrix, transposed: [n, rows]."""
        assert x.shape == (len(x), self.cols), f"{x.shape} times {self.shape}"
        x = np.ascontiguousarray(x, np.float32)
        out, matrix = np.empty((len(x), self.rows), np.float32), self.matrix
        failed = _library().ostinato_product(
            ctypes.byref(matrix), x.ctypes.data, len(x), out.ctypes.data, int(self.wide), n_threads
        )
        if failed:
            raise MemoryError(f"no memory for {len(x)} rows of {self.cols} activations")
        return out

    @property
    def matrix(self) -> TileMatrixStruct:
        """What native code is given; good as long as this matrix lives."""
        pointers = (plane.ctypes.data for plane in self.planes)
        return TileMatrixStruct(TILE_TYPES.index(self.type), self.rows, self.cols, 0, *pointers)


def nearest_type(type: str) -> str:
    """What a matrix of a file's type is kept as in tiles: the same where tiles have it.

    Types of fewer bits that tiles lack (Q2_K, Q3_K, the IQ types, ternary ones and NVFP4) are dequantised and kept as
    Q8_0, which is within 1/254 of the largest of 32 numbers: a fraction of the step that they were rounded to before.
    Other plain numbers become float32.

    >>> nearest_type("Q4_K"), nearest_type("IQ2_XS"), nearest_type("F64")
    ('Q4_K', 'Q8_0', 'F32')
    """
    if type in TILE_TYPES:
        return type
    if type not in BLOCKS:
        raise Unsupported(f"{type} weights cannot be packed into tiles; known are {', '.join(BLOCKS)}")
    return "F32" if BLOCKS[type].elements == 1 else "Q8_0"


def plane_bytes(type: str, rows: int, cols: int) -> tuple[int, int, int]:
    """Bytes of the three planes of a matrix in tiles."""
    _check(type, cols)
    units = -(-cols // 4) if type in _FLOATS else cols // BLOCKS[type].elements
    quants, scales, more = (-(-rows // TILE_ROWS) * units * n for n in _TILE_BYTES[type])
    return quants, scales, more


def tile_bytes(type: str, rows: int, cols: int) -> int:
    """Bytes of a matrix in tiles: those of the file, padded to 16 rows; MXFP4 takes 6 % more, Q4_K and Q5_K 2 to 3 %.

    >>> tile_bytes("Q4_1", 576, 576), 576 * 576 // 32 * 20
    (207360, 207360)
    """
    return sum(plane_bytes(type, rows, cols))


def empty_tiles(type: str, rows: int, cols: int, *, wide: bool = True) -> TileMatrix:
    """Tiles with uninitialised contents."""
    quants, scales, more = (streamed(n_bytes) for n_bytes in plane_bytes(type, rows, cols))
    return TileMatrix(type, rows, cols, (quants, scales, more), wide)


def fill_tiles(tiles: TileMatrix, raw: NDArray[np.uint8], start: int = 0) -> None:
    """Pack rows of the file, uint8 [n, row_bytes], as rows `start` and on, a multiple of 16; n is one too, but for the
    last rows of the matrix. Calls may run beside each other; the interpreter's lock is let go."""
    block = BLOCKS[tiles.type]
    row_bytes = tiles.cols // block.elements * block.n_bytes
    n = len(raw)
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] != row_bytes:
        raise BadFile(
            f"rows of {tiles.cols} columns in {tiles.type} take {row_bytes} bytes (uint8), "
            f"and the tensor has {' x '.join(map(str, raw.shape))} ({raw.dtype})"
        )
    whole = start % TILE_ROWS == 0 and (n % TILE_ROWS == 0 or start + n == tiles.rows)
    assert whole, f"rows {start} to {start + n} are no whole tiles of {tiles.rows}"
    assert 0 <= start <= start + n <= tiles.rows, f"rows {start} to {start + n} of a matrix of {tiles.rows}"
    raw = np.ascontiguousarray(raw)
    matrix = tiles.matrix
    first, last = start // TILE_ROWS, -(-(start + n) // TILE_ROWS)
    _library().ostinato_pack(ctypes.byref(matrix), raw.ctypes.data, first, last)


def _check(type: str, cols: int) -> None:
    if type not in TILE_TYPES:
        raise Unsupported(f"{type} weights are not packed into tiles; those that are: {', '.join(TILE_TYPES)}")
    if cols % BLOCKS[type].elements:
        raise Unsupported(f"rows of {cols} columns are no whole {type} blocks of {BLOCKS[type].elements}")


@cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    matrix, pointer, number = ctypes.POINTER(TileMatrixStruct), ctypes.c_void_p, ctypes.c_int
    if library.ostinato_matrix_bytes() != ctypes.sizeof(TileMatrixStruct):
        raise InternalError("the native library has another idea of a matrix than backends/native/tiles.py")
    library.ostinato_pack.argtypes, library.ostinato_pack.restype = (matrix, pointer, number, number), None
    library.ostinato_product.argtypes = (matrix, pointer, number, pointer, number, number)
    library.ostinato_product.restype = number
    library.ostinato_rows.argtypes, library.ostinato_rows.restype = (matrix, pointer, number, pointer), None
    return library


def _library() -> ctypes.CDLL:
    return _declared(cpu_library())
