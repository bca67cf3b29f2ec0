"""qwen2: llama's blocks with biases on query, key and value, and rotary pairs as halves in both formats."""

from dataclasses import replace
from functools import partial

from ostinato.models.builder import Builder
from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.shape import Shape, common_from_config, common_from_gguf, windows_from_config, with_biases


def shape_from_gguf(f: Description) -> Shape:
    """Files of KORMo go by this name, and have no biases."""
    return with_biases(common_from_gguf(f), f)


def shape_from_config(c: Description) -> Shape:
    return replace(without_unused_window(c), attention_bias=True)


def without_unused_window(c: Description) -> Shape:
    """Qwen's config.json names a window even where use_sliding_window, false when absent, turns it off."""
    shape = common_from_config(c)
    if c.flag("use_sliding_window", False):
        return shape.with_attention(window=windows_from_config(c, shape.n_layers, first_windowed=28))
    return shape


QWEN2 = Family(
    "qwen2",
    partial(Builder.layer, out_bias=False),
    hf=("Qwen2ForCausalLM",),
    config_defaults={"sliding_window": 4096},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
)
