"""A model's matrices in the order of the tape, and the model once they lie there; its embedding and norms beside them.

`pack.py` lays one matrix out; `plan.py` puts all of them, and what is no matrix, into the kernel's buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ostinato.backends.cuda.packed import Packed
from ostinato.backends.tape.pack import TapeSource, source_of, why_not_packed
from ostinato.backends.tape.tape_weight import Tape, TapeWeight
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.weight import Weight, rows_of
from ostinato.backends.weights import Stack
from ostinato.models.blocks import Attention, GatedMLP, Layer, Linear, with_leaves


def why_not_values(model: Model) -> str | None:
    """Why a loaded model's weights lose something on the tape, which no header states; None where they do not."""
    for name, weight in _weights(model):
        reason = why_not_packed(weight, model.dtype, paired=name.endswith("gate_up"))
        if reason is not None:
            return f"{name}: {reason}"
    return None


def _linears(model: Model) -> Iterator[tuple[str, Linear]]:
    for number, layer in enumerate(model.layers):
        attention = attention_of(model, number)
        assert isinstance(layer.mlp, GatedMLP)
        at = f"layer.{number}"
        yield f"{at}.qkv", attention.qkv
        yield f"{at}.out", attention.out
        yield f"{at}.gate_up", layer.mlp.gate_up
        yield f"{at}.down", layer.mlp.down
    assert model.head is not None
    yield "head", model.head


def without_matrices_on(model: Model, device: torch.device) -> Model:
    """A model whose matrices stay where they are, to be copied to the device one at a time, while the embedding and all
    that is no matrix come to it. A tied head is the embedding, there too."""
    embedding = model.embedding.to(device)

    def there(weight: Any) -> Any:
        if weight is model.embedding:
            return embedding
        return weight.to(device) if isinstance(weight, Tensor) and weight.dim() == 1 else weight

    frequencies = {rope: sets.to(device) for rope, sets in model.frequencies.items()}
    return replace(with_leaves(model, there), device=device, frequencies=frequencies)


def on_tape(model: Model, tape: Tape, embedding: Tensor) -> Model:
    """The model with every matrix on the tape, and the embedding as the kernel has it; a tied head reads that."""
    at = 0
    weights: dict[int, Weight] = {}
    for name, linear in _linears(model):
        n_parts = len(_parts(name, linear.weight))
        weights[id(linear.weight)] = TapeWeight(tape, range(at, at + n_parts))
        at += n_parts
    weights[id(model.embedding)] = embedding
    return with_leaves(model, lambda weight: weights.get(id(weight), weight))


def sources_of(model: Model) -> list[tuple[str, TapeSource]]:
    """Every matrix of the tape in its order, with the name of the linear that it belongs to."""
    return [(name, source_of(weight, paired=name.endswith("gate_up"))) for name, weight in _weights(model)]


def _weights(model: Model) -> Iterator[tuple[str, Weight]]:
    return ((name, part) for name, linear in _linears(model) for part in _parts(name, linear.weight))


def _parts(name: str, weight: Weight) -> list[Weight]:
    """A linear's matrices on the tape: q, k and v are one or, where their kinds differ, one for each part."""
    parts = weight.parts if isinstance(weight, Stack) and name.endswith("qkv") else ()
    differ = len({part.type if isinstance(part, Packed) else "plain" for part in parts}) > 1
    return list(parts) if differ else [weight]


def plain_embedding(model: Model) -> Tensor:
    """Rows that the kernel reads as they are: packed ones are widened to the type of its activations, once."""
    if isinstance(model.embedding, Tensor):
        return model.embedding
    vocab, at_once, device = model.shape.vocab, 4096, model.device
    ids = (torch.arange(first, min(first + at_once, vocab), device=device) for first in range(0, vocab, at_once))
    return torch.cat([rows_of(model.embedding, some, model.dtype) for some in ids])


def has_after_norms(model: Model) -> bool:
    layer = model.layers[0]
    return isinstance(layer, Layer) and layer.after_attention is not None


def attention_of(model: Model, number: int) -> Attention:
    attention = model.layers[number].attention
    assert isinstance(attention, Attention)
    return attention
