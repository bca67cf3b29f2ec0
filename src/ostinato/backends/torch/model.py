"""A model as torch runs it: blocks over loaded weights, and the way of rows through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.torch.arrays import tensor_of
from ostinato.backends.torch.forward import Angles, Forward, ForwardState, normed, ranked, through_linear
from ostinato.backends.torch.ops.rope import cos_sin, query_factor
from ostinato.backends.torch.table import TWINS, Ops
from ostinato.backends.torch.weight import rows_of
from ostinato.errors import Unsupported
from ostinato.files.unpack import Floats
from ostinato.models.blocks import AnyLayer, LoadedModel, ModelBlocks, with_leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(LoadedModel):
    """A loaded model of tensors, or of matrices in the layout of a backend (`backends/weights.py`)."""

    ops: Ops = TWINS
    dtype: torch.dtype  # what rows between layers are, unless the residual is wide
    device: torch.device

    @staticmethod
    def of(blocks: ModelBlocks, *, dtype: torch.dtype, device: torch.device) -> Model:
        """The model of loaded blocks; their arrays become tensors over that memory."""
        blocks = with_leaves(blocks, lambda leaf: tensor_of(leaf) if isinstance(leaf, np.ndarray) else leaf)
        frequencies = {rope: tensor_of(sets).to(device) for rope, sets in blocks.shape.frequencies().items()}
        return Model.over(blocks, frequencies=frequencies, dtype=dtype, device=device)

    def for_length(self, n_positions: int) -> Model:
        """The same model with only the rope set of sequences of so many positions."""
        if self.shape.n_rope_sets == 1:
            return self
        one = self.shape.rope_set(n_positions)
        return replace(self, frequencies={rope: sets[one : one + 1] for rope, sets in self.frequencies.items()})

    def hidden(
        self, tokens: Tensor, positions: Tensor, memory: ForwardState, types: Tensor | None = None, rope_set: int = 0
    ) -> Tensor:
        """tokens, positions int64 [rows] to the normalised last hidden rows [rows, hidden]; memory gains the rows.

        types int64 [rows], for models that tell two texts apart: 0, the first, unless given.
        """
        return self.through(self.embed(tokens), positions, memory, types, rope_set, tokens=tokens)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens int64 [rows] to what the model takes in for them, [rows, hidden]."""
        x = rows_of(self.embedding, tokens, self.dtype)
        if self.shape.embedding_scale is not None:
            x = x * _as(self.shape.embedding_scale, x)
        return x

    def through(
        self,
        x: Tensor,
        positions: Tensor,
        memory: ForwardState,
        types: Tensor | None = None,
        rope_set: int = 0,
        *,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Rows [rows, hidden], embedded `tokens` or given, to the last hidden rows; otherwise as `hidden`. Positions
        may have several dimensions, [dimensions, rows], of which the first orders them."""
        per_layer = self.per_layer_inputs(tokens, x)
        x = self.embed_inputs(x, positions if positions.dim() == 1 else positions[0], types)
        angles = self.angles(positions, rope_set)
        for layer in self.layers:
            x = self.through_layer(layer, x, angles, memory, per_layer)
        return self.final_norm(x)

    def per_layer_inputs(self, tokens: Tensor | None, x: Tensor) -> Tensor | None:
        """What each layer takes in besides of tokens and their embedded rows, [rows, n_layers, per_layer_width]."""
        block = self.per_layer
        if block is None:
            return None
        if tokens is None:
            raise Unsupported(
                f"{self.shape.family} has a second embedding of its tokens: rows cannot be given in place of tokens"
            )
        own = rows_of(block.embedding, tokens, self.dtype) * _as(block.scale, x)
        size = (len(x), self.shape.n_layers, self.shape.per_layer_width)
        projected = normed(self.ops, block.norm, through_linear(self.ops, block.project, x).view(size))
        return (projected + own.view(size)) * _as(0.5**0.5, x)

    def embed_inputs(self, x: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        """Embedded rows to what the first layer takes in."""
        if self.type_embedding is not None:
            x = x + (self.type_embedding[0] if types is None else self.type_embedding[types])
        if self.position_embedding is not None:
            x = x + self.position_embedding[positions]
        if self.embedding_norm is not None:
            x = normed(self.ops, self.embedding_norm, x)
        return x.float() if self.shape.wide_residual else x

    def angles(self, positions: Tensor, rope_set: int | Tensor = 0) -> Angles:
        """RoPE's cos and sin, for every kind of rope in the model, and the factors of its query temperatures.
        `rope_set`: of all rows, or int64 [rows]."""
        turns = {rope: cos_sin(rope, positions, sets[rope_set]) for rope, sets in self.frequencies.items()}
        order = positions if positions.dim() == 1 else positions[0]
        kinds = dict.fromkeys(one.temperature for one in self.shape.attention.values() if one.temperature is not None)
        return {**turns, **{kind: (query_factor(order, kind.scale, kind.span),) for kind in kinds}}

    def through_layer(
        self, layer: AnyLayer, x: Tensor, angles: Angles, memory: ForwardState, per_layer: Tensor | None = None
    ) -> Tensor:
        """Rows through one layer."""
        return Forward(self.ops, angles, memory, per_layer).layer(layer, x)

    def final_norm(self, x: Tensor) -> Tensor:
        """What the last layer gives to hidden rows, normalised."""
        return (x if self.norm is None else normed(self.ops, self.norm, x)).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows [rows, hidden] to float32 logits [rows, vocab]."""
        if self.head is None:
            raise Unsupported(f"{self.shape.family} is an encoder: it embeds text and has no logits")
        logits = through_linear(self.ops, self.head, hidden).float()
        cap = self.shape.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def project(self, pooled: Tensor) -> Tensor:
        """Pooled rows [rows, hidden] to float32 vectors [rows, vector_width]."""
        pooled = pooled.to(self.device)
        for linear in self.projections:
            pooled = through_linear(self.ops, linear, pooled.to(self.dtype))
        return pooled.float()

    def rank(self, pooled: Tensor) -> Tensor:
        """Pooled rows [rows, hidden] to float32 scores [rows, n_classes]."""
        if self.ranking is None:
            raise Unsupported(f"this {self.shape.family} model has no head to rank with")
        return ranked(self.ops, self.ranking, pooled.to(self.device, self.dtype)).float()


def through_head(head: Callable[[Tensor], Tensor], pooled: Floats) -> Floats:
    """One pooled row [hidden], on the host, through what is behind the pooling; the result on the host again."""
    with torch.inference_mode():
        found: Floats = head(torch.from_numpy(pooled)[None])[0].cpu().numpy()
    return found


def _as(factor: float, x: Tensor) -> Tensor:
    """A factor rounded to the dtype of what it multiplies, as models with scaled embeddings were trained."""
    return torch.tensor(factor, dtype=x.dtype, device=x.device)
