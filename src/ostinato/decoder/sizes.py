"""Which layers of a model see a window, and the bytes of memory that its cells would take. Integers only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ostinato.cache.kv_bytes import cell_bytes
from ostinato.cache.window import windowed_size
from ostinato.decoder.cells.settings import Settings, settle
from ostinato.errors import Unsupported
from ostinato.options import KVType

if TYPE_CHECKING:
    from ostinato.models.shape import Shape


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
