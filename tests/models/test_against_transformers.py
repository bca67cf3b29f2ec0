"""Every family in every format computes what transformers computes: logits in float32, and 64 greedy tokens.

Under `make soak` every tiny model makes these 64 tokens alone and beside three other prompts, with its prompt in one
piece and in two.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.testing import assert_close

from ostinato import LLM, Sampling
from ostinato.files.checkpoint import open_checkpoint
from ostinato.models.registry import read_shape, table_of, why_left_out
from tests.counts import soaking
from tests.models import tiny, tiny_gguf, tiny_text

pytestmark = pytest.mark.slow  # together they take seconds

GREEDY: Final = Sampling(max_tokens=tiny.N_GREEDY, temperature=0, ignore_eos=True)


ROUTERS: Final = ("mlp.gate.weight", "feed_forward.gate.weight", "mixer.gate.weight")


def opened(path: Path, **options: Any) -> LLM:
    return LLM(path, device="cpu", **{name: value for name, value in options.items() if value is not None})


def assert_logits(name: str, llm: LLM) -> None:
    """Of a prompt, every row. In tiles, quantised weights are multiplied with activations of 15 bits."""
    wanted = tiny.reference_logits(name)
    rounded = llm.activations is not None and tiny.TINY[name].storage in ("quantised", "MXFP4")
    near = 1e-3 * float(wanted.abs().max()) if rounded else tiny.TOLERANCE
    assert_close(torch.from_numpy(llm.logits(tiny.prompt(name))), wanted, atol=near, rtol=0)


@pytest.fixture(scope="module", params=tiny.CASES, ids=lambda case: "-".join(case))
def case(request: pytest.FixtureRequest, tiny_files: Path) -> Iterator[tuple[str, LLM]]:
    """A tiny model's name, and the model opened from one of its formats."""
    name, form = request.param
    with opened(tiny.written(name, form, tiny_files), context=tiny.TINY[name].context) as llm:
        yield name, llm


def test_logits_equal_those_of_transformers(case: tuple[str, LLM]) -> None:
    """E-23."""
    assert_logits(*case)


@pytest.mark.slow
def test_64_greedy_tokens_equal_those_of_transformers(case: tuple[str, LLM]) -> None:
    name, llm = case
    answer = llm.generate(tiny.prompt(name), GREEDY).token_ids
    assert answer == tiny.reference_greedy(name, guess=answer)


@pytest.mark.soak
@pytest.mark.parametrize("name", list(tiny.TINY) if soaking() else ["olmo3", "hunyuan", "cohere2", "mistral3"])
def test_four_prompts_at_once_and_a_prompt_in_two_pieces_give_the_same_tokens(name: str, tiny_files: Path) -> None:
    """`make soak` makes 64 tokens with every model, `make test` 12 with a few."""
    ids, few = tiny.prompt(name), replace(GREEDY, max_tokens=tiny.N_GREEDY if soaking() else 12)
    prompts = [ids, ids[5:], ids[::-1], ids[:30] + ids[:9]]
    with opened(tiny.folder(name, tiny_files), context=tiny.TINY[name].context, slots=4) as llm:
        together = [answer.token_ids for answer in llm.generate(prompts, few)]
        alone = [llm.generate(prompt, few).token_ids for prompt in prompts]  # each behind what it has in common
    with opened(tiny.folder(name, tiny_files), context=tiny.TINY[name].context) as llm:
        llm.generate(ids[:20], replace(few, max_tokens=1))
        cut = llm.generate(ids, few).token_ids
    assert together == alone
    assert cut == together[0]
    if soaking():
        assert cut == tiny.reference_greedy(name, guess=cut)


