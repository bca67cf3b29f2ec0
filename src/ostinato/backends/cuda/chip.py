"""What a GPU is, in the numbers that kernels are chosen by, and what is chosen for it, with the reason (E-82).

Capabilities are compared as numbers: (10, 0) is newer than (9, 0). Nothing is chosen by a chip's name, and nothing that
decides bits by the chip at all: how products are cut follows from the weight alone (`triton/tiles.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

PROGRAMS_PER_MULTIPROCESSOR: Final = 4  # of a step's attention; their number changes its speed and no bit
TENSOR_CORES_SINCE: Final = (8, 0)  # for bfloat16
TUNED_ON: Final = (9, 0)  # where the table of tiles was measured
TUNED_SHARED_BYTES: Final = 227 << 10  # and what its tiles may take of a block's shared memory


@dataclass(frozen=True, slots=True)
class Chip:
    """One GPU."""

    capability: tuple[int, int]
    n_multiprocessors: int
    shared_bytes: int  # that one block may have
    l2_bytes: int

    @staticmethod
    def of(device: torch.device | int) -> Chip:
        found: Any = torch.cuda.get_device_properties(device)
        shared = getattr(found, "shared_memory_per_block_optin", TUNED_SHARED_BYTES)
        cache = getattr(found, "L2_cache_size", 0)
        return Chip((found.major, found.minor), found.multi_processor_count, int(shared), int(cache))

    @property
    def arch(self) -> str:
        """What NVRTC compiles for."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def exact_arch(self) -> str:
        """The same with what only this very chip has: a binary for it runs on no later one."""
        return f"{self.arch}a"

    @property
    def attention_programs(self) -> int:
        return PROGRAMS_PER_MULTIPROCESSOR * self.n_multiprocessors


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """One thing that was chosen, and why."""

    what: str
    choice: str
    reason: str


def choices(chip: Chip) -> tuple[KernelChoice, ...]:
    """What is chosen for a chip."""
    major, minor = chip.capability
    has_cores = chip.capability >= TENSOR_CORES_SINCE
    since = f"{TENSOR_CORES_SINCE[0]}.{TENSOR_CORES_SINCE[1]}"
    tuned = f"{TUNED_ON[0]}.{TUNED_ON[1]}"
    fits = chip.shared_bytes >= TUNED_SHARED_BYTES
    return (
        KernelChoice("step boundary", f"compiled for {chip.arch}", f"the chip's capability is {major}.{minor}"),
        KernelChoice(
            "attention in a step",
            f"{chip.attention_programs} programs",
            f"{PROGRAMS_PER_MULTIPROCESSOR} for each of {chip.n_multiprocessors} multiprocessors; no bit depends on it",
        ),
        KernelChoice(
            "products of bfloat16",
            "tensor cores" if has_cores else "float32 units",
            f"capability {major}.{minor}; tensor cores know bfloat16 since {since}",
        ),
        KernelChoice(
            "tiles of products",
            "by type and shape" + ("" if chip.capability == TUNED_ON else f", as tuned for capability {tuned}"),
            "the cut decides the bits, so no chip changes it",
        ),
        KernelChoice(
            "shared memory of a block",
            "enough for every tile" if fits else "some tiles may be refused when they are loaded",
            f"{chip.shared_bytes >> 10} kB; the tiles were tuned with {TUNED_SHARED_BYTES >> 10} kB",
        ),
    )
