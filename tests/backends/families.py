"""A small random model of every family: odd widths, groups, windows, caps, experts; recurrent ones of their own."""

from __future__ import annotations

from dataclasses import replace

from ostinato.backends.torch.model import Model
from ostinato.models.cohere import COHERE2, scaled
from ostinato.models.falcon_h1 import FALCON_H1
from ostinato.models.gemma import GEMMA2, GEMMA3, two_ropes
from ostinato.models.gpt2 import GPT2
from ostinato.models.gptneox import GPTNEOX
from ostinato.models.granite import GRANITE, multiplied
from ostinato.models.hunyuan import HUNYUAN_DENSE
from ostinato.models.llama import LLAMA
from ostinato.models.mamba import MAMBA, MAMBA2, without_attention
from ostinato.models.mixtral import MIXTRAL
from ostinato.models.olmo2 import OLMO2
from ostinato.models.phi3 import PHI3
from ostinato.models.qwen2 import QWEN2
from ostinato.models.qwen2_moe import QWEN2_MOE
from ostinato.models.qwen3 import QWEN3, QWEN3_MOE
from ostinato.models.rope import Rope
from ostinato.models.shape import (
    ExpertGroups,
    ExpertShape,
    Mamba2Shape,
    MambaShape,
    Multipliers,
    Shape,
    with_rope_where,
)
from ostinato.models.smollm3 import SMOLLM3
from tests.random_model import RandomWeights

FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3moe", "mixtral", "gemma2", "gemma3", "phi3", "phi3-long", "gpt2", "smollm3",
    "granite", "qwen2moe", "latent experts", "olmo2", "hunyuan-dense", "gptneox", "cohere2",
)  # fmt: skip
RECURRENT = ("mamba", "falcon-mamba", "mamba2", "mamba2-limits", "falcon-h1", "falcon-h1-norm")
HIDDEN, N_LAYERS, VOCAB, CONTEXT = 96, 2, 131, 256
BORDER = 20  # positions of the longest sequence that the short factors of phi3-long rotate


class FamilyWeights(RandomWeights):
    """Every tensor is there, those of fused families too; experts one by one."""

    def has(self, name: str) -> bool:
        return not name.endswith("_exps.weight") and name != "output.bias"


def family_model(name: str, seed: int = 0, shape: Shape | None = None) -> Model:
    """A model of the family, of its own shape unless told."""
    rope = Rope(10_000.0, 32, "neighbours" if name == "llama" else "halves")
    plain = Shape(
        family=name,
        n_layers=N_LAYERS,
        hidden=HIDDEN,
        n_heads=6,
        n_kv_heads=2,
        head_width=32,
        ff_width=80,
        vocab=VOCAB,
        context=CONTEXT,
        norm_eps=1e-5,
        ropes=(rope, rope),
        windows=(None, None),
        query_scale=32**-0.5,
    )
    gemma = replace(plain, activation="gelu_tanh", embedding_scale=HIDDEN**0.5, windows=(20, None))
    experts = ExpertShape(5, 2, 48, renormalise=True)
    # All that experts can have and no published family has at once.
    latent = ExpertShape(
        6, 2, 40, renormalise=True, dense_layers=frozenset({0}), scoring="sigmoid", choice_bias=True,
        groups=ExpertGroups(3, 2, 2), share_scale=1.5, gated=False, bias=True, shared_width=56, latent_width=64,
    )  # fmt: skip
    gpt2 = replace(plain, n_kv_heads=6, ropes=(None, None), activation="gelu_tanh", attention_bias=True, mlp_bias=True)
    part = replace(rope, width=24)
    nearby = replace(rope, pairing="neighbours")
    long = tuple(1.0 + i / 2 for i in range(12))
    two_sets = replace(part, divisors=(1.0,) * 12, amplitude=1.1, long_divisors=long, original_context=BORDER)
    recurrent = without_attention(name.removesuffix("-limits").removeprefix("falcon-"), HIDDEN, N_LAYERS, VOCAB, 1e-5)
    mamba = MambaShape(inner=88, state=6, kernel=3, dt_rank=7, bias=True)
    mamba2 = Mamba2Shape(inner=120, state=24, kernel=4, n_heads=6, n_groups=2)
    limits = replace(mamba2, inner=128, n_heads=2, n_groups=1, in_bias=True, out_bias=True, dt_limit=(0.1, 0.5))
    factors = Multipliers(0.9, 1.2, 1.3, 0.8, (0.7, 1.1, 0.9, 1.2, 0.8), 1.4, 0.6, 0.9)
    hybrid = replace(plain, family="falcon-h1", recurrent=mamba2, multipliers=factors)
    family, own = {
        "llama": (LLAMA, plain),
        "qwen2": (QWEN2, replace(plain, attention_bias=True)),
        "qwen3": (QWEN3, plain),
        "qwen3moe": (QWEN3_MOE, replace(plain, experts=replace(experts, renormalise=False))),
        "qwen2moe": (QWEN2_MOE, replace(plain, experts=replace(experts, shared_width=72, shared_gate=True))),
        "latent experts": (QWEN2_MOE, replace(plain, family="qwen2moe", activation="relu2", experts=latent)),
        "mixtral": (MIXTRAL, replace(plain, experts=experts)),
        "gemma2": (GEMMA2, replace(gemma, attention_softcap=20.0, logit_softcap=15.0)),
        "gemma3": (GEMMA3, two_ropes(gemma, rope, 5_000.0)),
        "phi3": (PHI3, replace(plain, ropes=(part, part))),
        "phi3-long": (PHI3, replace(plain, family="phi3", ropes=(two_sets, two_sets))),
        "gpt2": (GPT2, gpt2),
        "olmo2": (OLMO2, replace(plain, qk_norm="rows")),
        "hunyuan-dense": (HUNYUAN_DENSE, replace(plain, qk_norm="after_rope", ropes=(part, rope))),
        "gptneox": (GPTNEOX, replace(gpt2, parallel=True, activation="gelu", ropes=(part, part))),
        "cohere2": (COHERE2, replace(scaled(plain, 0.7), windows=(20, None), ropes=(nearby, None))),
        "smollm3": (SMOLLM3, with_rope_where(plain, (True, False))),
        "granite": (GRANITE, replace(multiplied(plain, 0.7, 3.0), embedding_scale=2.5)),
        "mamba": (MAMBA, replace(recurrent, recurrent=mamba)),
        "falcon-mamba": (MAMBA, replace(recurrent, recurrent=replace(mamba, norm_eps=1e-5, conv_bias=False))),
        "mamba2": (MAMBA2, replace(recurrent, recurrent=mamba2)),
        "mamba2-limits": (MAMBA2, replace(recurrent, recurrent=limits)),
        "falcon-h1": (FALCON_H1, replace(hybrid, recurrent=replace(mamba2, gated_norm=False))),
        "falcon-h1-norm": (FALCON_H1, replace(hybrid, recurrent=replace(mamba2, norm_first=True))),
    }[name]
    return FamilyWeights(seed).model(family, shape or own)
