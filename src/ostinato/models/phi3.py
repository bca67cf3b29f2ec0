"""phi3: llama's blocks with query, key and value kept as one tensor, gate and up as another, and longrope factors."""

from ostinato.files.checkpoint import Checkpoint
from ostinato.models.blocks import Layer
from ostinato.models.builder import Builder
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.shape import Shape, common_from_config, common_from_gguf


def shape_from_gguf(checkpoint: Checkpoint) -> Shape:
    return common_from_gguf(checkpoint, "phi3", "halves")


def shape_from_config(checkpoint: Checkpoint) -> Shape:
    return common_from_config(checkpoint, "phi3")


def layer(b: Builder, i: int) -> Layer:
    return Layer(
        attention_norm=b.norm(f"blk.{i}.attn_norm"),
        attention=b.attention(i, fused=True),
        mlp_norm=b.norm(f"blk.{i}.ffn_norm"),
        mlp=b.gated_mlp(i, fused=True),
    )


PHI3 = Family(
    "phi3",
    layer,
    gguf="phi3",
    hf=("Phi3ForCausalLM",),
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={
        **COMMON_NAMES,
        "model.layers.*.self_attn.qkv_proj": "blk.*.attn_qkv",
        "model.layers.*.mlp.gate_up_proj": "blk.*.ffn_up",
    },
)
