"""phi3: llama's blocks with query, key and value kept as one tensor, gate and up as another, and longrope factors."""

from functools import partial

from ostinato.models.builder import Builder
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.shape import windowed_from_config

PHI3 = Family(
    "phi3",
    partial(Builder.layer, fused=True, mlp=partial(Builder.gated_mlp, fused="ffn_up")),
    hf=("Phi3ForCausalLM",),
    config_defaults={"rms_norm_eps": 1e-5},
    shape_from_config=windowed_from_config,
    names={
        **COMMON_NAMES,
        "model.layers.*.self_attn.qkv_proj": "blk.*.attn_qkv",
        "model.layers.*.mlp.gate_up_proj": "blk.*.ffn_up",
    },
)
