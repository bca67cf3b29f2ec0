"""What is chosen for a GPU by its numbers (`Chip`), with the reason (E-82).

Capabilities are compared as numbers: (10, 0) is newer than (9, 0). Nothing is chosen by a chip's name, and nothing that
decides bits by the chip at all: how products are cut follows from the weight alone (`triton/tiles.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ostinato.backends.machine import OLDEST, PROGRAMS_PER_MULTIPROCESSOR, TUNED
from ostinato.backends.machine import Chip as Chip

TENSOR_CORES_SINCE: Final = OLDEST  # for bfloat16
TUNED_ON: Final = TUNED.capability  # where the table of tiles was measured


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
    fits = chip.shared_bytes >= TUNED.shared_bytes
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
            f"{chip.shared_bytes >> 10} kB; the tiles were tuned with {TUNED.shared_bytes >> 10} kB",
        ),
    )
