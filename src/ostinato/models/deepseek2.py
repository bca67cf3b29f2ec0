"""deepseek2: DeepSeek V2 and V3, GLM-4.7-Flash: multi-head latent attention, leading dense layers, then routed experts
beside shared ones. V2 chooses experts by softmax, V3 and GLM by sigmoids with a bias of the choice.

Compressed rows have norms whose epsilon folders do not state: 1e-6 in their authors' code. GGUF files have one for all.
"""

from dataclasses import replace
from typing import Any

from ostinato.errors import BadFile, Unsupported
from ostinato.models import rope as ropes
from ostinato.models.experts import (
    DEEPSEEK_EPSILON,
    EXPERT_NAMES,
    count_from_config,
    deepseek_from_config,
    expert_groups,
    experts_from_gguf,
    shared_names,
)
from ostinato.models.family import COMMON_NAMES, Family
from ostinato.models.fields import Description, Fields, n_further_layers
from ostinato.models.rope import Rope
from ostinato.models.shape import (
    AttentionShape,
    ExpertShape,
    LatentShape,
    LayerShape,
    Shape,
    activation_from_config,
    layer_types,
    limited,
    vocab_rows,
)

V2 = "DeepseekV2ForCausalLM"
FOLDER_EPS = 1e-6
# GGUF files of GLM-4.7-Flash that do not state how experts are scored are known by their vocabulary.
GLM_VOCAB = 154_880


def latent_attention(n_heads: int, rope: Rope, latent: LatentShape, mscale: float) -> AttentionShape:
    """All heads attend to one key: what is rotated, then the compressed row."""
    return AttentionShape(
        n_heads=n_heads,
        n_kv_heads=1,
        head_width=rope.width + latent.kv_rank,
        value_width=latent.kv_rank,
        query_scale=(latent.plain_width + rope.width) ** -0.5 * mscale**2,
        rope=rope,
        latent=latent,
    )


def shape_from_gguf(f: Description) -> Shape:
    if scale := f.number("attention.temperature_scale", 0.0):  # Mistral Large 3
        raise Unsupported(
            f"{f.path}: {f.prefix}attention.temperature_scale is {scale:g}; latent attention whose queries grow with "
            "their position is not supported"
        )
    eps = f.positive("attention.layer_norm_rms_epsilon")
    n_layers = limited(f.integer("block_count"), f) - n_further_layers(f)
    # Until April 2025 one tensor expanded compressed rows, and the widths of what it gives stood under the usual keys.
    suffix = "" if "blk.0.attn_kv_b.weight" in f.tensors else "_mla"
    n_rotary, whole = f.integer("rope.dimension_count"), f.integer(f"attention.key_length{suffix}")
    if whole <= n_rotary:
        raise BadFile(f"{f.path}: of a head's {whole} elements {n_rotary} turn by rotary positions; some must not")
    latent = LatentShape(
        kv_rank=f.integer("attention.kv_lora_rank"),
        q_rank=f.integer("attention.q_lora_rank", 0, least=0) or None,
        plain_width=whole - n_rotary,
        value_width=f.integer(f"attention.value_length{suffix}"),
        norm_eps=eps,
    )
    rope, mscale = ropes.from_gguf(f, n_rotary, "neighbours"), 1.0
    if f.has("rope.scaling.yarn_log_multiplier"):  # a tenth of mscale_all_dim, and mscale is the same
        factor, share = f.positive("rope.scaling.factor", 1.0), 10 * f.number("rope.scaling.yarn_log_multiplier")
        rope = replace(rope, amplitude=f.positive("rope.scaling.attn_factor", 1.0))
        mscale = ropes.yarn_amplitude(factor, share)
    attention = latent_attention(f.integer("attention.head_count"), rope, latent, mscale)
    return Shape(
        family=f.family,
        hidden=f.integer("embedding_length"),
        vocab=vocab_rows(f),
        context=f.integer("context_length"),
        norm_eps=eps,
        layers=(LayerShape(attention, ff_width=f.integer("feed_forward_length")),) * n_layers,
        experts=_experts_from_gguf(f, n_layers) if f.integer("expert_count", 0, least=0) else None,
        tied_head="output.weight" not in f.tensors,
    )


def _experts_from_gguf(f: Description, n_layers: int) -> ExpertShape:
    biased = any(name.endswith("exp_probs_b.bias") for name in f.tensors)
    known: dict[str, Any] = {"choice_bias": biased, "sum_epsilon": DEEPSEEK_EPSILON}
    if not f.has("expert_gating_func") and vocab_rows(f) == GLM_VOCAB:
        known["scoring"] = "sigmoid"
    experts = experts_from_gguf(f, n_layers, **known)
    n_best = 1 if experts.scoring == "softmax" else 2
    return replace(experts, groups=expert_groups(f, "expert_group_count", "expert_group_used_count", n_best=n_best))


