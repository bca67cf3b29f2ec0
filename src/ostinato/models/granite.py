"""granite: llama's blocks with four fixed factors: on embeddings, on scores, on what each block adds, on logits."""

from dataclasses import replace

from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.shape import (
    Multipliers,
    Shape,
    common_from_config,
    common_from_gguf,
    with_biases,
    with_query_scale,
)


def multiplied(shape: Shape, residual: float, logits: float) -> Shape:
    """Each block's output times `residual`; logits divided by `logits`."""
    return replace(shape, multipliers=Multipliers(attention_out=residual, ff_down=residual, head=1 / logits))


def shape_from_gguf(f: Description) -> Shape:
    shape = with_biases(common_from_gguf(f, "neighbours"), f)
    shape = multiplied(shape, f.positive("residual_scale", 1.0), f.positive("logit_scale"))
    if f.has("attention.scale"):
        shape = with_query_scale(shape, f.positive("attention.scale"))
    return replace(shape, embedding_scale=f.positive("embedding_scale")) if f.has("embedding_scale") else shape


def shape_from_config(c: Description) -> Shape:
    shape = multiplied(common_from_config(c), c.positive("residual_multiplier", 1.0), c.positive("logits_scaling", 1.0))
    shape = replace(shape, embedding_scale=c.positive("embedding_multiplier", 1.0))
    return with_query_scale(shape, c.positive("attention_multiplier", 1.0))


GRANITE = Family(
    "granite", hf=("GraniteForCausalLM",), shape_from_gguf=shape_from_gguf, shape_from_config=shape_from_config
)
