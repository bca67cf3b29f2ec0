"""Positions of several dimensions, from a batch to the angles of a model that has sections of rotary positions.

A picture is rows of embeddings whose positions share a time and differ in height and width, as a vision tower would
give them; text follows. The reference is transformers with the same rows and positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ostinato import LLM, Batch
from ostinato.errors import BadFile, InvalidBatch
from ostinato.models.fields import Fields
from ostinato.models.rope import Rope, with_sections
from tests.models import tiny

N_TEXT, HEIGHT, WIDTH = 3, 2, 4
NAMES = ("qwen3-vl", "qwen35")  # attention alone, and beside gated delta nets


def positions() -> np.ndarray:
    """[3, rows]: a text, a picture of 2 x 4 rows, a text; time, height and width."""
    before = np.tile(np.arange(N_TEXT), (3, 1))
    y, x = np.divmod(np.arange(HEIGHT * WIDTH), WIDTH)
    picture = np.stack([np.full_like(y, N_TEXT), N_TEXT + y, N_TEXT + x])
    after = np.tile(np.arange(4) + N_TEXT + max(HEIGHT, WIDTH), (3, 1))
    return np.concatenate([before, picture, after], axis=1)


def rows(n: int, width: int) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(3)) * 0.5


def reference(name: str, given: Tensor, places: np.ndarray) -> Tensor:
    """transformers' logits of these rows at these places."""
    model: Any = tiny.build(name)
    text = getattr(model.model, "language_model", model.model)
    with torch.inference_mode():
        hidden = text(inputs_embeds=given[None], position_ids=torch.from_numpy(places)[:, None], use_cache=False)
        logits: Tensor = model.lm_head(hidden.last_hidden_state)[0]
    return logits


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), [("qwen3-vl", "folder"), ("qwen3-vl", "gguf"), ("qwen35", "gguf")])
def test_rows_at_places_of_a_picture_have_the_logits_of_transformers(name: str, form: str, tmp_path: Path) -> None:
    path = tiny.folder(name, tmp_path) if form == "folder" else tiny.gguf(name, tmp_path)
    places, n = positions(), positions().shape[1]
    with LLM(path, device="cpu", mode="eager", context=128) as llm:
        assert llm.shape.n_pos_dims == 3
        given = rows(n, llm.shape.hidden)
        decoder = llm.decoder(n_seq_max=2)
        decoder.decode(Batch(embd=given.numpy(), pos=places, output=[1] * n))
        found = torch.stack([logits for row in range(n) if (logits := decoder.logits(row)) is not None])
        expected = reference(name, given, places)
        assert_close(found, expected, atol=tiny.TOLERANCE, rtol=0)
        flat = reference(name, given, np.tile(np.arange(n), (3, 1)))
        assert (expected - flat).abs().max() > 100 * tiny.TOLERANCE, "the places matter"

        # The same in two batches, and saved between them: cells remember height and width.
        again = llm.decoder(n_seq_max=2)
        cut = N_TEXT + 3  # inside the picture
        again.decode(Batch(embd=given[:cut].numpy(), pos=places[:, :cut]))
        again.decode(Batch(embd=given[cut:].numpy(), pos=places[:, cut:]))
        assert_close(again.logits(-1), found[-1], atol=tiny.TOLERANCE, rtol=0)
        with pytest.raises(InvalidBatch):  # SQ-12: no one distance moves a place
            again.memory.seq_add(0, 1, None, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_text_has_one_position_in_every_dimension(name: str, tmp_path: Path) -> None:
    ids = tiny.prompt(name)[:12]
    with LLM(tiny.folder(name, tmp_path), device="cpu", mode="eager", context=128) as llm:
        decoder = llm.decoder()
        decoder.decode(Batch(token=ids))
        assert_close(decoder.logits(-1), tiny.forward(name, ids)[-1], atol=tiny.TOLERANCE, rtol=0)


def test_sections_are_read_from_both_formats_and_anything_else_is_refused() -> None:
    rope = Rope(1e4, 16, "halves")

    def read(values: dict[str, Any]) -> Rope:
        return with_sections(rope, Fields(values, Path("model")))

    assert read({"rope_parameters": {"mrope_section": [4, 2, 2]}}).sections == (4, 2, 2)
    assert read({"rope_scaling": {"mrope_section": [4, 2, 2]}}).sections == (4, 2, 2)
    assert read({"rope.dimension_sections": [4, 2, 2, 0]}).sections == (4, 2, 2)
    assert read({}) == rope
    assert (rope.n_dimensions, rope.dimensions) == (1, (0,) * 8)
    for wrong in ([4, 2], [4, 2, 2, 1], [4, 2.5, 2], [4, -2, 2], "4 2 2"):
        with pytest.raises(BadFile):
            read({"rope_parameters": {"mrope_section": wrong}})
