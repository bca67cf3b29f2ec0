"""stablelm: llama's blocks with layer norms and a quarter of each head rotated; in the 12B, attention and feed-forward
in parallel behind one norm.
"""

from dataclasses import replace
from functools import partial

from ostinato.errors import Unsupported
from ostinato.models.blocks import Layer
from ostinato.models.builder import Builder
from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.shape import Shape, common_from_config, common_from_gguf, with_biases


def shape_from_gguf(f: Description) -> Shape:
    # Old files state parallel blocks that are none: a norm of its own decides.
    parallel = "blk.0.ffn_norm.weight" not in f.tensors
    return replace(with_biases(common_from_gguf(f), f), parallel=parallel)


def shape_from_config(c: Description) -> Shape:
    if c.flag("qk_layernorm", False):
        raise Unsupported(
            f"{c.path}: qk_layernorm is true; layer norms of single query and key heads are not supported"
        )
    bias, parallel = c.flag("use_qkv_bias", False), c.flag("use_parallel_residual", False)
    return replace(common_from_config(c, rotary_share=0.25), attention_bias=bias, parallel=parallel)


def layer(b: Builder, i: int) -> Layer:
    return b.layer(i, norm_bias=True, one_norm=b.shape.parallel, out_bias=False)


STABLELM = Family(
    "stablelm",
    layer,
    hf=("StableLmForCausalLM",),
    config_defaults={"layer_norm_eps": 1e-5},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    model=partial(Builder.model, norm_bias=True),
)
