"""A small random model of every family: odd widths, groups, windows, caps, experts; recurrent ones of their own."""

from __future__ import annotations

from dataclasses import replace

import torch

from ostinato.backends.torch.model import Model
from ostinato.models import rope as ropes
from ostinato.models.cohere import COHERE2, scaled
from ostinato.models.deepseek2 import DEEPSEEK2, latent_attention
from ostinato.models.falcon_h1 import FALCON_H1
from ostinato.models.gemma import GEMMA2, GEMMA3, two_ropes
from ostinato.models.gemma4 import GEMMA4, of_two_kinds, with_experts
from ostinato.models.gpt2 import GPT2
from ostinato.models.gpt_oss import GPT_OSS
from ostinato.models.gptneox import GPTNEOX
from ostinato.models.granite import GRANITE, multiplied
from ostinato.models.hunyuan import HUNYUAN_DENSE
from ostinato.models.laguna import LAGUNA
from ostinato.models.laguna import gated as one_gate
from ostinato.models.lfm2 import LFM2
from ostinato.models.llama import LLAMA
from ostinato.models.mamba import MAMBA, MAMBA2, without_attention
from ostinato.models.mistral3 import MISTRAL3
from ostinato.models.mixtral import MIXTRAL
from ostinato.models.muse_glimmer import MUSE_GLIMMER, glimmer
from ostinato.models.olmo2 import OLMO2
from ostinato.models.phi3 import PHI3
from ostinato.models.qwen2 import QWEN2
from ostinato.models.qwen2_moe import QWEN2_MOE
from ostinato.models.qwen3 import QWEN3, QWEN3_MOE
from ostinato.models.qwen35 import QWEN35
from ostinato.models.rope import Rope
from ostinato.models.shape import (
    DeltaShape,
    ExpertGroups,
    ExpertShape,
    LatentShape,
    LayerShape,
    Mamba2Shape,
    MambaShape,
    Multipliers,
    QueryTemperature,
    Shape,
    ShortConvShape,
    alike,
    with_rope_where,
)
from ostinato.models.smollm3 import SMOLLM3
from tests.random_model import RandomWeights

FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3moe", "mixtral", "gemma2", "gemma3", "phi3", "phi3-long", "gpt2", "smollm3",
    "granite", "qwen2moe", "latent experts", "olmo2", "hunyuan-dense", "gptneox", "cohere2", "mistral3", "uneven",
    "gpt-oss", "laguna", "muse-glimmer", "gemma4", "gemma4-shared", "gemma4-moe",
)  # fmt: skip
RECURRENT = (
    "mamba", "falcon-mamba", "mamba2", "mamba2-limits", "falcon-h1", "falcon-h1-norm", "lfm2", "qwen35", "qwen35-tiled",
)  # fmt: skip
LATENT = ("deepseek2", "deepseek2-lite")
HIDDEN, N_LAYERS, VOCAB, CONTEXT = 96, 2, 131, 256
BORDER = 20  # positions of the longest sequence that the short factors of phi3-long rotate


class FamilyWeights(RandomWeights):
    """Every tensor is there, those of fused families too; experts one by one."""

    def has(self, name: str) -> bool:
        return not name.endswith("_exps.weight") and name != "output.bias"


