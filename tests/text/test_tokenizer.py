"""Tokenizers from GGUF metadata: special tokens, beginnings and ends, spaces, and what damaged metadata gets."""

import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import BadFile, BadInput, OstinatoError, Unsupported
from ostinato.files.checkpoint import open_checkpoint
from ostinato.text.tokenizer import Tokenizer, tokenizer_from_gguf
from tests.counts import soak
from tests.text.vocabularies import Metadata, byte_level, sentencepiece, tokenizer_of, wordpiece

BYTES = tokenizer_of(byte_level())
PIECES = tokenizer_of(sentencepiece())


def with_token(metadata: Metadata, text: str, kind: int = 1, **more: Any) -> Metadata:
    """The metadata with one more token at the end."""
    return {
        **metadata,
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], text],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], kind],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def test_control_tokens_in_text_are_text_unless_asked_for() -> None:
    plain = BYTES.encode("a<|im_end|>", bos=False)
    assert BYTES.eos_id not in plain
    assert BYTES.decode(plain) == "a<|im_end|>"
    assert BYTES.encode("a<|im_end|>", bos=False, special=True) == [plain[0], BYTES.eos_id]


def test_user_defined_tokens_are_always_matched_and_shown() -> None:
    ids = BYTES.encode("a<tool>b", bos=False)
    assert len(ids) == 3
    assert BYTES.token_text(ids[1]) == "<tool>"
    assert BYTES.decode(ids) == "a<tool>b"


def test_control_tokens_are_hidden_in_text_unless_asked_for() -> None:
    ids = BYTES.encode("<|im_start|>hi<|im_end|>", bos=False, special=True)
    assert BYTES.decode(ids) == "hi"
    assert BYTES.decode(ids, special=True) == "<|im_start|>hi<|im_end|>"
    assert BYTES.pieces(ids) == ["<|im_start|>", "h", "i", "<|im_end|>"]


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    text = "some words " * 60_000
    ended = threading.Event()
    looks: list[float] = []

    def look() -> None:
        while not ended.wait(0.002):
            looks.append(time.perf_counter())

    other = threading.Thread(target=look)
    other.start()
    began = time.perf_counter()
    tokenizer.encode(text)
    seconds = time.perf_counter() - began
    ended.set()
    other.join()
    # In the middle of it, however loaded the machine: a thread that held the lock would let no other thread look there.
    assert any(0.25 < (at - began) / seconds < 0.75 for at in looks)


def test_a_longer_special_token_wins_over_one_inside_it() -> None:
    tokenizer = tokenizer_of(with_token(byte_level(), "<tool><tool>", 4))
    ids = tokenizer.encode("<tool><tool><tool>", bos=False)
    assert [tokenizer.token_text(id) for id in ids] == ["<tool><tool>", "<tool>"]


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_bos_and_eos_are_added_as_the_file_says(add_bos: bool, add_eos: bool) -> None:
    tokenizer = tokenizer_of(byte_level(add_bos_token=add_bos, add_eos_token=add_eos))
    assert (tokenizer.add_bos, tokenizer.add_eos) == (add_bos, add_eos)
    around = [tokenizer.bos_id] * add_bos, [tokenizer.eos_id] * add_eos
    assert tokenizer.encode("a") == [*around[0], *tokenizer.encode("a", bos=False), *around[1]]
    assert tokenizer.encode("", bos=False) == []


def test_what_a_kind_adds_when_its_file_says_nothing() -> None:
    assert not BYTES.add_bos
    assert tokenizer_of(byte_level("llama-bpe")).add_bos
    assert PIECES.add_bos
    assert not PIECES.add_eos
    words = tokenizer_of(wordpiece())
    assert words.encode("hello") == [2, 4, 3]
    assert tokenizer_of(wordpiece(add_sep_token=False)).encode("hello") == [2, 4]


def test_a_missing_bos_id_adds_nothing() -> None:
    metadata = byte_level("llama-bpe")
    del metadata["tokenizer.ggml.bos_token_id"]
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.bos_id is None
    assert not tokenizer.add_bos
    assert tokenizer.encode("a") == tokenizer.encode("a", bos=False)


