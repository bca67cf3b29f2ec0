"""The types of keys and values, one record each, and the bytes that they take: of one cell, and of all pages.

Each backend states which of them it keeps (`Backend.kv_types`) and in which dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ostinato.cache.groups import PageGroup, one_group
from ostinato.errors import BadOption
from ostinato.options import KVType

if TYPE_CHECKING:
    from ostinato.models.shape import AttentionShape, Shape

SCALE_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How a head's keys or values are stored: bytes of each number, and how many numbers share a float16 scale."""

    item_bytes: int
    block: int | None = None  # None: no scales

    def n_scales(self, width: int) -> int:
        """Of a head of this width."""
        return 0 if self.block is None else width // self.block

    def fits(self, width: int) -> bool:
        """Whether heads of this width are whole blocks."""
        return self.block is None or width % self.block == 0


KV_FORMATS: Final[Mapping[KVType, KVFormat]] = {
    "f32": KVFormat(4),
    "bf16": KVFormat(2),
    "f16": KVFormat(2),
    "q8_0": KVFormat(1, block=32),
}


def kv_widths(shape: Shape) -> set[int]:
    """The widths of its heads of keys and values."""
    return {width for one in shape.kv_layers.values() for width in (one.head_width, one.own_value_width)}


def check_kv_widths(kv_type: KVType, shape: Shape) -> None:
    """Refuse a kv_type that a model's heads cannot have."""
    kept = KV_FORMATS[kv_type]
    for width in sorted(kv_widths(shape)):
        if not kept.fits(width):
            raise BadOption(
                f"kv_type {kv_type} needs heads whose width is a multiple of {kept.block}, and this model's is "
                f"{width}; use f16 or bf16"
            )


def cell_bytes(attention: AttentionShape, kv_type: KVType) -> int:
    """Bytes of one cell in one layer: a key and a value."""
    kept, widths = KV_FORMATS[kv_type], (attention.head_width, attention.own_value_width)
    return attention.n_kv_heads * sum(width * kept.item_bytes + kept.n_scales(width) * SCALE_BYTES for width in widths)


def page_bytes(shape: Shape, kv_type: KVType, page_tokens: int) -> int:
    """Bytes of one page in all layers."""
    return kv_bytes(shape, one_group(shape.kv_layers, 1), kv_type, page_tokens)


def kv_bytes(shape: Shape, groups: Sequence[PageGroup], kv_type: KVType, page_tokens: int) -> int:
    """Bytes of all pages of these groups of layers."""
    cells = {layer: cell_bytes(one, kv_type) for layer, one in shape.kv_layers.items()}
    return page_tokens * sum(cells[layer] * group.n_pages for group in groups for layer in group.layers)
