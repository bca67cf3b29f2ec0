"""GGUF files written by another implementation, read by ours, field by field."""

import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from ostinato.backends.torch.arrays import array_of
from ostinato.errors import BadFile, OstinatoError, UnknownName, Unsupported
from ostinato.files.checkpoint import BFLOAT16, Checkpoint, open_checkpoint
from ostinato.files.gguf import GGUFFile
from ostinato.files.quants import BLOCKS, READABLE
from tests.files.gguf_bytes import ARRAY, STRING, U32, File, array, pair, string, tensor

SCALARS: dict[GGUFValueType, list[Any]] = {
    GGUFValueType.UINT8: [0, 255],
    GGUFValueType.INT8: [-128, 127],
    GGUFValueType.UINT16: [0, 65535],
    GGUFValueType.INT16: [-32768, 32767],
    GGUFValueType.UINT32: [0, 2**32 - 1],
    GGUFValueType.INT32: [-(2**31), 2**31 - 1],
    GGUFValueType.FLOAT32: [0.5, -1.5e10],
    GGUFValueType.BOOL: [True, False],
    GGUFValueType.STRING: ["", "grüße, 世界 🙂\nline"],
    GGUFValueType.UINT64: [0, 2**64 - 1],
    GGUFValueType.INT64: [-(2**63), 2**63 - 1],
    GGUFValueType.FLOAT64: [1e300, -0.1],
}


def write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_raw(type: str, rows: int, columns: int) -> NDArray[np.uint8]:
    block = BLOCKS[type]
    row_bytes = columns // block.elements * block.n_bytes
    return np.random.default_rng(7).integers(0, 120, (rows, row_bytes), dtype=np.uint8)


