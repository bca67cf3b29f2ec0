"""Tokenizers of safetensors folders: tokenizer.json as it is, with special ids from the files beside it."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from ostinato.errors import BadFile, Unsupported
from ostinato.text.folder import tokenizer_from_folder
from ostinato.text.stream import TextStream
from ostinato.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level, sentencepiece

AWKWARD = ["", " ", "hello the  ab\n\n123", "é 👍🏽 日本", "a<|im_end|>b <tool> x", "  two", "\ufffd\u0301"]


def byte_level_library() -> Library:
    metadata = byte_level()
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])]
    library = Library(models.BPE(vocab={text: id for id, text in enumerate(tokens[:-3])}, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True) for text in tokens[-3:-1]])
    library.add_tokens([AddedToken("<tool>", special=False)])
    return library


def sentencepiece_library() -> Library:
    tokens: list[str] = sentencepiece()["tokenizer.ggml.tokens"]
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("▁", "the"),
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("▁", "hello"),
    ]
    vocabulary = {text: id for id, text in enumerate(tokens)}
    library = Library(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return library


def write(folder: Path, library: Library, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def bytes_folder(tmp_path: Path) -> Path:
    return write(tmp_path / "bytes", byte_level_library(), tokenizer_config={"eos_token": "<|im_end|>"})


@pytest.fixture
def pieces_folder(tmp_path: Path) -> Path:
    names = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>"}
    return write(tmp_path / "pieces", sentencepiece_library(), tokenizer_config=names)


@pytest.mark.parametrize("kind", ["bytes_folder", "pieces_folder"])
def test_ids_and_text_are_the_librarys_own(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    library = Library.from_file(str(folder / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(folder)
    for text in AWKWARD:
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, bos=False, special=True) == ids
        assert tokenizer.encode(text, special=True) == library.encode(text).ids
        assert tokenizer.decode(ids) == library.decode(ids)
        streaming = TextStream(tokenizer, [])
        assert "".join([*map(streaming.push, ids), streaming.finish()]) == library.decode(ids)


def test_special_tokens_in_text_are_text_unless_asked_for(bytes_folder: Path) -> None:
    tokenizer = tokenizer_from_folder(bytes_folder)
    assert tokenizer.eos_id in tokenizer.encode("a<|im_end|>", special=True)
    plain = tokenizer.encode("a<|im_end|>")
    assert tokenizer.eos_id not in plain
    assert tokenizer.decode(plain) == "a<|im_end|>"
    assert len(tokenizer.encode("<tool>")) == 1


def test_both_ways_of_reading_specials_work_from_many_threads(bytes_folder: Path) -> None:
    tokenizer = tokenizer_from_folder(bytes_folder)
    expected = {special: tokenizer.encode("x<|im_end|>y" * 50, special=special) for special in (False, True)}
    wrong: list[bool] = []

    def work(special: bool) -> None:
        wrong.extend(tokenizer.encode("x<|im_end|>y" * 50, special=special) != expected[special] for _ in range(50))

    threads = [threading.Thread(target=work, args=(number % 2 == 0,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(wrong)
    assert len(wrong) == 400


def test_bos_and_eos_follow_the_post_processor_and_the_config_speaks_louder(tmp_path: Path) -> None:
    def made(**settings: Any) -> Tokenizer:
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        return tokenizer_from_folder(
            write(tmp_path / "x", sentencepiece_library(), tokenizer_config={**names, **settings})
        )

    assert (made().add_bos, made().add_eos) == (True, False)
    assert made().encode("") == [1]
    assert made(add_bos_token=False).encode("the")[0] != 1
    assert made(add_eos_token=True).encode("the")[-1] == 2
    assert made(add_bos_token=True).encode("the").count(1) == 1


def test_every_end_of_generation_id_of_every_file_is_found(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "ends",
        byte_level_library(),
        tokenizer_config={"eos_token": {"content": "<|im_start|>"}},
        config={"eos_token_id": 7, "vocab_size": 300},
        generation_config={"eos_token_id": [5, 6, 10**7]},
    )
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.token_text(tokenizer.eos_id or 0) == "<|im_start|>"
    named = {tokenizer.token_text(id) for id in tokenizer.eog_ids - {5, 6, 7}}
    assert {5, 6, 7} < tokenizer.eog_ids
    assert named == {"<|im_start|>", "<|im_end|>"}


def test_ids_that_only_the_matrices_have_decode_to_nothing(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(write(tmp_path / "x", byte_level_library(), config={"vocab_size": 512}))
    assert tokenizer.vocab_size == 512
    assert tokenizer.decode([511]) == ""


def test_without_names_the_config_gives_the_ids(tmp_path: Path) -> None:
    config = {"text_config": {"bos_token_id": 3, "eos_token_id": [4, 5]}}
    tokenizer = tokenizer_from_folder(write(tmp_path / "x", byte_level_library(), config=config))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (3, 4)
    assert {4, 5} < tokenizer.eog_ids


@pytest.mark.parametrize(
    ("decoder", "text"),
    [
        (decoders.Metaspace(), "hello the"),
        (decoders.Metaspace(prepend_scheme="never"), " hello the"),
        (decoders.WordPiece(cleanup=False), "▁hello ▁the"),
        (None, "▁hello ▁the"),
    ],
)
def test_other_decoders_are_read_token_by_token(tmp_path: Path, decoder: Any, text: str) -> None:
    library = sentencepiece_library()
    library.decoder = decoder
    tokenizer = tokenizer_from_folder(write(tmp_path / "x", library))
    ids = tokenizer.encode("hello the", bos=False)
    assert tokenizer.decode(ids) == library.decode(ids) == text


def test_a_decoder_that_cannot_be_read_token_by_token_is_refused_by_name(tmp_path: Path) -> None:
    library = sentencepiece_library()
    library.decoder = decoders.CTC()
    with pytest.raises(Unsupported, match="the decoder CTC is not supported"):
        tokenizer_from_folder(write(tmp_path / "x", library))


def test_truncation_and_padding_of_the_file_are_turned_off(tmp_path: Path) -> None:
    library = byte_level_library()
    library.enable_truncation(3)
    library.enable_padding(length=8)
    tokenizer = tokenizer_from_folder(write(tmp_path / "x", library))
    assert len(tokenizer.encode("abcdefghijklmnop")) > 10
    assert len(tokenizer.encode("c")) == 1


def test_a_folder_with_another_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"no tokenizer\.json"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(Unsupported, match=r"tokenizer\.model but no tokenizer\.json.*save_pretrained"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"nonsense",
        b"\xff\xfe",
        b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        b'{"model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}}',
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        b'{"model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}}',
        b'{"model": {"type": "WordPiece", "vocab": {"b": 0}, "unk_token": "[UNK]", "continuing_subword_prefix": "##",'
        b' "max_input_chars_per_word": 100}}',
        b"[" * 100_000,
    ],
)
def test_a_broken_tokenizer_json_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BadFile, match=r"tokenizer\.json"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_broken_file_beside_it_is_refused_with_its_name(bytes_folder: Path, name: str, content: bytes) -> None:
    (bytes_folder / name).write_bytes(content)
    with pytest.raises(BadFile, match=name):
        tokenizer_from_folder(bytes_folder)


@pytest.mark.slow
def test_ids_are_those_of_transformers(pieces_folder: Path, bytes_folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    for folder in (pieces_folder, bytes_folder):
        theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))
        ours = tokenizer_from_folder(folder)
        for text in AWKWARD:
            ids = theirs(text)["input_ids"]
            assert ours.encode(text, special=True) == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)


@pytest.mark.parametrize(("pair", "between"), [("<s> $A </s> </s> $B </s>", (2,)), ("<s> $A </s> $B </s>", ())])
def test_a_pair_is_written_as_the_post_processor_does(tmp_path: Path, pair: str, between: tuple[int, ...]) -> None:
    library = sentencepiece_library()
    ends = [("<s>", 1), ("</s>", 2)]
    library.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair=pair, special_tokens=ends)
    tokenizer = tokenizer_from_folder(write(tmp_path, library))
    assert tokenizer.between == between
    first, second = tokenizer.encode_pair("the", "hello")
    assert [*first, *second] == library.encode("the", "hello").ids
