"""The modules of a sentence-transformers folder, which modules.json lists in the order in which they run, and where
each keeps its files. Which of them are supported is said in `models/pooling.py`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ostinato.errors import BadFile
from ostinato.files.json_file import read_text

MODULES_FILE: Final = "modules.json"
_OWN: Final = "sentence_transformers."


@dataclass(frozen=True, slots=True)
class TextModule:
    """One step from a text to its vector."""

    kind: str  # Transformer, Pooling, Dense, ...; of another package's class, with the package
    path: str  # its folder inside the model's; empty: the model's own


def modules_of(folder: Path) -> tuple[TextModule, ...]:
    """What modules.json lists; nothing where the folder has none."""
    path = folder / MODULES_FILE
    if not os.path.exists(path):
        return ()
    try:
        stated = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path}: is not JSON: {str(error)[:200]}; fetch it again") from None
    if not isinstance(stated, list):
        raise BadFile(f"{path}: is a JSON {type(stated).__name__}, not a list of modules; fetch it again")
    return tuple(_module(one, f"{path}: module {number}") for number, one in enumerate(stated))


def config_of(folder: Path, kind: str) -> Path:
    """The settings of the first module of a kind; without a modules.json, where sentence-transformers writes them."""
    found = (one.path for one in modules_of(folder) if one.kind == kind)
    return folder / next(found, f"1_{kind}") / "config.json"


def _module(stated: Any, where: str) -> TextModule:
    stated = stated if isinstance(stated, dict) else {}
    kind, path = stated.get("type"), stated.get("path")
    if not isinstance(kind, str) or not isinstance(path, str):
        raise BadFile(f"{where} must be an object whose type and path are texts; fetch the file again")
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or {"\\", "\0"} & set(path):
        raise BadFile(f"{where} has the path {path[:80]!r}; it must name a folder inside the model's")
    return TextModule(kind.rpartition(".")[2] if kind.startswith(_OWN) else kind, "/".join(parts))
