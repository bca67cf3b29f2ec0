"""Encoders, in every form that people have, give the rows and scores of transformers."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from ostinato import LLM, Sampling
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.cells.decoder import Decoder
from ostinato.decoder.cells.text_encoder import BATCH_TOKENS
from ostinato.errors import BadFile, BadInput, PromptTooLong, Unsupported
from ostinato.files.checkpoint import open_checkpoint
from ostinato.models.registry import read_shape
from tests.models import plain_memory, tiny, tiny_encoders
from tests.models.tiny_encoders import ENCODERS, RANKERS

pytestmark = pytest.mark.slow  # together they take seconds


@pytest.mark.parametrize(("name", "form"), tiny_encoders.CASES, ids=lambda part: part)
def test_hidden_rows_equal_those_of_transformers(name: str, form: str, tiny_files: Path) -> None:
    model = plain_memory.load(tiny_encoders.written(name, form, tiny_files))
    for text in tiny_encoders.TEXTS:
        ids = tiny_encoders.ids_of(text)
        found = plain_memory.hidden(model, ids)
        assert_close(found, tiny_encoders.rows(name, ids), atol=tiny.TOLERANCE, rtol=0)


@pytest.mark.parametrize(("name", "form"), [c for c in tiny_encoders.CASES if c[0] in RANKERS], ids=lambda part: part)
def test_scores_of_a_pair_equal_those_of_transformers(name: str, form: str, tiny_files: Path) -> None:
    model = plain_memory.load(tiny_encoders.written(name, form, tiny_files))
    ids, types = tiny_encoders.pair(name)
    rows = plain_memory.hidden(model, ids, types=types)
    pooled = rows.mean(0, keepdim=True) if model.shape.rank_by == "mean" else rows[:1]
    with torch.inference_mode():
        found = model.rank(pooled)
    assert found.shape == (1, model.shape.n_classes)
    assert_close(found[0], tiny_encoders.scores(name, ids, types), atol=tiny.TOLERANCE, rtol=0)


def test_which_of_two_texts_a_token_is_of_matters(tiny_files: Path) -> None:
    model = plain_memory.load(tiny_encoders.folder("bert", tiny_files))
    ids, types = tiny_encoders.pair()
    assert not torch.allclose(plain_memory.hidden(model, ids), plain_memory.hidden(model, ids, types=types), atol=0.1)


@pytest.mark.parametrize(
    ("name", "form", "pooling"),
    [
        ("bert", "current", "mean"),
        ("bert", "gguf", "mean"),
        ("bert-cls", "current", "cls"),
        ("bert-cls", "gguf", "cls"),
        ("bert-last", "current", "last"),
        ("bert-rank", "current", "rank"),
        ("bert-rank", "gguf", "rank"),
        ("xlm-roberta", "current", "cls"),
        ("xlm-roberta-rank", "current", "rank"),
        ("modern-bert", "gguf", "cls"),
        ("modern-bert-rank", "current", "rank"),
        ("gemma-embedding", "current", "mean"),
        ("gemma-embedding", "gguf", "mean"),
        ("nomic-bert", "current", "mean"),
        ("nomic-bert", "gguf", "mean"),
    ],
)
def test_an_encoder_pools_as_its_file_says(name: str, form: str, pooling: str, tiny_files: Path) -> None:
    shape = read_shape(open_checkpoint(tiny_encoders.written(name, form, tiny_files)))
    assert (shape.pooling, shape.causal, shape.normalise) == (pooling, False, True)
    assert shape.n_classes == ENCODERS[name].config.get("num_labels")


def test_an_encoder_has_no_logits_and_one_without_a_head_does_not_rank(tiny_files: Path) -> None:
    model = plain_memory.load(tiny_encoders.gguf("bert", tiny_files))
    rows = plain_memory.hidden(model, [2, 3])
    with pytest.raises(Unsupported, match="encoder"):
        model.logits(rows)
    with pytest.raises(Unsupported, match="rank"):
        model.rank(rows)


def edited(path: Path, tmp: Path, name: str, change: Any) -> Path:
    """A copy of a folder with one of its JSON files changed."""
    copy = tmp / "edited"
    copy.mkdir()
    for file in path.rglob("*"):
        if file.is_file():
            (copy / file.relative_to(path)).parent.mkdir(exist_ok=True)
            (copy / file.relative_to(path)).write_bytes(file.read_bytes())
    stated = json.loads((copy / name).read_text())
    stated = change(stated) or stated
    (copy / name).write_text(json.dumps(stated))
    return copy


def test_vectors_are_as_long_as_they_come_where_a_folder_has_no_norm_for_them(tmp_path: Path, tiny_files: Path) -> None:
    path = edited(tiny_encoders.folder("bert-cls", tiny_files), tmp_path, "modules.json", lambda m: m[:2])
    assert not read_shape(open_checkpoint(path)).normalise


def test_the_newer_way_to_state_pooling_is_read(tmp_path: Path, tiny_files: Path) -> None:
    source = tiny_encoders.folder("nomic-bert", tiny_files)
    path = edited(source, tmp_path, "1_Pooling/config.json", lambda c: {"pooling_mode": "cls"})
    assert read_shape(open_checkpoint(path)).pooling == "cls"


@pytest.mark.parametrize("mode", ["max_tokens", "weightedmean_tokens"])
def test_pooling_that_is_not_supported_is_named(mode: str, tmp_path: Path, tiny_files: Path) -> None:
    source = tiny_encoders.folder("bert-cls", tiny_files)
    path = edited(source, tmp_path, "1_Pooling/config.json", lambda c: {f"pooling_mode_{mode}": True})
    with pytest.raises(Unsupported, match=mode):
        read_shape(open_checkpoint(path))


def test_a_layer_after_the_pooling_is_refused_by_name(tmp_path: Path, tiny_files: Path) -> None:
    more = {"idx": 3, "name": "3", "path": "3_LSTM", "type": "sentence_transformers.models.LSTM"}
    source = tiny_encoders.folder("bert-cls", tiny_files)
    path = edited(source, tmp_path, "modules.json", lambda modules: [*modules, more])
    with pytest.raises(Unsupported, match="LSTM"):
        read_shape(open_checkpoint(path))


def test_a_product_after_the_pooling_must_be_that_alone_and_be_there(tmp_path: Path, tiny_files: Path) -> None:
    source = tiny_encoders.folder("gemma-embedding", tiny_files)
    curved = {"activation_function": "torch.nn.modules.activation.Tanh"}
    with pytest.raises(Unsupported, match="Tanh of a Dense module"):
        read_shape(open_checkpoint(edited(source, tmp_path, "2_Dense/config.json", lambda stated: curved)))
    assert read_shape(open_checkpoint(source)).vector_width == 64
    (tmp_path / "without").mkdir()
    path = edited(source, tmp_path / "without", "config.json", lambda stated: stated)
    (path / "3_Dense" / "model.safetensors").unlink()
    with pytest.raises(BadFile, match="3_Dense"):
        read_shape(open_checkpoint(path))


@pytest.mark.parametrize(
    ("name", "original", "key", "value"),
    [
        ("bert", False, "position_embedding_type", "relative_key"),
        ("bert", False, "is_decoder", True),
        ("bert", False, "hidden_act", "relu"),
        ("xlm-roberta", False, "pad_token_id", 0),
        ("modern-bert", False, "norm_bias", True),
        ("modern-bert", False, "classifier_activation", "silu"),
        ("modern-bert", False, "classifier_pooling", "max"),
        ("gemma-embedding", False, "use_bidirectional_attention", False),
        ("nomic-bert", False, "head_dim", 8),
        ("nomic-bert", True, "moe_every_n_layers", 2),
        ("nomic-bert", True, "qkv_proj_bias", True),
        ("nomic-bert", True, "rotary_emb_fraction", 0.5),
        ("nomic-bert", True, "activation_function", "gelu"),
    ],
)
def test_what_an_encoder_may_be_and_is_not_here_is_refused(
    name: str, original: bool, key: str, value: Any, tmp_path: Path, tiny_files: Path
) -> None:
    source = tiny_encoders.folder(name, tiny_files, original=original)
    path = edited(source, tmp_path, "config.json", lambda c: c.update({key: value}))
    with pytest.raises(Unsupported):
        read_shape(open_checkpoint(path))


@pytest.mark.parametrize(("kind", "message"), [(4, "rank"), (9, "pooling_type")])
def test_a_pooling_type_without_a_head_or_a_meaning_is_refused(
    kind: int, message: str, tmp_path: Path, tiny_files: Path
) -> None:
    import gguf

    def change(metadata: dict[str, Any]) -> None:
        metadata["bert.pooling_type"] = gguf.GGUFValue(value=kind, type=gguf.GGUFValueType.UINT32)

    tiny_encoders.folder("bert", tiny_files)
    (tmp_path / "bert-current").symlink_to(tiny_files / "bert-current")
    path = tiny_encoders.gguf("bert", tmp_path, change=change)
    with pytest.raises(BadFile, match=message):
        read_shape(open_checkpoint(path))


# Through the encode path


@pytest.mark.parametrize("mode", ["loop", "eager"])
@pytest.mark.parametrize(("name", "form"), tiny_encoders.CASES, ids=lambda part: part)
def test_embeddings_of_texts_equal_those_of_transformers(name: str, form: str, mode: str, tiny_files: Path) -> None:
    ids = [tiny_encoders.ids_of(text) for text in tiny_encoders.TEXTS]
    with LLM(tiny_encoders.written(name, form, tiny_files), device="cpu", mode=mode) as llm:
        assert llm.mode == mode
        assert [llm.tokenize(text) for text in tiny_encoders.TEXTS] == ids
        found = torch.from_numpy(llm.embed(tiny_encoders.TEXTS))
    if name in RANKERS:
        wanted = torch.stack([tiny_encoders.scores(name, row, [0] * len(row)) for row in ids])
    else:
        wanted = torch.stack([tiny_encoders.vector(name, row) for row in ids])
    assert_close(found, wanted, atol=tiny.TOLERANCE, rtol=0)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_embeddings_of_a_shape_that_people_use_are_those_of_transformers(pooling: str, tiny_files: Path) -> None:
    """Six layers of 384, heads of 32, as MiniLM has them; texts of every length up to its positions."""
    texts = [[2, *[5 + (i * 7 + n) % 290 for i in range(n - 2)], 3] for n in (3, 17, 130, 255, 257, 512)]
    with LLM(tiny_encoders.folder("minilm", tiny_files), device="cpu") as llm:
        assert (llm.mode, llm.shape.widest(lambda a: a.head_width)) == ("loop", 32)
        found = llm.embed(texts, pooling)
        with pytest.raises(PromptTooLong, match="513 tokens and the context holds 512"):
            llm.embed([texts[-1] + [3]])
    for text, vector in zip(texts, found, strict=True):
        rows = tiny_encoders.rows("minilm", text)
        wanted = torch.nn.functional.normalize(rows[0] if pooling == "cls" else rows.mean(0), dim=0)
        assert float(torch.from_numpy(vector) @ wanted) >= 0.99999


def test_torch_embeds_a_text_alike_alone_and_among_others(tiny_files: Path) -> None:
    with LLM(tiny_encoders.gguf("nomic-bert", tiny_files), device="cpu", mode="eager") as llm:
        together = llm.embed(tiny_encoders.TEXTS)
        alone = np.concatenate([llm.embed(text) for text in tiny_encoders.TEXTS])
    np.testing.assert_allclose(together, alone, atol=1e-5, rtol=0)


def test_vectors_and_scores_have_the_bits_that_they_have_alone_while_other_threads_ask(tiny_files: Path) -> None:
    texts = [*tiny_encoders.TEXTS, *tiny_encoders.PAIR] * 4
    with LLM(tiny_encoders.gguf("bert-rank", tiny_files), device="cpu", threads=2) as llm:
        alone = [(llm.embed([text], "mean"), llm.rank(text, texts[:1])) for text in texts[:6]]
        with ThreadPoolExecutor(6) as callers:
            asked = callers.map(lambda n: (llm.embed(texts[n:], "mean"), llm.rank(texts[n], texts)), range(6))
            for (vector, score), (vectors, scores) in zip(alone, asked, strict=True):
                np.testing.assert_array_equal(vectors[:1], vector)
                np.testing.assert_array_equal(scores[:1], score)
    with pytest.raises(BadInput, match="closed"):
        llm.embed(texts)


@pytest.mark.parametrize("activations", ["wide", "int8"])
def test_an_encoder_of_packed_weights_is_near_the_same_numbers_dense(activations: Any, tmp_path: Path) -> None:
    path = tiny_encoders.gguf("bert", tmp_path, storage="quantised")
    with LLM(path, device="cpu", activations=activations) as packed, LLM(path, device="cpu", mode="eager") as dense:
        assert (packed.activations, dense.activations) == (activations, None)
        cosines = (packed.embed(tiny_encoders.TEXTS) * dense.embed(tiny_encoders.TEXTS)).sum(-1)
    assert cosines.min() >= (0.9999 if activations == "wide" else 0.99)


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from ostinato import LLM, Sampling
embeds, ranks, generates, texts = json.loads(sys.argv[1])
with LLM(embeds, device="cpu") as llm: print(json.dumps(llm.embed(texts).tolist()))
with LLM(ranks, device="cpu") as llm: print(json.dumps(llm.rank(texts[0], texts).tolist()))
greedy = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
with LLM(generates, device="cpu") as llm: print(json.dumps(llm.generate([5, 6, 7], greedy).token_ids))
"""


