"""qwen3 and qwen3moe: llama's blocks with an RMS norm on every query and key head, dense or with routed experts."""

from dataclasses import replace

from ostinato.errors import BadFile
from ostinato.files.checkpoint import Checkpoint
from ostinato.models.blocks import Layer
from ostinato.models.builder import Builder
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Fields
from ostinato.models.qwen2 import without_unused_window
from ostinato.models.shape import ExpertShape, Shape, checked, common_from_config, common_from_gguf


def shape_from_gguf(checkpoint: Checkpoint) -> Shape:
    return common_from_gguf(checkpoint, "qwen3", "halves")


def shape_from_config(checkpoint: Checkpoint) -> Shape:
    return without_unused_window(checkpoint, common_from_config(checkpoint, "qwen3"))


def moe_shape_from_gguf(checkpoint: Checkpoint) -> Shape:
    f = Fields(checkpoint.metadata, checkpoint.path, checkpoint.architecture + ".")
    shape = common_from_gguf(checkpoint, "qwen3moe", "halves")
    experts = ExpertShape(
        f.integer("expert_count"),
        f.integer("expert_used_count"),
        f.integer("expert_feed_forward_length", shape.ff_width),
        renormalise=True,
    )
    return checked(replace(shape, experts=experts), checkpoint)


def moe_shape_from_config(checkpoint: Checkpoint) -> Shape:
    c = Fields(checkpoint.metadata, checkpoint.path)
    shape = shape_from_config(checkpoint)
    every = c.integer("decoder_sparse_step", 1)
    plain = c.raw("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(isinstance(i, int) for i in plain):
        raise BadFile(f"{c.path}: mlp_only_layers is {plain!r}; it must be a list of layer numbers")
    experts = ExpertShape(
        # Published files write num_experts; newer tools write num_local_experts.
        c.integer("num_experts", c.integer("num_local_experts", 128)),
        c.integer("num_experts_per_tok", 8),
        c.integer("moe_intermediate_size", 768),
        c.flag("norm_topk_prob", False),
        frozenset(i for i in range(shape.n_layers) if i in plain or (i + 1) % every),
    )
    return checked(replace(shape, family="qwen3moe", experts=experts), checkpoint)


def layer(b: Builder, i: int) -> Layer:
    return Layer(
        attention_norm=b.norm(f"blk.{i}.attn_norm"),
        attention=b.attention(i, qk_norm=True),
        mlp_norm=b.norm(f"blk.{i}.ffn_norm"),
        mlp=b.mlp(i),
    )


QWEN3 = Family(
    "qwen3",
    layer,
    gguf="qwen3",
    hf=("Qwen3ForCausalLM",),
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
)

QWEN3_MOE = Family(
    "qwen3moe",
    layer,
    gguf="qwen3moe",
    hf=("Qwen3MoeForCausalLM",),
    shape_from_gguf=moe_shape_from_gguf,
    shape_from_config=moe_shape_from_config,
    names={
        **COMMON_NAMES,
        "model.layers.*.mlp.gate": "blk.*.ffn_gate_inp",
        "model.layers.*.mlp.experts.*.gate_proj": "blk.*.ffn_gate.*",
        "model.layers.*.mlp.experts.*.up_proj": "blk.*.ffn_up.*",
        "model.layers.*.mlp.experts.*.down_proj": "blk.*.ffn_down.*",
    },
)
