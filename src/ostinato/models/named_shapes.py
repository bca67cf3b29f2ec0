"""Shapes of known models by name, to measure a step without a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from ostinato.errors import UnknownName, listing
from ostinato.models.deepseek2 import latent_attention
from ostinato.models.gemma import two_ropes, windowed
from ostinato.models.gemma4 import of_two_kinds, with_experts
from ostinato.models.gpt_oss import with_sinks
from ostinato.models.granite import multiplied
from ostinato.models.mamba import without_attention
from ostinato.models.rope import Rope, proportional, yarn, yarn_amplitude
from ostinato.models.shape import (
    DeltaShape,
    ExpertShape,
    LatentShape,
    LayerShape,
    Mamba2Shape,
    MambaShape,
    QueryTemperature,
    RecurrentShape,
    Shape,
    ShortConvShape,
    alike,
    with_rope_where,
)

_SIZES: Final = ("hidden", "n_layers", "n_heads", "n_kv_heads", "head_width", "ff_width", "vocab", "context")


def _llama(*sizes: int, rope_base: float, tied_head: bool = False, norm_eps: float = 1e-5) -> Shape:
    named = dict(zip(_SIZES, sizes, strict=True))
    rope = Rope(rope_base, named["head_width"], "halves")
    return alike("llama", rope, tied_head=tied_head, norm_eps=norm_eps, **named)


def _routed(shape: Shape, family: str, n_experts: int, n_used: int, ff_width: int, *, renormalise: bool) -> Shape:
    return replace(shape, family=family, experts=ExpertShape(n_experts, n_used, ff_width, renormalise))


def _gpt_oss(n_layers: int, n_experts: int) -> Shape:
    """Experts of the model's own width, four of them used."""
    width, rope = (
        2880,
        Rope(150_000.0, 64, "halves", yarn(64, 150_000.0, 32.0, 4096, truncate=False), yarn_amplitude(32)),
    )
    plain = _llama(width, n_layers, 64, 8, 64, width, 201_088, 131_072, rope_base=150_000.0)
    plain = plain.with_attention(rope=rope)
    routed = ExpertShape(n_experts, 4, width, renormalise=True)
    return with_sinks(replace(plain, family="gpt-oss"), [layer % 2 == 0 for layer in range(n_layers)], 128, routed)


def _recurrent(family: str, recurrent: RecurrentShape, vocab: int) -> Shape:
    return without_attention(family, recurrent, 48, hidden=2048, vocab=vocab, norm_eps=1e-5, tied_head=True)


def _lfm2(shape: Shape, attends: set[int]) -> Shape:
    conv = ShortConvShape(width=shape.hidden, kernel=3)
    return replace(shape, family="lfm2").with_recurrent_in(set(range(shape.n_layers)) - attends, conv)


def _granite_hybrid(shape: Shape, mamba2: Mamba2Shape, attends: set[int]) -> Shape:
    """Without positions."""
    shape = replace(shape, family="granitehybrid").with_attention(rope=None)
    return shape.with_recurrent_in(set(range(shape.n_layers)) - attends, mamba2)


def _qwen35(shape: Shape, family: str, n_heads: int, n_key_heads: int) -> Shape:
    delta = DeltaShape(n_heads=n_heads, n_key_heads=n_key_heads, key_width=128, value_width=128, kernel=4, tiled=True)
    shape = replace(shape, family=family).with_attention(gated=True, rope=Rope(10_000_000.0, 64, "halves"))
    return shape.with_recurrent_in({i for i in range(shape.n_layers) if (i + 1) % 4}, delta)


def _gemma4_a4b() -> Shape:
    """Every sixth layer sees everything, with wider heads and one matrix of keys and values."""
    plain = _llama(2816, 30, 16, 8, 256, 2112, 262_144, 262_144, rope_base=10_000.0, tied_head=True, norm_eps=1e-6)
    sliding = [bool((i + 1) % 6) for i in range(plain.n_layers)]
    whole = Rope(1_000_000.0, 512, "halves", proportional(512, 0.25))
    local = Rope(10_000.0, 256, "halves")
    made = of_two_kinds(replace(plain, family="gemma4"), sliding, 1024, local=local, whole=whole, widths=(256, 512))
    made = made.with_attention(
        n_kv_heads=tuple(8 if one else 2 for one in sliding), values_from_keys=tuple(not one for one in sliding)
    )
    return with_experts(replace(made, logit_softcap=30.0), 128, 8, 704)


