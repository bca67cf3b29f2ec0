"""Matrices that stay packed: what a model loaded so computes is what the dequantised one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.backends.cuda.load import PackedLoader
from ostinato.backends.cuda.packed import Packed
from ostinato.backends.cuda.packed_types import PACKED_TYPES, stays_packed
from ostinato.backends.torch.allocate import empty
from ostinato.backends.torch.forward import through_linear, through_mlp
from ostinato.backends.torch.load import DenseLoader
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.ops.experts import expert_of
from ostinato.backends.torch.table import TWINS
from ostinato.backends.torch.weight import Weight
from ostinato.backends.weights import Stack
from ostinato.files.checkpoint import TensorInfo, fill, open_checkpoint
from ostinato.lab.random_weights import random_blocks
from ostinato.models.blocks import Attention, Experts
from ostinato.models.registry import read_shape
from ostinato.models.tensors import ExpertMatrices, HeadMatrices, TensorTable
from tests.built import build_model
from tests.models import tiny, tiny_gguf


def loaded(path: Path, *, packed: bool) -> Model:
    checkpoint = open_checkpoint(path)
    shape = read_shape(checkpoint)
    return build_model(checkpoint, shape, dtype=torch.float32, device=torch.device("cpu"), context=128, packed=packed)


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_keeps_its_blocks_and_computes_the_same(default_model: Path) -> None:
    plain, packed = loaded(default_model, packed=False), loaded(default_model, packed=True)
    layer, twin = packed.layers[3], plain.layers[3]
    assert isinstance(layer.attention, Attention)
    assert isinstance(twin.attention, Attention)
    weight = layer.attention.qkv.weight
    assert isinstance(weight, Packed)
    assert weight.type == "Q4_1"
    assert isinstance(packed.embedding, Packed)
    x = torch.randn(3, plain.shape.hidden)
    ours, theirs = (through_linear(TWINS, one.qkv, x) for one in (layer.attention, twin.attention))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(packed.embed(torch.tensor([1, 77])), plain.embed(torch.tensor([1, 77])))


# Experts


class Kept:
    """A checkpoint in memory: experts' matrices of any type."""

    path = Path("kept.gguf")

    def __init__(self, blocks: dict[str, tuple[str, tuple[int, ...], Tensor]]) -> None:
        self._blocks = {name: raw for name, (_, _, raw) in blocks.items()}
        self.tensors = {name: TensorInfo(name, shape, type, raw.numel()) for name, (type, shape, raw) in blocks.items()}

    def raw(self, name: str) -> Any:
        return self._blocks[name].numpy()

    def read(self, name: str, out: NDArray[Any]) -> None:
        fill(self.tensors[name], self.raw(name), out)


def experts_of(types: dict[str, str], n: int, size: tuple[int, int], *, one_by_one: bool = False) -> Kept:
    """Random experts, each part in its type: one tensor for all of them, or one for each."""
    rows, cols = size
    kept: dict[str, tuple[str, tuple[int, ...], Tensor]] = {}
    for part, type in types.items():
        raw = torch.from_numpy(random_blocks(type, n * rows, cols, np.random.default_rng(len(part))))
        if not one_by_one:
            kept[f"{part}_exps.weight"] = (type, (n, rows, cols), raw)
            continue
        for expert, own in enumerate(raw.view(n, rows, -1)):
            kept[f"{part}.{expert}.weight"] = (type, (rows, cols), own)
    return Kept(kept)


