"""bfloat16 on CPUs that announce AMX: some virtual machines do, and then refuse its instructions.

A refused instruction ends the process, so nothing of ours could report it. Before the first bfloat16 product a
child process tries one, and the finding is kept in the store's folder. Where AMX fails, torch's matrix library is
told not to use it, which has an effect only before its first use: `limit_early` does that from the second process on.
If it may be too late in a process, that process runs without the library, slowly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ostinato.backends.machine import cpu_line, package_version
from ostinato.files import store
from ostinato.processes import python_command

LIMIT: Final = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX: Final = "AVX512_CORE_BF16"
TRY: Final = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"


def limit_early() -> None:
    """Where AMX is known to fail and torch is not loaded yet, keep it off for this process."""
    known = {} if "torch" in sys.modules or LIMIT in os.environ else _remembered()
    if known and known.get(_this_cpu()) is False:
        os.environ[LIMIT] = WITHOUT_AMX


def make_bfloat16_safe(talk: Callable[[str], None]) -> None:
    """Make sure that a bfloat16 product cannot end the process. A limit that is set already is respected."""
    if LIMIT in os.environ or "amx_bf16" not in cpu_line("flags"):
        return
    works = _remembered().get(_this_cpu())
    if works is None:
        works = amx_works()
        _remember({**_remembered(), _this_cpu(): works})
    if not works:
        import torch

        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        talk(
            "this CPU announces AMX and does not carry it out; bfloat16 prompts run slowly in this process, "
            f"and faster in one that begins with {LIMIT}={WITHOUT_AMX} or with `from ostinato import LLM` before torch"
        )


def amx_works() -> bool:
    """Whether a child process lives through a bfloat16 product."""
    try:
        return not subprocess.run(python_command("-c", TRY), capture_output=True, timeout=60, check=False).returncode
    except subprocess.TimeoutExpired:
        return False


def _this_cpu() -> str:
    return f"{cpu_line('model name')}, torch {package_version('torch')}"


def _note() -> Path:
    return store.home() / "amx.json"


def _remembered() -> dict[str, bool]:
    try:
        found = json.loads(_note().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(findings: dict[str, bool]) -> None:
    try:
        _note().parent.mkdir(parents=True, exist_ok=True)
        _note().write_text(json.dumps(findings))
    except OSError:
        return  # tried again next time
