"""When an answer ends, and that nothing of one request reaches the next."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from ostinato import LLM, Sampling
from ostinato.engine.request import check_prompt
from ostinato.errors import BadInput, PromptTooLong
from ostinato.options import KVType

PROMPT = [5, 6, 7, 8]
GREEDY = Sampling(max_tokens=12, temperature=0, ignore_eos=True)


def test_an_answer_has_as_many_tokens_as_asked_for(tiny_llm: LLM) -> None:
    answer = tiny_llm.generate(PROMPT, GREEDY)
    assert len(answer.token_ids) == 12
    assert answer.finish_reason == "length"


def test_an_answer_ends_with_length_at_the_end_of_the_context(tiny_llm: LLM) -> None:
    prompt = [3 + i % 200 for i in range(120)]
    answer = tiny_llm.generate(prompt, Sampling(max_tokens=1000, ignore_eos=True))
    assert len(answer.prompt_ids) + len(answer.token_ids) == tiny_llm.context
    assert answer.finish_reason == "length"


def test_an_answer_ends_at_a_stop_id_and_shows_nothing_of_it(tiny_llm: LLM) -> None:
    whole = tiny_llm.generate(PROMPT, GREEDY)
    stop = whole.token_ids[4]
    at = whole.token_ids.index(stop)
    cut = tiny_llm.generate(PROMPT, Sampling(max_tokens=12, temperature=0, stop_token_ids=(stop,), ignore_eos=True))
    assert cut.token_ids == whole.token_ids[: at + 1]
    assert cut.finish_reason == "stop"
    assert cut.text == tiny_llm.detokenize(whole.token_ids[:at])


def test_every_end_of_generation_id_ends_an_answer_unless_told_to_go_on(tiny_llm: LLM) -> None:
    assert tiny_llm.tokenizer.eog_ids
    for end in tiny_llm.tokenizer.eog_ids:
        forced = {end: 100.0}
        ended = tiny_llm.generate(PROMPT, Sampling(max_tokens=5, logit_bias=forced))
        assert (ended.token_ids, ended.finish_reason, ended.text) == ((end,), "stop", "")
        going_on = tiny_llm.generate(PROMPT, Sampling(max_tokens=5, logit_bias=forced, ignore_eos=True))
        assert going_on.token_ids == (end,) * 5


def test_min_tokens_holds_back_every_end(tiny_llm: LLM) -> None:
    end = min(tiny_llm.tokenizer.eog_ids)
    answer = tiny_llm.generate(PROMPT, Sampling(max_tokens=9, min_tokens=3, logit_bias={end: 100.0}))
    assert len(answer.token_ids) == 4
    assert answer.token_ids[-1] == end
    assert not set(answer.token_ids[:3]) & tiny_llm.tokenizer.eog_ids


def test_a_seed_gives_the_same_draws_again_and_another_seed_others(tiny_llm: LLM) -> None:
    def drawn(seed: int) -> tuple[int, ...]:
        warm = Sampling(max_tokens=16, temperature=1.5, seed=seed, ignore_eos=True)
        return tiny_llm.generate(PROMPT, warm).token_ids

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_without_a_seed_one_is_drawn_told_and_good_for_a_repeat(tiny_llm: LLM) -> None:
    first = tiny_llm.generate(PROMPT, Sampling(max_tokens=16, temperature=1.5))
    again = tiny_llm.generate(PROMPT, Sampling(max_tokens=16, temperature=1.5, seed=first.seed))
    assert again.token_ids == first.token_ids
    assert again.digest == first.digest


def test_a_request_leaves_no_trace_for_the_next(tiny_llm: LLM) -> None:
    alone = tiny_llm.generate(PROMPT, GREEDY).token_ids
    tiny_llm.generate([9] * 60, GREEDY)
    next(tiny_llm.stream([11] * 40, GREEDY))  # left half way
    assert tiny_llm.generate(PROMPT, GREEDY).token_ids == alone


def test_a_penalty_keeps_tokens_from_coming_again(tiny_llm: LLM) -> None:
    answer = tiny_llm.generate(PROMPT, Sampling(max_tokens=30, temperature=0, frequency_penalty=100, ignore_eos=True))
    assert len(set(answer.token_ids)) == 30


def test_a_repetition_penalty_counts_the_prompt_too(tiny_llm: LLM) -> None:
    favourite = tiny_llm.generate(PROMPT, Sampling(max_tokens=1)).token_ids[0]
    prompt = [favourite, *PROMPT]
    plain = tiny_llm.logits(prompt)[-1]
    penalised = tiny_llm.generate(prompt, Sampling(max_tokens=1, repetition_penalty=100, ignore_eos=True)).token_ids[0]
    expected = plain.copy()
    for token in set(prompt):
        expected[token] = expected[token] / 100 if expected[token] > 0 else expected[token] * 100
    assert penalised == int(expected.argmax())


def test_logprobs_are_the_models_own_and_their_top_is_in_order(tiny_llm: LLM) -> None:
    answer = tiny_llm.generate(PROMPT, Sampling(max_tokens=3, temperature=0, logprobs=4, ignore_eos=True))
    assert answer.logprobs is not None
    logits = torch.from_numpy(tiny_llm.logits([*PROMPT, *answer.token_ids]))
    rows = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    for row, token in zip(rows, answer.logprobs, strict=True):
        assert abs(token.logprob - float(row[token.token_id])) < 1e-4
        assert [i for i, _ in token.top] == row.topk(4).indices.tolist()
    assert tiny_llm.generate(PROMPT, GREEDY).logprobs is None


def test_a_prompt_longer_than_the_context_is_told_how_long_and_what_to_do(tiny_llm: LLM) -> None:
    """E-41."""
    with pytest.raises(
        PromptTooLong, match=r"128 tokens.*holds 128.*shorten it, or open the model with a larger context="
    ):
        tiny_llm.generate([5] * 128)
    most = tiny_llm.shape.context
    with pytest.raises(PromptTooLong, match=f"holds {most}; shorten it, as the model was trained for no more"):
        check_prompt([5] * (most + 1), shape=tiny_llm.shape, context=most)
    with pytest.raises(PromptTooLong, match="5000"):
        tiny_llm.logits([5] * 5000)


@pytest.mark.parametrize("wrong", [[5, 300], [-1], [5, 2**70]])
def test_ids_that_are_no_tokens_are_named_with_their_place(tiny_llm: LLM, wrong: list[int]) -> None:
    with pytest.raises(BadInput, match=f"index {len(wrong) - 1}"):
        tiny_llm.generate(wrong)


def test_an_empty_prompt_is_refused(tiny_llm: LLM) -> None:
    with pytest.raises(BadInput, match="empty"):
        tiny_llm.generate("")
    with pytest.raises(BadInput, match="empty"):
        tiny_llm.generate([[5], []])


def test_a_bias_for_an_unknown_token_is_refused(tiny_llm: LLM) -> None:
    with pytest.raises(BadInput, match="300"):
        tiny_llm.generate(PROMPT, Sampling(logit_bias={300: 1.0}))


def test_several_streams_may_be_open_and_read_in_any_order(tiny_llm: LLM) -> None:
    prompts = [[5 + i, 6, 7] for i in range(12)]  # more than there are slots
    alone = [tiny_llm.generate(prompt, GREEDY).token_ids for prompt in prompts]
    streams = [tiny_llm.stream(prompt, GREEDY) for prompt in prompts]
    first = [next(stream).token_id for stream in streams[:5]]
    found = {i: [piece.token_id for piece in streams[i]] for i in reversed(range(12))}
    for i, token in enumerate(first):
        found[i].insert(0, token)
    assert [tuple(found[i]) for i in range(12)] == alone


def test_threads_ask_at_once_and_each_gets_its_own_answer(tiny_llm: LLM) -> None:
    prompts = [[5 + i, 6, 7] for i in range(6)]
    alone = [tiny_llm.generate(prompt, GREEDY).token_ids for prompt in prompts]
    found: dict[int, tuple[int, ...]] = {}

    def ask(i: int) -> None:
        found[i] = tiny_llm.generate(prompts[i], GREEDY).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [found[i] for i in range(len(prompts))] == alone


@pytest.mark.parametrize("kv_type", ["bf16", "f16"])
def test_narrower_keys_and_values_stay_near(tiny_gguf: Path, tiny_llm: LLM, kv_type: KVType) -> None:
    prompt = [3 + (i * 37) % 290 for i in range(60)]
    with LLM(tiny_gguf, device="cpu", kv_type=kv_type) as llm:
        assert float(np.abs(llm.logits(prompt) - tiny_llm.logits(prompt)).max()) < 0.1
