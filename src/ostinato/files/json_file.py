"""The small files beside weights: text and JSON objects, with one set of limits for every package that reads them.

Only regular files are opened, so a pipe cannot block, and only up to a size, so that memory use is bounded. Text that
is not UTF-8, JSON too deep, with a name twice or that is no object is a BadFile with the path.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, Final

from ostinato.errors import BadFile
from ostinato.files.mapped import opened

MAX_TEXT_BYTES: Final = 1 << 25

_AGAIN = "the file is damaged or cut off: fetch it again"


def read_bytes(path: Path, *, most: int = MAX_TEXT_BYTES) -> bytes:
    """The content of a file of at most `most` bytes."""
    with opened(path) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if n_bytes > most:
            raise BadFile(f"{path}: has {n_bytes} bytes; more than {most} of such a file are not read")
        return file.read(n_bytes)


def read_text(path: Path, *, most: int = MAX_TEXT_BYTES) -> str:
    """A text file of at most `most` bytes, in UTF-8."""
    try:
        return read_bytes(path, most=most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadFile(f"{path}: is not UTF-8: {error}; {_AGAIN}") from None


def read_json_object(path: Path, *, most: int = MAX_TEXT_BYTES) -> dict[str, Any]:
    """The JSON object in a file."""
    return parse_json_object(read_bytes(path, most=most), os.fspath(path))


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The JSON object in an optional file of a folder; empty if the file does not exist."""
    return read_json_object(path) if os.path.exists(path) else {}


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object, each name once; BadFile, beginning with `where`, for anything else."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise BadFile(f"{where}: the name {twice[:120]!r} is there twice; {_AGAIN}")
        return found

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except RecursionError:
        raise BadFile(f"{where}: its JSON is nested too deep; {_AGAIN}") from None
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise BadFile(f"{where}: is not JSON: {str(error)[:200]}; {_AGAIN}") from None
    if not isinstance(parsed, dict):
        raise BadFile(f"{where}: is a JSON {type(parsed).__name__}, not an object; {_AGAIN}")
    return parsed
