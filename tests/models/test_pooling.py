"""What a folder's sentence-transformers files say of vectors is followed, wherever it lies, or refused by name."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, normalizers
from torch import Tensor
from torch.testing import assert_close

from ostinato import LLM
from ostinato.errors import BadFile, BadInput, Unsupported
from ostinato.files.checkpoint import open_checkpoint
from ostinato.files.safetensors import SafetensorsFolder
from ostinato.models.registry import read_shape
from tests.models import tiny, tiny_encoders
from tests.models.tiny_encoders import TEXTS

IDENTITY = "torch.nn.modules.linear.Identity"
DENSE_WIDTHS = (64, 48, 96, 32)
Modules = Sequence[tuple[str, str]]


def folder_of(tmp: Path, modules: Modules, pooling: str = "mean") -> Path:
    """A bert whose modules.json lists these kinds and paths; the pooling's settings lie where the path says."""
    path = tiny_encoders.folder("bert", tmp)
    stated = [{"path": where, "type": f"sentence_transformers.models.{kind}"} for kind, where in modules]
    (path / "modules.json").write_text(json.dumps(stated))
    for kind, where in modules:
        if kind == "Pooling":
            write_json(path / where / "config.json", {"pooling_mode": pooling})
    return path


def usual(*more: tuple[str, str]) -> Modules:
    return [("Transformer", ""), ("Pooling", "1_Pooling"), *more]


def write_json(path: Path, stated: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stated))


def write_dense(folder: Path, weight: Tensor, bias: Tensor | None = None, **stated: Any) -> None:
    settings = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": bias is not None, **stated}
    write_json(folder / "config.json", settings)
    tensors = {"linear.weight": weight} if bias is None else {"linear.weight": weight, "linear.bias": bias}
    save_file(tensors, folder / "model.safetensors")


def rows_of(text: str) -> Tensor:
    return tiny_encoders.rows("bert", tiny_encoders.ids_of(text))


def shape_of(path: Path) -> Any:
    """All that is known before a weight is read."""
    with open_checkpoint(path) as checkpoint:
        return read_shape(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["loop", "eager"])
@pytest.mark.parametrize("normalise", [True, False])
def test_every_dense_module_is_a_product_in_its_turn_wherever_it_lies(
    mode: str, normalise: bool, tmp_path: Path
) -> None:
    places = ("2_Dense", "projection", "parts/last")
    path = folder_of(tmp_path, usual(*(("Dense", p) for p in places), *[("Normalize", "5_Normalize")] * normalise))
    random = torch.Generator().manual_seed(3)
    weights = [torch.randn(out, width, generator=random) / width**0.5 for width, out in pairwise(DENSE_WIDTHS)]
    bias = torch.randn(DENSE_WIDTHS[2], generator=random)
    for place, weight in zip(places, weights, strict=True):
        write_dense(path / place, weight, bias if place == "projection" else None, activation_function=IDENTITY)
    first, second, third = weights
    wanted = torch.stack([third @ (second @ (first @ rows_of(text).mean(0)) + bias) for text in TEXTS])
    wanted = torch.nn.functional.normalize(wanted, dim=1) if normalise else wanted
    with LLM(path, device="cpu", mode=mode) as llm:
        found = torch.from_numpy(llm.embed(TEXTS))
        assert llm.shape.vector_width == DENSE_WIDTHS[-1]
        assert_close(found, wanted, atol=tiny.TOLERANCE, rtol=0)


