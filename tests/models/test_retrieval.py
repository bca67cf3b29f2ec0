"""Decoders for retrieval: qwen3 embeddings, whose files say how to pool and which prompts there are, and rerankers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
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
    [
        ({"prompts": ["query"]}, "prompts must be"),
        ({"default_prompt_name": "x"}, "default_prompt_name is 'x'"),
        ({"default_prompt_name": []}, r"default_prompt_name is \[\]"),
        ({"default_prompt_name": {}}, "default_prompt_name is {}"),
    ],
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


# What a prompt's rows are to a vector


@pytest.mark.parametrize("mode", ["loop", "eager"])
@pytest.mark.parametrize("how", ["mean", "cls", "last"])
@pytest.mark.parametrize("included", [True, False])
def test_a_prompt_is_left_out_of_a_vector_where_the_files_say_so(
    how: str, mode: str, included: bool, tmp_path: Path
) -> None:
    path = as_sentence_transformer("qwen3", tmp_path)
    state_pooling(path, how, include_prompt=included)
    known = Tokenizer.from_file(str(path / "tokenizer.json"))
    n_left_out = 0 if included else len(known.encode(PROMPTS["query"]).ids) - 1  # its end token stands after the text
    with LLM(path, device="cpu", mode=mode) as llm:
        assert_same(llm.embed(TEXTS, prompt="query"), by_rows(hidden, known, how, "query", n_left_out))
        assert_same(llm.embed(TEXTS, prompt="document"), by_rows(hidden, known, how, "document", 0))
        given = known.encode(PROMPTS["query"] + TEXTS[0]).ids
        assert_same(llm.embed([given]), pooled(hidden(given), how)[None])  # ids are taken as they are


@pytest.mark.parametrize("mode", ["loop", "eager"])
@pytest.mark.parametrize("how", ["mean", "cls"])
def test_an_encoder_leaves_a_prompt_out_of_a_vector(how: str, mode: str, tmp_path: Path) -> None:
    path = tiny_encoders.folder("bert", tmp_path)
    state_pooling(path, how, include_prompt=False)
    (path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "who was "}}))
    texts = [*tiny_encoders.TEXTS, ""]  # of the last one, the end token is left
    n_left_out = len(tiny_encoders.ids_of("who was ")) - 1
    rows = [tiny_encoders.rows("bert", tiny_encoders.ids_of("who was " + text)) for text in texts]
    wanted = torch.stack([pooled(text[n_left_out:], how) for text in rows])
    with LLM(path, device="cpu", mode=mode) as llm:
        assert_same(llm.embed(texts, prompt="query"), wanted)
        assert not np.allclose(llm.embed(texts), wanted, atol=1e-3)


def state_pooling(path: Path, how: str, **more: Any) -> None:
    tiny_encoders.write_pooling(path, how)
    file = path / "1_Pooling" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))


def hidden(ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        rows: torch.Tensor = tiny.build("qwen3").model(torch.tensor([ids])).last_hidden_state[0]
    return rows


def pooled(rows: torch.Tensor, how: str) -> torch.Tensor:
    row = {"mean": rows.mean(0), "cls": rows[0], "last": rows[-1]}[how]
    return torch.nn.functional.normalize(row, dim=0)


def by_rows(
    rows_of: Callable[[list[int]], torch.Tensor], known: Tokenizer, how: str, prompt: str, n_left_out: int
) -> torch.Tensor:
    ids = [known.encode(PROMPTS[prompt] + text).ids for text in TEXTS]
    return torch.stack([pooled(rows_of(text)[n_left_out:], how) for text in ids])


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


# Folders that rank

PAIR_TEMPLATE = (
    "{%- set asked = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first -%}"
    "<|im_start|>user\n{{ asked | default('is it so?') }} "
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} | "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>\n"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IN_PARTS = PAIR_TEMPLATE.replace("map(attribute='content') | first", "map(attribute='content') | first | first).text")
IN_PARTS = IN_PARTS.replace("{{ messages", "{{ (messages").replace(
    "{%- set asked = messages", "{%- set asked = (messages"
)
CHAT_ONLY = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


def by_words(
    tmp: Path, *, template: str | None = PAIR_TEMPLATE, calls: Mapping[str, Any] | None = None, **stated: Any
) -> Path:
    """A folder of a causal model that ranks by the logits of two tokens, as sentence-transformers writes it."""
    path = tiny.folder("qwen3", tmp)
    write_modules(path, "Transformer", "LogitScore")
    (path / "1_LogitScore").mkdir()
    words = {"true_token_id": YES, "false_token_id": NO, **stated}
    (path / "1_LogitScore" / "config.json").write_text(json.dumps(words))
    prompts = {"prompts": {"web": "for the web:", "code": "for code:"}, "default_prompt_name": "web"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    calls = {"add_generation_prompt": True, "max_length": 64} if calls is None else calls
    (path / "sentence_bert_config.json").write_text(json.dumps({"processing_kwargs": {"chat_template": calls}}))
    write_template(path, template)
    return path


def write_modules(path: Path, *kinds: str) -> None:
    modules = [
        {"idx": number, "path": f"{number}_{kind}" if number else "", "type": f"sentence_transformers.{kind}"}
        for number, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))


def write_template(path: Path, template: str | None) -> None:
    (path / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)


def pair_as_transformers_writes_it(path: Path, query: str, text: str, prompt: str, **options: Any) -> list[int]:
    known = transformers.AutoTokenizer.from_pretrained(path)
    messages = [("system", prompt), ("query", query), ("document", text)]
    ids: list[int] = known.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        chat_template=PAIR_TEMPLATE, tokenize=True, return_dict=False, **options,
    )  # fmt: skip
    return ids


def logits_after(ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        row: torch.Tensor = tiny.build("qwen3")(torch.tensor([ids])).logits[0, -1]
    return row


@pytest.mark.parametrize("mode", ["loop", "eager"])
@pytest.mark.parametrize("template", [PAIR_TEMPLATE, IN_PARTS], ids=["text", "parts"])
def test_a_folder_of_a_language_model_ranks_by_the_words_that_it_names(
    template: str, mode: str, tmp_path: Path
) -> None:
    path = by_words(tmp_path, template=template)
    for prompt, asked in ((None, "for the web:"), ("code", "for code:")):
        with LLM(path, device="cpu", mode=mode) as llm:
            found = llm.rank(TEXTS[0], TEXTS[1:], prompt=prompt)
        for score, text in zip(found, TEXTS[1:], strict=True):
            ids = pair_as_transformers_writes_it(path, TEXTS[0], text, asked, add_generation_prompt=True)
            words = logits_after(ids)
            np.testing.assert_allclose(score, [float(words[YES] - words[NO])], atol=1e-4)


def test_a_folder_may_rank_by_one_word_and_without_a_generation_prompt(tmp_path: Path) -> None:
    path = by_words(tmp_path, calls={}, false_token_id=None)
    with LLM(path, device="cpu") as llm:
        assert (llm.shape.pooling, llm.shape.n_classes) == ("rank", 1)
        found = llm.rank(TEXTS[0], TEXTS[1:2])
        with pytest.raises(BadOption, match=r"unknown prompt 'wen'.*web"):
            llm.rank(TEXTS[0], TEXTS, prompt="wen")
    ids = pair_as_transformers_writes_it(path, TEXTS[0], TEXTS[1], "for the web:")
    np.testing.assert_allclose(found, [[float(logits_after(ids)[YES])]], atol=1e-4)


@pytest.mark.parametrize("mode", ["loop", "eager"])
@pytest.mark.parametrize("template", [None, PAIR_TEMPLATE], ids=["plain", "template"])
def test_a_folder_of_a_qwen3_with_a_head_of_classes_ranks_by_its_last_row(
    template: str | None, mode: str, tmp_path: Path
) -> None:
    path = tiny.folder("qwen3", tmp_path)
    torch.manual_seed(5)
    config = transformers.AutoConfig.from_pretrained(path, num_labels=1)
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(path)
    write_template(path, template)
    known = transformers.AutoTokenizer.from_pretrained(path)
    with LLM(path, device="cpu", mode=mode) as llm:
        found = llm.rank(TEXTS[0], TEXTS[1:])
    for score, text in zip(found, TEXTS[1:], strict=True):
        ids = (
            known(TEXTS[0], text)["input_ids"]
            if template is None
            else known.apply_chat_template(
                [{"role": "query", "content": TEXTS[0]}, {"role": "document", "content": text}], return_dict=False
            )
        )
        with torch.inference_mode():
            wanted = model(torch.tensor([ids])).logits[0]
        np.testing.assert_allclose(score, wanted.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("changed", "error", "why"),
    [
        ({"true_token_id": 10**6}, BadFile, "must be ids from 0"),
        ({"true_token_id": None}, BadFile, "must be ids from 0"),
        ({"template": None}, BadFile, "needs a chat template"),
        ({"template": CHAT_ONLY}, BadFile, "does not write a query and a document"),
        ({"calls": {"chat_template": "rerank"}}, Unsupported, "chat_template in processing_kwargs"),
        ({"calls": ["add_generation_prompt"]}, BadFile, "processing_kwargs must be"),
    ],
)
def test_a_folder_that_cannot_rank_as_it_says_is_refused(
    changed: Mapping[str, Any], error: type[Exception], why: str, tmp_path: Path
) -> None:
    path = by_words(tmp_path, **changed)
    with pytest.raises(error, match=why), LLM(path, device="cpu") as llm:
        llm.rank("a", ["b"])


def test_a_folder_of_a_plain_language_model_says_how_it_would_rank(tmp_path: Path) -> None:
    with LLM(tiny.folder("qwen3", tmp_path), device="cpu") as llm, pytest.raises(BadInput, match=r"modules\.json"):
        llm.rank("a", ["b"])
