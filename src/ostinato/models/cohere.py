"""command-r and cohere2: attention and feed-forward in parallel behind one layer norm without bias, rotary pairs as
neighbours in both formats, scaled logits. cohere2 has windows in three of four layers, and no rotary positions in the
others.
"""

from dataclasses import replace
from functools import partial

from ostinato.errors import Unsupported
from ostinato.models.builder import Builder
from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.shape import (
    Multipliers,
    Shape,
    by_window,
    common_from_config,
    common_from_gguf,
    sliding_from_config,
    sliding_from_gguf,
)

GLOBAL_EVERY = 4


def scaled(shape: Shape, logit_scale: float) -> Shape:
    return replace(shape, parallel=True, multipliers=Multipliers(head=logit_scale))


def command_r_from_gguf(f: Description) -> Shape:
    return scaled(common_from_gguf(f, "neighbours"), f.positive("logit_scale"))


def command_r_from_config(c: Description) -> Shape:
    if c.flag("use_qk_norm", False):
        raise Unsupported(f"{c.path}: use_qk_norm is true; layer norms of single query and key heads are not supported")
    shape = common_from_config(c, "neighbours")
    tied = c.flag("tie_word_embeddings", True)
    return replace(scaled(shape, c.positive("logit_scale", 0.0625)), tied_head=tied)


def cohere2_from_gguf(f: Description) -> Shape:
    shape = command_r_from_gguf(f)
    sliding = sliding_from_gguf(f, shape.n_layers, GLOBAL_EVERY)
    return by_window(shape, sliding, f.integer("attention.sliding_window"), local=shape.rope_kinds[0], whole=None)


def cohere2_from_config(c: Description) -> Shape:
    shape = command_r_from_config(c)
    sliding = sliding_from_config(c, shape.n_layers, GLOBAL_EVERY)
    return by_window(shape, sliding, c.integer("sliding_window", 4096), local=shape.rope_kinds[0], whole=None)


LAYER = partial(Builder.layer, norm_bias="zero", one_norm=True)
MODEL = partial(Builder.model, norm_bias="zero")

COMMAND_R = Family(
    "command-r",
    LAYER,
    hf=("CohereForCausalLM",),
    config_defaults={"layer_norm_eps": 1e-5, "rope_theta": 500_000.0},
    shape_from_gguf=command_r_from_gguf,
    shape_from_config=command_r_from_config,
    model=MODEL,
)

COHERE2 = Family(
    "cohere2",
    LAYER,
    hf=("Cohere2ForCausalLM",),
    config_defaults={"layer_norm_eps": 1e-5},
    shape_from_gguf=cohere2_from_gguf,
    shape_from_config=cohere2_from_config,
    model=MODEL,
)
