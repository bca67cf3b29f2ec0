"""gemma4, the text part: layers that see a window and layers that see everything, each kind with heads of its own.

Queries, keys and values are normed by heads, values without a weight, and scores are not scaled. Layers that see
everything turn a share of each head, and may make values of the matrix of keys. E2B and E4B: the last layers read the
keys and values of the last earlier layer of their kind, and every layer takes in its part of a second embedding.
26B-A4B: experts beside the dense block, with norms of their own.
"""

from collections.abc import Sequence
from dataclasses import replace

from ostinato.errors import BadFile, Unsupported
from ostinato.models import rope as ropes
from ostinato.models.blocks import MLP, AnyLayer, ExpertNorms, Layer, ModelBlocks
from ostinato.models.builder import Builder
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description, Fields
from ostinato.models.rope import Rope
from ostinato.models.shape import (
    ExpertShape,
    Shape,
    activation_from_config,
    common_from_config,
    common_from_gguf,
    layer_types,
    sliding_from_gguf,
    with_factors,
)
from ostinato.models.tensors import Transform


def of_two_kinds(
    shape: Shape, sliding: Sequence[bool], window: int, *, local: Rope, whole: Rope, widths: tuple[int, int]
) -> Shape:
    """`widths`: of the heads of layers that see a window, and of those that see everything."""
    width = tuple(widths[0] if one else widths[1] for one in sliding)
    return replace(
        shape.with_attention(
            window=tuple(window if one else None for one in sliding),
            rope=tuple(local if one else whole for one in sliding),
            head_width=width,
            value_width=width,
            query_scale=1.0,
            value_norm=True,
        ),
        activation="gelu_tanh",
        embedding_scale=shape.hidden**0.5,
    )


def with_shared_kv(shape: Shape, n_shared: int, f: Description) -> Shape:
    """The last layers without keys and values of their own."""
    first, windows = max(0, shape.n_layers - n_shared), [one.window for one in shape.attention.values()]
    last_of = {window: layer for layer, window in enumerate(windows[:first])}
    if not all(window in last_of for window in windows[first:]):
        raise BadFile(
            f"{f.path}: the last {n_shared} layers read keys and values of earlier ones of their kind, and "
            f"the first {first} have none of that kind"
        )
    return shape.with_attention(
        kv_from=tuple(None if layer < first else last_of[window] for layer, window in enumerate(windows))
    )


def with_experts(shape: Shape, n_experts: int, n_used: int, ff_width: int) -> Shape:
    """Experts in every layer, and beside them what is the feed-forward block elsewhere."""
    dense = shape.widest_ff
    experts = ExpertShape(n_experts, n_used, ff_width, renormalise=True, shared_width=dense, share_scales=True)
    return replace(shape.with_layers(ff_width=0), experts=experts)


def shape_from_gguf(f: Description) -> Shape:
    shape = common_from_gguf(f)
    sliding = sliding_from_gguf(f, shape.n_layers, 6)
    wide = f.integer("attention.key_length")
    narrow = f.integer("attention.key_length_swa")
    turned = f.integer("rope.dimension_count_swa", narrow)
    local = Rope(f.positive("rope.freq_base_swa", 10_000.0), turned, "halves")
    whole = with_factors(ropes.from_gguf(f, wide, "halves", default_base=1_000_000.0), f)
    window = f.integer("attention.sliding_window")
    shape = of_two_kinds(shape, sliding, window, local=local, whole=whole, widths=(narrow, wide))
    cap = "final_logit_softcapping"
    shape = replace(
        with_shared_kv(shape, f.integer("attention.shared_kv_layers", 0, least=0), f),
        logit_softcap=f.positive(cap) if f.has(cap) else None,
        per_layer_width=f.integer("embedding_length_per_layer_input", 0, least=0),
    )
    # No file says so: its layers that see everything have a matrix of values, or none of them has one.
    whole_layers = frozenset(layer for layer, one in enumerate(sliding) if not one)
    if not any(f"blk.{layer}.attn_v.weight" in f.tensors for layer in whole_layers):
        shape = _with_values_from_keys(shape, whole_layers)
    if not f.has("expert_count") or not f.integer("expert_count", least=0):
        return shape
    used, width = f.integer("expert_used_count"), f.integer("expert_feed_forward_length")
    return with_experts(shape, f.integer("expert_count"), used, width)


