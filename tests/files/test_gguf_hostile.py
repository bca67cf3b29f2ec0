"""GGUF files that lie: each gets one clear error, at once, and no memory to speak of."""

import struct
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ostinato.errors import BadFile
from ostinato.files.checkpoint import open_checkpoint
from ostinato.files.gguf_header import MAX_HEADER_BYTES
from tests.files.gguf_bytes import (
    ARCHITECTURE,
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U8,
    U32,
    U64,
    File,
    array,
    pair,
    string,
    tensor,
)

SIZES = [2**31, 2**32, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


@contextmanager
def little_time_and_memory(n_bytes: int = 8 << 20, seconds: float = 2.0) -> Iterator[None]:
    tracemalloc.start()
    start = time.process_time()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < n_bytes
    assert time.process_time() - start < seconds


def refuse(folder: Path, content: bytes, message: str) -> None:
    """Opening `content` gives BadFile with the path, the message and advice."""
    path = folder / "hostile.gguf"
    path.write_bytes(content)
    with little_time_and_memory(), pytest.raises(BadFile, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    assert any(advice in str(caught.value) for advice in ("fetch", "give", "newer", "not accepted"))
    assert len(str(caught.value)) < 1000


def with_pair(extra: bytes) -> bytes:
    return File(pairs=[ARCHITECTURE, extra]).bytes


def with_tensors(*tensors: bytes, data: bytes = bytes(256)) -> bytes:
    return File(tensors=tensors, data=data).bytes


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", ["n_pairs", "n_tensors"])
def test_impossible_counts_are_refused(tmp_path: Path, count: str, size: int) -> None:
    name = "metadata count" if count == "n_pairs" else "tensor count"
    content = File(n_pairs=size).bytes if count == "n_pairs" else File(n_tensors=size).bytes
    refuse(tmp_path, content, f"{name} is {size} .*(cannot fit|not accepted)")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [U8, F32, BOOL, STRING, ARRAY, U64])
def test_impossible_array_counts_are_refused(tmp_path: Path, kind: int, size: int) -> None:
    extra = pair("numbers", ARRAY, array(kind, [bytes(16)], count=size))
    refuse(tmp_path, with_pair(extra), f"element count of 'numbers' is {size} ")


@pytest.mark.parametrize("size", SIZES)
def test_impossible_string_lengths_are_refused(tmp_path: Path, size: int) -> None:
    length = struct.pack("<Q", size)
    refuse(tmp_path, with_pair(pair("text", STRING, length + b"abc")), f"value of 'text' needs {size} bytes")
    refuse(tmp_path, with_pair(length + b"abc" + bytes(16)), f"length of metadata key 1 is {size} ")
    strings = array(STRING, [string("ok"), length + b"abc"])
    refuse(tmp_path, with_pair(pair("texts", ARRAY, strings)), f"length of string 1 of 'texts' is {size} ")
    refuse(tmp_path, with_tensors(length + b"abc" + bytes(64)), f"length of name of tensor 0 is {size} ")


@pytest.mark.parametrize("n_bytes", range(0, len(File(tensors=[tensor("t", [4], 0, 0)]).header), 3))
def test_a_file_cut_off_anywhere_in_its_header_is_refused(tmp_path: Path, n_bytes: int) -> None:
    whole = File(tensors=[tensor("t", [4], 0, 0)], data=bytes(16))
    refuse(tmp_path, whole.bytes[:n_bytes], "cut off|is empty")


def test_a_file_cut_off_in_its_data_is_refused(tmp_path: Path) -> None:
    whole = with_tensors(tensor("t", [4], 0, 0), data=bytes(16))
    (tmp_path / "whole.gguf").write_bytes(whole)
    open_checkpoint(tmp_path / "whole.gguf")
    refuse(tmp_path, whole[:-1], r"offset of tensor 't' is 0 .*its 16 bytes would end at byte \d+ of \d+")


@pytest.mark.parametrize(
    ("version", "order", "message"),
    [
        (1, "<", "GGUF version 1"),
        (4, "<", "GGUF version 4; versions 2 and 3"),
        (0, "<", "GGUF version 0"),
        (3, ">", "big-endian"),
        (2, ">", "big-endian"),
    ],
)
def test_other_versions_and_byte_orders_are_refused_by_name(
    tmp_path: Path, version: int, order: str, message: str
) -> None:
    refuse(tmp_path, File(version=version, order=order).bytes, message)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path, with_pair(ARCHITECTURE), "metadata key 1 is 'general.architecture' .*twice")


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    twice = with_tensors(tensor("t", [4], 0, 0), tensor("t", [4], 0, 32))
    refuse(tmp_path, twice, "name of tensor 1 is 't' .*twice")


@pytest.mark.parametrize("key", [b"\xff\xfe", b"\xe4\xb8"])
def test_names_that_are_not_utf_8_are_refused(tmp_path: Path, key: bytes) -> None:
    refuse(tmp_path, with_pair(pair(key, U8, b"\1")), "metadata key 1 is b.*not UTF-8")
    refuse(tmp_path, with_tensors(tensor(key, [4], 0, 0)), "name of tensor 0 is b.*not UTF-8")


