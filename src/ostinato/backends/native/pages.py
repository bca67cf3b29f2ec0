"""Memory of sequences in the native loop: keys and values in whole pages of each layer, ordered as `src/attention.h`
reads them, and the states of recurrent layers, slot by slot, with their channels last (`src/mixer.h`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from ostinato.backends.native.streamed import grown_zeros
from ostinato.cache.groups import PageGroup, group_of_layer
from ostinato.cache.kv_bytes import KV_FORMATS, check_kv_widths
from ostinato.loop.memory import host_zeros
from ostinato.options import KVType

if TYPE_CHECKING:
    from ostinato.models.shape import AttentionShape, Shape, States

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
    """The pages of every layer that keeps keys and values, and the states of every recurrent one; bfloat16 is kept as
    its bits."""

    kv_type: KVType
    layers: Mapping[int, LayerPages]
    group_of: Mapping[int, int]  # for each of them, the number of its page table
    # float32 [slots, ...] of each state of a layer, its last two sizes the other way round than `Shape` states them
    states: Mapping[int, tuple[np.ndarray, ...]]

    @staticmethod
    def of(shape: Shape, groups: Sequence[PageGroup], *, n_slots: int, kv_type: KVType) -> NativePages:
        check_kv_widths(kv_type, shape)
        group_of, kind = group_of_layer(groups), KV_TYPES[kv_type]

        def layer(n_pages: int, attention: AttentionShape) -> LayerPages:
            heads, kept = (n_pages, attention.n_kv_heads), KV_FORMATS[kv_type]
            width, value_width = attention.head_width, attention.own_value_width
            return LayerPages(
                grown_zeros((*heads, width, PAGE_TOKENS), kind),
                grown_zeros((*heads, PAGE_TOKENS, value_width), kind),
                host_zeros((*heads, kept.n_scales(width), PAGE_TOKENS), np.float16),
                host_zeros((*heads, PAGE_TOKENS, kept.n_scales(value_width)), np.float16),
            )

        attention = shape.attention
        layers = {number: layer(groups[group].n_pages, attention[number]) for number, group in group_of.items()}

        def states_of(sizes: States) -> tuple[np.ndarray, ...]:
            turned = [(n_slots, *outer, last, channels) for *outer, channels, last in sizes]
            return tuple(grown_zeros(size, np.float32) for size in turned)

        states = {number: states_of(sizes) for number, sizes in shape.states.items()}
        return NativePages(kv_type, layers, group_of, states)

    def views(self) -> NativePages:
        """The same memory through other arrays, which stay writable when these are locked."""
        layers = {
            number: LayerPages(*(getattr(layer, field.name).view() for field in fields(LayerPages)))
            for number, layer in self.layers.items()
        }
        states = {number: tuple(state.view() for state in of_layer) for number, of_layer in self.states.items()}
        return replace(self, layers=layers, states=states)
