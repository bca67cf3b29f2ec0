"""A toy family and a toy weight type, added by what docs/add-a-family.md and docs/add-a-weight-type.md say."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import ostinato
from ostinato.backends.cuda.load import PackedLoader
from ostinato.backends.loading import read_all
from ostinato.backends.native.tile_weights import TileLoader
from ostinato.backends.torch.allocate import empty
from ostinato.backends.torch.load import DenseLoader
from ostinato.backends.torch.weight import dense_of
from ostinato.errors import BadFile, UnknownName
from ostinato.files import gguf_header, quants
from ostinato.files.checkpoint import Checkpoint, open_checkpoint
from ostinato.files.quants import QuantBlock
from ostinato.lab.random_weights import AnyName
from ostinato.models import registry
from ostinato.models.blocks import leaves_of
from ostinato.models.registry import read_shape
from ostinato.models.tensors import Matrices, TensorTable
from ostinato.options import Activations
from tests.built import build_model
from tests.files.gguf_bytes import File, tensor
from tests.models.plain_memory import hidden

ROOT = Path(__file__).parents[2]
DOCS = ("add-a-family.md", "add-a-weight-type.md")
CPU = torch.device("cpu")
TOY_NUMBER = len(gguf_header._TENSOR_TYPES)


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def example(name: str) -> dict[str, Any]:
    """What the page's one example defines."""
    (source,) = re.findall(r"```python\n(.*?)```", page(name), re.DOTALL)
    module = ModuleType("toy")
    exec(source, vars(module))
    return vars(module)


@pytest.mark.parametrize("name", DOCS)
def test_every_file_that_a_page_names_is_there(name: str) -> None:
    package = Path(ostinato.__file__).parent
    named = set(re.findall(r"`((?:[\w-]+/)+(?:[\w-]+\.\w+)?)`", page(name))) - {"models/NAME.py"}
    assert len(named) > 6
    assert not [path for path in named if not (package / path).exists() and not (ROOT / path).exists()]


# A family


@pytest.fixture
def toy_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the toy family, which is in the table."""
    family = example("add-a-family.md")["TOY"]
    path = tmp_path / "toy.gguf"
    write_toy(path, {})  # a first one, to read the shape from
    monkeypatch.setattr(registry, "BY_GGUF", MappingProxyType({**registry.BY_GGUF, family.name: family}))
    shape = read_shape(open_checkpoint(path))
    wanted = [one for leaf in leaves_of(family.blocks(shape, AnyName())) for one in leaf.wanted]
    chance = np.random.default_rng(3)
    write_toy(path, {name: chance.normal(0, 0.2, size).astype(np.float32) for name, size in wanted})
    return path


def write_toy(path: Path, tensors: dict[str, NDArray[np.float32]]) -> None:
    writer = gguf.GGUFWriter(path, "toy")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, values in {"token_embd.weight": np.zeros((50, 64), np.float32), **tensors}.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_of(checkpoint: Checkpoint, tiles: Activations | None = None) -> Any:
    return build_model(checkpoint, read_shape(checkpoint), dtype=torch.float32, device=CPU, context=64, tiles=tiles)


def test_a_toy_family_is_one_file_and_one_line(toy_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(toy_file)
    ids = [3, 7, 1, 49, 0, 12]
    dense, tiles = (hidden(model_of(checkpoint, kind), ids) for kind in (None, "wide"))
    assert dense.std() > 0.1
    torch.testing.assert_close(tiles, dense, rtol=1e-3, atol=1e-3)
    monkeypatch.undo()
    with pytest.raises(UnknownName, match="'toy' is not known"):
        read_shape(checkpoint)


def test_a_file_that_lacks_a_norm_of_the_toy_family_is_refused(toy_file: Path) -> None:
    write_toy(toy_file, {})
    with pytest.raises(BadFile, match=r"blk\.0\.attn_norm\.weight is missing"):
        model_of(open_checkpoint(toy_file))


# A weight type


@pytest.fixture
def toy_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy type, which is in the tables: at its number, with its block and its function."""
    before = quants.BLOCKS
    blocks = MappingProxyType({**before, "TOY": QuantBlock(16, 18, example("add-a-weight-type.md")["toy"])})
    monkeypatch.setattr(gguf_header, "_TENSOR_TYPES", (*gguf_header._TENSOR_TYPES, "TOY"))
    for module in [module for module in sys.modules.values() if getattr(module, "BLOCKS", None) is before]:
        monkeypatch.setattr(module, "BLOCKS", blocks)


@pytest.mark.usefixtures("toy_type")
def test_a_toy_weight_type_is_loaded_by_every_backend(tmp_path: Path) -> None:
    rows, cols = 40, 64
    chance = np.random.default_rng(4)
    quants = chance.integers(-127, 128, (rows, cols // 16, 16)).astype(np.int8)
    scales = chance.uniform(0.01, 0.02, (rows, cols // 16, 1)).astype(np.float16)
    raw = np.concatenate((scales.view(np.uint8), quants.view(np.uint8)), -1)
    expected = torch.from_numpy((quants * (scales.astype(np.float32) / 2)).reshape(rows, cols))
    path = tmp_path / "toy.gguf"
    path.write_bytes(File(tensors=[tensor("m.weight", [cols, rows], TOY_NUMBER, 0)], data=raw.tobytes()).bytes)
    table = TensorTable(open_checkpoint(path), {"m.weight": "m.weight"})
    reference = Matrices(("m.weight",), ((rows, cols),))
    for loader in (DenseLoader, PackedLoader):
        dense = loader(table, torch.float32, CPU, empty)
        loaded = dense.leaf(reference)
        dense.read()
        assert torch.equal(dense_of(loaded, torch.float32), expected)
    tiles = TileLoader(table, wide=True)
    loaded = tiles.leaf(reference)
    read_all(tiles.pieces(), 2)
    assert loaded.type == "Q8_0"
    torch.testing.assert_close(
        dense_of(loaded, torch.float32), expected, rtol=0, atol=0.006 * float(expected.abs().max())
    )
