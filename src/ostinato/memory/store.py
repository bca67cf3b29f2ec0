"""The tensors of the KV cache: per layer K and V as [cells, kv_heads, head_width], in one of four types.

Cells only: which position or sequence a cell belongs to is `kv_cache.py`'s business. Q8_0 keeps signed bytes and a
float16 scale for every 32 of them, and is widened when read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ostinato.errors import BadOption
from ostinato.kernels.q8_0 import BLOCK, dequantize_q8_0_torch, quantize_q8_0_torch
from ostinato.options import KVType

if TYPE_CHECKING:
    from ostinato.models.shape import Shape

_DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "q8_0": torch.int8}


def kv_bytes(shape: Shape, kv_type: KVType, context: int) -> int:
    """Bytes of keys and values for that many positions."""
    width = shape.head_width
    per_head = width + 2 * (width // BLOCK) if kv_type == "q8_0" else width * _DTYPES[kv_type].itemsize
    return 2 * shape.n_layers * context * shape.n_kv_heads * per_head


class LayerStore:
    """K or V of one layer."""

    def __init__(self, cells: int, heads: int, width: int, kv_type: KVType, device: torch.device) -> None:
        self._values = torch.empty((cells, heads, width), dtype=_DTYPES[kv_type], device=device)
        scales = (cells, heads, width // BLOCK)
        self._scales = torch.empty(scales, dtype=torch.float16, device=device) if kv_type == "q8_0" else None

    def write(self, start: int, rows: Tensor) -> None:
        """Put rows [n, kv_heads, head_width] into the cells from `start` on."""
        cells = slice(start, start + rows.shape[0])
        if self._scales is None:
            self._values[cells] = rows.to(self._values.dtype)
        else:
            self._values[cells], self._scales[cells] = quantize_q8_0_torch(rows)

    def read(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """The cells [start, stop) as dtype: a view where they are kept in it."""
        values = self._values[start:stop]
        if self._scales is None:
            return values.to(dtype)
        return dequantize_q8_0_torch(values, self._scales[start:stop], dtype)


class KVStore:
    """K and V of every layer for a fixed number of cells. Memory is claimed by the system as cells are written."""

    def __init__(self, shape: Shape, kv_type: KVType, cells: int, device: torch.device) -> None:
        if kv_type == "q8_0" and shape.head_width % BLOCK:
            raise BadOption(
                f"kv_type q8_0 needs heads whose width is a multiple of {BLOCK}, and this model's is "
                f"{shape.head_width}; use f16 or bf16"
            )
        self.cells = cells

        def layers() -> list[LayerStore]:
            size = (cells, shape.n_kv_heads, shape.head_width)
            return [LayerStore(*size, kv_type, device) for _ in range(shape.n_layers)]

        self.keys, self.values = layers(), layers()
