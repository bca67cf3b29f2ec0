"""Bytes of keys and values, by type: of one cell, and of all pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ostinato.cache.groups import PageGroup, one_group
from ostinato.options import Q8_BLOCK, KVType

if TYPE_CHECKING:
    from ostinato.models.shape import Shape

_WIDTHS: Final[Mapping[KVType, int]] = {"f32": 4, "bf16": 2, "f16": 2}


def cell_bytes(shape: Shape, kv_type: KVType) -> int:
    """Bytes of one cell in one layer: a key and a value."""
    width = shape.head_width
    per_head = width + 2 * (width // Q8_BLOCK) if kv_type == "q8_0" else width * _WIDTHS[kv_type]
    return 2 * shape.n_kv_heads * per_head


def page_bytes(shape: Shape, kv_type: KVType, page_tokens: int) -> int:
    """Bytes of one page in all layers."""
    return kv_bytes(shape, one_group(shape.n_layers, 1), kv_type, page_tokens)


def kv_bytes(shape: Shape, groups: Sequence[PageGroup], kv_type: KVType, page_tokens: int) -> int:
    """Bytes of all pages of these groups of layers."""
    if not shape.attention:
        return 0
    return cell_bytes(shape, kv_type) * page_tokens * sum(len(group.layers) * group.n_pages for group in groups)
