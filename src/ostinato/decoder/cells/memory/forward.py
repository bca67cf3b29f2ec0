"""One forward's view of memory: the cells that each row of its ubatch writes and may read, and the states.

A `ForwardMemory` is a `models.blocks.Memory` for one applied ubatch: it joins the integers of the caches with the
tensors of the stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.torch.kv_store import KVStore, StateStore, as_slice
from ostinato.backends.torch.table import Ops
from ostinato.cache.sequences import MAX_SEQ, Ints
from ostinato.cache.state_run import StateRun
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.memory.cells import Cells
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.slots import Slot
from ostinato.models.blocks import AnyAttention


@dataclass(frozen=True, slots=True)
class StreamView:
    """The rows of a ubatch that belong to one stream, the cells they write, those they see, and the mask over these."""

    stream: int
    rows: slice
    written: Tensor
    seen: slice | Tensor
    mask: Tensor | None  # [rows, cells seen]; None: every row sees every one


@dataclass(frozen=True, slots=True)
class KVPart:
    """A cache, its tensors, and this forward's view of them."""

    store: KVStore
    views: tuple[StreamView, ...]

    @staticmethod
    def of(cache: KVCache, store: KVStore, ubatch: Ubatch, slot: Slot, *, device: torch.device) -> KVPart:
        """For a slot that has been applied."""
        views = []
        masks = cache.visible(ubatch, slot)
        for part, mask in zip(slot.streams, masks, strict=True):
            seen = in_order(cache.streams[part.stream].cells, np.flatnonzero(mask.any(0)))
            looked = mask[:, seen]
            views.append(
                StreamView(
                    part.stream,
                    part.rows,
                    torch.from_numpy(part.cells).to(device),
                    as_slice(seen) or torch.from_numpy(seen).to(device),
                    None if looked.all() else torch.from_numpy(looked).to(device),
                )
            )
        return KVPart(store, tuple(views))

    def attend(self, ops: Ops, block: AnyAttention, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        s, keys, values = block.shape, self.store.keys[block.kv_layer], self.store.values[block.kv_layer]
        seen = []
        for view in self.views:
            if k is not None and v is not None:
                keys.write(view.stream, view.written, k[view.rows])
                values.write(view.stream, view.written, v[view.rows])
            past = (half.read(view.stream, view.seen, q.dtype) for half in (keys, values))
            how = {"scale": s.query_scale, "softcap": s.softcap, "sinks": block.sinks}
            seen.append(ops.attention(q[view.rows], *past, view.mask, **how))
        return seen[0] if len(seen) == 1 else torch.cat(seen)


def in_order(cells: Cells, chosen: Ints) -> Ints:
    """Cells by position, and those of one position by their lowest sequence.

    Sums then run in the same order wherever the cells are, so a state that was saved and loaded continues to the bit.
    """
    positions = cells.position[chosen]
    order = np.argsort(positions, kind="stable")
    if (np.diff(positions[order]) == 0).any():
        order = np.lexsort((cells.member[:, chosen].argmax(0), positions))
    return chosen[order]


@dataclass(frozen=True, slots=True)
class EncoderPart:
    """For encoders, which keep nothing: every row sees the rows of this forward that share its sequence, as far as a
    window to both sides reaches."""

    mask: Tensor | None  # [rows, rows]

    @staticmethod
    def of(ubatch: Ubatch, device: torch.device, window: int | None = None) -> EncoderPart:
        member = np.zeros((MAX_SEQ, ubatch.n_tokens), np.bool_)
        member[ubatch.seq_id, np.repeat(np.arange(ubatch.n_tokens), ubatch.n_seq_id)] = True
        seen = member[ubatch.primary]
        if window is not None:
            positions = ubatch.first_pos
            seen &= np.abs(positions[:, None] - positions) < window
        return EncoderPart(None if seen.all() else torch.from_numpy(seen).to(device))

    def attend(self, ops: Ops, block: AnyAttention, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        s = block.shape
        return ops.attention(q, k, v, self.mask, scale=s.query_scale, softcap=s.softcap, sinks=block.sinks)


@dataclass(frozen=True, slots=True)
class ForwardMemory:
    """Memory for one forward. `commit` writes the states passed to `keep`, when the run has succeeded."""

    ops: Ops
    n_seqs: int
    parts: Sequence[KVPart | EncoderPart]
    part_of: Sequence[int]  # per layer, which of the parts holds its keys and values
    states_store: StateStore | None = None
    run: StateRun | None = None
    before_layer: Callable[[], None] = lambda: None  # raises where the caller wants the run to stop
    kept: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    @property
    def n_planes(self) -> int:
        return 1 if self.states_store is None else self.states_store.planes

    def attend(self, block: AnyAttention, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        self.before_layer()
        return self.parts[self.part_of[block.kv_layer]].attend(self.ops, block, q, k, v)

    def states(self, layer: int) -> tuple[Tensor, ...]:
        self.before_layer()
        assert self.states_store is not None
        assert self.run is not None
        return self.states_store.starts(layer, self.run)

    def keep(self, layer: int, states: tuple[Tensor, ...]) -> None:
        self.kept[layer] = states

    def commit(self) -> None:
        """The run has succeeded: write its states to memory."""
        if self.states_store is not None and self.run is not None:
            self.states_store.commit(self.run, self.kept)
