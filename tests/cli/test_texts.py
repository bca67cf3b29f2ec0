"""`tokenize`, `score` and `embed` on a tiny model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.cli import tiny_model
from tests.cli.conftest import RunCli
from tests.models import tiny_encoders


def tokens(ostinato: RunCli, *arguments: str | Path, stdin: bytes = b"") -> dict[str, list[object]]:
    ran = ostinato("tokenize", "--json", *arguments, stdin=stdin)
    assert ran.code == 0, ran.err
    found: dict[str, list[object]] = json.loads(ran.out)
    return found


def test_tokens_have_ids_and_pieces(ostinato: RunCli, vocabulary: Path) -> None:
    found = tokens(ostinato, "--model", vocabulary, "hi there")
    assert list(found) == ["ids", "pieces"]
    assert found["pieces"] == ["h", "i", " the", "re"]


def test_plain_output_has_a_line_per_token(ostinato: RunCli, vocabulary: Path) -> None:
    ran = ostinato("tokenize", "--model", vocabulary, 'a"\n')
    assert [line.split("\t")[1] for line in ran.out.splitlines()] == ['"a"', '"\\""', '"\\n"']
    assert ran.err == ""


def test_standard_input_is_taken_byte_for_byte(ostinato: RunCli, vocabulary: Path) -> None:
    found = tokens(ostinato, "--model", vocabulary, stdin=b"a\r\nb\r\n\n")
    assert found["pieces"] == ["a", "\r", "\n", "b", "\r", "\n", "\n"]


@pytest.mark.parametrize("words", [("",), ()])
def test_tokenize_of_nothing_gives_an_empty_list(ostinato: RunCli, vocabulary: Path, words: tuple[str, ...]) -> None:
    assert tokens(ostinato, "--model", vocabulary, *words) == {"ids": [], "pieces": []}
    assert ostinato("tokenize", "--model", vocabulary, *words).out == ""


def test_special_tokens_are_text_unless_asked_for(ostinato: RunCli, vocabulary: Path) -> None:
    text = "<|im_end|>"
    assert tokens(ostinato, "--model", vocabulary, "--special", text)["ids"] == [2]
    assert "".join(map(str, tokens(ostinato, "--model", vocabulary, text)["pieces"])) == text


def test_no_bos_leaves_the_first_token_out(ostinato: RunCli, tmp_path: Path) -> None:
    def add_bos(metadata: dict[str, object]) -> None:
        metadata["tokenizer.ggml.add_bos_token"].value = True  # type: ignore[attr-defined]  # a field of the writer

    path = tiny_model.write(tmp_path / "bos.gguf", vocabulary_only=True, change=add_bos)
    with_bos = tokens(ostinato, "--model", path, "hi")["ids"]
    assert with_bos == [1, *tokens(ostinato, "--model", path, "--no-bos", "hi")["ids"]]
    assert tokens(ostinato, "--model", path, "")["ids"] == []


def test_a_wrong_byte_is_refused_with_its_offset(ostinato: RunCli, vocabulary: Path) -> None:
    ran = ostinato("tokenize", "--model", vocabulary, stdin=b"ab\xe2\x82")
    assert ran.code == 2
    assert "standard input is not UTF-8: byte 0xe2 at offset 2" in ran.err


def test_an_argument_with_a_wrong_byte_is_refused_too(vocabulary: Path) -> None:
    command = [sys.executable, "-m", "ostinato", "tokenize", "--model", str(vocabulary)]
    ran = subprocess.run([*map(os.fsencode, command), b"ab\xff"], capture_output=True)
    assert ran.returncode == 2
    assert b"the text is not UTF-8: byte 0xff at offset 2" in ran.stderr


def test_a_file_that_is_no_model_is_named(ostinato: RunCli, tmp_path: Path) -> None:
    file = tmp_path / "notes.gguf"
    file.write_text("these are notes")
    ran = ostinato("tokenize", "--model", file, "hi")
    assert ran.code == 2
    assert str(file) in ran.err


def test_score_gives_tokens_likelihood_and_perplexity(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("the rain in the land")
    ran = ostinato("score", "--json", "--model", tiny, "--file", file)
    assert ran.code == 0, ran.err
    record = json.loads(ran.out)
    assert record["perplexity"] == pytest.approx(math.exp(record["nll"] / record["n_tokens"]))
    n_tokens = len(json.loads(ostinato("tokenize", "--json", "--model", tiny, file.read_text("utf-8")).out)["ids"])
    assert record["n_tokens"] == n_tokens - 1
    plain = dict(line.split(maxsplit=1) for line in ostinato("score", "--model", tiny, "--file", file).out.splitlines())
    assert list(plain) == ["n_tokens", "nll", "perplexity"]
    assert plain["n_tokens"].startswith(f"{n_tokens - 1} (the first token is not predicted")
    assert float(plain["nll"]) == pytest.approx(record["nll"], abs=1e-5)
    as_argument = ostinato("score", "--json", "--model", tiny, file.read_text("utf-8"))
    assert as_argument.out == ran.out
    from_stdin = ostinato("score", "--json", "--model", tiny, stdin=file.read_bytes())
    assert json.loads(from_stdin.out) == record


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--file", "/no/such"), "cannot read /no/such"), ((), "is empty")],
)
def test_score_refuses_a_text_it_cannot_read(ostinato: RunCli, arguments: tuple[str, ...], message: str) -> None:
    ran = ostinato("score", *arguments)
    assert ran.code == 2
    assert message in ran.err


def test_embed_gives_a_vector_per_text(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:
    ran = ostinato("embed", "--json", "--model", tiny, "one", "two")
    assert ran.code == 0, ran.err
    record = json.loads(ran.out)
    assert [len(vector) for vector in record["embeddings"]] == [32, 32]
    file = tmp_path / "texts.txt"
    file.write_text("one\ntwo\n")
    lines = ostinato("embed", "--model", tiny, "--file", file).out.splitlines()
    numbers = [[float(number) for number in line.split()] for line in lines]
    assert numbers == [pytest.approx(vector, abs=1e-6) for vector in record["embeddings"]]


def test_embed_pools_as_asked(ostinato: RunCli, tiny: Path) -> None:
    found = [
        json.loads(ostinato("embed", "--json", "--model", tiny, "--pooling", kind, "one two").out)["embeddings"]
        for kind in ("mean", "last", "cls")
    ]
    own = json.loads(ostinato("embed", "--json", "--model", tiny, "one two").out)
    assert (own["pooling"], own["embeddings"]) == ("mean", found[0])
    assert found[0] != found[1] != found[2]
    assert ostinato("embed", "--model", tiny, "--pooling", "max", "one").code == 2


def test_embed_pools_the_models_own_way_unless_told(ostinato: RunCli, tmp_path: Path) -> None:
    encoder = tiny_encoders.gguf("bert-cls", tmp_path)
    own, cls, mean = (
        json.loads(ostinato("embed", "--json", "--model", encoder, *words, "one two").out)
        for words in ((), ("--pooling", "cls"), ("--pooling", "mean"))
    )
    assert own == cls
    assert own["embeddings"] != mean["embeddings"]


def test_ranking_asks_for_a_model_that_ranks(ostinato: RunCli, tiny: Path) -> None:
    ran = ostinato("embed", "--model", tiny, "--pooling", "rank", "one")
    assert ran.code == 2
    assert "ranking head" in ran.err


@pytest.mark.parametrize("form", [(), ("--json",)])
@pytest.mark.parametrize("verb", ["score", "embed", "run"])
def test_a_model_that_computes_no_numbers_is_said_to_be_damaged(
    ostinato: RunCli, tmp_path: Path, verb: str, form: tuple[str, ...]
) -> None:
    folder = tiny_model.write_folder(tmp_path / "damaged")
    weights = tiny_model.tensors()
    weights["model.norm.weight"] *= float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ran = ostinato(verb, *form, "--model", folder, stdin=b"one two")
    assert (ran.code, ran.out) == (2, "")
    assert "values that are not numbers" in ran.err
    assert str(folder) in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no text to embed"),
        (("a", "--file", "b"), "given twice"),
        (("a", ""), "text 2 of 2 is empty"),
    ],
)
def test_embed_refuses_what_has_no_vector(ostinato: RunCli, arguments: tuple[str, ...], message: str) -> None:
    ran = ostinato("embed", *arguments)
    assert ran.code == 2
    assert message in ran.err
