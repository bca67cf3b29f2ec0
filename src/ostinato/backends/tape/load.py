"""Loads a model for the tape: its matrices stay in the host's memory, and are copied to the device one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ostinato.backends.torch.model import Model
from ostinato.models.blocks import with_leaves


def without_matrices_on(model: Model, device: torch.device) -> Model:
    """A model whose matrices stay where they are, while the embedding and all that is no matrix come to a device. A
    tied head is the embedding, there too."""
    embedding = model.embedding.to(device)

    def there(weight: Any) -> Any:
        if weight is model.embedding:
            return embedding
        return weight.to(device) if isinstance(weight, Tensor) and weight.dim() == 1 else weight

    return replace(with_leaves(model, there), device=device)
