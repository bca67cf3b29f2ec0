"""What models are made of: norms, linears, attention, feed-forward blocks, layers, and the model over them.

Each block holds its weights and the ops it calls (`kernels/table.py`) and nothing about requests. Keys and values
go through a `KV`, an argument, so a block does not know how they are kept. Shapes: x is [rows, hidden], one row
per token; q is [rows, heads, head_width], k and v [rows, kv_heads, head_width].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ostinato.kernels.activation import Activation
from ostinato.kernels.table import Ops
from ostinato.models.rope import Rope
from ostinato.models.shape import ExpertShape, Shape


class KV(Protocol):
    """Where attention keeps keys and values: appends this forward's rows, then gives what a row may look at."""

    def extend(self, layer: int, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values [cells, kv_heads, head_width] with the new rows in, and the mask [rows, cells] or None."""


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines of this forward's rows for each kind of rope in the model."""

    turns: dict[Rope, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm, or layer norm where there is a bias."""

    ops: Ops
    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return self.ops.rms_norm(x, self.weight, self.eps)
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class Linear:
    ops: Ops
    weight: Tensor  # [out, in]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Attention:
    """q, k and v in one product; QK norm and rotary positions where the family has them; output projection."""

    ops: Ops
    layer: int
    shape: Shape
    qkv: Linear
    out: Linear
    q_norm: Norm | None
    k_norm: Norm | None

    def __call__(self, x: Tensor, angles: Angles, kv: KV) -> Tensor:
        s = self.shape
        heads = self.qkv(x).view(len(x), s.n_heads + 2 * s.n_kv_heads, s.head_width)
        q, k, v = torch.split(heads, [s.n_heads, s.n_kv_heads, s.n_kv_heads], dim=1)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        rope = s.ropes[self.layer]
        if rope is not None:
            cos, sin = angles.turns[rope]
            q = self.ops.rope(q, cos, sin, rope.pairing)
            k = self.ops.rope(k, cos, sin, rope.pairing)
        keys, values, mask = kv.extend(self.layer, k, v, s.windows[self.layer])
        seen = self.ops.attention(q, keys, values, mask, scale=s.query_scale, softcap=s.attention_softcap)
        return self.out(seen.flatten(1))


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up in one product."""

    ops: Ops
    gate_up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.ops.gated(self.gate_up(x), self.activation))


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """down(act(up(x)))."""

    ops: Ops
    up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.ops.activate(self.up(x), self.activation))


@dataclass(frozen=True, slots=True)
class Experts:
    """A router and the experts it chooses from."""

    ops: Ops
    router: Linear
    gate_up: Tensor  # [experts, 2 * ff_width, hidden]
    down: Tensor  # [experts, hidden, ff_width]
    experts: ExpertShape
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self.ops.route(self.router(x), self.experts.n_used, self.experts.renormalise)
        return self.ops.experts(x, self.gate_up, self.down, weights, chosen, self.activation)


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention and feed-forward, each added to what came in; norms before, and after where a family sandwiches."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Callable[[Tensor], Tensor]
    after_attention: Norm | None = None
    after_mlp: Norm | None = None

    def __call__(self, x: Tensor, angles: Angles, kv: KV) -> Tensor:
        seen = self.attention(self.attention_norm(x), angles, kv)
        x = x + (seen if self.after_attention is None else self.after_attention(seen))
        thought = self.mlp(self.mlp_norm(x))
        return x + (thought if self.after_mlp is None else self.after_mlp(thought))


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder: tokens in, hidden rows out; the head turns the rows one asks for into logits."""

    shape: Shape
    ops: Ops
    embedding: Tensor  # [vocab, hidden]
    position_embedding: Tensor | None  # [positions, hidden], of families without rotary positions
    layers: Sequence[Layer]
    norm: Norm
    head: Linear
    frequencies: dict[Rope, Tensor]

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def hidden(self, tokens: Tensor, positions: Tensor, kv: KV) -> Tensor:
        """tokens, positions int64 [rows] to the normalised last hidden rows [rows, hidden]; kv gains the rows."""
        x = self.embedding[tokens]
        if self.position_embedding is not None:
            x = x + self.position_embedding[positions]
        if self.shape.embedding_scale is not None:
            # Rounded to the model's dtype first, as the models of this kind were trained.
            x = x * torch.tensor(self.shape.embedding_scale, dtype=x.dtype, device=x.device)
        angles = Angles({rope: rope.turns(positions, f) for rope, f in self.frequencies.items()})
        for layer in self.layers:
            x = layer(x, angles, kv)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows [rows, hidden] to float32 logits [rows, vocab]."""
        logits = self.head(hidden).float()
        cap = self.shape.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
