"""A folder full of traps: a file for every module that a process of ours might import, each of which tells on it."""

import subprocess
import sys
from pathlib import Path

LIBRARIES = ("numpy", "torch", "ray", "jinja2", "tokenizers", "typer", "msgspec", "rich", "pip", "gguf", "ostinato")
TRAP = """
with open({log!r}, "a") as log:
    log.write("{name}\\n")
raise ImportError("the trap {name} was imported")
"""


class Traps:
    """The folder, and the traps that were imported since it was made."""

    def __init__(self, folder: Path, spared: frozenset[str] = frozenset()) -> None:
        self.folder, self._log = folder, folder / "log"
        for name in {*sys.stdlib_module_names, *LIBRARIES} - spared:
            (folder / f"{name}.py").write_text(TRAP.format(log=str(self._log), name=name))

    def sprung(self) -> list[str]:
        return sorted(set(self._log.read_text().split())) if self._log.exists() else []


def loaded_by_m() -> frozenset[str]:
    """What Python itself imports before it runs a module that `-m` names: no program can do anything about these."""
    code = "import runpy, sys; print(*sys.modules)"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return frozenset(name.split(".")[0] for name in asked.stdout.split())
