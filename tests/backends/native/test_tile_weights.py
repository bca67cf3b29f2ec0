"""Matrices on their way into tiles: every type arrives as the file has it, piece by piece, and is in memory once."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ostinato.backends.loading import read_all
from ostinato.backends.native import tile_weights
from ostinato.backends.native.tile_weights import PIECE_BYTES, TileLoader, q8_0_blocks, tiled_bytes
from ostinato.backends.native.tiles import TILE_TYPES, TileMatrix, empty_tiles, nearest_type
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.weight import dense_of, dtype_of, rows_of
from ostinato.backends.weights import Stack
from ostinato.files.checkpoint import TensorInfo, fill, open_checkpoint
from ostinato.files.quants import BLOCKS, READABLE, dequantize
from ostinato.lab.random_weights import random_blocks
from ostinato.models.blocks import Experts, Layer
from ostinato.models.registry import read_shape
from ostinato.models.tensors import ExpertMatrices, Matrices, TensorTable
from tests.built import build_model
from tests.models import tiny
from tests.models.plain_memory import PlainMemory

CPU = torch.device("cpu")
NOT_QUANTISED = ("F32", "F16", "BF16")
OTHERS = sorted(type for type in READABLE - set(TILE_TYPES) if BLOCKS[type].elements > 1)


class Bytes:
    """A checkpoint that holds tensors as bytes, and remembers which rows it was told to let go."""

    path, format, architecture = Path("none"), "gguf", "llama"
    metadata: Mapping[str, Any] = {}

    def __init__(self, **tensors: tuple[str, NDArray[np.uint8]]) -> None:
        self._raw = {name: raw for name, (_, raw) in tensors.items()}
        self.tensors = {
            name: TensorInfo(name, (len(raw), _cols(type, raw)), type, raw.size)
            for name, (type, raw) in tensors.items()
        }
        self.gone: list[tuple[str, int, int]] = []

    def raw(self, name: str) -> NDArray[np.uint8]:
        return self._raw[name]

    def read(self, name: str, out: NDArray[Any]) -> None:
        fill(self.tensors[name], self._raw[name], out)

    def raw_rows(self, name: str, first: int, last: int) -> NDArray[np.uint8]:
        return self.raw(name)[first:last]

    def let_go(self, name: str, first: int, last: int) -> None:
        self.gone.append((name, first, last))


def _cols(type: str, raw: NDArray[np.uint8]) -> int:
    return int(raw.shape[1]) // BLOCKS[type].n_bytes * BLOCKS[type].elements


def blocks_of(type: str, rows: int, cols: int, seed: int = 0) -> NDArray[np.uint8]:
    """Rows of a type with sane values."""
    chance = torch.Generator().manual_seed(seed)
    if type in NOT_QUANTISED:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type]
        return torch.randn(rows, cols, generator=chance).to(dtype).view(torch.uint8).numpy()
    return random_blocks(type, rows, cols, np.random.default_rng(seed))


def loaded(checkpoint: Any, names: list[str], shapes: list[tuple[int, int]]) -> Any:
    return taken(checkpoint, Matrices(tuple(names), tuple(shapes)))


def taken(checkpoint: Any, reference: Matrices | ExpertMatrices, *, wide: bool = True) -> Any:
    table = TensorTable(checkpoint, {name: name.removesuffix(".weight") for name, _ in reference.wanted})
    table.check([reference])
    loader = TileLoader(table, wide=wide)
    tiles = loader.leaf(reference)
    read_all(loader.pieces(), 2)
    return tiles


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    type=st.sampled_from(TILE_TYPES),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 3),
    piece=st.sampled_from((1, 5_000, PIECE_BYTES)),
)
def test_a_matrix_in_tiles_has_the_files_values(type: str, rows: int, blocks: int, piece: int) -> None:
    """However many rows it has, and into however many pieces it was cut."""
    cols = 37 * blocks if type in NOT_QUANTISED else BLOCKS[type].elements * blocks
    raw = blocks_of(type, rows, cols)
    checkpoint = Bytes(m=(type, raw))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_weights, "PIECE_BYTES", piece)
        tiles = loaded(checkpoint, ["m"], [(rows, cols)])
    assert isinstance(tiles, TileMatrix)
    assert (tiles.type, tiles.rows, tiles.cols) == (type, rows, cols)
    expected = torch.from_numpy(dequantize(raw, type))
    torch.testing.assert_close(dense_of(tiles, torch.float32), expected, rtol=0, atol=0)
    some = torch.tensor([rows - 1, 0])
    torch.testing.assert_close(rows_of(tiles, some, torch.float32), expected[some], rtol=0, atol=0)
    assert sorted(checkpoint.gone)[0][1] == 0  # every row was let go of, once
    assert sum(last - first for _, first, last in checkpoint.gone) == rows


@pytest.mark.parametrize("type", OTHERS)
def test_a_type_that_tiles_lack_is_kept_as_eight_bits(type: str) -> None:
    """Of which those types have fewer: the largest error of 32 numbers is half a step of 127 to the largest of them."""
    block = BLOCKS[type]
    cols = math.lcm(block.elements, 32)
    raw = np.random.default_rng(1).integers(0, 256, (64, cols // block.elements * block.n_bytes), np.uint8)
    values = dequantize(raw, type)
    fine = np.isfinite(values).all(1) & (np.abs(values).max(1) < 1e4)  # scales are random bytes too
    kept = loaded(Bytes(m=(type, raw[fine])), ["m"], [(int(fine.sum()), cols)])
    assert kept.type == nearest_type(type) == "Q8_0"
    groups, ours = (part.reshape(-1, 32) for part in (values[fine], dense_of(kept, torch.float32).numpy()))
    largest = np.abs(groups).max(1)
    sane = largest > 0.01  # of the size of weights: the scale is a float16
    assert sane.any()
    assert (np.abs(ours - groups).max(1)[sane] <= largest[sane] * (0.5 / 127 + 1e-3)).all()


def test_numbers_of_64_bits_become_float32() -> None:
    values = np.random.default_rng(0).normal(size=(5, 33))
    kept = loaded(Bytes(m=("F64", values.view(np.uint8))), ["m"], [(5, 33)])
    assert kept.type == "F32"
    assert np.array_equal(dense_of(kept, torch.float32).numpy(), values.astype(np.float32))


def test_matrices_on_top_of_each_other_stay_apart_and_keep_their_types() -> None:
    checkpoint = Bytes(q=("Q4_K", blocks_of("Q4_K", 32, 256)), v=("Q6_K", blocks_of("Q6_K", 20, 256)))
    stack = loaded(checkpoint, ["q", "v"], [(32, 256), (20, 256)])
    assert isinstance(stack, Stack)
    assert [part.type for part in stack.parts if isinstance(part, TileMatrix)] == ["Q4_K", "Q6_K"]
    assert stack.shape == (52, 256)
    expected = np.concatenate([dequantize(checkpoint.raw("q"), "Q4_K"), dequantize(checkpoint.raw("v"), "Q6_K")])
    assert np.array_equal(dense_of(stack, torch.float32).numpy(), expected)


def test_one_tensor_of_all_experts_becomes_a_matrix_for_each() -> None:
    raw = blocks_of("Q4_0", 3 * 24, 64)
    checkpoint = Bytes(ffn_up_exps=("Q4_0", raw))
    info = TensorInfo("ffn_up_exps", (3, 24, 64), "Q4_0", raw.size)
    checkpoint.tensors = {"ffn_up_exps": info}
    experts = taken(checkpoint, ExpertMatrices((("ffn_up_exps.weight",),), 3, (24, 64)), wide=False)
    together = torch.cat([dense_of(expert, torch.float32) for expert in experts])
    assert np.array_equal(together.numpy(), dequantize(raw, "Q4_0"))
    assert not experts[0].wide
    assert tiled_bytes("m.weight", info) == sum(expert.n_bytes for expert in experts)


def test_bytes_are_counted_as_they_are_laid_out() -> None:
    for type in TILE_TYPES:
        rows, cols = 40, 512
        info = TensorInfo("m", (rows, cols), type, len(blocks_of(type, rows, cols).tobytes()))
        assert tiled_bytes("m.weight", info) == empty_tiles(type, rows, cols).n_bytes
        assert tiled_bytes("m.weight", TensorInfo("m", (1600, cols), type, 0)) <= 1.1 * 40 * info.n_bytes
    assert tiled_bytes("m.weight", TensorInfo("norm", (100,), "F32", 400)) == 400


@pytest.mark.slow
@given(st.lists(st.floats(-100, 100, width=32), min_size=32, max_size=32))
def test_eight_bits_are_as_near_as_eight_bits_can_be(values: list[float]) -> None:
    row = np.array([values], np.float32)
    again = dequantize(q8_0_blocks(row), "Q8_0")
    assert np.abs(again - row).max() <= np.abs(row).max() * (0.5 / 127 + 1e-3) + 1e-6


def test_a_piece_that_fails_stops_the_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(TileLoader, "_pack", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        loaded(Bytes(m=("Q8_0", blocks_of("Q8_0", 64, 64))), ["m"], [(64, 64)])


# Whole models


def model_of(path: Path, *, tiles: Any) -> Model:
    checkpoint = open_checkpoint(path)
    shape = read_shape(checkpoint)
    return build_model(checkpoint, shape, dtype=torch.float32, device=CPU, context=128, tiles=tiles)


NATIVE = (
    "llama", "llama-tied", "llama-bias", "llama-f16", "llama-bf16", "llama-quantised", "mistral", "qwen2", "qwen3",
    "gemma2", "gemma3", "phi3", "mixtral", "qwen3-moe",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("format", ["gguf", "folder"])
def test_torch_blocks_over_tiles_give_what_dense_weights_give(name: str, format: str, tiny_files: Path) -> None:
    if format == "gguf" and tiny.TINY[name].architecture is None:
        pytest.skip("there is no such GGUF file")
    path = tiny.gguf(name, tiny_files) if format == "gguf" else tiny.folder(name, tiny_files)
    dense, packed = model_of(path, tiles=None), model_of(path, tiles="wide")
    ids = torch.arange(5, 25)
    positions = torch.arange(20)

    def logits(model: Model) -> torch.Tensor:
        return model.logits(model.hidden(ids, positions, PlainMemory(model.shape)))

    ours, theirs = logits(packed), logits(dense)
    assert float((ours - theirs).abs().max()) <= 1e-3 * float(theirs.abs().max())
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_experts_are_one_matrix_each(tiny_files: Path) -> None:
    layer = model_of(tiny.gguf("mixtral", tiny_files), tiles="wide").layers[0]
    assert isinstance(layer, Layer)
    assert isinstance(layer.mlp, Experts)
    assert isinstance(layer.mlp.gate_up, tuple)
    assert isinstance(layer.mlp.down, tuple)
    assert len(layer.mlp.gate_up) == len(layer.mlp.down) == 4
    assert all(isinstance(pair, Stack) and len(pair.parts) == 2 for pair in layer.mlp.gate_up)


@pytest.mark.parametrize("form", ["gguf", "original"])
def test_experts_in_mxfp4_stay_packed_from_both_formats(form: str, tiny_files: Path) -> None:
    layer = model_of(tiny.written("gpt-oss-mxfp4", form, tiny_files), tiles="wide").layers[0]
    assert isinstance(layer.mlp, Experts)
    assert isinstance(layer.mlp.gate_up, tuple)
    assert isinstance(layer.mlp.down, tuple)
    both = [part for pair in layer.mlp.gate_up if isinstance(pair, Stack) for part in pair.parts]
    assert len(both) == 12
    assert {part.type for part in (*both, *layer.mlp.down) if isinstance(part, TileMatrix)} == {"MXFP4"}


def test_a_tied_head_is_the_embedding_itself(tiny_files: Path) -> None:
    model = model_of(tiny.gguf("llama-tied", tiny_files), tiles="wide")
    assert model.head is not None
    assert model.head.weight is model.embedding
    assert isinstance(model.embedding, TileMatrix)
    assert dtype_of(model.head.weight) == torch.float32


# Memory

CHILD = """
import json, sys, time, torch
from pathlib import Path
from ostinato.files.checkpoint import open_checkpoint
from ostinato.backends.native.library import cpu_library
from ostinato.backends.native.tiles import empty_tiles
from ostinato.models.registry import read_shape
from tests.built import build_model

def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

def load():
    started = time.perf_counter()
    model = build_model(checkpoint, shape, dtype=torch.float32, device=torch.device("cpu"), context=128, tiles="wide")
    return model, time.perf_counter() - started

torch.set_num_threads(2)
cpu_library()
checkpoint = open_checkpoint(Path(sys.argv[1]))
shape = read_shape(checkpoint)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = kib("VmRSS")
model, seconds = load()
figures = {"grown": kib("VmRSS") - before, "peak": kib("VmHWM") - before, "seconds": seconds}
del model
print(json.dumps(figures | {"again": load()[1]}))
"""


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not tell a peak of memory")
def test_the_default_model_is_in_memory_once_and_never_more(default_model: Path) -> None:
    """At most 1.1 times the file, at the end and at any moment before, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(default_model)], capture_output=True, text=True, check=True, timeout=120
    )
    figures = json.loads(done.stdout)
    most = 1.1 * default_model.stat().st_size / 1024
    assert 0.5 * most < figures["grown"] <= figures["peak"] <= most, figures
    assert figures["again"] < 5, figures  # under half a second where nothing else runs: bench/cpu.py measures that
