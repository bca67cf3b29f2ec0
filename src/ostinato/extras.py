"""The optional parts of the package: the modules that each brings, and what to type where one is not installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ostinato.errors import HardwareCannot

# Those of pyproject.toml that are imported by name. `gpu` holds torch too, and `scale` holds `serve`.
PACKAGES: Final = {
    "torch": ("torch",),
    "gpu": ("torch", "triton", "cuda-core", "cuda-bindings"),
    "serve": ("fastapi", "uvicorn", "prometheus-client", "msgspec", "llguidance"),
    "scale": ("ray",),
    "lab": ("matplotlib",),
}
_MODULES: Final = {"cuda-core": "cuda.core", "cuda-bindings": "cuda.bindings", "prometheus-client": "prometheus_client"}
_CHECKOUT: Final = Path(__file__).parents[2]
_NVIDIA: Final = Path("/proc/driver/nvidia")
# pip takes torch's CUDA build on Linux; uv chooses the build by a word.
_CPU_TORCH: Final = "pip install uv && uv pip install --torch-backend cpu torch"


class MissingExtra(HardwareCannot):
    """What was asked for needs an extra that is not installed."""


def missing(extra: str, packages: Sequence[str] = ()) -> tuple[str, ...]:
    """The packages of an extra, or those named of them, that are not installed."""
    return tuple(name for name in packages or PACKAGES[extra] if not _is_here(_MODULES.get(name, name)))


def why_missing(extra: str, what: str, *packages: str) -> str | None:
    """The sentence for somebody who asked for `what`; None where the extra, or these packages of it, are installed."""
    lacking = missing(extra, packages)
    if not lacking:
        return None
    cpu = ""
    if "torch" in lacking and extra == "torch" and sys.platform == "linux" and not _NVIDIA.exists():
        cpu = f"; that brings about 3 GB of CUDA packages, unless you install the CPU build first: {_CPU_TORCH}"
    return f"{what} needs {', '.join(lacking)}, which is not installed; type: {install_command(extra)}{cpu}"


def check_extra(extra: str, what: str, *packages: str) -> None:
    """Refuse `what` where its extra, or these packages of it, are not installed."""
    if (why := why_missing(extra, what, *packages)) is not None:
        raise MissingExtra(why)


def install_command(extra: str) -> str:
    """What installs an extra beside this package, from its checkout where it runs from one."""
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"{sys.executable} -m pip install --editable '{_CHECKOUT}[{extra}]'"
    return f"{sys.executable} -m pip install 'ostinato[{extra}]'"


def _is_here(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # not even the package that it would be in
        return False
