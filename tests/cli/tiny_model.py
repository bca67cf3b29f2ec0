"""A model so small that a verb answers at once: one layer of llama with random weights, as a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

from ostinato.text.channels import MARKERS
from ostinato.text.grammar import with_control_tokens
from ostinato.text.tokenizer import Tokenizer
from tests.models import tiny_gguf, tiny_text

CONTEXT = 50_000  # long, so that an answer can be interrupted
HIDDEN, WIDTH, VOCAB = 32, 48, 300
CHANNELS = "<|channel|>analysis<|message|>hm, so<|end|><|start|>assistant<|channel|>final<|message|>Yes."


def config(context: int = CONTEXT) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }


def tensors() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(5)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random) * 0.3

    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
        f"{layer}input_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
        f"{layer}self_attn.k_proj.weight": matrix(HIDDEN // 2, HIDDEN),
        f"{layer}self_attn.v_proj.weight": matrix(HIDDEN // 2, HIDDEN),
        f"{layer}self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
        f"{layer}mlp.gate_proj.weight": matrix(WIDTH, HIDDEN),
        f"{layer}mlp.up_proj.weight": matrix(WIDTH, HIDDEN),
        f"{layer}mlp.down_proj.weight": matrix(HIDDEN, WIDTH),
    }


def write(
    path: Path,
    *,
    context: int = CONTEXT,
    vocabulary_only: bool = False,
    change: Callable[[dict[str, Any]], object] = lambda metadata: None,
) -> Path:
    """The model at `path`; `change` may alter its metadata, `vocabulary_only` leaves its weights out."""
    weights = {} if vocabulary_only else tensors()
    tiny_gguf.write(path, "llama", config(context), weights, change=change)
    return path


def without_template(metadata: dict[str, Any]) -> None:
    del metadata["tokenizer.chat_template"]


def of_channels(metadata: dict[str, Any]) -> None:
    """A model that writes messages with headers, as gpt-oss does; their markers are control tokens in place of the last
    merges."""
    with_control_tokens_of(metadata, ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"))
    metadata["tokenizer.ggml.eos_token_id"].value = VOCAB - 2
    metadata["tokenizer.chat_template"].value = (
        "{% for message in messages %}<|start|>{{ message.role }}"
        "{{ '<|channel|>final' if message.role == 'assistant' }}<|message|>{{ message.content }}<|end|>{% endfor %}"
        "<|start|>assistant"
    )


def with_control_tokens_of(metadata: dict[str, Any], markers: Sequence[str]) -> None:
    """Markers as control tokens in place of the last merges."""
    for name, values in (
        ("tokenizer.ggml.tokens", markers),
        ("tokenizer.ggml.token_type", [gguf.TokenType.CONTROL] * len(markers)),
    ):
        metadata[name].value[-len(markers) :] = values
    del metadata["tokenizer.ggml.merges"].value[-len(markers) :]


def script(tokenizer: Tokenizer, text: str) -> str:
    """A grammar of one text, in which markers are control tokens."""
    return f"start: {with_control_tokens(text, tokenizer.control_ids(MARKERS))}"


def prompt_of(text: str) -> str:
    """What the chat template makes of one message."""
    control = tiny_text.CONTROL_TOKENS
    return f"{control[1]}user\n{text}{control[2]}\n{control[1]}assistant\n"


def write_folder(folder: Path) -> Path:
    """The same model as a safetensors folder."""
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    facts = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps({**config(), **facts, "tie_word_embeddings": False}))
    tiny_text.write_files(folder)
    return folder
