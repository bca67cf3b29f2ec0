"""A tiny model as a safetensors folder, in the two manners of config.json that people have.

"current" is what transformers 5 writes. "original" is what the families' authors published: `rope_theta` and
`rope_scaling`, no `layer_types`, defaults left out, and in old files buffers that no model needs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from tests.models import tiny_text, tiny_weights

Style = Literal["current", "original"]
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


def write(model: Any, folder: Path, *, storage: str, style: Style, shard_size: str | None) -> None:
    """Save `model` under `folder` with its tokenizer."""
    folder.mkdir(parents=True)
    dtype = _DTYPES.get(storage, torch.float32)
    state = {name: value.to(dtype) for name, value in model.state_dict().items()}
    model.config.dtype = dtype
    model.save_pretrained(folder, state_dict=state, max_shard_size=shard_size or "1GB")
    model.config.dtype = torch.float32
    tiny_text.write_files(folder)
    if style == "original":
        config_path = folder / "config.json"
        config = json.loads(config_path.read_text())
        old = original_config(config)
        if storage == "MXFP4":
            old["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        config_path.write_text(json.dumps(old, indent=2))
        _rewrite_tensors(folder / "model.safetensors", config, storage)


def original_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same facts under the names of the first releases."""
    if "text_config" in config:
        return {**config, "text_config": _original_text(config["text_config"])}
    kind = config["model_type"]
    if kind == "laguna":
        return dict(config)  # published as newer tools write it
    if kind in ("gemma4_text", "gemma4_unified_text"):
        return _original_gemma4(config)
    newer = (
        ("rope_parameters",)
        if kind.startswith(("qwen3_5", "exaone4", "lfm2_moe"))
        else ("layer_types", "rope_parameters")
    )
    old = {key: value for key, value in config.items() if key not in newer}
    old["torch_dtype"] = old.pop("dtype")
    old.pop("transformers_version")
    if kind in ("gemma", "gemma2", "gemma3_text", "gpt2", "cohere", "cohere2", "starcoder2", "ernie4_5") or (
        kind == "mamba" and config["tie_word_embeddings"]
    ):
        old.pop("tie_word_embeddings")  # true by default there
    if kind in ("llama", "mistral", "mixtral", "qwen2") and old.get("head_dim") is not None:
        assert old["head_dim"] * old["num_attention_heads"] == old["hidden_size"]
        old.pop("head_dim")
    if kind == "lfm2":
        old["full_attn_idxs"] = [i for i, one in enumerate(config["layer_types"]) if one == "full_attention"]
        old["block_ff_dim"] = old.pop("intermediate_size")
    if kind == "gpt_neox":
        rope = config["rope_parameters"]
        named = {"rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"]}
        return {**old, **named}
    if kind == "cohere2":
        old["rotary_pct"] = 1.0
    if kind == "deepseek_v3":
        old["scoring_func"] = "sigmoid"
    if kind == "glm4_moe_lite":
        old["first_k_dense_replace"] = old.pop("mlp_layer_types").count("dense")
    if kind == "nemotron_h":
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        old["hybrid_override_pattern"] = "".join(letters[one] for one in old.pop("layers_block_type"))
    if kind == "granitemoehybrid":
        old["layer_types"] = [
            one.replace("linear_attention", "mamba").replace("full_", "") for one in config["layer_types"]
        ]
    if kind == "gemma3_text":
        old["sliding_window_pattern"] = old.pop("_sliding_window_pattern")
    if kind == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    if kind == "qwen2" and not old["use_sliding_window"]:
        old["sliding_window"] = 16  # stated, and not used
    if "time_step_limit" in old:
        low, high = (float(v["__float__"] if isinstance(v, dict) else v) for v in old["time_step_limit"])
        old["time_step_limit"] = [low, high]  # with the word Infinity, which JSON does not know
    return {**old, **_original_rope(config)}


