"""The whole kernel compiles for the card it is written for: a few models that together have every kind of weights."""

from __future__ import annotations

from math import prod
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ostinato.backends.tape.plan import TapeSizes
from ostinato.backends.tape.start import tape_binary
from ostinato.backends.torch.model import Model
from ostinato.errors import HardwareCannot
from ostinato.lab.random_weights import RandomFile
from ostinato.loop.layout import Layout
from ostinato.models.shape import Shape
from ostinato.options import Activations
from tests.backends.tape.loop import why_not_tape
from tests.backends.tape.models import FAMILIES, shape_of
from tests.backends.tape.test_plan import H200, headers_for, matrices_of
from tests.named_model import random_model_of

# The widths of a model of a billion weights; one layer and few tokens, on which no code depends.
BILLION = {"hidden": 2048, "n_heads": 32, "n_kv_heads": 8, "ff_width": 8192, "vocab": 4096}


def one_layer(family: str) -> Shape:
    shape = shape_of(family, windows=(None,), n_layers=1, **BILLION)
    return shape_of(family, windows=(None,), n_layers=1, ropes=shape.ropes[:1], **BILLION)


def unfilled_bytes(file: RandomFile, name: str) -> NDArray[np.uint8]:
    info = file.tensors[name]
    return np.zeros((prod(info.shape[:-1]), info.n_bytes // prod(info.shape[:-1])), np.uint8)


def unfilled(family: str, dtype: torch.dtype, mix: str | None) -> Model:
    shape, weight_type = one_layer(family), FAMILIES[family]
    with patch.object(RandomFile, "_make", unfilled_bytes):  # weights that are not multiplied
        return random_model_of(weight_type, shape, dtype, mix=mix)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "mix", "activations"),
    [
        ("llama", torch.bfloat16, None, "wide"),
        ("qwen3", torch.bfloat16, "q4_k_m", "wide"),
        ("llama", torch.float16, "q4_k_m", "int8"),
    ],
    ids=["bfloat16", "packed, with norms of q and k", "float16, packed, 8 bits of activations"],
)
def test_the_whole_kernel_compiles_for_the_card(
    family: str, dtype: torch.dtype, mix: str | None, activations: Activations
) -> None:
    model, layout = unfilled(family, dtype, mix), Layout(8, 64, BILLION["vocab"])
    assert why_not_tape(model, 8, "bf16") is None
    sizes = TapeSizes.of(
        model.shape, matrices_of(model), 8, H200, kv_type="bf16", page_tokens=64, max_pages=layout.max_pages
    )
    assert sizes.grid.n_blocks == H200.n_multiprocessors
    headers = headers_for(model, sizes, layout, "bf16", activations)
    try:
        binary = tape_binary(headers, H200, {})
    except HardwareCannot as error:
        pytest.skip(f"the tape was not compiled for {H200.exact_arch}: {error}")
    assert binary.startswith(b"\x7fELF")
    assert b".text.tape" in binary
