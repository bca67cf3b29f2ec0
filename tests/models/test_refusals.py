"""What a model file can get wrong is refused by one of our errors, which names it; nothing else comes out."""

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ostinato import LLM, Sampling
from ostinato.errors import BadFile, BadInput, NotNumbers, UnknownName, Unsupported
from ostinato.files.checkpoint import open_checkpoint
from ostinato.models.registry import FAMILIES, read_shape
from ostinato.models.rope import Rope
from tests.engine.opened import until
from tests.models import tiny, tiny_gguf

FIRST_Q: Final = "model.layers.0.self_attn.q_proj.weight"
Change = Callable[[dict[str, Any]], object]
TensorChange = Callable[[dict[str, Tensor]], object]


def spoiled_gguf(
    tmp: Path,
    files: Path,
    *,
    name: str = "llama",
    metadata: Change = lambda metadata: None,
    tensors: TensorChange = lambda tensors: None,
) -> Path:
    """The GGUF file of a tiny model after a change to its metadata or its tensors."""
    architecture = tiny.TINY[name].architecture
    assert architecture is not None
    config, weights = tiny.parts_of(name, files)
    tensors(weights)
    tiny_gguf.write(tmp / "spoiled.gguf", architecture, config, weights, change=metadata)
    return tmp / "spoiled.gguf"


def spoiled_folder(
    tmp: Path,
    files: Path,
    *,
    name: str = "llama",
    config: Change = lambda config: None,
    tensors: TensorChange = lambda tensors: None,
) -> Path:
    """The folder of a tiny model after a change to config.json or to its tensors."""
    path = tmp / "spoiled"
    shutil.copytree(tiny.folder(name, files), path)
    stated, weights = tiny.parts_of(name, files)
    config(stated)
    tensors(weights)
    (path / "config.json").write_text(json.dumps(stated))
    save_file(weights, path / "model.safetensors")
    return path


def setting(key: str, value: Any) -> Change:
    """A change that gives a GGUF key another value of the same kind, or takes the key away (None)."""

    def change(metadata: dict[str, Any]) -> None:
        if value is None:
            del metadata[key]
        else:
            kind = gguf.GGUFValueType.get_type(value)
            metadata[key] = gguf.GGUFValue(value=value, type=kind)

    return change


def refusal(path: Path, kind: type[BadInput] = BadInput, **options: Any) -> str:
    """The message with which the model is refused."""
    with pytest.raises(kind) as caught:
        LLM(path, device="cpu", **options)
    assert str(path) in str(caught.value)
    return str(caught.value)


# GGUF


def test_an_unused_tensor_is_named(tmp_path: Path, tiny_files: Path) -> None:
    """E-27."""
    path = spoiled_gguf(tmp_path, tiny_files, tensors=lambda t: t.update({"blk.0.surprise.weight": torch.ones(4, 32)}))
    assert "blk.0.surprise.weight" in refusal(path, BadFile)


def test_a_scaling_factor_without_a_type_is_that_of_linear_scaling(tmp_path: Path, tiny_files: Path) -> None:
    """As in llama.cpp; without either there is no scaling."""

    def rope_of(**stated: Any) -> object:
        def change(metadata: dict[str, Any]) -> None:
            for key, value in stated.items():
                setting(f"llama.rope.{key.replace('__', '.')}", value)(metadata)

        return read_shape(open_checkpoint(spoiled_gguf(tmp_path, tiny_files, metadata=change))).rope_kinds

    linear = rope_of(scaling__type="linear", scaling__factor=2.0)
    assert rope_of(scaling__factor=2.0) == rope_of(scale_linear=2.0) == linear != rope_of()
    assert rope_of(scaling__type="none", scaling__factor=2.0) == rope_of()


def test_tensors_of_rope_factors_and_a_stated_scaling_hold_together(tmp_path: Path, tiny_files: Path) -> None:
    """As in llama.cpp, which divides by both; `attn_factor` scales whatever the type is."""

    def rope_of(**stated: Any) -> Rope:
        def change(metadata: dict[str, Any]) -> None:
            for key, value in stated.items():
                setting(f"llama.rope.scaling.{key}", value)(metadata)

        path = spoiled_gguf(tmp_path, tiny_files, name="llama-3.1", metadata=change)
        (rope,) = read_shape(open_checkpoint(path)).rope_kinds
        return rope

    plain, scaled = rope_of(), rope_of(type="linear", factor=4.0, attn_factor=0.75)
    assert plain.divisors is not None
    assert len(set(plain.divisors)) > 1
    assert scaled == replace(plain, divisors=tuple(4 * one for one in plain.divisors), amplitude=0.75)
    assert rope_of(attn_factor=0.75) == replace(plain, amplitude=0.75)


