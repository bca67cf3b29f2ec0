"""Models of named shapes, or of any, with random weights, as torch runs them."""

from __future__ import annotations

import torch

from ostinato.backends.torch.backend import model_of
from ostinato.backends.torch.model import Model
from ostinato.lab.random_weights import DTYPES, RandomFile, settled_for
from ostinato.models.family import Family
from ostinato.models.named_shapes import named_shape
from ostinato.models.shape import Shape
from ostinato.options import Activations

CPU = torch.device("cpu")


def named_model(
    name: str,
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    mix: str | None = None,
    tiles: Activations | None = None,
    seed: int = 0,
) -> Model:
    """`mix`: packed as a file of that kind; `tiles`: in the native loop's."""
    return random_model_of(None, named_shape(name), dtype, mix=mix, tiles=tiles, device=device, seed=seed)


def random_model_of(
    family: Family | None,
    shape: Shape,
    dtype: torch.dtype,
    *,
    mix: str | None = None,
    tiles: Activations | None = None,
    device: torch.device = CPU,
    seed: int = 0,
) -> Model:
    """The same of any shape; the family is one that the shape names, unless given."""
    of_dtype = str(dtype).removeprefix("torch.")
    type = mix or next(type for type, name in DTYPES.items() if name == of_dtype)
    settled = settled_for(shape, type, str(device), of_dtype, tiles)
    return model_of(RandomFile(shape, type, seed, family).load(settled), settled)
