"""Small random models of every kind of memory, made of our own blocks: no file, no reference library.

For tests that ask how a decoder behaves, not what a published model says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from ostinato.backends.torch.load import constant
from ostinato.backends.torch.model import Model
from ostinato.models.bert import BERT
from ostinato.models.blocks import with_leaves
from ostinato.models.falcon_h1 import FALCON_H1
from ostinato.models.family import Family
from ostinato.models.llama import LLAMA
from ostinato.models.mamba import MAMBA2, without_attention
from ostinato.models.rope import Rope
from ostinato.models.shape import Mamba2Shape, Shape, alike
from ostinato.models.tensors import Constant, ExpertBiases, ExpertMatrices, HeadMatrices, Sizes

MemoryKind = Literal["kv", "swa", "all swa", "recurrent", "hybrid", "encoder"]
WINDOW = 16
WIDE_WINDOW = 40  # two pages and a half, of 16 positions
CPU = torch.device("cpu")


class RandomWeights:
    """Weights that no file has: every tensor asked for is there, filled from a seed."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self._random, self.dtype = torch.Generator().manual_seed(seed), dtype

    def has(self, name: str) -> bool:
        return not name.startswith(("cls", "output.bias", "blk.0.attn_qkv", "blk.1.attn_qkv"))

    def rows(self, name: str) -> int:
        return 2

    def take(self, name: str, shape: Sizes, *, exact: bool = False) -> Tensor:
        """`exact`: what stays float32, whatever the model's dtype."""
        noise = torch.randn(shape, generator=self._random)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * noise
        if name.endswith("ssm_a"):
            return -noise.abs() - 0.1
        return noise * (0.5 if len(shape) < 2 else shape[-1] ** -0.5)

    def leaf(self, reference: Any) -> Tensor:
        """What takes the place of a reference."""
        if isinstance(reference, Constant):
            return constant(reference, self.dtype, CPU)
        if isinstance(reference, ExpertMatrices):
            parts = [torch.stack([self.take(n, reference.size) for n in names]) for names in reference.parts]
            return torch.cat(parts, 1).to(self.dtype)
        if isinstance(reference, ExpertBiases):
            return torch.cat([self.take(name, shape, exact=True) / 2 for name, shape in reference.wanted], 1)
        if isinstance(reference, HeadMatrices):
            return self.take(reference.name, reference.shape).to(self.dtype)
        taken = torch.cat([self.take(name, shape, exact=reference.exact) for name, shape in reference.wanted])
        return taken if reference.exact else taken.to(self.dtype)

    def model(self, family: Family, shape: Shape) -> Model:
        """A model of that family and shape."""
        with torch.inference_mode(False):
            blocks = with_leaves(family.blocks(shape, self), cache(self.leaf))
            return Model.of(blocks, dtype=self.dtype, device=CPU)


def attention_shape(family: str, n_vocab: int, hidden: int, context: int) -> Shape:
    rope = Rope(10_000.0, hidden // 4, "halves")
    return alike(
        family,
        rope,
        n_layers=2,
        hidden=hidden,
        n_heads=4,
        n_kv_heads=2,
        head_width=hidden // 4,
        ff_width=hidden,
        vocab=n_vocab,
        context=context,
        norm_eps=1e-5,
    )


def mamba2_shape(hidden: int) -> Mamba2Shape:
    return Mamba2Shape(inner=hidden, state=8, kernel=4, n_heads=4, n_groups=1)


def shape_of(kind: MemoryKind, n_vocab: int, hidden: int, context: int) -> tuple[Family, Shape]:
    plain = attention_shape("llama", n_vocab, hidden, context)
    match kind:
        case "kv":
            return LLAMA, plain
        case "swa":
            return LLAMA, plain.with_attention(window=(WINDOW, None))
        case "all swa":
            return LLAMA, plain.with_attention(window=WIDE_WINDOW)
        case "hybrid":
            return FALCON_H1, replace(plain, family="falcon-h1").with_layers(recurrent=mamba2_shape(hidden))
        case "encoder":
            encoder = replace(plain.with_attention(n_kv_heads=4, rope=None), family="bert", causal=False)
            return BERT, replace(encoder, activation="gelu", attention_bias=True, mlp_bias=True)
        case "recurrent":
            sizes = {"hidden": hidden, "vocab": n_vocab, "norm_eps": 1e-5}
            return MAMBA2, without_attention("mamba2", mamba2_shape(hidden), 2, **sizes)


def random_model(
    kind: MemoryKind, *, n_vocab: int = 128, hidden: int = 64, context: int = 1024, seed: int = 0
) -> Model:
    """A model of two layers whose memory is of that kind."""
    family, shape = shape_of(kind, n_vocab, hidden, context)
    return RandomWeights(seed).model(family, shape)