@pytest.mark.parametrize("name", [FIRST_Q, "model.norm.weight", "model.embed_tokens.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path, tiny_files: Path) -> None:
    """E-23."""
    path = spoiled_gguf(tmp_path, tiny_files, tensors=lambda t: t.pop(name))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    assert names.get_name(name, (".weight",)) in refusal(path, BadFile)


def test_a_layer_too_few_is_noticed(tmp_path: Path, tiny_files: Path) -> None:
    path = spoiled_gguf(tmp_path, tiny_files, metadata=setting("llama.block_count", 4))
    assert "blk.3." in refusal(path, BadFile)


def test_a_layer_too_many_is_noticed(tmp_path: Path, tiny_files: Path) -> None:
    path = spoiled_gguf(tmp_path, tiny_files, metadata=setting("llama.block_count", 2))
    assert "blk.2." in refusal(path, BadFile)


def test_a_laguna_file_without_its_gates_or_with_a_short_list_of_windows_is_refused(
    tmp_path: Path, tiny_files: Path
) -> None:
    gate = "model.layers.0.self_attn.g_proj.weight"
    path = spoiled_gguf(tmp_path, tiny_files, name="laguna", tensors=lambda t: t.pop(gate))
    assert "blk.0.attn_gate.weight is missing" in refusal(path)
    short = setting("laguna.attention.sliding_window_pattern", [False])
    path = spoiled_gguf(tmp_path, tiny_files, name="laguna", metadata=short)
    assert "sliding_window_pattern is shorter than the" in refusal(path)


@pytest.mark.parametrize("shape", [(64, 96), (32, 64), (64,), (2, 32, 64)], ids=str)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(
    shape: tuple[int, ...], tmp_path: Path, tiny_files: Path
) -> None:
    """E-21."""
    name = "model.layers.1.self_attn.o_proj.weight"
    path = spoiled_gguf(tmp_path, tiny_files, tensors=lambda t: t.update({name: torch.ones(shape)}))
    message = refusal(path, BadFile)
    assert "blk.1.attn_output.weight" in message
    assert str(list(shape)) in message
    assert "[64, 64]" in message


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path, tiny_files: Path) -> None:
    """E-43."""
    path = spoiled_gguf(tmp_path, tiny_files, metadata=setting("general.architecture", "llamma"))
    message = refusal(path, UnknownName)
    assert "'llamma'" in message
    for known in ("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "gpt2"):
        assert known in message
    assert "nearest" not in message
    first, *lists = message.splitlines()
    assert f"; {len(FAMILIES)} families are known (docs/families.md), and docs/add-a-family.md says" in first
    assert all(len(line) <= 100 for line in lists)


def test_a_gguf_that_is_only_a_vocabulary_cannot_be_run(tmp_path: Path, tiny_files: Path) -> None:
    path = spoiled_gguf(tmp_path, tiny_files, tensors=lambda t: t.clear())
    assert "vocabulary" in refusal(path, BadFile)


@pytest.mark.parametrize(
    "key", ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"]
)
def test_a_missing_size_is_named(key: str, tmp_path: Path, tiny_files: Path) -> None:
    path = spoiled_gguf(tmp_path, tiny_files, metadata=setting(f"llama.{key}", None))
    assert f"llama.{key}" in refusal(path, BadFile)


WRONG_SETTINGS: Final[Mapping[str, list[Any]]] = {
    "llama.block_count": [0, -1, 2**31 - 1, "three", 3.5, True],
    "llama.context_length": [0, "long"],
    "llama.embedding_length": [0, 63, 2**30],
    "llama.feed_forward_length": [0, 97, [96, 96], [96, 96, 0], [96, 97, 96], [96, -1, 96]],
    "llama.attention.head_count": [0, 3, 5, 128, [4, 4], [4, 4, 2], [4.0, 4.0, 4.0]],
    "llama.attention.head_count_kv": [0, 3, 8, [2, 2], [2, 2, 0], [2, 1, 2]],
    "llama.attention.key_length": [0, 7, 32],
    "llama.attention.value_length": [8],
    "llama.attention.layer_norm_rms_epsilon": [0.0, -1.0, math.nan, math.inf, "small"],
    "llama.rope.dimension_count": [0, 7, 32, "half"],
    "llama.rope.freq_base": [0.0, 1.0, -5.0, math.nan],
    "llama.rope.scaling.type": ["spiral", 7],
    "llama.rope.scaling.factor": [0.0, -2.0, math.nan],
    "llama.attention.sliding_window": [-1, "wide"],
    "llama.expert_count": [4, -1],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG_SETTINGS.items() for value in values], ids=str
)
def test_a_size_that_cannot_be_is_refused(key: str, value: Any, tmp_path: Path, tiny_files: Path) -> None:
    """E-40."""
    refusal(spoiled_gguf(tmp_path, tiny_files, metadata=setting(key, value)))


@pytest.mark.parametrize(
    ("key", "value"),
    [("expert_count", 5), ("expert_used_count", 5), ("expert_used_count", 0), ("expert_used_count", None)],
)
def test_a_count_of_experts_that_cannot_be_is_refused(
    key: str, value: int | None, tmp_path: Path, tiny_files: Path
) -> None:
    refusal(spoiled_gguf(tmp_path, tiny_files, name="mixtral", metadata=setting(f"llama.{key}", value)))


@pytest.mark.parametrize(
    "factors", [torch.ones(7), torch.zeros(8), torch.full((8,), math.nan), -torch.ones(8)], ids=str
)
def test_rope_factors_that_cannot_be_are_refused(factors: Tensor, tmp_path: Path, tiny_files: Path) -> None:
    path = spoiled_gguf(tmp_path, tiny_files, tensors=lambda t: t.update({"rope_freqs.weight": factors}))
    assert "rope_freqs.weight" in refusal(path, BadFile)


def test_long_factors_without_short_ones_are_refused(tmp_path: Path, tiny_files: Path) -> None:
    extra = {"rope_factors_long.weight": torch.ones(8)}
    path = spoiled_gguf(tmp_path, tiny_files, name="phi3", tensors=lambda t: t.update(extra))
    assert "rope_factors_" in refusal(path, BadFile)


# Folders


def test_a_quantised_folder_is_refused_by_the_name_of_its_method(tmp_path: Path, tiny_files: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    path = spoiled_folder(tmp_path, tiny_files, config=lambda c: c.update(quantised))
    assert "gptq" in refusal(path, Unsupported)


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        (["LlamaForCausalLLM"], "the architecture 'LlamaForCausalLLM' is not known"),
        *((none, "config.json names no class under architectures") for none in (None, [], [3], "LlamaForCausalLM")),
    ],
    ids=str,
)
def test_an_unknown_architecture_of_a_folder_is_refused_with_the_known_ones(
    stated: Any, said: str, tmp_path: Path, tiny_files: Path
) -> None:
    path = spoiled_folder(tmp_path, tiny_files, config=lambda c: c.update(architectures=stated))
    message = refusal(path, UnknownName)
    assert said in message
    for model in tiny.TINY.values():
        assert model.config.get("text_config", {}).get("model_type", model.kind) in message
    assert "nearest" not in message
    first, *lists = message.splitlines()
    assert f"; {len(FAMILIES)} families are known (docs/families.md), and docs/add-a-family.md says" in first
    assert all(len(line) <= 100 for line in lists)