def test_end_of_generation_ids_are_all_that_the_file_names_and_known_markers() -> None:
    assert {BYTES.token_text(id) for id in BYTES.eog_ids} == {"<|im_end|>"}
    marked = tokenizer_of(with_token(with_token(byte_level(), "<|eot_id|>", 3), "<|endoftext|>", 1))
    assert {marked.token_text(id) for id in marked.eog_ids} == {"<|im_end|>", "<|eot_id|>", "<|endoftext|>"}
    named = tokenizer_of(byte_level(eot_token_id=5, eom_token_id=6))
    assert {5, 6} < named.eog_ids


def test_an_end_of_message_that_does_not_end_the_turn_is_left_out() -> None:
    metadata = byte_level()
    for text in ("<|end|>", "<|return|>", "<|call|>"):
        metadata = with_token(metadata, text, 3)
    tokenizer = tokenizer_of(metadata)
    assert {tokenizer.token_text(id) for id in tokenizer.eog_ids} == {"<|im_end|>", "<|return|>", "<|call|>"}


def test_an_end_marker_left_as_plain_text_by_a_converter_is_hidden() -> None:
    tokenizer = tokenizer_of(with_token(byte_level(), "<|eot_id|>", 1))
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == ""


def test_a_space_goes_before_a_text_and_after_special_tokens() -> None:
    def texts(text: str, **flags: bool) -> list[str]:
        tokenizer = tokenizer_of(sentencepiece(**flags))
        return [tokenizer.token_text(id) for id in tokenizer.encode(text, bos=False, special=True)]

    assert texts("hello") == ["▁hello"]
    assert texts("hello", add_space_prefix=False) == ["hello"]
    assert texts("hello</s>hello") == ["▁hello", "</s>", "▁hello"]
    assert texts(" hello") == ["▁", "▁hello"] or texts(" hello") == ["▁▁", "hello"]


def test_the_space_before_a_text_is_dropped_on_the_way_back() -> None:
    ids = PIECES.encode("hello the")
    assert PIECES.decode(ids) == "hello the"
    assert PIECES.decode(ids, at_start=False) == " hello the"
    assert PIECES.decode(PIECES.encode("  hello")) == "  hello"
    assert tokenizer_of(sentencepiece(add_space_prefix=False)).decode(ids) == " hello the"


def test_scores_decide_what_merges_first() -> None:
    def texts(score_of_bc: float) -> list[str]:
        metadata = sentencepiece()
        scores = [*metadata["tokenizer.ggml.scores"], score_of_bc]
        tokenizer = tokenizer_of(with_token(metadata, "bc", scores=scores))
        return [tokenizer.token_text(id) for id in tokenizer.encode("abc", bos=False)]

    assert texts(-1.0) == ["▁a", "bc"]
    assert texts(-100.0) == ["▁", "ab", "c"]


def test_text_that_spells_a_byte_or_control_token_is_not_one() -> None:
    for text in ("<0x41>", "<s>", "</s>", "<unk>"):
        ids = PIECES.encode(text, bos=False)
        assert PIECES.decode(ids) == text
        assert not {PIECES.token_text(id) for id in ids} & {text}


def test_what_no_token_covers_falls_back_to_bytes() -> None:
    ids = PIECES.encode("猫", bos=False)
    assert [PIECES.token_text(id) for id in ids] == ["▁", "<0xE7>", "<0x8C>", "<0xAB>"]
    assert PIECES.decode(ids) == "猫"
    assert PIECES.pieces(ids[1:2]) == ["\\xe7"]


def test_wordpiece_cuts_words_and_says_unknown() -> None:
    words = tokenizer_of(wordpiece())

    def texts(text: str) -> list[str]:
        return [words.token_text(id) for id in words.encode(text, bos=False)]

    assert texts("Hello, worlds.") == ["▁hello", "[UNK]", "▁world", "s", "▁."]
    assert texts("unables") == ["▁un", "able", "s"]
    assert words.decode(words.encode("hello worlds")) == "hello worlds"
    cased = tokenizer_of({**wordpiece(), "tokenizer.ggml.normalizer.lowercase": False})
    assert cased.encode("Hello", bos=False) == [1]
    assert cased.encode("é", bos=False) == [12]
    assert words.encode("é", bos=False) == [1]


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(BadInput, match=r"half a character, the surrogate U\+D800"):
        BYTES.encode("a\ud800b")


