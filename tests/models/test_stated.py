"""What config.json leaves out, and how files of several years say the same."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ostinato import LLM, Sampling
from ostinato.errors import BadFile, BadInput
from ostinato.models.shape import Shape
from tests.models import tiny, tiny_gguf
from tests.models.stated import read, shape_of
from tests.models.tiny import TINY, TinyModel
from tests.models.tiny_encoders import ENCODERS, TinyEncoder

EVERY: dict[str, TinyModel | TinyEncoder] = {**TINY, **ENCODERS}
# Those that rank are known by their tensors too.
MODELS = {name: model for name, model in EVERY.items() if not model.kind.endswith("Classification")}
# What transformers takes instead of these is told by the tensors of the head, or stands in the rope again.
TOLD_OTHERWISE = {
    ("Mistral3ForConditionalGeneration", "tie_word_embeddings"),
    ("Qwen3VLMoeForConditionalGeneration", "tie_word_embeddings"),
    ("Phi3ForCausalLM", "original_max_position_embeddings"),
}


def whole(kind: str, config: Mapping[str, Any]) -> Any:
    """config.json as transformers writes it, with the defaults of the class."""
    made = getattr(transformers, kind).config_class(**json.loads(json.dumps(dict(config))))
    return json.loads(made.to_json_string(use_diff=False), object_hook=_plain)


def _plain(value: dict[str, Any]) -> Any:
    return float(value["__float__"]) if "__float__" in value else value


def without_each(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The settings without each one of them, of a text part too."""
    for key in config:
        yield key, {name: value for name, value in config.items() if name != key}
    for key, text in without_each(config["text_config"]) if isinstance(config.get("text_config"), dict) else ():
        yield key, {**config, "text_config": text}


def shape_or_none(kind: str, config: Mapping[str, Any]) -> Shape | None:
    try:
        return shape_of(kind, config)
    except BadInput:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_setting_that_is_left_out_is_refused_or_what_transformers_takes(name: str) -> None:
    kind = MODELS[name].kind
    n = 0
    for key, cut in without_each(whole(kind, MODELS[name].config)):
        read_here = None if (kind, key) in TOLD_OTHERWISE else shape_or_none(kind, cut)
        if key in ("model_type", "text_config", "vision_config") or read_here is None:
            continue
        try:
            expected = shape_or_none(kind, whole(kind, cut))
        except Exception:  # what transformers itself refuses
            continue
        assert expected is None or read_here == expected, key
        n += 1
    assert n > 10


def test_a_missing_size_is_named() -> None:
    stated = whole("SmolLM3ForCausalLM", TINY["smollm3"].config)
    del stated["hidden_size"]
    with pytest.raises(BadFile, match="the setting 'hidden_size' is missing"):
        shape_of("SmolLM3ForCausalLM", stated)


@pytest.mark.parametrize(
    ("name", "older"),
    [
        ("gpt-oss", {"rope_theta": 5e4}),
        *((name, {key: None}) for name in ("gpt-oss", "mistral3") for key in ("rope_scaling", "rope_parameters")),
    ],
)
def test_a_file_that_states_no_scaling_has_that_of_its_class(name: str, older: dict[str, Any]) -> None:
    kind = TINY[name].kind
    stated = whole(kind, TINY[name].config)
    del stated["rope_parameters"]
    assert shape_of(kind, {**stated, **older}) == shape_of(kind, whole(kind, {**stated, **older}))