def _granite(*sizes: int, residual: float, logits: float) -> Shape:
    shape = _llama(*sizes, rope_base=10_000_000.0, tied_head=True)
    shape = multiplied(shape, residual=residual, logits=logits).with_attention(query_scale=0.015625)
    return replace(shape, family="granite", embedding_scale=12.0)


def _smollm3_3b() -> Shape:
    shape = _llama(2048, 36, 16, 4, 128, 11_008, 128_256, 65_536, rope_base=5e6, tied_head=True, norm_eps=1e-6)
    return with_rope_where(replace(shape, family="smollm3"), [bool((i + 1) % 4) for i in range(shape.n_layers)])


def _ministral_3b() -> Shape:
    shape = _llama(3072, 26, 32, 8, 128, 9216, 131_072, 262_144, rope_base=1e6, tied_head=True)
    rope = Rope(1e6, 128, "halves", yarn(128, 1e6, 16.0, 16_384))
    return replace(shape, family="mistral3").with_attention(rope=rope, temperature=QueryTemperature(0.1, 16_384))


def _gemma(family: str, *sizes: int) -> Shape:
    shape = _llama(*sizes, rope_base=10_000.0, tied_head=True, norm_eps=1e-6)
    return replace(shape, family=family, activation="gelu_tanh", embedding_scale=shape.hidden**0.5)


def _gemma2_2b() -> Shape:
    shape = replace(_gemma("gemma2", 2304, 26, 8, 4, 256, 9216, 256_000, 8192), logit_softcap=30.0)
    return windowed(shape.with_attention(softcap=50.0), 4096, global_every=2)


def _gemma3_1b() -> Shape:
    shape = windowed(_gemma("gemma3", 1152, 26, 4, 1, 256, 6912, 262_144, 32_768), 512, global_every=6)
    return two_ropes(shape, Rope(1_000_000.0, 256, "halves"), 10_000.0)


