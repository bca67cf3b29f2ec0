"""What models are made of: norms, linears, attention, feed-forward blocks, layers, and the model over them.

Each block holds its weights and the ops it calls (`backends/torch/table.py`) and nothing about requests. What a forward
remembers goes through a `ForwardState`, an argument, so a block does not know how it is kept. Shapes: x is [rows,
hidden], one row per token; q is [rows, heads, head_width], k and v [rows, kv_heads, head_width].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ostinato.backends.cuda.packed import Packed, Stack, Weight
from ostinato.backends.native.tiles import TileMatrix
from ostinato.backends.tape.tape_weight import TapeWeight
from ostinato.backends.torch.ops.activation import Activation
from ostinato.backends.torch.table import Ops
from ostinato.backends.torch.weight import rows_of
from ostinato.errors import Unsupported
from ostinato.models.rope import Rope
from ostinato.models.shape import ExpertShape, Shape


class ForwardState(Protocol):
    """What one forward reads of its sequences and leaves for the next: keys and values, and recurrent states."""

    @property
    def n_seqs(self) -> int:
        """The rows are this many runs of equal length, one after the other: what recurrent layers go through."""

    @property
    def n_planes(self) -> int:
        """How many states of each run to keep: the newest and, for roll back, those before its last tokens."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None) -> Tensor:
        """Append k and v, then attend each row of q to what it may see; [rows, heads, head_width]."""

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """The states that the runs start from, each [n_seqs, ...] as the shape says; zeros for a new sequence."""

    def keep(self, layer: int, states: tuple[Tensor, ...]) -> None:
        """The states to remember, each tensor [n_seqs, planes, ...], the newest plane first; planes may be fewer than
        n_planes where a run was shorter."""


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines of this forward's rows for each kind of rope in the model."""

    cos_sin: dict[Rope, tuple[Tensor, Tensor]]


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
    weight: Weight  # [out, in]
    bias: Tensor | None
    scale: Tensor | float | None = None  # of what comes out, [out] or one for all

    @property
    def dtype(self) -> torch.dtype:
        """What it multiplies in: tiles are the CPU's, and give float32; other packed weights are a GPU's."""
        first = self.weight.parts[0] if isinstance(self.weight, Stack) else self.weight
        if isinstance(self.weight, Tensor | TapeWeight):
            return self.weight.dtype
        return torch.float32 if isinstance(first, TileMatrix) else torch.bfloat16

    def __call__(self, x: Tensor) -> Tensor:
        y = self.ops.linear(x, self.weight, self.bias)
        return y if self.scale is None else y * self.scale


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

    def __call__(self, x: Tensor, angles: Angles, memory: ForwardState) -> Tensor:
        s = self.shape
        heads = self.qkv(x).view(len(x), s.n_heads + 2 * s.n_kv_heads, s.head_width)
        qk, v = heads[:, : -s.n_kv_heads], heads[:, -s.n_kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : s.n_heads]), self.k_norm(qk[:, s.n_heads :])), 1)
        rope = s.ropes[self.layer]
        if rope is not None:
            qk = self.ops.rope(qk, *angles.cos_sin[rope], rope.pairing)
        q, k = qk[:, : s.n_heads], qk[:, s.n_heads :]
        seen = memory.attend(self.layer, q, k, v, scale=s.query_scale, softcap=s.attention_softcap)
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
    # [experts, 2 * ff_width, hidden]; packed, or (gate, up) of two types: `Weights.take_experts`; in tiles one for each
    gate_up: Weight | tuple[Weight, ...]
    down: Tensor | Packed | tuple[Weight, ...]  # [experts, hidden, ff_width], or for each [hidden, ff_width]
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

    def __call__(self, x: Tensor, angles: Angles, memory: ForwardState) -> Tensor:
        seen = self.attention(self.attention_norm(x), angles, memory)
        x = x + (seen if self.after_attention is None else self.after_attention(seen))
        thought = self.mlp(self.mlp_norm(x))
        return x + (thought if self.after_mlp is None else self.after_mlp(thought))


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """Attention and feed-forward as encoders have them: each added to what came in, and the sum normed."""

    attention: Attention
    attention_norm: Norm
    mlp: Callable[[Tensor], Tensor]
    mlp_norm: Norm

    def __call__(self, x: Tensor, angles: Angles, memory: ForwardState) -> Tensor:
        x = self.attention_norm(x + self.attention(x, angles, memory))
        return self.mlp_norm(x + self.mlp(x))


