"""What every kind of model file offers: metadata, tensors, their bytes, and their values as torch tensors.

`open_checkpoint` decides by content, never by file name. Nothing here knows families or devices; torch is
imported only where a tensor is filled. The two kinds are in `gguf.py` and `safetensors.py`, block layouts
in `quants.py`.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ostinato.errors import InternalError
from ostinato.files.mapped import MappedFile, status
from ostinato.files.quants import BLOCKS, CHUNK_ELEMENTS, dequantize_into
from ostinato.files.sniff import not_a_model, refuse_folder

if TYPE_CHECKING:
    import torch

_SAME_DTYPE = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: its shape with the outermost dimension first, and how its values are stored."""

    name: str
    shape: tuple[int, ...]
    type: str
    n_bytes: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class Checkpoint(Protocol):
    """A model on disk. Safe to read from several threads at once."""

    @property
    def path(self) -> Path:
        """The file or folder as the user gave it."""

    @property
    def format(self) -> Literal["gguf", "safetensors"]: ...

    @property
    def architecture(self) -> str:
        """GGUF's `general.architecture` ("llama"), config.json's `architectures[0]` ("LlamaForCausalLM")."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """GGUF keys and values (numbers as numpy arrays, other arrays as lists), or config.json as parsed."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes, uint8 [rows, row_bytes], a read-only view of the memory map."""

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` (contiguous, with as many elements, any float dtype, any device) with the values."""

    def let_go(self, name: str, first: int, last: int) -> None:
        """Rows [first, last) of `raw` were read and are not needed in memory any more."""

    def fingerprint(self) -> str:
        """sha256, in hex, over the content of every file that makes up the model."""

    def close(self) -> None: ...


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


def holds_as_it_is(type: str, dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype has the bytes that a file of this type has."""
    return str(dtype) == f"torch.{_SAME_DTYPE.get(type)}"


def fill(info: TensorInfo, raw: NDArray[np.uint8], out: torch.Tensor) -> None:
    """Write the values of `raw` (contiguous, any shape) to `out` in chunks, without full-size temporaries."""
    import torch

    if out.numel() != info.n_elements or not out.is_contiguous():
        layout = "contiguous" if out.is_contiguous() else "non-contiguous"
        raise InternalError(
            f"tensor {info.name!r} of shape {list(info.shape)} cannot be read into a {layout} tensor of shape "
            f"{list(out.shape)}; give a contiguous one with {info.n_elements} elements"
        )
    flat = out.detach().view(-1)
    if flat.device.type == "cpu" and holds_as_it_is(info.type, flat.dtype):
        flat.view(torch.uint8).numpy()[:] = raw.reshape(-1)
        return
    block = BLOCKS[info.type]
    blocks = raw.reshape(-1, block.n_bytes)
    if flat.device.type == "cpu" and flat.dtype == torch.float32:
        dequantize_into(blocks, info.type, flat.numpy().reshape(-1, block.elements))
    else:
        _fill_through_buffer(info.type, blocks, flat)


def _fill_through_buffer(type: str, blocks: NDArray[np.uint8], flat: torch.Tensor) -> None:
    """Dequantise to float32 piece by piece and let torch convert and move each; larger pieces to a device."""
    import torch

    elements = BLOCKS[type].elements
    step = CHUNK_ELEMENTS * (1 if flat.device.type == "cpu" else 64) // elements
    buffer = np.empty((min(step, len(blocks)), elements), np.float32)
    for start in range(0, len(blocks), step):
        values = buffer[: min(step, len(blocks) - start)]
        dequantize_into(blocks[start : start + step], type, values)
        flat[start * elements :][: values.size].copy_(torch.from_numpy(values).view(-1))
