"""Random weights that let a mistake be seen: every part of a tiny model moves its logits.

Attention is neither flat nor one-hot, norms are away from one, biases away from zero, and logits have a spread
of about one. What is stored in fewer bits is rounded here first, so that a float32 reference holds exactly the
values that the file holds.
"""

import math
from typing import Any
from zlib import crc32

import gguf
import numpy as np
import torch
from torch import Tensor

# Trained, and no parameters: of routers, and of what a layer gives.
BUFFERS = ("e_score_correction_bias", "expert_bias", "layer_scalar")
_ROUNDED = {"F16": torch.float16, "BF16": torch.bfloat16}


def fill(model: Any, name: str, storage: str) -> None:
    """Give every parameter of `model` its random value; `name` is the seed."""
    buffers = [(at, buffer) for at, buffer in model.named_buffers() if at.endswith(BUFFERS)]
    for parameter_name, parameter in (*model.named_parameters(), *buffers):
        random = torch.Generator().manual_seed(crc32(f"{name}/{parameter_name}".encode()))
        noise = torch.randn(parameter.shape, generator=random, dtype=torch.float32)
        value = _scaled(parameter_name, noise, model)
        with torch.no_grad():
            parameter.copy_(rounded(parameter_name, value, storage))


def _scaled(name: str, noise: Tensor, model: Any) -> Tensor:
    kind = model.config.model_type
    is_gemma = kind.startswith("gemma")
    if kind == "muse_glimmer" and name.endswith("layernorm.weight"):
        return noise * 0.25  # its distance from one
    if name.endswith("A_log"):
        return noise * 0.5
    if name.endswith(("dt_bias", "dt_proj.bias")):
        return noise * 0.5 - 1.5  # with it a state is remembered for about ten tokens
    if name.endswith("bias"):
        return noise * 0.2
    if noise.ndim == 1:
        last = ("model.norm", "ln_f", "norm_f", "final_layernorm", "embedding_norm")
        is_last = name.endswith(tuple(f"{norm}.weight" for norm in last))
        around = (6.0 if is_gemma else 3.0) if is_last and _is_tied(model) else 1.0
        # These store a norm's distance from one, but for that of a gated delta net.
        centred = (is_gemma and not kind.startswith("gemma4")) or (
            kind.startswith(("qwen3_5", "qwen3_next")) and "linear_attn" not in name
        )
        if kind.startswith("gemma4") and "q_norm" in name:
            around = 0.4  # its scores are not scaled
        return noise * 0.25 + around - (1.0 if centred else 0.0)
    if "embed_tokens_per_layer" in name:
        return noise * 0.25
    if "embed_out" in name:
        return noise / math.sqrt(noise.shape[-1])
    if "embed" in name or "wte" in name or "wpe" in name:
        # Small where the head is tied to it: else the greedy choice is the last token for ever. Gemma scales by 8.
        return noise * ((0.02 if is_gemma else 0.04) if _is_tied(model) else 0.4)
    fan_in = noise.shape[0] if kind == "gpt2" else noise.shape[-1]
    gains = {
        "q_proj": 1.5,
        "k_proj": 1.5,
        "qkv_proj": 1.4,
        "c_attn": 2.5,
        "query_key_value": 2.0,
        "dense_h_to_4h": 2.0,
        "dense_4h_to_h": 3.0,
        "c_fc": 2.0,
        "c_proj": 3.0,
        "gate.weight": 2.0,
        "router.layer": 2.0,
        "router.weight": 2.0,
        "router.proj": 2.0,
    }
    gain = next((g for part, g in gains.items() if part in name), 1.0)
    return noise * gain / math.sqrt(fan_in)


def _is_tied(model: Any) -> bool:
    return bool(getattr(model.config, "tie_word_embeddings", False))


def block_type(name: str, storage: str) -> str:
    """The GGUF type in which the tensor with this name in a folder is stored."""
    vector = name.endswith(
        ("sinks.weight", "router.weight", "norm.weight", "bias", "ln_1.weight", "ln_2.weight", "ln_f.weight")
    )
    if vector or name.endswith(
        (
            "mlp.gate.weight",
            "shared_expert_gate.weight",
            "router.layer.weight",
            "router.weight",
            "router.proj.weight",
            "sparse_moe.gate.weight",
        )
    ):
        return "F32"
    if storage == "MXFP4":
        return "MXFP4" if "_exps.weight" in name or is_expert_matrix(name) else "F32"
    if storage == "quantised":
        wide = any(part in name for part in ("embed_tokens", "lm_head", "down_proj"))
        return "Q8_0" if wide else "Q4_0"
    return storage


def rounded(name: str, value: Tensor, storage: str) -> Tensor:
    """`value` as float32, after one trip through the type in which it is stored."""
    if storage in _ROUNDED:
        return value.to(_ROUNDED[storage]).float()
    kind = block_type(name, storage)
    if kind == "F32":
        return value
    if is_expert_matrix(name):  # as [expert, in, out], and blocks are of inputs
        packed, type_ = pack(value.transpose(1, 2).numpy(), kind)
        return torch.from_numpy(gguf.quants.dequantize(packed, type_)).transpose(1, 2).contiguous()
    packed, type_ = pack(value.numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(packed, type_))


def is_expert_matrix(name: str) -> bool:
    """Whether a folder keeps all experts' matrices under this name."""
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def mxfp4_pair(value: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices [expert, in, out] of values that MXFP4 holds, as a folder has them: blocks [expert, out, n, 16] with
    neighbouring columns in a byte, and scales [expert, out, n]."""
    packed = torch.from_numpy(pack(value.transpose(1, 2).numpy(), "MXFP4")[0]).view(
        *value.shape[:1], value.shape[2], -1, 17
    )
    columns = torch.cat((packed[..., 1:] & 15, packed[..., 1:] >> 4), -1)
    return (columns[..., ::2] | columns[..., 1::2] << 4).contiguous(), packed[..., 0].contiguous()


def pack(value: "np.ndarray[Any, Any]", kind: str) -> tuple["np.ndarray[Any, Any]", Any]:
    """`value` [rows, columns] as the bytes of the GGUF type `kind`, and that type."""
    type_ = gguf.GGMLQuantizationType[kind]
    return gguf.quants.quantize(np.ascontiguousarray(value), type_), type_
