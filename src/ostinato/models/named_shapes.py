"""Shapes of known models by name, to measure a step without a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from ostinato.errors import UnknownName, listing
from ostinato.models.rope import Rope
from ostinato.models.shape import ExpertShape, Shape, everywhere


def _llama(
    *,
    hidden: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    head_width: int,
    ff_width: int,
    vocab: int,
    context: int,
    rope_base: float,
    tied_head: bool,
) -> Shape:
    rope = Rope(rope_base, head_width, "halves")
    return Shape(
        family="llama",
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_width=head_width,
        ff_width=ff_width,
        vocab=vocab,
        context=context,
        norm_eps=1e-5,
        ropes=everywhere(rope, n_layers),
        windows=everywhere(None, n_layers),
        query_scale=head_width**-0.5,
        tied_head=tied_head,
    )


# Small enough to answer at once, wide enough for whole blocks of 256 weights.
_TINY: Final = _llama(
    hidden=256,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_width=64,
    ff_width=512,
    vocab=1024,
    context=2048,
    rope_base=10_000.0,
    tied_head=True,
)
SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        "llama-1b": _llama(
            hidden=2048,
            n_layers=16,
            n_heads=32,
            n_kv_heads=8,
            head_width=64,
            ff_width=8192,
            vocab=128_256,
            context=131_072,
            rope_base=500_000.0,
            tied_head=True,
        ),
        "llama-8b": _llama(
            hidden=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            head_width=128,
            ff_width=14_336,
            vocab=128_256,
            context=131_072,
            rope_base=500_000.0,
            tied_head=False,
        ),
        "smollm2-135m": _llama(
            hidden=576,
            n_layers=30,
            n_heads=9,
            n_kv_heads=3,
            head_width=64,
            ff_width=1536,
            vocab=49_152,
            context=8192,
            rope_base=100_000.0,
            tied_head=True,
        ),
        "mixtral-8x7b": replace(
            _llama(
                hidden=4096,
                n_layers=32,
                n_heads=32,
                n_kv_heads=8,
                head_width=128,
                ff_width=14_336,
                vocab=32_000,
                context=32_768,
                rope_base=1_000_000.0,
                tied_head=False,
            ),
            family="mixtral",
            experts=ExpertShape(8, 2, 14_336, renormalise=True),
        ),
        "qwen3-30b-a3b": replace(
            _llama(
                hidden=2048,
                n_layers=48,
                n_heads=32,
                n_kv_heads=4,
                head_width=128,
                ff_width=6144,
                vocab=151_936,
                context=40_960,
                rope_base=1_000_000.0,
                tied_head=False,
            ),
            family="qwen3moe",
            norm_eps=1e-6,
            experts=ExpertShape(128, 8, 768, renormalise=True),
        ),
        "tiny": _TINY,
        "tiny-mixtral": replace(_TINY, family="mixtral", experts=ExpertShape(4, 2, 512, renormalise=True)),
        "tiny-qwen3moe": replace(_TINY, family="qwen3moe", experts=ExpertShape(6, 3, 256, renormalise=False)),
    }
)


def named_shape(name: str) -> Shape:
    """The shape of that name; an unknown one is refused with the list of known ones."""
    if name not in SHAPES:
        raise UnknownName(f"no shape is called {name!r}; known: {listing(name, SHAPES)}")
    return SHAPES[name]
