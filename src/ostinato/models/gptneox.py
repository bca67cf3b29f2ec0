"""gptneox (Pythia): layer norms, attention and a plain feed-forward block in parallel behind a norm each, a quarter of
each head rotated, everything with a bias. Safetensors keep q, k and v of each head together, GGUF all q, all k, all v.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ostinato.models import rope as ropes
from ostinato.models.builder import Builder
from ostinato.models.family import Family
from ostinato.models.fields import Description
from ostinato.models.shape import Shape, activation_from_config, alike, common_from_gguf, limited
from ostinato.models.tensors import Transform


def shape_from_gguf(f: Description) -> Shape:
    parallel = f.flag("use_parallel_residual", True)
    return replace(common_from_gguf(f), activation="gelu", attention_bias=True, mlp_bias=True, parallel=parallel)


def shape_from_config(c: Description) -> Shape:
    hidden, n_heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    base, share = c.positive("rotary_emb_base", 10_000.0), c.positive("rotary_pct", 0.25)
    return alike(
        c.family,
        rope=ropes.from_config(c, hidden // n_heads, default_base=base, rotary_share=share),
        n_layers=limited(c.integer("num_hidden_layers"), c),
        hidden=hidden,
        n_heads=n_heads,
        ff_width=c.integer("intermediate_size"),
        vocab=c.integer("vocab_size"),
        context=c.integer("max_position_embeddings"),
        norm_eps=c.positive("layer_norm_eps", 1e-5),
        activation=activation_from_config(c),
        attention_bias=c.flag("attention_bias", True),
        mlp_bias=True,
        parallel=c.flag("use_parallel_residual", True),
        tied_head=c.flag("tie_word_embeddings", False),
    )


def by_part(shape: Shape) -> Mapping[str, Transform]:
    """q, k and v of each head to all q, all k and all v."""

    def values(stored: NDArray[np.float32]) -> NDArray[np.float32]:
        heads = stored.reshape(shape.widest(lambda a: a.n_heads), 3, -1, *stored.shape[1:])
        return heads.swapaxes(0, 1).reshape(stored.shape)

    return dict.fromkeys(("attn_qkv.weight", "attn_qkv.bias"), Transform(values=values))


GPTNEOX = Family(
    "gptneox",
    partial(Builder.layer, fused=True, mlp=Builder.plain_mlp, norm_bias=True),
    hf=("GPTNeoXForCausalLM",),
    config_defaults={"hidden_act": "gelu"},
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    shape_transforms=by_part,
    names={
        "gpt_neox.embed_in": "token_embd",
        "gpt_neox.final_layer_norm": "output_norm",
        "embed_out": "output",
        "lm_head": "output",
        "gpt_neox.layers.*.input_layernorm": "blk.*.attn_norm",
        "gpt_neox.layers.*.attention.query_key_value": "blk.*.attn_qkv",
        "gpt_neox.layers.*.attention.dense": "blk.*.attn_output",
        "gpt_neox.layers.*.post_attention_layernorm": "blk.*.ffn_norm",
        "gpt_neox.layers.*.mlp.dense_h_to_4h": "blk.*.ffn_up",
        "gpt_neox.layers.*.mlp.dense_4h_to_h": "blk.*.ffn_down",
    },
    model=partial(Builder.model, norm_bias=True),
)
