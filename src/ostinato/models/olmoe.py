"""olmoe: llama's blocks with one norm for all heads of a row's queries or keys, and routed experts."""

from dataclasses import replace
from functools import partial

from ostinato.errors import Unsupported
from ostinato.models.builder import Builder
from ostinato.models.experts import EXPERT_NAMES, count_from_config, experts_from_gguf
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.shape import ExpertShape, Shape, common_from_config, common_from_gguf


def shape_from_gguf(f: Description) -> Shape:
    shape = common_from_gguf(f).with_attention(qk_norm="rows")
    return replace(shape, experts=experts_from_gguf(f, shape.n_layers, ff_width=shape.widest_ff, renormalise=False))


def shape_from_config(c: Description) -> Shape:
    if c.has("clip_qkv"):
        raise Unsupported(f"{c.path}: clip_qkv, a bound on queries, keys and values, is not supported")
    shape = common_from_config(c).with_attention(qk_norm="rows")
    n_experts, n_used = count_from_config(c, 64), c.integer("num_experts_per_tok", 8)
    experts = ExpertShape(n_experts, n_used, shape.widest_ff, renormalise=c.flag("norm_topk_prob", False))
    return replace(shape, experts=experts)


OLMOE = Family(
    "olmoe",
    partial(Builder.layer, qk_norm=True),
    hf=("OlmoeForCausalLM",),
    config_defaults={"rms_norm_eps": 1e-5},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={**COMMON_NAMES, **EXPERT_NAMES},
)
