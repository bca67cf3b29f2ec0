"""A family: how to read its shape from either format, how its tensors are called there, and its blocks."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ostinato.files.checkpoint import Checkpoint
from ostinato.models.blocks import AnyLayer, ModelBlocks
from ostinato.models.builder import Builder
from ostinato.models.shape import Shape
from ostinato.models.tensors import Transform

# The stems of tensor names in most safetensors folders, and ours.
COMMON_NAMES: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.*.input_layernorm": "blk.*.attn_norm",
    "model.layers.*.self_attn.q_proj": "blk.*.attn_q",
    "model.layers.*.self_attn.k_proj": "blk.*.attn_k",
    "model.layers.*.self_attn.v_proj": "blk.*.attn_v",
    "model.layers.*.self_attn.o_proj": "blk.*.attn_output",
    "model.layers.*.self_attn.q_norm": "blk.*.attn_q_norm",
    "model.layers.*.self_attn.k_norm": "blk.*.attn_k_norm",
    "model.layers.*.post_attention_layernorm": "blk.*.ffn_norm",
    "model.layers.*.mlp.gate_proj": "blk.*.ffn_gate",
    "model.layers.*.mlp.up_proj": "blk.*.ffn_up",
    "model.layers.*.mlp.down_proj": "blk.*.ffn_down",
}
# Buffers that older tools wrote beside the weights; they hold nothing that a model learned.
BUFFERS = re.compile(
    r".*\.rotary_emb\.inv_freq|.*\.attn\.(masked_)?bias|(.*\.)?embeddings\.position_ids|.*\.mamba\.mup_vector"
)


def rms_layers(b: Builder, layer: Callable[[Builder, int], AnyLayer]) -> ModelBlocks:
    """The usual model: its layers, an RMS norm, a head."""
    return b.model([layer(b, i) for i in range(b.shape.n_layers)], b.norm("output_norm"))


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table in `registry.py`."""

    name: str
    layer: Callable[[Builder, int], AnyLayer]
    gguf: str | None = None  # general.architecture
    hf: tuple[str, ...] = ()  # config.json's architectures[0]
    shape_from_gguf: Callable[[Checkpoint], Shape] | None = None
    shape_from_config: Callable[[Checkpoint], Shape] | None = None
    names: Mapping[str, str] = field(default_factory=lambda: COMMON_NAMES)
    gguf_names: Mapping[str, str] = field(default_factory=dict)  # where GGUF files call a tensor otherwise than we do
    # What each format keeps otherwise than `builder.py` wants it.
    gguf_transforms: Mapping[str, Transform] = field(default_factory=dict)
    config_transforms: Mapping[str, Transform] = field(default_factory=dict)
    ignored: re.Pattern[str] = BUFFERS  # tensors of a folder that have no part in what the model gives
    build: Callable[[Builder, Callable[[Builder, int], AnyLayer]], ModelBlocks] = rms_layers
