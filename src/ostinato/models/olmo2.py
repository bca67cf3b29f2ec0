"""olmo2 and olmo3: llama's blocks with norms after them and none before, and one norm for all heads of a row's
queries or keys. olmo3 has windows in three of four layers, whose rope is not scaled unless a folder says so; in GGUF
both are olmo2.
"""

from functools import partial

from ostinato.models import rope as ropes
from ostinato.models.builder import Builder
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.rope import Rope
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
    shape = common_from_gguf(f).with_attention(qk_norm="rows")
    if not f.has("attention.sliding_window"):
        return shape
    sliding = sliding_from_gguf(f, shape.n_layers, GLOBAL_EVERY)
    whole = ropes.from_gguf(f, shape.widest(lambda a: a.head_width), "halves")
    local = Rope(f.positive("rope.freq_base_swa", whole.base), whole.width, whole.pairing)
    return by_window(shape, sliding, f.integer("attention.sliding_window"), local=local, whole=whole)


def olmo2_from_config(c: Description) -> Shape:
    return common_from_config(c).with_attention(qk_norm="rows")


def olmo3_from_config(c: Description) -> Shape:
    shape = olmo2_from_config(c)
    width = shape.widest(lambda a: a.head_width)
    whole = ropes.from_config(c, width, kind="full_attention")
    sliding = sliding_from_config(c, shape.n_layers, GLOBAL_EVERY)
    local = ropes.of_windows(c, width, Rope(whole.base, whole.width, whole.pairing))
    return by_window(shape, sliding, c.integer("sliding_window", 4096), local=local, whole=whole)


LAYER = partial(Builder.layer, before=False, sandwich=True, qk_norm=True)
NAMES = {
    **COMMON_NAMES,
    "model.layers.*.post_attention_layernorm": "blk.*.post_attention_norm",
    "model.layers.*.post_feedforward_layernorm": "blk.*.post_ffw_norm",
}

OLMO2 = Family(
    "olmo2",
    LAYER,
    hf=("Olmo2ForCausalLM",),
    config_defaults={"rms_norm_eps": 1e-5},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=olmo2_from_config,
    names=NAMES,
)

OLMO3 = Family(
    "olmo3",
    LAYER,
    hf=("Olmo3ForCausalLM",),
    in_gguf=False,
    config_defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    shape_from_config=olmo3_from_config,
    names=NAMES,
)
