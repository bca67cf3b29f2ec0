"""exaone4: llama's blocks with norms after them and none before, and on query and key heads. The large model has
windows in three of four layers, and no rotary positions in the others.
"""

from functools import partial

from ostinato.models.builder import Builder
from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.olmo2 import NAMES
from ostinato.models.shape import (
    Shape,
    by_window,
    common_from_config,
    common_from_gguf,
    sliding_from_config,
    sliding_from_gguf,
)

GLOBAL_EVERY = 4


def shape_from_gguf(f: Description) -> Shape:
    shape = common_from_gguf(f)
    if not f.has("attention.sliding_window"):
        return shape
    sliding = sliding_from_gguf(f, shape.n_layers, GLOBAL_EVERY)
    return by_window(shape, sliding, f.integer("attention.sliding_window"), local=shape.rope_kinds[0], whole=None)


def shape_from_config(c: Description) -> Shape:
    shape = common_from_config(c)
    if not c.has("sliding_window"):
        return shape
    sliding = sliding_from_config(c, shape.n_layers, GLOBAL_EVERY)
    return by_window(shape, sliding, c.integer("sliding_window"), local=shape.rope_kinds[0], whole=None)


EXAONE4 = Family(
    "exaone4",
    partial(Builder.layer, before=False, sandwich=True, qk_norm=True),
    hf=("Exaone4ForCausalLM",),
    config_defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names=NAMES,
)
