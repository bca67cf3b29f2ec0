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
    from ostinato.models.shape import Shape

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


def check_kv_width(kv_type: KVType, width: int) -> None:
    """Refuse a kv_type that heads of this width cannot have."""
    kept = KV_FORMATS[kv_type]
    if not kept.fits(width):
        raise BadOption(
            f"kv_type {kv_type} needs heads whose width is a multiple of {kept.block}, and this model's is {width}; "
            "use f16 or bf16"
        )


def cell_bytes(shape: Shape, kv_type: KVType) -> int:
    """Bytes of one cell in one layer: a key and a value."""
    kept, width = KV_FORMATS[kv_type], shape.head_width
    return 2 * shape.n_kv_heads * (width * kept.item_bytes + kept.n_scales(width) * SCALE_BYTES)


def page_bytes(shape: Shape, kv_type: KVType, page_tokens: int) -> int:
    """Bytes of one page in all layers."""
    return kv_bytes(shape, one_group(shape.n_layers, 1), kv_type, page_tokens)


def kv_bytes(shape: Shape, groups: Sequence[PageGroup], kv_type: KVType, page_tokens: int) -> int:
    """Bytes of all pages of these groups of layers."""
    if not shape.attention:
        return 0
    return cell_bytes(shape, kv_type) * page_tokens * sum(len(group.layers) * group.n_pages for group in groups)
