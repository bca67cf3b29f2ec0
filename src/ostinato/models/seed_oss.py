"""seed_oss: llama's blocks with biases on query, key and value, and rotary pairs as halves in both formats."""

from dataclasses import replace
from functools import partial

from ostinato.errors import Unsupported
from ostinato.models.builder import Builder
from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.shape import Shape, common_from_config, common_from_gguf, with_biases


def shape_from_gguf(f: Description) -> Shape:
    return with_biases(common_from_gguf(f), f)


def shape_from_config(c: Description) -> Shape:
    if c.flag("attention_out_bias", False):
        raise Unsupported(f"{c.path}: attention_out_bias is true; seed_oss without that bias is supported")
    return replace(common_from_config(c), attention_bias=c.flag("attention_bias", True))


SEED_OSS = Family(
    "seed_oss",
    partial(Builder.layer, out_bias=False),
    hf=("SeedOssForCausalLM",),
    config_defaults={"head_dim": 128},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    gguf_names={"blk.*.post_attention_norm": "blk.*.ffn_norm"},
)
