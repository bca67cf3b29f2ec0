"""What runs one sequence at a time: answers that go on from memory, and a decoder that is made when it is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato import LLM, Sampling
from ostinato.errors import BadInput

PROMPT = [5, 6, 7, 8]
GREEDY = Sampling(max_tokens=12, temperature=0, ignore_eos=True)


def going_on(llm: LLM, prompt: list[int]) -> tuple[int, ...]:
    *_, last = llm.stream(prompt, GREEDY, reuse=True)
    assert last.completion is not None
    return last.completion.token_ids


def test_going_on_from_memory_gives_the_tokens_of_the_whole_prompt(tiny_llm: LLM) -> None:
    assert going_on(tiny_llm, PROMPT) == tiny_llm.generate(PROMPT, GREEDY).token_ids
    longer = [*PROMPT, *going_on(tiny_llm, PROMPT), 9, 10]
    assert going_on(tiny_llm, longer) == tiny_llm.generate(longer, GREEDY).token_ids


def test_a_decoder_is_made_only_when_it_is_needed(tiny_gguf: Path) -> None:
    with LLM(tiny_gguf, device="cpu") as llm:
        llm.generate(PROMPT, GREEDY)
        assert llm._sequential._decoder is None
        llm.logits(PROMPT)
        assert llm._sequential._decoder is not None


def test_memory_has_one_reader_at_a_time_and_the_loop_does_not_mind(tiny_llm: LLM) -> None:
    alone = tiny_llm.generate(PROMPT, GREEDY).token_ids
    first = tiny_llm.stream(PROMPT, GREEDY, reuse=True)
    found = [next(first).token_id]
    with pytest.raises(BadInput, match="still open"):
        next(tiny_llm.stream(PROMPT, GREEDY, reuse=True))
    assert tiny_llm.generate(PROMPT, GREEDY).token_ids == alone
    found += [piece.token_id for piece in first]
    assert tuple(found) == alone


def test_a_prompt_in_one_chunk_or_several_gives_the_same_tokens(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [3 + (i * 37) % 290 for i in range(100)]
    with LLM(tiny_gguf, device="cpu") as llm:
        whole = llm.generate(prompt, GREEDY).token_ids
        monkeypatch.setattr("ostinato.engine.sequential.CHUNK_ROWS", 7)
        assert going_on(llm, prompt) == whole
