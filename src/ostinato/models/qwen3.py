"""qwen3, qwen3vl and qwen3moe: llama's blocks with an RMS norm on every query and key head, dense or with routed
experts.
"""

from dataclasses import replace
from functools import partial

from ostinato.errors import BadFile
from ostinato.models.builder import Builder
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.qwen2 import without_unused_window
from ostinato.models.shape import ExpertShape, Shape, common_from_gguf


def moe_from_gguf(f: Description) -> Shape:
    shape = common_from_gguf(f)
    experts = ExpertShape(
        f.integer("expert_count"),
        f.integer("expert_used_count"),
        f.integer("expert_feed_forward_length", shape.ff_width),
        renormalise=True,
    )
    return replace(shape, experts=experts)


def moe_from_config(c: Description) -> Shape:
    shape = without_unused_window(c)
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
    return replace(shape, experts=experts)


LAYER = partial(Builder.layer, qk_norm=True)

QWEN3 = Family("qwen3", LAYER, hf=("Qwen3ForCausalLM",), shape_from_config=without_unused_window)

# The text part of Qwen3-VL. Its rotary sections are of height, width and time, which are one position in a text.
QWEN3_VL = Family("qwen3vl", LAYER, text_types=("qwen3_vl_text",), shape_from_config=without_unused_window)

QWEN3_MOE = Family(
    "qwen3moe",
    LAYER,
    hf=("Qwen3MoeForCausalLM",),
    shape_from_gguf=moe_from_gguf,
    shape_from_config=moe_from_config,
    names={
        **COMMON_NAMES,
        "model.layers.*.mlp.gate": "blk.*.ffn_gate_inp",
        "model.layers.*.mlp.experts.*.gate_proj": "blk.*.ffn_gate.*",
        "model.layers.*.mlp.experts.*.up_proj": "blk.*.ffn_up.*",
        "model.layers.*.mlp.experts.*.down_proj": "blk.*.ffn_down.*",
    },
)
