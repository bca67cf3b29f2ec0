"""The memory that a model needs: its coordinator, and the tensors behind it.

The only module that maps a model's shape to its kind of memory: keys and values for attention, in two caches where
some layers see a window; states for recurrent layers; both for a hybrid; none for an encoder (SP-15, SW-5, HY-1).
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.backends.torch.kv_store import KVStore, StateStore
from ostinato.backends.torch.model import Model
from ostinato.cache.sequences import MAX_SEQ
from ostinato.cache.window import Window, windowed_size
from ostinato.decoder.cells.memory.coordinator import Coordinator
from ostinato.decoder.cells.memory.cursor import PreparedBatch
from ostinato.decoder.cells.memory.forward import EncoderPart, ForwardMemory, KVPart
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.recurrent import RecurrentMemory
from ostinato.decoder.cells.settings import Settings
from ostinato.decoder.sizes import layers_of, window_of
from ostinato.errors import Unsupported
from ostinato.options import KVType


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """A memory and the tensors of each of its parts; a part that a model does not need is None."""

    memory: Coordinator
    full: tuple[KVCache, KVStore] | None = None
    windowed: tuple[KVCache, KVStore] | None = None
    recurrent: tuple[RecurrentMemory, StateStore] | None = None

    def forward(self, cursor: PreparedBatch, model: Model) -> ForwardMemory:
        """The memory that the forward of the cursor's current, applied ubatch reads and writes."""
        ubatch, device = cursor.ubatch, model.device
        if not model.shape.causal:
            windows = {layer: one.window for layer, one in model.shape.attention.items()}
            kinds = list(dict.fromkeys(windows.values()))
            parts = [EncoderPart.of(ubatch, device, window) for window in kinds]
            return ForwardMemory(model.ops, 1, parts, [kinds.index(windows[n]) for n in range(model.shape.n_layers)])
        caches = [part for part in (self.full, self.windowed) if part is not None]
        kept = [
            KVPart.of(cache, store, ubatch, slot, device=device)
            for cache, store in caches
            if (slot := cursor.place(cache)) is not None
        ]
        part_of = [_part_with(layer, kept) for layer in range(model.shape.n_layers)]
        if self.recurrent is None:
            return ForwardMemory(model.ops, ubatch.n_seqs, kept, part_of)
        memory, states = self.recurrent
        return ForwardMemory(model.ops, ubatch.n_seqs, kept, part_of, states, cursor.place(memory))


def _part_with(layer: int, parts: list[KVPart]) -> int:
    return next((number for number, part in enumerate(parts) if layer in part.store.keys), 0)


def memory_for(model: Model, settings: Settings, kv_type: KVType) -> MemoryParts:
    """A new, empty memory of the kind that the model needs."""
    shape = model.shape
    if not shape.causal:
        return MemoryParts(Coordinator())
    full = windowed = None
    recurrent, window = _recurrent(model, settings), window_of(shape)
    if recurrent is not None and window is not None:
        raise Unsupported(f"{shape.family}: recurrent layers beside a sliding window are not supported")
    if shape.attention:
        full = _cache(model, settings, kv_type, layers_of(shape, windowed=False), settings.capacity, None)
    if window is not None:
        s, layers = settings, layers_of(shape, windowed=True)
        cells = windowed_size(s.capacity, window, n_seq_max=s.n_seq_max, unified=s.unified, n_ubatch=s.n_ubatch)
        windowed = _cache(model, settings, kv_type, layers, cells, Window("standard", window))
    memory = Coordinator(
        full=None if full is None else full[0],
        windowed=None if windowed is None else windowed[0],
        recurrent=None if recurrent is None else recurrent[0],
    )
    return MemoryParts(memory, full, windowed, recurrent)


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
        cells,
        n_seq_max=settings.n_seq_max,
        unified=settings.unified,
        window=window,
        n_pos_dims=model.shape.n_pos_dims,
        tensors=store,
    )
    return cache, store


def _recurrent(model: Model, settings: Settings) -> tuple[RecurrentMemory, StateStore] | None:
    if not model.shape.recurrent:
        return None
    rows = min(MAX_SEQ, settings.n_seq_max)
    store = StateStore(model.shape.states, rows=rows, planes=1 + settings.n_rs_seq, device=model.device)
    return RecurrentMemory(rows, n_snapshots=settings.n_rs_seq, tensors=store), store
