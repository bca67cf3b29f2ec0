"""Which layers of a model see a window, and the cells that they need. Integers only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.cache.window import windowed_size
from ostinato.decoder.cells.settings import Settings
from ostinato.errors import Unsupported

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
