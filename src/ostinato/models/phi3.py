"""phi3: llama's blocks with query, key and value kept as one tensor, gate and up as another, and longrope factors."""

from ostinato.models.blocks import Layer
from ostinato.models.builder import Builder
from ostinato.models.family import COMMON_NAMES, Family


def layer(b: Builder, i: int) -> Layer:
    return b.layer(i, b.attention(i, fused=True), b.gated_mlp(i, fused=True))


PHI3 = Family(
    "phi3",
    layer,
    gguf="phi3",
    hf=("Phi3ForCausalLM",),
    names={
        **COMMON_NAMES,
        "model.layers.*.self_attn.qkv_proj": "blk.*.attn_qkv",
        "model.layers.*.mlp.gate_up_proj": "blk.*.ffn_up",
    },
)
