"""The optional parts of the package: the modules that each brings, and what to type where one is not installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ostinato.errors import HardwareCannot

# Those of pyproject.toml that are imported by name.
_SERVE: Final = ("fastapi", "uvicorn", "prometheus-client", "msgspec", "llguidance")
PACKAGES: Final = {
    "torch": ("torch",),
    "gpu": ("torch", "triton", "cuda-core", "cuda-bindings"),
    "serve": _SERVE,
    "scale": ("ray", *_SERVE),
    "lab": ("matplotlib",),
}
_MODULES: Final = {"cuda-core": "cuda.core", "cuda-bindings": "cuda.bindings", "prometheus-client": "prometheus_client"}
_LACKING: Final = re.compile(r".*?(needs [^;]+), which (?:is|are) not installed; type: (.*)")
_CHECKOUT: Final = Path(__file__).parents[2]
_NVIDIA: Final = Path("/proc/driver/nvidia")


def missing(extra: str, packages: Sequence[str] = ()) -> tuple[str, ...]:
    """The packages of an extra, or those named of them, that are not installed."""
    return tuple(name for name in packages or PACKAGES[extra] if not _is_installed(_MODULES.get(name, name)))


def why_missing(extra: str, what: str, *packages: str) -> str | None:
    """The message that `what` needs this extra; None where it, or these packages of it, are installed."""
    lacking = missing(extra, packages)
    if not lacking:
        return None
    are = "is" if len(lacking) == 1 else "are"
    said = f"{what} needs {', '.join(lacking)}, which {are} not installed; type: {install_command(extra)}"
    if "torch" in lacking and extra == "torch" and sys.platform == "linux" and not _NVIDIA.exists():
        said += f", which brings about 3 GB of CUDA packages; without them: {cpu_install_command(extra)}"
    return said


def without_command(why: str) -> tuple[str, str | None]:
    """A reason for a cell of a table: `needs PACKAGES` of a message of `why_missing`, and apart from it what to type;
    other reasons as they are.

    >>> without_command("it needs torch, which is not installed; type: pip install torch")
    ('needs torch', 'pip install torch')
    >>> without_command("there is no NVIDIA driver")
    ('there is no NVIDIA driver', None)
    """
    found = _LACKING.fullmatch(why)
    return (why, None) if found is None else (found[1], found[2])


def check_extra(extra: str, what: str, *packages: str) -> None:
    """Refuse `what` where its extra, or these packages of it, are not installed."""
    if (why := why_missing(extra, what, *packages)) is not None:
        raise HardwareCannot(why)


def check_llguidance(what: str) -> None:
    """Refuse a constraint that only llguidance can read where it is not installed."""
    check_extra("serve", what, "llguidance")


def install_command(extra: str) -> str:
    """What installs an extra beside this package, from its checkout where it runs from one."""
    return f"{sys.executable} -m pip install {_package(extra)}"


def cpu_install_command(extra: str) -> str:
    """The same with the CPU build of torch: pip takes the CUDA build on Linux, and uv the one that is named."""
    python = sys.executable
    return f"{python} -m pip install uv && {python} -m uv pip install --torch-backend cpu {_package(extra)}"


def gpu_install_command() -> str:
    """What installs the extra `gpu` with the build of torch that this machine's driver can run: pip keeps any build
    that is there, and takes the newest CUDA otherwise; uv asks the driver."""
    python = sys.executable
    to = f"--torch-backend auto --reinstall-package torch {_package('gpu')}"
    return f"{python} -m pip install uv && {python} -m uv pip install {to}"


def _package(extra: str) -> str:
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"--editable '{_CHECKOUT}[{extra}]'"
    return f"'ostinato[{extra}]'"


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # not even the package that it would be in
        return False