def test_a_refused_architecture_is_told_with_the_tensors_that_no_family_has(tmp_path: Path, tiny_files: Path) -> None:
    extra = {"model.layers.0.hyper_mixer.weight": torch.ones(4)}
    path = spoiled_folder(
        tmp_path,
        tiny_files,
        config=lambda c: c.update(architectures=["HyperForCausalLM"]),
        tensors=lambda t: t.update(extra),
    )
    message = refusal(path, UnknownName)
    assert "'HyperForCausalLM' is not known, and no family has tensors called model.layers.*.hyper_mixer" in message
    assert "docs/add-a-family.md" in message


@pytest.mark.parametrize("name", ["Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"])
def test_a_model_that_drafts_for_another_is_refused_by_name(name: str, tmp_path: Path, tiny_files: Path) -> None:
    path = spoiled_folder(tmp_path, tiny_files, name="gemma4", config=lambda c: c.update(architectures=[name]))
    with pytest.raises(Unsupported, match=f"'{name}' drafts tokens for another model"):
        LLM(path, device="cpu")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_kv_shared_layers": 5}, "the first 0 have none of that kind"),
        ({"num_kv_shared_layers": 3}, "the first 1 have none of that kind"),
        ({"use_bidirectional_attention": "all"}, "both directions"),
        ({"num_experts": 7, "enable_moe_block": True, "top_k_experts": 9}, "moe_intermediate_size"),
        (
            {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 300},
            "per_layer_input_gate.weight is missing",
        ),
    ],
)
def test_a_gemma4_folder_that_contradicts_itself_is_refused(
    change: Mapping[str, Any], said: str, tmp_path: Path, tiny_files: Path
) -> None:
    path = spoiled_folder(tmp_path, tiny_files, name="gemma4", config=lambda c: c.update(change))
    with pytest.raises((BadFile, Unsupported), match=said):
        LLM(path, device="cpu")


