"""Recurrent families, and some others, in the plainest memory: logits as transformers', however the prompt is cut."""

from pathlib import Path
from typing import Final

import pytest
import torch
from torch.testing import assert_close

from tests.models import plain_memory, tiny
from tests.models.plain_memory import PlainMemory

RECURRENT: Final = [name for name in tiny.TINY if "mamba" in name or "falcon" in name]
ALONE: Final = [*RECURRENT, "llama", "gemma3", "gpt2"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), [case for case in tiny.CASES if case[0] in ALONE], ids=lambda part: part)
def test_logits_of_the_model_alone_equal_those_of_transformers(name: str, form: str, tiny_files: Path) -> None:
    model = plain_memory.load(tiny.written(name, form, tiny_files), context=tiny.TINY[name].context)
    found = plain_memory.logits(model, tiny.prompt(name))
    assert_close(found, tiny.reference_logits(name), atol=tiny.TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RECURRENT, "llama", "gemma3"])
def test_a_prompt_in_pieces_has_the_logits_of_the_whole(name: str, tiny_files: Path) -> None:
    model = plain_memory.load(tiny.folder(name, tiny_files))
    whole = plain_memory.logits(model, tiny.prompt(name))
    for cuts in ((1,), (2, 3, 20), (31, 47), tuple(range(1, 48))):
        assert_close(plain_memory.logits(model, tiny.prompt(name), cuts=cuts), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", RECURRENT)
def test_kept_planes_are_the_states_after_each_of_the_last_tokens(name: str, tiny_files: Path) -> None:
    model = plain_memory.load(tiny.folder(name, tiny_files))
    ids = torch.tensor(tiny.prompt(name)[:10])
    at_once, by_token = PlainMemory(model.shape, n_planes=4), PlainMemory(model.shape)
    newest: list[dict[int, tuple[torch.Tensor, ...]]] = []
    with torch.inference_mode():
        model.hidden(ids, torch.arange(10), at_once)
        for i in range(10):
            model.hidden(ids[i : i + 1], torch.arange(i, i + 1), by_token)
            newest.append(dict(by_token.kept))
    for layer, planes in at_once.kept.items():
        for back in range(4):
            for many, one in zip(planes, newest[9 - back][layer], strict=True):
                assert_close(many[:, back], one[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in RECURRENT if "h1" not in name])  # plain attention knows one sequence
def test_several_runs_of_one_forward_are_as_each_alone(name: str, tiny_files: Path) -> None:
    model = plain_memory.load(tiny.folder(name, tiny_files))
    ids = tiny.prompt(name)
    memory = PlainMemory(model.shape, n_seqs=3)
    with torch.inference_mode():
        rows = model.hidden(torch.tensor(ids), torch.arange(16).repeat(3), memory)
    alone = torch.cat([plain_memory.hidden(model, ids[start : start + 16]) for start in (0, 16, 32)])
    assert_close(rows, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon-h1", "falcon-h1-norm"])
def test_bfloat16_weights_stay_near_float32(name: str, tiny_files: Path) -> None:
    model = plain_memory.load(tiny.folder(name, tiny_files), dtype=torch.bfloat16)
    found = plain_memory.logits(model, tiny.prompt(name)[:1])
    assert found.dtype == torch.float32
    wanted = tiny.forward(name, tiny.prompt(name)[:1])
    assert float((found - wanted).abs().mean()) < 0.05
