"""The sha256 of a model's files; hashes are cached by path, size and time.

The cache is a small JSON file in the store's home; if it cannot be read or written, hashes are computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ostinato.errors import BadFile
from ostinato.files.store import home, write_whole

_MAX_REMEMBERED = 512


def fingerprint_of(paths: Sequence[Path]) -> str:
    """The sha256 of one file; of several, the sha256 over lines of hashes and names in the order given."""
    memory = _recall()
    before = dict(memory)
    sums = [_sum(path, memory) for path in paths]
    if memory != before:
        _remember(memory)
    if len(sums) == 1:
        return sums[0]
    lines = "".join(f"{digest}  {path.name}\n" for path, digest in zip(paths, sums, strict=True))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def _sum(path: Path, memory: dict[str, Any]) -> str:
    try:
        resolved = path.resolve()
        found = resolved.stat()
        key, now = str(resolved), [found.st_size, found.st_mtime_ns]
        known = memory.get(key)
        if isinstance(known, list) and known[:2] == now and len(known) == 3 and _is_digest(known[2]):
            return str(known[2])
        with resolved.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise BadFile(f"{path}: cannot be read to make its fingerprint: {error}") from None
    memory[key] = [*now, digest]
    return digest


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and all(c in "0123456789abcdef" for c in value)


def _memory_file() -> Path:
    return home() / "fingerprints.json"


def _recall() -> dict[str, Any]:
    try:
        known = json.loads(_memory_file().read_bytes())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home folder, or JSON nested too deep
        return {}
    return known if isinstance(known, dict) else {}


def _remember(memory: dict[str, Any]) -> None:
    """Write the cache; the newest entries are kept."""
    newest = dict(list(memory.items())[-_MAX_REMEMBERED:])
    with suppress(OSError, ValueError, RuntimeError):  # ValueError: a path that no text encoding holds
        write_whole(_memory_file(), json.dumps(newest).encode())
