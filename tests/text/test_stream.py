"""Streaming text: whole characters only, the same text as one decode, and nothing of a stop string."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ostinato.text.stream import TextStream
from ostinato.text.tokenizer import Tokenizer
from tests.counts import soak
from tests.text.vocabularies import ATOMS, byte_level, sentencepiece, tokenizer_of, wordpiece

TOKENIZERS = {
    "byte-level": tokenizer_of(byte_level()),
    "sentencepiece": tokenizer_of(sentencepiece()),
    "sentencepiece without a first space": tokenizer_of(sentencepiece(add_space_prefix=False)),
    "wordpiece": tokenizer_of(wordpiece()),
}
kinds = st.sampled_from(sorted(TOKENIZERS))
few_letters = st.text("abth e\n", min_size=1, max_size=6)
stops = st.lists(few_letters | st.text(min_size=1, max_size=3) | st.sampled_from(ATOMS), max_size=4)
texts = st.text() | st.lists(st.sampled_from(ATOMS)).map("".join) | st.text("abth e\n", max_size=60)


def stream(
    tokenizer: Tokenizer, ids: list[int], stop: list[str], *, at_start: bool = True
) -> tuple[list[str], str | None]:
    streaming = TextStream(tokenizer, stop, at_start=at_start)
    pieces = [streaming.push(id) for id in ids]
    return [*pieces, streaming.finish()], streaming.met


def check(tokenizer: Tokenizer, ids: list[int], stop: list[str], *, at_start: bool = True) -> None:
    whole = tokenizer.decode(ids, at_start=at_start)
    found = [(whole.find(s), len(s), s) for s in stop if s in whole]
    pieces, met = stream(tokenizer, ids, stop, at_start=at_start)
    assert met == (min(found)[2] if found else None)
    assert "".join(pieces) == (whole[: min(found)[0]] if found else whole)


@pytest.mark.soak
@settings(max_examples=soak(3_000), derandomize=True, database=None, deadline=None)
@given(kind=kinds, text=texts, stop=stops)
@example(kind="byte-level", text="xabcde", stop=["bc", "abcdf", "abcde"])
@example(kind="byte-level", text="abab", stop=["abac", "b"])
def test_pieces_of_a_text_join_to_the_text_before_the_first_stop_string(kind: str, text: str, stop: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]
    check(tokenizer, tokenizer.encode(text, special=True), stop)


@pytest.mark.soak
@settings(max_examples=soak(3_000), derandomize=True, database=None, deadline=None)
@given(kind=kinds, data=st.data(), stop=stops, at_start=st.booleans())
def test_pieces_of_any_ids_join_to_what_one_decode_gives(
    kind: str, data: st.DataObject, stop: list[str], at_start: bool
) -> None:
    tokenizer = TOKENIZERS[kind]
    check(tokenizer, data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1))), stop, at_start=at_start)


@pytest.mark.slow
@settings(derandomize=True, database=None, deadline=None)
@given(text=texts)
def test_no_piece_holds_a_broken_character(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    pieces, _ = stream(tokenizer, tokenizer.encode(text, special=False, bos=False), [])
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_half_a_character_waits_for_the_rest() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("é👍", bos=False)
    pieces, _ = stream(tokenizer, ids, [])
    assert [piece for piece in pieces if piece] == ["é", "👍"]
    pieces, _ = stream(tokenizer, ids[:-1], [])
    assert pieces[-1] == "\ufffd"


def test_what_may_become_a_stop_string_waits_and_comes_out_when_it_does_not() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    streaming = TextStream(tokenizer, ["\n\nUser:"])
    shown = [streaming.push(id) for id in tokenizer.encode("a\n\nUs", bos=False)]
    assert "".join(shown) == "a"
    assert streaming.push(tokenizer.encode("!", bos=False)[0]) == "\n\nUs!"
    assert not streaming.stopped


def test_nothing_comes_out_after_a_stop_string() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    streaming = TextStream(tokenizer, ["stop"])
    shown = "".join(streaming.push(id) for id in tokenizer.encode("go on, stop, and more", bos=False))
    assert shown + streaming.finish() == "go on, "
    assert streaming.stopped
    assert streaming.push(tokenizer.encode("x", bos=False)[0]) == ""
    assert streaming.finish() == ""


def test_a_stop_string_inside_one_token_cuts_the_token() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    (id,) = tokenizer.encode(" the", bos=False)
    streaming = TextStream(tokenizer, ["h"])
    assert streaming.push(id) == " t"
    assert streaming.stopped


def test_a_stop_string_that_is_only_begun_comes_out_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    pieces, met = stream(tokenizer, tokenizer.encode("one tw", bos=False), ["two"])
    assert "".join(pieces) == "one tw"
    assert met is None


def test_the_space_that_opens_a_text_is_dropped_once() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.encode("hello", bos=True)
    assert "".join(stream(tokenizer, ids, [])[0]) == "hello"
    assert "".join(stream(tokenizer, ids, [], at_start=False)[0]) == " hello"
    assert "".join(stream(tokenizer, [*ids, *ids], [])[0]) == "hello hello"


def test_control_tokens_show_nothing() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("<|im_start|>a<|im_end|>", special=True)
    assert stream(tokenizer, ids, ["im"])[0] == ["", "a", "", ""]


@pytest.mark.parametrize("stop", [[], ["\n\nUser:", "never said"]])
def test_a_long_text_costs_no_more_per_token_than_a_short_one(stop: list[str]) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("the quick brown fox\n" * 2_000, bos=False)
    start = time.process_time()
    stream(tokenizer, ids, stop)
    assert (time.process_time() - start) / len(ids) < 100e-6