def family_model(name: str, seed: int = 0, shape: Shape | None = None, dtype: torch.dtype = torch.float32) -> Model:
    """A model of the family, of its own shape unless told."""
    rope = Rope(10_000.0, 32, "neighbours" if name == "llama" else "halves")
    plain = alike(
        name,
        rope,
        n_layers=N_LAYERS,
        hidden=HIDDEN,
        n_heads=6,
        n_kv_heads=2,
        head_width=32,
        ff_width=80,
        vocab=VOCAB,
        context=CONTEXT,
        norm_eps=1e-5,
    )
    windowed = plain.with_attention(window=(20, None))
    gemma = replace(windowed, activation="gelu_tanh", embedding_scale=HIDDEN**0.5)
    experts = ExpertShape(5, 2, 48, renormalise=True)
    # All that experts can have and no published family has at once.
    latent = ExpertShape(
        6, 2, 40, renormalise=True, dense_layers=frozenset({0}), scoring="sigmoid", choice_bias=True,
        groups=ExpertGroups(3, 2, 2), share_scale=1.5, gated=False, bias=True, shared_width=56, latent_width=64,
    )  # fmt: skip
    oss = replace(windowed.with_attention(sinks=True), attention_bias=True, activation="clamped_swiglu")
    oss = replace(oss, experts=replace(experts, bias=True))
    alone = plain.with_attention(n_kv_heads=6, rope=None)
    gpt2 = replace(alone, activation="gelu_tanh", attention_bias=True, mlp_bias=True)
    part = replace(rope, width=24)
    nearby = replace(rope, pairing="neighbours")
    long = tuple(1.0 + i / 2 for i in range(12))
    two_sets = replace(part, divisors=(1.0,) * 12, amplitude=1.1, long_divisors=long, original_context=BORDER)
    mamba = MambaShape(inner=88, state=6, kernel=3, dt_rank=7, bias=True)
    mamba2 = Mamba2Shape(inner=120, state=24, kernel=4, n_heads=6, n_groups=2)
    limits = replace(mamba2, inner=128, n_heads=2, n_groups=1, in_bias=True, out_bias=True, dt_limit=(0.1, 0.5))
    factors = Multipliers(0.9, 1.2, 1.3, 0.8, (0.7, 1.1, 0.9, 1.2, 0.8), 1.4, 0.6, 0.9)
    hybrid = replace(plain, family="falcon-h1", multipliers=factors)
    delta = DeltaShape(n_heads=6, n_key_heads=2, key_width=20, value_width=24, kernel=4)
    gated = replace(plain, family="qwen35").with_attention(gated=True)
    sizes = {"hidden": HIDDEN, "vocab": VOCAB, "norm_eps": 1e-5}
    recurrent = without_attention(name.removesuffix("-limits").removeprefix("falcon-"), mamba, N_LAYERS, **sizes)
    whole = replace(rope, width=64, divisors=ropes.proportional(64, 0.25))
    kinds = (True, False)
    gemma4 = of_two_kinds(plain, kinds, 20, local=rope, whole=whole, widths=(32, 64))
    gemma4 = replace(gemma4, family="gemma4", logit_softcap=15.0)
    beside = with_experts(gemma4, 5, 2, 48)
    shared = replace(gemma4, layers=gemma4.layers * 2, per_layer_width=16)
    shared = shared.with_attention(kv_from=(None, None, 0, 1)).with_layers(ff_width=(80, 80, 112, 112))
    family, own = {
        "llama": (LLAMA, plain),
        "qwen2": (QWEN2, replace(plain, attention_bias=True)),
        "qwen3": (QWEN3, plain),
        "qwen3moe": (QWEN3_MOE, replace(plain, experts=replace(experts, renormalise=False))),
        "qwen2moe": (QWEN2_MOE, replace(plain, experts=replace(experts, shared_width=72, shared_gate=True))),
        "latent experts": (QWEN2_MOE, replace(plain, family="qwen2moe", activation="relu2", experts=latent)),
        "gpt-oss": (GPT_OSS, oss),
        "gemma4": (GEMMA4, gemma4.with_attention(n_kv_heads=(2, 1), values_from_keys=(False, True))),
        "gemma4-shared": (GEMMA4, shared),
        "gemma4-moe": (GEMMA4, beside),
        "laguna": (LAGUNA, one_gate(replace(windowed, experts=replace(experts, shared_width=72)), one_gate=True)),
        "mixtral": (MIXTRAL, replace(plain, experts=experts)),
        "gemma2": (GEMMA2, replace(gemma.with_attention(softcap=20.0), logit_softcap=15.0)),
        "gemma3": (GEMMA3, two_ropes(gemma, rope, 5_000.0)),
        "phi3": (PHI3, plain.with_attention(rope=part)),
        "phi3-long": (PHI3, replace(plain, family="phi3").with_attention(rope=two_sets)),
        "gpt2": (GPT2, gpt2),
        "olmo2": (OLMO2, plain.with_attention(qk_norm="rows")),
        "hunyuan-dense": (HUNYUAN_DENSE, plain.with_attention(qk_norm="after_rope", rope=(part, rope))),
        "gptneox": (GPTNEOX, replace(gpt2.with_attention(rope=part), parallel=True, activation="gelu")),
        "cohere2": (COHERE2, scaled(plain, 0.7).with_attention(window=(20, None), rope=(nearby, None))),
        "mistral3": (MISTRAL3, plain.with_attention(temperature=QueryTemperature(0.3, 6))),
        "muse-glimmer": (MUSE_GLIMMER, glimmer(gemma, 0.7, 15.0, 1e-3)),
        "smollm3": (SMOLLM3, with_rope_where(plain, (True, False))),
        "deepseek2": (DEEPSEEK2, compressed(plain, 24)),
        "deepseek2-lite": (DEEPSEEK2, compressed(plain, None)),
        "uneven": (LLAMA, uneven(replace(plain, family="llama"))),
        "granite": (GRANITE, replace(multiplied(plain, 0.7, 3.0), embedding_scale=2.5)),
        "lfm2": (LFM2, plain.with_recurrent_in({0}, ShortConvShape(width=HIDDEN, kernel=3, bias=True))),
        "qwen35": (QWEN35, gated.with_recurrent_in({0}, delta)),
        "qwen35-tiled": (QWEN35, gated.with_recurrent_in({1}, replace(delta, value_width=80, tiled=True))),
        "mamba": (MAMBA, recurrent),
        "falcon-mamba": (MAMBA, recurrent.with_layers(recurrent=replace(mamba, norm_eps=1e-5, conv_bias=False))),
        "mamba2": (MAMBA2, recurrent.with_layers(recurrent=mamba2)),
        "mamba2-limits": (MAMBA2, recurrent.with_layers(recurrent=limits)),
        "falcon-h1": (FALCON_H1, hybrid.with_layers(recurrent=replace(mamba2, gated_norm=False))),
        "falcon-h1-norm": (FALCON_H1, hybrid.with_layers(recurrent=replace(mamba2, norm_first=True))),
    }[name]
    return FamilyWeights(seed, dtype).model(family, shape or own)