def _with_values_from_keys(shape: Shape, layers: frozenset[int]) -> Shape:
    has = (one.kv_from is None and layer in layers for layer, one in shape.attention.items())
    return shape.with_attention(values_from_keys=tuple(has))


def _of_layer(listed: Fields, layer: int) -> Fields:
    """What is stated of one layer; transformers writes the numbers of layers with leading zeros where there are more
    than ten."""
    keys = [key for key in listed.values if key.isdecimal() and int(key) == layer]
    return listed.inside(keys[0] if keys else str(layer))


def shape_from_config(c: Description) -> Shape:
    if c.word("use_bidirectional_attention", "vision") != "vision":
        raise Unsupported(f"{c.path}: a gemma4 whose text tokens see each other in both directions is not supported")
    shape = common_from_config(c)
    sliding = [kind == "sliding_attention" for kind in layer_types(c, shape.n_layers)]
    narrow = c.integer("head_dim")
    # Files state the sizes of layers that see everything in two ways: for all of them, or layer by layer.
    first = next((layer for layer, one in enumerate(sliding) if not one), 0)
    own = _of_layer(c.inside("per_layer_config"), first)
    wide = own.integer("head_dim", c.integer("global_head_dim", narrow if c.has("per_layer_config") else 512))
    usual = shape.attention[0].n_kv_heads
    keys_are_values = c.flag("attention_k_eq_v", False)
    n_whole = own.integer("num_key_value_heads", c.integer("num_global_key_value_heads", usual))
    n_whole = n_whole if keys_are_values or own.has("num_key_value_heads") else usual
    local = ropes.from_config(c, narrow, kind="sliding_attention")
    whole = ropes.from_config(c, wide, kind="full_attention", default_base=1_000_000.0)
    window, cap = c.integer("sliding_window"), "final_logit_softcapping"
    shape = shape.with_attention(n_kv_heads=tuple(usual if one else n_whole for one in sliding))
    shape = of_two_kinds(shape, sliding, window, local=local, whole=whole, widths=(narrow, wide))
    n_shared = c.integer("num_kv_shared_layers", 0, least=0)
    own_width = c.integer("hidden_size_per_layer_input", 0, least=0)
    if own_width and c.integer("vocab_size_per_layer_input", shape.vocab) != shape.vocab:
        raise BadFile(
            f"{c.path}: vocab_size_per_layer_input is {c.raw('vocab_size_per_layer_input')} and vocab_size "
            f"{shape.vocab}; they must be equal"
        )
    shape = replace(
        with_shared_kv(shape, n_shared, c),
        activation=activation_from_config(c, c.word("hidden_activation", "gelu_pytorch_tanh")),
        logit_softcap=c.positive(cap) if c.has(cap) else None,
        per_layer_width=own_width,
        tied_head=c.flag("tie_word_embeddings", True),
    )
    if keys_are_values:
        shape = _with_values_from_keys(shape, frozenset(layer for layer, one in enumerate(sliding) if not one))
    if c.flag("use_double_wide_mlp", False) and n_shared:
        ff, once = shape.widest_ff, shape.n_layers - n_shared
        shape = shape.with_layers(ff_width=(ff,) * once + (2 * ff,) * n_shared)
    if not c.flag("enable_moe_block", False):
        return shape
    return with_experts(shape, c.integer("num_experts"), c.integer("top_k_experts"), c.integer("moe_intermediate_size"))


