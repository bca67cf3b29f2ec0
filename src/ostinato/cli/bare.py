"""A model without an engine around it, for verbs that drive the loop themselves; and its sizes for the table's head.

Imports torch only when called, so that `--help` stays quick.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostinato.cli.loading import LoadProgress
from ostinato.cli.output import talk
from ostinato.files.store import resolve
from ostinato.options import LoadOptions

if TYPE_CHECKING:
    import torch

    from ostinato.backends.torch.model import Model
    from ostinato.engine.placement import Placement
    from ostinato.files.checkpoint import Checkpoint
    from ostinato.models.shape import Shape


@dataclass(frozen=True, slots=True)
class Bare:
    """A file that is open, and where its model will run."""

    checkpoint: Checkpoint
    shape: Shape
    placement: Placement

    def load(self, device: torch.device | None = None, *, dense: bool = False) -> Model:
        """The model with its weights, where it will run unless another device is given; `dense`: none of them packed,
        as `eager` has them on a CPU."""
        from ostinato.engine.load import build_model

        placement, progress = self.placement, LoadProgress()
        try:
            return build_model(
                self.checkpoint,
                self.shape,
                dtype=placement.dtype,
                device=device or placement.device,
                context=placement.context,
                progress=progress,
                packed=placement.packed and not dense,
                tiles=None if dense else placement.tiles,
            )
        finally:
            progress.close()


@contextmanager
def opened_bare(name: str, options: LoadOptions) -> Iterator[Bare]:
    """The file of that name, its placement settled as an engine would settle it; closed at the end of the block."""
    from ostinato.engine.placement import settle, use_threads
    from ostinato.files.checkpoint import open_checkpoint
    from ostinato.models.registry import read_shape

    checkpoint = open_checkpoint(resolve(name, talk=talk))
    try:
        shape = read_shape(checkpoint)
        placement = settle(checkpoint, shape, options, talk)
        use_threads(placement)
        yield Bare(checkpoint, shape, placement)
    finally:
        checkpoint.close()
