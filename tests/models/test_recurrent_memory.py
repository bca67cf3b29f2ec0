"""Recurrent and hybrid families in the real memory: mixed batches, roll backs, copies and saved states give the
logits of each sequence run alone from its beginning."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ostinato import LLM
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.cells.decoder import Decoder
from tests.models import tiny

pytestmark = pytest.mark.slow  # together they take seconds

FAMILIES = (
    "mamba",
    "falcon-mamba",
    "mamba2-groups",
    "falcon-h1",
    "falcon-h1-norm",
    "lfm2",
    pytest.param("qwen35", marks=pytest.mark.soak),
)


@pytest.fixture(scope="module", params=FAMILIES)
def llm(request: pytest.FixtureRequest, tiny_files: Path) -> Iterator[LLM]:
    with LLM(tiny.gguf(request.param, tiny_files), device="cpu", context=256) as llm:
        yield llm


def name_of(llm: LLM) -> str:
    return Path(llm.path).stem


def last_logits(decoder: Decoder, ids: list[int], *, sequence: int = 0, start: int = 0) -> Tensor:
    """Decode ids of one sequence from a position on; the logits of the last."""
    n = len(ids)
    at = list(range(start, start + n))
    flags = [0] * (n - 1) + [1]
    decoder.decode(Batch(token=ids, pos=at, seq_id=[[sequence]] * n, output=flags))
    found = decoder.logits(-1)
    assert found is not None
    return found.clone()


def wanted(llm: LLM, ids: list[int]) -> Tensor:
    return tiny.forward(name_of(llm), ids)[-1]


def close(found: Tensor, expected: Tensor) -> None:
    assert_close(found, expected, atol=tiny.TOLERANCE, rtol=0)


@pytest.mark.parametrize("n_ubatch", [4, 7, 64])
@pytest.mark.parametrize("unified", [False, True])
def test_ragged_sequences_side_by_side_are_as_each_alone(llm: LLM, n_ubatch: int, unified: bool) -> None:
    prompts = {0: tiny.prompt(name_of(llm))[:20], 1: tiny.prompt(name_of(llm))[20:25], 2: [40, 41, 42]}
    decoder = llm.decoder(n_seq_max=3, n_ubatch=n_ubatch, unified=unified)
    steps = [(s, i) for s, ids in prompts.items() for i in range(len(ids))]
    steps.sort(key=lambda step: (step[1], step[0]))  # token by token, the sequences in turn
    batch = Batch(
        token=[prompts[s][i] for s, i in steps],
        pos=[i for _, i in steps],
        seq_id=[[s] for s, _ in steps],
        output=[1] * len(steps),
    )
    decoder.decode(batch)
    for row, (s, i) in enumerate(steps):
        found = decoder.logits(row)
        assert found is not None
        close(found, wanted(llm, prompts[s][: i + 1]))


def test_one_sequence_is_prefilled_while_another_goes_on(llm: LLM) -> None:
    ids = tiny.prompt(name_of(llm))
    decoder = llm.decoder(n_seq_max=2)
    last_logits(decoder, ids[:10], sequence=0)
    tokens, rows = [ids[10], *ids[20:26]], [[0], *[[1]] * 6]
    decoder.decode(Batch(token=tokens, pos=[10, *range(6)], seq_id=rows, output=[1, 0, 0, 0, 0, 0, 1]))
    going, starting = decoder.logits(0), decoder.logits(6)
    assert going is not None
    assert starting is not None
    close(going, wanted(llm, ids[:11]))
    close(starting, wanted(llm, ids[20:26]))


@pytest.mark.parametrize("back", [1, 2, 4])
def test_after_a_roll_back_a_sequence_goes_on_as_if_the_tokens_had_not_been(llm: LLM, back: int) -> None:
    ids = tiny.prompt(name_of(llm))
    decoder = llm.decoder(n_seq_max=2, n_rs_seq=4)
    last_logits(decoder, ids[:20])
    assert decoder.memory.seq_rm(0, 20 - back, None)
    kept, other = ids[: 20 - back], [200, 201, 202]
    close(last_logits(decoder, other, start=20 - back), wanted(llm, [*kept, *other]))


def test_a_roll_back_beyond_the_snapshots_is_refused_and_changes_nothing(llm: LLM) -> None:
    ids = tiny.prompt(name_of(llm))
    decoder = llm.decoder(n_seq_max=1, n_rs_seq=2)
    last_logits(decoder, ids[:12])
    assert not decoder.memory.seq_rm(0, 5, None)
    close(last_logits(decoder, ids[12:15], start=12), wanted(llm, ids[:15]))


def test_a_copy_and_its_original_go_their_own_ways(llm: LLM) -> None:
    ids = tiny.prompt(name_of(llm))
    decoder = llm.decoder(n_seq_max=2)
    last_logits(decoder, ids[:10])
    decoder.memory.seq_cp(0, 1, None, None)
    close(last_logits(decoder, [50, 51], sequence=1, start=10), wanted(llm, [*ids[:10], 50, 51]))
    close(last_logits(decoder, ids[10:14], sequence=0, start=10), wanted(llm, ids[:14]))


def test_a_saved_sequence_goes_on_elsewhere_to_the_bit(llm: LLM) -> None:
    ids = tiny.prompt(name_of(llm))
    here, there = llm.decoder(n_seq_max=1), llm.decoder(n_seq_max=2)
    last_logits(here, ids[:10])
    there.load_sequence(1, here.save_sequence(0))
    found = last_logits(there, ids[10:16], sequence=1, start=10)
    assert torch.equal(found, last_logits(here, ids[10:16], start=10))
    close(found, wanted(llm, ids[:16]))


@pytest.mark.parametrize(
    ("name", "parts"), [("mamba2", (None, "states")), ("falcon-h1", ("cache", "states")), ("llama", ("cache", None))]
)
def test_a_family_gets_the_memory_it_needs(name: str, parts: tuple[Any, Any], tiny_files: Path) -> None:
    with LLM(tiny.gguf(name, tiny_files), device="cpu", context=64) as llm:
        found = llm.decoder().parts
    assert (found.full is not None, found.recurrent is not None) == tuple(part is not None for part in parts)
