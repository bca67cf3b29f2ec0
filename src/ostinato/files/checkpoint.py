"""What every kind of model file offers: metadata, tensors, their bytes, and their values as arrays.

`open_checkpoint` decides by content, never by file name. Nothing here knows families or devices. numpy has no bfloat16:
an array of uint16 (`BFLOAT16`) holds its bits. The two kinds are in `gguf.py` and `safetensors.py`, block layouts in
`quants.py`.
"""

from __future__ import annotations

import math
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ostinato.errors import InternalError, UnknownName, listing
from ostinato.files.mapped import MappedFile, status
from ostinato.files.quants import BLOCKS, CHUNK_ELEMENTS, check_readable, dequantize_into
from ostinato.files.sniff import not_a_model, refuse_folder

BFLOAT16: Final = np.dtype(np.uint16)
_SAME_DTYPE: Final = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": BFLOAT16,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: its shape with the outermost dimension first, and how its values are stored."""

    name: str
    shape: tuple[int, ...]
    type: str
    n_bytes: int
    start: int = 0  # the place of its first byte in its file

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class Checkpoint(ABC):
    """A model on disk, in mapped files. Safe to read from several threads at once."""

    format: Literal["gguf", "safetensors"]
    # GGUF's general.architecture ("llama"), config.json's architectures[0] ("LlamaForCausalLM"; empty: it names none)
    architecture: str
    metadata: Mapping[str, Any]  # GGUF's, numbers as numpy arrays and other arrays as lists; or config.json as parsed

    def __init__(self, path: Path) -> None:
        self.path = path  # as the user gave it
        self._files: list[MappedFile] = []
        self._places: dict[str, tuple[MappedFile, TensorInfo]] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType({n: info for n, (_, info) in self._places.items()})

    @abstractmethod
    def _open(self) -> None:
        """Map the files, and fill in `_places`, `architecture` and `metadata`."""

    @abstractmethod
    def fingerprint(self) -> str:
        """sha256, in hex, over the content of every file that makes up the model."""

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes, uint8 [rows, row_bytes], a read-only view of the memory map."""
        if name not in self._places:
            raise UnknownName(f"{self.path}: has no tensor {name!r}; it has {listing(name, self.tensors)[:300]}")
        file, info = self._places[name]
        rows = math.prod(info.shape[:-1])
        return file.view(info.start, info.n_bytes).reshape(rows, info.n_bytes // max(rows, 1))

    def raw_rows(self, name: str, first: int, last: int) -> NDArray[np.uint8]:
        """Rows [first, last) of `raw`."""
        return self.raw(name)[first:last]

    def read(self, name: str, out: NDArray[Any]) -> None:
        """Fill `out` (contiguous, with as many elements, of any float dtype or BFLOAT16) with the values."""
        raw = self.raw(name)
        check_readable(self.tensors[name].type, f"{self.path}: tensor {name!r}")
        fill(self.tensors[name], raw, out)

    def let_go(self, name: str, first: int, last: int) -> None:
        """Rows [first, last) of `raw` were read and are not needed in memory any more."""
        file, info = self._places[name]
        row_bytes = self.raw(name).shape[1]
        file.let_go(info.start + first * row_bytes, (last - first) * row_bytes)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file or a safetensors folder, whichever `path` is.

    >>> open_checkpoint(Path("no/such/model.gguf"))
    Traceback (most recent call last):
        ...
    ostinato.errors.BadFile: no/such/model.gguf: there is no such file or folder; check the path
    """
    from ostinato.files.gguf import GGUFFile
    from ostinato.files.safetensors import SafetensorsFolder

    path = Path(path)
    if stat.S_ISDIR(status(path).st_mode):
        refuse_folder(path)
        return SafetensorsFolder(path)
    file = MappedFile(path)
    head = bytes(file.data[:4096])
    n_bytes = file.n_bytes
    file.close()
    if head[:4] != b"GGUF":
        raise not_a_model(path, head, n_bytes)
    return GGUFFile(path)


def holds_as_it_is(type: str, dtype: np.dtype[Any]) -> bool:
    """Whether an array of this dtype has the bytes that a file of this type has."""
    return type in _SAME_DTYPE and dtype == _SAME_DTYPE[type]


def fill(info: TensorInfo, raw: NDArray[np.uint8], out: NDArray[Any]) -> None:
    """Write the values of `raw` (contiguous, any shape) to `out` in chunks, without full-size temporaries."""
    whole = out.flags.c_contiguous
    if out.size != info.n_elements or not whole:
        raise InternalError(
            f"tensor {info.name!r} of shape {list(info.shape)} cannot be read into a "
            f"{'contiguous' if whole else 'non-contiguous'} array of shape {list(out.shape)}; "
            f"give a contiguous one with {info.n_elements} elements"
        )
    flat = out.reshape(-1)
    if holds_as_it_is(info.type, flat.dtype):
        flat.view(np.uint8)[:] = raw.reshape(-1)
        return
    block = BLOCKS[info.type]
    blocks = raw.reshape(-1, block.n_bytes)
    if flat.dtype == np.float32:
        dequantize_into(blocks, info.type, flat.reshape(-1, block.elements))
        return
    step = CHUNK_ELEMENTS // block.elements
    buffer = np.empty((min(step, len(blocks)), block.elements), np.float32)
    for start in range(0, len(blocks), step):
        values = buffer[: min(step, len(blocks) - start)]
        dequantize_into(blocks[start : start + step], info.type, values)
        flat[start * block.elements :][: values.size] = rounded(values.reshape(-1), flat.dtype)


def rounded(values: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values as another dtype, each rounded once, to the nearest and of two to the even one.

    >>> rounded(np.array([1.0, -2.0], np.float32), BFLOAT16).tolist() == [0x3F80, 0xC000]
    True
    """
    if dtype != BFLOAT16:
        with np.errstate(over="ignore"):  # too large a number is infinite, as anywhere
            return values.astype(dtype)
    bits = values.view(np.uint32)
    nearest = ((bits >> 16 & 1) + 0x7FFF + bits) >> 16
    return np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16)