def test_a_text_part_of_an_unknown_kind_is_named(tmp_path: Path, tiny_files: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["text_config"]["model_type"] = "gemma9_text"

    message = refusal(spoiled_folder(tmp_path, tiny_files, name="gemma3-vision", config=change), UnknownName)
    assert "'Gemma3ForConditionalGeneration' is not known, nor is its text part 'gemma9_text'" in message


def test_an_unused_tensor_of_a_folder_is_named(tmp_path: Path, tiny_files: Path) -> None:
    extra = {"model.layers.0.adapter.weight": torch.ones(4)}
    path = spoiled_folder(tmp_path, tiny_files, tensors=lambda t: t.update(extra))
    assert "model.layers.0.adapter.weight" in refusal(path, BadFile)


def test_a_bias_that_the_config_does_not_announce_is_named(tmp_path: Path, tiny_files: Path) -> None:
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}
    path = spoiled_folder(tmp_path, tiny_files, tensors=lambda t: t.update(extra))
    assert "model.layers.0.self_attn.q_proj.bias" in refusal(path, BadFile)


def test_a_missing_tensor_of_a_folder_is_named(tmp_path: Path, tiny_files: Path) -> None:
    path = spoiled_folder(tmp_path, tiny_files, tensors=lambda t: t.pop(FIRST_Q))
    assert "attn_q" in (message := refusal(path, BadFile)) or FIRST_Q in message


def test_a_tensor_of_a_folder_with_another_shape_is_named(tmp_path: Path, tiny_files: Path) -> None:
    path = spoiled_folder(tmp_path, tiny_files, tensors=lambda t: t.update({FIRST_Q: torch.ones(64, 32)}))
    message = refusal(path, BadFile)
    assert FIRST_Q in message
    assert "[64, 32]" in message


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("phi2", lambda t: t.pop("lm_head.bias"), "lm_head.bias is missing"),
        ("gemma4", lambda t: t.pop("model.layers.2.layer_scalar"), "layers.2.layer_scalar is missing"),
        (
            "qwen3-vl-moe",
            lambda t: t.update({(name := "model.language_model.layers.1.mlp.experts.down_proj"): t[name].flatten()}),
            "layers.1.mlp.experts.down_proj has the shape",
        ),
    ],
    ids=["phi2", "gemma4", "qwen3-vl-moe"],
)
def test_a_tensor_that_some_files_lack_or_keep_otherwise_is_checked_too(
    name: str, change: TensorChange, said: str, tmp_path: Path, tiny_files: Path
) -> None:
    assert said in refusal(spoiled_folder(tmp_path, tiny_files, name=name, tensors=change), BadFile)


@pytest.mark.parametrize("layer", [0, 1])  # which sees a window, and which sees everything
def test_a_gemma4_gguf_that_lacks_the_values_of_one_layer_is_refused(
    layer: int, tmp_path: Path, tiny_files: Path
) -> None:
    value = f"model.layers.{layer}.self_attn.v_proj.weight"
    path = spoiled_gguf(tmp_path, tiny_files, name="gemma4-shared", tensors=lambda t: t.pop(value))
    assert f"blk.{layer}.attn_v.weight is missing" in refusal(path, BadFile)


