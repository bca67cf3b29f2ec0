"""mistral3 (Ministral 3, Devstral 2): llama's blocks with YaRN, and queries that grow with their position.

Mistral Small 3.1 and 3.2 are called mistral3 in GGUF as well; they have neither, and are llama otherwise.
"""

from dataclasses import replace

from ostinato.models import rope as ropes
from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.shape import QueryTemperature, Shape, common_from_gguf, windowed_from_config


def shape_from_gguf(f: Description) -> Shape:
    shape = common_from_gguf(f, "neighbours")
    if f.has("rope.scaling.yarn_log_multiplier"):
        factor, share = f.positive("rope.scaling.factor", 1.0), f.number("rope.scaling.yarn_log_multiplier")
        amplitude = ropes.yarn_amplitude(factor) / ropes.yarn_amplitude(factor, share)
        kept = {rope: replace(rope, amplitude=amplitude) for rope in shape.rope_kinds}
        shape = shape.with_attention(rope=tuple(one.rope and kept[one.rope] for one in shape.attention.values()))
    if not f.number("attention.temperature_scale", 0.0):
        return shape
    span = f.integer("rope.scaling.original_context_length")
    return shape.with_attention(temperature=QueryTemperature(f.positive("attention.temperature_scale"), span))


def shape_from_config(c: Description) -> Shape:
    rope = ropes.settings_of(c)
    if not rope.number("llama_4_scaling_beta", 0.0):
        return windowed_from_config(c)
    span = rope.integer("original_max_position_embeddings")
    temperature = QueryTemperature(rope.positive("llama_4_scaling_beta"), span)
    return windowed_from_config(c).with_attention(temperature=temperature)


# What a config.json may leave out.
MINISTRAL = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}

MISTRAL3 = Family(
    "mistral3",
    hf=("Ministral3ForCausalLM",),
    text_types=("ministral3", "mistral"),
    config_defaults={"num_attention_heads": 32, "num_key_value_heads": 8},
    kind_defaults={"Ministral3ForCausalLM": MINISTRAL, "ministral3": MINISTRAL, "mistral": {"sliding_window": 4096}},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
)
