"""Which layers of a model see a window. Integers only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.errors import Unsupported

if TYPE_CHECKING:
    from ostinato.models.shape import Shape


def window_of(shape: Shape) -> int | None:
    """The one window size of a model's windowed layers; None where all layers see everything."""
    sizes = {one.window for one in shape.attention.values() if one.window is not None}
    if len(sizes) > 1:
        raise Unsupported(f"{shape.family}: windows of several sizes ({sorted(sizes)}) are not supported")
    return sizes.pop() if sizes else None


def layers_of(shape: Shape, *, windowed: bool) -> list[int]:
    """The layers with keys and values that see a window, or those that see everything."""
    return [layer for layer, one in shape.kv_layers.items() if (one.window is not None) == windowed]
