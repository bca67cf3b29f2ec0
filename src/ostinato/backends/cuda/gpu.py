"""What torch tells about the GPUs of this machine."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from ostinato.backends.machine import PRETENDED, TUNED, Chip, pretended

Gpu = torch.device | str | int


def is_usable() -> bool:
    """Whether torch can use a GPU here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what `engine/machine.py` gives as the reason
        return torch.cuda.is_available()


def built_for() -> str | None:
    """The CUDA version that this build of torch is for; None of a build without CUDA."""
    return torch.version.cuda


def archs() -> list[str]:
    """What torch's own kernels are compiled for: sm_90 is for one chip and its kin, compute_90 for all later ones."""
    return list(torch.cuda.get_arch_list())


def count() -> int:
    return torch.cuda.device_count()


def index_of(name: str) -> int:
    """The number of a GPU: `cuda` is the first."""
    return torch.device(name).index or 0


def chip_of(gpu: Gpu) -> Chip:
    """What the device reports of itself; the chip that OSTINATO_CHIP names, where it does."""
    found: Any = torch.cuda.get_device_properties(gpu)
    shared = getattr(found, "shared_memory_per_block_optin", TUNED.shared_bytes)
    chip = Chip((found.major, found.minor), found.multi_processor_count, int(shared), has_ptx=torch.version.hip is None)
    name = os.environ.get(PRETENDED)
    return pretended(chip, name) if name else chip


def name_of(gpu: Gpu) -> str:
    return torch.cuda.get_device_name(gpu)


def memory_of(gpu: Gpu) -> tuple[int, int]:
    """Bytes that can be had now, and in all."""
    free, total = torch.cuda.mem_get_info(gpu)
    return free, total
