"""phi2 (and phi 1): attention and a plain feed-forward block in parallel behind one layer norm, everything with a bias,
the head too; a part of each head is rotated.
"""

from dataclasses import replace
from functools import partial

from ostinato.errors import Unsupported
from ostinato.models.blocks import Layer
from ostinato.models.builder import Builder
from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.shape import Shape, common_from_config, common_from_gguf


def shape_from_gguf(f: Description) -> Shape:
    return replace(common_from_gguf(f), activation="gelu_tanh", attention_bias=True, mlp_bias=True, parallel=True)


def shape_from_config(c: Description) -> Shape:
    if c.flag("qk_layernorm", False):
        raise Unsupported(f"{c.path}: qk_layernorm is true; phi with layer norms of queries and keys is not supported")
    shape = common_from_config(c, rotary_share=0.5)
    return replace(shape, attention_bias=True, mlp_bias=True, parallel=True)


def layer(b: Builder, i: int) -> Layer:
    # The first GGUF files keep q, k and v as one tensor.
    fused = b.names.has(f"blk.{i}.attn_qkv.weight")
    return b.layer(i, norm_bias=True, one_norm=True, mlp=Builder.plain_mlp, fused=fused)


PHI2 = Family(
    "phi2",
    layer,
    hf=("PhiForCausalLM",),
    config_defaults={"hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={
        "model.embed_tokens": "token_embd",
        "model.final_layernorm": "output_norm",
        "lm_head": "output",
        "model.layers.*.input_layernorm": "blk.*.attn_norm",
        "model.layers.*.self_attn.q_proj": "blk.*.attn_q",
        "model.layers.*.self_attn.k_proj": "blk.*.attn_k",
        "model.layers.*.self_attn.v_proj": "blk.*.attn_v",
        "model.layers.*.self_attn.dense": "blk.*.attn_output",
        "model.layers.*.mlp.fc1": "blk.*.ffn_up",
        "model.layers.*.mlp.fc2": "blk.*.ffn_down",
    },
    model=partial(Builder.model, norm_bias=True, head_bias=True),
)
