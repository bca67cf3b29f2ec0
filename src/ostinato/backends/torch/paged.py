"""Memory of sequences that live in slots: keys and values in whole pages, recurrent states by slot.

`RowMemory` is what one row of a decode step sees, `ChunkMemory` what a chunk of a prompt does. A row's bits depend on
its own sequence alone: a step takes one row at a time, and a chunk has a fixed number of rows and walks the past in
blocks that begin at fixed positions, so it does not matter where a prompt was cut. `pages.py` says which
sequence owns which pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.torch.kv_store import AnyValues, Half, KVStore, StateStore, as_slice
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.ops.blocked_attention import blocked_attention_torch
from ostinato.cache.groups import PageGroup, group_of_layer
from ostinato.cache.sequences import Ints
from ostinato.models.blocks import AnyAttention
from ostinato.options import KVType


@dataclass(frozen=True, slots=True)
class PagedMemory:
    """The tensors: a KV store of whole pages where the model attends, and states of each slot where it recurs."""

    page_tokens: int
    group_of: Mapping[int, int]  # for each layer that keeps keys and values, the number of its page table
    kv: KVStore | None
    states: StateStore | None

    @staticmethod
    def of(
        model: Model, groups: Sequence[PageGroup], *, n_slots: int, kv_type: KVType, page_tokens: int
    ) -> PagedMemory:
        shape, device = model.shape, model.device
        group_of = group_of_layer(groups)
        kv = None
        if shape.attention:
            kv = KVStore(
                shape,
                {layer: groups[group].n_pages * page_tokens for layer, group in group_of.items()},
                kv_type,
                streams=1,
                device=device,
                frequencies=model.frequencies,
            )
        states = None
        if shape.recurrent:
            states = StateStore(shape.states, rows=n_slots, planes=1, device=device)
        return PagedMemory(page_tokens, group_of, kv, states)

    def cells(self, pages: Ints, first: int, stop: int) -> Ints:
        """The cells of positions [first, stop) of a sequence with this page table."""
        positions = np.arange(first, stop)
        return np.asarray(pages)[positions // self.page_tokens] * self.page_tokens + positions % self.page_tokens


@dataclass(frozen=True, slots=True)
class PagedRows:
    """What rows of one sequence see, at positions [start, start + n): the first n rows of what the model is given."""

    memory: PagedMemory
    model: Model
    slot: int
    start: int
    n: int
    pages: Sequence[Ints]  # a page table for each group of layers
    n_seqs: int = 1
    n_planes: int = 1

    def attend(self, block: AnyAttention, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        kv = self.memory.kv
        assert kv is not None
        keys, values = kv.keys[block.kv_layer], kv.values[block.kv_layer]
        if k is not None and v is not None:
            cells = torch.from_numpy(self._cells(block.kv_layer, self.start)).to(q.device)
            keys.write(0, cells, k[: self.n])
            values.write(0, cells, v[: self.n])
        return self._attended(block, q, keys, values)

    def states(self, layer: int) -> tuple[Tensor, ...]:
        assert self.memory.states is not None
        kept = self.memory.states.layers[layer]
        return tuple(torch.zeros_like(s[0, :1]) if self.start == 0 else s[self.slot, :1] for s in kept)

    def keep(self, layer: int, states: tuple[Tensor, ...]) -> None:
        assert self.memory.states is not None
        for kept, new in zip(self.memory.states.layers[layer], states, strict=True):
            kept[self.slot, 0] = new[0, 0]

    def _cells(self, layer: int, first: int) -> Ints:
        """Where the positions from `first` to the last row's are kept in a layer."""
        return self.memory.cells(self.pages[self.memory.group_of[layer]], first, self.start + self.n)

    def _attended(self, block: AnyAttention, q: Tensor, keys: Half, values: AnyValues) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class RowMemory(PagedRows):
    """Of one row of a step, which remembers which cells it found."""

    seen: dict[tuple[int, int | None], slice | Tensor] = field(default_factory=dict)

    def _attended(self, block: AnyAttention, q: Tensor, keys: Half, values: AnyValues) -> Tensor:
        layer, s = block.kv_layer, block.shape
        window = s.window
        place = self.memory.group_of[layer], window
        if place not in self.seen:
            cells = self._cells(layer, 0 if window is None else max(0, self.start + 1 - window))
            self.seen[place] = as_slice(cells) or torch.from_numpy(cells)
        past = (half.read(0, self.seen[place], q.dtype) for half in (keys, values))
        return self.model.ops.attention(q, *past, None, scale=s.query_scale, softcap=s.softcap, sinks=block.sinks)


@dataclass(frozen=True, slots=True)
class ChunkMemory(PagedRows):
    """Of a chunk of a prompt."""

    def _attended(self, block: AnyAttention, q: Tensor, keys: Half, values: AnyValues) -> Tensor:
        s, seen = block.shape, torch.from_numpy(self._cells(block.kv_layer, 0)).to(q.device)

        def past(first: int, stop: int) -> tuple[Tensor, Tensor]:
            return keys.read(0, seen[first:stop], q.dtype), values.read(0, seen[first:stop], q.dtype)

        return blocked_attention_torch(q, past, len(seen), s, start=self.start, sinks=block.sinks)