@pytest.mark.slow
def test_a_muse_glimmer_folder_lists_the_layers_without_positions(tmp_path: Path, tiny_files: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["text_config"]["layer_rope_theta"] = [500.0] * 5

    assert "layer_rope_theta" in refusal(spoiled_folder(tmp_path, tiny_files, name="muse-glimmer", config=change))


def test_whole_numbers_are_no_weights(tmp_path: Path, tiny_files: Path) -> None:
    numbers = torch.ones(64, 64, dtype=torch.int64)
    refusal(spoiled_folder(tmp_path, tiny_files, tensors=lambda t: t.update({FIRST_Q: numbers})))


WRONG_CONFIGS: Final[Mapping[str, list[Any]]] = {
    "num_hidden_layers": [None, 0, 2, 4, 2**40, "three", True],
    "hidden_size": [None, 0, 63, 10**12, [64]],
    "intermediate_size": [None, 95, -96],
    "num_attention_heads": [None, 0, 3, 5, 2.0],
    "num_key_value_heads": [0, 3, 8],
    "head_dim": [0, 17, 32],
    "vocab_size": [None, 0, 301, "all"],
    "max_position_embeddings": [None, 0, -1],
    "rms_norm_eps": [0, -1e-5, "tiny"],
    "hidden_act": ["relu", 7],
    "attention_bias": [True, "no"],
    "tie_word_embeddings": ["yes"],
    "rope_parameters": [
        [],
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 0},
        {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": "four"},
        {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0]},
        {"rope_type": "default", "rope_theta": 0},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.01},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2.0},
    ],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG_CONFIGS.items() for value in values], ids=str
)
def test_a_config_that_cannot_be_is_refused(key: str, value: Any, tmp_path: Path, tiny_files: Path) -> None:
    """E-26."""
    refusal(spoiled_folder(tmp_path, tiny_files, config=lambda c: c.update({key: value})))


