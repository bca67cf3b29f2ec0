"""phi3 with longrope: short factors up to the original context, long ones beyond it, chosen for each sequence at its
admission and never for an engine; equal to transformers, side by side, and in all that is kept of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from ostinato import LLM, Completion, Sampling
from ostinato.cache import state_bytes
from ostinato.cache.state_bytes import describe, identify, pack, unpack
from ostinato.decoder.batch.batch import Batch
from ostinato.engine.answer import Origin
from ostinato.errors import BadFile
from ostinato.text.answer import GenerationInput
from tests.models import tiny

NAME: Final = "phi3-long"
ORIGINAL: Final = 256
IDS: Final[list[int]] = torch.randint(3, tiny.VOCAB_SIZE, (300,), generator=torch.Generator().manual_seed(5)).tolist()


def greedy(most: int | None, **options: Any) -> Sampling:
    return Sampling(max_tokens=most, temperature=0, ignore_eos=True, **options)


def opened(tiny_files: Path, form: str = "gguf", mode: str = "loop", **options: Any) -> LLM:
    return LLM(tiny.written(NAME, form, tiny_files), device="cpu", mode=mode, **{"context": 512, **options})


@pytest.fixture(scope="module")
def llm(tiny_files: Path) -> Iterator[LLM]:
    with opened(tiny_files, slots=4) as llm:
        yield llm


def generated(ids: list[int], most: int) -> list[int]:
    """What transformers itself answers."""
    with torch.inference_mode():  # the model may have been built in it; then its frequencies change nowhere else
        out = tiny.build(NAME).generate(torch.tensor([ids]), max_new_tokens=most, min_new_tokens=most, do_sample=False)
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


def in_one_pass(ids: list[int], answer: tuple[int, ...]) -> tuple[int, ...]:
    """What transformers chooses after each token, given all of them at once: by the factors of the whole length."""
    return tuple(tiny.forward(NAME, [*ids, *answer[:-1]])[len(ids) - 1 :].argmax(-1).tolist())


def told(answer: Completion) -> tuple[Any, ...]:
    """Tokens and log-probabilities, to the bit."""
    assert answer.logprobs is not None
    return answer.token_ids, [(token.logprob, token.top) for token in answer.logprobs]


@pytest.mark.parametrize("mode", ["loop", "eager"])
@pytest.mark.parametrize("form", ["gguf", "current"])
def test_tokens_equal_those_of_transformers_on_both_sides_of_the_border(form: str, mode: str, tiny_files: Path) -> None:
    """The last token of an answer is not read, so prompt and answer may be one token longer than the border."""
    with opened(tiny_files, form, mode) as llm:
        for n, most in ((100, 8), (252, 4), (253, 4), (256, 1), (257, 1), (257, 4)):
            assert list(llm.generate(IDS[:n], greedy(most)).token_ids) == generated(IDS[:n], most), (n, most)


@pytest.mark.parametrize("n", [254, 256])
def test_an_answer_that_passes_the_border_is_the_one_of_its_whole_length(llm: LLM, n: int) -> None:
    answer = llm.generate(IDS[:n], greedy(4)).token_ids
    assert answer == in_one_pass(IDS[:n], answer)


def test_without_max_tokens_the_whole_context_is_asked_for(llm: LLM) -> None:
    pieces = llm.stream(IDS[:100], greedy(None))
    answer = tuple(piece.token_id for piece, _ in zip(pieces, range(4), strict=False) if piece.token_id is not None)
    pieces.close()  # type: ignore[attr-defined]  # a generator
    assert answer == llm.generate(IDS[:100], greedy(200)).token_ids[:4]
    assert answer != llm.generate(IDS[:100], greedy(4)).token_ids


@pytest.mark.parametrize("mode", ["loop", "eager"])
def test_sequences_of_both_kinds_side_by_side_have_the_bits_that_they_have_alone(mode: str, tiny_files: Path) -> None:
    asked = [(IDS[:20], 30), (IDS[:20], 250), (IDS[50:270], 30), (IDS[40:300], 20)]
    with opened(tiny_files, mode=mode, slots=4) as llm:
        alone = [told(llm.generate(ids, greedy(most, logprobs=2))) for ids, most in asked]
        specs = [llm._engine.check(ids, llm._with_defaults(greedy(most, logprobs=2))) for ids, most in asked]
        assert [spec.rope_set for spec in specs] == [0, 1, 0, 1]
        checked = [(spec, GenerationInput(list(spec.prompt), spec.sampling, fresh=False)) for spec in specs]
        pieces = llm._pieces(checked, wait=True)
        done = {number: piece.completion for number, piece in pieces if piece.completion is not None}
    assert [told(done[number]) for number in range(4)] == alone


@pytest.mark.parametrize("n", [ORIGINAL, ORIGINAL + 1])
def test_texts_are_scored_by_their_own_length(llm: LLM, n: int) -> None:
    wanted = tiny.forward(NAME, IDS[:n])
    logits = llm.logits(IDS[:n])
    assert np.abs(logits - wanted.numpy()).max() < tiny.TOLERANCE
    scored = llm.token_logprobs(IDS[:n])
    expected = wanted.log_softmax(-1)[torch.arange(n - 1), IDS[1:n]]
    assert np.abs(np.array([token.logprob for token in scored]) - expected.numpy()).max() < tiny.TOLERANCE
    assert llm.token_logprobs([IDS[:40], IDS[:n]]) == [llm.token_logprobs(IDS[:40]), scored]  # in one chunk


def test_a_beginning_that_is_cached_by_one_set_is_not_used_by_the_other(tiny_files: Path) -> None:
    with opened(tiny_files) as llm:
        fresh = [llm.generate(IDS[:200], greedy(most, logprobs=1)) for most in (20, 100)]
        again = [llm.generate(IDS[:200], greedy(most, logprobs=1)) for most in (20, 100)]
    assert [answer.cached_tokens for answer in fresh] == [0, 0]
    assert [answer.cached_tokens for answer in again] == [192, 192]
    assert list(map(told, again)) == list(map(told, fresh))
    assert told(fresh[0])[1] != told(fresh[1])[1][:20]


def test_the_digest_knows_the_set_of_a_model_that_has_two() -> None:
    origin = Origin(None, 0.0, {}, lambda: "files", n_rope_sets=2)  # type: ignore[arg-type]  # no tokenizer needed
    short, long = (origin.digest(greedy(4), [1, 2], [3], rope_set)() for rope_set in (0, 1))
    plain = replace(origin, n_rope_sets=1)
    assert len({short, long, plain.digest(greedy(4), [1, 2], [3])()}) == 3
    assert plain.digest(greedy(4), [1, 2], [3], 0)() == plain.digest(greedy(4), [1, 2], [3])()


def test_a_saved_state_is_continued_by_its_own_set_and_computed_again_by_the_other(
    tiny_files: Path, tmp_path: Path
) -> None:
    path = tmp_path / "story.state"
    with opened(tiny_files) as llm:
        llm.generate(IDS[:100], greedy(200))  # long by what was asked for
        held = llm._recent
        assert held is not None
        llm.save_state(path)
        longer = [*held.tokens[:120], *IDS[:3]]
        wanted = [told(llm.generate(longer, greedy(most, logprobs=1))) for most in (20, 180)]
    assert [part.layout["rope_set"] for part in describe(path.read_bytes()).sections] == [1]
    for most, cached, expected in zip((20, 180), (0, 120), wanted, strict=True):
        with opened(tiny_files) as llm:
            llm.load_state(path)
            *_, last = llm.stream(longer, greedy(most, logprobs=1), reuse=True)
            assert last.completion is not None
            assert (told(last.completion), last.completion.cached_tokens) == (expected, cached)
        with opened(tiny_files) as llm:
            llm.load_state(path)
            llm.save_state(tmp_path / "again.state")
            assert (tmp_path / "again.state").read_bytes() == path.read_bytes()


def test_a_state_that_does_not_say_its_set_is_refused(llm: LLM, tmp_path: Path) -> None:
    """As they were saved when the factors followed the engine's context."""
    llm.generate(IDS[:30], greedy(4))
    llm.save_state(tmp_path / "new.state")
    data = (tmp_path / "new.state").read_bytes()
    header, payload = unpack(data, identify(data))
    (section,) = header.sections
    bare = replace(section, layout={name: value for name, value in section.layout.items() if name != "rope_set"})
    old = pack("sequence", identify(data).architecture, replace(header, sections=(bare,)), [payload])
    state_bytes.write(tmp_path / "old.state", old)
    with pytest.raises(BadFile, match="its rope_set is None, not 0"):
        llm.load_state(tmp_path / "old.state")


@pytest.mark.parametrize(
    ("n_ctx", "n", "as_alone"), [(ORIGINAL, 20, True), (512, ORIGINAL + 1, True), (512, 20, False)]
)
def test_a_decoder_takes_the_factors_of_its_own_context(llm: LLM, n_ctx: int, n: int, as_alone: bool) -> None:
    decoder = llm.decoder(n_ctx=n_ctx)
    decoder.decode(Batch(token=IDS[:n]))
    found = decoder.logits(-1)
    assert found is not None
    difference = (found - tiny.forward(NAME, IDS[:n])[-1]).abs().max()
    assert (float(difference) < tiny.TOLERANCE) == as_alone
