"""The tiny models are fit to judge by: both manners of folder say the same, and no greedy choice is a near tie."""

from pathlib import Path
from typing import get_args

import pytest
import torch
import transformers
from torch.testing import assert_close

from tests.models import tiny
from tests.models.tiny_folder import Style


@pytest.mark.slow
@pytest.mark.parametrize("style", get_args(Style))
@pytest.mark.parametrize("name", tiny.TINY)
def test_transformers_reads_the_folder_as_the_model_that_was_saved(name: str, style: Style, tiny_files: Path) -> None:
    path = tiny.folder(name, tiny_files, style=style)
    kind = getattr(transformers, tiny.TINY[name].kind)
    # Experts in MXFP4 come out in bfloat16, whatever the dtype.
    read = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").float()
    with torch.inference_mode():
        logits = tiny.as_trained(read.eval())(torch.tensor([tiny.prompt(name)]), use_cache=False).logits[0]
    assert_close(logits, tiny.reference_logits(name), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.TINY)
def test_a_tiny_model_shows_mistakes_and_has_no_near_ties(name: str) -> None:
    assert 0.5 < float(tiny.reference_logits(name).std()) < 2
    assert tiny.clearest_margin(name) > 1e-3
    assert len(set(tiny.reference_greedy(name))) > 8
