"""glm4: norms before and after each block, half of each head rotated as neighbouring pairs, gate and up in one.

GGUF files of the text part of GLM-4.1V and GLM-4.6V-Flash, known by the sections of their positions, pair halves.
"""

from dataclasses import replace
from functools import partial

from ostinato.models.builder import Builder
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.rope import Pairing
from ostinato.models.shape import Shape, common_from_config, common_from_gguf, with_biases


def shape_from_gguf(f: Description) -> Shape:
    pairing: Pairing = "halves" if any(f.counts("rope.dimension_sections")) else "neighbours"
    return replace(with_biases(common_from_gguf(f, pairing), f), mlp_bias=False)


def shape_from_config(c: Description) -> Shape:
    shape = common_from_config(c, "neighbours", rotary_share=0.5)
    return replace(shape, attention_bias=c.flag("attention_bias", True))


GLM4 = Family(
    "glm4",
    partial(Builder.layer, sandwich=True, out_bias=False, mlp=partial(Builder.gated_mlp, fused="ffn_up")),
    hf=("Glm4ForCausalLM",),
    config_defaults={"rms_norm_eps": 1.5625e-07, "head_dim": 128, "num_key_value_heads": 2},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={
        **COMMON_NAMES,
        "model.layers.*.post_self_attn_layernorm": "blk.*.post_attention_norm",
        "model.layers.*.post_mlp_layernorm": "blk.*.post_ffw_norm",
        "model.layers.*.mlp.gate_up_proj": "blk.*.ffn_up",
    },
)
