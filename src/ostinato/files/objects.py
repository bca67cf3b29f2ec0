"""Objects of a wheel: what each was made from, and whether the one that is there is that.

Nothing but the standard library here, and nothing of the package: the build of a wheel reads this file alone, by its
path. The native loop and the compiler of grammars are shipped so.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

UNIT: Final = ".cpp"  # what the names of translation units end with


def sources(*folders: Path) -> dict[str, str]:
    """Every translation unit and every header, by name."""
    paths = sorted(path for folder in folders for path in (*folder.glob(f"*{UNIT}"), *folder.glob("*.h")))
    return {path.name: path.read_text("utf-8") for path in paths}


def sum_of(texts: dict[str, str], flags: Sequence[str]) -> str:
    """What an object was made from: sources, and the flags that it was made with."""
    total = sha256()
    for piece in (*flags, "", *(text for pair in sorted(texts.items()) for text in pair)):
        encoded = piece.encode()
        total.update(len(encoded).to_bytes(8, "little"))  # or "a" and "bc" would be "ab" and "c"
        total.update(encoded)
    return total.hexdigest()


def write_sums(made: Path, made_from: str) -> None:
    """Beside an object: what it was made from, and its own sum."""
    made.with_suffix(".sum").write_text(f"{made_from}\n{sha256(made.read_bytes()).hexdigest()}\n", "utf-8")


def prebuilt(path: Path, made_from: str) -> tuple[Path | None, str | None]:
    """An object of the wheel, if it is whole and made from these sources; else why not, if there is one."""
    if not path.is_file():
        return None, None
    try:
        was_made_from, own = path.with_suffix(".sum").read_text("utf-8").split()
        if own != sha256(path.read_bytes()).hexdigest():
            return None, f"the prebuilt object {path.name} is damaged"
    except (OSError, ValueError):
        return None, f"the prebuilt object {path.name} cannot be read"
    if was_made_from != made_from:
        return None, f"the prebuilt object {path.name} was made from other sources"
    return path, None
