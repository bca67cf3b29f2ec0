"""The models of the GPU checks: named shapes, small ones of every family, and a file where there is one.

Small models are made on the CPU and moved, so that the same weights can be computed with on both sides.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ostinato.backends.base import PAGE_TOKENS, Settled
from ostinato.backends.cuda.packed import Packed
from ostinato.backends.native.backend import why_not_blocks
from ostinato.backends.torch.backend import model_of
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.plan import tensors_of
from ostinato.backends.torch.table import Ops
from ostinato.engine.choose import choose, settle_model
from ostinato.engine.load import load_blocks
from ostinato.files.checkpoint import open_checkpoint
from ostinato.lab.random_weights import DTYPES, random_model
from ostinato.models.blocks import Conv, Decay, Norm
from ostinato.models.named_shapes import SHAPES
from ostinato.models.registry import describe, read_shape
from ostinato.models.rope import Rope
from ostinato.models.shape import Shape
from ostinato.options import Activations, KVType, LoadOptions
from ostinato.text.of_checkpoint import tokenizer_of
from ostinato.text.tokenizer import Tokenizer
from tests.backends.families import FAMILIES, LATENT, RECURRENT, FamilyWeights, family_model
from tests.backends.native.tiled import tiled

TAPE: Final = "persistent"
# Of every other family that runs on CUDA, by the name of its tiny model (tests/models/tiny.py).
OTHERS: Final = (
    "arcee", "bamba", "command-r", "ernie4.5", "ernie4-5-moe", "exaone4", "exaone4-window", "gemma", "glm4",
    "glm4-moe", "granite-hybrid", "granite-hybrid-moe", "granite-moe", "lfm2-moe", "nemotron-h", "nemotron-h-moe",
    "nemotron-h-latent", "olmo3", "olmoe", "phi2", "qwen35-moe", "qwen3-next", "qwen3-vl", "qwen3-vl-moe", "seed-oss",
    "stablelm", "stablelm-parallel", "starcoder2", "starcoder2-window",
)  # fmt: skip
SMALL: Final = (*FAMILIES, *RECURRENT, *LATENT, *OTHERS)
ON_CPU: Final = frozenset({*SMALL, *(n for n in SHAPES if n.startswith("tiny"))})  # made there, moved


def place(device: str) -> torch.device:
    """`cuda` with its number: tensors have one, and are compared with it."""
    return torch.device("cuda", 0) if device == "cuda" else torch.device(device)


def kv_type_of(type: str) -> KVType:
    return "f32" if type == "f32" else "bf16"


def model_named(name: str, type: str) -> Model:
    """A model by the name of a shape or a family, in a dtype or a mix of packed types, on the CPU."""
    return _made(name, type, torch.device("cpu"))


def model_on(name: str, type: str, device: str) -> Model:
    """The same on a device, with the same weights; a large one is made there."""
    if device == "cpu":
        return in_tiles(model_named(name, type))
    if name in ON_CPU:
        return moved(model_named(name, type), place(device))
    return _made(name, type, place(device))


def model_of_file(path: str, device: str, *, context: int = 2048) -> tuple[Model, Tokenizer]:
    """A model's file as an engine loads it that is asked for the persistent kernel, or on the CPU for `eager`."""
    checkpoint = open_checkpoint(Path(path))
    shape = read_shape(checkpoint)
    mode = "eager" if device == "cpu" else TAPE
    options = LoadOptions(device=device, mode=mode, context=min(context, shape.context))
    at = replace(choose(checkpoint, shape, options, lambda _: None), prompts="plain")
    return model_of(load_blocks(*describe(checkpoint, shape), at), at), tokenizer_of(checkpoint)


def _made(name: str, type: str, device: torch.device) -> Model:
    with torch.inference_mode(False):
        if name in SHAPES:
            made = random_model(name, type, str(device))
            assert isinstance(made, Model)
            return made
        dtype = getattr(torch, DTYPES[type])
        return moved(other_model(name, dtype) if name in OTHERS else family_model(name, dtype=dtype), device)


def other_model(name: str, dtype: torch.dtype) -> Model:
    """Random weights in the shape of a tiny model."""
    from tests.models.stated import read_tiny
    from tests.models.tiny import TINY

    family, shape = read_tiny(TINY[name])
    return FamilyWeights(0, dtype).model(family, shape)


def in_tiles(model: Model) -> Model:
    """A model as the CPU's loop wants it, where that can play it."""
    dense = all(isinstance(tensor, Tensor) and tensor.dtype == torch.float32 for _, tensor in tensors_of(model, ""))
    return tiled(model) if dense and why_not_blocks(model.shape) is None else model


def moved(model: Model, device: torch.device, dtype: torch.dtype | None = None) -> Model:
    """A model elsewhere, in another dtype if one is given. Norms and frequencies stay in float32, packed as it is."""
    memo: dict[int, Any] = {}
    there: Model = _moved(model, device, dtype, memo)
    return replace(there, device=device, dtype=dtype or model.dtype)


def _moved(part: Any, device: torch.device, dtype: torch.dtype | None, memo: dict[int, Any]) -> Any:
    if isinstance(part, Tensor | Packed):
        # A tied head is the embedding once more, there too.
        if id(part) not in memo:
            narrow = isinstance(part, Tensor) and part.is_floating_point() and dtype is not None
            memo[id(part)] = part.to(device, dtype) if narrow and isinstance(part, Tensor) else part.to(device)
        return memo[id(part)]
    if isinstance(part, Norm | Conv | Decay):
        dtype = None
    if isinstance(part, Shape | Ops | Rope):
        return part
    if isinstance(part, Mapping):  # frequencies
        return {key: _moved(value, device, None, memo) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return type(part)([_moved(value, device, dtype, memo) for value in part])
    if is_dataclass(part):
        changes = {f.name: _moved(getattr(part, f.name), device, dtype, memo) for f in fields(part)}
        return replace(part, **changes)  # type: ignore[type-var]  # an instance, as the line above has seen
    return part


def random_ids(model: Model, n: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(model.shape.vocab) for _ in range(n)]


def settled_for(
    model: Model,
    mode: str,
    *,
    n_slots: int,
    context: int,
    kv_type: KVType,
    n_pages: int | None = None,
    activations: Activations = "wide",
) -> Settled:
    """Pages for every slot's whole context, unless fewer are asked for, and some more for what is kept of prompts."""
    one = -(-context // PAGE_TOKENS[model.device.type])
    return settle_model(
        model,
        mode,
        context=context,
        n_pages=(n_slots + 1) * one if n_pages is None else n_pages,
        n_slots=n_slots,
        kv_type=kv_type,
        activations=activations,
    )


def modes_of(device: str) -> tuple[str, ...]:
    return ("eager", "loop") if device == "cpu" else ("eager", "graph", "loop")