@pytest.mark.parametrize("kinds", [["sliding_attention"], "all", ["odd", "even", "odd"]], ids=str)
def test_kinds_of_layers_that_cannot_be_are_refused(kinds: Any, tmp_path: Path, tiny_files: Path) -> None:
    path = spoiled_folder(tmp_path, tiny_files, name="mistral-window", config=lambda c: c.update(layer_types=kinds))
    assert "layer_types must list 3 of" in refusal(path, BadFile)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]; it must be a list of 4 times 0 or 1"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier"),
        ("granite", {"logits_scaling": 0}, "logits_scaling"),
        ("olmo2", {"num_attention_heads": 2}, "k_proj"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types must list 4"),
        ("exaone4-window", {"layer_types": None, "sliding_window_pattern": "LLX"}, "sliding_window_pattern"),
        ("seed-oss", {"attention_out_bias": True}, "attention_out_bias"),
        ("seed-oss", {"num_key_value_heads": 1}, "k_proj"),
        ("glm4", {"intermediate_size": 48}, "gate_up_proj"),
        ("ernie4.5", {"use_bias": True}, "bias is missing"),
        ("hunyuan", {"head_dim": 16}, "q_proj"),
        ("hunyuan-alpha", {"rope_parameters": {"rope_type": "dynamic", "alpha": 0, "rope_theta": 1e4}}, "alpha"),
        ("arcee", {"mlp_bias": True}, "bias is missing"),
        ("starcoder2", {"use_bias": False}, "bias"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
        ("stablelm", {"use_parallel_residual": True}, "post_attention_layernorm"),
        ("phi2", {"qk_layernorm": True}, "qk_layernorm"),
        ("gptneox", {"num_attention_heads": 3}, "5 of a head's 21 elements"),
        ("gptneox", {"hidden_size": 32}, "embed_in"),
        ("command-r", {"use_qk_norm": True}, "use_qk_norm"),
        ("cohere2", {"logit_scale": -1}, "logit_scale"),
        ("mistral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1, "rope_theta": 1e6}}, "original_max_position"),
        ("gemma3-vision", {"text_config": "plain"}, "text_config"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling says rope_type 'yarn'"),
        ("qwen3", {"rope_scaling": {"factor": 4.0}}, "factor 4.0 and rope_parameters None"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen3", {"is_causal": False}, "is_causal is false"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scaled by the number of the layer"),
        ("gpt-oss", {"attention_bias": False}, "attention_bias"),
        ("glm4-moe", {"use_qk_norm": False}, "use_qk_norm is False, and it has tensors of such norms"),
        ("deepseek-v2", {"topk_method": "best"}, "topk_method is 'best'"),
        ("deepseek-v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek-v2", {"num_key_value_heads": 2}, "num_key_value_heads is 2 and num_attention_heads 4"),
        ("deepseek-v3", {"num_key_value_heads": 8}, "num_key_value_heads is 8 and num_attention_heads 4"),
        ("deepseek-v3", {"head_dim": 8}, "head_dim is 8 and qk_rope_head_dim 16"),
        ("glm-4.7-flash", {"head_dim": 8}, "head_dim is 8 and qk_rope_head_dim 16"),
        ("gemma4-shared", {"vocab_size_per_layer_input": 200}, "vocab_size_per_layer_input is 200 and vocab_size 300"),
        ("mamba2", {"expand": 3}, "8 heads of 16 channels are not expand 3 times 64"),
        ("nemotron-h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'"),
        ("gemma4", {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}, "is 1.5; no more"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 2**31 - 1}}}, "2147483647 of a head's"),
        ("qwen3", {"rope_parameters": {"rope_theta": 10**400}}, "rope_theta"),
        ("llama-3.1", {"rope_parameters": {"rope_type": "linear", "factor": 1e-300}}, "greater than 0"),
        ("mamba2-limits", {"time_step_limit": [0, 10**400]}, "it must be two numbers"),
        ("qwen35-moe", {"num_experts": 2**31 - 1}, "missing"),
        ("qwen3-next", {"linear_key_head_dim": 2**31 - 1}, "shape"),
    ],
    ids=str,
)
def test_a_config_that_contradicts_its_tensors_is_told_in_one_sentence(
    name: str, config: dict[str, Any], said: str, tmp_path: Path, tiny_files: Path
) -> None:
    message = refusal(spoiled_folder(tmp_path, tiny_files, name=name, config=lambda c: c.update(config)))
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("olmo2", "olmo2.attention.head_count", 2, "attn_k"),
        ("olmo3", "olmo2.attention.sliding_window_pattern", [True, True], "shorter than the 4 layers"),
        ("granite", "granite.logit_scale", 0.0, "logit_scale"),
        ("cohere2", "cohere2.attention.sliding_window", None, "sliding_window"),
        ("mistral3", "mistral3.rope.scaling.original_context_length", None, "original_context_length"),
        ("gptneox", "gptneox.attention.head_count", 3, "3 heads cannot share 4"),
        ("glm4", "glm4.rope.dimension_count", 33, "33 of a head's 32"),
        ("gemma4", "gemma4.rope.dimension_count_swa", 32, "32 of a head's 16"),
        ("laguna", "laguna.rope.dimension_count_swa", 15, "15 of a head's 16"),
        ("gemma3", "gemma3.rope.freq_base_swa", 0.5, "the rope base is 0.5"),
        ("deepseek-v3", "deepseek2.attention.temperature_scale", 0.1, "attention.temperature_scale is 0.1"),
        ("lfm2", "lfm2.attention.causal", False, "lfm2.attention.causal is false"),
        ("exaone4-window", "exaone4.attention.sliding_window_pattern", ["x"] * 4, "other things than true and false"),
    ],
    ids=str,
)
def test_metadata_that_contradict_their_tensors_are_told_in_one_sentence(
    name: str, key: str, value: Any, said: str, tmp_path: Path, tiny_files: Path
) -> None:
    message = refusal(spoiled_gguf(tmp_path, tiny_files, name=name, metadata=setting(key, value)))
    assert said in message


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_local_experts", 7), ("num_experts_per_tok", 7), ("mlp_only_layers", "none"), ("decoder_sparse_step", 0)],
)
def test_a_config_of_experts_that_cannot_be_is_refused(key: str, value: Any, tmp_path: Path, tiny_files: Path) -> None:
    refusal(spoiled_folder(tmp_path, tiny_files, name="qwen3-moe", config=lambda c: c.update({key: value})))


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v2", "deepseek-v3", "glm-4.7-flash", "nemotron-h-moe"])
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"n_group": 4, "topk_group": 1}, "6 experts cannot be 4 groups"),
        ({"n_group": 3, "topk_group": 4}, "uses 4 groups of experts, and there are only 3"),
        ({"n_group": 1, "topk_group": 2}, "uses 2 groups of experts, and there are only 1"),
        ({"n_group": 2, "topk_group": 1, "num_experts_per_tok": 4}, "uses 4 experts, and there are only 3"),
    ],
    ids=str,
)
def test_groups_of_experts_that_cannot_be_are_refused(
    name: str, config: dict[str, int], said: str, tmp_path: Path, tiny_files: Path
) -> None:
    path = spoiled_folder(tmp_path, tiny_files, name=name, config=lambda c: c.update(config))
    assert said in refusal(path, BadFile)