def _glm4(*sizes: int, biased: bool) -> Shape:
    """Half of each head is rotated."""
    shape = replace(_llama(*sizes, rope_base=10_000.0), family="glm4", attention_bias=biased)
    return shape.with_attention(rope=Rope(10_000.0, shape.attention[0].head_width // 2, "neighbours"))


def _latent(shape: Shape, n_heads: int, latent: LatentShape, experts: ExpertShape) -> Shape:
    """Latent attention with 64 rotated numbers, and experts in all layers but the first."""
    attention = latent_attention(n_heads, Rope(10_000.0, 64, "neighbours"), latent, 1.0)
    layers = tuple(LayerShape(attention, ff_width=layer.ff_width) for layer in shape.layers)
    first, routed = frozenset({0}), replace(experts, scoring="sigmoid", choice_bias=True)
    return replace(shape, family="deepseek2", layers=layers, experts=replace(routed, dense_layers=first))


def _glm_flash() -> Shape:
    plain = _llama(2048, 47, 20, 20, 64, 10_240, 154_880, 202_752, rope_base=10_000.0)
    latent = LatentShape(kv_rank=512, q_rank=768, plain_width=192, value_width=256, norm_eps=1e-6)
    return _latent(plain, 20, latent, ExpertShape(64, 4, 1536, renormalise=True, share_scale=1.8, shared_width=1536))


# Small enough to answer at once, wide enough for whole blocks of 256 weights.
_TINY: Final = _llama(256, 2, 4, 2, 64, 512, 1024, 2048, rope_base=10_000.0, tied_head=True)
_MIXTRAL: Final = _llama(4096, 32, 32, 8, 128, 14_336, 32_000, 32_768, rope_base=1_000_000.0)
_QWEN3: Final = _llama(2048, 48, 32, 4, 128, 6144, 151_936, 40_960, rope_base=1_000_000.0, norm_eps=1e-6)
_MAMBA2: Final = Mamba2Shape(inner=4096, state=128, kernel=4, n_heads=64, n_groups=1)
_FALCON_MIXER: Final = Mamba2Shape(inner=3072, state=256, kernel=4, n_heads=48, n_groups=1, gated_norm=False)
_FALCON_H1: Final = _llama(2048, 24, 8, 2, 128, 4096, 65_537, 131_072, rope_base=1e11)
SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        "llama-1b": _llama(2048, 16, 32, 8, 64, 8192, 128_256, 131_072, rope_base=500_000.0, tied_head=True),
        "llama-8b": _llama(4096, 32, 32, 8, 128, 14_336, 128_256, 131_072, rope_base=500_000.0),
        "smollm2-1.7b": _llama(2048, 24, 32, 32, 64, 8192, 49_152, 8192, rope_base=130_000.0, tied_head=True),
        "smollm2-135m": _llama(576, 30, 9, 3, 64, 1536, 49_152, 8192, rope_base=100_000.0, tied_head=True),
        "granite-2b": _granite(2048, 40, 32, 8, 64, 8192, 49_159, 131_072, residual=0.22, logits=8.0),
        "granite-350m": _granite(1024, 28, 16, 4, 64, 2048, 100_352, 32_768, residual=0.263, logits=4.0),
        "smollm3-3b": _smollm3_3b(),
        "ministral-3b": _ministral_3b(),
        "gemma2-2b": _gemma2_2b(),
        "gemma3-1b": _gemma3_1b(),
        "glm4-9b": _glm4(4096, 40, 32, 2, 128, 13_696, 151_552, 32_768, biased=True),
        "glm4-32b": _glm4(6144, 61, 48, 2, 128, 23_040, 151_552, 32_768, biased=False),
        "mixtral-8x7b": _routed(_MIXTRAL, "mixtral", 8, 2, 14_336, renormalise=True),
        "qwen3-30b-a3b": _routed(_QWEN3, "qwen3moe", 128, 8, 768, renormalise=True),
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        "gemma4-26b-a4b": _gemma4_a4b(),
        "glm-4.7-flash": _glm_flash(),
        "mamba-1.4b": _recurrent("mamba", MambaShape(inner=4096, state=16, kernel=4, dt_rank=128), 50_280),
        "mamba2-1.3b": _recurrent("mamba2", _MAMBA2, 50_288),
        "falcon-h1-1.5b": replace(
            _FALCON_H1,
            family="falcon-h1",
            layers=tuple(replace(layer, recurrent=_FALCON_MIXER) for layer in _FALCON_H1.layers),
        ),
        "lfm2-350m": _lfm2(
            _llama(1024, 16, 16, 8, 64, 4608, 65_536, 128_000, rope_base=1_000_000.0, tied_head=True),
            {2, 5, 8, 10, 12, 14},
        ),
        "granite-h-350m": _granite_hybrid(
            _llama(768, 32, 12, 4, 64, 2048, 100_352, 32_768, rope_base=10_000.0, tied_head=True),
            Mamba2Shape(inner=1536, state=128, kernel=4, n_heads=48, n_groups=1),
            {10, 13, 17, 27},
        ),
        "qwen3.5-0.8b": _qwen35(
            _llama(1024, 24, 8, 2, 256, 3584, 248_320, 262_144, rope_base=1e7, norm_eps=1e-6, tied_head=True),
            "qwen35",
            n_heads=16,
            n_key_heads=16,
        ),
        "qwen3.5-27b": _qwen35(
            _llama(5120, 64, 24, 4, 256, 17_408, 248_320, 262_144, rope_base=1e7, norm_eps=1e-6),
            "qwen35",
            n_heads=48,
            n_key_heads=16,
        ),
        "tiny": _TINY,
        "tiny-glm4": _glm4(256, 2, 32, 2, 64, 512, 1024, 2048, biased=True),
        "tiny-mixtral": _routed(_TINY, "mixtral", 4, 2, 512, renormalise=True),
        "tiny-qwen3moe": _routed(_TINY, "qwen3moe", 6, 3, 256, renormalise=False),
        "tiny-deepseek2": _latent(
            _TINY,
            4,
            LatentShape(kv_rank=256, q_rank=256, plain_width=256, value_width=256, norm_eps=1e-6),
            ExpertShape(6, 2, 256, renormalise=True, shared_width=256),
        ),
    }
)


def named_shape(name: str) -> Shape:
    """The shape of that name; an unknown one is refused with the list of known ones."""
    if name not in SHAPES:
        raise UnknownName(f"no shape is called {name!r}; known: {listing(name, SHAPES)}")
    return SHAPES[name]
