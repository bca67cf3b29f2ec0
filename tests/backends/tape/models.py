"""Small random models as a card has them: matrices in bfloat16 or float16, or packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from ostinato.backends.torch.model import Model
from ostinato.models.gemma import GEMMA, GEMMA2, GEMMA3, two_ropes, windowed
from ostinato.models.glm4 import GLM4
from ostinato.models.granite import GRANITE, multiplied
from ostinato.models.llama import LLAMA
from ostinato.models.mistral3 import MISTRAL3
from ostinato.models.phi3 import PHI3
from ostinato.models.qwen2 import QWEN2
from ostinato.models.qwen3 import QWEN3
from ostinato.models.rope import Rope, yarn
from ostinato.models.shape import QueryTemperature, Shape, alike, with_rope_where
from ostinato.models.smollm3 import SMOLLM3
from tests.named_model import random_model_of

FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "phi3": PHI3} | {
    "granite": GRANITE,
    "smollm3": SMOLLM3,
    "mistral3": MISTRAL3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "glm4": GLM4,
}


def shape_of(family: str = "llama", *, windows: Sequence[int | None] = (None, None), **sizes: Any) -> Shape:
    """Two layers, 128 wide, two heads for one of keys; other sizes where they are given."""
    width = sizes.get("head_width", 64)
    rope = Rope(10_000.0, width, "neighbours" if family == "llama" else "halves")
    plain = {
        **{"n_layers": len(windows), "hidden": 128, "n_heads": 4, "n_kv_heads": 2, "head_width": width},
        **{"ff_width": 192, "vocab": 203, "context": 256, "norm_eps": 1e-5, "attention_bias": family == "qwen2"},
    }
    return alike(family, rope, **{**plain, **sizes}).with_attention(window=tuple(windows))


def granite() -> Shape:
    """Four factors, none of which is 1."""
    shape = multiplied(shape_of("granite"), residual=0.7, logits=4.0).with_attention(query_scale=0.2)
    return replace(shape, embedding_scale=6.3)


def smollm3(turned: Sequence[bool] = (False, True, True)) -> Shape:
    """Some layers without rotary positions."""
    return with_rope_where(shape_of("smollm3", windows=[None] * len(turned)), turned)


def mistral3() -> Shape:
    """YaRN, and queries that grow every fourth position."""
    rope = Rope(10_000.0, 64, "halves", yarn(64, 10_000.0, 8.0, 16), amplitude=1.1)
    return shape_of("mistral3").with_attention(rope=rope, temperature=QueryTemperature(0.4, 4))


def gemma() -> Shape:
    """GELU by tanh, and scaled embeddings."""
    return replace(shape_of("gemma"), activation="gelu_tanh", embedding_scale=128**0.5)


def gemma2() -> Shape:
    """Norms after a block, caps that scores and logits reach, every other layer a window."""
    shape = replace(gemma(), family="gemma2", logit_softcap=2.0)
    return shape.with_attention(softcap=0.5, query_scale=1.0, window=(5, None))


def gemma3() -> Shape:
    """The same without caps; norms of queries and keys, and layers with a window that have a RoPE of their own."""
    return two_ropes(windowed(replace(gemma(), family="gemma3"), 5, global_every=2), Rope(1e6, 64, "halves"), 1e4)


def glm4() -> Shape:
    """Half of each head rotated, as neighbouring pairs; a bias of q, k and v; gate and up in one tensor; nine query
    heads per KV head, which attend in three parts."""
    shape = shape_of("glm4", attention_bias=True, n_heads=18, n_kv_heads=2)
    return shape.with_attention(rope=Rope(10_000.0, 32, "neighbours"))


# Families that have more than a llama: each has what no other has.
EMULATED = {"granite": granite, "smollm3": smollm3, "mistral3": mistral3, "gemma": gemma} | {
    "gemma2": gemma2,
    "gemma3": gemma3,
    "glm4": glm4,
}


@cache
def small(shape: Shape, *, dtype: torch.dtype = torch.bfloat16, mix: str | None = None, seed: int = 0) -> Model:
    """A model of that shape; `mix`: packed as a file of that kind."""
    family = FAMILIES[shape.family]
    with torch.inference_mode(False):
        return random_model_of(family, shape, dtype, mix=mix, seed=seed)
