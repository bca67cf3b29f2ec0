"""Groups of layers that share a page table, and how many pages they have: layers whose attention reaches equally far.

A layer that sees all positions needs a page for each of a sequence's positions. A layer that sees a window needs pages
for the window alone, whatever the length of the sequence: it has a pool of its own, and `window_pages.py` says which
of its pages a sequence holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ostinato.models.shape import Shape

# Windowed pages in the pool for each whole context of the other pages, in what one sequence holds: the rest keeps the
# windows of earlier prompts.
POOL_LEASES: Final = 2


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that share a page table, and the pages of their pool. `window`: the positions that they see, the query's
    own included; None for all."""

    layers: tuple[int, ...]
    n_pages: int
    window: int | None = None


def one_group(layers: Iterable[int], n_pages: int) -> tuple[PageGroup, ...]:
    """All layers that keep keys and values as one group that keeps every position, which is right for any model."""
    return (PageGroup(tuple(layers), n_pages),)


def page_groups(
    shape: Shape, *, context: int, n_pages: int, page_tokens: int, chunk_rows: int
) -> tuple[PageGroup, ...]:
    """The groups of a model, the one that sees everything first. `n_pages`: of a group that keeps every position.

    A window that is no shorter than the context hides nothing, so it counts as none. Pages of windows are fewer in the
    same proportion: a pool that is smaller, because memory is, is so in every group.
    """
    attention = shape.kv_layers.items()
    if not shape.causal:  # a text's rows are all there at once, and a window is of what they see of each other
        return one_group(tuple(shape.attention), n_pages)
    windows = {layer: None if one.window is None or one.window >= context else one.window for layer, one in attention}
    if not windows:  # pages count the positions of a sequence even where no layer keeps any
        return one_group((), n_pages)
    groups = []
    for window in sorted(set(windows.values()), key=lambda window: (window is not None, window)):
        own = n_pages
        if window is not None:
            lease, max_pages = lease_pages(window, page_tokens, chunk_rows), -(-context // page_tokens)
            own = min(n_pages, max(lease, -(-POOL_LEASES * lease * n_pages // max_pages)))
        groups.append(PageGroup(tuple(layer for layer, each in windows.items() if each == window), own, window))
    return tuple(groups)


def group_of_layer(groups: Sequence[PageGroup]) -> dict[int, int]:
    """For each layer that keeps keys and values, in order, the number of its group."""
    found = {layer: number for number, group in enumerate(groups) for layer in group.layers}
    return {layer: found[layer] for layer in sorted(found)}


def first_page(window: int | None, n_positions: int, page_tokens: int) -> int:
    """The index of the first page that a sequence of n_positions needs, to continue or to be saved."""
    return 0 if window is None else max(0, n_positions - window) // page_tokens


def cycle_pages(window: int, page_tokens: int) -> int:
    """Pages that a window moves over while its sequence decodes: a page is written again when its positions are seen by
    neither the next query nor the one before it.

    >>> cycle_pages(1, 16), cycle_pages(16, 16), cycle_pages(17, 16)
    (2, 2, 3)
    """
    return -(-window // page_tokens) + 1


def lease_pages(window: int, page_tokens: int, chunk_rows: int) -> int:
    """Pages that a sequence holds at most: those of a chunk and of the window before it, and those it decodes into.

    >>> lease_pages(512, 64, 512)
    26
    """
    return -(-(window + chunk_rows - 1) // page_tokens) + 1 + cycle_pages(window, page_tokens)