def shape_from_config(c: Description) -> Shape:
    n_layers, n_rotary = limited(c.integer("num_hidden_layers"), c), c.integer("qk_rope_head_dim")
    latent = LatentShape(
        kv_rank=c.integer("kv_lora_rank"),
        q_rank=c.integer("q_lora_rank") if c.has("q_lora_rank") else None,
        plain_width=c.integer("qk_nope_head_dim"),
        value_width=c.integer("v_head_dim"),
        norm_eps=FOLDER_EPS,
    )
    _check_repeated(c)
    if c.flag("mlp_bias", False):
        raise Unsupported(f"{c.path}: mlp_bias is true; latent attention beside blocks with a bias is not supported")
    rope = ropes.from_config(c, n_rotary, "neighbours" if c.flag("rope_interleave", True) else "halves")
    attention = latent_attention(c.integer("num_attention_heads"), rope, latent, _mscale(c))
    return Shape(
        family=c.family,
        hidden=c.integer("hidden_size"),
        vocab=c.integer("vocab_size"),
        context=c.integer("max_position_embeddings"),
        norm_eps=c.positive("rms_norm_eps", 1e-6),
        layers=(LayerShape(attention, ff_width=c.integer("intermediate_size")),) * n_layers,
        activation=activation_from_config(c),
        experts=_experts_from_config(c, n_layers),
        attention_bias=c.flag("attention_bias", False),
        tied_head=c.flag("tie_word_embeddings", False),
    )


def _check_repeated(c: Description) -> None:
    """Refuse keys that differ from the one that they repeat; V2's class does not read `head_dim`."""
    repeated = {"num_key_value_heads": "num_attention_heads", "head_dim": "qk_rope_head_dim"}
    if c.checkpoint.architecture == V2:
        del repeated["head_dim"]
    for key, first in repeated.items():
        if c.integer(key, c.integer(first)) != c.integer(first):
            raise BadFile(f"{c.path}: {key} is {c.raw(key)} and {first} {c.raw(first)}; they must be equal")


def _mscale(c: Fields) -> float:
    """What yarn adds to the scores of a head as a whole."""
    settings = ropes.settings_of(c)
    share = settings.number("mscale_all_dim", 0.0)
    return ropes.yarn_amplitude(settings.positive("factor", 1.0), share) if share else 1.0


def _experts_from_config(c: Description, n_layers: int) -> ExpertShape | None:
    if not (c.has("n_routed_experts") or c.has("num_local_experts") or c.has("num_experts")):
        return None
    if c.checkpoint.architecture == V2:
        return _v2_experts(c, n_layers)
    experts = deepseek_from_config(c, n_layers)
    if not c.has("mlp_layer_types"):
        return experts
    kinds = layer_types(c, n_layers, ("dense", "sparse"), key="mlp_layer_types")
    return replace(experts, dense_layers=frozenset(i for i, kind in enumerate(kinds) if kind == "dense"))


def _v2_experts(c: Fields, n_layers: int) -> ExpertShape:
    width, method = c.integer("moe_intermediate_size"), c.word("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise Unsupported(f"{c.path}: topk_method is {method!r}; known: greedy, group_limited_greedy")
    return ExpertShape(
        count_from_config(c),
        c.integer("num_experts_per_tok"),
        width,
        renormalise=False,
        dense_layers=frozenset(range(min(n_layers, c.integer("first_k_dense_replace", 0, least=0)))),
        groups=expert_groups(c, "n_group", "topk_group", n_best=1) if method != "greedy" else None,
        share_scale=c.positive("routed_scaling_factor", 1.0),
        shared_width=width * c.integer("n_shared_experts", 0, least=0),
    )


DEEPSEEK2 = Family(
    "deepseek2",
    hf=(V2, "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
    kind_defaults={
        V2: {"q_lora_rank": 1536, "n_routed_experts": 64, "n_shared_experts": 2},
        "DeepseekV3ForCausalLM": {
            "q_lora_rank": 1536,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
        },
        "Glm4MoeLiteForCausalLM": {
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.8,
        },
    },
    shape_from_gguf=shape_from_gguf,
    shape_from_config=shape_from_config,
    names={
        **COMMON_NAMES,
        **EXPERT_NAMES,
        **shared_names("shared_experts"),
        "model.layers.*.mlp.gate.e_score_correction_bias": "blk.*.exp_probs_b.bias",
        "model.layers.*.self_attn.q_a_proj": "blk.*.attn_q_a",
        "model.layers.*.self_attn.q_a_layernorm": "blk.*.attn_q_a_norm",
        "model.layers.*.self_attn.q_b_proj": "blk.*.attn_q_b",
        "model.layers.*.self_attn.kv_a_proj_with_mqa": "blk.*.attn_kv_a_mqa",
        "model.layers.*.self_attn.kv_a_layernorm": "blk.*.attn_kv_a_norm",
        "model.layers.*.self_attn.kv_b_proj": "blk.*.attn_kv_b",
    },
)
