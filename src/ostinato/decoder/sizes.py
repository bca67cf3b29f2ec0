"""Which layers of a model see a window. Integers only."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
