"""The C++ headers of the decode loop that several backends compile: the step boundary, and the layout of its tables."""

from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent


def source(name: str) -> str:
    """A header of this folder, by its file name."""
    return (FOLDER / name).read_text("utf-8")
