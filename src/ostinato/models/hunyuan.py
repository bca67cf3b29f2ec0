"""hunyuan-dense: llama's blocks with norms on query and key heads after their rotation."""

from functools import partial

from ostinato.models.builder import Builder
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.shape import Shape, common_from_config, common_from_gguf


def shape_from_gguf(f: Description) -> Shape:
    return common_from_gguf(f).with_attention(qk_norm="after_rope")


def shape_from_config(c: Description) -> Shape:
    return common_from_config(c).with_attention(qk_norm="after_rope")


HUNYUAN_DENSE = Family(
    "hunyuan-dense",
    partial(Builder.layer, qk_norm=True),
    hf=("HunYuanDenseV1ForCausalLM",),
    config_defaults={"rms_norm_eps": 1e-5},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={
        **COMMON_NAMES,
        "model.layers.*.self_attn.query_layernorm": "blk.*.attn_q_norm",
        "model.layers.*.self_attn.key_layernorm": "blk.*.attn_k_norm",
    },
)
