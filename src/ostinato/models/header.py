"""The tensors that a header lists, by our names, which are GGUF's, and what they tell about a model's blocks.

Of a file they are known from its header, before a byte of weights is read; of a model in memory they are listed as a
file of it would have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final

from ostinato.files.checkpoint import Checkpoint, TensorInfo
from ostinato.files.quants import BLOCKS
from ostinato.models.shape import Shape

if TYPE_CHECKING:
    from ostinato.models.blocks import ModelBlocks

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
    return up is not None and "blk.0.ffn_gate.weight" not in tensors and up.shape[0] != 2 * shape.ff_width


# Of a model in memory


def tensors_in(model: ModelBlocks) -> dict[str, TensorInfo]:
    """A model's tensors as a file of it would have them: matrices that were stacked are apart."""
    return {name: TensorInfo(name, sizes, type, _bytes(type, sizes)) for name, sizes, type in _listed(model)}


def _listed(model: ModelBlocks) -> Iterator[tuple[str, tuple[int, ...], str]]:
    from ostinato.models.blocks import Layer

    yield from _matrices([("token_embd", model.shape.vocab)], model.embedding)
    if model.position_embedding is not None:
        yield "position_embd.weight", tuple(model.position_embedding.shape), "F32"
    if model.norm is not None:
        yield from _norm("output_norm", model.norm)
    head = model.head
    if head is not None and head.weight is not model.embedding:
        yield from _matrices([("output", model.shape.vocab)], head.weight)
    if head is not None and head.bias is not None:
        yield "output.bias", tuple(head.bias.shape), "F32"
    for number, layer in enumerate(model.layers):
        if isinstance(layer, Layer):
            yield from _layer(f"blk.{number}.", layer, model.shape)


def _layer(at: str, layer: Any, shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    attention, mlp = layer.attention, layer.mlp
    norms = {
        "attn_norm": layer.attention_norm,
        "post_attention_norm": layer.after_attention,
        "ffn_norm": layer.mlp_norm,
        "post_ffw_norm": layer.after_mlp,
        "attn_q_norm": attention.q_norm,
        "attn_k_norm": attention.k_norm,
    }
    for name, norm in norms.items():
        if norm is not None:
            yield from _norm(at + name, norm)
    heads, kv = shape.n_heads * shape.head_width, shape.n_kv_heads * shape.head_width
    qkv = [(f"{at}attn_q", heads), (f"{at}attn_k", kv), (f"{at}attn_v", kv)]
    yield from _linear(qkv, attention.qkv)
    yield from _linear([(f"{at}attn_output", shape.hidden)], attention.out)
    if shape.experts is not None and hasattr(mlp, "router"):
        yield from _linear([(f"{at}ffn_gate_inp", shape.experts.n_experts)], mlp.router)
        yield from _experts(at, mlp, shape)
        return
    gated = hasattr(mlp, "gate_up")
    inner = ["ffn_gate", "ffn_up"] if gated else ["ffn_up"]
    yield from _linear([(at + name, shape.ff_width) for name in inner], mlp.gate_up if gated else mlp.up)
    yield from _linear([(f"{at}ffn_down", shape.hidden)], mlp.down)


def _experts(at: str, mlp: Any, shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    assert shape.experts is not None
    n, ff = shape.experts.n_experts, shape.experts.ff_width
    gate_up, down = (part[0] if isinstance(part, tuple) else part for part in (mlp.gate_up, mlp.down))
    both = getattr(gate_up, "parts", (gate_up,))
    for name, part in (("gate", both[0]), ("up", both[-1])):
        yield f"{at}ffn_{name}_exps.weight", (n, ff, shape.hidden), _type(part)
    yield f"{at}ffn_down_exps.weight", (n, shape.hidden, ff), _type(down)


def _linear(names: list[tuple[str, int]], linear: Any) -> Iterator[tuple[str, tuple[int, ...], str]]:
    yield from _matrices(names, linear.weight)
    if linear.bias is not None:
        yield from ((f"{name}.bias", (rows,), "F32") for name, rows in names)


def _matrices(names: list[tuple[str, int]], weight: Any) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Matrices that lie on top of each other, in parts of one type each."""
    parts = [(_rows(part), part) for part in getattr(weight, "parts", (weight,))]
    at = 0
    for name, rows in names:
        before, part = 0, parts[0][1]
        for n, one in parts:
            if before <= at < before + n:
                part = one
            before += n
        yield f"{name}.weight", (rows, _columns(part)), _type(part)
        at += rows


def _norm(name: str, norm: Any) -> Iterator[tuple[str, tuple[int, ...], str]]:
    yield f"{name}.weight", tuple(norm.weight.shape), "F32"
    if norm.bias is not None:
        yield f"{name}.bias", tuple(norm.bias.shape), "F32"


def _rows(part: Any) -> int:
    return int(part.shape[0])


def _columns(part: Any) -> int:
    return int(part.shape[-1])


def _type(part: Any) -> str:
    """As a file calls it: of a dense tensor by its dtype."""
    if isinstance(getattr(part, "type", None), str):
        return str(part.type)
    name = str(part.dtype).removeprefix("torch.")
    return {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8"}.get(name, name)


def _bytes(type: str, sizes: tuple[int, ...]) -> int:
    if type not in BLOCKS:
        return prod(sizes) * {"F32": 4, "I8": 1}.get(type, 2)
    return prod(sizes) // BLOCKS[type].elements * BLOCKS[type].n_bytes
