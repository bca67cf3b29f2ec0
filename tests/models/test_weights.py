"""Weights of a file: in one aligned piece of memory, in their own width, and biases that a family needs (E)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.backends.torch.allocate import BumpAllocator
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.plan import tensors_of
from ostinato.errors import BadFile
from ostinato.files.checkpoint import open_checkpoint
from ostinato.models.registry import read_shape
from tests.built import build_model
from tests.engine.test_loop import alone, by_full_forwards
from tests.models.test_refusals import refusal, spoiled_folder, spoiled_gguf

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PROMPT = [5, 9, 2, 77, 31]


@pytest.mark.parametrize("bias", ["q_proj.bias", "k_proj.bias", "v_proj.bias"])
def test_a_bias_that_a_family_needs_is_missed_by_name(bias: str, tmp_path: Path, tiny_files: Path) -> None:
    """E-23."""
    name = f"model.layers.1.self_attn.{bias}"
    folder = spoiled_folder(tmp_path, tiny_files, name="qwen2", tensors=lambda tensors: tensors.pop(name))
    assert name in refusal(folder, BadFile)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_a_bias_of_the_head_in_a_file_is_added_in_loop(name: str, tmp_path: Path, tiny_files: Path) -> None:
    """E-24: with a head of its own and with a tied one."""

    def add(tensors: dict[str, Tensor]) -> None:
        rows = next(len(tensor) for key, tensor in tensors.items() if "embed" in key or "wte" in key)
        tensors["lm_head.bias"] = 3 * torch.randn(rows, generator=torch.Generator().manual_seed(4))

    def model_of(path: Path) -> Model:
        checkpoint = open_checkpoint(path)
        shape = read_shape(checkpoint)
        return build_model(checkpoint, shape, dtype=torch.float32, device=CPU, context=64)

    model = model_of(spoiled_folder(tmp_path, tiny_files, name=name, tensors=add))
    plain = replace(model, head=replace(model.head, bias=None)) if model.head is not None else model
    found = alone(PROMPT, model=model, mode="loop", most=6)
    assert found == by_full_forwards(model, PROMPT, 6) != alone(PROMPT, model=plain, mode="loop", most=6)


def test_a_tensor_whose_name_only_looks_like_the_heads_is_refused_by_name(tmp_path: Path, tiny_files: Path) -> None:
    """E-27; and a bias of the head (E-24) that does not have its size."""
    for name in ("output.bias", "blk.0.attn_output.weight.old"):
        extra = {name: torch.ones(4, 32)}
        path = spoiled_gguf(tmp_path, tiny_files, tensors=partial(dict.update, **extra))
        assert name in refusal(path, BadFile)


def test_weights_of_two_bytes_take_two_bytes(tmp_path: Path, tiny_files: Path) -> None:
    """E-22: norms and frequencies aside, which are kept in float32."""

    def narrow(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    checkpoint = open_checkpoint(spoiled_folder(tmp_path, tiny_files, tensors=narrow))
    shape = read_shape(checkpoint)
    model = build_model(checkpoint, shape, dtype=torch.bfloat16, device=CPU, context=64)
    matrices = {t.data_ptr(): t for name, t in tensors_of(model, "") if t.dim() > 1 and "frequencies" not in name}
    stated = [tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1]
    assert sum(t.numel() * t.element_size() for t in matrices.values()) == sum(tensor.n_bytes for tensor in stated)
    checkpoint.close()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "mamba"])
def test_the_weights_of_a_file_lie_in_one_aligned_piece_of_memory(
    name: str, tmp_path: Path, tiny_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E-16: as large as was planned before a byte of it was read; what is not weights (frequencies) aside."""
    made: list[BumpAllocator] = []

    class Watched(BumpAllocator):
        def __init__(self, n_bytes: int, device: torch.device) -> None:
            super().__init__(n_bytes, device)
            made.append(self)

    monkeypatch.setattr("ostinato.backends.torch.load.BumpAllocator", Watched)
    checkpoint = open_checkpoint(spoiled_folder(tmp_path, tiny_files, name=name))
    model = build_model(checkpoint, read_shape(checkpoint), dtype=torch.float32, device=CPU, context=64)
    weights = [tensor for label, tensor in tensors_of(model, "") if "frequencies" not in label]
    stated = sum(4 * tensor.n_elements for tensor in checkpoint.tensors.values())
    checkpoint.close()
    assert len({tensor.untyped_storage().data_ptr() for tensor in weights}) == 1
    assert all(tensor.data_ptr() % 256 == 0 for tensor in weights)
    assert len(made) == 1
    assert len(made[0]._free) == 0
    assert made[0].n_bytes >= sum({t.data_ptr(): t.numel() * t.element_size() for t in weights}.values()) > 0.8 * stated
