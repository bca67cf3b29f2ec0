"""What torch tells about the GPUs of this machine."""

from __future__ import annotations

import os
from typing import Any

import torch

from ostinato.backends.machine import PRETENDED, TUNED, Chip, pretended

Gpu = torch.device | str | int


def why_none() -> str | None:
    """Why no GPU can be used here; None where one can."""
    if torch.cuda.is_available():
        return None
    return "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no NVIDIA driver or no GPU"


def count() -> int:
    return torch.cuda.device_count()


def index_of(name: str) -> int:
    """The number of a GPU: `cuda` is the first."""
    return torch.device(name).index or 0


def chip_of(gpu: Gpu) -> Chip:
    """What the device reports of itself; the chip that OSTINATO_CHIP names, where it does."""
    found: Any = torch.cuda.get_device_properties(gpu)
    shared = getattr(found, "shared_memory_per_block_optin", TUNED.shared_bytes)
    chip = Chip((found.major, found.minor), found.multi_processor_count, int(shared))
    name = os.environ.get(PRETENDED)
    return pretended(chip, name) if name else chip


def name_of(gpu: Gpu) -> str:
    return torch.cuda.get_device_name(gpu)


def memory_of(gpu: Gpu) -> tuple[int, int]:
    """Bytes that can be had now, and in all."""
    free, total = torch.cuda.mem_get_info(gpu)
    return free, total
