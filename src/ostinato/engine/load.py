"""The way from a checkpoint to a model: its blocks, and the loader of the backend that will run it."""

from __future__ import annotations

from ostinato.backends.base import Settled
from ostinato.backends.loading import Progress
from ostinato.backends.torch.backend import model_of
from ostinato.backends.torch.model import Model
from ostinato.engine.choose import backend_of
from ostinato.files.checkpoint import Checkpoint
from ostinato.models.registry import describe
from ostinato.models.shape import Shape


def load_model(checkpoint: Checkpoint, shape: Shape, settled: Settled, progress: Progress | None = None) -> Model:
    """The model with its weights in the settled layout."""
    blocks, table = describe(checkpoint, shape)
    return model_of(backend_of(settled).load(blocks, table, settled, progress), settled)
