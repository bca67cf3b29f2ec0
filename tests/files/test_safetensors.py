"""Safetensors folders written by the safetensors library, read by ours; and broken ones."""

import json
import os
import struct
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ostinato.backends.torch.arrays import array_of
from ostinato.errors import BadFile, OstinatoError, UnknownName, Unsupported
from ostinato.files.checkpoint import open_checkpoint
from ostinato.files.safetensors import SafetensorsFolder
from tests.counts import soak

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "rope_scaling": None}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def some_tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return {
        "embed.weight": torch.randn(16, 8, generator=random),
        "layers.0.weight": torch.randn(3, 4, 5, generator=random).to(torch.bfloat16),
        "layers.1.weight": torch.randn(6, generator=random).to(torch.float16),
        "norm.weight": torch.ones(()),
        "nothing": torch.empty(0, 3),
    }


def folder_with(folder: Path, config: Any = CONFIG) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with one weights file."""
    save_file(some_tensors(), tmp_path / SINGLE, metadata={"format": "pt"})
    return folder_with(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder with two weights files and their index."""
    tensors = some_tensors()
    names = sorted(tensors)
    where = {name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == shard}, tmp_path / shard)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return folder_with(tmp_path)


def assert_holds_some_tensors(file: SafetensorsFolder) -> None:
    expected = some_tensors()
    assert file.tensors.keys() == expected.keys()
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    for name, value in expected.items():
        info = file.tensors[name]
        assert (info.shape, info.type) == (tuple(value.shape), names[value.dtype])
        assert info.n_bytes == value.numel() * value.element_size()
        for dtype in (torch.float32, torch.bfloat16, torch.float16, value.dtype):
            out = torch.full(info.shape, 7.0, dtype=dtype)
            file.read(name, array_of(out))
            torch.testing.assert_close(out, value.to(dtype), rtol=0, atol=0)


def test_a_single_file_holds_what_the_library_wrote(model: Path) -> None:
    file = open_checkpoint(model)
    assert isinstance(file, SafetensorsFolder)
    assert (file.format, file.architecture, file.path) == ("safetensors", "LlamaForCausalLM", model)
    assert file.metadata["hidden_size"] == 8
    assert file.generation_config == {}
    assert_holds_some_tensors(file)
    assert file.tensors.keys() == load_file(model / SINGLE).keys()


def test_shards_are_one_model(sharded: Path) -> None:
    assert_holds_some_tensors(SafetensorsFolder(sharded))


def test_raw_bytes_are_rows_of_the_file(model: Path) -> None:
    file = SafetensorsFolder(model)
    raw = file.raw("layers.0.weight")
    assert raw.shape == (12, 10)
    np.testing.assert_array_equal(
        raw.reshape(-1), some_tensors()["layers.0.weight"].view(torch.uint8).numpy().reshape(-1)
    )
    assert file.raw("norm.weight").shape == (1, 4)
    assert file.raw("nothing").shape == (0, 0)
    file.close()
    with pytest.raises(OstinatoError, match="was closed"):
        file.raw("norm.weight")


def test_generation_config_is_parsed(model: Path) -> None:
    (model / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 2]}')
    assert SafetensorsFolder(model).generation_config == {"temperature": 0.6, "eos_token_id": [1, 2]}