@dataclass(frozen=True, slots=True)
class RankingHead:
    """From a pooled row to scores: tanh(dense(x)), then out; a file may lack either."""

    dense: Linear | None
    out: Linear | None

    def __call__(self, pooled: Tensor) -> Tensor:
        inside = pooled if self.dense is None else torch.tanh(self.dense(pooled))
        return inside if self.out is None else self.out(inside)


class AnyLayer(Protocol):
    """Rows [rows, hidden] to rows of the same shape."""

    def __call__(self, x: Tensor, angles: Angles, memory: ForwardState) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Model:
    """Tokens in, hidden rows out. A decoder's head turns the rows one asks for into logits; an encoder has none, and
    its ranking head, where there is one, turns pooled rows into scores."""

    shape: Shape
    ops: Ops
    embedding: Tensor | Packed | TileMatrix  # [vocab, hidden]
    position_embedding: Tensor | None  # [positions, hidden], of families without rotary positions
    layers: Sequence[AnyLayer]
    norm: Norm | None
    head: Linear | None
    frequencies: dict[Rope, Tensor]
    dtype: torch.dtype  # what rows between layers are, unless the residual is wide
    type_embedding: Tensor | None = None  # [types, hidden]: which of two texts a token is of
    embedding_norm: Norm | None = None
    ranking: RankingHead | None = None

    @property
    def device(self) -> torch.device:
        return torch.device(self.embedding.device)

    def hidden(self, tokens: Tensor, positions: Tensor, memory: ForwardState, types: Tensor | None = None) -> Tensor:
        """tokens, positions int64 [rows] to the normalised last hidden rows [rows, hidden]; memory gains the rows.

        types int64 [rows], for models that tell two texts apart: 0, the first, unless given.
        """
        return self.through(self.embed(tokens), positions, memory, types)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens int64 [rows] to what the model takes in for them, [rows, hidden]."""
        x = rows_of(self.embedding, tokens, self.dtype)
        if self.shape.embedding_scale is not None:
            # Rounded to the model's dtype first, as the models of this kind were trained.
            x = x * torch.tensor(self.shape.embedding_scale, dtype=x.dtype, device=x.device)
        return x

    def through(self, x: Tensor, positions: Tensor, memory: ForwardState, types: Tensor | None = None) -> Tensor:
        """Rows [rows, hidden], embedded tokens or given, to the last hidden rows; otherwise as `hidden`."""
        x = self.embed_inputs(x, positions, types)
        angles = self.angles(positions)
        for layer in self.layers:
            x = layer(x, angles, memory)
        return self.final_norm(x)

    def embed_inputs(self, x: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        """Embedded rows to what the first layer takes in."""
        if self.type_embedding is not None:
            x = x + (self.type_embedding[0] if types is None else self.type_embedding[types])
        if self.position_embedding is not None:
            x = x + self.position_embedding[positions]
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return x.float() if self.shape.wide_residual else x

    def angles(self, positions: Tensor) -> Angles:
        """What rotary positions turn by, of every kind of rope in the model."""
        return Angles({rope: rope.cos_sin(positions, f) for rope, f in self.frequencies.items()})

    def final_norm(self, x: Tensor) -> Tensor:
        """What the last layer gives to hidden rows, normalised."""
        return (x if self.norm is None else self.norm(x)).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows [rows, hidden] to float32 logits [rows, vocab]."""
        if self.head is None:
            raise Unsupported(f"{self.shape.family} is an encoder: it embeds text and has no logits")
        logits = self.head(hidden).float()
        cap = self.shape.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def rank(self, pooled: Tensor) -> Tensor:
        """Pooled rows [rows, hidden] to float32 scores [rows, n_classes]."""
        if self.ranking is None:
            raise Unsupported(f"this {self.shape.family} model has no head to rank with")
        return self.ranking(pooled.to(self.dtype)).float()