@pytest.fixture
def everything(tmp_path: Path) -> Path:
    """A file with every kind of metadata and a tensor of every type that others can write."""
    path = tmp_path / "everything.gguf"
    writer = GGUFWriter(path, "llama")
    for kind, values in SCALARS.items():
        for i, value in enumerate(values):
            writer.add_key_value(f"one.{kind.name.lower()}.{i}", value, kind)
        writer.add_key_value(f"many.{kind.name.lower()}", values, GGUFValueType.ARRAY, sub_type=kind)
    writer.add_tensor("plain", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    writer.add_tensor("half", np.arange(8, dtype=np.float16))
    for type in sorted(READABLE - {"F32", "F16", "F64", "I8", "I16", "I32", "I64"}):
        writer.add_tensor(f"quant.{type}", random_raw(type, 3, 512), raw_dtype=GGMLQuantizationType[type])
    for dtype in (np.float64, np.int8, np.int16, np.int32, np.int64):
        writer.add_tensor(f"numbers.{np.dtype(dtype).name}", np.array([[1, -2, 3]], dtype))
    write(writer)
    return path


def test_every_metadata_kind_agrees_with_the_other_reader(everything: Path) -> None:
    theirs = GGUFReader(everything)
    ours = GGUFFile(everything)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, field in fields.items():
        value = ours.metadata[key]
        plain = value.tolist() if isinstance(value, np.ndarray) else value
        assert plain == field.contents(), key
        if field.types[0] == GGUFValueType.BOOL:
            assert isinstance(value, bool)
    assert len(fields) == 1 + 3 * len(SCALARS)


def test_arrays_of_numbers_are_numpy_arrays_and_arrays_of_strings_are_lists(everything: Path) -> None:
    metadata = GGUFFile(everything).metadata
    kinds = {"uint8": "u1", "int64": "i8", "float32": "f4", "float64": "f8", "bool": "?"}
    for name, dtype in kinds.items():
        assert metadata[f"many.{name}"].dtype == np.dtype(dtype)
    assert isinstance(metadata["many.string"], list)


def test_the_tensor_table_agrees_with_the_other_reader(everything: Path) -> None:
    theirs = GGUFReader(everything)
    ours = GGUFFile(everything)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for other in theirs.tensors:
        info = ours.tensors[other.name]
        assert info.type == other.tensor_type.name
        assert info.shape == tuple(reversed(other.shape.tolist()))
        assert info.n_bytes == other.n_bytes
        assert info.n_elements == other.n_elements
        raw = ours.raw(other.name)
        np.testing.assert_array_equal(raw.reshape(-1), np.asarray(other.data).view(np.uint8).reshape(-1))
        assert raw.shape[0] == info.n_elements // info.shape[-1]


def test_every_tensor_is_filled_with_the_other_readers_values(everything: Path) -> None:
    ours = GGUFFile(everything)
    for other in GGUFReader(everything).tensors:
        info = ours.tensors[other.name]
        out = np.full(info.shape, np.nan, np.float32)
        ours.read(info.name, out)
        with np.errstate(all="ignore"):
            expected = (
                other.data.astype(np.float32)
                if other.name.startswith("numbers.")
                else gguf.quants.dequantize(other.data, other.tensor_type)
            )
        np.testing.assert_array_equal(out, expected.reshape(info.shape), err_msg=info.name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_values_are_rounded_once_into_other_dtypes(everything: Path, dtype: torch.dtype) -> None:
    ours = GGUFFile(everything)
    for name, info in ours.tensors.items():
        wide, narrow = torch.empty(info.shape), torch.empty(info.shape, dtype=dtype)
        ours.read(name, array_of(wide))
        ours.read(name, array_of(narrow))
        torch.testing.assert_close(narrow, wide.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_a_tensor_in_the_dtype_asked_for_is_copied_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "same.gguf"
    bits = np.arange(1 << 16, dtype=np.uint16)  # with every kind of not-a-number
    path.write_bytes(File(tensors=[tensor("t", [1 << 16], 30, 0)], data=bits.tobytes()).bytes)
    out = np.empty(1 << 16, BFLOAT16)
    GGUFFile(path).read("t", out)
    np.testing.assert_array_equal(out, bits)


def test_reading_goes_in_chunks_without_a_full_size_temporary(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "large.gguf"
    rows, columns = 512, 16384  # 8 million values: 32 MiB as float32
    raw = random_raw("Q4_K", rows, columns)
    path.write_bytes(File(tensors=[tensor("t", [columns, rows], 12, 0)], data=raw.tobytes()).bytes)
    file = GGUFFile(path)
    for dtype in (np.dtype(np.float32), BFLOAT16):
        out = np.empty((rows, columns), dtype)
        tracemalloc.start()
        file.read("t", out)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 << 20


def test_a_tensor_that_does_not_fit_the_output_is_refused(everything: Path) -> None:
    file = GGUFFile(everything)
    with pytest.raises(OstinatoError, match=r"\[2, 3, 4\].*\[5\].*24 elements"):
        file.read("plain", np.empty(5, np.float32))
    with pytest.raises(OstinatoError, match="non-contiguous"):
        file.read("plain", np.empty((4, 6), np.float32).T)


def test_an_unknown_tensor_name_lists_the_nearest(everything: Path) -> None:
    file = GGUFFile(everything)
    with pytest.raises(UnknownName, match=r"plane.*plain \(the nearest\)"):
        file.raw("plane")


def test_raw_bytes_are_a_view_that_cannot_be_written_and_outlives_close(everything: Path) -> None:
    file = GGUFFile(everything)
    view = file.raw("plain")
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    file.close()
    file.close()
    assert view.view("<f4").reshape(-1).tolist() == list(range(24))
    with pytest.raises(OstinatoError, match=r"everything\.gguf: was closed"):
        file.raw("plain")


def test_many_threads_read_the_same_file_at_once(everything: Path) -> None:
    file = GGUFFile(everything)
    barrier = threading.Barrier(4)

    def read_all(_: int) -> list[Any]:
        barrier.wait()
        outs = {name: np.empty(info.shape, np.float32) for name, info in file.tensors.items()}
        for name, out in outs.items():
            file.read(name, out)
        return list(outs.values())

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(read_all, range(4))
    for other in others:
        for found, expected in zip(other, first, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_type_that_is_not_read_is_listed_and_refused_when_read(tmp_path: Path) -> None:
    """E-18."""
    path = tmp_path / "q8_k.gguf"
    path.write_bytes(File(tensors=[tensor("odd", [256], 15, 0)], data=bytes(292)).bytes)
    file = open_checkpoint(path)
    assert file.tensors["odd"].type == "Q8_K"
    with pytest.raises(Unsupported, match=r"q8_k\.gguf: tensor 'odd': is stored as Q8_K"):
        file.read("odd", np.empty(256, np.float32))


@pytest.mark.parametrize(
    ("architecture", "type", "message"),
    [
        ("llama", "adapter", "a LoRA adapter, not a model; .*merge_and_unload"),
        ("clip", "model", "the vision part"),
        ("llama", "imatrix", "an importance"),
    ],
)
def test_a_file_that_is_only_part_of_a_model_is_refused_by_name(
    tmp_path: Path, architecture: str, type: str, message: str
) -> None:
    path = tmp_path / "part.gguf"
    words = {"general.architecture": architecture, "general.type": type}
    path.write_bytes(File(pairs=[pair(key, STRING, string(word)) for key, word in words.items()]).bytes)
    with pytest.raises(Unsupported, match=rf"part\.gguf: is {message}"):
        open_checkpoint(path)


def test_version_2_is_read_like_version_3(tmp_path: Path) -> None:
    for version in (2, 3):
        path = tmp_path / f"v{version}.gguf"
        data = np.arange(6, dtype="<f4").tobytes()
        path.write_bytes(File(version=version, tensors=[tensor("t", [3, 2], 0, 0)], data=data).bytes)
        file = GGUFFile(path)
        out = np.empty((2, 3), np.float32)
        file.read("t", out)
        assert file.version == version
        assert out.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_file_with_only_a_vocabulary_has_no_tensors(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    tokens = pair("tokenizer.ggml.tokens", ARRAY, array(STRING, [string("a"), string("b")]))
    path.write_bytes(File(pairs=[File().pairs[0], tokens]).header)  # not even padded
    file = open_checkpoint(path)
    assert (file.format, file.architecture, len(file.tensors)) == ("gguf", "llama", 0)
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b"]


def test_strings_that_are_not_utf_8_keep_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    halves = [b"\xe4\xb8", "é".encode(), b"\xff\xfe", b"a\x80"]
    tokens = pair("tokenizer.ggml.tokens", ARRAY, array(STRING, [string(raw) for raw in halves]))
    path.write_bytes(File(pairs=[File().pairs[0], tokens, pair("one", STRING, string(b"\xc3"))]).bytes)
    metadata = GGUFFile(path).metadata
    assert [text.encode("utf-8", "surrogateescape") for text in metadata["tokenizer.ggml.tokens"]] == halves
    assert metadata["tokenizer.ggml.tokens"][1] == "é"
    assert metadata["one"].encode("utf-8", "surrogateescape") == b"\xc3"


def test_arrays_within_arrays_are_lists_of_arrays(tmp_path: Path) -> None:
    path = tmp_path / "nested.gguf"
    inner = [array(U32, [struct.pack("<I", 1), struct.pack("<I", 2)]), array(STRING, [string("x")]), array(U32, [])]
    path.write_bytes(File(pairs=[File().pairs[0], pair("nested", ARRAY, array(ARRAY, inner))]).bytes)
    one, two, three = GGUFFile(path).metadata["nested"]
    assert (one.tolist(), two, three.tolist()) == ([1, 2], ["x"], [])


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_the_stated_alignment_is_followed(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "aligned.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    values = [np.full(5, i, np.float32) for i in range(3)]
    for i, value in enumerate(values):
        writer.add_tensor(f"t{i}", value)
    write(writer)
    file = GGUFFile(path)
    for i, value in enumerate(values):
        out = np.empty(5, np.float32)
        file.read(f"t{i}", out)
        np.testing.assert_array_equal(out, value)


def write_split(folder: Path, small_first: bool = False) -> list[Path]:
    writer = GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=2, small_first_shard=small_first)
    writer.add_block_count(5)
    for i in range(5):
        writer.add_tensor(f"t{i}", np.full((2, 4), i, np.float32))
    write(writer)
    return sorted(folder.glob("model-*.gguf"))


def values_of(file: Checkpoint) -> dict[str, list[Any]]:
    values = {}
    for name, info in file.tensors.items():
        out = np.empty(info.shape, np.float32)
        file.read(name, out)
        values[name] = out.tolist()
    return values


@pytest.mark.parametrize("small_first", [False, True])
def test_any_part_of_a_split_file_opens_the_whole(tmp_path: Path, small_first: bool) -> None:
    parts = write_split(tmp_path, small_first)
    assert len(parts) == 3 + small_first
    for part in parts:
        file = open_checkpoint(part)
        assert (file.path, file.architecture) == (part, "llama")
        assert file.metadata["llama.block_count"] == 5
        assert values_of(file) == {f"t{i}": [[i] * 4] * 2 for i in range(5)}


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    parts[1].unlink()
    for part in (parts[0], parts[2]):
        with pytest.raises(BadFile, match=r"one of 3 parts.*missing: model-00002-of-00003\.gguf; fetch"):
            open_checkpoint(part)


def test_a_renamed_part_is_refused_with_the_name_it_needs(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    for wrong in ("first.gguf", "model-00004-of-00003.gguf", "model-00000-of-00003.gguf", "model-00001-of-00004.gguf"):
        renamed = tmp_path / wrong
        renamed.write_bytes(parts[0].read_bytes())
        with pytest.raises(BadFile, match=rf"{wrong}: is one of 3 parts.*-00001-of-00003\.gguf"):
            open_checkpoint(renamed)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(BadFile, match=r"00003-of-00003\.gguf: says it is part 1 of 3.*named as part 2 of 3"):
        open_checkpoint(parts[0])


@pytest.mark.parametrize(
    ("count", "name", "message"),
    [
        (5, "t1", r"split.tensors.count is 5, but 2 parts hold 2 tensors"),
        (2, "t0", r"b-00002-of-00002\.gguf: tensor 't0' is in an earlier part too"),
    ],
)
def test_parts_with_the_wrong_tensors_are_refused(tmp_path: Path, count: int, name: str, message: str) -> None:
    for i, tensor_name in enumerate(("t0", name)):
        numbers = {"split.no": i, "split.count": 2, "split.tensors.count": count}
        pairs = [pair(key, U32, struct.pack("<I", value)) for key, value in numbers.items()]
        file = File(pairs=[*File().pairs, *pairs], tensors=[tensor(tensor_name, [4], 0, 0)], data=bytes(16))
        (tmp_path / f"b-{i + 1:05}-of-00002.gguf").write_bytes(file.bytes)
    with pytest.raises(BadFile, match=message):
        open_checkpoint(tmp_path / "b-00001-of-00002.gguf")


@pytest.mark.model
def test_the_default_model_opens_at_once_and_holds_what_it_should(default_model: Path) -> None:
    start = time.process_time()  # not the clock: a busy machine must not fail this
    file = GGUFFile(default_model)
    opened_s = time.process_time() - start
    types = [info.type for info in file.tensors.values()]
    assert {type: types.count(type) for type in types} == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert file.architecture == "llama"
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert sum(info.n_elements for info in file.tensors.values()) == 134_515_008
    assert opened_s < 0.5


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_agrees_with_the_other_reader(default_model: Path) -> None:
    theirs, ours = GGUFReader(default_model), GGUFFile(default_model)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key
    for other in theirs.tensors[::40]:
        out = np.empty(ours.tensors[other.name].shape, np.float32)
        ours.read(other.name, out)
        np.testing.assert_array_equal(out, gguf.quants.dequantize(other.data, other.tensor_type))