@pytest.mark.parametrize("id", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_refused(id: int) -> None:
    for use in (lambda: BYTES.decode([id]), lambda: BYTES.pieces([id]), lambda: BYTES.token_text(id)):
        with pytest.raises(BadInput, match=rf"token id {id} is outside the vocabulary of {BYTES.vocab_size}"):
            use()


def test_two_tokens_with_one_text_are_both_shown_and_the_first_is_written() -> None:
    tokenizer = tokenizer_of(with_token(byte_level(), "the", 1))
    assert tokenizer.encode("the", bos=False) == [257]
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "the"


def test_a_tokenizer_of_a_kind_that_is_not_built_here_is_refused_by_name() -> None:
    for kind in ("rwkv", "plamo2", "no_such"):
        with pytest.raises(Unsupported, match=rf"'{kind}' are not supported; supported: .*gpt2"):
            tokenizer_of({**byte_level(), "tokenizer.ggml.model": kind})


def without(metadata: Metadata, key: str) -> Metadata:
    return {k: v for k, v in metadata.items() if k != f"tokenizer.ggml.{key}"}


DAMAGED = {
    "no tokenizer at all": ({}, "holds no tokenizer"),
    "no tokens": (without(byte_level(), "tokens"), "tokens is missing"),
    "no merges": (without(byte_level(), "merges"), "merges is missing"),
    "empty tokens": (byte_level(tokens=[], token_type=[]), "tokens has 0 entries"),
    "tokens are numbers": (byte_level(tokens=[1, 2]), "not a list of strings"),
    "tokens are a string": (byte_level(tokens="abc"), "not a list of strings"),
    "a token is no text": (with_token(byte_level(), "\ud800"), "not valid UTF-8"),
    "merges name nothing": (byte_level(merges=["q zz"]), r"entry 0 \('q zz'\)"),
    "merges make nothing": (byte_level(merges=["t h", "q z"]), r"entry 1 \('q z'\)"),
    "a merge without a space": (byte_level(merges=["th"]), r"entry 0 \('th'\)"),
    "a merge without a right side": (byte_level(merges=["t "]), r"entry 0"),
    "merges are numbers": (byte_level(merges=[1]), "not a list of strings"),
    "too few types": (byte_level(token_type=[1]), "token_type has 1 entries"),
    "types are words": (byte_level(token_type=["a"]), "token_type is not a list of numbers"),
    "types are nested": (byte_level(token_type=[[1], [2]]), "token_type is not a list of numbers"),
    "too many scores": (sentencepiece(scores=[0.0] * 10**5), "scores has 100000 entries"),
    "a score is no number": (sentencepiece(scores=[float("nan")] * 284), "scores"),
    "an id past the end": (byte_level(eos_token_id=10**9), "eos_token_id is 1000000000, but there are"),
    "an id below zero": (byte_level(bos_token_id=-1), "bos_token_id is -1"),
    "an id that is a word": (byte_level(eot_token_id="x"), "eot_token_id is str, not a token id"),
    "an id that is true": (byte_level(bos_token_id=True), "bos_token_id is bool"),
    "a flag that is a number": (byte_level(add_bos_token=1), "add_bos_token is int, not true or false"),
    "a model that is a number": (byte_level(model=7), "model is int, not a string"),
    "a huge token": (with_token(without(sentencepiece(), "scores"), "a" * 5000), "a token of 5000 characters"),
    "no unknown token": (
        wordpiece(tokens=["▁a"], token_type=[1], unknown_token_id=None, cls_token_id=None, seperator_token_id=None),
        "unknown_token_id is missing",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_metadata_is_refused_with_the_key(case: str) -> None:
    metadata, message = DAMAGED[case]
    with pytest.raises(BadFile, match=message) as raised:
        tokenizer_of(metadata)
    assert "tiny.gguf" in str(raised.value)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=soak(3_000), derandomize=True, database=None, deadline=None)
@given(
    kind=st.sampled_from([byte_level, sentencepiece, wordpiece]),
    changes=st.dictionaries(st.sampled_from(sorted({*byte_level(), *sentencepiece(), *wordpiece()})), junk, max_size=4),
)
def test_only_our_errors_come_out_of_junk(kind: Any, changes: Metadata) -> None:
    with suppress(OstinatoError):
        tokenizer = tokenizer_of({**kind(), **changes})
        tokenizer.decode(tokenizer.encode("hello <s> the\n"))


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=soak(3_000), derandomize=True, database=None, deadline=None)
@given(tokens=st.lists(st.text(max_size=4), min_size=1), data=st.data())
def test_any_list_of_tokens_gives_a_tokenizer_or_our_error(tokens: list[str], data: st.DataObject) -> None:
    types = data.draw(st.lists(st.integers(0, 7), min_size=len(tokens), max_size=len(tokens)))
    scores = data.draw(st.lists(st.floats(-10, 10), min_size=len(tokens), max_size=len(tokens)))
    merges = data.draw(st.lists(st.sampled_from(tokens).map(lambda t: f"{t[:1]} {t[1:]}"), max_size=5))
    lists = {"tokens": tokens, "token_type": types, "scores": scores, "merges": merges, "pre": "gpt-2"}
    for model in ("gpt2", "llama", "bert"):
        metadata = {f"tokenizer.ggml.{key}": value for key, value in {**lists, "model": model}.items()}
        with suppress(OstinatoError):
            tokenizer = tokenizer_of(metadata)
            tokenizer.decode(tokenizer.encode("".join(tokens), special=True))


@pytest.mark.model
def test_the_default_tokenizer_builds_quickly(default_model: Path) -> None:
    metadata = open_checkpoint(default_model).metadata
    times = []
    for _ in range(3):
        start = time.process_time()
        tokenizer_from_gguf(metadata, default_model)
        times.append(time.process_time() - start)
    assert min(times) < 0.5


def test_the_room_does_not_import_torch() -> None:
    rooms = "tokenizer stream template folder renderer pretokenizers"
    code = (
        f"import sys\nfor n in {rooms!r}.split(): __import__('ostinato.text.' + n)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap is not a list of bytes"),
        ({"precompiled_charsmap": np.zeros(3, np.uint8)}, "has a table of characters that cannot be used"),
        ({"unknown_token_id": 99}, "unknown_token_id is 99, but there are 5 tokens"),
        ({"scores": [0.0]}, "scores has 1 entries for 5 tokens"),
    ],
)
def test_a_damaged_unigram_vocabulary_is_refused(changes: Metadata, why: str) -> None:
    whole: Metadata = {
        "model": "t5",
        "tokens": ["<pad>", "</s>", "<unk>", "\u2581", "a"],
        "token_type": [3, 3, 2, 1, 1],
        "scores": [0.0, 0.0, 0.0, -1.0, -2.0],
    }
    assert tokenizer_of({f"tokenizer.ggml.{key}": value for key, value in whole.items()}).encode("a") == [3, 4, 1]
    with pytest.raises(BadFile, match=why):
        tokenizer_of({f"tokenizer.ggml.{key}": value for key, value in {**whole, **changes}.items()})


def test_two_texts_stand_as_one_as_the_vocabulary_has_it() -> None:
    unigrams = {
        "model": "t5",
        "tokens": ["<s>", "<pad>", "</s>", "<unk>", "\u2581a", "\u2581b"],
        "token_type": [3, 3, 3, 2, 1, 1],
        "scores": [0.0, 0.0, 0.0, 0.0, -1.0, -2.0],
        "bos_token_id": 0,
        "eos_token_id": 2,
        "unknown_token_id": 3,
        "add_bos_token": True,
    }
    roberta = tokenizer_of({f"tokenizer.ggml.{key}": value for key, value in unigrams.items()})
    assert roberta.encode_pair("a", "b") == ([0, 4, 2], [2, 5, 2])
    bert = tokenizer_of(wordpiece())
    first, second = bert.encode_pair("hello", "world")
    assert (bert.texts[first[0]], bert.texts[first[-1]], bert.texts[second[-1]]) == ("[CLS]", "[SEP]", "[SEP]")
    assert len(first) + len(second) == 5
