"""Vectors over HTTP: of a text that is too long for the context, those of its beginning."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import tiny, tiny_encoders
from tests.serve.running import serving

pytestmark = pytest.mark.slow

CONTEXT = 32
LONG = "the people said that it was time " * 20
SEP = tiny_encoders.ids_of("a")[-1]


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in ("bert-last", "modern-bert", "nomic-bert", "xlm-roberta") for form in ("current", "gguf")
     if (name, form) in tiny_encoders.CASES],
)  # fmt: skip
def test_a_text_that_ollamas_api_truncates_keeps_the_token_that_ends_every_text(
    name: str, form: str, tmp_path: Path
) -> None:
    ids = tiny_encoders.ids_of(LONG)
    wanted = tiny_encoders.vector(name, [*ids[: CONTEXT - 1], SEP])
    assert not torch.allclose(wanted, tiny_encoders.vector(name, ids[:CONTEXT]), atol=1e-3)
    with serving(tiny_encoders.written(name, form, tmp_path), llm={"context": CONTEXT}) as server:
        made: dict[str, Any] = server.post("/api/embed", {"input": [LONG, "a"]}).json()
        older = server.post("/api/embeddings", {"prompt": LONG}).json()
        short = server.llm.embed("a")[0]
    for found in (made["embeddings"][0], older["embedding"]):
        np.testing.assert_allclose(found, wanted.numpy(), atol=tiny.TOLERANCE)
    np.testing.assert_allclose(made["embeddings"][1], short, atol=tiny.TOLERANCE)
    assert made["prompt_eval_count"] == CONTEXT + len(tiny_encoders.ids_of("a"))
