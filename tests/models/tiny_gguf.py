"""A tiny model as a GGUF file: the keys, tensor names and layouts that converted models have.

Reads the safetensors folder of the same model and writes with the `gguf` package. What a family keeps
differently in GGUF (rows of Q and K in pairs, norms plus one, stacked experts, transposed matrices) is done
here and nowhere else; that llama.cpp reads the result as meant is tested beside.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from torch import Tensor

from tests.models import tiny_text, tiny_weights

Config = Mapping[str, Any]
# Architectures whose converter is llama's: rows of Q and K stand so that rotary pairs are neighbours.
PAIRED: Final = (
    "llama", "smollm3", "granite", "granitemoe", "granitehybrid", "arcee", "mistral3", "muse-glimmer",
)  # fmt: skip


def write(
    path: Path,
    architecture: str,
    config: Config,
    tensors: Mapping[str, Tensor],
    *,
    storage: str = "F32",
    parts: int = 1,
    change: Callable[[dict[str, Any]], object] = lambda metadata: None,
    vocabulary: Callable[[Any], None] | None = None,
) -> None:
    """One GGUF file at `path`, or `parts` of them named after it; `change` may spoil the metadata before."""
    # The package lacks these names; the tensors of others are called alike.
    known = {"muse-glimmer": "gemma3", "laguna": "dots1"}.get(architecture, architecture)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    converted = list(_converted(architecture, config, tensors))
    per_part = math.ceil(len(converted) / parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=per_part)
    _add_metadata(writer, architecture, config)
    (vocabulary or _add_vocabulary)(writer)
    change(writer.kv_data[0])
    names = gguf.get_tensor_name_map(arch, _n_layers(config))
    for name, value in converted:
        # Names with no counterpart in a folder (the rotation's factors) are GGUF names already.
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        data, type_ = tiny_weights.pack(value.float().numpy(), tiny_weights.block_type(name, storage))
        writer.add_tensor(new_name, data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def text_part(config: Config, tensors: Mapping[str, Tensor]) -> tuple[Config, Mapping[str, Tensor]]:
    """What a converter takes of a model of several parts; all of a model that has one."""
    if "text_config" not in config:
        return config, tensors
    own = {
        name.replace("language_model.model.", "model.").replace("model.language_model.", "model."): value
        for name, value in tensors.items()
        if "language_model" in name or name.startswith("lm_head")
    }
    return config["text_config"], own


def _n_layers(config: Config) -> int:
    return int(config.get("num_hidden_layers") or config.get("n_layer") or len(config["layers_block_type"]))


def _rope(config: Config) -> dict[str, Any]:
    rope: dict[str, Any] = config.get("rope_parameters") or {}
    found: dict[str, Any] = rope.get("full_attention", rope)
    return found


def _add_metadata(writer: Any, architecture: str, config: Config) -> None:
    special = {
        "gpt2": _add_gpt2,
        "phi3": _add_phi3,
        "gemma2": _add_gemma2,
        "mamba": _add_mamba,
        "mamba2": _add_mamba2,
        "falcon-h1": _add_falcon_h1,
        "lfm2": _add_lfm2,
        "nemotron_h": _add_nemotron_h,
        "granitehybrid": _add_granite_hybrid,
        "nemotron_h_moe": _add_nemotron_h,
        "lfm2moe": _add_lfm2,
        **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), _add_qwen35),
        "deepseek2": _add_deepseek2,
        "gemma4": _add_gemma4,
        "bert": _add_encoder,
        "nomic-bert": _add_encoder,
        "modern-bert": _add_modern_bert,
    }
    if architecture in special:
        special[architecture](writer, config)
        return
    # A model with key heads for all its heads may not say how many.
    _add_common(writer, {"num_key_value_heads": config["num_attention_heads"], **config})
    if architecture in PAIRED:
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(
            config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        )
    head_width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if architecture in ("glm4", "stablelm", "phi2", "gptneox", "cohere2"):
        writer.add_rope_dimension_count(int(_rope(config).get("partial_rotary_factor", 1.0) * head_width))
    if architecture in ("stablelm", "gptneox"):
        writer.add_parallel_residual(config["use_parallel_residual"])
    if architecture in ("olmo2", "exaone4", "cohere2", "muse-glimmer") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture in ("olmo2", "exaone4", "muse-glimmer") and config.get("sliding_window"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if architecture in ("command-r", "cohere2"):
        writer.add_logit_scale(config["logit_scale"])
    if architecture == "muse-glimmer":
        writer.add_logit_scale(config["output_multiplier"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "mistral3" and "llama_4_scaling_beta" in _rope(config):
        writer.add_rope_scaling_yarn_log_mul(_rope(config)["mscale_all_dim"])
        writer.add_attn_temperature_scale(_rope(config)["llama_4_scaling_beta"])
    if "mrope_section" in _rope(config):
        writer.add_rope_dimension_sections([*_rope(config)["mrope_section"], 0])
    if architecture in ("qwen3vl", "qwen3vlmoe"):
        writer.add_num_deepstack_layers(1)
    if architecture in ("granite", "granitemoe"):
        _add_granite_factors(writer, config)
    if architecture in ("gemma3", "gemma-embedding"):
        _add_gemma3(writer, config)
    if architecture == "gemma-embedding":
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        for number, (width, out) in ((2, (64, 96)), (3, (96, 64))):
            writer.add_uint32(f"gemma-embedding.dense_{number}_feat_in", width)
            writer.add_uint32(f"gemma-embedding.dense_{number}_feat_out", out)
    _add_experts(writer, architecture, config)


def _add_experts(writer: Any, architecture: str, config: Config) -> None:
    if width := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(width)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if architecture == "laguna":
        _add_laguna(writer, config)
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "granitemoe" and config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if architecture == "ernie4_5-moe":
        writer.add_expert_count(config["moe_num_experts"])
        writer.add_expert_used_count(config["moe_k"])
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
        # As the converter has it, which is the width of the shared block in the published sizes.
        shared = config["intermediate_size"] // config["num_key_value_heads"]
        assert shared == config["moe_num_shared_experts"] * config["moe_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(shared)
    if architecture == "glm4moe":
        writer.add_rope_dimension_count(int(config["head_dim"] * _rope(config)["partial_rotary_factor"]))
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])


def _add_granite_factors(writer: Any, config: Config) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _add_granite_hybrid(writer: Any, config: Config) -> None:
    is_bamba = config["model_type"] == "bamba"
    if is_bamba:
        attends = [layer in config["attn_layer_indices"] for layer in range(_n_layers(config))]
    else:
        attends = [kind == "full_attention" for kind in config["layer_types"]]
    sizes: dict[str, Any] = {"num_key_value_heads": [config["num_key_value_heads"] * one for one in attends]}
    routed = bool(config.get("num_local_experts"))
    if not is_bamba:
        width = config["intermediate_size" if routed else "shared_intermediate_size"]
        sizes |= {"intermediate_size": width, "max_position_embeddings": 2**20}
    _add_common(writer, {**config, **sizes})
    if routed:
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if not is_bamba:
        _add_granite_factors(writer, config)
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_scaling_finetuned(is_bamba)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_group_count(config["mamba_n_groups"])


def _add_deepseek2(writer: Any, config: Config) -> None:
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    _add_common(writer, {**config, "num_key_value_heads": 1, "head_dim": rotary, "num_local_experts": None})
    kinds = config.get("mlp_layer_types") or []
    writer.add_leading_dense_block_count(config.get("first_k_dense_replace") or kinds.count("dense"))
    writer.add_vocab_size(config["vocab_size"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    widths, expanded = (rank + rotary, rank), (config["qk_nope_head_dim"] + rotary, config["v_head_dim"])
    if config.get("kv_b_whole"):  # as until April 2025
        widths = expanded
        writer.kv_data[0].pop("deepseek2.attention.head_count_kv")
        writer.add_head_count_kv(config["num_key_value_heads"])
    else:
        writer.add_key_length_mla(expanded[0])
        writer.add_value_length_mla(expanded[1])
    for key, width in zip(("key_length", "value_length"), widths, strict=True):
        writer.kv_data[0].pop(f"deepseek2.attention.{key}", None)
        getattr(writer, f"add_{key}")(width)
    writer.add_rope_dimension_count(rotary)
    if (mscale := _rope(config).get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    scoring = "SOFTMAX" if config["model_type"] == "deepseek_v2" else "SIGMOID"
    writer.add_expert_gating_func(getattr(gguf.ExpertGatingFuncType, scoring))
    if config["n_group"] > 1:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _expanding(name: str, value: Tensor, config: Config) -> Iterator[tuple[str, Tensor]]:
    """What expands compressed rows, apart: of keys the other way round."""
    heads = value.view(config["num_attention_heads"], -1, value.shape[-1])
    keys, values = torch.split(heads, [config["qk_nope_head_dim"], config["v_head_dim"]], 1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2).contiguous()
    yield name.replace("kv_b_proj", "v_b_proj"), values.contiguous()


def _add_laguna(writer: Any, config: Config) -> None:
    whole, local = (config["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention"))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_head_count(config["num_attention_heads_per_layer"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config["moe_routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    writer.add_rope_dimension_count(int(config["head_dim"] * whole["partial_rotary_factor"]))
    writer.add_rope_dimension_count_swa(int(config["head_dim"] * local.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base_swa(local["rope_theta"])


def _add_sizes(writer: Any, config: Config) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(config.get("layer_norm_eps") or config["norm_epsilon"])


def _add_common(writer: Any, config: Config) -> None:
    _add_sizes(writer, config)
    rope = _rope(config)
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    alpha = rope.get("alpha") or 1.0
    writer.add_rope_freq_base(rope["rope_theta"] * alpha ** (width / (width - 2)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if n_experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(n_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def _add_gemma3(writer: Any, config: Config) -> None:
    if config["_sliding_window_pattern"] == 1:
        return  # no layer sees a window
    writer.add_sliding_window(config["sliding_window"])
    local_base = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    if local_base != 10_000:
        writer.add_rope_freq_base_swa(local_base)
    if config["_sliding_window_pattern"] != 6:
        writer.add_sliding_window_pattern(config["_sliding_window_pattern"])


def _add_gemma4(writer: Any, config: Config) -> None:
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    n_shared, ff = config["num_kv_shared_layers"], config["intermediate_size"]
    wide = next(iter(config["per_layer_config"].values()))
    n_whole = wide.get("num_key_value_heads")
    sizes: dict[str, Any] = {"head_dim": None, "num_experts": None}
    if n_whole is not None:
        sizes["num_key_value_heads"] = [config["num_key_value_heads"] if one else n_whole for one in sliding]
    if config["use_double_wide_mlp"]:
        sizes["intermediate_size"] = [ff] * (len(sliding) - n_shared) + [2 * ff] * n_shared
    _add_common(writer, {**config, **sizes})
    writer.add_shared_kv_layers(n_shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(sliding)
    for name, width in (("", wide["head_dim"]), ("_swa", config["head_dim"])):
        for what in ("key_length", "value_length", "rope_dimension_count"):
            getattr(writer, f"add_{what}{name}")(width)
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _gemma4_part(name: str) -> str:
    """A name as the map knows it, or GGUF's own."""
    layer = name.split(".layers.")[-1].split(".")[0]
    own = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    for part, ours in own.items():
        if name.endswith(part):
            return f"blk.{layer}.{ours}"
    return f"{name}.weight" if name.endswith(("layer_scalar", "gate_up_proj", "experts.down_proj")) else name


