"""llama: Llama 2 and 3, Mistral, SmolLM2, TinyLlama; RMS norm, rotary positions, grouped heads, gated SiLU.

GGUF files of this architecture keep query and key rows so that rotary pairs are neighbours, safetensors so that
they are halves. Mixtral is the same with routed experts, and shares this architecture's name in GGUF.
"""

from dataclasses import replace

from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.shape import (
    ExpertShape,
    Shape,
    common_from_config,
    common_from_gguf,
    windowed_from_config,
    with_biases,
)


def shape_from_gguf(f: Description) -> Shape:
    shape = with_biases(common_from_gguf(f, "neighbours"), f)
    if not f.integer("expert_count", 0, least=0):
        return shape
    used = f.integer("expert_used_count")
    return replace(shape, experts=ExpertShape(f.integer("expert_count"), used, shape.widest_ff, renormalise=True))


def shape_from_config(c: Description) -> Shape:
    """Only Mistral has windows."""
    return windowed_from_config(c) if c.checkpoint.architecture == "MistralForCausalLM" else common_from_config(c)


LLAMA = Family(
    "llama",
    hf=("LlamaForCausalLM", "MistralForCausalLM"),
    kind_defaults={"MistralForCausalLM": {"sliding_window": 4096}},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
)
