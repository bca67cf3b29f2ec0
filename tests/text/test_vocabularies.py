"""Ids of whole vocabularies against those that another implementation made."""

from pathlib import Path

import pytest

from ostinato.files.checkpoint import open_checkpoint
from ostinato.text.tokenizer import Tokenizer, tokenizer_from_gguf
from tests.counts import soaking

NAMES = ["bert-bge", "deepseek-llm", "falcon", "gpt-2", "llama-spm", "phi-3"]
# Those that llama.cpp's source adds: two new kinds in every run, all of them in `make soak`.
SOURCE_NAMES = ["gemma-4", "qwen35", "command-r", "deepseek-coder", "llama-bpe", "mpt", "qwen2", "refact", "starcoder"]
WITHOUT_TEXTS = ["gpt-neox", "nomic-bert-moe"]  # compared on random texts (`test_against_llama_cpp.py`)
IN_SOURCE = SOURCE_NAMES if soaking() else SOURCE_NAMES[:2]
SEPARATOR = "\n__ggml_vocab_test__\n"


def load(file: Path) -> Tokenizer:
    checkpoint = open_checkpoint(file)
    try:
        return tokenizer_from_gguf(checkpoint.metadata, file)
    finally:
        checkpoint.close()


def test_every_vocabulary_of_the_data_folder_is_in_the_list(vocab_data: Path) -> None:
    assert sorted(file.stem for file in vocab_data.glob("*.gguf")) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_the_other_implementation(vocab_data: Path, name: str) -> None:
    compare(vocab_data / f"{name}.gguf")


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", IN_SOURCE)
def test_ids_are_those_of_the_source_of_llama_cpp(llama_cpp_models: Path, name: str) -> None:
    compare(llama_cpp_models / f"ggml-vocab-{name}.gguf")


def compare(file: Path) -> None:
    """Ids of the texts beside a vocabulary, and the texts of these ids where the vocabulary keeps all of a text."""
    tokenizer = load(file)
    texts = file.with_suffix(".gguf.inp").read_text(encoding="utf-8").split(SEPARATOR)
    lines = file.with_suffix(".gguf.out").read_text(encoding="utf-8").split("\n")[: len(texts)]
    expected = [[int(word) for word in line.split()] for line in lines]
    assert len(expected) == len(texts) > 40
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, bos=False) == ids, repr(text)
        assert tokenizer.decode(ids) == text or file.stem == "bert-bge"


def test_special_ids_are_as_the_files_say(vocab_data: Path) -> None:
    phi3 = load(vocab_data / "phi-3.gguf")
    assert (phi3.bos_id, phi3.eos_id, phi3.add_bos, phi3.add_eos) == (1, 32000, True, False)
    assert {phi3.token_text(id) for id in phi3.eog_ids} == {"<|endoftext|>", "</s>", "<|end|>"}
    assert phi3.encode("")[:1] == [1]
    bert = load(vocab_data / "bert-bge.gguf")
    assert bert.encode("hello world") == [101, 7592, 2088, 102]
    assert bert.decode(bert.encode("hello world")) == "hello world"
    assert bert.decode([101, 7592, 102], special=True) == "[CLS] hello[SEP]"