def taken(checkpoint: Any, parts: list[list[str]], n: int, size: tuple[int, int], *, packed: bool) -> Weight:
    table = TensorTable(checkpoint, {name: name for name in checkpoint.tensors})
    reference = ExpertMatrices(tuple(map(tuple, parts)), n, size)
    table.check([reference])
    loader = (PackedLoader if packed else DenseLoader)(table, torch.float32, torch.device("cpu"), empty)
    weight = loader.leaf(reference)
    loader.read()
    return weight


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("type", PACKED_TYPES)
def test_experts_stay_packed_gate_before_up_and_mean_what_the_dequantised_ones_do(
    type: str, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostinato.backends.cuda.load._PIECE_BYTES", 1)  # as few experts at once as there can be
    n, size = 4, (20, 256)  # 40 rows an expert: two of them are whole runs of rows
    kept = experts_of({"gate": type, "up": type}, n, size, one_by_one=one_by_one)
    parts = [[name for name in kept.tensors if name.startswith(part)] for part in ("gate", "up")]
    plain = taken(kept, parts, n, size, packed=False)
    packed = taken(kept, parts, n, size, packed=True)
    assert isinstance(plain, Tensor)
    assert isinstance(packed, Packed)
    assert (packed.type, packed.rows, packed.cols) == (type, n * 2 * 20, 256)
    assert torch.equal(packed.dense(torch.float32), plain.flatten(0, 1))


@pytest.mark.parametrize(("gate", "up"), [("Q4_K", "Q6_K"), ("Q8_0", "F16"), ("F32", "Q5_1")])
def test_gate_and_up_of_two_types_stay_apart(gate: str, up: str) -> None:
    n, size = 3, (16, 256)
    kept = Kept({})
    for part, type in (("gate", gate), ("up", up)):
        if type in PACKED_TYPES:
            more = experts_of({part: type}, n, size)
        else:
            values = torch.randn(n * 16, 256).to(torch.float16 if type == "F16" else torch.float32)
            more = Kept({f"{part}_exps.weight": (type, (n, *size), values.view(torch.uint8))})
        kept._blocks |= more._blocks
        kept.tensors |= more.tensors
    parts = [["gate_exps.weight"], ["up_exps.weight"]]
    plain, apart = (taken(kept, parts, n, size, packed=packed) for packed in (False, True))
    assert isinstance(plain, Tensor)
    assert isinstance(apart, Stack)
    for expert in range(n):
        assert torch.equal(expert_of(apart, expert, 32, torch.float32), plain[expert])


def test_experts_of_several_types_in_one_matrix_are_dequantised() -> None:
    kept, other = (experts_of({"down": type}, 2, (16, 256), one_by_one=True) for type in ("Q4_0", "Q8_0"))
    kept._blocks["down.1.weight"] = other._blocks["down.1.weight"]
    kept.tensors["down.1.weight"] = other.tensors["down.1.weight"]
    weight = taken(kept, [["down.0.weight", "down.1.weight"]], 2, (16, 256), packed=True)
    assert isinstance(weight, Tensor)
    assert weight.shape == (2, 16, 256)


def test_what_stays_packed_is_a_matrix_or_experts_of_whole_blocks() -> None:
    assert stays_packed("Q4_K", (8, 32, 256))
    assert stays_packed("Q8_0", (32, 96))
    assert not stays_packed("Q4_K", (8, 32, 96))
    assert not stays_packed("Q8_0", (96,))
    assert not stays_packed("IQ4_NL", (8, 32, 256))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gguf", "original"])
def test_experts_in_mxfp4_stay_packed_from_both_formats(form: str, tiny_files: Path) -> None:
    """A folder has gate and up row by row in turn, exponents apart, and other columns in a byte."""
    path = tiny.written("gpt-oss-mxfp4", form, tiny_files)
    layer, twin = (loaded(path, packed=packed).layers[1] for packed in (True, False))
    assert isinstance(layer.mlp, Experts)
    assert twin.mlp is not None
    weights = layer.mlp.gate_up, layer.mlp.down
    assert all(isinstance(weight, Packed) and weight.type == "MXFP4" for weight in weights)
    x = torch.randn(5, 64)
    torch.testing.assert_close(through_mlp(TWINS, layer.mlp, x), through_mlp(TWINS, twin.mlp, x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_a_file_with_quantised_experts_computes_the_same_packed(name: str, tmp_path: Path) -> None:
    config, tensors = tiny.parts_of(name, tmp_path)
    architecture = tiny.TINY[name].architecture
    assert architecture is not None
    tiny_gguf.write(tmp_path / "packed.gguf", architecture, config, tensors, storage="quantised")
    plain, packed = (loaded(tmp_path / "packed.gguf", packed=packed) for packed in (False, True))
    layer, twin = packed.layers[0], plain.layers[0]
    assert twin.mlp is not None
    assert isinstance(layer.mlp, Experts)
    assert isinstance(layer.mlp.gate_up, Packed)
    assert isinstance(layer.mlp.down, Packed)
    x = torch.randn(5, plain.shape.hidden)
    torch.testing.assert_close(through_mlp(TWINS, layer.mlp, x), through_mlp(TWINS, twin.mlp, x))


# Heads of latent attention


def heads_of(type: str, rows: tuple[int, int, int] | None) -> tuple[Kept, HeadMatrices]:
    """Three heads of [16, 64]: alone, or rows [first, stop) of each head's in a tensor of both matrices."""
    n_rows, cols = 16 if rows is None else rows[2], 64
    if type in PACKED_TYPES:
        raw = torch.from_numpy(random_blocks(type, 3 * n_rows, cols, np.random.default_rng(1)))
    else:
        raw = torch.randn(3 * n_rows, cols).to(torch.float16 if type == "F16" else torch.float32).view(torch.uint8)
    shape = (3, 16, 64) if rows is None else (3 * n_rows, cols)
    return Kept({"heads.weight": (type, shape, raw)}), HeadMatrices("heads.weight", 3, (16, 64), rows)


def read_heads(kept: Any, reference: HeadMatrices, loader: type[DenseLoader]) -> Weight:
    made = loader(TensorTable(kept, {"heads.weight": "heads.weight"}), torch.float32, torch.device("cpu"), empty)
    weight = made.leaf(reference)
    made.read()
    return weight


@pytest.mark.parametrize("type", ["Q8_0", "Q5_0", "Q4_1"])
def test_a_matrix_for_each_head_stays_packed_where_the_file_has_just_those(type: str) -> None:
    kept, reference = heads_of(type, None)
    packed, plain = (read_heads(kept, reference, loader) for loader in (PackedLoader, DenseLoader))
    assert isinstance(packed, Packed)
    assert isinstance(plain, Tensor)
    assert (packed.type, packed.shape, plain.shape) == (type, (48, 64), (3, 16, 64))
    assert torch.equal(packed.dense(torch.float32), plain.flatten(0, 1))


@pytest.mark.parametrize(("type", "dtype"), [("Q8_0", torch.float32), ("F16", torch.float16), ("F32", torch.float32)])
def test_heads_out_of_a_tensor_of_both_are_dense_and_keep_float16(type: str, dtype: torch.dtype) -> None:
    kept, reference = heads_of(type, (8, 24, 40))
    apart, plain = (read_heads(kept, reference, loader) for loader in (PackedLoader, DenseLoader))
    assert isinstance(apart, Tensor)
    assert isinstance(plain, Tensor)
    assert (apart.dtype, apart.shape) == (dtype, (3, 16, 64))
    assert torch.equal(apart.float(), plain)
