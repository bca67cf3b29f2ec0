"""Where NVIDIA's compiler is: the machine's own, or the one that `make test-compilers` installs from PyPI."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

INSTALLED: Final = Path(sys.prefix) / "nvcc" / "nvidia"


def nvcc() -> list[str] | None:
    """The compiler, the machine's own first, and where its libraries are; None where there is none."""
    if own := shutil.which("nvcc"):
        return [own]
    ours = INSTALLED / "cu13"
    compiler = ours / "bin" / "nvcc"
    return [str(compiler), f"-L{ours / 'lib'}"] if compiler.exists() else None