@pytest.mark.parametrize("mode", ["eager", "loop"])
@pytest.mark.parametrize("name", ["lfm2-moe", "deepseek-v3", "glm4-moe", "ernie4-5-moe", "nemotron-h-moe", "laguna"])
def test_a_router_that_is_nearly_sure_gives_the_shares_of_transformers(name: str, mode: str, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny.build(name))
    path = tiny.folder(name, tmp_path)
    _, tensors = tiny.parts_of(name, tmp_path)
    for own in (tensors, model.state_dict()):
        for at, tensor in own.items():
            if at.endswith(ROUTERS):
                tensor.mul_(6)
            elif at.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.view(-1)[:2] = 2.0  # the choice is of two experts, whatever their scores are
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    ids = tiny.prompt(name)
    with torch.inference_mode():
        wanted = model(torch.tensor([ids]), use_cache=False).logits[0]
    with opened(path, mode=mode) as llm:
        assert_close(torch.from_numpy(llm.logits(ids)), wanted, atol=2 * tiny.TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("gemma4", {"hidden_activation": "gelu"}),
        ("gemma4-moe", {"hidden_activation": "gelu"}),
        ("gptneox", {"hidden_act": "gelu_fast"}),  # GPT-NeoX 20B
        # Not read by these classes.
        *((name, {"sliding_window": tiny.WINDOW}) for name in ("llama", "granite", "glm4-moe", "bamba", "nemotron-h")),
        *((name, {"hidden_act": "gelu"}) for name in ("lfm2", "lfm2-moe", "gpt2")),
        ("deepseek-v2", {"head_dim": 8}),
        ("gemma4", {"vocab_size_per_layer_input": 200}),
        ("mamba", {"expand": 3}),
        ("nemotron-h", {"expand": 3}),
    ],
    ids=str,
)
def test_a_key_of_a_config_means_what_it_means_to_transformers(
    name: str, stated: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny.folder(name, tmp_path)
    config, _ = tiny.parts_of(name, tmp_path)
    (path / "config.json").write_text(json.dumps({**config, **stated}))
    kind, ids = getattr(transformers, tiny.TINY[name].kind), tiny.prompt(name)
    theirs = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids]), use_cache=False).logits[0]
    with opened(path) as llm:
        assert_close(torch.from_numpy(llm.logits(ids)), wanted, atol=tiny.TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", [one for one in tiny.TINY if one.endswith("-vision")])
def test_the_vision_part_of_a_folder_is_left_out_of_memory_and_said(name: str, tiny_files: Path) -> None:
    with open_checkpoint(tiny.folder(name, tiny_files)) as checkpoint:
        said = why_left_out(checkpoint)
        loaded = table_of(checkpoint).names.values()
        n_left = len(checkpoint.tensors) - len(loaded)
    assert said is not None
    assert f"only the text part runs; {n_left} tensors for pictures" in said
    assert not any("vis" in tensor for tensor in loaded)


@pytest.mark.parametrize("form", ["gguf", "current"])
def test_layers_that_predict_further_tokens_are_left_out_of_memory_and_said(form: str, tmp_path: Path) -> None:
    config, tensors = tiny.parts_of("qwen35", tmp_path)
    n_layers = config["num_hidden_layers"]
    if form == "gguf":
        more = {f"blk.{n_layers}.{name}.weight": torch.ones(64) for name in ("nextn.enorm", "attn_norm")}

        def one_more(metadata: dict[str, Any]) -> None:
            n_blocks = metadata["qwen35.block_count"]
            n_blocks.value += 1
            metadata["qwen35.nextn_predict_layers"] = replace(n_blocks, value=1)

        tiny_gguf.write(tmp_path / "more.gguf", "qwen35", config, {**tensors, **more}, change=one_more)
        path = tmp_path / "more.gguf"
    else:
        more = {f"mtp.{name}.weight": torch.ones(64) for name in ("norm", "layers.0.input_layernorm")}
        path = tiny.folder("qwen35", tmp_path)
        save_file({**tensors, **more}, path / "model.safetensors", metadata={"format": "pt"})
    with open_checkpoint(path) as checkpoint:
        said = why_left_out(checkpoint)
    assert said == f"{path}: 2 tensors for multi-token prediction (0.00 GB) are not loaded"
    with opened(path) as llm:
        assert_logits("qwen35", llm)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_a_layer_numbered_on_that_predicts_further_tokens_is_left_out(name: str, tmp_path: Path) -> None:
    path = tiny.folder(name, tmp_path)
    config, tensors = tiny.parts_of(name, tmp_path)
    n_layers = config["num_hidden_layers"]
    more = {at: torch.ones(64) for at in ("eh_proj.weight", "enorm.weight", "input_layernorm.weight")}
    tensors |= {f"model.layers.{n_layers}.{at}": tensor for at, tensor in more.items()}
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with open_checkpoint(path) as checkpoint:
        assert "3 tensors for multi-token prediction" in str(why_left_out(checkpoint))
    with opened(path) as llm:
        assert_logits(name, llm)


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("llama-tied", True)])
def test_a_head_beside_an_embedding_that_is_said_to_be_it_is_used_if_it_is_another(
    name: str, tied: bool, tmp_path: Path
) -> None:
    path = tiny.folder(name, tmp_path)
    config, tensors = tiny.parts_of(name, tmp_path)
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with open_checkpoint(path) as checkpoint:
        assert read_shape(checkpoint).tied_head == tied
    with opened(path) as llm:
        assert_logits(name, llm)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_a_folder_in_several_shards_is_one_model(name: str, tiny_files: Path) -> None:
    path = tiny.folder(name, tiny_files, shard_size="60KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    with opened(path) as llm:
        assert_logits(name, llm)


@pytest.mark.parametrize("name", ["llama-quantised", "phi3-long"])
def test_a_gguf_in_three_parts_is_one_model(name: str, tmp_path: Path) -> None:
    first = tiny.gguf(name, tmp_path, parts=3)
    assert len(list(tmp_path.glob("*-of-00003.gguf"))) == 3
    with opened(first, context=tiny.TINY[name].context) as llm:
        assert_logits(name, llm)


def test_a_mixtral_gguf_of_the_first_kind_has_one_tensor_for_each_expert(tmp_path: Path) -> None:
    config, tensors = tiny.parts_of("mixtral", tmp_path)
    matrices = {"w1": "gate", "w2": "down", "w3": "up"}
    for name in [name for name in tensors if ".experts." in name]:
        layer, expert, matrix = (name.split(".")[place] for place in (2, 5, 6))
        tensors[f"blk.{layer}.ffn_{matrices[matrix]}.{expert}.weight"] = tensors.pop(name)
    tiny_gguf.write(tmp_path / "old.gguf", "llama", config, tensors)
    with opened(tmp_path / "old.gguf") as llm:
        assert_logits("mixtral", llm)


def test_a_qwen3next_gguf_of_the_first_kind_has_one_tensor_by_key_heads(tmp_path: Path) -> None:
    config, tensors = tiny.parts_of("qwen3-next", tmp_path)
    for name in [name for name in tensors if name.endswith("in_proj_qkvz.weight")]:
        tensors[f"blk.{name.split('.')[2]}.ssm_in.weight"] = tensors.pop(name)
    tiny_gguf.write(tmp_path / "old.gguf", "qwen3next", config, tensors)
    with opened(tmp_path / "old.gguf") as llm:
        assert_logits("qwen3-next", llm)


@pytest.mark.parametrize("form", ["gguf", "current", "original"])
def test_longrope_takes_its_original_context_unless_asked_for_more(form: str, tiny_files: Path) -> None:
    with opened(tiny.written("phi3-short", form, tiny_files)) as llm:
        assert llm.context == 256


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mixtral", "gpt2"])
def test_bfloat16_compute_stays_near_float32(name: str, tiny_files: Path) -> None:
    with opened(tiny.folder(name, tiny_files), dtype="bfloat16") as llm:
        difference = (torch.from_numpy(llm.logits(tiny.prompt(name))) - tiny.reference_logits(name)).abs()
    assert float(difference.mean()) < 0.05


def test_one_token_alone_has_the_logits_of_transformers(tiny_files: Path) -> None:
    with opened(tiny.gguf("gemma2", tiny_files)) as llm:
        assert_close(torch.from_numpy(llm.logits([5])), tiny.forward("gemma2", [5]), atol=tiny.TOLERANCE, rtol=0)


def test_logits_are_float32_rows_of_the_vocabulary(tiny_files: Path) -> None:
    with opened(tiny.gguf("llama", tiny_files)) as llm:
        logits = llm.logits([5, 6, 7])
    assert logits.shape == (3, tiny.VOCAB_SIZE)
    assert logits.dtype == np.float32


@pytest.mark.parametrize("form", ["gguf", "current"])
def test_both_formats_of_a_model_read_the_same_text_alike(form: str, tiny_files: Path) -> None:
    text = "The wake event in the tower, and 12 more — naïve 東京 🙂."
    with opened(tiny.written("llama", form, tiny_files)) as llm:
        assert llm.tokenize(text) == tiny_text.tokenizer().encode(text, add_special_tokens=False).ids
        assert llm.detokenize(llm.tokenize(text)) == text
        assert llm.template is not None
        asked = llm.template.render([{"role": "user", "content": "hi"}])
    assert asked == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_greedy_after_a_chat_is_the_same_from_both_formats(tiny_files: Path) -> None:
    messages = [{"role": "user", "content": "Who is there?"}]
    answers = []
    for form in ("gguf", "current"):
        with opened(tiny.written("llama", form, tiny_files)) as llm:
            answers.append(llm.chat(messages, GREEDY).token_ids)
    assert answers[0] == answers[1]
    assert len(answers[0]) == tiny.N_GREEDY
