"""glm4moe: GLM-4.5, 4.6 and Air: llama's blocks with part of each head rotated, biases on query, key and value, QK norm
in some sizes, and experts chosen by sigmoids, beside a shared block without a gate."""

from dataclasses import replace

from ostinato.errors import BadFile
from ostinato.models.blocks import Layer
from ostinato.models.builder import Builder
from ostinato.models.experts import (
    DEEPSEEK_EPSILON,
    EXPERT_NAMES,
    deepseek_from_config,
    experts_from_gguf,
    shared_names,
)
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.shape import Shape, common_from_config, common_from_gguf, with_biases


def layer(b: Builder, i: int) -> Layer:
    """Neither format states QK norm of all its files: they have it or not."""
    return b.layer(i, qk_norm=b.names.has(f"blk.{i}.attn_q_norm.weight"), out_bias=False)


def shape_from_gguf(f: Description) -> Shape:
    shape = with_biases(common_from_gguf(f), f)
    known = {} if f.has("expert_gating_func") else {"scoring": "sigmoid"}
    experts = experts_from_gguf(f, shape.n_layers, choice_bias=True, sum_epsilon=DEEPSEEK_EPSILON, **known)
    return replace(shape, experts=experts)


def shape_from_config(c: Description) -> Shape:
    shape = common_from_config(c)
    normed = any(name.endswith(".self_attn.q_norm.weight") for name in c.tensors)
    if c.tensors and c.flag("use_qk_norm", normed) != normed:
        raise BadFile(
            f"{c.path}: use_qk_norm is {not normed}, and it {'has' if normed else 'lacks'} tensors of such norms"
        )
    return replace(shape, experts=deepseek_from_config(c, shape.n_layers))


GLM4_MOE = Family(
    "glm4moe",
    layer,
    hf=("Glm4MoeForCausalLM",),
    config_defaults={
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={
        **COMMON_NAMES,
        **EXPERT_NAMES,
        **shared_names("shared_experts"),
        "model.layers.*.mlp.gate.e_score_correction_bias": "blk.*.exp_probs_b.bias",
    },
    gguf_names={"blk.*.post_attention_norm": "blk.*.ffn_norm"},
)