def test_empty_and_endless_names_are_refused(tmp_path: Path) -> None:
    refuse(tmp_path, with_pair(pair("", U8, b"\1")), "length of metadata key 1 is 0 ")
    refuse(tmp_path, with_pair(pair("k" * 70_000, U8, b"\1")), "length of metadata key 1 is 70000 ")
    refuse(tmp_path, with_tensors(tensor("", [4], 0, 0)), "length of name of tensor 0 is 0 ")


def test_a_long_name_is_shortened_in_the_message(tmp_path: Path) -> None:
    refuse(tmp_path, with_pair(pair("k" * 60_000, 77, b"\1")), r"kkk\.\.\. is 77 ")


@pytest.mark.parametrize("kind", [13, 255, 2**32 - 1])
def test_unknown_kinds_of_values_are_refused(tmp_path: Path, kind: int) -> None:
    refuse(tmp_path, with_pair(pair("odd", kind, bytes(8))), f"kind of 'odd' is {kind} .*0 to 12")
    odd_array = pair("odd", ARRAY, array(kind, [bytes(8)]))
    refuse(tmp_path, with_pair(odd_array), f"element kind of 'odd' is {kind} .*0 to 12")


def test_truth_values_other_than_0_and_1_are_refused(tmp_path: Path) -> None:
    refuse(tmp_path, with_pair(pair("flag", BOOL, b"\2")), "value of 'flag' is 2 .*0 or 1")
    refuse(tmp_path, with_pair(pair("flags", ARRAY, array(BOOL, [b"\1", b"\7"]))), "value of 'flags' is 7 .*0 or 1")


@pytest.mark.parametrize("depth", [5, 100, 100_000])
def test_deeply_nested_arrays_are_refused(tmp_path: Path, depth: int) -> None:
    nested = struct.pack("<IQ", ARRAY, 1) * depth + array(U8, [b"\1"])
    refuse(tmp_path, with_pair(pair("deep", ARRAY, nested)), "depth of 'deep' is 5 .*nested 4 deep")


def test_wide_nests_of_arrays_are_refused_before_they_are_read(tmp_path: Path) -> None:
    wide = array(ARRAY, [array(U8, [])] * 600_000)
    path = tmp_path / "wide.gguf"
    path.write_bytes(with_pair(pair("wide", ARRAY, wide)))
    with little_time_and_memory(), pytest.raises(BadFile, match=r"element count of 'wide' is 600000 .*not accepted"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("type", "message"), [(4, "Q4_2, dropped"), (31, "Q4_0_4_4"), (42, "42"), (2**32 - 1, "known")]
)
def test_unknown_and_dropped_tensor_types_are_refused(tmp_path: Path, type: int, message: str) -> None:
    refuse(tmp_path, with_tensors(tensor("t", [256], type, 0)), f"type of 't' is .*{message}")


@pytest.mark.parametrize("n_dims", [0, 5, 2**32 - 1])
def test_impossible_numbers_of_dimensions_are_refused(tmp_path: Path, n_dims: int) -> None:
    content = with_tensors(tensor("t", [4] * min(n_dims, 5), 0, 0, n_dims=n_dims))
    refuse(tmp_path, content, f"number of dimensions of 't' is {n_dims} .*from 1 to 4")


@pytest.mark.parametrize(
    "dims", [[0], [4, 0], [2**63], [2**32, 2**32], [2**16] * 4, [2**64 - 1, 1], [2**60, 2**60, 2**60, 2**60]]
)
def test_empty_and_overflowing_shapes_are_refused(tmp_path: Path, dims: list[int]) -> None:
    refuse(tmp_path, with_tensors(tensor("t", dims, 0, 0)), "shape of 't' is .*at least 1.*below 2\\^63")


@pytest.mark.parametrize("dims", [[2**40], [2**20, 2**20], [2**62], [65]])
def test_tensors_larger_than_the_file_are_refused(tmp_path: Path, dims: list[int]) -> None:
    refuse(tmp_path, with_tensors(tensor("t", dims, 0, 0)), "offset of tensor 't' is 0 .*would end at byte")


@pytest.mark.parametrize("offset", [256, 2**32, 2**60, 2**63, 2**64 - 32])
def test_offsets_outside_the_file_are_refused(tmp_path: Path, offset: int) -> None:
    refuse(tmp_path, with_tensors(tensor("t", [4], 0, offset)), f"offset of tensor 't' is {offset} .*would end")


@pytest.mark.parametrize("offset", [1, 16, 33])
def test_offsets_off_the_alignment_are_refused(tmp_path: Path, offset: int) -> None:
    refuse(tmp_path, with_tensors(tensor("t", [4], 0, offset)), f"is {offset} .*multiple of the alignment, 32")


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    over = with_tensors(tensor("a", [16], 0, 0), tensor("b", [4], 0, 32))
    refuse(tmp_path, over, "offset of tensor 'b' is 32 .*inside tensor 'a'")
    same = with_tensors(tensor("a", [4], 0, 0), tensor("b", [4], 0, 0))
    refuse(tmp_path, same, "inside tensor")


