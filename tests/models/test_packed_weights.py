"""Matrices that stay packed: what a model loaded so computes is what the dequantised one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ostinato.files.checkpoint import open_checkpoint
from ostinato.kernels.packed import Packed
from ostinato.models.blocks import Layer, Model
from ostinato.models.registry import build_model, read_shape


def loaded(path: Path, *, packed: bool) -> Model:
    checkpoint = open_checkpoint(path)
    shape = read_shape(checkpoint)
    return build_model(checkpoint, shape, dtype=torch.float32, device=torch.device("cpu"), context=128, packed=packed)


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_keeps_its_blocks_and_computes_the_same(default_model: Path) -> None:
    plain, packed = loaded(default_model, packed=False), loaded(default_model, packed=True)
    layer, twin = packed.layers[3], plain.layers[3]
    assert isinstance(layer, Layer)
    assert isinstance(twin, Layer)
    weight = layer.attention.qkv.weight
    assert isinstance(weight, Packed)
    assert weight.type == "Q4_1"
    assert isinstance(packed.embedding, Packed)
    x = torch.randn(3, plain.shape.hidden)
    torch.testing.assert_close(layer.attention.qkv(x), twin.attention.qkv(x))
    torch.testing.assert_close(packed.embed(torch.tensor([1, 77])), plain.embed(torch.tensor([1, 77])))
