"""llama: Llama 2 and 3, Mistral, SmolLM2, TinyLlama; RMS norm, rotary positions, grouped heads, gated SiLU.

GGUF files of this architecture keep query and key rows so that rotary pairs are neighbours, safetensors so that
they are halves. Mixtral is the same with routed experts, and shares this architecture's name in GGUF.
"""

from dataclasses import replace

from ostinato.files.checkpoint import Checkpoint
from ostinato.models.blocks import Layer
from ostinato.models.builder import Builder
from ostinato.models.family import Family
from ostinato.models.fields import Fields
from ostinato.models.shape import ExpertShape, Shape, checked, common_from_config, common_from_gguf


def shape_from_gguf(checkpoint: Checkpoint) -> Shape:
    shape = common_from_gguf(checkpoint, "llama", "neighbours")
    f = Fields(checkpoint.metadata, checkpoint.path, checkpoint.architecture + ".")
    # GGUF does not state biases: the file has them or not.
    attention_bias, mlp_bias = (f"blk.0.{name}.bias" in checkpoint.tensors for name in ("attn_q", "ffn_up"))
    shape = replace(shape, attention_bias=attention_bias, mlp_bias=mlp_bias)
    if not f.integer("expert_count", 0, least=0):
        return shape
    used = f.integer("expert_used_count")
    experts = ExpertShape(f.integer("expert_count"), used, shape.ff_width, renormalise=True)
    return checked(replace(shape, experts=experts), checkpoint)


def shape_from_config(checkpoint: Checkpoint) -> Shape:
    return common_from_config(checkpoint, "llama")


def layer(b: Builder, i: int) -> Layer:
    return Layer(
        attention_norm=b.norm(f"blk.{i}.attn_norm"),
        attention=b.attention(i),
        mlp_norm=b.norm(f"blk.{i}.ffn_norm"),
        mlp=b.mlp(i),
    )


LLAMA = Family(
    "llama",
    layer,
    gguf="llama",
    hf=("LlamaForCausalLM", "MistralForCausalLM"),
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
)
