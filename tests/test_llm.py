"""The Python interface: lists in, lists out; pieces that join; options that are known; answers with a digest."""

import copy
import dataclasses
import gc
import json
import math
import pickle
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import LLM, Batch, LoadOptions, Sampling
from ostinato.backends.base import Settled
from ostinato.engine.choose import choose
from ostinato.engine.engine import Engine
from ostinato.errors import BadFile, BadInput, BadOption, HardwareCannot, InvalidBatch, QueueFull, Unsupported
from ostinato.text.channels import MARKERS
from ostinato.text.reasoning import Reasoning
from tests.cli import tiny_model
from tests.cli.tiny_model import CHANNELS
from tests.models import tiny

GREEDY = Sampling(max_tokens=10, temperature=0, ignore_eos=True)


def test_lists_in_lists_out_in_order(tiny_llm: LLM) -> None:
    together = tiny_llm.generate(["one", "two", "three"], GREEDY)
    apart = [tiny_llm.generate(prompt, GREEDY) for prompt in ("one", "two", "three")]
    assert [a.token_ids for a in together] == [a.token_ids for a in apart]
    nothing: list[str] = []
    assert tiny_llm.generate(nothing, GREEDY) == []


def test_each_prompt_of_a_list_may_have_options_of_its_own(tiny_llm: LLM) -> None:
    samplings = [Sampling(max_tokens=n, temperature=0, ignore_eos=True) for n in (3, 5)]
    assert [len(a.token_ids) for a in tiny_llm.generate(["one", "two"], samplings)] == [3, 5]
    assert [len(a.token_ids) for a in tiny_llm.chat(["one", "two"], samplings)] == [3, 5]
    for call in (lambda: tiny_llm.generate("one", cast(Any, samplings)), lambda: tiny_llm.chat(["one"], samplings)):
        with pytest.raises(BadOption, match="sampling has 2 items for one prompt; give one Sampling"):
            call()
    with pytest.raises(BadOption, match="sampling is 7; it must be a Sampling"):
        tiny_llm.generate(["one", "two"], cast(Any, [GREEDY, 7]))
    by_ids = tiny_llm.generate([[5, 6], [7, 8]], GREEDY)
    assert [a.prompt_ids for a in by_ids] == [(5, 6), (7, 8)]
    talks = [[{"role": "user", "content": text}] for text in ("one", "two")]
    answers = [tiny_llm.chat(talk, GREEDY).text for talk in talks]
    assert [a.text for a in tiny_llm.chat(talks, GREEDY)] == answers
    assert [a.text for a in tiny_llm.chat(["one", "two"], GREEDY)] == answers


