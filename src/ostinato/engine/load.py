"""The way from a checkpoint to a model: its blocks, and the loader of the backend that will run it."""

from __future__ import annotations

from ostinato.backends.base import Settled
from ostinato.backends.loading import Progress
from ostinato.engine.choose import backend_of
from ostinato.files.checkpoint import Checkpoint
from ostinato.models.blocks import LoadedModel, ModelBlocks
from ostinato.models.registry import describe
from ostinato.models.shape import Shape
from ostinato.models.tensors import TensorTable


def load_model(checkpoint: Checkpoint, shape: Shape, settled: Settled, progress: Progress | None = None) -> LoadedModel:
    """The model with its weights in the settled layout, and before them every kernel that an engine with these very
    settings will run (E-9)."""
    blocks, table = describe(checkpoint, shape)
    backend_of(settled).compile(blocks, table, settled)
    return load_blocks(blocks, table, settled, progress)


def load_blocks(
    blocks: ModelBlocks, table: TensorTable, settled: Settled, progress: Progress | None = None
) -> LoadedModel:
    """The weights alone, of blocks over references to tensors of this table: engines are opened with settings of their
    own, and compile what they lack."""
    return backend_of(settled).load(blocks, table, settled, progress)