@pytest.mark.parametrize(
    "name",
    [
        "mlp.experts.5.up_proj.weight",
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
        "mlp.shared_experts.down_proj.weight",
    ],
)
def test_a_tensor_of_experts_that_is_missing_is_named(name: str, tmp_path: Path, tiny_files: Path) -> None:
    whole = f"model.layers.2.{name}"
    path = spoiled_folder(tmp_path, tiny_files, name="glm4-moe", tensors=lambda t: t.pop(whole))
    assert f"the tensor {whole} is missing" in refusal(path, BadFile)


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("gpt-oss", "model.layers.3.mlp.experts.gate_up_proj"),
        ("gpt-oss", "model.layers.3.mlp.experts.gate_up_proj_bias"),
        ("gpt-oss", "model.layers.2.mlp.experts.down_proj"),
        ("gemma4-moe", "model.layers.1.experts.gate_up_proj"),
        ("qwen3-vl-moe", "model.language_model.layers.1.mlp.experts.gate_up_proj"),
        ("qwen3-moe", "model.layers.1.mlp.experts.0.gate_proj.weight"),
    ],
)
def test_a_missing_tensor_of_all_experts_is_named_as_the_folder_would(
    name: str, at: str, tmp_path: Path, tiny_files: Path
) -> None:
    each = f"{at.partition('experts.')[0]}experts."
    gone = (lambda t: [t.pop(one) for one in [*t] if one.startswith(each)]) if ".0." in at else lambda t: t.pop(at)
    path = spoiled_folder(tmp_path, tiny_files, name=name, tensors=gone)
    assert f"the tensor {at} is missing" in refusal(path, BadFile)


def test_a_missing_tensor_of_all_experts_is_named_as_a_gguf_would(tmp_path: Path, tiny_files: Path) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj"
    path = spoiled_gguf(tmp_path, tiny_files, name="gpt-oss", tensors=lambda t: t.pop(name))
    assert "the tensor blk.1.ffn_gate_exps.weight is missing" in refusal(path, BadFile)


def test_a_missing_tensor_has_the_prefix_of_the_folder_that_lacks_it(tmp_path: Path, tiny_files: Path) -> None:
    name = "backbone.layers.1.mixer.up_proj.weight"
    path = spoiled_folder(tmp_path, tiny_files, name="nemotron-h", tensors=lambda t: t.pop(name))
    assert f"the tensor {name} is missing" in refusal(path, BadFile)


@pytest.mark.parametrize("n_stated", [1, 2])
@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
@pytest.mark.parametrize("form", ["gguf", "folder"])
def test_a_layer_of_the_model_is_never_left_out_as_one_that_predicts_further_tokens(
    form: str, name: str, n_stated: int, tmp_path: Path, tiny_files: Path
) -> None:
    if form == "folder":
        counts = {"num_hidden_layers": n_stated, "num_nextn_predict_layers": 1}
        path = spoiled_folder(tmp_path, tiny_files, name=name, config=lambda config: config.update(counts))
    else:

        def wrong(metadata: dict[str, Any]) -> None:
            for key, value in (("block_count", n_stated + 1), ("nextn_predict_layers", 1)):
                setting(f"{tiny.TINY[name].architecture}.{key}", value)(metadata)

        path = spoiled_gguf(tmp_path, tiny_files, name=name, metadata=wrong)
    message = refusal(path, BadFile)
    assert f"it counts {n_stated} layers, and 1 after them for multi-token prediction, but layer {n_stated} " in message