def _original_gemma4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of layers that see everything stand once for all of them."""
    old = {key: value for key, value in config.items() if key not in ("per_layer_config", "dtype")}
    own = next(iter(config["per_layer_config"].values()))
    return {
        **old,
        "torch_dtype": config["dtype"],
        "global_head_dim": own["head_dim"],
        "num_global_key_value_heads": own.get("num_key_value_heads"),
    }


def _original_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text part of a model of several; what is stated for the whole is not repeated in it."""
    whole = {"dtype": "float32", "transformers_version": "5", **config}
    return {key: value for key, value in original_config(whole).items() if key != "torch_dtype"}


def _original_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    if "rope_parameters" not in config:
        return {}
    rope = dict(config["rope_parameters"])
    found = {}
    scaled_windows = rope.get("sliding_attention", {}).get("rope_type", "default") != "default"
    if scaled_windows or (config["model_type"] == "bamba" and rope["partial_rotary_factor"] != 0.5):
        return {"rope_parameters": rope}  # the older keys cannot say it
    if "full_attention" in rope:
        if config["model_type"] != "olmo3":
            found["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    found["rope_theta"] = rope.pop("rope_theta")
    share = rope.pop("partial_rotary_factor", 1.0)
    if share != 1.0:
        found["partial_rotary_factor"] = share
    if config["model_type"] == "phi3":
        rope.pop("original_max_position_embeddings", None)  # stands beside rope_scaling in this family
    if rope["rope_type"] == "default":
        return {**found, "rope_scaling": None}
    if config["model_type"] not in ("gemma3_text", "olmo3") and rope["rope_type"] != "llama3":
        rope["type"] = rope.pop("rope_type")
    return {**found, "rope_scaling": rope}


def _rewrite_tensors(path: Path, config: Mapping[str, Any], storage: str) -> None:
    """GPT-2 was published without the prefix and with its masks; Llama 2 with the frequencies of its rotation; Pythia
    with both; the experts of Qwen3-VL as [expert, in, out], those of Qwen3.5 in one tensor."""
    tensors = load_file(path)
    if config["model_type"] == "gpt2":
        tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        n = config["n_positions"]
        for layer in range(config["n_layer"]):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(n, n).tril().view(1, 1, n, n)
    elif config["model_type"] == "llama":
        frequencies = torch.ones(config["hidden_size"] // config["num_attention_heads"] // 2)
        for layer in range(config["num_hidden_layers"]):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = frequencies.clone()
    elif config["model_type"] == "gpt_neox":
        n = config["max_position_embeddings"]
        for at in (f"gpt_neox.layers.{layer}.attention" for layer in range(config["num_hidden_layers"])):
            tensors[f"{at}.bias"] = torch.ones(1, 1, n, n).tril()
            tensors |= {f"{at}.masked_bias": torch.tensor(-1e9), f"{at}.rotary_emb.inv_freq": torch.ones(2)}
    elif config["model_type"] == "gemma3":
        # As transformers 4.52 and later wrote it.
        old, new = "language_model.model.", "model.language_model."
        tensors = {name.replace(old, new) if old in name else f"model.{name}": value for name, value in tensors.items()}
    elif config["model_type"] == "qwen3_5_moe_text":
        # All experts of a layer in two tensors, gate above up.
        for at in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
            of_layer = [f"{at}.experts.{expert}" for expert in range(config["num_experts"])]
            gate, up, down = (
                torch.stack([tensors.pop(f"{one}.{part}_proj.weight") for one in of_layer])
                for part in ("gate", "up", "down")
            )
            tensors |= {f"{at}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{at}.experts.down_proj": down}
    elif storage == "MXFP4":
        for name in [name for name in tensors if tiny_weights.is_expert_matrix(name)]:
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = tiny_weights.mxfp4_pair(tensors.pop(name))
    elif config["model_type"] == "qwen3_vl_moe":
        experts = [name for name in tensors if ".experts." in name]
        tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in experts}
    save_file(tensors, path, metadata={"format": "pt"})
