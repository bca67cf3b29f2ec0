"""The blocks of a model once more, around other weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ostinato.backends.cuda.packed import Packed, Stack
from ostinato.backends.native.tiles import TileMatrix
from ostinato.models.blocks import Attention, GatedMLP, Layer, Linear, Model, Norm


def rebuilt(model: Model, change: Callable[[Any], Any]) -> Model:
    """A decoder of gated layers with `change` of every weight, bias and frequency, whose kinds are those of blocks."""
    again: Model = _rebuilt(model, change)
    return again


def _rebuilt(part: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(part, Tensor | Packed | Stack):
        return change(part)
    if isinstance(part, list | tuple):
        return [_rebuilt(one, change) for one in part]
    if isinstance(part, Mapping):
        return {key: _rebuilt(value, change) for key, value in part.items()}
    if isinstance(part, Model | Layer | Attention | GatedMLP | Linear | Norm):
        return replace(part, **{field.name: _rebuilt(getattr(part, field.name), change) for field in fields(part)})
    return part


def without_matrices_on(model: Model, device: torch.device) -> Model:
    """A model whose matrices stay where they are, while the embedding and all that is no matrix come to a device. A
    tied head is the embedding, there too."""
    assert not isinstance(model.embedding, TileMatrix)  # which is the CPU's
    embedding = model.embedding.to(device)

    def there(weight: Any) -> Any:
        if weight is model.embedding:
            return embedding
        return weight.to(device) if isinstance(weight, Tensor) and weight.dim() == 1 else weight

    return rebuilt(model, there)
