"""Damaged, foreign and hostile states are refused, with a word about why; and the files they lie in."""

import contextlib
import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.cache import state_bytes, state_file
from ostinato.cache.state_bytes import describe
from ostinato.cache.state_file import load, save
from ostinato.errors import BadFile, BadInput, NoSlot, OstinatoError
from ostinato.options import KVType
from tests.decoder.cells.memory.states import (
    KINDS,
    SavedParts,
    content,
    fill,
    fresh,
    hybrid,
    kv_part,
    nothing,
    of,
    one_cache,
    run_states,
    state_part,
)

PREFIX = struct.Struct("<8sHHIQQ")


def resigned(data: bytes) -> bytes:
    """The state with a right digest, as in a deliberate forgery."""
    return data[:-32] + hashlib.sha256(data[:-32]).digest()


def with_header(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The state with another header, and a right digest."""
    magic, version, kind, n_name, n_header, n_payload = PREFIX.unpack(data[: PREFIX.size])
    start = PREFIX.size + n_name
    header = json.loads(data[start : start + n_header])
    change(header)
    text = json.dumps(header).encode()
    prefix = PREFIX.pack(magic, version, kind, n_name, len(text), n_payload)
    return resigned(prefix + data[PREFIX.size : start] + text + data[start + n_header :])


def small() -> SavedParts:
    kv, states = kv_part(4, layers=(0,), kv_type="q8_0"), state_part(2, width=1)
    fill(kv.cache.streams[0], {0: (0, [0]), 2: (1, [0, 1])})
    run_states(states, {0: 1, 1: 1})
    return of(kv, states)


def check_invariants(parts: SavedParts) -> None:
    """Memory is one that could have come about by itself."""
    for part in parts.kv:
        for stream in part.cache.streams:
            used = stream.cells.position >= 0
            assert (stream.cells.member.sum(axis=0) == stream.cells.n_owners).all()
            assert ((stream.cells.n_owners > 0) == used).all()
            assert stream.cells.used == used.sum()
    if parts.recurrent is not None:
        state = parts.recurrent.memory.state
        for s, tail in enumerate(state.tail):
            assert [cell for cell, ids in enumerate(state.ids) if s in ids] == ([] if tail is None else [tail])


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_every_flipped_byte_is_refused(whole: bool) -> None:
    data = save(small()) if whole else save(small(), 0)
    target, s = small(), None if whole else 0
    before, empty = content(target, s), content(fresh(target), s)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(BadFile):
            describe(bytes(damaged))
        with pytest.raises(BadFile):
            load(target, None if whole else 0, bytes(damaged))
        after = content(target, s)
        assert after in (before, empty)
        if after == empty:
            load(target, None if whole else 0, data)
            assert content(target, s) == before


@pytest.mark.parametrize("whole", [True, False])
def test_a_state_cut_off_anywhere_is_refused(whole: bool) -> None:
    data = save(small()) if whole else save(small(), 0)
    target = small()
    for n_bytes in range(len(data)):
        with pytest.raises(BadFile):
            load(target, None if whole else 0, data[:n_bytes])
        check_invariants(target)
    with pytest.raises(BadFile):
        load(target, None if whole else 0, data + b"\0")


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_a_flipped_byte_with_a_right_digest_is_refused_or_harmless(whole: bool) -> None:
    """A forged state can have a right digest too: what is loaded must still be a memory."""
    data = save(small(), note={"n": 1}) if whole else save(small(), 0, note={"n": 1})
    target = small()
    for at in range(len(data) - 32):
        for bit in (0, 7):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with contextlib.suppress(BadFile, NoSlot):
                load(target, None if whole else 0, resigned(bytes(damaged)))
            check_invariants(target)


def changed(path: Sequence[str | int], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        at: Any = header
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["parts"], []),
        (["parts"], None),
        (["parts", 0], 7),
        (["parts", 0, "streams"], []),
        (["parts", 0, "streams"], [[2, 3]] * 100_000),
        (["parts", 0, "streams", 0], [2, 3, 4]),
        (["parts", 0, "streams", 0], [-1, 3]),
        (["parts", 0, "streams", 0], [2.0, 3]),
        (["parts", 0, "streams", 0], ["2", 3]),
        (["parts", 0, "streams", 0], [1 << 60, 3]),
        (["parts", 0, "streams", 0], [10**4000, 3]),
        (["parts", 0, "streams", 0], [1 << 30, 1 << 30]),
        (["parts", 0, "streams", 0], [4, 4]),
        (["parts", 0, "layout"], None),
        (["parts", 0, "layout"], {}),
        (["parts", 0, "layout", "tensors"], 5),
        (["note"], [1]),
        (["note"], float("nan")),
        (["partial"], "yes"),
        (["byte_order"], "big"),
    ],
)
def test_a_hostile_header_is_refused(path: Sequence[str | int], value: Any) -> None:
    target = small()
    data = with_header(save(small()), changed(path, value))
    with pytest.raises(BadFile):
        load(target, None, data)
    assert content(target) == nothing(target)


def test_headers_that_no_json_reader_takes_are_refused() -> None:
    target = small()
    data = save(small())
    magic, version, kind, n_name, n_header, n_payload = PREFIX.unpack(data[: PREFIX.size])
    start = PREFIX.size + n_name
    for text in (b"[" * 100_000, b"{", b"\xff\xfe", b'{"a": ' + b"9" * 5000 + b"}", b""):
        prefix = PREFIX.pack(magic, version, kind, n_name, len(text), n_payload)
        with pytest.raises(BadFile, match="is not JSON"):
            load(target, None, resigned(prefix + data[PREFIX.size : start] + text + data[start + n_header :]))
    for sizes in ((1 << 63, n_payload), (n_header, 1 << 63), (n_header + n_payload, 0)):
        prefix = PREFIX.pack(magic, version, kind, n_name, *sizes)
        with pytest.raises(BadFile):
            load(target, None, resigned(prefix + data[PREFIX.size :]))


@pytest.mark.parametrize(
    ("ints", "words"),
    [
        ([-1, 1, 1, 2, 0, 0, 1], "position"),
        ([0, 1 << 62, 1, 2, 0, 0, 1], "position"),
        ([0, 1, 0, 3, 0, 0, 1], "number of sequences"),
        ([0, 1, 1, 1, 0, 0, 1], "number of sequences"),
        ([0, 1, (1 << 63) - 1, 2, 0, 0, 1], "number of sequences"),
        ([0, 1, 1, 2, 0, 0, 256], "outside 0 to 255"),
        ([0, 1, 1, 2, -1, 0, 1], "outside 0 to 255"),
        ([0, 1, 1, 2, 0, 1, 1], "twice in one cell"),
        ([0, 1, 1, 2, 0, 1, 0], "twice in one cell, or out of order"),
    ],
)
def test_cells_that_cannot_be_are_refused(ints: list[int], words: str) -> None:
    source = of(kv_part(4, layers=(0,)))
    fill(source.kv[0].cache.streams[0], {0: (0, [0]), 2: (1, [0, 1])})
    data = save(source)
    start = len(data) - 32 - 2 * 2 * 32 * 4 - 8 * len(ints)
    assert data[start : start + 8 * 7] == np.array([0, 1, 1, 2, 0, 0, 1]).tobytes()
    hostile = data[:start] + np.array(ints).tobytes() + data[start + 8 * len(ints) :]
    with pytest.raises(BadFile, match=words):
        load(source, None, resigned(hostile))
    assert content(source) == [[]]


def test_a_stream_takes_no_sequence_but_its_own() -> None:
    source = of(kv_part(n_seq_max=1))
    fill(source.kv[0].cache.streams[0], {0: (0, [1])})
    with pytest.raises(BadFile, match="another sequence in the stream of sequence 0"):
        load(of(kv_part(n_seq_max=1, unified=False)), None, save(source))


@pytest.mark.parametrize("kv_type", ["f32", "bf16", "f16", "q8_0"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_keys_that_are_no_numbers_are_refused(kv_type: KVType, value: float) -> None:
    """One sequence's infinities would reach the others through masked attention."""
    source, target = of(kv_part(kv_type=kv_type)), of(kv_part(kv_type=kv_type))
    for parts in (source, target):
        fill(parts.kv[0].cache.streams[0], {3: (0, [0]), 5: (1, [0]), 6: (0, [1])})
    source.kv[0].store.values[1].parts[-1][0, 5, 0, -1] = value
    with pytest.raises(BadFile, match="no numbers"):
        load(target, 0, save(source, 0))
    assert content(target, 0) == [[]]
    assert content(target, 1) == content(source, 1)


# Files


def test_a_state_goes_to_a_file_and_back(tmp_path: Path) -> None:
    source, target = hybrid(), fresh(hybrid())
    path = tmp_path / "chat.state"
    for note in ({"turn": 1}, {"turn": 2}):
        state_bytes.write(path, save(source, note=note))
    data = state_bytes.read(path, limit=state_file.largest(target))
    assert describe(data).note == {"turn": 2}
    load(target, None, data)
    assert content(target) == content(source)
    assert [found.name for found in tmp_path.iterdir()] == ["chat.state"]


def test_a_full_disk_leaves_the_older_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.state"
    state_bytes.write(path, save(one_cache()))
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadInput, match=r"chat.state: the state of \d+ bytes cannot be written: the disk is full"):
        state_bytes.write(path, save(hybrid()))
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["chat.state"]


