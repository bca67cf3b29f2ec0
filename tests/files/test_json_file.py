"""Text and JSON beside weights: what is read, and what must neither hang nor eat the memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ostinato.errors import BadFile
from ostinato.files.json_file import MAX_TEXT_BYTES, read_json_if_there, read_json_object, read_text


def test_an_object_is_read_and_an_absent_file_is_empty_where_it_may_be(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    assert read_json_if_there(path) == {}
    with pytest.raises(BadFile, match="no such file"):
        read_json_object(path)
    path.write_text('{"a": [1, {"b": "\u00e9"}]}')
    assert read_json_if_there(path) == read_json_object(path) == {"a": [1, {"b": "é"}]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"[1]", "is a JSON list, not an object"),
        (b'{"a": 1, "b": 2, "a": 3}', "the name 'a' is there twice"),
        (b'{"a": "\xff"}', "is not JSON"),
        (b'{"a": ' + b"[" * 200_000, "nested too deep"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "is not JSON"),
    ],
)
def test_what_is_no_json_object_is_refused_with_its_path(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    with pytest.raises(BadFile, match=f"wrong.json: .*{words}"):
        read_json_object(path)


def test_a_name_twice_among_very_many_is_found_at_once(tmp_path: Path) -> None:
    path = tmp_path / "many.json"
    path.write_text("{" + "".join(f'"{i}":0,' for i in range(200_000)) + '"199999":1}')
    started = time.process_time()
    with pytest.raises(BadFile, match="'199999' is there twice"):
        read_json_object(path)
    assert time.process_time() - started < 5


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    for read in (read_text, read_json_object, read_json_if_there):
        with pytest.raises(BadFile, match=r"config\.json: is not a regular file"):
            read(pipe)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # holes: no such disk is needed
    with pytest.raises(BadFile, match=f"has {1 << 40} bytes; more than {MAX_TEXT_BYTES} "):
        read_json_object(path)


def test_text_must_be_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(BadFile, match=r"template\.jinja: is not UTF-8"):
        read_text(path)
