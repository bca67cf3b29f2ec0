"""qwen2moe: qwen2's attention with routed experts, beside a shared block that has a gate."""

from dataclasses import replace
from functools import partial

from ostinato.models.builder import Builder
from ostinato.models.experts import EXPERT_NAMES, count_from_config, dense_layers, experts_from_gguf, shared_names
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description
from ostinato.models.qwen2 import without_unused_window
from ostinato.models.shape import ExpertShape, Shape, common_from_gguf
from ostinato.models.tensors import ROW


def shape_from_gguf(f: Description) -> Shape:
    shape = common_from_gguf(f)
    width = f.integer("expert_feed_forward_length", max(1, shape.widest_ff // f.integer("expert_used_count")))
    shared = f.integer("expert_shared_feed_forward_length", shape.widest_ff)
    known = {"ff_width": width, "shared_width": shared, "shared_gate": True}
    return replace(shape, attention_bias=True, experts=experts_from_gguf(f, shape.n_layers, **known))


def shape_from_config(c: Description) -> Shape:
    shape = without_unused_window(c)
    experts = ExpertShape(
        count_from_config(c, 60),
        c.integer("num_experts_per_tok", 4),
        c.integer("moe_intermediate_size", 1408),
        c.flag("norm_topk_prob", False),
        dense_layers(c, shape.n_layers),
        shared_width=c.integer("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    return replace(shape, attention_bias=c.flag("qkv_bias", True), experts=experts)


QWEN2_MOE = Family(
    "qwen2moe",
    partial(Builder.layer, out_bias=False),
    hf=("Qwen2MoeForCausalLM",),
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={
        **COMMON_NAMES,
        **EXPERT_NAMES,
        **shared_names("shared_expert"),
        "model.layers.*.mlp.shared_expert_gate": "blk.*.ffn_gate_inp_shexp",
    },
    gguf_transforms={"ffn_gate_inp_shexp.weight": ROW},
)
