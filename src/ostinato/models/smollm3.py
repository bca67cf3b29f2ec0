"""smollm3: llama's blocks, of which every fourth layer has no rotary positions."""

from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.shape import Shape, common_from_gguf, flags, windowed_from_config, with_rope_where

INTERVAL = 4  # which GGUF files do not state


def shape_from_gguf(f: Description) -> Shape:
    shape = common_from_gguf(f, "neighbours")
    return with_rope_where(shape, [bool((i + 1) % INTERVAL) for i in range(shape.n_layers)])


def shape_from_config(c: Description) -> Shape:
    shape = windowed_from_config(c)
    every = c.integer("no_rope_layer_interval", INTERVAL)
    # 1 in this list is a layer with rotary positions, in spite of its name.
    turned = flags(c, "no_rope_layers", [bool((i + 1) % every) for i in range(shape.n_layers)])
    return with_rope_where(shape, turned)


SMOLLM3 = Family(
    "smollm3",
    hf=("SmolLM3ForCausalLM",),
    config_defaults={"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
)
