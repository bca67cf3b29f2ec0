"""Tiny random models of every family, as transformers builds them, and as files of both formats.

`TINY` names them; `build` gives the float32 reference, `folder` and `gguf` the same weights on disk. A model
is in `TINY` because it turns on something that no other one turns on; where a feature cannot be said in a GGUF
file, `architecture` is None and only the folder exists.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType, MethodType
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.models import tiny_folder, tiny_gguf, tiny_text, tiny_weights

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB_SIZE: Final = 300
N_PROMPT: Final = 48
N_GREEDY: Final = 64
# Cached values and products of other shapes sum in another order; float32 leaves that much.
TOLERANCE: Final = 1e-4
WINDOW: Final = 16  # smaller than the prompt, so that it matters

_BASE: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": tiny_text.BOS,
    "eos_token_id": tiny_text.EOS,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
}
_GPT2: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": tiny_text.BOS,
    "eos_token_id": tiny_text.EOS,
}


_OLMO3: Final[Mapping[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
_LINEAR: Final[Mapping[str, Any]] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
_ALPHA: Final[Mapping[str, Any]] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}
_MUSE: Final[Mapping[str, Any]] = {
    "num_hidden_layers": 5,
    "head_dim": 32,
    "sliding_window": WINDOW,
    "output_multiplier": 0.9,
    "final_logit_softcapping": 3.0,
    "qk_scale_factor": 2.5,
}
_GRANITE: Final[Mapping[str, Any]] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.35,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.8,
}


_VISION: Final[Mapping[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """What one tiny model is made of."""

    kind: str  # the class in transformers, as config.json names it
    architecture: str | None  # general.architecture in GGUF; None: cannot be said there
    config: Mapping[str, Any]
    storage: str = "F32"  # F32, F16, BF16, "quantised": Q8_0 and Q4_0 mixed; or "MXFP4": experts alone
    context: int | None = None  # to be asked for, where the arithmetic depends on it
    n_prompt: int = N_PROMPT


def _llama(architecture: str | None = "llama", storage: str = "F32", **config: Any) -> TinyModel:
    return TinyModel("LlamaForCausalLM", architecture, {**_BASE, **config}, storage)


def _made(kind: str, architecture: str | None, **config: Any) -> TinyModel:
    return TinyModel(kind, architecture, {**_BASE, **config})


def _layer_normed(kind: str, architecture: str | None, **config: Any) -> TinyModel:
    base = {key: value for key, value in _BASE.items() if key != "rms_norm_eps"}
    return TinyModel(kind, architecture, {**base, **config})


def _yarn() -> dict[str, Any]:
    return {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}


_EXPERTS: Final[Mapping[str, Any]] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _qwen3_moe(architecture: str | None, **config: Any) -> TinyModel:
    return _made("Qwen3MoeForCausalLM", architecture, **{"head_dim": 32, **_EXPERTS, "norm_topk_prob": True, **config})


def _vl_moe() -> TinyModel:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = _qwen3_moe("qwen3moe", head_dim=16, moe_intermediate_size=40)
    vision = {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    return _with_vision("Qwen3VLMoeForConditionalGeneration", "qwen3vlmoe", text, vision, **rope)


def _glm4_moe(architecture: str | None, **config: Any) -> TinyModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    router = {"first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "n_shared_experts": 1, "n_routed_experts": 6}
    sizes = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, "use_qk_norm": True}
    more = {"num_nextn_predict_layers": 0, "attention_bias": True, "rope_parameters": rope}
    return _made("Glm4MoeForCausalLM", architecture, **{**router, **sizes, **more, **config})


def _deepseek(kind: str, architecture: str | None, **config: Any) -> TinyModel:
    """Every width of its own; the norms of compressed rows have one epsilon, which only GGUF files state."""
    latent = {"q_lora_rank": 24, "kv_lora_rank": 48, "qk_nope_head_dim": 20, "qk_rope_head_dim": 16, "v_head_dim": 12}
    router = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2}
    more = {"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "routed_scaling_factor": 1.7}
    return _made(kind, architecture, **{**latent, **router, **more, **config})


def _deepseek_yarn(mscale: float) -> dict[str, Any]:
    return {**_yarn(), "mscale": mscale, "mscale_all_dim": mscale}


def _ernie4_5_moe() -> TinyModel:
    router = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2}
    return _made("Ernie4_5_MoeForCausalLM", "ernie4_5-moe", **router, moe_layer_start_index=1, tie_word_embeddings=True)


def _gpt_oss(architecture: str | None, *, truncate: bool, **config: Any) -> TinyModel:
    rope = {**_yarn(), "beta_fast": 32.0, "beta_slow": 1.0, "truncate": truncate}
    sizes = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16}
    sizes |= {"num_hidden_layers": 4, "sliding_window": WINDOW}
    return _made("GptOssForCausalLM", architecture, **{**sizes, "rope_parameters": rope, **config})


def _laguna(architecture: str | None, **config: Any) -> TinyModel:
    whole = {**_yarn(), "partial_rotary_factor": 0.5}
    rope = {"full_attention": whole, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    kinds = ["full_attention", *["sliding_attention"] * 3]
    sizes = {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": WINDOW, "layer_types": kinds}
    sizes |= {"num_attention_heads_per_layer": [4, 6, 6, 6], "shared_expert_intermediate_size": 40, "gating": True}
    more = {"moe_routed_scaling_factor": 1.7, "rope_parameters": rope}
    return _made("LagunaForCausalLM", architecture, **{**_EXPERTS, **sizes, **more, **config})


def _granite_moe(kind: str, **config: Any) -> TinyModel:
    sizes = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40}
    return _made(kind, "granitemoe", **{**_GRANITE, **sizes, **config})


def _ministral3(kind: str) -> TinyModel:
    # The factor of queries changes within the prompt, and again behind it.
    rope = {**_yarn(), "original_max_position_embeddings": 20, "llama_4_scaling_beta": 0.3, "mscale": 1.0}
    return _made(kind, "mistral3", head_dim=32, rope_parameters={**rope, "mscale_all_dim": 1.0})


def _gemma3(
    local_base: float = 1e4, config: Mapping[str, Any] | None = None, *, scaled_windows: bool = False, **scaling: Any
) -> TinyModel:
    local = _LINEAR if scaled_windows else {"rope_type": "default", "rope_theta": local_base}
    rope = {"sliding_attention": local, "full_attention": {"rope_type": "default", "rope_theta": 1e6, **scaling}}
    # Every sixth layer is global in the files people have, and a GGUF file need not say so: hence seven layers.
    sizes = {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": WINDOW}
    return _made("Gemma3ForCausalLM", "gemma3", **{**sizes, "rope_parameters": rope, **(config or {})})


def _gemma4(kind: str = "Gemma4ForCausalLM", **config: Any) -> TinyModel:
    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    local = {"rope_type": "default", "rope_theta": 1e4}
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0}
    sizes |= {"rope_parameters": {"sliding_attention": local, "full_attention": rope}, "final_logit_softcapping": 8.0}
    return _made(kind, "gemma4", **{**sizes, **config})


def _gemma4_shared(**config: Any) -> TinyModel:
    """As E2B: the last layers read earlier keys and values and have wider blocks; every layer has its own input."""
    kinds = ["sliding_attention", "full_attention"] * 3
    shared = {"num_hidden_layers": 6, "layer_types": kinds, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    own = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE}
    return _gemma4(**{**shared, **own, **config})


def _with_vision(
    kind: str, architecture: str | None, text: TinyModel, vision: Mapping[str, Any], **rope: Any
) -> TinyModel:
    """A model of two parts, of which one takes pictures."""
    stated = getattr(transformers, kind).config_class.sub_configs["text_config"]  # or any, as that of mistral3
    own_type = getattr(transformers, text.kind).config_class.model_type
    model_type = getattr(stated, "model_type", own_type)
    own = {**text.config, "model_type": model_type, **({"rope_parameters": rope} if rope else {})}
    return TinyModel(kind, architecture, {"text_config": own, "vision_config": vision})


def _gemma2(architecture: str | None, scalar: int) -> TinyModel:
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    sizes = {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "query_pre_attn_scalar": scalar,
        "sliding_window": WINDOW,
    }
    return _made("Gemma2ForCausalLM", architecture, **sizes, **caps)


def _phi3(rope: Mapping[str, Any] | None = None, **config: Any) -> TinyModel:
    return _made("Phi3ForCausalLM", "phi3", **{"original_max_position_embeddings": 256, **config}, rope_parameters=rope)


def _long_phi3(context: int | None, n_prompt: int, share: float, **config: Any) -> TinyModel:
    n = int(16 * share) // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": share,
        "short_factor": [1.0 + 0.05 * i for i in range(n)],
        "long_factor": [1.0 + 0.9 * i for i in range(n)],
    }
    sizes = {"max_position_embeddings": 1024, "original_max_position_embeddings": 256}
    made = _made("Phi3ForCausalLM", "phi3", rope_parameters=rope, **sizes, **config)
    return TinyModel(made.kind, made.architecture, made.config, context=context, n_prompt=n_prompt)


def _mamba(kind: str, architecture: str | None, **config: Any) -> TinyModel:
    base = {key: _BASE[key] for key in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = {"num_hidden_layers": 3, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False}
    return TinyModel(kind, architecture, {**base, **sizes, **config})


def _mamba2(architecture: str | None, **config: Any) -> TinyModel:
    sizes = {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 32}
    return _mamba("Mamba2ForCausalLM", architecture, **{**sizes, **config})


def _falcon_h1(architecture: str | None, **config: Any) -> TinyModel:
    mixer = {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 16, "mamba_chunk_size": 32}
    factors = {
        "embedding_multiplier": 2.5,
        "lm_head_multiplier": 0.9,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 1.2,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.8,
        "mlp_multipliers": [1.4, 0.6],
        "ssm_multipliers": [0.7, 1.1, 0.9, 1.2, 0.8],
    }
    return _made("FalconH1ForCausalLM", architecture, **{**mixer, **factors, "head_dim": 16, **config})


def _lfm2(architecture: str | None, **config: Any) -> TinyModel:
    sizes = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "norm_eps": 1e-5}
    exact = {"block_auto_adjust_ff_dim": False, "intermediate_size": 96, "tie_word_embeddings": False}
    return _made("Lfm2ForCausalLM", architecture, **{**sizes, **exact, **config})


def _qwen35(architecture: str | None, kind: str = "Qwen3_5ForCausalLM", **config: Any) -> TinyModel:
    delta = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
    sizes = {"num_hidden_layers": 5, "head_dim": 32, "rope_parameters": rope, "tie_word_embeddings": False}
    return _made(kind, architecture, **{**delta, **sizes, **config})


_NEMOTRON_EXPERTS: Final[Mapping[str, Any]] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}


def _nemotron_h(architecture: str | None, **config: Any) -> TinyModel:
    sizes = {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        "head_dim": 16,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 32,
    }
    base = {key: value for key, value in _BASE.items() if key not in ("num_hidden_layers", "rms_norm_eps")}
    return TinyModel("NemotronHForCausalLM", architecture, {**base, **sizes, **config})


_MAMBA2: Final = {"mamba_d_state": 16, "mamba_n_heads": 8, "mamba_chunk_size": 32}


def _granite_hybrid(architecture: str | None, **config: Any) -> TinyModel:
    sizes = {"shared_intermediate_size": 80, "num_local_experts": 0, **_MAMBA2}
    kinds = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    return _made("GraniteMoeHybridForCausalLM", architecture, **{**_GRANITE, **sizes, **kinds, **config})


TINY: Final[Mapping[str, TinyModel]] = MappingProxyType(
    {
        "llama": _llama(),
        "llama-tied": _llama(tie_word_embeddings=True),
        "llama-3.1": _llama(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500.0,  # so that a head of 16 has short waves, long ones and some between
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        ),
        "llama-linear": _llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
        "llama-bias": _llama(attention_bias=True, mlp_bias=True),
        "llama-f16": _llama(storage="F16"),
        "llama-bf16": _llama(storage="BF16"),
        "llama-quantised": _llama(storage="quantised"),
        "mistral": _made("MistralForCausalLM", "llama", sliding_window=None),
        "mistral-window": _made("MistralForCausalLM", None, sliding_window=WINDOW),
        "qwen2": _made("Qwen2ForCausalLM", "qwen2"),
        "qwen2-tied": _made("Qwen2ForCausalLM", "qwen2", tie_word_embeddings=True),
        "qwen2-window": _made(
            "Qwen2ForCausalLM", None, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
        ),
        "qwen2-yarn": _made("Qwen2ForCausalLM", "qwen2", rope_parameters=_yarn()),
        "qwen3": _made("Qwen3ForCausalLM", "qwen3", head_dim=16),
        "qwen3-wide": _made("Qwen3ForCausalLM", "qwen3", head_dim=32, tie_word_embeddings=True),
        "qwen3-yarn": _made("Qwen3ForCausalLM", "qwen3", head_dim=32, rope_parameters=_yarn()),
        "qwen3-vl": _with_vision(
            "Qwen3VLForConditionalGeneration",
            "qwen3vl",
            _made("Qwen3ForCausalLM", "qwen3", head_dim=16),
            {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
            **{"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        ),
        "gemma2": _gemma2("gemma2", scalar=32),
        "gemma2-scalar": _gemma2(None, scalar=20),  # only the 27B model has one, which GGUF readers know by its size
        "gemma3": _gemma3(),
        "gemma3-linear": _gemma3(rope_type="linear", factor=8.0),
        "gemma3-scaled-windows": replace(_gemma3(scaled_windows=True), architecture=None),
        # Rnj-1.
        "gemma3-whole": _gemma3(
            config={"num_hidden_layers": 4, "sliding_window_pattern": 1},
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=64,
        ),
        "gemma3-vision": _with_vision("Gemma3ForConditionalGeneration", "gemma3", _gemma3(), _VISION),
        "gemma3-stated": _gemma3(500.0, {"num_hidden_layers": 4, "sliding_window_pattern": 3}),
        "gemma4": _gemma4(attention_k_eq_v=True, num_global_key_value_heads=1),
        "gemma4-shared": _gemma4_shared(),
        "gemma4-moe": _gemma4(
            enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=32, attention_k_eq_v=True
        ),
        "gemma4-vision": _with_vision(
            "Gemma4ForConditionalGeneration", None, _gemma4_shared(num_hidden_layers=8, layer_types=None), _VISION
        ),
        "gemma4-unified-vision": _with_vision(
            "Gemma4UnifiedForConditionalGeneration",
            None,
            _gemma4("Gemma4UnifiedForCausalLM", attention_k_eq_v=True),
            {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 64},
        ),
        "gemma4-unified": replace(_gemma4("Gemma4UnifiedForCausalLM", attention_k_eq_v=True), architecture=None),
        "gemma": _made("GemmaForCausalLM", "gemma", head_dim=32, hidden_act="gelu_pytorch_tanh"),
        "smollm3": _made("SmolLM3ForCausalLM", "smollm3", num_hidden_layers=4),
        "smollm3-listed": _made("SmolLM3ForCausalLM", None, no_rope_layers=[0, 1, 1]),
        "granite": _made("GraniteForCausalLM", "granite", **_GRANITE),
        "olmo2": _made("Olmo2ForCausalLM", "olmo2"),
        "olmo3": _made("Olmo3ForCausalLM", "olmo2", num_hidden_layers=4, sliding_window=WINDOW, rope_parameters=_OLMO3),
        "olmo3-scaled-windows": _made(
            "Olmo3ForCausalLM",
            None,
            num_hidden_layers=4,
            sliding_window=WINDOW,
            rope_parameters={**_OLMO3, "sliding_attention": _LINEAR},
        ),
        "exaone4": _made("Exaone4ForCausalLM", "exaone4", sliding_window=None, layer_types=["full_attention"] * 3),
        "exaone4-window": _made("Exaone4ForCausalLM", "exaone4", num_hidden_layers=4, sliding_window=WINDOW),
        "seed-oss": _made("SeedOssForCausalLM", "seed_oss", head_dim=32),
        "glm4": _made("Glm4ForCausalLM", "glm4", head_dim=32),
        # The text part of GLM-4.1V and GLM-4.6V-Flash, whose GGUF files go by the same name.
        "glm4-sections": _made(
            "Glm4ForCausalLM",
            "glm4",
            head_dim=32,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 3, 3],
            },
        ),
        "ernie4.5": _made("Ernie4_5ForCausalLM", "ernie4_5", head_dim=32),
        "hunyuan": _made("HunYuanDenseV1ForCausalLM", "hunyuan-dense", head_dim=32),
        "hunyuan-alpha": _made("HunYuanDenseV1ForCausalLM", "hunyuan-dense", head_dim=32, rope_parameters=_ALPHA),
        "arcee": _made("ArceeForCausalLM", "arcee", rope_parameters=_yarn()),
        "starcoder2": _layer_normed("Starcoder2ForCausalLM", "starcoder2", norm_epsilon=1e-5),
        "starcoder2-window": _layer_normed("Starcoder2ForCausalLM", None, norm_epsilon=1e-5, sliding_window=WINDOW),
        "stablelm": _layer_normed("StableLmForCausalLM", "stablelm", use_qkv_bias=True, partial_rotary_factor=0.25),
        "stablelm-parallel": _layer_normed("StableLmForCausalLM", "stablelm", use_parallel_residual=True),
        "phi2": _layer_normed("PhiForCausalLM", "phi2", num_key_value_heads=4, intermediate_size=256),
        "gptneox": _layer_normed("GPTNeoXForCausalLM", "gptneox", num_key_value_heads=4),
        "gptneox-serial": _layer_normed(
            "GPTNeoXForCausalLM", "gptneox", num_key_value_heads=4, use_parallel_residual=False
        ),
        "command-r": _layer_normed("CohereForCausalLM", "command-r", logit_scale=0.8),
        "cohere2": _layer_normed(
            "Cohere2ForCausalLM", "cohere2", logit_scale=0.8, num_hidden_layers=4, sliding_window=WINDOW
        ),
        "mistral3": _ministral3("Ministral3ForCausalLM"),
        "mistral3-vision": _with_vision(
            "Mistral3ForConditionalGeneration", "mistral3", _ministral3("Ministral3ForCausalLM"), _VISION
        ),
        # Mistral Small 3.1 and 3.2.
        "mistral3-plain": _with_vision(
            "Mistral3ForConditionalGeneration",
            "mistral3",
            _made("MistralForCausalLM", None, sliding_window=None),
            _VISION,
        ),
        "muse-glimmer": _with_vision(
            "MuseGlimmerForConditionalGeneration", "muse-glimmer", _made("MuseGlimmerTextModel", None, **_MUSE), _VISION
        ),
        "phi3": _phi3(),
        "phi3-window": _phi3(sliding_window=WINDOW),
        "phi3-partial": _phi3({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}),
        "phi3-short": _long_phi3(context=None, n_prompt=N_PROMPT, share=1.0),
        "phi3-long": _long_phi3(context=512, n_prompt=272, share=1.0),
        "phi4-mini": _long_phi3(context=512, n_prompt=272, share=0.75, tie_word_embeddings=True),
        "gpt2": TinyModel("GPT2LMHeadModel", "gpt2", _GPT2),
        "mixtral": _made("MixtralForCausalLM", "llama", num_local_experts=4, num_experts_per_tok=2),
        "qwen3-moe": _qwen3_moe("qwen3moe"),
        "qwen2-moe": _made(
            "Qwen2MoeForCausalLM", "qwen2moe", **_EXPERTS, shared_expert_intermediate_size=40, decoder_sparse_step=1
        ),
        "qwen3-vl-moe": _vl_moe(),
        "deepseek-v2": _deepseek(
            "DeepseekV2ForCausalLM",
            None,  # llama.cpp takes the two best of a group
            q_lora_rank=None,
            first_k_dense_replace=1,
            topk_method="group_limited_greedy",
            n_group=3,
            topk_group=2,
            rope_parameters=_deepseek_yarn(0.707),
        ),
        # llama.cpp takes a model of 27 layers for the one whose queries are not compressed.
        "deepseek-v2-lite": _deepseek(
            "DeepseekV2ForCausalLM",
            "deepseek2",
            num_hidden_layers=27,
            q_lora_rank=None,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            rope_parameters=_deepseek_yarn(0.707),
        ),
        "deepseek-v3": _deepseek(
            "DeepseekV3ForCausalLM",
            "deepseek2",
            first_k_dense_replace=1,
            n_group=3,
            topk_group=2,
            rope_parameters=_deepseek_yarn(1.0),
        ),
        "glm-4.7-flash": _deepseek("Glm4MoeLiteForCausalLM", "deepseek2"),
        "glm4-moe": _glm4_moe("glm4moe"),
        "olmoe": _made(
            "OlmoeForCausalLM",
            "olmoe",
            num_experts=6,
            num_experts_per_tok=2,
            num_key_value_heads=4,
            intermediate_size=40,
        ),
        # llama.cpp truncates where YaRN's ramp begins and ends, which the published config does not.
        "gpt-oss": _gpt_oss("gpt-oss", truncate=True),
        "gpt-oss-mxfp4": replace(_gpt_oss("gpt-oss", truncate=True), storage="MXFP4"),
        "gpt-oss-untruncated": _gpt_oss(None, truncate=False),
        "laguna": _laguna("laguna"),
        "laguna-bias": _laguna(None, attention_bias=True),
        "ernie4-5-moe": _ernie4_5_moe(),
        "granite-moe": _granite_moe("GraniteMoeSharedForCausalLM", shared_intermediate_size=56),
        "granite-moe-unshared": _granite_moe("GraniteMoeForCausalLM"),
        "qwen3-moe-unnormed": _qwen3_moe(None, norm_topk_prob=False),
        "qwen3-moe-window": _qwen3_moe(None, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
        "qwen3-moe-mixed": _qwen3_moe(None, decoder_sparse_step=2, num_hidden_layers=4, mlp_only_layers=[3]),
        "mamba": _mamba("MambaForCausalLM", "mamba", state_size=8, tie_word_embeddings=True),
        "mamba-bias": _mamba("MambaForCausalLM", None, use_bias=True, use_conv_bias=False, expand=3, conv_kernel=3),
        # The two norms have one epsilon: GGUF files state only one.
        "falcon-mamba": _mamba("FalconMambaForCausalLM", "mamba", state_size=8, mixer_rms_eps=1e-5),
        "mamba2": _mamba2("mamba2"),
        "mamba2-groups": _mamba2("mamba2", n_groups=2),
        "mamba2-limits": _mamba2(None, use_bias=True, time_step_limit=[0.1, 0.5], tie_word_embeddings=True),
        "falcon-h1": _falcon_h1("falcon-h1"),
        "falcon-h1-norm": _falcon_h1(
            "falcon-h1", mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=2, head_dim=32
        ),
        "falcon-h1-bias": _falcon_h1(
            None,
            mamba_rms_norm=True,
            mamba_proj_bias=True,
            projectors_bias=True,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
        "nemotron-h": _nemotron_h("nemotron_h"),
        "nemotron-h-bias": _nemotron_h(None, use_bias=True, mlp_bias=True, time_step_min=0.3),
        "granite-hybrid": _granite_hybrid("granitehybrid"),
        "granite-hybrid-rope": _granite_hybrid(
            None, position_embedding_type="rope", mamba_proj_bias=True, attention_bias=True
        ),
        "bamba": _made("BambaForCausalLM", None, attn_layer_indices=[1], **_MAMBA2),
        # llama.cpp's converter orders the rows of a head as if all of it turned.
        "bamba-whole-heads": _made(
            "BambaForCausalLM",
            "granitehybrid",
            attn_layer_indices=[1],
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            **_MAMBA2,
        ),
        "granite-hybrid-moe": _granite_hybrid("granitehybrid", num_local_experts=4, num_experts_per_tok=2),
        "granite-hybrid-unshared": _granite_hybrid(
            None, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=0
        ),
        "nemotron-h-moe": _nemotron_h("nemotron_h_moe", **_NEMOTRON_EXPERTS, routed_scaling_factor=1.7),
        "nemotron-h-latent": _nemotron_h("nemotron_h_moe", **_NEMOTRON_EXPERTS, moe_latent_size=32),
        "lfm2-moe": _made(
            "Lfm2MoeForCausalLM",
            "lfm2moe",
            **_EXPERTS,
            num_dense_layers=1,
            layer_types=["conv", "full_attention", "conv"],
        ),
        "qwen35-moe": _qwen35("qwen35moe", "Qwen3_5MoeForCausalLM", **_EXPERTS, shared_expert_intermediate_size=40),
        "qwen3-next": _qwen35("qwen3next", "Qwen3NextForCausalLM", **_EXPERTS, shared_expert_intermediate_size=40),
        "lfm2": _lfm2("lfm2"),
        "qwen35": _qwen35("qwen35"),
        "qwen35-vision": _with_vision(
            "Qwen3_5ForConditionalGeneration",
            None,
            _qwen35(None, num_hidden_layers=4),
            {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
        ),
        "qwen35-moe-vision": _with_vision(
            "Qwen3_5MoeForConditionalGeneration",
            None,
            _qwen35(None, "Qwen3_5MoeForCausalLM", **_EXPERTS, shared_expert_intermediate_size=40, num_hidden_layers=4),
            {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
        ),
        "qwen35-wide": _qwen35(
            None,
            linear_value_head_dim=24,
            linear_num_value_heads=6,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            num_hidden_layers=3,
            tie_word_embeddings=True,
        ),
        "lfm2-adjusted": _lfm2(
            None, conv_bias=True, conv_L_cache=4, block_auto_adjust_ff_dim=True, block_multiple_of=16
        ),
    }
)

CASES: Final = [
    (name, form)
    for name, model in TINY.items()
    for form in ("gguf", "current", "original")
    if form != "gguf" or model.architecture is not None
]

# Prompts after which no greedy choice is a near tie, where the first prompt has one.
_PROMPT_SEEDS: Final[Mapping[str, int]] = {
    "nemotron-h-bias": 2,
    "qwen2-moe": 1,
    "gpt-oss-untruncated": 1,
    "llama": 1,
    "llama-quantised": 1,
    "qwen2": 2,
    "qwen2-yarn": 1,
    "qwen3-wide": 1,
    "gemma2-scalar": 2,
    "gemma3-linear": 1,
    "gemma3-scaled-windows": 10,
    "gemma4-unified": 2,
    "mistral3-plain": 1,
    "phi3-long": 1,
    "gpt2": 1,
    "exaone4": 1,
    "hunyuan": 1,
    "gptneox": 1,
    "cohere2": 1,
}


@cache
def build(name: str) -> Any:
    """The reference: transformers' model with this tiny model's weights, in float32. Not to be changed."""
    tiny = TINY[name]
    kind = getattr(transformers, tiny.kind)
    config = kind.config_class(**json.loads(json.dumps(dict(tiny.config))), attn_implementation="eager")
    model = as_trained(kind(config).eval())
    tiny_weights.fill(model, name, tiny.storage)
    return model


def as_trained(model: Any) -> Any:
    """The model with what transformers computes otherwise than those who trained such models put right.

    mamba2 norms each group of channels alone; transformers' class of that name norms all of them together.
    """
    if model.config.model_type == "mamba2" and model.config.n_groups > 1:
        for layer in model.backbone.layers:
            layer.mixer.norm.forward = MethodType(_norm_by_groups, layer.mixer.norm)
            layer.mixer.norm.n_groups = model.config.n_groups
    return model


def _norm_by_groups(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    gated = (x * torch.nn.functional.silu(gate)).view(*x.shape[:-1], norm.n_groups, -1)
    normed = torch.nn.functional.rms_norm(gated, gated.shape[-1:], eps=norm.variance_epsilon).flatten(-2)
    weight: Tensor = norm.weight
    return weight * normed


def folder(name: str, tmp: Path, *, style: tiny_folder.Style = "current", shard_size: str | None = None) -> Path:
    """The model as a safetensors folder under `tmp`, written once."""
    path = tmp / f"{name}-{style}{'-sharded' if shard_size else ''}"
    if not path.exists():
        tiny_folder.write(build(name), path, storage=TINY[name].storage, style=style, shard_size=shard_size)
    return path


def gguf(name: str, tmp: Path, *, parts: int = 1, numbered: bool = False) -> Path:
    """The model as a GGUF file under `tmp`, or the first of `parts` files, written once. `numbered`: each token's text
    is its number, so that any answer is text."""
    tiny = TINY[name]
    assert tiny.architecture is not None, f"{name} cannot be said in a GGUF file"
    path = tmp / f"{name}{'-numbered' if numbered else ''}.gguf"
    first = path if parts == 1 else tmp / f"{name}-00001-of-{parts:05d}.gguf"
    if not first.exists():
        config, tensors = tiny_gguf.text_part(*parts_of(name, tmp))
        change = _number_tokens if numbered else lambda _: None
        tiny_gguf.write(path, tiny.architecture, config, tensors, storage=tiny.storage, parts=parts, change=change)
    return first


def _number_tokens(metadata: dict[str, Any]) -> None:
    tokens = metadata["tokenizer.ggml.tokens"].value
    n = len(tiny_text.CONTROL_TOKENS)
    tokens[n:] = [f"{id:03}" for id in range(n, len(tokens))]


def written(name: str, form: str, tmp: Path) -> Path:
    """The model on disk in one of the forms of `CASES`: a GGUF file, or a folder with a manner of config.json."""
    if form == "gguf":
        return gguf(name, tmp)
    return folder(name, tmp, style="original" if form == "original" else "current")


def parts_of(name: str, tmp: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The model's config.json and its tensors by their names in a folder, to be written again otherwise."""
    source = folder(name, tmp)
    return json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")