@pytest.mark.parametrize("form", ["gguf", "folder"])
def test_layers_beyond_those_that_predict_further_tokens_have_no_use(
    form: str, tmp_path: Path, tiny_files: Path
) -> None:
    gguf_like, counts = form == "gguf", {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    own = "blk.1.nextn.enorm.weight" if gguf_like else "model.layers.1.enorm.weight"
    if gguf_like:

        def wrong(metadata: dict[str, Any]) -> None:
            for key, value in (("block_count", 2), ("nextn_predict_layers", 1)):
                setting(f"deepseek2.{key}", value)(metadata)

        path = spoiled_gguf(
            tmp_path, tiny_files, name="deepseek-v3", metadata=wrong, tensors=lambda t: t.update({own: torch.ones(64)})
        )
    else:
        path = spoiled_folder(
            tmp_path,
            tiny_files,
            name="deepseek-v3",
            config=lambda config: config.update(counts),
            tensors=lambda t: t.update({own: torch.ones(64)}),
        )
    message = refusal(path, BadFile)
    assert "tensors that this model has no use for" in message
    assert ("blk.2." if gguf_like else "model.layers.2.") in message


def test_names_that_a_family_knows_whole_are_not_called_unknown(tmp_path: Path, tiny_files: Path) -> None:
    strange = {"architectures": ["FooBarForCausalLM"]}
    path = spoiled_folder(tmp_path, tiny_files, name="qwen35", config=lambda config: config.update(strange))
    message = refusal(path, UnknownName)
    assert "'FooBarForCausalLM' is not known, though known families have all of its tensors" in message


@pytest.mark.parametrize("spoiled", ["missing", "narrow"])
def test_mxfp4_blocks_without_their_scales_are_named(spoiled: str, tmp_path: Path, tiny_files: Path) -> None:
    path = tmp_path / "spoiled"
    shutil.copytree(tiny.folder("gpt-oss-mxfp4", tiny_files, style="original"), path)
    tensors = load_file(path / "model.safetensors")
    scales = tensors.pop("model.layers.1.mlp.experts.down_proj_scales")
    if spoiled == "narrow":
        tensors["model.layers.1.mlp.experts.down_proj_scales"] = scales[:, :-1].contiguous()
    save_file(tensors, path / "model.safetensors")
    message = refusal(path, BadFile)
    assert "model.layers.1.mlp.experts.down_proj_blocks is U8 [6, 64, 1, 16]" in message
    assert "down_proj_scales is missing" in message if spoiled == "missing" else "is U8 [6, 63, 1]" in message


def test_a_router_of_the_wrong_width_is_named_with_both_shapes(tmp_path: Path, tiny_files: Path) -> None:
    name = "model.layers.1.mlp.gate.weight"
    path = spoiled_folder(tmp_path, tiny_files, name="glm4-moe", tensors=lambda t: t.update({name: torch.ones(5, 64)}))
    assert f"{name} has the shape [5, 64]; this model needs [6, 64]" in refusal(path, BadFile)


def test_a_context_beyond_what_the_model_was_trained_for_is_refused(tiny_files: Path) -> None:
    with pytest.raises(BadInput, match="256"):
        LLM(tiny.gguf("llama", tiny_files), device="cpu", context=257)


# Sizes that no memory could hold are refused before anything of that size is made


@pytest.mark.parametrize("scheme", ["linear", "yarn"])
def test_a_head_of_two_thousand_million_elements_is_refused_at_once(
    scheme: str, tmp_path: Path, tiny_files: Path
) -> None:
    def change(metadata: dict[str, Any]) -> None:
        values = {"attention.key_length": 2**31 - 2, "attention.value_length": 2**31 - 2, "rope.scaling.factor": 4.0}
        for key, value in {**values, "rope.dimension_count": 2**31 - 2, "rope.scaling.type": scheme}.items():
            setting(f"llama.{key}", value)(metadata)

    started = time.perf_counter()
    assert "65536" in refusal(spoiled_gguf(tmp_path, tiny_files, metadata=change), BadFile)
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("key", ["expert_count", "feed_forward_length"])
def test_experts_that_the_file_does_not_hold_take_no_memory(key: str, tmp_path: Path, tiny_files: Path) -> None:
    path = spoiled_gguf(tmp_path, tiny_files, name="mixtral", metadata=setting(f"llama.{key}", 10**7))
    started = time.perf_counter()
    assert "exps" in refusal(path, BadFile)
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("mode", ["eager", "loop"])
def test_a_model_that_computes_no_numbers_ends_a_request_with_an_error(
    mode: Any, tmp_path: Path, tiny_files: Path
) -> None:
    path = spoiled_gguf(tmp_path, tiny_files, tensors=lambda one: one["model.norm.weight"].fill_(math.nan))
    with LLM(path, device="cpu", mode=mode, slots=2, context=128) as llm:
        before = llm.stats()
        for prompt in ([5, 9, 2], [7, 7]):
            with pytest.raises(NotNumbers, match="values that are not numbers"):
                llm.generate(prompt, Sampling(max_tokens=50, ignore_eos=True, logprobs=2))
        until(lambda: llm.stats().live == 0, "the slots are free")
        after = llm.stats()
    assert after.ended == {**before.ended, "error": 2}
    assert after.pages_leased == before.pages_leased
