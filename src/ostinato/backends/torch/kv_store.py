"""The tensors of memory: keys and values by cell, recurrent states by row. Other modules assign the cells.

K of a layer is [streams, cells, kv_heads, head_width] and V [streams, cells, kv_heads, value_width], in one of four
types; Q8_0 keeps signed bytes and a float16 scale for every 32 of them, and is widened when read. Memory is zeroed:
attention reads padding too, and masked values must not be NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.kv_types import KV_DTYPES
from ostinato.backends.torch.ops.q8_0 import dequantize_q8_0_torch, quantize_q8_0_torch
from ostinato.backends.torch.ops.rope import rope_torch
from ostinato.cache.kv_bytes import KV_FORMATS, check_kv_widths
from ostinato.cache.sequences import Ints
from ostinato.cache.state_run import StateRun
from ostinato.models.rope import Rope
from ostinato.options import KVType

if TYPE_CHECKING:
    from ostinato.models.shape import AttentionShape, Shape, States


class Half:
    """K or V of one layer."""

    def __init__(self, streams: int, cells: int, heads: int, width: int, kv_type: KVType, device: torch.device) -> None:
        place, n_scales = (streams, cells, heads), KV_FORMATS[kv_type].n_scales(width)
        self.values = zeros((*place, width), getattr(torch, KV_DTYPES[kv_type]), device)
        self.scales = zeros((*place, n_scales), torch.float16, device) if n_scales else None

    @property
    def parts(self) -> list[Tensor]:
        """Everything that is kept, each [streams, cells, ...]."""
        return [self.values] if self.scales is None else [self.values, self.scales]

    def write(self, stream: int, cells: Tensor, rows: Tensor) -> None:
        """Put rows [n, kv_heads, head_width] into cells [n]."""
        if self.scales is None:
            self.values[stream].index_copy_(0, cells, rows.to(self.values.dtype))
        else:
            quants, scales = quantize_q8_0_torch(rows)
            self.values[stream].index_copy_(0, cells, quants)
            self.scales[stream].index_copy_(0, cells, scales)

    def read(self, stream: int, cells: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Cells [n, kv_heads, head_width] as dtype: a view where they are a slice and kept in it."""
        values = self.values[stream, cells]
        if self.scales is None:
            return values.to(dtype)
        return dequantize_q8_0_torch(values, self.scales[stream, cells], dtype)


class ValuesInKeys:
    """Values that are the last numbers of their keys: nothing of their own is kept."""

    parts: Sequence[Tensor] = ()

    def __init__(self, keys: Half, width: int) -> None:
        self._keys, self._width = keys, width

    def write(self, stream: int, cells: Tensor, rows: Tensor) -> None:
        """Their keys were written."""

    def read(self, stream: int, cells: slice | Tensor, dtype: torch.dtype) -> Tensor:
        return self._keys.read(stream, cells, dtype)[..., -self._width :]


AnyValues: TypeAlias = Half | ValuesInKeys


def as_slice(cells: Ints) -> slice | None:
    """The cells as a slice, if they are contiguous: then they can be read without a copy."""
    first, last = int(cells[0]), int(cells[-1])
    whole = last - first + 1 == len(cells) and bool((np.diff(cells) == 1).all())
    return slice(first, last + 1) if whole else None


class KVStore:
    """K and V of some layers of a model, for a number of streams of cells. `cells`: of each layer."""

    def __init__(
        self,
        shape: Shape,
        cells: Mapping[int, int],
        kv_type: KVType,
        *,
        streams: int,
        device: torch.device,
        frequencies: Mapping[Rope, Tensor],
    ) -> None:
        check_kv_widths(kv_type, shape)
        self.kv_type = kv_type
        self._attention, self._frequencies = shape.attention, frequencies

        def half(layer: int, width: int) -> Half:
            return Half(streams, cells[layer], self._attention[layer].n_kv_heads, width, kv_type, device)

        def values(layer: int, attention: AttentionShape) -> AnyValues:
            if attention.latent is not None:
                return ValuesInKeys(self.keys[layer], attention.value_width)
            return half(layer, attention.value_width)

        self.keys = {layer: half(layer, self._attention[layer].head_width) for layer in cells}
        self.values = {layer: values(layer, self._attention[layer]) for layer in cells}

    @property
    def halves(self) -> list[Half]:
        """Keys of every layer, then values of every layer that keeps them."""
        return [half for half in (*self.keys.values(), *self.values.values()) if isinstance(half, Half)]

    def copy_stream(self, source: int, target: int) -> None:
        """Copy all keys and values of a stream (SQ-8)."""
        for half in self.halves:
            for part in half.parts:
                part[target] = part[source]

    def zero(self) -> None:
        """Forget all keys and values."""
        for half in self.halves:
            for part in half.parts:
                part.zero_()

    def shift_keys(self, stream: int, shifts: Ints) -> None:
        """Rotate the keys of a stream, cell by cell, by as much as their positions moved; not values (UP-3, UP-6)."""
        moved = torch.from_numpy(shifts).nonzero().squeeze(-1)
        rotated = []  # all of it before any is written: a failure leaves every layer as it was
        for layer, keys in self.keys.items():
            rope = self._attention[layer].rope
            if rope is None or not len(moved):
                continue  # no RoPE, nothing to rotate (UP-4)
            cells = moved.to(keys.values.device)
            angles = torch.from_numpy(shifts)[moved].to(cells.device).float().unsqueeze(-1) * self._frequencies[rope]
            rows = keys.read(stream, cells, torch.float32)
            rotated.append((keys, cells, rope_torch(rows, angles.cos(), angles.sin(), rope.pairing)))
        for keys, cells, rows in rotated:
            keys.write(stream, cells, rows)


class StateStore:
    """The states of recurrent layers: [rows, planes, ...] each, float32; plane r is the state r tokens earlier."""

    def __init__(self, states: Mapping[int, States], *, rows: int, planes: int, device: torch.device) -> None:
        self.planes = planes
        self.layers = {
            layer: tuple(zeros((rows, planes, *size), torch.float32, device) for size in sizes)
            for layer, sizes in states.items()
        }

    def zero(self) -> None:
        """Forget all states."""
        for states in self.layers.values():
            for state in states:
                state.zero_()

    def starts(self, layer: int, run: StateRun) -> tuple[Tensor, ...]:
        """What the sets of a run begin with, each [sets, ...]; zeros for a new sequence."""
        return tuple(
            torch.stack([torch.zeros_like(state[0, 0]) if at is None else state[at.row, at.plane] for at in run.starts])
            for state in self.layers[layer]
        )

    def commit(self, run: StateRun, kept: Mapping[int, tuple[Tensor, ...]]) -> None:
        """Write what a run left behind, each [sets, planes, ...], once it has succeeded as a whole (RM-19).

        Wholly or not at all: everything that is read or made anew comes before the first write.
        """
        writes: list[tuple[Tensor, Tensor]] = []
        for layer, states in self.layers.items():
            for state, new in zip(states, kept[layer], strict=True):
                writes.append((state[run.head : run.head + new.shape[0], : new.shape[1]], new))
                writes += [(state[move.target], state[move.source].clone()) for move in run.moves]
        for place, value in writes:
            place.copy_(value)