def test_encoders_and_gpt2_give_the_same_bits_where_torch_is_not_installed(tiny_files: Path) -> None:
    embeds, ranks = (tiny_encoders.gguf(name, tiny_files) for name in ("nomic-bert", "bert-rank"))
    generates = tiny.gguf("gpt2", tiny_files)
    given = json.dumps([str(embeds), str(ranks), str(generates), tiny_encoders.TEXTS])
    lines = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, given], check=True, capture_output=True, text=True, timeout=120
    ).stdout.splitlines()
    vectors, scores, tokens = map(json.loads, lines)
    with LLM(embeds, device="cpu") as llm:
        assert vectors == llm.embed(tiny_encoders.TEXTS).tolist()
    with LLM(ranks, device="cpu") as llm:
        assert scores == llm.rank(tiny_encoders.TEXTS[0], tiny_encoders.TEXTS).tolist()
    with LLM(generates, device="cpu") as llm:
        greedy = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
        assert tokens == list(llm.generate([5, 6, 7], greedy).token_ids)


def test_torch_takes_many_texts_of_any_length_in_few_batches(tiny_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode = Decoder.decode

    def counted(decoder: Decoder, batch: Batch) -> Any:
        assert batch.token is not None
        sizes.append(np.size(batch.token))
        return decode(decoder, batch)

    monkeypatch.setattr(Decoder, "decode", counted)
    with LLM(tiny_encoders.gguf("nomic-bert", tiny_files), device="cpu", mode="eager", context=64) as llm:
        texts = [[2, *[5 + (i * 7 + n) % 90 for i in range(n)], 3] for n in (1, 50, 30, 62, 8) * 12]
        together = llm.embed(texts)
        assert len(sizes) == 4
        assert max(sizes) <= BATCH_TOKENS
        alone = np.concatenate([llm.embed([text]) for text in texts[-5:]])
    np.testing.assert_allclose(together[-5:], alone, atol=1e-5, rtol=0)


def test_an_encoder_generates_nothing_and_says_so(tiny_files: Path) -> None:
    with (
        LLM(tiny_encoders.gguf("bert", tiny_files), device="cpu") as llm,
        pytest.raises(Unsupported, match="encoder"),
    ):
        llm.generate("the time")


@pytest.mark.parametrize("mode", ["loop", "eager"])
@pytest.mark.parametrize(("name", "form"), [c for c in tiny_encoders.CASES if c[0] in RANKERS], ids=lambda part: part)
def test_ranking_a_text_for_a_query_gives_the_scores_of_transformers(
    name: str, form: str, mode: str, tiny_files: Path
) -> None:
    ids, types = tiny_encoders.pair(name)
    with LLM(tiny_encoders.written(name, form, tiny_files), device="cpu", mode=mode) as llm:
        found = torch.from_numpy(llm.rank(tiny_encoders.PAIR[0], [tiny_encoders.PAIR[1], tiny_encoders.PAIR[0]]))
    assert found.shape[0] == 2
    assert_close(found[0], tiny_encoders.scores(name, ids, types), atol=tiny.TOLERANCE, rtol=0)
    assert not torch.allclose(found[0], found[1], atol=1e-3)


def test_an_encoder_says_that_it_generates_no_text(tiny_files: Path) -> None:
    with LLM(tiny_encoders.folder("bert", tiny_files), device="cpu") as llm:
        with pytest.raises(Unsupported, match="encoder"):
            llm.generate("hello")
        with pytest.raises(BadInput, match="ranking head"):
            llm.rank("hello", ["there"])
