"""What a file of a recurrent or hybrid family, or of an encoder, can get wrong is refused, and named."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.errors import BadFile, Unsupported
from tests.models import tiny_encoders
from tests.models.test_refusals import refusal, setting, spoiled_folder, spoiled_gguf

WRONG_SETTINGS: Final = [
    ("mamba", "mamba.ssm.inner_size", 0),
    ("mamba", "mamba.ssm.inner_size", 96),
    ("mamba", "mamba.ssm.state_size", 7),
    ("mamba", "mamba.ssm.conv_kernel", 3),
    ("mamba", "mamba.ssm.time_step_rank", 5),
    ("mamba", "mamba.ssm.time_step_rank", None),
    ("mamba", "mamba.ssm.dt_b_c_rms", "yes"),
    ("mamba", "mamba.block_count", 4),
    ("mamba", "mamba.block_count", 2**30),
    ("mamba2", "mamba2.ssm.time_step_rank", 7),
    ("mamba2", "mamba2.ssm.time_step_rank", 4),
    ("mamba2", "mamba2.ssm.group_count", 3),
    ("mamba2", "mamba2.ssm.group_count", 2),
    ("falcon-h1", "falcon-h1.ssm.inner_size", 100),
    ("falcon-h1", "falcon-h1.attention.head_count", 3),
    ("falcon-h1", "falcon-h1.attention.head_count", 0),
    ("qwen35", "qwen35.ssm.time_step_rank", 3),
    ("qwen35", "qwen35.ssm.inner_size", 65),
    ("qwen35", "qwen35.ssm.group_count", 3),
    ("qwen35", "qwen35.ssm.conv_kernel", 1),
    ("qwen35", "qwen35.full_attention_interval", 2),
    ("qwen35", "qwen35.nextn_predict_layers", 5),
    ("qwen35", "qwen35.nextn_predict_layers", 9),
    ("qwen3-next", "qwen3next.ssm.group_count", 4),
    ("lfm2", "lfm2.shortconv.l_cache", 1),
    ("lfm2", "lfm2.shortconv.l_cache", None),
    ("lfm2-moe", "lfm2moe.expert_gating_func", 9),
    ("lfm2-moe", "lfm2moe.leading_dense_block_count", 2),
    ("nemotron-h", "nemotron_h.ssm.group_count", 3),
    ("nemotron-h-latent", "nemotron_h_moe.moe_latent_size", 16),
    ("granite-hybrid", "granitehybrid.ssm.state_size", 7),
]
WRONG_CONFIGS: Final = [
    ("mamba", "state_size", 7),
    ("mamba", "time_step_rank", "all"),
    ("mamba", "time_step_rank", 5),
    ("mamba", "use_bias", True),
    ("mamba", "use_conv_bias", False),
    ("mamba", "hidden_act", "gelu"),
    ("mamba", "intermediate_size", 100),
    ("mamba", "num_hidden_layers", 2),
    ("mamba2", "n_groups", 3),
    ("mamba2", "n_groups", 2),
    ("mamba2", "num_heads", 0),
    ("mamba2", "head_dim", 8),
    ("mamba2", "time_step_limit", [1.0]),
    ("mamba2", "time_step_limit", [2.0, 1.0]),
    ("mamba2", "time_step_limit", [0.0, "much"]),
    ("mamba2", "time_step_limit", 3),
    ("falcon-h1", "mamba_d_head", 8),
    ("falcon-h1", "mamba_d_ssm", 97),
    ("falcon-h1", "mamba_rms_norm", True),
    ("falcon-h1", "mlp_multipliers", [1.0]),
    ("falcon-h1", "ssm_multipliers", [1.0, 2.0]),
    ("falcon-h1", "key_multiplier", "big"),
    ("falcon-h1", "projectors_bias", True),
    ("qwen35", "linear_num_key_heads", 3),
    ("qwen35", "linear_value_head_dim", 8),
    ("qwen35", "layer_types", ["linear_attention"]),
    ("qwen35", "layer_types", ["linear_attention"] * 5),
    ("qwen3-next", "linear_num_key_heads", 4),
    ("qwen35-moe", "num_experts", 5),
    ("lfm2", "conv_L_cache", 1),
    ("lfm2", "layer_types", ["conv"] * 4),
    ("lfm2-moe", "use_expert_bias", False),
    ("nemotron-h", "layers_block_type", ["linear_attention", "what"]),
    ("nemotron-h", "layers_block_type", ["mlp"] * 5),
    ("granite-hybrid", "layer_types", ["mamba"]),
    ("granite-hybrid-moe", "num_local_experts", 0),
    ("bamba", "attn_layer_indices", [9]),
]


@pytest.mark.parametrize(("name", "key", "value"), WRONG_SETTINGS, ids=str)
def test_a_setting_that_cannot_be_is_refused(name: str, key: str, value: Any, tmp_path: Path, tiny_files: Path) -> None:
    refusal(spoiled_gguf(tmp_path, tiny_files, name=name, metadata=setting(key, value)))


@pytest.mark.parametrize(("name", "key", "value"), WRONG_CONFIGS, ids=str)
def test_a_config_that_cannot_be_is_refused(name: str, key: str, value: Any, tmp_path: Path, tiny_files: Path) -> None:
    """E-26."""
    refusal(spoiled_folder(tmp_path, tiny_files, name=name, config=lambda c: c.update({key: value})))


@pytest.mark.parametrize(
    ("name", "tensor", "gguf_name"),
    [
        ("mamba", "backbone.layers.1.mixer.A_log", "blk.1.ssm_a"),
        ("mamba", "backbone.layers.1.mixer.dt_proj.bias", "blk.1.ssm_dt.bias"),
        ("mamba", "backbone.layers.0.norm.weight", "blk.0.attn_norm.weight"),
        ("mamba2", "backbone.layers.2.mixer.D", "blk.2.ssm_d"),
        ("mamba2", "backbone.layers.2.mixer.norm.weight", "blk.2.ssm_norm.weight"),
        ("falcon-h1", "model.layers.0.mamba.conv1d.weight", "blk.0.ssm_conv1d.weight"),
        ("falcon-h1", "model.layers.0.pre_ff_layernorm.weight", "blk.0.ffn_norm"),
    ],
)
def test_a_missing_tensor_is_named_as_the_file_would(
    name: str, tensor: str, gguf_name: str, tmp_path: Path, tiny_files: Path
) -> None:
    assert gguf_name in refusal(spoiled_gguf(tmp_path, tiny_files, name=name, tensors=lambda t: t.pop(tensor)), BadFile)
    assert tensor in refusal(spoiled_folder(tmp_path, tiny_files, name=name, tensors=lambda t: t.pop(tensor)), BadFile)


def test_a_tensor_of_another_shape_is_named_with_the_shape_that_the_format_has(
    tmp_path: Path, tiny_files: Path
) -> None:
    name = "backbone.layers.0.mixer.conv1d.weight"
    path = spoiled_folder(tmp_path, tiny_files, name="mamba", tensors=lambda t: t.update({name: torch.ones(128, 4)}))
    message = refusal(path, BadFile)
    assert name in message
    assert "[128, 1, 4]" in message


def test_a_tensor_that_a_mixer_has_no_use_for_is_named(tmp_path: Path, tiny_files: Path) -> None:
    extra = {"backbone.layers.0.mixer.gate.weight": torch.ones(4)}
    path = spoiled_folder(tmp_path, tiny_files, name="mamba2", tensors=lambda t: t.update(extra))
    assert "backbone.layers.0.mixer.gate.weight" in refusal(path, BadFile)


def test_mamba_blocks_with_another_activation_are_refused_as_such(tmp_path: Path, tiny_files: Path) -> None:
    path = spoiled_folder(tmp_path, tiny_files, name="falcon-h1", config=lambda c: c.update(hidden_act="gelu"))
    assert "gelu" in refusal(path, Unsupported)


@pytest.mark.parametrize("name", ["qwen35", "qwen35-moe", "qwen3-next"])
def test_delta_nets_with_another_activation_are_refused_as_such(name: str, tmp_path: Path, tiny_files: Path) -> None:
    path = spoiled_folder(tmp_path, tiny_files, name=name, config=lambda c: c.update(hidden_act="gelu"))
    assert "delta nets with the activation 'gelu'" in refusal(path, Unsupported)


@pytest.mark.parametrize("name", ["encoder.layer.0.output.LayerNorm.bias", "embeddings.position_embeddings.weight"])
def test_a_missing_tensor_of_an_encoder_is_named(name: str, tmp_path: Path, tiny_files: Path) -> None:
    source, path = tiny_encoders.folder("bert", tiny_files), tmp_path / "spoiled"
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    del tensors[name]
    save_file(tensors, path / "model.safetensors")
    assert name in refusal(path, BadFile)


def test_a_ranking_model_without_its_head_is_refused(tmp_path: Path, tiny_files: Path) -> None:
    source, path = tiny_encoders.folder("bert", tiny_files), tmp_path / "spoiled"
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForSequenceClassification"]}))
    assert "classifier.weight" in refusal(path, BadFile)