def compressed(plain: Shape, q_rank: int | None) -> Shape:
    """Latent attention with every width of its own, in one layer of two beside experts."""
    rope = Rope(10_000.0, 16, "neighbours")
    latent = LatentShape(kv_rank=48, q_rank=q_rank, plain_width=20, value_width=12, norm_eps=1e-6)
    layer = LayerShape(latent_attention(6, rope, latent, 1.1), ff_width=80)
    experts = ExpertShape(5, 2, 40, renormalise=True, dense_layers=frozenset({0}), shared_width=24)
    return replace(plain, family="deepseek2", layers=(layer, layer), experts=experts)


def uneven(plain: Shape) -> Shape:
    """Layers that differ in everything: heads, their widths, windows, rotary positions, feed-forward sizes; one has no
    attention, one nothing else."""
    (rope,) = plain.rope_kinds
    first, second = plain.attention[0], replace(plain.attention[1], n_heads=4, n_kv_heads=4, window=20)
    second = replace(second, head_width=16, value_width=16, query_scale=0.3, rope=replace(rope, width=8, base=500.0))
    layers = (
        LayerShape(replace(second, rope=None, softcap=5.0), ff_width=48),
        LayerShape(None, ff_width=112),
        LayerShape(first),
        LayerShape(second, ff_width=80),
    )
    return replace(plain, layers=layers)
