"""The tensors that a header lists, by our names, which are GGUF's, and what they tell about a model's blocks.

Of a file they are known from its header, before a byte of weights is read; of a model in memory they are listed as a
file of it would have them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from math import prod
from typing import Any, Final

from ostinato.files.checkpoint import Checkpoint, TensorInfo
from ostinato.files.quants import BLOCKS
from ostinato.models.blocks import Block, ModelBlocks
from ostinato.models.shape import Shape
from ostinato.models.tensors import ExpertMatrices, Matrices, Reference

HeaderTensors = Mapping[str, TensorInfo]  # by our names, which are GGUF's
_LAYER_NORM: Final = re.compile(r".*norm\.bias")
_NORM_AFTER: Final = re.compile(r"blk\.\d+\.post_(attention|ffw)_norm\..*")


def tensors_of(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """A file's tensors by our names; what its family passes over is left out."""
    from ostinato.models.registry import table_of

    return {ours: checkpoint.tensors[theirs] for ours, theirs in table_of(checkpoint).names.items()}


# What they tell about blocks


def has_learned_positions(tensors: HeaderTensors) -> bool:
    return "position_embd.weight" in tensors


def has_layer_norm(tensors: HeaderTensors) -> bool:
    """Whether a norm has a bias: then it is a layer norm, else an RMS norm."""
    return any(_LAYER_NORM.fullmatch(name) for name in tensors)


def has_norm_after_block(tensors: HeaderTensors) -> bool:
    return any(_NORM_AFTER.fullmatch(name) for name in tensors)


def has_plain_mlp(shape: Shape, tensors: HeaderTensors) -> bool:
    """Whether feed-forward blocks have no gate. Gate and up may be one tensor, under the name of up."""
    up = tensors.get("blk.0.ffn_up.weight")
    return up is not None and "blk.0.ffn_gate.weight" not in tensors and up.shape[0] != 2 * shape.layers[0].ff_width


# Of a model in memory


def tensors_in(model: ModelBlocks) -> dict[str, TensorInfo]:
    """A model's tensors as a file of its family would have them."""
    from ostinato.models.registry import family_named

    found = {}
    blocks = family_named(model.shape.family).blocks(model.shape, _NamesIn(model))
    for reference, weight in _paired(blocks, model):
        for (name, shape), type in zip(reference.wanted, _types(reference, weight), strict=True):
            found[name] = TensorInfo(name, shape, type, _bytes(type, shape))
    return found


@dataclass(frozen=True, slots=True)
class _NamesIn:
    """What a family asks of a file, answered by a model: experts are one tensor, and q, k and v are three."""

    model: ModelBlocks

    def has(self, name: str) -> bool:
        if name == "output.bias":
            return self.model.head is not None and self.model.head.bias is not None
        if name == "token_types.weight":
            return self.model.type_embedding is not None
        return name.endswith("_exps.weight") and not name.endswith("ffn_gate_up_exps.weight")

    def rows(self, name: str) -> int:
        assert self.model.type_embedding is not None
        return int(self.model.type_embedding.shape[0])


def _paired(made: Any, loaded: Any) -> Iterator[tuple[Reference, Any]]:
    """Each reference of a family's blocks, and what a model has in its place."""
    if isinstance(made, Block):
        for field in fields(made):
            yield from _paired(getattr(made, field.name), getattr(loaded, field.name))
    elif isinstance(made, list | tuple):
        for one, other in zip(made, loaded, strict=True):
            yield from _paired(one, other)
    elif isinstance(made, Reference):
        yield made, loaded


def _types(reference: Reference, weight: Any) -> list[str]:
    """The type of each tensor of a reference, as a file calls it. Parts of a weight lie on top of each other."""
    if not isinstance(reference, Matrices | ExpertMatrices):
        return ["F32" for _ in reference.wanted]
    whole = weight[0] if isinstance(weight, tuple) else weight  # of experts, which may be apart, the first
    parts = getattr(whole, "parts", (whole,))
    if isinstance(reference, ExpertMatrices):
        return [_type(parts[min(number, len(parts) - 1)]) for number, _ in enumerate(reference.wanted)]
    ends = list(accumulate(int(part.shape[0]) for part in parts))
    first_rows = accumulate((rows for rows, _ in reference.shapes[:-1]), initial=0)
    return [_type(parts[bisect_right(ends, row)]) for row in first_rows]


def _type(part: Any) -> str:
    """Of a dense tensor by its dtype."""
    if isinstance(getattr(part, "type", None), str):
        return str(part.type)
    name = str(part.dtype).removeprefix("torch.")
    return {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8"}.get(name, name)


def _bytes(type: str, sizes: tuple[int, ...]) -> int:
    if type not in BLOCKS:
        return prod(sizes) * {"F32": 4, "I8": 1}.get(type, 2)
    return prod(sizes) // BLOCKS[type].elements * BLOCKS[type].n_bytes