def _add_gemma2(writer: Any, config: Config) -> None:
    assert _rope(config)["rope_theta"] == 10_000  # the converter writes no key for it
    _add_sizes(writer, config)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _add_phi3(writer: Any, config: Config) -> None:
    _add_sizes(writer, config)
    rope = _rope(config)
    original = config["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    share = rope.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(share * config["hidden_size"]) // config["num_attention_heads"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_sliding_window(config["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def _add_gpt2(writer: Any, config: Config) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _add_recurrent(writer: Any, config: Config) -> None:
    """Attention and feed-forward are said to be there with nothing in them, as llama.cpp wants it."""
    writer.add_context_length(2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["state_size"])


def _add_mamba(writer: Any, config: Config) -> None:
    _add_recurrent(writer, config)
    writer.add_ssm_inner_size(config["intermediate_size"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])
    writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")


def _add_mamba2(writer: Any, config: Config) -> None:
    _add_recurrent(writer, config)
    writer.add_ssm_inner_size(config["num_heads"] * config["head_dim"])
    writer.add_ssm_time_step_rank(config["num_heads"])
    writer.add_ssm_group_count(config["n_groups"])


def _add_falcon_h1(writer: Any, config: Config) -> None:
    _add_common(writer, config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_inner_size(config["mamba_d_ssm"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_group_count(config["mamba_n_groups"])


def _add_lfm2(writer: Any, config: Config) -> None:
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    kv_heads = [config["num_key_value_heads"] if one else 0 for one in attends]
    _add_common(writer, {**config, "num_key_value_heads": kv_heads, "rms_norm_eps": config["norm_eps"]})
    writer.add_vocab_size(config["vocab_size"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_qwen35(writer: Any, config: Config) -> None:
    _add_common(writer, config)
    rope = _rope(config)
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(4)


def _add_nemotron_h(writer: Any, config: Config) -> None:
    kinds = config["layers_block_type"]
    widths = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
    writer.add_block_count(len(kinds))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length([widths.get(kind, 0) for kind in kinds])
    if "moe" in kinds:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        if config["moe_latent_size"]:
            writer.add_moe_latent_size(config["moe_latent_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    writer.add_ssm_group_count(config["n_groups"])


def _add_encoder(writer: Any, config: Config) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    unused = config["pad_token_id"] + 1 if config["model_type"] == "xlm-roberta" else 0
    writer.add_context_length(config["max_position_embeddings"] - unused)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    if config["pooling"] is not None:
        writer.add_pooling_type(gguf.PoolingType[config["pooling"].upper()])
    if config["pooling"] == "rank":
        writer.add_classifier_output_labels(list(config["id2label"].values()))
    if config["model_type"] == "nomic_bert":
        writer.add_rope_freq_base(_rope(config)["rope_theta"])


def _add_modern_bert(writer: Any, config: Config) -> None:
    _add_encoder(writer, {**config, "layer_norm_eps": config["norm_eps"]})
    writer.add_sliding_window(config["local_attention"])
    writer.add_sliding_window_pattern(3)
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_string("modern-bert.hidden_act", config["hidden_activation"])


def _add_vocabulary(writer: Any) -> None:
    tokens = tiny_text.vocabulary()
    n_control = len(tiny_text.CONTROL_TOKENS)
    kinds = [gguf.TokenType.CONTROL] * n_control + [gguf.TokenType.NORMAL] * (len(tokens) - n_control)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tiny_text.MERGES])
    writer.add_bos_token_id(tiny_text.BOS)
    writer.add_eos_token_id(tiny_text.EOS)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tiny_text.CHAT_TEMPLATE)


def _converted(architecture: str, config: Config, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors under their names in a folder, laid out as GGUF has them; then those that only GGUF has."""
    if architecture == "gpt-oss":
        apart = _gpt_oss_experts(tensors)
    elif architecture == "gemma4":
        apart = iter((_gemma4_part(name), value) for name, value in tensors.items())
    else:
        apart = _parts_of_experts(_stacked_experts(tensors))
    for name, value in apart:
        if architecture in PAIRED and name.endswith(("q_proj.weight", "q_proj.bias")):
            value = _in_pairs(value, config["num_attention_heads"])
        elif architecture in PAIRED and name.endswith(("k_proj.weight", "k_proj.bias")):
            value = _in_pairs(value, config["num_key_value_heads"])
        elif (architecture in ("gemma", "gemma2", "gemma3", "gemma-embedding") and name.endswith("norm.weight")) or (
            architecture == "muse-glimmer" and name.endswith("layernorm.weight")
        ):
            value = value + 1
        elif architecture == "laguna" and re.search(r"g_proj|shared_experts?\.|e_score_correction_bias", name):
            name = _laguna_name(name)
        elif architecture == "muse-glimmer" and name.endswith("gate_proj.weight") and "self_attn" in name:
            # The factor of queries becomes the weights of their norm.
            at, width = f"blk.{name.split('.')[2]}", config["head_dim"]
            yield f"{at}.attn_q_norm.weight", torch.full((width,), float(config["qk_scale_factor"]))
            yield f"{at}.attn_k_norm.weight", torch.ones(width)
            name = f"{at}.attn_gate.weight"
        elif architecture == "gptneox" and "query_key_value" in name:
            heads = value.view(config["num_attention_heads"], 3, -1, *value.shape[1:])
            value = heads.transpose(0, 1).reshape(value.shape)
        elif name.endswith("kv_b_proj.weight") and not config.get("kv_b_whole"):
            yield from _expanding(name, value, config)
            continue
        elif name.endswith("e_score_correction_bias"):
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        elif architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            value = value.T.contiguous()
        elif architecture == "granitehybrid" and "_shexp" in name and not config.get("num_local_experts"):
            name = name.replace("_shexp", "")  # the shared block is the only one
        elif architecture == "granitehybrid" and "shared_mlp." in name and not config.get("num_local_experts"):
            name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
        elif architecture == "glm4" and "mrope_section" in _rope(config) and re.search(r"\.[qk]_proj\.", name):
            value = _in_halves(value, config["head_dim"], _rope(config)["partial_rotary_factor"])
        elif architecture in ("mamba", "mamba2", "falcon-h1", "nemotron_h", "nemotron_h_moe", "granitehybrid"):
            name, value = _mixer_part(name, _multiplied(name, value, config), config)
        elif architecture.startswith("lfm2"):
            name = name.replace(".expert_bias", ".expert_bias.bias")
            value = value.squeeze(1) if name.endswith("conv.conv.weight") else value
        elif name.endswith("in_proj_qkvz.weight"):
            qkv, value = _delta_inputs(value, config)
            yield name.replace("in_proj_qkvz", "in_proj_qkv"), qkv
            name = name.replace("in_proj_qkvz", "in_proj_z")
        elif architecture in ("qwen35", "qwen35moe", "qwen3next"):
            name, value = _delta_part(name, value, config)
        elif architecture == "modern-bert":
            name = name.removeprefix("model.")
            ranks = config["pooling"] == "rank"
            if name.startswith(("decoder.", "head.")) and not ranks:
                continue
            parts = {"head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output"}
            stem, _, leaf = name.rpartition(".")
            name = f"{parts.get(stem, stem)}.{leaf}"
        elif architecture in ("bert", "nomic-bert"):
            name = _encoder_name(name, config)
            if config["model_type"] == "xlm-roberta" and "position_embeddings" in name:
                value = value[config["pad_token_id"] + 1 :]
            if name.startswith(("pooler.", "cls.predictions.")):
                continue
        yield name, value
    rope = _rope(config)
    if rope.get("rope_type") == "llama3":
        yield (
            "rope_freqs.weight",
            _llama3_factors(rope, config["hidden_size"] // config["num_attention_heads"]),
        )
    if rope.get("rope_type") == "proportional":
        n = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
        n_turned = int(n * rope["partial_rotary_factor"])
        yield "rope_freqs.weight", torch.tensor([1.0] * n_turned + [1e30] * (n - n_turned))
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])


def _encoder_name(name: str, config: Config) -> str:
    """The name that the map knows; a ranking head's two layers are `cls` and `cls.output`."""
    name = name.removeprefix("roberta.").removeprefix("bert.")
    if config["pooling"] == "rank":
        name = name.replace("pooler.dense", "cls").replace("classifier.dense", "cls")
        name = name.replace("classifier.out_proj", "cls.output").replace("classifier", "cls.output")
    return name


def _mixer_part(name: str, value: Tensor, config: Config) -> tuple[str, Tensor]:
    """A part of a mamba mixer as GGUF has it: decay as it is, the vectors of mamba2 as columns, its norm by groups."""
    leaf = name.rpartition(".")[2]
    value = -torch.exp(value) if leaf == "A_log" else value
    if leaf in ("A_log", "D") and config["model_type"].removeprefix("falcon_") != "mamba":
        value = value.unsqueeze(-1)
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        value = value.view(config.get("n_groups") or config["mamba_n_groups"], -1)
    if name.endswith("conv1d.weight"):
        value = value.squeeze(1)
    return name.replace(".dt_bias", ".dt_proj.bias"), value.contiguous()


def _multiplied(name: str, value: Tensor, config: Config) -> Tensor:
    """falcon-h1 with its factors in its weights."""
    if config["model_type"] != "falcon_h1":
        return value
    into, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors: dict[str, float] = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "q_proj": into,
        "k_proj": into * config["key_multiplier"],
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
    }
    part = name.split(".")[-2]
    if part != "in_proj":
        return value * factors.get(part, 1.0)
    shared = config["mamba_n_groups"] * config["mamba_d_state"]
    rows = [config["mamba_d_ssm"], config["mamba_d_ssm"], shared, shared, config["mamba_n_heads"]]
    factor = torch.cat([torch.full((n,), f) for n, f in zip(rows, config["ssm_multipliers"], strict=True)])
    return value * float(config["ssm_in_multiplier"]) * factor.unsqueeze(-1)


def _delta_part(name: str, value: Tensor, config: Config) -> tuple[str, Tensor]:
    """A tensor of a gated delta net: decays as they are, and value heads with the same key head apart."""
    n_keys, n_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    n_shared = 2 * n_keys * config["linear_key_head_dim"]  # rows of queries and keys, which stay where they are

    def apart(rows: Tensor) -> Tensor:
        if config["model_type"] == "qwen3_next":
            return rows
        heads = rows.reshape(n_keys, n_heads // n_keys, -1, *rows.shape[1:])
        return heads.transpose(0, 1).reshape(rows.shape)

    part = name.partition(".linear_attn.")[2]
    if not part:
        return name, value + 1 if name.endswith("norm.weight") else value
    if part == "A_log":
        return name, apart(-value.exp())
    if part == "dt_bias":
        return name.replace("dt_bias", "dt_proj.bias"), apart(value)
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        value = value.squeeze(1) if part.startswith("conv") else value
        return name, torch.cat((value[:n_shared], apart(value[n_shared:])))
    if part == "out_proj.weight":
        return name, apart(value.T).T.contiguous()
    return name, value if part == "norm.weight" else apart(value)


def _delta_inputs(value: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """qwen3next's query, key and value, and its gate, from rows by key heads."""
    n_keys, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // n_keys * config["linear_value_head_dim"]
    parts = torch.split(value.view(n_keys, -1, value.shape[-1]), [width, width, values, values], 1)
    q, k, v, z = (part.flatten(0, 1) for part in parts)
    return torch.cat((q, k, v)), z


def _in_pairs(value: Tensor, n_heads: int) -> Tensor:
    """Rows of each head from two halves to neighbouring pairs, as llama's rotation wants them in GGUF."""
    halves = value.view(n_heads, 2, value.shape[0] // n_heads // 2, *value.shape[1:])
    return halves.transpose(1, 2).reshape(value.shape)


def _in_halves(value: Tensor, head_dim: int, share: float) -> Tensor:
    """Rows of each head from neighbouring pairs to two halves, as far as the head turns."""
    heads = value.view(-1, head_dim, *value.shape[1:])
    turned, still = heads[:, : int(share * head_dim)], heads[:, int(share * head_dim) :]
    return torch.cat((turned[:, ::2], turned[:, 1::2], still), 1).reshape(value.shape)


def _stacked_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`...experts.3.w1.weight` and its like for all experts become one tensor `...experts.w1.weight`."""
    groups: dict[str, dict[int, Tensor]] = {}
    done = dict(tensors)
    for name, value in tensors.items():
        if re.search(r"\.experts\.\d+\.", name):
            del done[name]
            before, _, after = name.partition(".experts.")
            number, _, matrix = after.partition(".")
            if before.endswith(("block_sparse_moe", "feed_forward")):
                # The name map knows these stacked experts by the names of the first Llama release.
                before = before.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
            before = re.sub(r"backbone\.layers\.(\d+)\.mixer", r"model.layers.\1.mlp", before)
            groups.setdefault(f"{before}.experts.{matrix}", {})[int(number)] = value
    stacked = {name: torch.stack([group[n] for n in sorted(group)]) for name, group in groups.items()}
    return {**done, **stacked}


def _parts_of_experts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Gate and up apart, where a folder has them in one tensor."""
    for name, value in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            name = f"{name}.weight"
        if not name.endswith(("experts.gate_up_proj.weight", "input_linear.weight")):
            yield name, value
            continue
        for part, half in zip(("gate", "up"), value.chunk(2, -2), strict=True):
            yield _part_name(name, part), half.contiguous()


def _gpt_oss_experts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Gate and up, row by row in turn in a folder, apart; matrices as [expert, out, in]."""
    for name, value in tensors.items():
        if name.endswith(".sinks"):
            yield f"{name}.weight", value
        elif ".experts." not in name:
            yield name, value
        else:
            layer, is_bias = name.split(".layers.")[1].split(".")[0], name.endswith("_bias")
            rows, leaf = (value, "bias") if is_bias else (value.transpose(1, 2), "weight")
            parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if "gate_up" in name else {"down": rows}
            for part, own in parts.items():
                yield f"blk.{layer}.ffn_{part}_exps.{leaf}", own.contiguous()


def _laguna_name(name: str) -> str:
    """The gate of attention, the shared block and the bias of the choice as GGUF has them."""
    layer = name.split(".layers.")[1].split(".")[0]
    if "g_proj" in name:
        return f"blk.{layer}.attn_gate.weight"
    if name.endswith("e_score_correction_bias"):
        return f"blk.{layer}.exp_probs_b.bias"
    return f"blk.{layer}.ffn_{name.split('.')[-2].removesuffix('_proj')}_shexp.weight"


def _part_name(name: str, part: str) -> str:
    """The name of gate or up alone, as the name map knows it or as GGUF has it."""
    layer = name.split(".layers.")[1].split(".")[0]
    if "shared_mlp" in name:
        return f"blk.{layer}.ffn_{part}_shexp.weight"
    return f"blk.{layer}.ffn_{part}_exps.weight"


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """By how much each frequency of Llama 3.1 is divided: 1 for short waves, `factor` for long ones, a ramp between."""
    low, high, original = (
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )
    factors = []
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        smooth = min(1.0, max(0.0, (original / wave - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors)
