"""Decoders for retrieval: qwen3 embeddings, whose files say how to pool and which prompts there are, and rerankers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors

from ostinato import LLM
from ostinato.errors import BadFile, BadInput, BadOption, Unsupported
from ostinato.files.checkpoint import open_checkpoint
from ostinato.models.registry import read_shape
from tests.models import tiny, tiny_encoders, tiny_gguf, tiny_text

pytestmark = pytest.mark.slow

TEXTS = ("Once upon a time", "the people", "a", "and so on, and on")
PROMPTS = {"query": "find: ", "document": ""}
PAIR = "<|im_start|>system\nyes or no?<|im_end|>\n{query} | {document}\n"
YES, NO = 40, 41


def as_sentence_transformer(name: str, tmp: Path, **stated: Any) -> Path:
    """A folder as sentence-transformers writes it: the inner model alone, and files that say what to do with it."""
    path = tiny.folder(name, tmp)
    tensors = load_file(path / "model.safetensors")
    inner = {key.removeprefix("model."): value for key, value in tensors.items() if key != "lm_head.weight"}
    save_file(inner, path / "model.safetensors", metadata={"format": "pt"})
    tiny_encoders.write_pooling(path, "last")
    content = {"prompts": PROMPTS, "default_prompt_name": None, **stated}
    (path / "config_sentence_transformers.json").write_text(json.dumps(content))
    known = Tokenizer.from_file(str(path / "tokenizer.json"))
    end = known.id_to_token(tiny_text.EOS)
    known.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tiny_text.EOS)]
    )
    known.save(str(path / "tokenizer.json"))
    return path


def vector(name: str, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        row = tiny.build(name).model(torch.tensor([ids])).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(row, dim=0)


def assert_same(found: np.ndarray[Any, Any], wanted: torch.Tensor) -> None:
    cosines = (found * wanted.numpy()).sum(-1)
    assert (1 - cosines).max() < 1e-6


@pytest.mark.parametrize("mode", ["loop", "eager"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-wide"])
def test_a_folder_of_qwen3_embeddings_takes_the_last_row_with_its_end_token(
    name: str, mode: str, tmp_path: Path
) -> None:
    with LLM(as_sentence_transformer(name, tmp_path), device="cpu", mode=mode) as llm:
        ids = [llm.tokenize(text) for text in TEXTS]
        assert {text[-1] for text in ids} == {tiny_text.EOS}
        assert (llm.shape.pooling, llm.shape.normalise) == ("last", True)
        assert_same(llm.embed(TEXTS), torch.stack([vector(name, text) for text in ids]))
        asked = llm.tokenize(PROMPTS["query"] + TEXTS[0])
        assert_same(llm.embed([TEXTS[0]], prompt="query"), vector(name, asked)[None])
        with pytest.raises(BadOption, match=r"unknown prompt 'querry'.*query"):
            llm.embed(TEXTS, prompt="querry")


def test_a_prompt_that_the_files_name_is_used_unless_another_is_asked_for(tmp_path: Path) -> None:
    with LLM(as_sentence_transformer("qwen3", tmp_path, default_prompt_name="query"), device="cpu") as llm:
        with_prompt, without = llm.embed([TEXTS[0]]), llm.embed([TEXTS[0]], prompt="document")
        np.testing.assert_array_equal(with_prompt, llm.embed([PROMPTS["query"] + TEXTS[0]], prompt="document"))
        assert not np.allclose(with_prompt, without, atol=1e-3)


@pytest.mark.parametrize(
    ("stated", "why"),
    [({"prompts": ["query"]}, "prompts must be"), ({"default_prompt_name": "x"}, "default_prompt_name is 'x'")],
)
def test_prompts_that_cannot_be_are_refused(stated: Mapping[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=why):
        LLM(as_sentence_transformer("qwen3", tmp_path, **stated), device="cpu")


def written(name: str, tmp: Path, head: torch.Tensor | None = None, **facts: Any) -> Path:
    """A GGUF file with these facts besides, and a head of two words where it is given."""
    config, tensors = tiny.parts_of(name, tmp)
    tensors = tensors if head is None else {**tensors, "cls.output.weight": head}
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, str: gguf.GGUFValueType.STRING}

    def change(metadata: dict[str, Any]) -> None:
        for key, value in facts.items():
            kind = gguf.GGUFValueType.ARRAY if isinstance(value, list) else kinds[type(value)]
            sub = gguf.GGUFValueType.STRING if isinstance(value, list) else None
            metadata[key.replace("__", ".")] = gguf.GGUFValue(value=value, type=kind, sub_type=sub)

    path = tmp / f"{name}-retrieval.gguf"
    tiny_gguf.write(path, "qwen3", config, tensors, change=change)
    return path


def test_a_gguf_file_of_qwen3_embeddings_pools_as_it_says(tmp_path: Path) -> None:
    path = written("qwen3", tmp_path, qwen3__pooling_type=3, tokenizer__ggml__add_eos_token=True)
    with LLM(path, device="cpu") as llm:
        ids = [llm.tokenize(text) for text in TEXTS]
        assert {text[-1] for text in ids} == {tiny_text.EOS}
        assert_same(llm.embed(TEXTS), torch.stack([vector("qwen3", text) for text in ids]))
        with pytest.raises(BadOption, match="none, its files have no prompts"):
            llm.embed(TEXTS, prompt="query")


def reranker(tmp: Path, **facts: Any) -> Path:
    head = tiny.build("qwen3").lm_head.weight.detach()
    stated = {"qwen3__pooling_type": 4, "qwen3__classifier__output_labels": ["yes", "no"]}
    return written(
        "qwen3", tmp, head[[YES, NO]].clone(), **{**stated, "tokenizer__chat_template__rerank": PAIR, **facts}
    )


@pytest.mark.parametrize("mode", ["loop", "eager"])
def test_a_qwen3_reranker_scores_by_how_likely_yes_is(mode: str, tmp_path: Path) -> None:
    with LLM(reranker(tmp_path), device="cpu", mode=mode) as llm:
        found = llm.rank(TEXTS[0], TEXTS[1:])
        ids = [llm.tokenizer.encode_rendered(f"<|im_start|>system\nyes or no?<|im_end|>\n{TEXTS[0]} | {text}\n")
               for text in TEXTS[1:]]  # fmt: skip
    assert found.shape == (3, 1)
    for score, text in zip(found, ids, strict=True):
        with torch.inference_mode():
            words = tiny.build("qwen3")(torch.tensor([text])).logits[0, -1, [YES, NO]]
        wanted = float(torch.softmax(words, 0)[0])
        assert abs(1 / (1 + np.exp(-score[0])) - wanted) < 1e-5


def test_a_qwen3_without_a_head_does_not_rank_and_one_of_other_words_is_refused(tmp_path: Path) -> None:
    with LLM(tiny.gguf("qwen3", tmp_path), device="cpu") as llm, pytest.raises(BadInput, match="ranking head"):
        llm.rank("a", ["b"])
    with pytest.raises(Unsupported, match="ranks by"):
        read_shape(open_checkpoint(reranker(tmp_path, qwen3__classifier__output_labels=["good", "bad"])))


def test_a_template_for_pairs_must_have_both_places(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"must be a text with \{query\}"):
        LLM(reranker(tmp_path, tokenizer__chat_template__rerank="{document} {query}"), device="cpu")