def test_infinity_in_a_config_is_accepted(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": ["X"], "time_step_limit": [0.0, Infinity]}')
    assert SafetensorsFolder(model).metadata["time_step_limit"] == [0.0, float("inf")]


def test_an_unknown_tensor_lists_the_nearest(model: Path) -> None:
    with pytest.raises(UnknownName, match=r"'norm\.wait'.*norm\.weight \(the nearest\)"):
        SafetensorsFolder(model).raw("norm.wait")


def test_whole_numbers_are_listed_and_odd_ones_refused_when_read(tmp_path: Path) -> None:
    save_file({"ids": torch.arange(3), "mask": torch.tensor([True])}, tmp_path / SINGLE)
    file = SafetensorsFolder(folder_with(tmp_path))
    out = torch.empty(3)
    file.read("ids", array_of(out))
    assert out.tolist() == [0, 1, 2]
    with pytest.raises(Unsupported, match="'mask': is stored as BOOL"):
        file.read("mask", np.empty(1, np.float32))


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors"])
def test_quantised_models_are_refused_by_name(model: Path, method: str) -> None:
    folder_with(model, {**CONFIG, "quantization_config": {"quant_method": method, "bits": 4}})
    with pytest.raises(Unsupported, match=f"quantised .quantization_config: {method}.*GGUF"):
        open_checkpoint(model)


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_a_model_that_mlx_has_quantised_is_refused_by_name(model: Path, key: str) -> None:
    """Which states no method."""
    folder_with(model, {**CONFIG, key: {"group_size": 64, "bits": 4}})
    with pytest.raises(Unsupported, match=f"quantised .{key}: .*'bits': 4.*MLX.*GGUF"):
        open_checkpoint(model)


def test_mxfp4_blocks_and_their_scales_are_one_tensor(tmp_path: Path) -> None:
    """Two columns of a byte are neighbours, the first in its low nibble."""
    random = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (2, 3, 2, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(120, 135, (2, 3, 2), dtype=torch.uint8, generator=random)
    save_file({"w_blocks": blocks, "w_scales": scales, "plain": torch.ones(3)}, tmp_path / SINGLE)
    folder_with(tmp_path, {**CONFIG, "quantization_config": {"quant_method": "mxfp4"}})
    size = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    with open_checkpoint(tmp_path) as file:
        assert (file.tensors["w"].type, file.tensors["w"].shape) == ("MXFP4", (2, 3, 64))
        assert file.tensors.keys() == {"w", "plain"}
        out = np.empty((2, 3, 64), np.float32)
        file.read("w", out)
        assert np.array_equal(file.raw("w")[2:5], file.raw_rows("w", 2, 5))
        file.let_go("w", 0, 6)
    for expert, row, column in np.ndindex(out.shape):
        byte = int(blocks[expert, row, column // 32, column % 32 // 2])
        nibble = byte >> 4 if column % 2 else byte & 15
        value = (-1 if nibble & 8 else 1) * size[nibble & 7] * 2.0 ** (int(scales[expert, row, column // 32]) - 127)
        assert out[expert, row, column] == value


def test_float8_weights_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / SINGLE)
    with pytest.raises(Unsupported, match="tensor 'w': is stored as F8_E4M3"):
        open_checkpoint(folder_with(tmp_path))


def test_a_lora_adapter_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(Unsupported, match="merge the adapter"):
        open_checkpoint(folder_with(tmp_path))


def test_a_folder_of_peft_is_told_to_merge_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(Unsupported, match=r"holds an adapter, not a model; LoRA.*merge_and_unload"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "a JSON list, not an object"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b'{"a": 1, "a": 2}', "'a' is there twice"),
    ],
)
def test_a_broken_config_is_refused(model: Path, config: bytes, message: str) -> None:
    (model / "config.json").write_bytes(config)
    with pytest.raises(BadFile, match=f"config.json: .*{message}"):
        open_checkpoint(model)


def test_a_broken_generation_config_is_refused(model: Path) -> None:
    (model / "generation_config.json").write_text("{]")
    with pytest.raises(BadFile, match=r"generation_config\.json: is not JSON"):
        open_checkpoint(model)


def test_a_folder_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    folder_with(tmp_path)
    with pytest.raises(BadFile, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(BadFile, match=r"pickles \(pytorch_model\.bin\)"):
        open_checkpoint(tmp_path)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadFile, match=r"not there: model-00002-of-00002\.safetensors"):
        open_checkpoint(sharded)


def test_an_index_that_lists_a_tensor_its_shard_lacks_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["phantom"] = "model-00001-of-00002.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(BadFile, match=r"model-00001-of-00002\.safetensors: lacks tensor 'phantom'"):
        open_checkpoint(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").write_bytes(
        (sharded / "model-00001-of-00002.safetensors").read_bytes()
    )
    with pytest.raises(BadFile, match=r"00002-of-00002\.safetensors: tensor '.*' is in model-00001-of-00002"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("shard", ["../secret", "/etc/passwd", "a/b", "..", "", "a\\b", "a\0b", 7, None, ["x"]])
def test_an_index_cannot_point_outside_its_folder(sharded: Path, shard: Any) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(BadFile, match=r"weight_map\['w'\] is .*must name a file beside it"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", "nonsense"])
def test_a_broken_index_is_refused(sharded: Path, index: str) -> None:
    (sharded / INDEX).write_text(index)
    with pytest.raises(BadFile, match=INDEX):
        open_checkpoint(sharded)


def file_with(header: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BROKEN = {
    "empty": (b"", "0 bytes, too few"),
    "short": (b"\1\2\3", "3 bytes, too few"),
    "length beyond the end": (file_with({}, length=2**40), f"header length is {2**40}, but only"),
    "length of all ones": (file_with({}, length=2**64 - 1), "header length is"),
    "broken JSON": (file_with(b"{nope"), "not JSON"),
    "a list": (file_with([1]), "not an object"),
    "deep JSON": (file_with(b"[" * 200_000), "nested too deep"),
    "a name twice": (file_with(b'{"t": %s, "t": %s}' % ((json.dumps(entry()).encode(),) * 2)), "'t' is there twice"),
    "no offsets": (file_with({"t": {"dtype": "F32", "shape": [4]}}), "lacks dtype, shape or data_offsets"),
    "not an entry": (file_with({"t": 3}), "lacks dtype"),
    "unknown dtype": (file_with({"t": entry(dtype="F33")}), "dtype is 'F33'"),
    "dtype of the wrong kind": (file_with({"t": entry(dtype=["F32"])}), "dtype is"),
    "negative shape": (file_with({"t": entry(shape=[-4])}), r"shape is \[-4\]"),
    "fractional shape": (file_with({"t": entry(shape=[4.0])}), r"shape is \[4.0\]"),
    "shape of truth": (file_with({"t": entry(shape=[True])}), r"shape is \[True\]"),
    "overflowing shape": (file_with({"t": entry(shape=[2**62, 2**62])}), "another size"),
    "vast shape": (file_with({"t": entry(shape=[2**70])}), "shape is"),
    "many dimensions": (file_with({"t": entry(shape=[1] * 9)}), "shape is"),
    "shape is text": (file_with({"t": entry(shape="4")}), "shape is 4"),
    "one offset": (file_with({"t": entry(offsets=[16])}), "data_offsets is"),
    "offsets backwards": (file_with({"t": entry(offsets=[16, 0])}), r"data_offsets is \[16, 0\]"),
    "offsets negative": (file_with({"t": entry(offsets=[-16, 0])}), r"data_offsets is \[-16, 0\]"),
    "offsets outside": (file_with({"t": entry(offsets=[16, 32])}), "but the data has 16 bytes"),
    "offsets vast": (file_with({"t": entry(offsets=[2**60, 2**60 + 16])}), "but the data has 16 bytes"),
    "wrong size": (file_with({"t": entry(shape=[3])}), "another size"),
    "overlap": (file_with({"a": entry(), "b": entry()}), "overlaps the tensor before it"),
    "hole": (file_with({"t": entry(offsets=[4, 20])}, bytes(20)), "leaves 4 bytes unused"),
    "left over": (file_with({"t": entry()}, bytes(20)), "4 bytes follow the last tensor"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_weights_file_is_refused(tmp_path: Path, name: str) -> None:
    content, message = BROKEN[name]
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(BadFile, match=f"model.safetensors: .*{message}"):
        open_checkpoint(folder_with(tmp_path))


def test_a_vast_sparse_weights_file_costs_nothing(tmp_path: Path) -> None:
    folder_with(tmp_path)
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", 1 << 35))
        file.truncate(1 << 36)
    tracemalloc.start()
    with pytest.raises(BadFile, match=f"header length is {1 << 35}; more than"):
        open_checkpoint(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_vast_config_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 34)
    with pytest.raises(BadFile, match=r"config\.json: has 17179869184 bytes"):
        open_checkpoint(tmp_path)


def test_an_unreadable_weights_file_is_refused(model: Path) -> None:
    (model / SINGLE).chmod(0)
    if os.access(model / SINGLE, os.R_OK):
        pytest.skip("this user (root) may read everything, so nothing can be forbidden here")
    with pytest.raises(BadFile, match=r"model\.safetensors: may not be read"):
        open_checkpoint(model)


@pytest.mark.soak
@settings(
    max_examples=soak(2_000),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**64 - 1), n_changes=st.integers(1, 4))
def test_mutated_weights_files_open_or_say_bad_file(model: Path, seed: int, n_changes: int) -> None:
    random = Random(seed)
    save_file(some_tensors(), model / SINGLE)
    content = bytearray((model / SINGLE).read_bytes())
    n_header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(n_changes):
        at = random.randrange(min(n_header, len(content) or 1))
        piece = random.choice([b"", random.randbytes(3), b"9" * 20, b"[[", b'"', b"-1", b"{}", b"null"])
        content[at : at + random.randrange(12)] = piece
    (model / SINGLE).write_bytes(content)
    try:
        file = open_checkpoint(model)
    except (BadFile, Unsupported):
        return
    for name, info in file.tensors.items():
        assert file.raw(name).nbytes == info.n_bytes
    file.close()