def prompt(name: str) -> list[int]:
    """Random ids, the same for every format of one model; no control tokens."""
    random = torch.Generator().manual_seed(_PROMPT_SEEDS.get(name, 0))
    ids: list[int] = torch.randint(3, VOCAB_SIZE, (TINY[name].n_prompt,), generator=random).tolist()
    return ids


@cache
def reference_logits(name: str) -> Tensor:
    """float32 [n_prompt, vocab]: transformers' logits for `prompt(name)`."""
    return forward(name, prompt(name))


_GREEDY: Final[dict[str, tuple[int, ...]]] = {}


def reference_greedy(name: str, guess: Sequence[int] = ()) -> tuple[int, ...]:
    """The 64 ids after `prompt(name)`, each as a whole forward pass chooses it, so that no cache can be wrong. One pass
    judges a guess: what it chooses after every part of it. From the first wrong id on, there is a pass for each."""
    if name not in _GREEDY:
        ids = prompt(name)
        chosen = forward(name, [*ids, *guess])[len(ids) - 1 :].argmax(-1).tolist()
        n_right = next((n for n, id in enumerate(guess) if id != chosen[n]), len(guess))
        ids += chosen[: n_right + 1]
        while len(ids) < TINY[name].n_prompt + N_GREEDY:
            ids.append(int(forward(name, ids)[-1].argmax()))
        _GREEDY[name] = tuple(ids[TINY[name].n_prompt :][:N_GREEDY])
    return _GREEDY[name]


def clearest_margin(name: str) -> float:
    """The smallest distance between the best and the second-best logit along the greedy path."""
    ids = [*prompt(name), *reference_greedy(name)]
    best = forward(name, ids)[TINY[name].n_prompt - 1 : -1].topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def forward(name: str, ids: list[int]) -> Tensor:
    """transformers' logits [len(ids), vocab], in float32."""
    with torch.inference_mode():
        logits: Tensor = build(name)(torch.tensor([ids]), use_cache=False).logits[0]
    return logits