def layer(b: Builder, i: int) -> Layer:
    made = b.layer(i, mlp=mlp, sandwich=True, qk_norm=True)
    scaled = any(b.names.has(_out_scale(layer)) for layer in range(b.shape.n_layers))  # all layers, or none
    return replace(
        made,
        per_layer=b.per_layer_input(i) if b.shape.per_layer_width else None,
        out_scale=b.tensor(_out_scale(i), 1, exact=True) if scaled else None,
    )


def _out_scale(layer: int) -> str:
    return f"blk.{layer}.layer_output_scale.weight"


def mlp(b: Builder, i: int) -> MLP:
    if b.shape.experts is None:
        return b.gated_mlp(i)
    at = f"blk.{i}."
    norms = ExpertNorms(
        router=b.norm(at + "router_norm"),
        experts=b.norm(at + "pre_ffw_norm_2"),
        after_experts=b.norm(at + "post_ffw_norm_2"),
        after_shared=b.norm(at + "post_ffw_norm_1"),
    )
    return replace(b.experts(i, shared_suffix=""), norms=norms)


def model(b: Builder, layers: Sequence[AnyLayer]) -> ModelBlocks:
    """Files may repeat the tensors of keys and values where layers do not use their own."""
    made = b.model(layers)
    unused = (layer for layer, one in b.shape.attention.items() if one.kv_from is not None)
    parts = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
    return replace(
        made,
        per_layer=b.per_layer_embedding() if b.shape.per_layer_width else None,
        spare=made.spare | {f"blk.{layer}.{part}" for layer in unused for part in parts},
    )


def router_norm(shape: Shape) -> dict[str, Transform]:
    """The factors on what the router takes in, behind a norm without a weight, as the weight of that norm."""
    return {"router_norm.weight": Transform(values=lambda stored: stored * shape.hidden**-0.5)}


NAMES = {
    **COMMON_NAMES,
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.layers.*.post_attention_layernorm": "blk.*.post_attention_norm",
    "model.layers.*.pre_feedforward_layernorm": "blk.*.ffn_norm",
    "model.layers.*.post_feedforward_layernorm": "blk.*.post_ffw_norm",
    "model.layers.*.pre_feedforward_layernorm_2": "blk.*.pre_ffw_norm_2",
    "model.layers.*.post_feedforward_layernorm_1": "blk.*.post_ffw_norm_1",
    "model.layers.*.post_feedforward_layernorm_2": "blk.*.post_ffw_norm_2",
    "model.layers.*.layer_scalar": "blk.*.layer_output_scale.weight",
    "model.layers.*.per_layer_input_gate": "blk.*.inp_gate",
    "model.layers.*.per_layer_projection": "blk.*.proj",
    "model.layers.*.post_per_layer_input_norm": "blk.*.post_norm",
    "model.layers.*.router.proj": "blk.*.ffn_gate_inp",
    "model.layers.*.router.scale": "blk.*.router_norm.weight",
    "model.layers.*.router.per_expert_scale": "blk.*.ffn_down_exps.scale",
    "model.layers.*.experts.gate_up_proj": "blk.*.ffn_gate_up_exps.weight",
    "model.layers.*.experts.down_proj": "blk.*.ffn_down_exps.weight",
}

# What a config.json may leave out.
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
TEXT = {"max_position_embeddings": 131_072, "sliding_window": 512, "hidden_size_per_layer_input": 256}
UNIFIED = {"max_position_embeddings": 262_144, "sliding_window": 1024}

GEMMA4 = Family(
    "gemma4",
    layer,
    hf=("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"),
    text_types=("gemma4_text", "gemma4_unified_text"),
    config_defaults={"rope_parameters": ROPES},
    kind_defaults={
        **dict.fromkeys(("Gemma4ForCausalLM", "gemma4_text"), TEXT),
        **dict.fromkeys(("Gemma4UnifiedForCausalLM", "gemma4_unified_text"), UNIFIED),
    },
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names=NAMES,
    gguf_names={"blk.*.ffn_gate_inp.scale": "blk.*.router_norm.weight"},
    shape_transforms=router_norm,
    gguf_shape_transforms=router_norm,
    model=model,
)
