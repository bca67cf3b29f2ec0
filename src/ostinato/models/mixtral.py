"""mixtral: llama's blocks with routed experts. Its GGUF files call themselves llama and are read there."""

from dataclasses import replace

from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.shape import ExpertShape, Shape, windowed_from_config


def shape_from_config(c: Description) -> Shape:
    shape = windowed_from_config(c)
    n_experts, n_used = c.integer("num_local_experts", 8), c.integer("num_experts_per_tok", 2)
    return replace(shape, experts=ExpertShape(n_experts, n_used, shape.widest_ff, renormalise=True))


MIXTRAL = Family(
    "mixtral",
    hf=("MixtralForCausalLM",),
    in_gguf=False,
    config_defaults={"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    shape_from_config=shape_from_config,
    names={
        **COMMON_NAMES,
        "model.layers.*.block_sparse_moe.gate": "blk.*.ffn_gate_inp",
        "model.layers.*.block_sparse_moe.experts.*.w1": "blk.*.ffn_gate.*",
        "model.layers.*.block_sparse_moe.experts.*.w3": "blk.*.ffn_up.*",
        "model.layers.*.block_sparse_moe.experts.*.w2": "blk.*.ffn_down.*",
    },
)