def test_a_link_stays_a_link_and_devices_are_not_written_over(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    state_bytes.write(link, save(one_cache()))
    assert link.is_symlink()
    assert state_bytes.read(tmp_path / "real") == state_bytes.read(link)
    for wrong in ("/dev/null", tmp_path, tmp_path / "no" / "folder", "a\0b", "x" * 5000):
        with pytest.raises(BadInput):
            state_bytes.write(wrong, b"")


def test_what_is_no_state_file_is_refused_with_its_path(tmp_path: Path) -> None:
    foreign, cut, big, pipe = (tmp_path / name for name in ("foreign", "cut", "big", "pipe"))
    data = save(one_cache())
    foreign.write_text("To be, or not to be, that is the question")
    cut.write_bytes(data[:-1])
    big.write_bytes(data)
    os.mkfifo(pipe)
    for path, words in (
        (foreign, "this is no saved state: it begins with the bytes 54 6f"),
        (cut, f"the file has {len(data) - 1} bytes and promises {len(data)}"),
        (pipe, "no plain file"),
        (tmp_path, "no plain file"),
        (tmp_path / "absent", "there is no such file"),
    ):
        with pytest.raises(BadFile, match=words) as caught:
            state_bytes.read(path)
        assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(BadFile, match="more than the 100 that can be loaded here"):
        state_bytes.read(big, limit=100)


def test_another_version_is_named() -> None:
    data = bytearray(save(one_cache()))
    data[8] = 2
    with pytest.raises(BadFile, match=f"version 2, and only {state_bytes.VERSION} is read here"):
        describe(bytes(data))


def test_a_state_larger_than_any_that_fits_is_not_read() -> None:
    for kind in KINDS:
        parts = kind()
        assert len(save(parts)) <= state_file.largest(parts)


def test_every_refusal_is_one_of_ours() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        data = b"\x8fOSTATE\n" + rng.bytes(int(rng.integers(0, 200)))
        with pytest.raises(OstinatoError):
            describe(data)
