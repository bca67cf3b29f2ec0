"""arcee: llama's blocks with a feed-forward block without a gate, and squared ReLU."""

from dataclasses import replace
from functools import partial

from ostinato.models.builder import Builder
from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.shape import Shape, common_from_gguf, with_biases


def shape_from_gguf(f: Description) -> Shape:
    return replace(with_biases(common_from_gguf(f, "neighbours"), f), activation="relu2")


ARCEE = Family(
    "arcee",
    partial(Builder.layer, mlp=Builder.plain_mlp),
    hf=("ArceeForCausalLM",),
    config_defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
    shape_from_gguf=shape_from_gguf,
)