def test_pieces_join_to_the_text_and_only_the_last_has_the_whole(tiny_llm: LLM) -> None:
    pieces = list(tiny_llm.stream("the sea", GREEDY))
    whole = pieces[-1].completion
    assert whole is not None
    joined = "".join(piece.text for piece in pieces)
    assert joined == whole.text == tiny_llm.tokenizer.decode(whole.token_ids, at_start=False)
    assert [piece.completion for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


WARM = Sampling(max_tokens=40, temperature=0.9, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def warm_text(tiny_llm: LLM) -> str:
    return tiny_llm.generate("the sea", WARM).text


@given(start=st.integers(0, 60), length=st.integers(1, 6))
@settings(max_examples=25, derandomize=True, deadline=None)
def test_a_stop_string_is_never_shown_wherever_it_falls(tiny_llm: LLM, warm_text: str, start: int, length: int) -> None:
    whole = warm_text
    stop = whole[start : start + length]
    if not stop:
        return
    pieces = list(tiny_llm.stream("the sea", dataclasses.replace(WARM, stop=(stop,))))
    assert "".join(piece.text for piece in pieces) == whole[: whole.index(stop)]
    assert pieces[-1].finish_reason == "stop"


def test_a_conversation_goes_through_the_models_template(tiny_llm: LLM) -> None:
    ids = tiny_llm.chat_ids([{"role": "user", "content": "hi"}])
    text = tiny_llm.tokenizer.decode(ids, special=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(1) == 2  # parsed as the control token, not spelled out


def test_a_model_without_a_template_says_so(tiny_files: Path, tmp_path: Path) -> None:
    folder = tiny.folder("llama", tmp_path)
    config = folder / "tokenizer_config.json"
    config.write_text("{}")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with LLM(folder, device="cpu") as llm, pytest.raises(Unsupported, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_score_is_the_cross_entropy_of_each_token_after_the_first(tiny_llm: LLM) -> None:
    text = "the sea and the wind in the old tower"
    ids = tiny_llm.tokenize(text)
    rows = torch.from_numpy(tiny_llm.logits(ids)).double().log_softmax(-1)
    nll = -sum(float(rows[i, ids[i + 1]]) for i in range(len(ids) - 1))
    score = tiny_llm.score(text)
    assert score.n_tokens == len(ids) - 1
    assert math.isclose(score.nll, nll, rel_tol=1e-5)
    assert math.isclose(score.perplexity, math.exp(nll / (len(ids) - 1)), rel_tol=1e-5)


def test_each_token_has_its_logprob_and_the_likeliest_beside_it(tiny_llm: LLM) -> None:
    ids = tiny_llm.tokenize("the quick brown fox")
    rows = torch.from_numpy(tiny_llm.logits(ids[:-1])).log_softmax(-1)
    told = tiny_llm.token_logprobs(ids, top=3)
    assert [one.token_id for one in told] == ids[1:]
    for one, row in zip(told, rows, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-5)
        assert [token for token, _ in one.top] == row.topk(3).indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-5)
    assert math.isclose(-sum(one.logprob for one in told), tiny_llm.score("the quick brown fox").nll, rel_tol=1e-6)
    assert tiny_llm.token_logprobs(ids[:1]) == ()
    assert tiny_llm.token_logprobs([ids, ids[:1], ids[2:]], top=3) == [told, (), tiny_llm.token_logprobs(ids[2:], 3)]
    for wrong in ([], [5, 10**6], [5] * 5000):
        with pytest.raises(BadInput, match="the prompt"):
            tiny_llm.token_logprobs(wrong)
    with pytest.raises(BadOption, match="top"):
        tiny_llm.token_logprobs(ids, top=-1)


def test_a_text_longer_than_the_context_is_scored_in_stretches(tiny_llm: LLM) -> None:
    text = "the sea and the wind in the old tower " * 40
    score = tiny_llm.score(text)
    assert score.n_tokens == len(tiny_llm.tokenize(text)) - 1 > tiny_llm.context
    assert math.isfinite(score.perplexity)
    with pytest.raises(BadInput, match="two tokens"):
        tiny_llm.score("")
    assert tiny_llm.score([text, "the sea"]) == [score, tiny_llm.score("the sea")]
    assert tiny_llm.score([]) == []


def test_embeddings_are_one_unit_vector_per_text_by_the_pooling_asked_for(tiny_llm: LLM) -> None:
    texts = ["the sea", "the wind and the rain"]
    means = tiny_llm.embed(texts, pooling="mean")
    assert means.shape == (2, tiny_llm.shape.hidden)
    np.testing.assert_allclose(np.linalg.norm(means, axis=-1), 1, rtol=1e-6)
    assert not np.allclose(means, tiny_llm.embed(texts, pooling="last"))
    np.testing.assert_array_equal(means[1:], tiny_llm.embed(texts[1]))
    decoder = tiny_llm.decoder(embeddings=True)
    decoder.decode(Batch(token=tiny_llm.tokenize(texts[0])))
    first = decoder.embedding(0)
    assert first is not None
    np.testing.assert_allclose(tiny_llm.embed(texts[0], "cls", normalize=False)[0], first.numpy(), atol=1e-3)
    with pytest.raises(BadOption, match=r"mean \(the nearest\)"):
        tiny_llm.embed(texts, pooling="men")


@pytest.mark.parametrize(
    ("word", "hint"), [("contxt", "context (the nearest)"), ("thread", "threads (the nearest)"), ("lora", "LoRA")]
)
def test_an_unknown_option_is_refused_with_the_nearest_name(tiny_gguf: Path, word: str, hint: str) -> None:
    options: dict[str, Any] = {word: 1}
    with pytest.raises(BadInput) as refused:
        LLM(tiny_gguf, **options)
    assert hint in str(refused.value)


def test_options_are_given_as_a_record_or_by_name_but_not_both(tiny_gguf: Path) -> None:
    with LLM(tiny_gguf, load=LoadOptions(mode="eager", context=48, slots=1)) as llm:
        assert (llm.mode, llm.context) == ("eager", 48)
    with pytest.raises(BadOption, match="load and context are both given"):
        LLM(tiny_gguf, load=LoadOptions(), context=48)


def test_the_digest_is_of_the_model_the_options_that_matter_and_the_tokens(tiny_llm: LLM, tiny_files: Path) -> None:
    answer = tiny_llm.generate("the sea", GREEDY)
    assert answer.digest == tiny_llm.generate("the sea", GREEDY).digest
    assert answer.digest != tiny_llm.generate("the see", GREEDY).digest
    assert answer.digest != tiny_llm.generate("the sea", Sampling(max_tokens=9, temperature=0, ignore_eos=True)).digest
    seeded = Sampling(max_tokens=10, temperature=0, ignore_eos=True, seed=4)
    assert answer.digest == tiny_llm.generate("the sea", seeded).digest  # nothing was drawn
    with LLM(tiny.gguf("llama-tied", tiny_files), device="cpu", context=128) as other:
        assert answer.digest != other.generate("the sea", GREEDY).digest


def test_the_digest_names_a_chip_that_sums_in_another_order(
    tiny_llm: LLM, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def otherwise(*args: Any, **words: Any) -> Settled:
        return dataclasses.replace(choose(*args, **words), other_sums="prompt attention by 16")

    answer = tiny_llm.generate("the sea", GREEDY)
    monkeypatch.setattr("ostinato.llm.choose", otherwise)
    with LLM(tiny_gguf, device="cpu", context=128) as other:
        assert other.generate("the sea", GREEDY).token_ids == answer.token_ids
        assert other.generate("the sea", GREEDY).digest != answer.digest


def test_an_answer_can_be_pickled_copied_and_written_as_json(tiny_llm: LLM) -> None:
    answer = tiny_llm.generate("the sea", dataclasses.replace(GREEDY, logprobs=1))
    for again in (pickle.loads(pickle.dumps(answer)), copy.deepcopy(answer), dataclasses.replace(answer)):
        assert again == answer
        assert again.digest == answer.digest
    written = json.loads(json.dumps(dataclasses.asdict(answer)))
    assert written["text"] == answer.text
    assert written["digest"] == answer.digest


def test_what_is_printed_tells_what_counts(tiny_llm: LLM, tiny_gguf: Path) -> None:
    wanted = "on cpu, loop, context"
    assert wanted in repr(tiny_llm)
    assert repr(tiny_llm).startswith(f"<LLM {tiny_gguf}")
    assert repr(tiny_llm).endswith("8 slots>")
    answer = tiny_llm.generate([5, 6], Sampling(max_tokens=100, ignore_eos=True))
    shown = repr(answer)
    assert shown.startswith(f"Completion(text={answer.text[:57] + '...'!r}, finish_reason='length', ")
    assert shown.endswith("prompt_ids=<2 ids>, token_ids=<100 ids>)")
    assert repr(Sampling(max_tokens=5, logit_bias={5: 1})) == "Sampling(max_tokens=5, logit_bias={5: 1})"
    assert repr(Sampling()) == "Sampling()"


def test_timings_add_up(tiny_llm: LLM) -> None:
    timings = tiny_llm.generate("the sea", GREEDY).timings
    assert 0 <= timings.wait_s <= timings.first_token_s
    assert 0 < timings.prefill_s <= timings.first_token_s
    assert timings.decode_tok_s is not None
    assert math.isclose(timings.decode_tok_s * timings.decode_s, 9, rel_tol=1e-6)
    assert tiny_llm.generate("the sea", Sampling(max_tokens=1)).timings.decode_tok_s is None


def test_a_models_own_sampling_defaults_hold_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    folder = tiny.folder("llama", tmp_path)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 1.5, "top_k": 7}')
    with LLM(folder, device="cpu") as llm:
        assert (llm.defaults.temperature, llm.defaults.top_k, llm.defaults.top_p) == (1.5, 7, 1.0)
        seeds = {llm.generate([5, 6, 7], Sampling(max_tokens=12, seed=seed)).token_ids for seed in range(3)}
        assert len(seeds) > 1
        cold = {llm.generate([5, 6, 7], Sampling(max_tokens=12, temperature=0)).token_ids for _ in range(3)}
        assert len(cold) == 1


def test_defaults_of_a_file_that_make_no_sense_are_the_files_fault(tmp_path: Path) -> None:
    folder = tiny.folder("llama", tmp_path)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": -3}')
    with pytest.raises(BadInput, match="temperature"):
        LLM(folder, device="cpu")


def test_a_caller_that_has_the_last_piece_may_ask_again_at_once(tiny_llm: LLM) -> None:
    text = tiny_llm.generate("the sea", GREEDY).text
    for sampling in (GREEDY, Sampling(max_tokens=10, temperature=0, ignore_eos=True, stop=(text[2:4],))):
        pieces = tiny_llm.stream("the sea", sampling)
        last = next(piece for piece in pieces if piece.finish_reason is not None)
        assert last.completion is not None
        assert tiny_llm.generate("the sea", GREEDY).text == text


def test_ids_that_only_pad_the_embedding_are_never_chosen(tiny_llm: LLM) -> None:
    favourite = tiny_llm.generate([5, 6, 7], Sampling(max_tokens=1, ignore_eos=True)).token_ids[0]
    warm = Sampling(max_tokens=20, temperature=2.0, seed=1, ignore_eos=True)
    settled = dataclasses.replace(tiny_llm._settled, n_slots=1)
    with Engine(tiny_llm._model, settled, n_tokens=favourite) as engine:
        for wanted in (Sampling(max_tokens=20, seed=0, ignore_eos=True), warm):
            request = engine.submit([5, 6, 7], wanted.over(tiny_llm.defaults))
            assert max(token.token for token in request) < favourite


def test_whole_numbers_of_other_libraries_are_ids_too(tiny_llm: LLM) -> None:
    plain = tiny_llm.generate([5, 6, 7], GREEDY).token_ids
    others: list[Any] = [np.array([5, 6, 7]), torch.tensor([5, 6, 7])]
    for other in others:
        assert tiny_llm.generate(other, GREEDY).token_ids == plain
    wrong: Any = [5, 6.5]
    with pytest.raises(BadInput, match="index 1"):
        tiny_llm.generate(wrong, GREEDY)


def test_a_vector_per_text_cannot_be_asked_without_pooling(tiny_llm: LLM) -> None:
    with pytest.raises(BadOption, match="row for every token"):
        tiny_llm.embed("the sea", pooling="none")


def test_a_long_text_after_a_short_one_is_embedded_whole(tiny_llm: LLM, tiny_gguf: Path) -> None:
    text = "the sea and the wind " * 12
    tiny_llm.embed("the sea")
    with LLM(tiny_gguf, device="cpu", context=128) as other:
        np.testing.assert_array_equal(tiny_llm.embed(text), other.embed(text))


def test_a_decoder_of_ones_own_refuses_unknown_settings(tiny_llm: LLM) -> None:
    with pytest.raises(BadOption, match=r"n_seq_max \(the nearest\)"):
        tiny_llm.decoder(n_seqmax=4)
    with pytest.raises(BadOption, match="kv_type"):
        tiny_llm.decoder(kv_type="fp8")
    wrong: dict[str, Any]
    for wrong in ({"n_ctx": "64"}, {"n_batch": 1.5}, {"n_seq_max": True}, {"pooling": "foo"}, {"unified": "no"}):
        with pytest.raises(BadOption, match=next(iter(wrong))):
            tiny_llm.decoder(**wrong)
    decoder: Any = tiny_llm.decoder(n_ctx=100, n_seq_max=0)
    assert (decoder.settings.n_ctx, decoder.settings.n_seq_max) == (256, 1)
    with pytest.raises(InvalidBatch, match="a Batch is needed, not list"):
        decoder.decode([1, 2, 3])
    with pytest.raises(BadOption, match=r"token \(the nearest\)"):
        Batch(**dict[str, Any](tokens=[1]))


def test_a_memory_that_no_machine_has_is_a_matter_of_hardware(tiny_llm: LLM) -> None:
    with pytest.raises(HardwareCannot, match="no memory for a tensor"):
        tiny_llm.decoder(n_ctx=2**48)


def test_a_state_whose_note_was_tampered_with_is_refused_by_name(tiny_llm: LLM, tmp_path: Path) -> None:
    decoder = tiny_llm.decoder()
    decoder.decode(Batch(token=tiny_llm.tokenize("the sea")))
    fingerprint = tiny_llm._checkpoint.fingerprint()
    for note in ({}, {"model": fingerprint}, {"model": fingerprint, "note": {}, "ids": [1, 2]}):
        path = tmp_path / "bad.state"
        path.write_bytes(decoder.save_sequence(0, note))
        with pytest.raises(BadFile, match=r"bad\.state"):
            tiny_llm.load_state(path)


def test_what_everybody_tries_first_is_told_the_right_way(tiny_llm: LLM) -> None:
    llm: Any = tiny_llm
    with pytest.raises(BadOption, match=r"Sampling\(max_tokens=2\)"):
        llm.generate("the sea", max_tokens=2)
    with pytest.raises(BadOption, match="must be a Sampling"):
        llm.generate("the sea", {"max_tokens": 2})
    with pytest.raises(BadInput, match="NoneType"):
        llm.generate(None)
    with pytest.raises(BadInput, match="int"):
        llm.tokenize(5)
    with pytest.raises(BadInput, match="empty"):
        llm.chat([])
    for wrong in (b"sea", {"prompt": "sea"}, [None]):
        with pytest.raises(BadInput, match="a prompt is text"):
            llm.generate(wrong)
    for call, asked in (("rank", ("sea", "tower")), ("embed", (None,)), ("score", (None,))):
        with pytest.raises(BadInput, match="a list of texts is needed"):
            getattr(llm, call)(*asked)


def test_a_text_or_one_message_is_a_conversation(tiny_llm: LLM) -> None:
    message = {"role": "user", "content": "hi"}
    ids = tiny_llm.chat_ids([message])
    assert tiny_llm.chat_ids("hi") == tiny_llm.chat_ids(message) == ids
    assert tiny_llm.chat_text("hi") == tiny_llm.chat_text([message])
    assert tiny_llm.chat("hi", GREEDY).prompt_ids == tiny_llm.chat(message, GREEDY).prompt_ids == tuple(ids)
    *_, last = tiny_llm.stream_chat("hi", GREEDY)
    assert last.completion is not None
    assert last.completion.prompt_ids == tuple(ids)


@pytest.mark.parametrize("call", ["generate", "stream", "chat", "stream_chat"])
def test_sampling_words_of_a_call_are_told_their_place(tiny_llm: LLM, call: str) -> None:
    ask: Any = getattr(tiny_llm, call)
    first = "prompt" if call in ("generate", "stream") else "messages"
    with pytest.raises(BadOption, match=rf"{call}\({first}, Sampling\(max_tokens=5, stop='x'\)\)"):
        ask("hi", max_tokens=5, stop="x")
    with pytest.raises(Unsupported, match="called max_tokens here"):
        ask("hi", max_new_tokens=5)
    with pytest.raises(BadOption, match="must be a Sampling"):
        ask("hi", 5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"temprature": 0.3}, r"Sampling\(temperature=\.\.\.\)"),
        ({"stream": True}, "stream_chat"),
        ({"response_format": {"type": "json_object"}}, "json_mode"),
        ({"reuse": True}, "only LLM.stream"),
        ({"context": 100}, "an option of loading"),
        ({"foo": 1}, "does not read 'foo'; it reads add_generation_prompt"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\]\.function is missing"),
        ({"tools": [len]}, r"tools\[0\] must be of the form"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"parallel_tool_calls": "no"}, "must be True or False"),
        ({"tool_choice": "sometimes"}, "must be none, auto, required, or name a function"),
    ],
)
def test_a_word_that_the_template_does_not_read_is_refused(tiny_llm: LLM, words: dict[str, Any], says: str) -> None:
    for ask in (tiny_llm.chat, tiny_llm.chat_ids):
        with pytest.raises(BadInput, match=says):
            ask("hi", **words)
    assert tiny_llm.chat_ids("hi", tools=None, add_generation_prompt=True) == tiny_llm.chat_ids("hi")


