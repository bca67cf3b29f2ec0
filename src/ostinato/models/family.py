"""A family: how to read its shape from either format, how its tensors are called there, and its blocks."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ostinato.models.blocks import AnyLayer, ModelBlocks
from ostinato.models.builder import Builder, Names
from ostinato.models.fields import Description
from ostinato.models.shape import Shape, common_from_config, common_from_gguf
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
# The Dense modules of sentence-transformers behind the pooling, numbered as `files/safetensors.py` opens them.
PROJECTIONS: Mapping[str, str] = {"dense.*.linear": "dense_*"}
# Parts of a checkpoint that are recognised, left out of memory and said, by what they are for.
LEFT_OUT: Mapping[str, re.Pattern[str]] = {
    "pictures": re.compile(
        r"(model\.)?(vision_(tower|model|adapter|projection|embedder)|visual|multi_modal_projector|embed_vision)\..*"
    ),
    "sounds": re.compile(r"(model\.)?(audio_tower|embed_audio)\..*"),
}
# Layers that predict further tokens: here, or numbered on after the model's own (`fields.py`, `n_further_layers`).
FURTHER_TOKENS = re.compile(r"(model\.)?mtp(_\w+)?\..*")
# What only such a layer has, where it is numbered on, by format.
FURTHER_ALONE = re.compile(r"\.\d+\.(nextn\.|(eh_proj|enorm|hnorm|shared_head)\.)")
# Buffers that older tools wrote beside the weights; they hold nothing that a model learned.
BUFFERS = re.compile(
    r".*\.rotary_emb\.inv_freq|.*\.att(n|ention)\.(masked_)?bias|(.*\.)?embeddings\.position_ids|.*\.mamba\.mup_vector"
)


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table in `registry.py`."""

    name: str
    layer: Callable[[Builder, int], AnyLayer] = Builder.layer
    hf: tuple[str, ...] = ()  # config.json's architectures[0]
    # The model_type of text_config in checkpoints of several parts, of which this family is the one that runs.
    text_types: tuple[str, ...] = ()
    config_defaults: Mapping[str, Any] = field(default_factory=dict)  # what a config.json may leave out
    # The same of one class (architectures[0]) or one kind of text part alone.
    kind_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    in_gguf: bool = True  # under this name, as general.architecture
    shape_from_gguf: Callable[[Description], Shape] = common_from_gguf
    shape_from_config: Callable[[Description], Shape] = common_from_config
    names: Mapping[str, str] = field(default_factory=lambda: COMMON_NAMES)
    gguf_names: Mapping[str, str] = field(default_factory=dict)  # where GGUF files call a tensor otherwise than we do
    # What each format keeps otherwise than `builder.py` wants it.
    gguf_transforms: Mapping[str, Transform] = field(default_factory=dict)
    config_transforms: Mapping[str, Transform] = field(default_factory=dict)
    shape_transforms: Callable[[Shape], Mapping[str, Transform]] = lambda shape: {}  # of a folder, too
    gguf_shape_transforms: Callable[[Shape], Mapping[str, Transform]] = lambda shape: {}
    ignored: re.Pattern[str] = BUFFERS  # tensors of a folder that have no part in what the model gives
    model: Callable[[Builder, Sequence[AnyLayer]], ModelBlocks] = Builder.model

    def blocks(self, shape: Shape, names: Names) -> ModelBlocks:
        """The blocks of a model over references to tensors of these names."""
        b = Builder(shape, names)
        model = self.model(b, [self.layer(b, i) for i in range(shape.n_layers)])
        return replace(model, projections=b.projections()) if shape.projections else model
