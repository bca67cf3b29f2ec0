"""A model without an engine, for verbs that drive the loop themselves; and its sizes for the table's header.

Imports torch only when called, so that `--help` stays quick.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ostinato.cli.loading import LoadProgress
from ostinato.cli.output import talk
from ostinato.files.store import resolve
from ostinato.options import LoadOptions

if TYPE_CHECKING:
    from ostinato.backends.base import Settled
    from ostinato.files.checkpoint import Checkpoint
    from ostinato.models.blocks import LoadedModel
    from ostinato.models.shape import Shape


@dataclass(frozen=True, slots=True)
class Bare:
    """An open file, and where its model will run."""

    checkpoint: Checkpoint
    shape: Shape
    settled: Settled

    def load(self, device: str | None = None, *, dense: bool = False) -> LoadedModel:
        """The model with its weights, on its own device unless another is given; `dense`: no weight is packed, as in
        `eager` on a CPU."""
        from ostinato.engine.load import load_blocks
        from ostinato.models.registry import describe

        progress = LoadProgress()
        kept = replace(self.settled, device=device or self.settled.device, prompts="plain")
        if dense:
            kept = replace(kept, backend="torch", weights="dense")
        try:
            return load_blocks(*describe(self.checkpoint, self.shape), kept, progress)
        finally:
            progress.close()


@contextmanager
def opened_bare(name: str, options: LoadOptions) -> Iterator[Bare]:
    """The file of that name, with settings chosen as for an engine; closed at the end of the block."""
    from ostinato.engine.choose import choose
    from ostinato.files.checkpoint import open_checkpoint
    from ostinato.models.registry import read_shape

    with open_checkpoint(resolve(name, talk=talk)) as checkpoint:
        shape = read_shape(checkpoint)
        yield Bare(checkpoint, shape, choose(checkpoint, shape, options, talk))
