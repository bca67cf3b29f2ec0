"""Every name of `tokenizer.ggml.pre` builds, cuts words as its pattern says, and loses no byte of a text."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import Unsupported
from ostinato.text.pretokenizers import PRE_TOKENIZERS, find_pre_tokenizer
from ostinato.text.tokenizer import Tokenizer
from tests.counts import soak
from tests.text.vocabularies import ATOMS, NOWHERE, byte_level, tokenizer_of

WANTED = (
    "default llama-bpe llama3 llama-v3 falcon3 gpt-2 qwen2 smollm deepseek-llm deepseek-coder falcon starcoder refact"
    " mpt command-r tekken phi-2 dbrx olmo jais stablelm2 exaone gpt-4o deepseek-v3 qwen35"
)
texts = st.text() | st.lists(st.sampled_from(ATOMS)).map("".join)


@cache
def tokenizer_with(pre: str) -> Tokenizer:
    return tokenizer_of(byte_level(pre))


def words(pre: str, text: str) -> list[str]:
    """The words that a text is cut into."""
    cuts = find_pre_tokenizer(pre, NOWHERE).build().pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in cuts]


def test_the_docs_say_of_every_name_whether_its_ids_were_checked() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tokenizers.md").read_text(encoding="utf-8")
    assert [name for name in PRE_TOKENIZERS if f"`{name}`" not in page] == []


def test_the_names_that_files_use_most_are_known() -> None:
    assert set(WANTED.split()) <= PRE_TOKENIZERS.keys()


@pytest.mark.soak
@settings(max_examples=soak(3_000), derandomize=True, database=None, deadline=None)
@given(pre=st.sampled_from(sorted(PRE_TOKENIZERS)), text=texts)
def test_every_name_builds_and_round_trips_text(pre: str, text: str) -> None:
    tokenizer = tokenizer_with(pre)
    assert tokenizer.decode(tokenizer.encode(text, bos=False), special=True) == text


@pytest.mark.parametrize(
    ("pre", "text", "cut"),
    [
        ("gpt-2", "Hello  world's 123", ["Hello", " ", " world", "'s", " 123"]),
        ("smollm", "a 123\n\nb", ["a", " ", "1", "2", "3", "\n", "\n", "b"]),
        ("llama-bpe", "x=12345 \n\n y'LL", ["x", "=", "123", "45", " \n\n", " y", "'LL"]),
        ("qwen2", "ab12  cd", ["ab", "1", "2", " ", " cd"]),
        ("falcon", "a+1234`b", ["a", "+", "123", "4", "`", "b"]),
        ("default", "a+1234`b", ["a", "+", "123", "4", "`", "b"]),
        ("deepseek-llm", "hi 中文\n12", ["hi", " ", "中文", "\n", "12"]),
        ("deepseek-coder", "x: 12", ["x", ":", " ", "1", "2"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("gpt-4o", "It's camelCase", ["It's", " camel", "Case"]),
        ("bloom", "one,two", ["one", ",", "two"]),
        ("jais-2", "a" + 7 * " " + "b", ["a", "    ", "  ", " b"]),
        ("spark2_5", "a1234\n\n!", ["a", "1", "2", "3", "4", "\n", "\n", "!"]),
        ("afmoe", "x12345  1 中文", ["x", "12", "345", "  ", "1", " ", "中文"]),
        ("youtu", "helloWorld 한국어中文", ["hello", "World", " ", "한국어", "中文"]),
        ("tiny_aya", "1234567 1234x aB", ["1", "234", "567", " ", "123", "4", "x", " a", "B"]),
        ("kimi-k2", "It's 中文ひら aB/\n", ["It's", " ", "中文", "ひら", " a", "B", "/\n"]),
        ("ufakzeka", "Ankara'da 12", ["Ankara", "'da", " ", "1", "2"]),
        ("k2-horizon", "क्\u200dष 1234", ["क्\u200dष", " ", "123", "4"]),
        ("chameleon", "a    b's 12", ["a", "    ", "b", "'", "s", " ", "1", "2"]),
        ("superbpe", "one two 12345", ["one two ", "12", "345"]),
    ],
)
def test_words_are_cut_as_the_kind_has_it(pre: str, text: str, cut: list[str]) -> None:
    assert words(pre, text) == cut


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Unsupported, match=r"'llama-bpa'.*known: llama-bpe \(the nearest\)"):
        tokenizer_of(byte_level("llama-bpa"))


def test_a_word_that_is_a_token_needs_no_merges_where_the_kind_says_so() -> None:
    metadata = byte_level("llama-bpe")
    assert tokenizer_of(metadata).encode(" the", bos=False) == [258]
    metadata["tokenizer.ggml.merges"] = ["t h"]
    assert tokenizer_of(metadata).encode(" the", bos=False) == [258]
    assert len(tokenizer_of({**metadata, "tokenizer.ggml.pre": "gpt-2"}).encode(" the", bos=False)) > 1