def test_an_llm_is_neither_pickled_nor_copied(tiny_llm: LLM) -> None:
    for make in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(Unsupported, match="open the model where it is used"):
            make(tiny_llm)


def test_ids_may_be_an_array_and_nothing_else_is_taken_for_ids(tiny_llm: LLM) -> None:
    llm: Any = tiny_llm
    assert np.array_equal(llm.logits(np.array([5, 6])), llm.logits([5, 6]))
    assert llm.token_logprobs(np.array([5, 6])) == llm.token_logprobs([5, 6])
    assert np.array_equal(llm.embed([5, 6]), llm.embed([[5, 6]]))
    for ask in (llm.detokenize, llm.logits, llm.token_logprobs):
        for wrong in ("the sea", 5, None, [1.5], [None], [True]):
            with pytest.raises(BadInput, match="token id"):
                ask(wrong)
    with pytest.raises(BadInput, match="token ids"):
        llm.embed(["a", 3])
    with pytest.raises(BadOption, match="top is True"):
        llm.token_logprobs([5, 6], top=True)
    with pytest.raises(BadOption, match="LoadOptions"):
        LLM("none", load=cast(Any, {"context": 64}))
    for call in (llm.load_state, llm.save_state):
        with pytest.raises(BadInput, match="path of a state"):
            call(None)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (None, "messages is NoneType"),
        (5, "messages is int"),
        ({"content": "hi"}, r"messages\[0\] has no role"),
        ([{"role": "user", "content": "hi"}, {"role": "user"}], r"messages\[1\] \(user\) has no content"),
        ([{"role": "user", "content": "hi"}, "hi"], r"messages\[1\] is str"),
        ([{"role": "user", "content": 5}], r"messages\[0\] \(user\) has a content of type int"),
        ([{"role": "usr", "content": "hi"}], r"messages\[0\] has the role 'usr'"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_index(tiny_llm: LLM, messages: Any, says: str) -> None:
    for ask in (tiny_llm.chat, tiny_llm.stream_chat, tiny_llm.chat_text):
        with pytest.raises(BadInput, match=says):
            ask(messages)


def test_a_closed_llm_says_so(tiny_gguf: Path) -> None:
    with LLM(tiny_gguf, device="cpu") as llm:
        stream = llm.stream("the sea", GREEDY)
    asks: list[Callable[[], object]] = [
        lambda: llm.generate("the sea", GREEDY),
        lambda: next(stream),
        lambda: llm.embed("the sea"),
        lambda: llm.stream("the sea", GREEDY),
        lambda: llm.chat("the sea", GREEDY),
        lambda: llm.chat_ids("the sea", enable_thinking=True),
        lambda: llm.decoder(),
    ]
    for ask in asks:
        with pytest.raises(BadInput, match="closed"):
            ask()
    assert llm.template is not None
    assert llm.template._child is None  # no process was started for a conversation
    assert repr(llm).endswith("closed>")


def until_idle(llm: LLM) -> dict[str, int]:
    """Wait until no request has a slot or waits for one; how requests have ended."""
    end = time.monotonic() + 30
    while (stats := llm.stats()).live or stats.prefilling or stats.waiting:
        assert time.monotonic() < end
        time.sleep(0.001)
    return stats.ended


@pytest.fixture(scope="module")
def unhurried(tiny_gguf: Path) -> Iterator[LLM]:
    """One that is still at its answer when it is told to stop: the native loop would be through with a tiny model's."""
    with LLM(tiny_gguf, device="cpu", mode="eager") as llm:
        yield llm


@pytest.mark.slow
def test_a_stop_string_ends_the_request_and_what_came_after_it_is_not_counted(tiny_gguf: Path) -> None:
    with LLM(tiny_gguf, device="cpu", mode="eager") as llm:
        wanted = Sampling(max_tokens=200, temperature=0.9, seed=5, ignore_eos=True)
        whole = llm.generate("the sea", wanted)
        stop = whole.text[12:15]
        at = whole.text.index(stop)
        prompts = ["the sea"] * 3
        cut = llm.generate(prompts, dataclasses.replace(wanted, stop=(stop,)))
        for answer in cut:
            assert answer.text == whole.text[:at]
            assert answer.finish_reason == "stop"
            assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
            assert stop in llm.tokenizer.decode(answer.token_ids, at_start=False)
            assert stop not in llm.tokenizer.decode(answer.token_ids[:-1], at_start=False)
        ended = until_idle(llm)
        assert ended["cancelled"] == 3
        assert ended["length"] == 1
        assert llm.stats().pages_leased == 0


@pytest.mark.slow
def test_a_stream_that_is_dropped_half_way_cancels_its_request(unhurried: LLM) -> None:
    before = until_idle(unhurried).get("cancelled", 0)
    endless = Sampling(max_tokens=100, ignore_eos=True)
    for leave in (lambda stream: stream.close(), lambda stream: None):
        stream: Any = unhurried.stream("the sea", endless)
        next(stream)
        leave(stream)
        del stream
        gc.collect()
    assert until_idle(unhurried)["cancelled"] == before + 2
    unread = unhurried.stream("the sea", endless)  # no piece has been read yet
    del unread
    assert until_idle(unhurried)["cancelled"] == before + 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["loop", "eager"])
