"""Opening by content: what is no model is named for what it is; fingerprints are made once."""

import hashlib
import io
import json
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from ostinato.errors import BadFile
from ostinato.files.checkpoint import TensorInfo, open_checkpoint
from ostinato.files.gguf import GGUFFile
from ostinato.files.safetensors import SafetensorsFolder
from tests.files.gguf_bytes import File, tensor


def refuse(path: Path, message: str) -> None:
    with pytest.raises(BadFile, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def torch_file(**options: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, buffer, **options)
    return buffer.getvalue()


def safetensors_file(folder: Path) -> bytes:
    save_file({"w": np.zeros(2, np.float32)}, folder / "w.safetensors")
    return (folder / "w.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; fetch it again"),
        (b"GG", "only 2 bytes of a GGUF file"),
        (b"GGU\0" + bytes(100), "not a model: it begins with the bytes 47 47 55 00"),
        (b"Once upon a time\n" * 50, "is a text file; give a .gguf file"),
        (b"x", "is a text file"),
        (b'{"model": 1}', "is a text file"),
        (b"<!DOCTYPE html><html></html>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer.*git lfs pull"),
        (b"tjgg" + bytes(100), "GGML file of the days before GGUF"),
        (bytes(1000), "not a model: it begins with the bytes 00 00 00 00"),
        (pickle.dumps({"w": 1}), "Python pickle.*run code"),
        (torch_file(_use_new_zipfile_serialization=True), "zip archive.*pickles.*give a .gguf"),
        (torch_file(_use_new_zipfile_serialization=False), "Python pickle.*run code"),
        ("grüße, 世界\n".encode() * 999, "is a text file"),
        (b"\x1f\x8b" + Random(1).randbytes(5000), "not a model: it begins with the bytes 1f 8b"),
    ],
)
def test_a_file_that_is_no_model_is_named_for_what_it_is(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    refuse(path, message)


def test_a_single_safetensors_file_asks_for_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(safetensors_file(tmp_path))
    refuse(path, "a single safetensors file; give the folder")


def test_the_name_of_a_file_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(File().bytes)
    assert isinstance(open_checkpoint(path), GGUFFile)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "missing.gguf", "there is no such file or folder")
    refuse(tmp_path / ("x" * 5000), "cannot be looked at")
    with pytest.raises(BadFile, match="cannot be looked at"):
        open_checkpoint(Path("a\0b"))


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    refuse(loop, "cannot be looked at")


def test_a_link_to_a_model_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real.gguf").write_bytes(File().bytes)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real.gguf")
    assert open_checkpoint(link).path == link


def test_pipes_and_devices_are_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refuse(pipe, "not a regular file")
    refuse(Path("/dev/zero"), "not a regular file")


def test_what_may_not_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(File().bytes)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user (root) may read everything, so nothing can be forbidden here")
    refuse(path, r"may not be read with your permissions.*chmod")
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0)
    try:
        refuse(folder / "model.gguf", "may not be looked at")
        refuse(folder, "cannot be listed")
    finally:
        folder.chmod(0o700)


def test_an_unreadable_file_is_refused_even_where_everything_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(File().bytes)

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", forbidden)
    refuse(path, r"may not be read with your permissions.*chmod")


def test_a_folder_without_config_says_what_it_holds(tmp_path: Path) -> None:
    refuse(tmp_path, "a folder without config.json .it holds nothing.")
    (tmp_path / "notes.txt").write_text("hello")
    refuse(tmp_path, "it holds 1 entries.*give a .gguf file")
    for i in range(7):
        (tmp_path / f"{i}.gguf").write_bytes(b"")
    refuse(tmp_path, r"give the path of one of its GGUF files: 0\.gguf, .* and 2 more")


def test_a_tensor_knows_its_number_of_elements() -> None:
    assert TensorInfo("t", (2, 3, 4), "F32", 96).n_elements == 24
    assert TensorInfo("t", (), "F32", 4).n_elements == 1


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("OSTINATO_HOME", str(folder))
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(File(tensors=[tensor("t", [4], 0, 0)], data=bytes(16)).bytes)
    return path


def test_the_fingerprint_of_a_file_is_its_sha256(home: Path, small: Path) -> None:
    assert open_checkpoint(small).fingerprint() == hashlib.sha256(small.read_bytes()).hexdigest()
    assert (home / "fingerprints.json").is_file()


def test_a_fingerprint_is_made_once_and_again_when_the_file_changes(
    home: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_checkpoint(small).fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("made again"))
        assert open_checkpoint(small).fingerprint() == first
    content = bytearray(small.read_bytes())
    content[-1] ^= 1
    small.write_bytes(content)
    os.utime(small, ns=(1, 1))
    assert open_checkpoint(small).fingerprint() == hashlib.sha256(content).hexdigest() != first


@pytest.mark.parametrize(
    "memory",
    ["", "nonsense", "[]", "[" * 100_000, '{"PATH": 3}', '{"PATH": [1, 2, 3]}', '{"PATH": [SIZE, TIME, "zz"]}'],
)
def test_a_broken_memory_of_fingerprints_does_no_harm(home: Path, small: Path, memory: str) -> None:
    home.mkdir()
    found = small.stat()
    text = (
        memory.replace("PATH", str(small)).replace("SIZE", str(found.st_size)).replace("TIME", str(found.st_mtime_ns))
    )
    (home / "fingerprints.json").write_text(text)
    expected = hashlib.sha256(small.read_bytes()).hexdigest()
    assert open_checkpoint(small).fingerprint() == expected
    assert json.loads((home / "fingerprints.json").read_text())[str(small.resolve())][2] == expected


def test_a_memory_that_cannot_be_written_does_no_harm(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blocked").write_text("a file where the folder should be")
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "blocked"))
    assert open_checkpoint(small).fingerprint() == hashlib.sha256(small.read_bytes()).hexdigest()


def test_the_fingerprint_of_a_folder_covers_weights_config_and_tokenizer(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    save_file({"w": np.zeros(2, np.float32)}, folder / "model.safetensors")
    seen = {SafetensorsFolder(folder).fingerprint()}
    (folder / "tokenizer.json").write_text("{}")
    seen.add(SafetensorsFolder(folder).fingerprint())
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "rope_theta": 1}')
    seen.add(SafetensorsFolder(folder).fingerprint())
    save_file({"w": np.ones(2, np.float32)}, folder / "model.safetensors")
    seen.add(SafetensorsFolder(folder).fingerprint())
    (folder / "README.md").write_text("not part of the model")
    seen.add(SafetensorsFolder(folder).fingerprint())
    assert len(seen) == 4


def test_a_file_that_vanished_has_no_fingerprint(home: Path, small: Path) -> None:
    file = open_checkpoint(small)
    small.unlink()
    with pytest.raises(BadFile, match=r"small\.gguf: cannot be read to make its fingerprint"):
        file.fingerprint()


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_is_read_by_two_threads_in_little_time(default_model: Path) -> None:
    file = open_checkpoint(default_model)
    outs = {name: np.empty(info.shape, np.float32) for name, info in file.tensors.items()}
    start = time.process_time()  # of both threads, not the clock: a busy machine must not fail this
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: file.read(name, outs[name]), outs))
    assert time.process_time() - start < 2 * 1.5
    assert all(np.isfinite(out.sum()) for out in outs.values())
