"""Memory of sequences in the native loop: keys and values in whole pages of each layer, ordered as `src/attention.h`
reads them, and the states of recurrent layers, slot by slot, with their channels last (`src/mixer.h`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ostinato.backends.native.streamed import grown_zeros
from ostinato.cache.groups import PageGroup, group_of_layer
from ostinato.cache.kv_bytes import KV_FORMATS, check_kv_width
from ostinato.loop.memory import host_zeros
from ostinato.options import KVType

if TYPE_CHECKING:
    from ostinato.models.shape import Shape

PAGE_TOKENS: Final = 16


# What each type of keys and values is kept as, in the order of the enumeration in `src/attention.h`.
KV_TYPES: Final[Mapping[KVType, type[np.generic]]] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.uint16,
    "q8_0": np.int8,
}


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Keys [pages, kv_heads, head_width, 16] and values [pages, kv_heads, 16, head_width] of a layer; scales where
    they are Q8_0, one for each 32 numbers of a head, and empty elsewhere."""

    keys: np.ndarray
    values: np.ndarray
    key_scales: np.ndarray
    value_scales: np.ndarray


@dataclass(frozen=True, slots=True)
class NativePages:
    """The pages of every layer with attention, and the states of every recurrent one; bfloat16 is kept as its bits."""

    kv_type: KVType
    layers: Mapping[int, LayerPages]
    group_of: tuple[int, ...]  # for each layer, the number of its page table
    # float32 [slots, ...] of each state of a layer, its last two sizes the other way round than `Shape` states them
    states: Mapping[int, tuple[np.ndarray, ...]]

    @staticmethod
    def of(shape: Shape, groups: Sequence[PageGroup], *, n_slots: int, kv_type: KVType) -> NativePages:
        if shape.attention:
            check_kv_width(kv_type, shape.head_width)
        width, group_of = shape.head_width, group_of_layer(groups)
        blocks, kind = KV_FORMATS[kv_type].n_scales(width), KV_TYPES[kv_type]

        def layer(n_pages: int) -> LayerPages:
            heads = n_pages, shape.n_kv_heads
            return LayerPages(
                grown_zeros((*heads, width, PAGE_TOKENS), kind),
                grown_zeros((*heads, PAGE_TOKENS, width), kind),
                host_zeros((*heads, blocks, PAGE_TOKENS), np.float16),
                host_zeros((*heads, PAGE_TOKENS, blocks), np.float16),
            )

        every = enumerate(group_of) if shape.attention else ()
        layers = {number: layer(groups[group].n_pages) for number, group in every}
        states = {}
        if shape.recurrent is not None:
            sizes = [(n_slots, *outer, last, channels) for *outer, channels, last in shape.recurrent.states]
            states = {i: tuple(grown_zeros(size, np.float32) for size in sizes) for i in range(shape.n_layers)}
        return NativePages(kv_type, layers, group_of, states)
