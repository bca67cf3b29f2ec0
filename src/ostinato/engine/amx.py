"""bfloat16 on CPUs that announce AMX: some virtual machines do, and then refuse its instructions.

A refused instruction ends the process, so nothing of ours could report it. Before the first bfloat16 product a
child process tries one; where that dies, the matrix library is told to leave AMX alone. The finding is kept in the
store's folder, one try per CPU and version of torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from ostinato.files import store

LIMIT: Final = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX: Final = "AVX512_CORE_BF16"
TRY: Final = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"


def make_bfloat16_safe(talk: Callable[[str], None]) -> None:
    """Keep bfloat16 products off AMX where it is announced and does not work. The user's own setting is respected."""
    if LIMIT in os.environ or "amx_bf16" not in cpu_line("flags"):
        return
    key = f"{cpu_line('model name')}, torch {torch.__version__}"
    works = _remembered().get(key)
    if works is None:
        works = amx_works()
        _remember({**_remembered(), key: works})
    if not works:
        os.environ[LIMIT] = WITHOUT_AMX
        talk("this CPU announces AMX and does not carry it out; bfloat16 runs without it")


def amx_works() -> bool:
    """Whether a child process lives through a bfloat16 product."""
    try:
        return subprocess.run([sys.executable, "-c", TRY], capture_output=True, timeout=60, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def cpu_line(name: str) -> str:
    """What the system says of the first CPU; empty where it says nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


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
