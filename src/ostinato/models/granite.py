"""granite and granitemoe: llama's blocks with four fixed factors: on embeddings, on scores, on what each block adds, on
logits; dense, or with experts and a shared block beside them."""

from dataclasses import replace

from ostinato.models.experts import experts_from_gguf
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.shape import (
    ExpertShape,
    Multipliers,
    Shape,
    common_from_config,
    common_from_gguf,
    with_biases,
)


def multiplied(shape: Shape, residual: float, logits: float) -> Shape:
    """Each block's output times `residual`; logits divided by `logits`."""
    out = Multipliers(attention_out=residual, mixer_out=residual, ff_down=residual, head=1 / logits)
    return replace(shape, multipliers=out)


def shape_from_gguf(f: Description) -> Shape:
    return multiplied_by_gguf(with_biases(common_from_gguf(f, "neighbours"), f), f)


def multiplied_by_gguf(shape: Shape, f: Description) -> Shape:
    """The shape with the factors that a GGUF file states."""
    shape = multiplied(shape, f.positive("residual_scale", 1.0), f.positive("logit_scale", 1.0))
    if f.has("attention.scale"):
        shape = shape.with_attention(query_scale=f.positive("attention.scale"))
    return replace(shape, embedding_scale=f.positive("embedding_scale")) if f.has("embedding_scale") else shape


def shape_from_config(c: Description) -> Shape:
    return multiplied_by_config(common_from_config(c), c)


def multiplied_by_config(shape: Shape, c: Description) -> Shape:
    """The shape with the factors that config.json states."""
    shape = multiplied(shape, c.positive("residual_multiplier", 1.0), c.positive("logits_scaling", 1.0))
    shape = replace(shape, embedding_scale=c.positive("embedding_multiplier", 1.0))
    return shape.with_attention(query_scale=c.positive("attention_multiplier", 1.0))


def moe_from_gguf(f: Description) -> Shape:
    shape = shape_from_gguf(f)
    return with_experts(shape, experts_from_gguf(f, shape.n_layers, ff_width=shape.widest_ff, renormalise=True))


def moe_from_config(c: Description) -> Shape:
    shape = shape_from_config(c)
    n_experts, n_used = c.integer("num_local_experts", 8), c.integer("num_experts_per_tok", 2)
    experts = ExpertShape(n_experts, n_used, shape.widest_ff, renormalise=True)
    return with_experts(shape, replace(experts, shared_width=c.integer("shared_intermediate_size", 0, least=0)))


def with_experts(shape: Shape, experts: ExpertShape) -> Shape:
    """The factor on what a block adds is one on the experts' shares."""
    return replace(shape, experts=replace(experts, share_scale=shape.multipliers.ff_down))


MOE_NAMES = {
    "model.layers.*.block_sparse_moe.router.layer": "blk.*.ffn_gate_inp",
    "model.layers.*.block_sparse_moe.input_linear": "blk.*.ffn_gate_up_exps",
    "model.layers.*.block_sparse_moe.output_linear": "blk.*.ffn_down_exps",
    "model.layers.*.shared_mlp.input_linear": "blk.*.ffn_gate_up_shexp",
    "model.layers.*.shared_mlp.output_linear": "blk.*.ffn_down_shexp",
}

GRANITE = Family(
    "granite", hf=("GraniteForCausalLM",), shape_from_gguf=shape_from_gguf, shape_from_config=shape_from_config
)

GRANITE_MOE = Family(
    "granitemoe",
    hf=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    shape_from_gguf=moe_from_gguf,
    shape_from_config=moe_from_config,
    names={**COMMON_NAMES, **MOE_NAMES},
)