def test_a_long_list_is_fed_as_the_line_has_room(tiny_gguf: Path, tiny_llm: LLM, unhurried: LLM, mode: str) -> None:
    prompts = [[5 + i, 6, 7] for i in range(30)]
    short = Sampling(max_tokens=4, ignore_eos=True)
    alone = tiny_llm if mode == "loop" else unhurried
    with LLM(tiny_gguf, device="cpu", context=128, slots=2, queue=1, mode=mode) as llm:
        answers = llm.generate(prompts, short)
        assert [a.token_ids for a in answers] == [alone.generate(p, short).token_ids for p in prompts]


def test_a_stream_is_refused_while_the_line_is_full(tiny_gguf: Path) -> None:
    prompts = [[5 + i, 6, 7] for i in range(4)]
    short = Sampling(max_tokens=4, ignore_eos=True)
    with LLM(tiny_gguf, device="cpu", context=128, slots=2, queue=1, mode="eager") as llm:
        streams = [llm.stream(prompt, Sampling(max_tokens=100, ignore_eos=True)) for prompt in prompts[:4]]
        for stream in streams[:2]:
            next(stream)
        next_in_line = llm._engine.submit([5], llm._with_defaults(short))
        with pytest.raises(QueueFull):  # two sit, and one waits
            next(streams[2])
        streams.clear()  # dropped, and so cancelled
        assert len(list(next_in_line)) == 4