def test_a_file_that_states_its_own_scaling_takes_nothing_from_the_usual_one() -> None:
    stated = whole("GptOssForCausalLM", TINY["gpt-oss"].config)
    del stated["rope_parameters"]
    older = {"rope_theta": 5e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    (rope,) = shape_of("GptOssForCausalLM", {**stated, **older}).rope_kinds
    assert (rope.base, set(rope.divisors or ())) == (5e4, {2.0})


@pytest.mark.parametrize("name", ["qwen2-window", "qwen3-moe-window"])
def test_a_window_without_a_size_is_that_of_the_class_and_null_is_none(name: str) -> None:
    kind = TINY[name].kind
    stated = whole(kind, {**TINY[name].config, "use_sliding_window": True})
    stated = {key: value for key, value in stated.items() if key not in ("sliding_window", "layer_types")}
    for unstated, window in (({}, 4096), ({"sliding_window": None}, None)):
        layers = shape_of(kind, {**stated, **unstated}).attention.values()
        assert list(layers)[-1].window == window
        assert whole(kind, {**stated, **unstated})["sliding_window"] == window


def test_a_gemma4_of_more_than_ten_layers_has_the_sizes_of_each() -> None:
    """transformers writes their numbers as 05 and 11."""
    few = dict(TINY["gemma4"].config)
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    own = {"head_dim": 2 * few["head_dim"]}
    many = {**few, "num_hidden_layers": 12, "layer_types": 2 * kinds, "per_layer_config": {"5": own, "11": own}}
    many["num_kv_shared_layers"] = 0
    assert "05" in whole("Gemma4ForCausalLM", many)["per_layer_config"]
    _, shape = read("Gemma4ForCausalLM", many)
    assert [one.head_width for one in shape.attention.values()] == 2 * ([few["head_dim"]] * 5 + [own["head_dim"]])


def test_a_query_temperature_of_zero_is_none() -> None:
    """As Devstral 2 states it."""
    config = dict(TINY["mistral3"].config)
    _, shape = read("Ministral3ForCausalLM", config)
    flat = {**config, "rope_parameters": {**config["rope_parameters"], "llama_4_scaling_beta": 0.0}}
    _, without = read("Ministral3ForCausalLM", flat)
    assert all(one.temperature is not None for one in shape.attention.values())
    assert without == shape.with_attention(temperature=None)


@pytest.mark.parametrize("given", [(1.0, 1.0), (0.7, 0.0), (0.0, 0.7), (0.7, 0.4), (None, 0.7), (0.7, None)])
def test_the_amplitude_of_yarn_is_that_of_transformers(given: tuple[float | None, float | None]) -> None:
    shares = zip(("mscale", "mscale_all_dim"), given, strict=True)
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {key: share for key, share in shares if share is not None}
    config = {**TINY["llama"].config, "rope_parameters": rope}
    made = transformers.LlamaConfig(**json.loads(json.dumps(config)))
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](made, torch.device("cpu"))
    (found,) = read("LlamaForCausalLM", config)[1].rope_kinds
    assert found.amplitude == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "part"), [("qwen2-moe", "shared_expert_gate.weight"), ("ernie4-5-moe", "e_score_correction_bias")]
)
def test_a_matrix_of_one_row_may_be_a_vector_in_gguf(name: str, part: str, tmp_path: Path, tiny_files: Path) -> None:
    """Converters write it as the folder has it; until December 2024 they wrote a vector."""
    config, weights = tiny.parts_of(name, tiny_files)
    rows = [key for key in weights if key.endswith(part)]
    answers = []
    for shape in ((1, -1), (-1,)):
        weights |= {key: weights[key].reshape(shape) for key in rows}
        tiny_gguf.write(tmp_path / f"{len(shape)}.gguf", str(TINY[name].architecture), config, weights)
        with LLM(tmp_path / f"{len(shape)}.gguf", device="cpu", context=64) as llm:
            answers.append(llm.generate([5, 9, 2, 77], Sampling(max_tokens=16, temperature=0)).token_ids)
    assert rows
    assert answers[0] == answers[1]


def test_a_qwen2_without_biases_in_gguf_is_one_whose_biases_are_zero(tmp_path: Path, tiny_files: Path) -> None:
    """As KORMo is converted."""
    config, weights = tiny.parts_of("qwen2", tiny_files)
    zero = {key: weights[key] * 0 for key in weights if key.endswith("_proj.bias")}
    without = {key: value for key, value in weights.items() if key not in zero}
    rows = []
    for name, tensors in (("zero", {**weights, **zero}), ("without", without)):
        tiny_gguf.write(tmp_path / f"{name}.gguf", "qwen2", config, tensors)
        with LLM(tmp_path / f"{name}.gguf", device="cpu", context=64) as llm:
            rows.append(torch.from_numpy(llm.logits([5, 9, 2, 77])))
    assert zero
    torch.testing.assert_close(*rows, atol=tiny.TOLERANCE, rtol=0)
