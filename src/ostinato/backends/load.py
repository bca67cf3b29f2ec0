"""A model with its weights, as they were settled to lie; and torch's threads, which load it too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ostinato.backends.base import Settled

if TYPE_CHECKING:
    from ostinato.files.checkpoint import Checkpoint
    from ostinato.models.blocks import Model
    from ostinato.models.shape import Shape


def loaded(
    checkpoint: Checkpoint, shape: Shape, settled: Settled, progress: Callable[[int, int], None] | None
) -> Model:
    """The model with its weights as they were settled to lie."""
    import torch

    from ostinato.models.registry import build_model

    return build_model(
        checkpoint,
        shape,
        dtype=getattr(torch, settled.dtype),
        device=torch.device(settled.device),
        context=settled.context,
        progress=progress,
        packed=settled.weights == "packed",
        tiles=settled.activations if settled.weights == "tiles" else None,
        on_host=settled.prompts == "tape",
    )


def use_threads(settled: Settled) -> None:
    """Tell torch, whose threads are one number for the whole process."""
    if settled.threads is not None:
        import torch

        torch.set_num_threads(settled.threads)