def test_a_list_with_a_bad_prompt_is_refused_before_anything_runs(tiny_llm: LLM) -> None:
    before = tiny_llm.stats().submitted
    with pytest.raises(BadInput, match="index 1"):
        tiny_llm.generate([[5, 6], [5, 3000]], GREEDY)
    assert tiny_llm.stats().submitted == before


def test_a_prompt_is_checked_once(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    monkeypatch.setattr("ostinato.engine.engine.check_prompt", lambda ids, **_: checked.append(tuple(ids)))
    tiny_llm.generate([[5, 6], [7, 8]], GREEDY)
    list(tiny_llm.stream([9, 10], GREEDY))
    assert checked == [(5, 6), (7, 8), (9, 10)]


def test_what_was_cached_is_told_and_gives_the_same_tokens(tiny_gguf: Path) -> None:
    with LLM(tiny_gguf, device="cpu") as llm:
        text = "the sea and the wind in the old tower and the lamp in the night " * 2
        first, again = (llm.generate(text, GREEDY) for _ in range(2))
        assert first.cached_tokens == 0
        assert 0 < again.cached_tokens < len(again.prompt_ids)
        assert again.token_ids == first.token_ids
        assert again.digest == first.digest
        assert llm.stats().cached_tokens == again.cached_tokens


def test_an_llm_tells_its_mode_and_why_not_a_higher_one(tiny_gguf: Path) -> None:
    with LLM(tiny_gguf, device="cpu", mode="eager") as llm:
        assert llm.mode == llm.stats().mode == "eager"
        assert [reason.partition(":")[0] for reason in llm.why_not] == ["loop"]
        eager = llm.generate([5, 6, 7], GREEDY).token_ids
    with LLM(tiny_gguf, device="cpu") as llm:
        assert llm.mode == "loop"
        assert llm.generate([5, 6, 7], GREEDY).token_ids == eager
    with pytest.raises(HardwareCannot, match="'graph' cannot run here"):
        LLM(tiny_gguf, device="cpu", mode="graph")


def test_an_answer_of_the_loop_can_be_saved_and_gone_on_from(tiny_llm: LLM, tmp_path: Path) -> None:
    first = tiny_llm.generate("the sea", GREEDY)
    tiny_llm.save_state(tmp_path / "sea.state", {"page": 3})
    tiny_llm.generate("something else", GREEDY)
    assert tiny_llm.load_state(tmp_path / "sea.state") == {"page": 3}
    more = [*first.prompt_ids, *first.token_ids, 7, 8]
    *_, last = tiny_llm.stream(more, GREEDY, reuse=True)
    assert last.completion is not None
    assert last.completion.token_ids == tiny_llm.generate(more, GREEDY).token_ids
    assert last.completion.cached_tokens == len(first.prompt_ids) + len(first.token_ids) - 1


@pytest.mark.parametrize(
    ("backend", "weights", "activations", "told"),
    [
        ("native", "tiles", "wide", "wide"),
        ("native", "tiles", "int8", "int8"),
        ("tape", "packed", "wide", None),
        ("tape", "packed", "int8", "int8"),
        ("cuda", "packed", "wide", None),
        ("torch", "dense", "wide", None),
    ],
)
def test_activations_with_an_arithmetic_of_their_own_are_told_apart(
    backend: str, weights: str, activations: str, told: str | None
) -> None:
    """They are part of the digest and of a saved state: int8 of the persistent kernel must not pass for another."""
    settled = SimpleNamespace(backend=backend, weights=weights, activations=activations)
    llm = cast(LLM, SimpleNamespace(_settled=settled))
    assert LLM.activations.fget(llm) == told  # type: ignore[attr-defined]  # a property


# Reasoning


@pytest.fixture(scope="module")
def of_channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny_model.write(tmp_path_factory.mktemp("tiny") / "channels.gguf", change=tiny_model.of_channels)
    with LLM(path, device="cpu", context=512, slots=2) as llm:
        yield llm


def saying(llm: LLM, text: str, monkeypatch: pytest.MonkeyPatch) -> Sampling:
    """A sampling whose answer is a text with its markers."""
    monkeypatch.setattr(Reasoning, "before", lambda _, sampling, prompt, calls: sampling)
    return Sampling(grammar=tiny_model.script(llm.tokenizer, text))


def test_a_chat_with_a_model_of_channels_separates_reasoning_and_answer(
    of_channels: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = saying(of_channels, CHANNELS, monkeypatch)
    one = of_channels.chat("hi", sampling)
    assert (one.text, one.reasoning, one.finish_reason) == ("Yes.", "hm, so", "stop")
    assert of_channels.tokenizer.decode(one.token_ids[:-1], special=True) == CHANNELS
    pieces = list(of_channels.stream_chat("hi", sampling))
    assert "".join(piece.text for piece in pieces) == "Yes."
    assert "".join(piece.reasoning for piece in pieces) == "hm, so"
    assert not any(piece.text and piece.reasoning for piece in pieces)
    assert pieces[-1].completion is not None
    assert (pieces[-1].completion.text, pieces[-1].completion.reasoning) == ("Yes.", "hm, so")
    several = of_channels.chat(["hi", "ho"], sampling)
    assert [(each.text, each.reasoning) for each in several] == [("Yes.", "hm, so")] * 2
    assert pickle.loads(pickle.dumps(one)).reasoning == "hm, so"
    raw = of_channels.generate(list(one.prompt_ids), sampling)
    assert (raw.text, raw.reasoning) == ("analysishm, soassistantfinalYes.", "")
    assert raw.digest == one.digest


def test_reasoning_that_is_cut_is_no_answer_and_what_has_no_header_is_one(
    of_channels: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = saying(of_channels, CHANNELS, monkeypatch)
    cut = of_channels.chat("hi", dataclasses.replace(sampling, max_tokens=14))
    assert cut.finish_reason == "length"
    assert cut.text == ""
    assert cut.reasoning
    assert "hm, so".startswith(cut.reasoning)
    stopped = of_channels.chat("hi", dataclasses.replace(sampling, stop=("s.",)))
    assert (stopped.text, stopped.reasoning) == ("Ye", "hm, so")
    plain = of_channels.chat("hi", saying(of_channels, "Yes.", monkeypatch))
    assert (plain.text, plain.reasoning) == ("Yes.", "")


def test_a_call_of_a_model_of_channels_stands_in_the_text(of_channels: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.look json<|message|>{"at": 1}'
    answer = of_channels.chat("hi", saying(of_channels, thought + call, monkeypatch))
    assert answer.reasoning == "hm"
    header = "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>"
    assert answer.text == f'{header}{{"at": 1}}'


def test_a_rule_is_for_the_message_that_answers(of_channels: LLM) -> None:
    ids = of_channels.tokenizer.control_ids(MARKERS)
    letter = of_channels.tokenize("a", bos=False)[0]  # of `analysis`, and then of the reasoning, which `<|end|>` ends
    for bias in (50, -50):
        answer = of_channels.chat("hi", Sampling(choice=("blue", "red"), logit_bias={letter: bias, ids["<|end|>"]: 90}))
        assert answer.text in ("blue", "red")
        assert (answer.reasoning, answer.finish_reason) == ("", "stop")
        shown = of_channels.tokenizer.decode(answer.token_ids, special=True)
        assert ("<|channel|>analysis<|message|>" in shown) == (bias > 0)
        assert f"<|channel|>final<|message|>{answer.text}" in shown


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    def change(metadata: dict[str, Any]) -> None:
        metadata["tokenizer.chat_template"].value += "{# <think></think> #}"

    path = tiny_model.write(tmp_path_factory.mktemp("tiny") / "thinks.gguf", context=1024, change=change)
    with LLM(path, device="cpu", context=1024, slots=2) as llm:
        yield llm


def test_reasoning_between_marks_is_separated_from_the_answer(thinking: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "<think>\nhm, so\n</think>\n\nYes."
    sampling = saying(thinking, text, monkeypatch)
    answer = thinking.chat("hi", sampling)
    assert (answer.text, answer.reasoning) == ("Yes.", "hm, so")
    assert answer.message == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm, so"}
    pieces = list(thinking.stream_chat("hi", sampling))
    assert "".join(piece.text for piece in pieces) == "Yes."
    assert "".join(piece.reasoning for piece in pieces) == "hm, so"
    raw = thinking.generate(list(answer.prompt_ids), sampling)
    assert (raw.text, raw.reasoning) == (text, "")


def test_a_rule_is_for_the_answer_and_reasoning_before_it_is_free(thinking: LLM) -> None:
    mark, end = (thinking.tokenize(text, bos=False) for text in ("<think>", "</think>"))
    bias = {token: 60.0 for token in {*mark, *end}}
    answer = thinking.chat("hi", Sampling(choice=("blue", "red"), logit_bias=bias, max_tokens=400))
    shown = thinking.detokenize(answer.token_ids)
    assert shown.startswith("<think>")
    if answer.finish_reason == "stop":  # it has found the end of its reasoning
        assert answer.text in ("blue", "red")
        assert shown.endswith(f"</think>{answer.text}")
    plain = thinking.generate("hi", Sampling(choice=("blue", "red")))
    assert plain.text in ("blue", "red")


# Tools

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["sea", "sky"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["at", "n"],
            "additionalProperties": False,
        },
    },
}
HEAR = {"type": "function", "function": {"name": "hear"}}
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose template knows no tools: they are described in the system message."""
    path = tiny_model.write(tmp_path_factory.mktemp("tiny") / "calls.gguf", context=1024)
    with LLM(path, device="cpu", context=1024, slots=2) as llm:
        yield llm


def test_a_forced_call_is_in_the_completion_and_not_in_its_text(calling: LLM) -> None:
    answer = calling.chat("where?", Sampling(max_tokens=100), tools=[LOOK, HEAR], tool_choice=NAMED)
    (call,) = answer.tool_calls
    assert (call.name, answer.text, answer.finish_reason) == ("look", "", "stop")
    arguments = json.loads(call.arguments)
    assert arguments["at"] in ("sea", "sky")
    assert arguments["n"] in range(10)
    again = pickle.loads(pickle.dumps(answer))
    assert again.tool_calls == answer.tool_calls
    *_, last = calling.stream_chat("where?", Sampling(max_tokens=100), tools=[LOOK, HEAR], tool_choice=NAMED)
    assert last.completion is not None
    assert [one.arguments for one in last.completion.tool_calls] == [call.arguments]


def test_a_conversation_goes_on_with_the_message_of_a_call_and_its_result(calling: LLM) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "where?"}]
    few = Sampling(max_tokens=100)
    answer = calling.chat(messages, few, tools=[LOOK], tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.tool_calls
    messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "blue"}]
    text = calling.chat_text(messages, tools=[LOOK])
    assert "look" in text
    assert json.dumps(json.loads(call.arguments)) in text
    assert "blue" in text
    assert calling.chat_ids(messages, tools=[LOOK]) == list(calling.chat(messages, few, tools=[LOOK]).prompt_ids)


def test_without_a_choice_the_model_may_call_or_answer_and_none_hides_the_tools(calling: LLM) -> None:
    few = Sampling(max_tokens=8)
    assert calling.chat("hi", few, tools=[LOOK]).prompt_ids != calling.chat("hi", few).prompt_ids
    assert calling.chat("hi", few, tools=[LOOK], tool_choice="none").prompt_ids == calling.chat("hi", few).prompt_ids
    assert calling.chat("hi", few, tools=[]).prompt_ids == calling.chat("hi", few).prompt_ids


def test_tools_do_not_go_with_a_regex_and_a_list_of_conversations_has_them_all(calling: LLM) -> None:
    with pytest.raises(BadOption, match="tools go with a schema"):
        calling.chat("hi", Sampling(regex="[0-9]+"), tools=[LOOK])
    few = Sampling(max_tokens=100)
    both = calling.chat(["here?", "there?"], few, tools=[LOOK], tool_choice=NAMED)
    assert [[call.name for call in answer.tool_calls] for answer in both] == [["look"], ["look"]]


@pytest.mark.parametrize("model", [None, 3, ["smollm2"], b"smollm2"])
def test_what_is_neither_a_path_nor_a_name_is_no_model(model: Any) -> None:
    with pytest.raises(BadInput, match=rf"model is {re.escape(repr(model))}; it must be a path or a name"):
        LLM(model)


def test_half_a_character_is_refused_in_prompts_chats_and_stops(tiny_llm: LLM) -> None:
    for call in (
        tiny_llm.chat,
        tiny_llm.generate,
        tiny_llm.tokenize,
        tiny_llm.embed,
        lambda text: list(tiny_llm.stream(text)),
    ):
        with pytest.raises(BadInput, match=r"half a character"):
            call("a\ud800")
    with pytest.raises(BadOption, match=r"stop is .*; it must be a text without half a character"):
        Sampling(stop=["\ud800"])