@pytest.mark.slow
def test_a_dense_folder_that_no_module_names_has_no_part_in_vectors(tmp_path: Path) -> None:
    path = folder_of(tmp_path, usual(("Dense", "2_Dense_32")))
    weight, other = torch.eye(32, 64), torch.ones(16, 64)
    write_dense(path / "2_Dense_32", weight, activation_function=IDENTITY)
    write_dense(path / "2_Dense", other, activation_function=IDENTITY)
    with LLM(path, device="cpu") as llm:
        found = torch.from_numpy(llm.embed(TEXTS[:1]))[0]
    assert_close(found, rows_of(TEXTS[0]).mean(0)[:32], atol=tiny.TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cls", "lasttoken"])
def test_the_settings_of_a_pooling_are_read_in_the_folder_that_its_module_names(how: str, tmp_path: Path) -> None:
    path = folder_of(tmp_path, [("Transformer", ""), ("Pooling", "pool")], how)
    write_json(path / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    wanted = torch.stack([rows_of(text)[0 if how == "cls" else -1] for text in TEXTS])
    with LLM(path, device="cpu") as llm:
        assert_close(torch.from_numpy(llm.embed(TEXTS)), wanted, atol=tiny.TOLERANCE, rtol=0)


@pytest.mark.slow
def test_a_pooling_in_another_folder_leaves_a_prompt_out_where_it_says_so(tmp_path: Path) -> None:
    path = folder_of(tmp_path, [("Transformer", ""), ("Pooling", "pool")])
    write_json(path / "pool" / "config.json", {"pooling_mode": "mean", "include_prompt": False})
    write_json(path / "config_sentence_transformers.json", {"prompts": {"query": "who was "}})
    n_left_out = len(tiny_encoders.ids_of("who was ")) - 1
    wanted = rows_of("who was " + TEXTS[0])[n_left_out:].mean(0)
    with LLM(path, device="cpu") as llm:
        found = torch.from_numpy(llm.embed(TEXTS[:1], prompt="query"))[0]
    assert_close(found, wanted, atol=tiny.TOLERANCE, rtol=0)


def test_a_pooling_in_another_folder_is_part_of_a_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    seen = set()
    for how in ("cls", "mean"):
        with SafetensorsFolder(folder_of(tmp_path, [("Transformer", ""), ("Pooling", "pool")], how)) as opened:
            seen.add(opened.fingerprint())
    assert len(seen) == 2


# What is refused, before weights are read


def test_a_dense_module_that_states_no_activation_is_refused_as_the_tanh_that_it_is(tmp_path: Path) -> None:
    path = folder_of(tmp_path, usual(("Dense", "proj")))
    write_dense(path / "proj", torch.eye(32, 64))
    with pytest.raises(Unsupported, match=r"proj/config\.json: states no activation_function.*Tanh"):
        shape_of(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("module_input_name", "token_embeddings"), ("module_output_name", "scores"), ("use_residual", True)],
)
def test_a_dense_module_that_is_more_than_a_product_of_the_vector_is_refused(
    name: str, value: Any, tmp_path: Path
) -> None:
    path = folder_of(tmp_path, usual(("Dense", "2_Dense")))
    plain: dict[str, Any] = {"activation_function": IDENTITY, "module_output_name": None, "use_residual": False}
    write_dense(path / "2_Dense", torch.eye(32, 64), **plain)
    assert shape_of(path).vector_width == 32
    write_dense(path / "2_Dense", torch.eye(32, 64), **{**plain, name: value})
    with pytest.raises(Unsupported, match=rf"2_Dense/config\.json: {name} of a Dense module is '?{value}"):
        shape_of(path)


@pytest.mark.parametrize(
    ("modules", "error", "why"),
    [
        (usual(("Normalize", "2"), ("Dense", "3")), Unsupported, "run as Transformer, Pooling, Normalize, Dense"),
        ([("Transformer", ""), ("Dense", "1"), ("Pooling", "2")], Unsupported, "run as Transformer, Dense, Pooling"),
        (usual(("Pooling", "2_Pooling")), Unsupported, "run as Transformer, Pooling, Pooling"),
        (usual(("LayerNorm", "2"), ("WordWeights", "3")), Unsupported, "kind LayerNorm, WordWeights are not supported"),
        ([("Transformer", "0_Transformer"), ("Pooling", "1")], Unsupported, "Transformer lies in 0_Transformer"),
        ([("Transformer", ""), ("Pooling", "../else")], BadFile, r"module 1 has the path '\.\./else'"),
        ([("Transformer", ""), ("Pooling", "/etc")], BadFile, "module 1 has the path '/etc'"),
    ],
    ids=["norm-first", "dense-first", "two-poolings", "unknown", "model-elsewhere", "above", "absolute"],
)
def test_modules_that_would_give_other_vectors_are_refused_by_name(
    modules: Modules, error: type[BadInput], why: str, tmp_path: Path
) -> None:
    path = folder_of(tmp_path, [("Transformer", "")])
    stated = [{"path": where, "type": f"sentence_transformers.models.{kind}"} for kind, where in modules]
    (path / "modules.json").write_text(json.dumps(stated))
    with pytest.raises(error, match=rf"modules\.json.*{why}"):
        shape_of(path)


def test_a_module_of_another_package_is_not_taken_for_one_of_sentence_transformers(tmp_path: Path) -> None:
    path = folder_of(tmp_path, usual())
    stated = json.loads((path / "modules.json").read_text())
    stated[1]["type"] = "custom_st.Pooling"
    (path / "modules.json").write_text(json.dumps(stated))
    with pytest.raises(Unsupported, match=r"custom_st\.Pooling"):
        shape_of(path)


@pytest.mark.parametrize("stated", [{}, [1], [{"type": "sentence_transformers.models.Transformer"}]])
def test_a_list_of_modules_that_is_none_is_refused(stated: Any, tmp_path: Path) -> None:
    path = folder_of(tmp_path, usual())
    (path / "modules.json").write_text(json.dumps(stated))
    with pytest.raises(BadFile, match=r"modules\.json: .*fetch"):
        shape_of(path)


def test_a_pooling_whose_settings_are_missing_is_not_taken_for_a_mean(tmp_path: Path) -> None:
    path = folder_of(tmp_path, usual())
    (path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(BadFile, match=r"1_Pooling/config\.json is missing"):
        shape_of(path)


def without_case(path: Path, change: Callable[[Tokenizer], None]) -> None:
    """sentence-transformers is told to make texts lower-case."""
    write_json(path / "sentence_bert_config.json", {"max_seq_length": 128, "do_lower_case": True})
    known = Tokenizer.from_file(str(path / "tokenizer.json"))
    change(known)
    known.save(str(path / "tokenizer.json"))


CASED = normalizers.BertNormalizer(lowercase=False)


@pytest.mark.parametrize("normalizer", [None, CASED, normalizers.Sequence([CASED, normalizers.NFC()])])
def test_lower_case_that_the_tokenizer_does_not_make_is_refused(normalizer: Any, tmp_path: Path) -> None:
    path = folder_of(tmp_path, usual())
    without_case(path, lambda known: setattr(known, "normalizer", normalizer))
    with pytest.raises(Unsupported, match=r"sentence_bert_config\.json: do_lower_case is true"):
        shape_of(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "normalizer",
    [normalizers.BertNormalizer(lowercase=True), normalizers.Sequence([normalizers.Lowercase(), CASED])],
    ids=["bert", "sequence"],
)
def test_lower_case_that_the_tokenizer_makes_is_no_reason_to_refuse(normalizer: Any, tmp_path: Path) -> None:
    path = folder_of(tmp_path, usual())
    without_case(path, lambda known: setattr(known, "normalizer", normalizer))
    with LLM(path, device="cpu") as llm:
        np.testing.assert_array_equal(llm.embed("The People"), llm.embed("the people"))
