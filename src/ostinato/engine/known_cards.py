"""What is known of GPUs by their compute capability: where our kernels ran, and where they were only compiled.

`ostinato doctor --cards` prints this table, and README.md has the same. Nothing is decided by a card's name; the
examples are for readers. The chooser takes `persistent` unasked only where it ran (docs/tape.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class KnownCards:
    """The cards of one compute capability."""

    examples: str
    date: str  # of the last run, or of the last compile
    ran_on: str | None = None  # the card on which every mode ran; None: the kernels were only compiled

    @property
    def state(self) -> str:
        return "compiled" if self.ran_on is None else f"ran on an {self.ran_on}"


KNOWN: Final[Mapping[tuple[int, int], KnownCards]] = MappingProxyType(
    {
        (8, 0): KnownCards("A100, A30", "2026-11-16"),
        (8, 6): KnownCards("RTX 3060 to 3090, A10, A40, RTX A6000", "2026-11-16"),
        (8, 7): KnownCards("Jetson Orin", "2026-11-16"),
        (8, 9): KnownCards("RTX 4060 to 4090, L4, L40S", "2026-11-16"),
        (9, 0): KnownCards("H100, H200, GH200", "2026-11-16", ran_on="H200"),
        (10, 0): KnownCards("B200, GB200", "2026-11-16"),
        (10, 3): KnownCards("B300, GB300", "2026-11-16"),
        (12, 0): KnownCards("RTX 5060 to 5090, RTX PRO 6000", "2026-11-16"),
        (12, 1): KnownCards("GB10 (DGX Spark)", "2026-11-16"),
    }
)


def has_run(capability: tuple[int, int]) -> bool:
    """Whether our kernels ran on such a card, and were not only compiled for it."""
    return capability in KNOWN and KNOWN[capability].ran_on is not None