Q4_0, Q8_0, F32 = 2, 8, 0


def test_a_type_that_does_not_fill_its_tensors_room_is_refused_with_both_sizes(tmp_path: Path) -> None:
    """E-19: 8 rows of 32 in Q8_0 are 272 bytes; a table that calls them Q4_0 leaves 128 of them unread."""

    def two(type: int, second: int = 288, n_bytes: int = 288 + 32) -> bytes:
        return with_tensors(tensor("a", [32, 8], type, 0), tensor("b", [8], F32, second), data=bytes(n_bytes))

    refuse(tmp_path, two(Q4_0), "type of tensor 'a' is 'Q4_0' .*takes 144 bytes of its room of 288; Q8_0 .*would fill")
    refuse(tmp_path, two(Q8_0, 320, 352), "type of tensor 'a' is 'Q8_0' .*takes 272 bytes of its room of 320")
    # The last tensor of a file: what other types would fill is refused, what nothing explains is not ours.
    last = with_tensors(tensor("a", [32, 8], Q4_0, 0), data=bytes(272))
    refuse(tmp_path, last, "type of tensor 'a' is 'Q4_0' .*takes 144 bytes of its room of 272; Q8_0 .*would fill")
    for content in (two(Q8_0), two(Q8_0, n_bytes=4096)):
        path = tmp_path / "good.gguf"
        path.write_bytes(content)
        assert open_checkpoint(path).tensors["a"].n_bytes == 272


@pytest.mark.parametrize(("type", "columns"), [(2, 16), (3, 33), (12, 128), (40, 32)])
def test_rows_that_are_not_whole_blocks_are_refused(tmp_path: Path, type: int, columns: int) -> None:
    # Two such rows would be a whole number of blocks: it is the row that counts.
    content = with_tensors(tensor("t", [columns, 32], type, 0), data=bytes(65536))
    refuse(tmp_path, content, f"row length of 't' is {columns} .*blocks of")


@pytest.mark.parametrize("value", [0, 3, 33, 2**31, 2**21])
def test_impossible_alignments_are_refused(tmp_path: Path, value: int) -> None:
    refuse(tmp_path, with_pair(pair("general.alignment", U32, struct.pack("<I", value))), f"alignment is {value} ")


def test_an_alignment_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path, with_pair(pair("general.alignment", STRING, string("32"))), "alignment is '32' ")
    many = pair("general.alignment", ARRAY, array(STRING, [string("word")] * 10_000))
    refuse(tmp_path, with_pair(many), "alignment is .*'word'")


def test_a_file_without_an_architecture_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path, File(pairs=[]).bytes, "general.architecture is None")
    refuse(tmp_path, File(pairs=[pair("general.architecture", U8, b"\1")]).bytes, "general.architecture is 1")


@pytest.mark.parametrize("count", [-5, 2, 2**31 - 1])
def test_impossible_numbers_of_parts_are_refused(tmp_path: Path, count: int) -> None:
    refuse(tmp_path, with_pair(pair("split.count", I32, struct.pack("<i", count))), f"{count}.*(part|whole number)")
    refuse(tmp_path, with_pair(pair("split.count", STRING, string("three"))), "split.count is 'three'")


def test_a_part_that_claims_thousands_of_others_lists_only_a_few(tmp_path: Path) -> None:
    path = tmp_path / "x-00001-of-04096.gguf"
    path.write_bytes(with_pair(pair("split.count", U32, struct.pack("<I", 4096))))
    with little_time_and_memory(), pytest.raises(BadFile, match=r"x-00002-of-04096\.gguf, .* and 4090 more"):
        open_checkpoint(path)


def test_a_vast_sparse_file_costs_nothing(tmp_path: Path) -> None:
    # The holes of a sparse file are zeros that take no room, so its size proves nothing.
    path = tmp_path / "sparse.gguf"
    for extra, message in (
        (struct.pack("<IQ", U8, 1 << 33), "not accepted"),
        (struct.pack("<IQ", STRING, 1 << 30), "not accepted"),
        (struct.pack("<IQ", U64, 1 << 23), None),
    ):
        path.write_bytes(File(pairs=[ARCHITECTURE, pair("many", ARRAY, extra)]).header)
        with path.open("r+b") as file:
            file.truncate(1 << 36)
        with little_time_and_memory(n_bytes=MAX_HEADER_BYTES), np.errstate(all="ignore"):
            if message is None:
                assert len(open_checkpoint(path).metadata["many"]) == 1 << 23
            else:
                with pytest.raises(BadFile, match=message):
                    open_checkpoint(path)


def test_a_header_beyond_the_limit_is_refused_even_in_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(File(pairs=[ARCHITECTURE, pair("text", STRING, struct.pack("<Q", 1 << 34))]).header)
    with path.open("r+b") as file:
        file.truncate(1 << 36)
    with little_time_and_memory(), pytest.raises(BadFile, match="a header may not reach beyond byte"):
        open_checkpoint(path)
