"""ernie4_5: llama's blocks with rotary pairs as neighbours in both formats, and biases everywhere or nowhere."""

from dataclasses import replace

from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.shape import Shape, common_from_config, common_from_gguf, with_biases


def shape_from_gguf(f: Description) -> Shape:
    return with_biases(common_from_gguf(f, "neighbours"), f)


def shape_from_config(c: Description) -> Shape:
    bias = c.flag("use_bias", False)
    tied = c.flag("tie_word_embeddings", True)
    return replace(common_from_config(c, "neighbours"), attention_bias=bias, mlp_bias=bias, tied_head=tied)


ERNIE4_5 = Family(
    "ernie4_5",
    hf=("Ernie4_5ForCausalLM",),
    config_defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "head_dim": 128, "num_key_value_heads": 2},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
)
