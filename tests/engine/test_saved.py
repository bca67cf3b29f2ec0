"""Sequences that are kept after their answers: gone on from, saved and loaded, by the loop and out of its own pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM, Sampling
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.cells.decoder import Decoder
from ostinato.engine.engine import Engine
from ostinato.engine.request import HeldSequence
from ostinato.engine.saved import load_sequence, save_sequence
from ostinato.errors import BadFile, BadInput
from ostinato.options import KVType
from tests.engine.opened import bits, ids, open_engine, prompt, sampling, until
from tests.random_model import MemoryKind

KINDS: tuple[MemoryKind, ...] = ("kv", "swa", "all swa", "recurrent", "hybrid")
SHORT = sampling(max_tokens=9)
GREEDY = Sampling(max_tokens=12, temperature=0, ignore_eos=True)


def computed(engine: Engine) -> list[int]:
    """The tokens of every part that a chunk computes from now on."""
    told: list[int] = []
    run = engine.runner.chunks.run

    def noted(parts: Sequence[Any], *rest: Any) -> Any:
        told.extend(len(part.tokens) for part in parts)
        return run(parts, *rest)

    engine.runner.chunks.run = noted  # type: ignore[method-assign, assignment]  # listens
    return told


def going_on(engine: Engine, ids: Sequence[int]) -> list[tuple[Any, ...]]:
    return bits(engine.submit(ids, SHORT, resume=True, keep=True))


def answered(engine: Engine, asked: list[int]) -> list[int]:
    """The tokens that were read to make an answer, which is kept."""
    made = ids(engine.submit(asked, SHORT, keep=True))
    until(lambda: not engine.stats().pages_leased, "its pages are kept, or free")
    return [*asked, *made[:-1]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["eager", "loop"])
def test_an_answer_that_is_kept_is_gone_on_from_and_saved_without_computing_it_again(
    kind: MemoryKind, mode: str
) -> None:
    with open_engine(kind, mode=mode) as engine:
        held = answered(engine, prompt(1, 21))
        n_computed = computed(engine)
        data = save_sequence(engine, HeldSequence(held), {})
        assert n_computed == []
        longer = [*held, 5, 6, 7]
        found = going_on(engine, longer)
        assert n_computed == [3]
    with open_engine(kind, mode=mode, n_slots=2) as other:
        expected = bits(other.submit(longer, SHORT))
        assert [token for token, *_ in found] == [token for token, *_ in expected]
        assert load_sequence(other, data).tokens == held
        n_computed = computed(other)
        assert going_on(other, longer) == found
        assert n_computed == [3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_the_cell_kind_is_loaded_into_pages(kind: MemoryKind) -> None:
    ids = prompt(3, 75)
    with open_engine(kind, mode="eager") as engine:
        decoder = Decoder(engine.runner.plain_model, n_ctx=256)
        decoder.decode(Batch(token=ids))
        load_sequence(engine, decoder.save_sequence(0, {"ids": ids}))
        n_computed = computed(engine)
        assert [token for token, *_ in going_on(engine, [*ids, 9])] == [
            token for token, *_ in bits(engine.submit([*ids, 9], SHORT))
        ]
        assert n_computed[0] == 1


@pytest.mark.parametrize("kv_type", ["f32", "bf16"])
def test_the_native_loops_pages_are_saved_position_by_position(
    tiny_gguf: Path, kv_type: KVType, tmp_path: Path
) -> None:
    """Whose pages have an order of their own: what it saves is what the cell kind loads, and the other way round."""
    with LLM(tiny_gguf, device="cpu", kv_type=kv_type) as llm:
        first = llm.generate([5, 6, 7] * 12, GREEDY)
        llm.save_state(tmp_path / "one.state")
        held, data = [*first.prompt_ids, *first.token_ids[:-1]], (tmp_path / "one.state").read_bytes()
        loaded, fresh = llm.decoder(), llm.decoder()
        loaded.load_sequence(0, data)
        fresh.decode(Batch(token=held))
        for decoder in (loaded, fresh):
            decoder.decode(Batch(token=[9], pos=[len(held)], output=[1]))
        near, wanted = loaded.logits(-1), fresh.logits(-1)
        assert near is not None
        assert wanted is not None
        torch.testing.assert_close(near, wanted, atol=1e-3 if kv_type == "f32" else 0.05, rtol=0)


def test_kept_pages_are_given_to_a_request_that_needs_them() -> None:
    with open_engine(n_slots=1, context=64, n_pages=4, share_prefixes=False) as engine:
        held = answered(engine, prompt(1, 21))
        bits(engine.submit(prompt(2, 50), sampling(max_tokens=10)))
        n_computed = computed(engine)
        assert [token for token, *_ in going_on(engine, [*held, 5])] == ids(engine.submit([*held, 5], SHORT))
        assert n_computed[0] == len(held) + 1


def test_one_that_begins_otherwise_shares_what_is_alike_and_spoils_nothing() -> None:
    with open_engine() as engine:
        asked = prompt(1, 50)
        held = answered(engine, asked)
        other = [*held[:37], 1, 2, 3]  # inside a page that later prompts may find
        n_computed = computed(engine)
        found = going_on(engine, other)
        assert n_computed == [40 - 32]
        assert found == bits(engine.submit(other, SHORT))
        assert ids(engine.submit(asked, SHORT))[:-1] == held[50:]


@pytest.mark.parametrize("kind", ["swa", "all swa"])
@pytest.mark.parametrize("again", [False, True], ids=["loaded", "loaded and saved again"])
def test_what_was_loaded_is_continued_only_where_its_windows_are_whole(kind: MemoryKind, again: bool) -> None:
    """A file has of a window what its last position sees: before that, a page is there and its first rows are not."""
    with open_engine(kind) as engine:
        held = answered(engine, prompt(1, 50))
        data = save_sequence(engine, HeldSequence(held), {})
    with open_engine(kind, share_prefixes=False) as engine:
        for n in range(len(held) - 11, len(held) + 1):
            load_sequence(engine, data)
            if again:
                assert save_sequence(engine, HeldSequence(held), {}) == data
            other = [*held[:n], 1, 2, 3]
            n_computed = computed(engine)
            assert going_on(engine, other) == bits(engine.submit(other, SHORT))
            assert n_computed[0] == (len(other) - n if n >= len(held) - 1 else len(other))


def test_a_state_without_its_ids_or_with_others_is_refused() -> None:
    with open_engine() as engine:
        held = answered(engine, prompt(1, 21))
        data = save_sequence(engine, HeldSequence(held), {})
        decoder = Decoder(engine.runner.plain_model, n_ctx=256)
        decoder.decode(Batch(token=held))
        notes: list[dict[str, Any]] = [{}, {"ids": "none"}, {"ids": held[:-1]}, {"ids": []}]
        for note in notes:
            with pytest.raises(BadFile):
                load_sequence(engine, decoder.save_sequence(0, note))
        assert load_sequence(engine, data).tokens == held


def test_nothing_can_be_saved_before_there_is_an_answer(tiny_gguf: Path, tmp_path: Path) -> None:
    with LLM(tiny_gguf, device="cpu") as llm, pytest.raises(BadInput, match="no answer yet"):
        llm.save_state(tmp_path / "none.state")


def test_going_on_from_memory_gives_the_tokens_of_the_whole_prompt(tiny_llm: LLM) -> None:
    def answer(prompt: list[int]) -> tuple[int, ...]:
        *_, last = tiny_llm.stream(prompt, GREEDY, reuse=True)
        assert last.completion is not None
        return last.completion.token_ids

    asked = [5, 6, 7, 8]
    assert answer(asked) == tiny_llm.generate(asked, GREEDY).token_ids
    longer = [*asked, *answer(asked), 9, 10]
    assert answer(longer) == tiny_llm.generate(longer, GREEDY).token_ids
