"""Small random models of every kind of memory, made of our own blocks: no file, no reference library.

For tests that ask how a decoder behaves, not what a published model says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ostinato.backends.torch.table import TWINS
from ostinato.models.bert import BERT
from ostinato.models.blocks import Model
from ostinato.models.builder import Builder
from ostinato.models.falcon_h1 import FALCON_H1
from ostinato.models.family import Family
from ostinato.models.llama import LLAMA
from ostinato.models.mamba import MAMBA2, without_attention
from ostinato.models.rope import Rope
from ostinato.models.shape import Mamba2Shape, Shape
from ostinato.models.weights import Weights

MemoryKind = Literal["kv", "swa", "recurrent", "hybrid", "encoder"]
WINDOW = 16


class RandomWeights(Weights):
    """Weights that no file has: every tensor asked for is there, filled from a seed."""

    def __init__(self, seed: int) -> None:
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self._random = torch.Generator().manual_seed(seed)

    def has(self, name: str) -> bool:
        return not name.startswith(("cls", "output.bias", "blk.0.attn_qkv", "blk.1.attn_qkv"))

    def rows(self, name: str) -> int:
        return 2

    def take(self, name: str, shape: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        noise = torch.randn(tuple(shape), generator=self._random)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * noise
        if name.endswith("ssm_a"):
            return -noise.abs() - 0.1
        return noise * (0.5 if len(shape) < 2 else shape[-1] ** -0.5)

    def take_stacked(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], *, dtype: torch.dtype | None = None
    ) -> Tensor:
        return torch.cat([self.take(name, shape) for name, shape in zip(names, shapes, strict=True)])

    def take_matrix(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        return self.take_stacked(names, shapes)

    def pass_over(self, name: str) -> None:
        return


def attention_shape(family: str, n_vocab: int, hidden: int, context: int) -> Shape:
    rope = Rope(10_000.0, hidden // 4, "halves")
    return Shape(
        family=family,
        n_layers=2,
        hidden=hidden,
        n_heads=4,
        n_kv_heads=2,
        head_width=hidden // 4,
        ff_width=hidden,
        vocab=n_vocab,
        context=context,
        norm_eps=1e-5,
        ropes=(rope, rope),
        windows=(None, None),
        query_scale=(hidden // 4) ** -0.5,
    )


def mamba2_shape(hidden: int) -> Mamba2Shape:
    return Mamba2Shape.of(inner=hidden, state=8, kernel=4, n_heads=4, n_groups=1)


def shape_of(kind: MemoryKind, n_vocab: int, hidden: int, context: int) -> tuple[Family, Shape]:
    plain = attention_shape("llama", n_vocab, hidden, context)
    match kind:
        case "kv":
            return LLAMA, plain
        case "swa":
            return LLAMA, replace(plain, windows=(WINDOW, None))
        case "hybrid":
            return FALCON_H1, replace(plain, family="falcon-h1", recurrent=mamba2_shape(hidden))
        case "encoder":
            encoder = replace(plain, family="bert", n_kv_heads=4, ropes=(None, None), causal=False, activation="gelu")
            return BERT, replace(encoder, attention_bias=True, mlp_bias=True)
        case "recurrent":
            shape = without_attention("mamba2", hidden, 2, n_vocab, 1e-5)
            return MAMBA2, replace(shape, recurrent=mamba2_shape(hidden))


def random_model(
    kind: MemoryKind, *, n_vocab: int = 128, hidden: int = 64, context: int = 1024, seed: int = 0
) -> Model:
    """A model of two layers whose memory is of that kind."""
    family, shape = shape_of(kind, n_vocab, hidden, context)
    with torch.inference_mode(False):
        return family.build(Builder(shape, RandomWeights(seed), TWINS, context), family.layer)
