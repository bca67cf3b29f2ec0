"""The memory that a model needs: its coordinator, and the tensors behind it.

The only module that maps a model's shape to its kind of memory: keys and values for attention, in two caches
where some layers see a window; states for recurrent layers; both for a hybrid (SP-15, SW-5, HY-1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostinato.backends.torch.kv_store import KVStore, StateStore, cell_bytes
from ostinato.backends.torch.model import Model
from ostinato.cache.sequences import MAX_SEQ
from ostinato.cache.window import Window, windowed_size
from ostinato.decoder.cells.memory.coordinator.hybrid import HybridCoordinator
from ostinato.decoder.cells.memory.coordinator.interface import Cursor, Memory
from ostinato.decoder.cells.memory.coordinator.kv import KVCoordinator
from ostinato.decoder.cells.memory.coordinator.recurrent import RecurrentCoordinator
from ostinato.decoder.cells.memory.coordinator.two_cache import TwoCacheCoordinator
from ostinato.decoder.cells.memory.forward import ForwardMemory, KVPart
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.recurrent import RecurrentMemory
from ostinato.decoder.cells.settings import Settings, settle
from ostinato.errors import Unsupported
from ostinato.options import KVType

if TYPE_CHECKING:
    from ostinato.models.shape import Shape


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """A memory and the tensors of each of its parts; a part that a model does not need is None."""

    memory: Memory
    full: tuple[KVCache, KVStore] | None = None
    windowed: tuple[KVCache, KVStore] | None = None
    recurrent: tuple[RecurrentMemory, StateStore] | None = None

    def forward(self, cursor: Cursor, model: Model) -> ForwardMemory:
        """The memory that the forward of the cursor's current, applied ubatch reads and writes."""
        ubatch, causal, device = cursor.ubatch, model.shape.causal, model.device
        caches = [
            (place, part[1])
            for place, part in ((cursor.attention, self.full), (cursor.windowed, self.windowed))
            if place is not None and part is not None
        ]
        parts = [
            KVPart.of(place.cache, store, ubatch, place.slot, causal=causal, device=device) for place, store in caches
        ]
        part_of = [_part_with(layer, parts) for layer in range(model.shape.n_layers)]
        states = None if self.recurrent is None else self.recurrent[1]
        return ForwardMemory(model.ops, ubatch.n_seqs, parts, part_of, states, cursor.recurrent)


def _part_with(layer: int, parts: list[KVPart]) -> int:
    return next((number for number, part in enumerate(parts) if layer in part.store.keys), 0)


def window_of(shape: Shape) -> int | None:
    """The one window size of a model's windowed layers; None where all layers see everything."""
    sizes = {window for window in shape.windows if window is not None}
    if len(sizes) > 1:
        raise Unsupported(f"{shape.family}: windows of several sizes ({sorted(sizes)}) are not supported")
    return sizes.pop() if sizes else None


def layers_of(shape: Shape, *, windowed: bool) -> list[int]:
    """The layers with attention that see a window, or those that see everything."""
    if not shape.attention:
        return []
    return [layer for layer in range(shape.n_layers) if (shape.windows[layer] is not None) == windowed]


def memory_for(model: Model, settings: Settings, kv_type: KVType) -> MemoryParts:
    """A new, empty memory of the kind that the model needs."""
    shape = model.shape
    recurrent = _recurrent(model, settings)
    if not shape.attention:
        assert recurrent is not None
        return MemoryParts(RecurrentCoordinator(recurrent[0]), recurrent=recurrent)
    window = window_of(shape)
    full = _cache(model, settings, kv_type, layers_of(shape, windowed=False), settings.capacity, None)
    if recurrent is not None:
        if window is not None:
            raise Unsupported(f"{shape.family}: recurrent layers beside a sliding window are not supported")
        return MemoryParts(HybridCoordinator(full[0], recurrent[0]), full=full, recurrent=recurrent)
    if window is None:
        return MemoryParts(KVCoordinator(full[0]), full=full)
    cells, layers = windowed_cells(settings, window), layers_of(shape, windowed=True)
    small = _cache(model, settings, kv_type, layers, cells, Window("standard", window))
    return MemoryParts(TwoCacheCoordinator(full[0], small[0]), full=full, windowed=small)


def windowed_cells(settings: Settings, window: int) -> int:
    """Cells of one stream of the windowed cache (SW-5)."""
    return windowed_size(
        settings.capacity,
        window,
        n_seq_max=settings.n_seq_max,
        unified=settings.unified,
        n_ubatch=settings.n_ubatch,
    )


def memory_bytes(shape: Shape, settings: Settings, kv_type: KVType) -> int:
    """Bytes that the tensors of such a memory would need."""
    per_cell = cell_bytes(shape, kv_type)
    window = window_of(shape)
    cells = len(layers_of(shape, windowed=False)) * settings.capacity
    if window is not None:
        cells += len(layers_of(shape, windowed=True)) * windowed_cells(settings, window)
    return cells * settings.n_streams * per_cell + _state_bytes(shape, settings)


def context_bytes(shape: Shape, kv_type: KVType, context: int) -> int:
    """Bytes of memory for one sequence of that length; 0 for an encoder, which has no memory."""
    if not shape.causal or context < 1:
        return 0
    return memory_bytes(shape, settle(n_ctx=context, n_seq_max=1, unified=True), kv_type)


def _state_bytes(shape: Shape, settings: Settings) -> int:
    if shape.recurrent is None:
        return 0
    per_row = 4 * sum(math.prod(size) for size in shape.recurrent.states)
    return per_row * shape.n_layers * settings.n_seq_max * (1 + settings.n_rs_seq)


def _cache(
    model: Model, settings: Settings, kv_type: KVType, layers: list[int], cells: int, window: Window | None
) -> tuple[KVCache, KVStore]:
    store = KVStore(
        model.shape,
        dict.fromkeys(layers, cells),
        kv_type,
        streams=settings.n_streams,
        device=model.device,
        frequencies=model.frequencies,
    )
    cache = KVCache(
        cells, n_seq_max=settings.n_seq_max, unified=settings.unified, window=window, can_shift=True, tensors=store
    )
    return cache, store


def _recurrent(model: Model, settings: Settings) -> tuple[RecurrentMemory, StateStore] | None:
    shape = model.shape.recurrent
    if shape is None:
        return None
    rows = min(MAX_SEQ, settings.n_seq_max)
    store = StateStore(shape, range(model.shape.n_layers), rows=rows, planes=1 + settings.n_rs_seq, device=model.device)
    return RecurrentMemory(rows, n_snapshots=settings.n_rs_seq, tensors=store), store
