"""starcoder2: layer norms with bias, rotary positions, a plain feed-forward block with GELU, everything with a bias."""

from dataclasses import replace
from functools import partial

from ostinato.models.builder import Builder
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.shape import Shape, common_from_gguf, windowed_from_config


def shape_from_gguf(f: Description) -> Shape:
    return replace(common_from_gguf(f), activation="gelu_tanh", attention_bias=True, mlp_bias=True)


def shape_from_config(c: Description) -> Shape:
    bias, tied = c.flag("use_bias", True), c.flag("tie_word_embeddings", True)
    return replace(windowed_from_config(c), attention_bias=bias, mlp_bias=bias, tied_head=tied)


STARCODER2 = Family(
    "starcoder2",
    partial(Builder.layer, mlp=Builder.plain_mlp, norm_bias=True),
    hf=("Starcoder2ForCausalLM",),
    config_defaults={"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "num_key_value_heads": 2},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={
        **COMMON_NAMES,
        "model.layers.*.mlp.c_fc": "blk.*.ffn_up",
        "model.layers.*.mlp.c_proj": "blk.*.ffn_down",
    },
    model=partial(Builder.model, norm_bias=True),
)
